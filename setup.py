"""Builds the native extension and adds the scripts that `recstore` runs; setup.cfg has all other settings."""

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
    # The library contains the code for three instruction sets and selects one of them at run time, so there is no
    # -march. Without fused multiply-adds, all three give the same bits.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-g0",  # the flags of the interpreter may request debug information, which makes the library ten times larger
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-ignored-attributes",
    "-Wno-unused-parameter",
]


def torch_folder() -> "str | None":
    """Returns the folder of torch in this environment, or else in that of the `build` or `pip` that runs the build.

    Torch is not a requirement of the build, because pip would then install a torch of its own choice, with several GB
    of CUDA. A library on the stable ABI works with the torch that it was built with and with later versions.
    """
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        return os.path.dirname(spec.origin)
    with open(f"/proc/{os.getppid()}/cmdline", "rb") as file:
        builder = os.fsdecode(file.read().split(b"\0")[0])
    # An isolated environment puts its own packages first through PYTHONPATH or PATH. The option -I ignores these, so
    # that the packages of the builder are found.
    asked = [builder, "-I", "-c", "import importlib.util; print(importlib.util.find_spec('torch').origin)"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    return os.path.dirname(answer.stdout.strip()) if answer.returncode == 0 else None


class BuildOnTorch(build_ext):
    """Finds torch's headers only when the extension is compiled, so that metadata and the sdist need no torch."""

    def build_extensions(self) -> None:
        root = torch_folder()
        if root is None:
            raise SystemExit(
                "to build torchrec_recstore, torch must be installed in the Python that runs the build: "
                "pip install -r requirements/base.txt"
            )
        for extension in self.extensions:
            extension.extra_compile_args += ["-isystem", os.path.join(root, "include")]
            extension.library_dirs.append(os.path.join(root, "lib"))
        # Runs one compiler on each core; setuptools would compile the files of an extension one after the other.
        compile_files = self.compiler.compile
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            self.compiler.compile = lambda files, **options: [
                made for each in pool.map(lambda file: compile_files([file], **options), files) for made in each
            ]
            super().build_extensions()


class ShipScripts(build_py):
    """Copies the scripts of `recstore train` and `recstore bench` into the package.

    An editable installation does not need the copies, because the scripts are next to the package.
    """

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder in ("examples", "benchmarks"):
            target = os.path.join(self.build_lib, "torchrec_recstore", folder)
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(folder, target, ignore=shutil.ignore_patterns("__pycache__", "*.json"))


CSRC = "torchrec_recstore/csrc"
HEADERS = sorted(
    glob.glob(f"{CSRC}/**/*.[hi]*", recursive=True) + glob.glob("torchrec_recstore/include/**/*.h", recursive=True)
)
# The parts of the core that the library of served models contains too: the search of the index, and memory.
SERVING_CORE = [*glob.glob(f"{CSRC}/row_kernels*.cpp"), f"{CSRC}/memory.cpp", f"{CSRC}/buffer_pool.cpp"]

setup(
    ext_modules=[
        Extension(
            "torchrec_recstore._C",
            sorted(glob.glob(f"{CSRC}/*.cpp") + glob.glob(f"{CSRC}/ops/*.cpp")),
            depends=HEADERS,
            extra_compile_args=list(FLAGS),
            libraries=["torch", "torch_cpu", "c10"],
            define_macros=[
                ("Py_LIMITED_API", "0x030a0000"),
                # torch 2.11: the first stable ABI in which from_blob() takes a deleter, which recycles the outputs.
                ("TORCH_TARGET_VERSION", "0x020b000000000000"),
            ],
            py_limited_api=True,
        ),
        # The library of served models has no code of Python. torch's stable ABI has no classes, so the library fits
        # only the minor version of torch that it is built with; torchrec_recstore/inference/library.py checks this.
        Extension(
            "torchrec_recstore._serving",
            sorted(SERVING_CORE + glob.glob(f"{CSRC}/serving/**/*.cpp", recursive=True)),
            depends=HEADERS,
            # torch's headers need C++20 from 2.14 on, and GCC 12 warns about them.
            extra_compile_args=[*FLAGS, "-std=c++20", "-Wno-stringop-overflow"],
            libraries=["torch", "torch_cpu", "c10"],
            py_limited_api=True,
        ),
    ],
    cmdclass={"build_ext": BuildOnTorch, "build_py": ShipScripts},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
