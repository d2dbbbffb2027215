"""Wheels that are built from sdists, and tried in a clean environment: minutes, most of
them pip's.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages import PROJECTS, ROOT

from .test_contents import tracked


def required_by_build(project: Path) -> str:
    return (project / "pyproject.toml").read_text().partition("[project]")[0]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_built_installed_and_run(tmp_path: Path) -> None:
    tracked()  # a checkout is what is built
    build = [sys.executable, "-m", "build", "--outdir", str(tmp_path)]
    # One project is built in environments of its own, which have what it asks for. The
    # others ask for the same.
    assert len({required_by_build(project) for project in PROJECTS.values()}) == 1
    for project in PROJECTS.values():
        isolation = [] if project == ROOT else ["--no-isolation"]
        subprocess.run(
            [*build, *isolation, str(project)], check=True, capture_output=True
        )
    wheels, sdists = sorted(tmp_path.glob("*.whl")), sorted(tmp_path.glob("*.tar.gz"))
    assert len(wheels) == len(PROJECTS)
    assert all(wheel.name.endswith("-cp310-abi3-linux_x86_64.whl") for wheel in wheels)
    for made in (wheels, sdists):
        assert [re.match(r"[a-z_]+", path.name)[0] for path in made] == list(PROJECTS)  # type: ignore[index]
    # make package tries the sdists as well. CI has no time to compile them again.
    run = subprocess.run(
        [ROOT / "tests/project/package/install.sh", *wheels],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    for said in (
        "quickstart: three rows",
        "0 problems",
        "client: (1, 4)",
        "test AUC",
        "files good",
        "kernel ",
    ):
        assert said in run.stdout
