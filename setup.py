"""Builds the native extension and adds the scripts that `recstore` runs. pyproject.toml
has the metadata, and setup.cfg names the files of the package.
"""

import glob
import os
import shutil
import sys

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

sys.path.insert(0, os.path.abspath("packaging"))
from native_build import FLAGS, BuildOnTorch


class ShipScripts(build_py):
    """Copies the scripts of `recstore train` and `recstore bench` into the package.

    An editable installation does not need the copies, because the scripts are next to
    the package.
    """

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        # The figures beside the benchmarks are not shipped.
        ignored = {"examples": ["__pycache__"], "benchmarks": ["__pycache__", "*.json"]}
        for folder, patterns in ignored.items():
            target = os.path.join(self.build_lib, "torchrec_recstore", folder)
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(folder, target, ignore=shutil.ignore_patterns(*patterns))


CSRC = "torchrec_recstore/csrc"
setup(
    ext_modules=[
        Extension(
            "torchrec_recstore._C",
            sorted(glob.glob(f"{CSRC}/*/*.cpp")),
            include_dirs=[CSRC],
            depends=sorted(glob.glob(f"{CSRC}/*/*.[hi]*")),
            extra_compile_args=list(FLAGS),
            libraries=["torch", "torch_cpu", "c10", "dl"],
            define_macros=[
                ("Py_LIMITED_API", "0x030a0000"),
                # torch 2.11: the first stable ABI in which from_blob() takes a deleter,
                # which recycles the outputs.
                ("TORCH_TARGET_VERSION", "0x020b000000000000"),
            ],
            py_limited_api=True,
        ),
    ],
    cmdclass={"build_ext": BuildOnTorch, "build_py": ShipScripts},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
