"""Runs the tests with each tested triple of torch, TorchRec and FBGEMM, and writes the
README's table of versions.

    python -m tests.project.matrix.run [--only torchrec-1-9] [--directory DIR] [--workers 2] [--
    PYTEST_ARGUMENT ...]

Wheels are built with each triple, because the library of served models fits one minor
version of torch. The core of the first triple's wheel is used with all triples, which
shows that one binary fits them. Each triple has a virtual environment in the directory,
which is outside the repository because other torches than the default's bring gigabytes
of CUDA packages. An environment is made once and used again until its requirements or
its Python change. The tests run in a copy of the repository whose package is the
installed one. The table has the newest result of each triple with the whole suite but
the slow tests: a triple that has failed can be run again alone.

Exit status: 0 if every test of every triple passed, otherwise 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

from tests.packages import PACKAGES, ROOT
from torchrec_recstore.triples import DEFAULT, TRIPLES, Triple

NEWEST_PYTHON = (3, 14)
"""Newer ones are not taken: there are no wheels of all that the tests need."""

BEGIN, END = "<!-- versions: written by make matrix -->", "<!-- end of versions -->"

Python = tuple[int, int]


@dataclass(frozen=True)
class Result:
    """How the tests of one triple ended."""

    triple: Triple
    python: str
    counts: Mapping[str, int]
    commit: str

    @property
    def good(self) -> bool:
        return self.counts["failed"] == 0 and self.counts["passed"] > 0


def pythons_at_hand() -> dict[Python, str]:
    """The executable of each Python from 3.10 to :data:`NEWEST_PYTHON`, of the search
    path and of pyenv.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = {}
    for minor in range(10, NEWEST_PYTHON[1] + 1):
        installed = sorted(pyenv.glob(f"versions/3.{minor}.*/bin/python3.{minor}"))
        candidates = [*map(str, reversed(installed)), shutil.which(f"python3.{minor}")]
        for executable in filter(None, candidates):
            # Debian's Pythons can lack them
            usable = [executable, "-c", "import ensurepip, venv"]
            if subprocess.run(usable, capture_output=True, check=False).returncode == 0:
                found[(3, minor)] = executable
                break
    return found


def choose_pythons(
    at_hand: Iterable[Python], own: Python, triples: Sequence[Triple] = TRIPLES
) -> dict[Triple, Python]:
    """A Python for each triple: ``own`` for the default one, else the oldest or the
    newest of the others.

    Args:
        at_hand: the Pythons of this machine.
        own: the Python of the repository's own environment, which is the one of CI.
        triples: in ascending order.
    """
    others = sorted(set(at_hand) - {own}) or [own]
    extremes = dict.fromkeys(triples[: triples.index(DEFAULT)], others[0])
    extremes |= dict.fromkeys(triples[triples.index(DEFAULT) :], others[-1])
    return extremes | {DEFAULT: own}


def requirements_of(triple: Triple, folder: Path = ROOT / "requirements") -> list[str]:
    """The pins of requirements/, with the versions of ``triple`` instead of the
    default's and without torchrec.
    """
    lines = []
    for path in sorted(folder.glob("*.txt")):
        lines += [line.strip() for line in path.read_text().splitlines()]
    kept = {line for line in lines if line and not line.startswith(("#", "-r "))}
    # Torch 2.12 wants a setuptools older than the pinned one.
    own = {
        "torch": f"=={triple.torch}",
        "fbgemm-gpu-cpu": f"=={triple.fbgemm}",
        "torchrec": "",
        "setuptools": ">=77",
    }
    kept = {line for line in kept if re.split(r"[=<>!~ ;\[]", line)[0] not in own}
    return sorted(kept | {f"{name}{bound}" for name, bound in own.items() if bound})


def make_environment(folder: Path, python: str, triple: Triple) -> Path:
    """A virtual environment with the triple and what the tests need; the one of an
    earlier run if nothing has changed.

    Returns:
        Its Python.
    """
    executable = folder / "bin/python"
    wanted = requirements_of(triple)
    stamp = {
        "python": str(Path(python).resolve()),
        "torchrec": triple.torchrec,
        "requirements": wanted,
    }
    stamped = folder / "recstore-matrix.json"
    if stamped.exists() and json.loads(stamped.read_text()) == stamp:
        return executable
    print(f"{triple}: making {folder}", flush=True)
    same_python = (
        folder.exists() and (folder / "bin/python").resolve() == Path(python).resolve()
    )
    if not same_python:
        shutil.rmtree(folder, ignore_errors=True)
        run([python, "-m", "venv", str(folder)])
    pip = [
        str(executable),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--quiet",
        "install",
        "--no-cache-dir",
    ]
    listed = folder / "requirements.txt"
    listed.write_text("".join(f"{line}\n" for line in wanted))
    run([*pip, "-r", str(listed)])
    # its requirements name the CUDA build of FBGEMM
    run([*pip, "--no-deps", f"torchrec=={triple.torchrec}"])
    stamped.write_text(json.dumps(stamp, indent=1))
    return executable


