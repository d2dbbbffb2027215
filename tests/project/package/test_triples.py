"""The extras, the pins and the README against the tested triples, and what pip takes
for each extra.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages import ROOT
from torchrec_recstore.triples import (
    DEFAULT,
    TRIPLES,
    Triple,
    for_torch,
    nearest_to_torch,
    torch_of_fbgemm,
)

from .test_contents import copy, pins, requirements

__all__ = ["copy"]  # the fixture

EXTRAS = {"torchrec": DEFAULT} | {triple.extra: triple for triple in TRIPLES}
"""The triple of each extra with CUDA."""


def wanted(triple: Triple, cuda: bool) -> dict[str, str]:
    """The versions that an extra has to fix."""
    if cuda:
        return {
            "torch": triple.torch,
            "torchrec": triple.torchrec,
            "fbgemm-gpu": triple.fbgemm,
        }
    # torchrec itself needs the CUDA build
    return {"torch": triple.torch, "fbgemm-gpu-cpu": triple.fbgemm}


def test_fbgemm_fits_torch() -> None:
    for triple in TRIPLES:
        major, minor = torch_of_fbgemm(triple.fbgemm)
        assert triple.torch.startswith(f"{major}.{minor}.")
        assert triple.torchrec.split(".")[:2] == triple.fbgemm.split(".")[:2]
        assert (
            for_torch(triple.torch)
            == for_torch(f"{triple.torch}+cpu")
            == nearest_to_torch(triple.torch)
            == triple
        )
    assert for_torch("2.15.0") is None
    assert nearest_to_torch("2.15.0") == TRIPLES[-1]
    assert nearest_to_torch("2.10.0") == DEFAULT


def test_each_triple_has_its_extras() -> None:
    extras = requirements()
    assert {name for name in extras if name.startswith("torchrec")} == {
        *EXTRAS,
        *(f"{name}-cpu" for name in EXTRAS),
    }
    for name, triple in EXTRAS.items():
        assert extras[name] == {
            each: f"=={number}" for each, number in wanted(triple, cuda=True).items()
        }
        fixed = {
            each: f"=={number}" for each, number in wanted(triple, cuda=False).items()
        }
        assert (
            extras[f"{name}-cpu"] | fixed
            == extras[f"{name}-cpu"]
            == extras["torchrec-cpu"] | fixed
        )


def test_requirements_pin_the_default_triple() -> None:
    expected = wanted(DEFAULT, cuda=False) | {"torchrec": DEFAULT.torchrec}
    assert {name: pins()[name] for name in expected} == expected


def index_can_be_reached() -> bool:
    try:
        socket.create_connection(("pypi.org", 443), timeout=10).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_pip_takes_for_each_extra(copy: Path) -> None:
    """Pip resolves extras as in a clean environment, from the index's metadata; it
    installs nothing.

    Each takes 40 s of a processor, so the extras with and without CUDA take turns.
    """
    if not index_can_be_reached():
        pytest.skip("the package index cannot be reached")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--no-build-isolation",
    ]
    # "torchrec" fixes what the extra of the default triple does, which another test
    # compares.
    extras = {name: EXTRAS[name] for name in EXTRAS if name != "torchrec"}
    for number, (name, triple) in enumerate(reversed(extras.items())):
        cuda = number % 2 == 0
        extra = name if cuda else f"{name}-cpu"
        command = [*pip, "--report", "-", f"{copy}[{extra}]"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, f"[{extra}]\n{run.stderr[-3000:]}"
        taken = {
            each["metadata"]["name"].lower().replace("_", "-"): (
                each["metadata"]["version"].partition("+")[0]
            )
            for each in json.loads(run.stdout)["install"]
        }
        assert wanted(triple, cuda).items() <= taken.items(), f"[{extra}] takes {taken}"
        assert len({"fbgemm-gpu", "fbgemm-gpu-cpu"} & taken.keys()) == 1, (
            f"[{extra}] takes {taken}"
        )
        assert taken["torchmetrics"] == "1.0.3"


def test_the_readme_s_table_is_of_the_tested_triples() -> None:
    """``make matrix`` writes it; each row has a triple, a Python, and the numbers of
    passed and failed tests.
    """
    table = (
        (ROOT / "README.md")
        .read_text()
        .partition("<!-- versions:")[2]
        .partition("<!-- end of versions -->")[0]
    )
    rows = re.findall(
        r"^\| (2\S+) \| (1\S+) \| (1\S+) \| 3\.\d+ \| ([\d,]+) \| (\d+) \|", table, re.M
    )
    assert [Triple(*row[:3]) for row in rows] == list(TRIPLES)
    assert [row[4] for row in rows] == ["0"] * len(rows)
