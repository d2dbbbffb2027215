"""DlrmHSTU with its own code for sharding and optimizers: equal to stock tables, and
continued from a checkpoint.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import dlrm_hstu
from .dlrm_hstu import SOURCE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not SOURCE, reason="GENERATIVE_RECOMMENDERS_SOURCE names no checkout"
    ),
]


def losses(
    folder: Path, tables: str, ranks: int, begin: int, steps: int, **files: Path
) -> list[list[float]]:
    """Runs a job, and returns the losses of each rank."""
    path = folder / f"{tables}-{ranks}-{begin}-{steps}"
    job = {"tables": tables, "begin": begin, "steps": steps, "losses": path, **files}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}",
    }
    arguments = [dlrm_hstu.__file__, json.dumps(job, default=str)]
    done = subprocess.run(
        [*command, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [
        json.loads(Path(f"{path}-{rank}.json").read_text()) for rank in range(ranks)
    ]


def test_equal_to_stock_tables(tmp_path: Path) -> None:
    rows = tmp_path / "rows.pt"
    (stock,) = losses(tmp_path, "stock", 1, 0, 4, stock=rows)
    (ours,) = losses(tmp_path, "recstore", 1, 0, 4, stock=rows)
    assert ours == pytest.approx(stock, rel=1e-5)
    assert len(set(stock)) == 4


def test_a_job_continues(tmp_path: Path) -> None:
    whole = losses(tmp_path, "recstore", 2, 0, 6)
    begun = losses(tmp_path, "recstore", 2, 0, 3, save=tmp_path / "checkpoints")
    ended = losses(tmp_path, "recstore", 2, 3, 3, load=tmp_path / "checkpoints" / "3")
    assert [first + last for first, last in zip(begun, ended, strict=True)] == whole
    # A loss is that of the model before the step, and the first rank has the same
    # batch.
    (alone,) = losses(
        tmp_path, "recstore", 1, 3, 1, load=tmp_path / "checkpoints" / "3"
    )
    assert alone[0] == pytest.approx(whole[0][3], rel=1e-5)