def tracked_files() -> list[str]:
    """The files of the repository that git tracks or does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return sorted({name for name in names if (ROOT / name).is_file()})


def copy_repository(target: Path) -> None:
    """Copies the tracked files into a new folder."""
    shutil.rmtree(target, ignore_errors=True)
    for name in tracked_files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)


def build_wheels(directory: Path, source: Path, python: Path) -> list[Path]:
    """Builds the wheels with the torch of an environment."""
    built, wheels = directory / "built", directory / "wheels"
    for folder in (built, wheels):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, built)  # pip writes into it
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "wheel"]
    run(
        [
            *pip,
            "--no-build-isolation",
            "--no-deps",
            "--wheel-dir",
            str(wheels),
            str(built),
        ]
    )
    run(
        [
            *pip,
            "--no-build-isolation",
            "--no-deps",
            "--wheel-dir",
            str(wheels),
            str(built / "service"),
        ]
    )
    run(
        [
            *pip,
            "--no-build-isolation",
            "--no-deps",
            "--wheel-dir",
            str(wheels),
            str(built / "serving"),
        ]
    )
    made = sorted(wheels.glob("*.whl"))
    assert len(made) == len(PACKAGES), made
    return made


def install(wheels: Sequence[Path], python: Path, copy: Path, core: Path) -> None:
    """Installs the wheels, and replaces the sources in a copy of the repository by
    links to the installed files.

    The C++ sources stay, because some tests read them and the wheel does not have them.
    ``core``, the core of the first triple's wheel, replaces the wheel's own: it is on
    the stable ABI of torch and the limited API of Python.
    """
    pip = [
        str(python),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--quiet",
        "install",
    ]
    run([*pip, "--no-deps", "--force-reinstall", *map(str, wheels)])
    for package, folder in PACKAGES.items():
        ask = f"import {package}; print({package}.__path__[0])"
        at = subprocess.run(
            [str(python), "-c", ask],
            cwd=copy.parent,
            capture_output=True,
            text=True,
            check=True,
        )
        installed, sources = Path(at.stdout.strip()), copy / folder.relative_to(ROOT)
        assert installed.is_relative_to(python.parents[1]), installed
        for path in sources.rglob("*"):
            if path.is_file() and "csrc" not in path.parts:
                path.unlink()
                path.symlink_to(installed / path.relative_to(sources))
        for own_core in installed.glob("_C*.so"):
            if core.exists():
                shutil.copy2(core, own_core)
            else:
                shutil.copy2(own_core, core)
        for library in installed.glob("*.so"):
            (sources / library.name).symlink_to(library)
    assert core.exists(), "no wheel has a core"


def run_tests(copy: Path, python: Path, arguments: Sequence[str], workers: int) -> Path:
    """Runs the suite, whose output goes to the console.

    Returns:
        pytest's report in JUnit's XML.
    """
    report = copy.parent / f"{copy.name}.xml"
    report.unlink(missing_ok=True)
    command = [
        str(python),
        "-m",
        "pytest",
        "-n",
        str(workers),
        "--dist",
        "worksteal",
        "-q",
        f"--junitxml={report}",
    ]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    environment["PATH"] = f"{python.parent}:{environment['PATH']}"
    subprocess.run([*command, *arguments], cwd=copy, env=environment, check=False)
    if not report.exists():
        raise SystemExit(f"pytest left no report for {copy.name}: see its output above")
    return report


def count(report: Path) -> tuple[Counter[str], Counter[str]]:
    """The number of tests by outcome, and the number of skipped ones by reason.

    Args:
        report: JUnit's XML as pytest writes it.
    """
    counts, reasons = (
        Counter[str](passed=0, failed=0, skipped=0, xfailed=0),
        Counter[str](),
    )
    outcomes: dict[tuple[str, str], str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        test = (case.get("classname", ""), case.get("name", ""))
        outcome = "passed"
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
        elif (skipped := case.find("skipped")) is not None:
            outcome = "xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"
            if outcome == "skipped":
                reasons[skipped.get("message", "")] += 1
        # A test that passes and whose fixtures then fail is there twice.
        if outcomes.get(test) != "failed":
            outcomes[test] = outcome
    counts.update(outcomes.values())
    return counts, reasons


def save_result(result: Result, folder: Path) -> None:
    """Saves a result in the folder of the triple's environment."""
    (folder / "result.json").write_text(
        json.dumps(asdict(replace(result, counts=dict(result.counts))))
    )


