"""Builds the native library of served models; setup.cfg has all other settings."""

import glob
import os
import shutil
import sys

from setuptools import Extension, setup
from setuptools.command.sdist import sdist

# The repository, or in an sdist the folder with the files of the repository that the library is made of too.
CORE = ".." if os.path.exists("../native_build.py") else "core"
sys.path.insert(0, os.path.abspath(CORE))
from native_build import FLAGS, BuildOnTorch  # noqa: E402

CSRC = f"{CORE}/torchrec_recstore/csrc"
OWN = "torchrec_recstore_serving/csrc"
# The parts of the core that the library contains: the search of the index, and memory.
SHARED = sorted([*glob.glob(f"{CSRC}/row_kernels*.cpp"), f"{CSRC}/memory.cpp", f"{CSRC}/buffer_pool.cpp"])
HEADERS = sorted([*glob.glob(f"{CSRC}/*.[hi]*"), *glob.glob(f"{OWN}/**/*.h", recursive=True)])


class WithCore(sdist):
    """Adds the files of the repository that the library is made of."""

    def make_release_tree(self, base_dir: str, files: "list[str]") -> None:
        # The release tree would have the sources of the core beside itself, in the checkout.
        super().make_release_tree(base_dir, [path for path in files if not path.startswith("..")])
        for path in (f"{CORE}/native_build.py", *SHARED, *glob.glob(f"{CSRC}/*.[hi]*")):
            target = os.path.join(base_dir, "core", os.path.relpath(path, CORE))
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copy(path, target)


setup(
    ext_modules=[
        # The library has no code of Python. torch's stable ABI has no classes, so the library fits only the minor
        # version of torch that it is built with; torchrec_recstore_serving/library.py checks this.
        Extension(
            "torchrec_recstore_serving._serving",
            SHARED + sorted(glob.glob(f"{OWN}/**/*.cpp", recursive=True)),
            include_dirs=[CSRC],
            depends=HEADERS,
            # torch's headers need C++20 from 2.14 on, and GCC 12 warns about them.
            extra_compile_args=[*FLAGS, "-std=c++20", "-Wno-stringop-overflow"],
            libraries=["torch", "torch_cpu", "c10"],
            py_limited_api=True,
        ),
    ],
    cmdclass={"build_ext": BuildOnTorch, "sdist": WithCore},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
