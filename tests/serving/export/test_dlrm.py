"""examples/dlrm/export.py exports a trained DLRM from its checkpoints to one file, with
the same AUC.
"""

from __future__ import annotations

import json
from pathlib import Path

import fbgemm_gpu  # noqa: F401  (the ops of the exported file)
import pytest
import torch

from ...examples.commands import run_forked

ROWS = ("--limit-rows", 4000)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    bounds = ("--max-rows", 600, "--eviction", "lfu", "--half-life-steps", 100)
    done = run_forked(
        "dlrm/train.py",
        *ROWS,
        *bounds,
        "--batch-size",
        128,
        "--dim",
        8,
        "--checkpoint",
        folder,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("dtype", ["int8", "fp16"])
def test_auc_of_the_exported_model(
    checkpoints: Path, tmp_path: Path, dtype: str
) -> None:
    out, result = tmp_path / "dlrm.pt", tmp_path / "result.json"
    arguments = (
        "--checkpoint",
        checkpoints,
        "--out",
        out,
        "--check",
        "generated",
        *ROWS,
        "--dtype",
        dtype,
    )
    done = run_forked("dlrm/export.py", *arguments, "--json", result)
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    assert 0 < found["test_auc_trained"] < 1
    assert abs(found["test_auc_exported"] - found["test_auc_trained"]) <= 1e-3
    assert found["bytes"] == out.stat().st_size
    served = torch.jit.load(out)
    assert len(served.recstore_tables()) == 26
    logits = served(torch.rand(3, 13), torch.randint(-5, 5, (3, 26)))
    assert logits.shape == (3,)


def test_what_is_refused_in_one_line(checkpoints: Path, tmp_path: Path) -> None:
    out = tmp_path / "dlrm.pt"
    for message, arguments in (
        ("no checkpoint at", ("--checkpoint", tmp_path)),
        (
            "is not the data of",
            ("--checkpoint", checkpoints, "--check", "generated", "--limit-rows", 3000),
        ),
    ):
        done = run_forked("dlrm/export.py", "--out", out, *arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
    assert not out.exists()