def saved_results(directory: Path) -> list[Result] | None:
    """The newest result of each triple, or None if a triple has no result yet."""
    files = [directory / triple.torch / "result.json" for triple in TRIPLES]
    if not all(file.exists() for file in files):
        return None
    saved = [json.loads(file.read_text()) for file in files]
    return [
        Result(**{**fields, "triple": Triple(**fields["triple"])}) for fields in saved
    ]


def table(results: Sequence[Result]) -> str:
    """The README's table of versions."""
    lines = [
        "| torch | torchrec | fbgemm-gpu-cpu | Python | passed | failed | skipped |"
        " expected failures | commit |"
    ]
    lines.append("| --- " * 9 + "|")
    for result in results:
        triple, counts = result.triple, result.counts
        numbers = [
            f"{counts[outcome]:,}"
            for outcome in ("passed", "failed", "skipped", "xfailed")
        ]
        cells = [
            triple.torch,
            triple.torchrec,
            triple.fbgemm,
            result.python,
            *numbers,
            result.commit,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_table(text: str, page: Path = ROOT / "README.md") -> None:
    """Puts the table between its marks in the README."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"{page} has no {BEGIN}"
    assert end, f"{page} has no {END}"
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def commit() -> str:
    """The commit of the checkout, with ``-dirty`` if files have changed since."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def run(command: Sequence[str]) -> None:
    """Runs a command, whose failure ends this program."""
    done = subprocess.run(command, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\nended with status {done.returncode}")


def default_directory() -> Path:
    """The folder of the environments: below the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "torchrec_recstore" / "matrix"


def main(arguments: Sequence[str]) -> int:
    """The command.

    Returns:
        Its exit status.
    """
    parser = argparse.ArgumentParser(
        prog="make matrix", description=(__doc__ or "").partition("\n")[0]
    )
    extras = [triple.extra for triple in TRIPLES]
    parser.add_argument(
        "--directory",
        type=Path,
        default=default_directory(),
        help="folder of the environments",
    )
    parser.add_argument(
        "--only", choices=extras, action="append", help="run this triple alone"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=min(8, os.cpu_count() or 1),
        help="processes that run tests",
    )
    parser.add_argument(
        "pytest", nargs="*", help="arguments of pytest; the table is not written"
    )
    asked = parser.parse_args(arguments)
    directory = asked.directory.resolve()
    if directory.is_relative_to(ROOT):
        parser.error(
            f"{directory} is in the repository: the environments take gigabytes, name a"
            " folder outside"
        )
    directory.mkdir(parents=True, exist_ok=True)
    executables = pythons_at_hand()
    own = (sys.version_info[0], sys.version_info[1])
    executables.setdefault(own, sys.executable)
    chosen = choose_pythons(executables, own)
    triples = [
        triple for triple in TRIPLES if not asked.only or triple.extra in asked.only
    ]
    environments = {
        triple: make_environment(
            directory / triple.torch, executables[chosen[triple]], triple
        )
        for triple in triples
    }
    at_commit, source, copies = commit(), directory / "source", directory / "copies"
    # once, so that later changes of the repository are in no triple's run
    copy_repository(source)
    copies.mkdir(exist_ok=True)
    (copies / "shared").unlink(missing_ok=True)  # of a checkout that may be gone
    if (ROOT.parent / "shared").is_dir():
        # the data sets, beside each copy
        (copies / "shared").symlink_to(ROOT.parent / "shared")
    core = directory / "core.so"
    core.unlink(missing_ok=True)
    good = True
    for triple in triples:
        start = time.monotonic()
        python = environments[triple]
        copy = copies / triple.extra
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source, copy)
        install(build_wheels(directory, source, python), python, copy, core)
        print(f"{triple}, Python {'.'.join(map(str, chosen[triple]))}", flush=True)
        report = run_tests(
            copy, python, asked.pytest or ["-m", "not slow"], asked.workers
        )
        counts, skips = count(report)
        result = Result(triple, ".".join(map(str, chosen[triple])), counts, at_commit)
        good = good and result.good
        if not asked.pytest:
            save_result(result, directory / triple.torch)
        print(
            f"{triple}: {dict(counts)} in {time.monotonic() - start:.0f} s", flush=True
        )
        for reason, times in skips.most_common():
            print(f"    {times} skipped: {reason}", flush=True)
    results = saved_results(directory)
    if results is not None and not asked.pytest:
        text = table(results)
        print(text)
        write_table(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
