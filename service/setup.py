"""Builds the native path of rows. pyproject.toml has the metadata, and setup.cfg names
the files of the package.
"""

import glob
import os
import sys

from setuptools import Extension, setup

# The repository, or in an sdist the folder with the files of the repository that the
# library is made of too.
CORE = ".." if os.path.exists("../packaging/native_build.py") else "core"
sys.path.insert(0, os.path.abspath(f"{CORE}/packaging"))
from native_build import FLAGS, WithCore  # noqa: E402

CSRC = f"{CORE}/torchrec_recstore/csrc"
OWN = "torchrec_recstore_service/csrc"
# The parts of the core that the library contains: memory.
SHARED = [f"{CSRC}/base/memory.cpp", f"{CSRC}/base/buffer_pool.cpp"]
HEADERS = [
    f"{CSRC}/{name}.h"
    for name in ("base/buffer_pool", "base/error", "base/memory", "ops/row_api")
]


class Sdist(WithCore):
    core = CORE
    core_files = (*SHARED, *HEADERS)


setup(
    ext_modules=[
        # The library has no code of Python and none of torch: it calls the core by the
        # table of functions in row_api.h.
        Extension(
            "torchrec_recstore_service._rows",
            [*SHARED, *sorted(glob.glob(f"{OWN}/*.cpp"))],
            include_dirs=[CSRC],
            depends=[*HEADERS, *sorted(glob.glob(f"{OWN}/*.h"))],
            extra_compile_args=list(FLAGS),
            libraries=["dl", "pthread"],
            py_limited_api=True,
        ),
    ],
    cmdclass={"sdist": Sdist},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
