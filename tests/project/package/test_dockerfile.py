"""The Dockerfile, without an engine: what it copies is there, and what it runs works in
a clean directory.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.packages import ROOT

from .test_contents import tracked


def instructions() -> list[tuple[str, str]]:
    """Each instruction and its arguments."""
    text = re.sub(
        r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE
    ).replace("\\\n", " ")
    words = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(name, rest) for name, rest in words]


def context() -> list[str]:
    """The files of a clean checkout that an engine is given: without those that
    .dockerignore names.
    """
    patterns = (ROOT / ".dockerignore").read_text().split()
    patterns += [pattern.removeprefix("**/") for pattern in patterns]

    def ignored(name: str) -> bool:
        parents = [name, *map(str, Path(name).parents)]
        return any(
            fnmatch.fnmatch(each, pattern) for each in parents for pattern in patterns
        )

    return [name for name in tracked() if not ignored(name)]


def test_it_copies_what_is_there() -> None:
    assert context() == tracked()  # nothing that is needed is left out
    for name, rest in instructions():
        if name == "COPY":
            *sources, _ = rest.split()
            for source in sources:
                assert source == "." or any(
                    each == source or each.startswith(f"{source}/")
                    for each in context()
                )


def test_nothing_heavy_is_sent_to_the_engine() -> None:
    patterns = (ROOT / ".dockerignore").read_text().split()
    ignored = (ROOT / ".gitignore").read_text().split()
    for folder in (".git", ".venv", "build", "dist"):
        assert folder in patterns
    assert {
        name.rstrip("/")
        for name in ignored
        if name in (".venv/", "build/", "dist/", "runs/")
    } <= set(patterns)


def test_its_commands_are_the_makefile_s() -> None:
    targets = re.findall(
        r"^([^\s:=]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE
    )
    called = [
        rest.removeprefix("make ")
        for name, rest in instructions()
        if name == "RUN" and rest.startswith("make")
    ]
    (command,) = (json.loads(rest) for name, rest in instructions() if name == "CMD")
    assert command == ["make", "train"]
    assert {"build", ".venv/.dev-requirements"} == set(called)
    assert {each.replace(".venv", "$(VENV)") for each in called} | {
        "train",
        "test",
    } <= set(targets)
    version = re.search(r"python:(\d+)\.(\d+)-slim", (ROOT / "Dockerfile").read_text())
    assert version is not None
    assert (int(version[1]), int(version[2])) >= (3, 10)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_its_steps_in_a_clean_directory(tmp_path: Path) -> None:
    """As an engine would take them, but for the system's packages, which have to be
    there, and for Python's, which are those of this environment: ``make`` has installed
    them by the same command.
    """
    environment = {
        name: os.environ[name]
        for name in ("PATH", "HOME", "LANG")
        if name in os.environ
    }
    environment |= {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PIP_", "CCACHE_"))
    }
    at = tmp_path
    command: list[str] = []
    for name, rest in instructions():
        if name == "WORKDIR":
            at = tmp_path / rest.lstrip("/")
            at.mkdir(parents=True)
            make_environment(at / ".venv", tmp_path / "packages")
        elif name == "ENV":
            key, _, value = rest.partition("=")
            if key != "PIP_EXTRA_INDEX_URL":  # whatever this machine's pip has
                environment[key] = value.replace("$PATH", environment["PATH"]).replace(
                    "/torchrec_recstore", str(tmp_path / "torchrec_recstore"), 1
                )
        elif name == "COPY":
            *sources, target = rest.split()
            for source in sources:
                copy(source, at / target)
        elif name == "RUN" and rest.startswith("apt-get"):
            packages = re.findall(r"--no-install-recommends ([\w +-]+?) &&", rest)[
                0
            ].split()
            assert [
                package for package in packages if shutil.which(package) is None
            ] == []
        elif name == "RUN":
            run(shlex.split(rest), at, environment)
        elif name == "CMD":
            command = json.loads(rest)
    assert "test AUC" in run([*command, "ARGS=--limit-rows 4000"], at, environment)
    assert "recstore" in run(["recstore", "--help"], at, environment)
    # Assertions are not rewritten, which takes half of the time.
    collect = ["python", "-m", "pytest", "--collect-only", "-q", "--assert=plain"]
    collected = run([*collect, "tests"], at, environment)
    assert re.search(r"\d{4} tests collected", collected)


def make_environment(folder: Path, packages: Path) -> None:
    """Makes an environment that has the packages of this one, without ours, in a folder
    beside it.
    """
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("torchrec_recstore", "__editable__")):
            (packages / path.name).symlink_to(path)
    venv.create(folder, with_pip=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "packages.pth").write_text(f"{packages}\n")


def copy(source: str, target: Path) -> None:
    for name in context():
        if source in (".", name) or name.startswith(f"{source}/"):
            inside = (
                name
                if source == "."
                else (
                    Path(name).relative_to(source)
                    if source != name
                    else Path(source).name
                )
            )
            # A file goes into the folder, a folder's files into the folder named.
            path = target / inside
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, path)


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    executable = shutil.which(command[0], path=environment["PATH"])
    assert executable is not None, command
    done = subprocess.run(
        [executable, *command[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (
        f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout
