"""Builds the native extension, ships what `recstore` runs; everything else stands in setup.cfg."""

import glob
import importlib.util
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

FLAGS = [
    "-std=c++17",
    "-O3",
    # Three instruction sets are compiled in and one is chosen at load, so no -march here; without
    # contraction into fused multiply-adds they give the same bits.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-g0",  # the interpreter's own flags may ask for debug information: nine tenths of the library
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-ignored-attributes",
    "-Wno-unused-parameter",
]


class BuildOnTorch(build_ext):
    """Finds torch's headers when the extension is compiled, so that metadata and sdist need no torch."""

    def build_extensions(self) -> None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            raise SystemExit(
                "building torchrec_recstore needs torch: install requirements/base.txt first, "
                "then build with `pip install --no-build-isolation` or `python -m build --no-isolation`"
            )
        root = os.path.dirname(spec.origin)
        for extension in self.extensions:
            extension.extra_compile_args += ["-isystem", os.path.join(root, "include")]
            extension.library_dirs.append(os.path.join(root, "lib"))
        # One compiler a core: setuptools compiles the files of an extension one after the other.
        compile_files = self.compiler.compile
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            self.compiler.compile = lambda files, **options: [
                made for each in pool.map(lambda file: compile_files([file], **options), files) for made in each
            ]
            super().build_extensions()


class ShipScripts(build_py):
    """Puts what `recstore train` and `recstore bench` run into the package; an editable one finds them beside it."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder in ("examples", "benchmarks"):
            target = os.path.join(self.build_lib, "torchrec_recstore", folder)
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(folder, target, ignore=shutil.ignore_patterns("__pycache__", "results.json"))


setup(
    ext_modules=[
        Extension(
            "torchrec_recstore._C",
            sorted(glob.glob("torchrec_recstore/csrc/*.cpp")),
            depends=sorted(glob.glob("torchrec_recstore/csrc/*.h") + glob.glob("torchrec_recstore/csrc/*.inl")),
            extra_compile_args=FLAGS,
            libraries=["torch", "torch_cpu", "c10"],
            define_macros=[
                ("Py_LIMITED_API", "0x030a0000"),
                # torch 2.11: the first stable ABI whose from_blob takes a deleter, by which outputs are recycled.
                ("TORCH_TARGET_VERSION", "0x020b000000000000"),
            ],
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildOnTorch, "build_py": ShipScripts},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
