"""Builds the native extension, ships what `recstore` runs; everything else stands in setup.cfg."""

import glob
import importlib.util
import os
import shutil
import subprocess
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


def torch_folder() -> "str | None":
    """Where torch is: in this environment, or in that of the `build` or `pip` that has made an isolated one.

    It is no requirement of the build, since pip would take it for one of its own choice, with several GB of CUDA; a
    library on the stable ABI fits the torch it was built on and later ones.
    """
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        return os.path.dirname(spec.origin)
    with open(f"/proc/{os.getppid()}/cmdline", "rb") as file:
        builder = os.fsdecode(file.read().split(b"\0")[0])
    # An isolated environment puts its own packages first by PYTHONPATH or PATH; the builder's are asked for here.
    asked = [builder, "-I", "-c", "import importlib.util; print(importlib.util.find_spec('torch').origin)"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    return os.path.dirname(answer.stdout.strip()) if answer.returncode == 0 else None


class BuildOnTorch(build_ext):
    """Finds torch's headers when the extension is compiled, so that metadata and sdist need no torch."""

    def build_extensions(self) -> None:
        root = torch_folder()
        if root is None:
            raise SystemExit(
                "building torchrec_recstore needs torch in the Python that builds: install requirements/base.txt first"
            )
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
            sorted(glob.glob("torchrec_recstore/csrc/**/*.cpp", recursive=True)),
            depends=sorted(glob.glob("torchrec_recstore/csrc/**/*.[hi]*", recursive=True)),
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
