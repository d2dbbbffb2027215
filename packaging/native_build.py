"""What the three setup.py share: how native code is compiled, and how a plugin's sdist
gets files of the core.
"""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

FLAGS = [
    "-std=c++17",
    "-O2",
    # The library contains the code for several instruction sets and selects one of them
    # at run time, so there is no -march. Without fused multiply-adds, all of them give
    # the same bits.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    # the flags of the interpreter may request debug information, which makes the
    # library ten times larger
    "-g0",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-ignored-attributes",
    "-Wno-unused-parameter",
]

HOT_FILES = ("/index/", "/lookup/", "/row_loops/", "/served_rows.cpp")
"""Parts of the paths of the files that work on each id of a batch. -O3 takes the
compiler a seventh longer than -O2, and pays for these files alone.
"""

OPS_FILE = "ops.cpp"
"""The end of the name of the file that includes all files of the folder `ops`."""


def torch_folder() -> "str | None":
    """Returns the folder of torch in this environment, or else in that of the `build`
    or `pip` that runs the build.

    Torch is not a requirement of the build, because pip would then install a torch of
    its own choice, with several GB of CUDA. A library on the stable ABI works with the
    torch that it was built with and with later versions.
    """
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        return os.path.dirname(spec.origin)
    with open(f"/proc/{os.getppid()}/cmdline", "rb") as file:
        builder = os.fsdecode(file.read().split(b"\0")[0])
    # An isolated environment puts its own packages first through PYTHONPATH or PATH.
    # The option -I ignores these, so that the packages of the builder are found.
    asked = [
        builder,
        "-I",
        "-c",
        "import importlib.util; print(importlib.util.find_spec('torch').origin)",
    ]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    return os.path.dirname(answer.stdout.strip()) if answer.returncode == 0 else None


class Progress:
    """Tells how many files are compiled, in the file that RECSTORE_BUILD_PROGRESS
    names: pip hides what a build prints.

    ``make build`` names its own standard error.
    """

    def __init__(self, files: int) -> None:
        self._files = files
        self._compiled = 0
        self._lock = threading.Lock()

    def compiled(self, file: str) -> None:
        """Counts a file, in any thread."""
        path = os.environ.get("RECSTORE_BUILD_PROGRESS")
        with self._lock:
            self._compiled += 1
            if path:
                # A terminal of another user and a socket cannot be opened again: the
                # build goes on in silence.
                with contextlib.suppress(OSError), open(path, "a") as log:
                    log.write(
                        f"compiled {self._compiled} of {self._files} files:"
                        f" {os.path.basename(file)}\n"
                    )


class BuildOnTorch(build_ext):
    """Finds torch's headers only when the extension is compiled, so that metadata and
    the sdist need no torch.
    """

    ops_flags: "tuple[str, ...]" = ("-O1",)
    """The ops check arguments and call the core, and the compiler writes a long function
    for each from torch's templates: optimizing them further takes a third of the time
    of the file, and gains nothing that can be measured.
    """

    def build_extensions(self) -> None:
        root = torch_folder()
        if root is None:
            raise SystemExit(
                "to build torchrec_recstore, torch must be installed in the Python that"
                " runs the build: pip install -r requirements/base.txt"
            )
        for extension in self.extensions:
            extension.extra_compile_args += ["-isystem", os.path.join(root, "include")]
            extension.library_dirs.append(os.path.join(root, "lib"))
            self._join_ops(extension)
        compile_files = self.compiler.compile

        def compile_in_parallel(files: "list[str]", **options: Any) -> "list[str]":
            """Compiles one file on each core; setuptools would compile them one after
            the other.
            """
            # The files that take the compiler longest are the first ones, so that no
            # core waits for them at the end.
            long_ones = ("row_loops_", OPS_FILE)
            longest_first = sorted(
                files, key=lambda file: not any(name in file for name in long_ones)
            )
            progress = Progress(len(files))

            def compile_one(file: str) -> None:
                flags = [*options["extra_postargs"], *self._more_flags(file)]
                compile_files([file], **{**options, "extra_postargs": flags})
                progress.compiled(file)

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                for _ in pool.map(compile_one, longest_first):
                    pass
            return list(
                self.compiler.object_filenames(
                    files, output_dir=options.get("output_dir") or ""
                )
            )

        self.compiler.compile = compile_in_parallel
        super().build_extensions()

    def _more_flags(self, file: str) -> "tuple[str, ...]":
        """Returns the flags of a file beside those of the extension."""
        if file.endswith(OPS_FILE):
            return self.ops_flags
        if any(part in file for part in HOT_FILES):
            return ("-O3",)
        return ()

    def _join_ops(self, extension: Extension) -> None:
        """Compiles the files of the folder `ops` as one file that includes them.

        They alone include torch's headers, which take the compiler longer than the
        files themselves.
        """
        ops = [file for file in extension.sources if "/ops/" in file]
        if not ops:
            return
        # Not in `build_temp`: ccache finds an object by the path of its source, and pip
        # gives a new folder to each editable installation.
        joined = f"build/{extension.name}_{OPS_FILE}"
        os.makedirs("build", exist_ok=True)
        includes = "".join(f'#include "{path}"\n' for path in ops)
        # It is not written again without need: a newer file is compiled again.
        if not os.path.exists(joined) or Path(joined).read_text() != includes:
            Path(joined).write_text(includes)
        others = [file for file in extension.sources if file not in ops]
        extension.sources = [*others, joined]
        extension.include_dirs.append(".")
        # A change of one of them compiles the extension again.
        extension.depends += ops


class WithCore(sdist):
    """Adds the files of the repository that the library of a plugin is made of, in the
    folder `core` of its sdist.
    """

    core = ""
    """The folder of the repository, or of these files in an sdist."""
    core_files: "tuple[str, ...]" = ()
    """Their paths, each beginning with `core`."""

    def make_release_tree(self, base_dir: str, files: "list[str]") -> None:
        # The release tree would have the sources of the core beside itself, in the
        # checkout.
        super().make_release_tree(
            base_dir, [path for path in files if not path.startswith("..")]
        )
        for path in (f"{self.core}/packaging/native_build.py", *self.core_files):
            target = os.path.join(base_dir, "core", os.path.relpath(path, self.core))
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copy(path, target)
