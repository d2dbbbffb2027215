"""examples/dlrm/minimal.py: the shortest program learns, on one rank and on two, and
stays short.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .commands import ROOT, run_forked
from .models.data import criteo

PROGRAM = "dlrm/minimal.py"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return criteo(tmp_path_factory.mktemp("data") / "train.txt", rows=24_000)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_it_learns_a_small_log(log: Path, ranks: int) -> None:
    done = run_forked(PROGRAM, log, ranks=ranks)
    assert done.returncode == 0, done.stderr
    (printed,) = re.findall(
        r"^([\d,]+) rows in 26 tables, test AUC (0\.\d{4})$",
        done.stdout,
        flags=re.MULTILINE,
    )
    assert printed[0] == "544", (
        "20 ids in each table, and the empty field in 24 of them"
    )
    assert float(printed[1]) > 0.9


@pytest.mark.slow
def test_it_generates_rows_without_a_file() -> None:
    done = run_forked(PROGRAM)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 0.85


def test_it_is_one_short_file() -> None:
    source = (ROOT / "examples" / PROGRAM).read_text()
    # A longer one would not be read before the first run.
    assert len(source.splitlines()) < 200
    modules = set(re.findall(r"^(?:from|import) (\w+)", source, flags=re.MULTILINE))
    assert modules <= {
        "sys",
        "fbgemm_gpu",
        "polars",
        "torch",
        "torchmetrics",
        "torchrec",
        "torchrec_recstore",
    }
