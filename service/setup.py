"""Builds the native path of rows; setup.cfg has all other settings."""

import glob
import os
import shutil
import sys

from setuptools import Extension, setup
from setuptools.command.sdist import sdist

# The repository, or in an sdist the folder with the files of the repository that the library is made of too.
CORE = ".." if os.path.exists("../native_build.py") else "core"
sys.path.insert(0, os.path.abspath(CORE))
from native_build import FLAGS  # noqa: E402

API = "torchrec_recstore/csrc/row_api.h"
OWN = "torchrec_recstore_service/csrc"


class WithApi(sdist):
    """Adds the files of the repository that the library is made of."""

    def make_release_tree(self, base_dir: str, files: "list[str]") -> None:
        super().make_release_tree(base_dir, files)
        for path in ("native_build.py", API):
            target = os.path.join(base_dir, "core", path)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copy(os.path.join(CORE, path), target)


setup(
    ext_modules=[
        # The library has no code of Python and none of torch: it calls the core by the table of functions in row_api.h.
        Extension(
            "torchrec_recstore_service._rows",
            sorted(glob.glob(f"{OWN}/*.cpp")),
            include_dirs=[os.path.dirname(f"{CORE}/{API}")],
            depends=[f"{CORE}/{API}", *sorted(glob.glob(f"{OWN}/*.h"))],
            extra_compile_args=list(FLAGS),
            libraries=["dl", "pthread"],
            py_limited_api=True,
        ),
    ],
    cmdclass={"sdist": WithApi},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
