"""Introduces one mistake at a time into a copy of the checkout, and checks that tests
of ``make test`` find it.

python -m tests.project.mutations.run [WORD ...]    # those whose file or sentence contains a word

The copy needs the extension of the checkout; ``make test-mutations`` builds it. With
ccache the run takes minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.packages import ROOT

from .all import MUTATIONS
from .mutation import Mutation

EXTENSION = "torchrec_recstore/_C.abi3.so"
SERVING = "serving/torchrec_recstore_serving/_serving.abi3.so"
ROWS = "service/torchrec_recstore_service/_rows.abi3.so"
TIMEOUT_S = 3600
# pytest's statuses; others say that tests were not found or could not run
PASSED, FAILED = 0, 1


class Copy:
    """A copy of the checkout, with its build of the extension and of the C++ tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for name in [*files, EXTENSION, SERVING, ROWS]:
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        if (ROOT / "build/cpp").exists():
            shutil.copytree(ROOT / "build/cpp", folder / "build/cpp")
        # Nothing of the checkout itself is imported, and no bytecode outlives a
        # mutation.
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(
                map(str, (folder, folder / "service", folder / "serving"))
            ),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        found = self._run(
            sys.executable,
            "-c",
            "import torchrec_recstore; print(torchrec_recstore.__file__)",
        )
        assert Path(found.stdout.strip()).parents[1] == folder, (
            found.stdout + found.stderr
        )

    def _run(self, *command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )

    def pytest(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs Python tests; never the slow ones, which ``make test`` does not run."""
        quiet = ["-q", "-n0", "-W", "ignore", "-p", "no:cacheprovider"]
        return self._run(
            sys.executable, "-m", "pytest", *quiet, "-m", "not slow", *arguments
        )

    def build_cpp_tests(self, names: Sequence[str]) -> None:
        built = self._run(
            "make", "--no-print-directory", *(f"build/cpp/{name}" for name in names)
        )
        assert built.returncode == 0, built.stdout + built.stderr

    def cpp_test_fails(self, name: str) -> bool:
        try:
            return self._run(f"build/cpp/{name}").returncode != 0
        except subprocess.TimeoutExpired:
            return True

    def python_tests_fail(self, tests: Sequence[str]) -> bool:
        try:
            done = self.pytest("-x", *tests)
        except subprocess.TimeoutExpired:
            return True
        assert done.returncode in (PASSED, FAILED), done.stdout + done.stderr
        return done.returncode == FAILED

    def check_without_mutations(self, mutations: Sequence[Mutation]) -> None:
        """Checks that all tests that are named exist, are not slow, and pass.

        Raises:
            AssertionError: One of them does not; the message says which.
        """
        cpp = sorted({test for mutation in mutations for test in mutation.cpp_tests})
        if cpp:
            self.build_cpp_tests(cpp)
        for name in cpp:
            assert not self.cpp_test_fails(name), f"{name} fails without a mutation"
        python = sorted(
            {test for mutation in mutations for test in mutation.python_tests}
        )
        if not python:
            return
        collected = self.pytest("--collect-only", *python)
        assert collected.returncode == PASSED, collected.stdout + collected.stderr
        for test in python:
            found = any(
                line == test or line.startswith((f"{test}[", f"{test}::"))
                for line in collected.stdout.split("\n")
            )
            assert found, f"make test does not run {test}"
        done = self.pytest(*python)
        assert done.returncode == PASSED, done.stdout + done.stderr

    @contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """Within the context the copy has the mistake, and is built with it."""
        file = self.folder / mutation.file
        project, library = (
            ("service", ROWS)
            if mutation.file.startswith("service/")
            else (".", EXTENSION)
        )
        before = file.read_text()
        file.write_text(mutation.mutated(before))
        try:
            if mutation.is_native and mutation.python_tests:
                built = self._run(
                    "sh",
                    "-c",
                    f"cd {project} && {sys.executable} setup.py -q build_ext --inplace",
                )
                assert built.returncode == 0, built.stdout + built.stderr
            if mutation.cpp_tests:
                self.build_cpp_tests(mutation.cpp_tests)
            yield
        finally:
            file.write_text(before)
            shutil.copy2(ROOT / library, self.folder / library)

    def finds(self, mutation: Mutation) -> bool:
        with self.mutated(mutation):
            if any(self.cpp_test_fails(name) for name in mutation.cpp_tests):
                return True
            return bool(mutation.python_tests) and self.python_tests_fail(
                mutation.python_tests
            )


def main(words: Sequence[str]) -> int:
    asked = [
        mutation
        for mutation in MUTATIONS
        if not words
        or any(word in mutation.file or word in mutation.breaks for word in words)
    ]
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder).resolve())
        copy.check_without_mutations(asked)
        for mutation in asked:
            begin = time.monotonic()
            found = copy.finds(mutation)
            if not found:
                survivors.append(mutation)
            seconds = time.monotonic() - begin
            print(
                f"{'killed' if found else 'SURVIVED'}  {mutation.file}:"
                f" {mutation.breaks} ({seconds:.0f} s)",
                flush=True,
            )
    print(
        f"{len(asked)} mutations: {len(asked) - len(survivors)} killed,"
        f" {len(survivors)} survived"
    )
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
