"""Builds the native library of served models. pyproject.toml has the metadata, and
setup.cfg names the files of the package.
"""

import glob
import os
import sys

from setuptools import Extension, setup

# The repository, or in an sdist the folder with the files of the repository that the
# library is made of too.
CORE = ".." if os.path.exists("../packaging/native_build.py") else "core"
sys.path.insert(0, os.path.abspath(f"{CORE}/packaging"))
from native_build import FLAGS, BuildOnTorch, WithCore  # noqa: E402

CSRC = f"{CORE}/torchrec_recstore/csrc"
OWN = "torchrec_recstore_serving/csrc"
SERVICE = f"{CORE}/service/torchrec_recstore_service"
# The parts of the core that the library contains: the search of the index, and memory.
# And the parts of the service: connections for rows, and their messages.
SHARED = sorted(
    [
        *glob.glob(f"{CSRC}/row_loops/row_loops*.cpp"),
        *(f"{CSRC}/base/{name}.cpp" for name in ("memory", "buffer_pool")),
        *(f"{SERVICE}/csrc/{name}.cpp" for name in ("row_messages", "tcp", "tls")),
    ]
)
SHARED_HEADERS = [
    *glob.glob(f"{CSRC}/*/*.[hi]*"),
    *(
        f"{SERVICE}/csrc/{name}.h"
        for name in ("message_fields", "row_messages", "status", "tcp", "tls")
    ),
]
HEADERS = sorted([*SHARED_HEADERS, *glob.glob(f"{OWN}/**/*.h", recursive=True)])


class Sdist(WithCore):
    core, core_files = CORE, (*SHARED, *SHARED_HEADERS)


class BuildServing(BuildOnTorch):
    # torch's headers need C++20 from 2.14 on, and GCC 12 warns about them.
    ops_flags = (*BuildOnTorch.ops_flags, "-std=c++20", "-Wno-stringop-overflow")


setup(
    ext_modules=[
        # The library has no code of Python. torch's stable ABI has no classes, so the
        # library fits only the minor version of torch that it is built with;
        # torchrec_recstore_serving/export/native_library.py checks this.
        Extension(
            "torchrec_recstore_serving._serving",
            SHARED + sorted(glob.glob(f"{OWN}/**/*.cpp", recursive=True)),
            include_dirs=[CSRC, f"{SERVICE}/csrc"],
            depends=HEADERS,
            extra_compile_args=list(FLAGS),
            define_macros=[("RECSTORE_READS_ONLY", None)],
            libraries=["torch", "torch_cpu", "c10", "dl"],
            py_limited_api=True,
        ),
    ],
    cmdclass={"build_ext": BuildServing, "sdist": Sdist},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
