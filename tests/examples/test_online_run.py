"""Online training as a user runs it: it follows the drift, and a run whose processes are killed has the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from online.generator import generate
from online.settings import Settings
from online.trainer import EXPORT, train

from torchrec_recstore.checkpoint.compare import compare_chains
from torchrec_recstore.checkpoint.info import read_chain
from torchrec_recstore.encoding import encode
from torchrec_recstore.inference import Follower, verify

from .commands import ROOT

KILLS = int(os.environ.get("ROUNDS", "8"))
"""The number of processes that are killed. ``ROUNDS=50`` takes about ten minutes."""
SECONDS = 10 * KILLS
MARGIN = 0.05


def run(folder: Path, *flags: object) -> tuple[dict[str, Any], str]:
    command = [sys.executable, str(ROOT / "examples/online/run.py"), "--folder", str(folder), *map(str, flags)]
    out = folder.with_suffix(".json")
    done = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


def newest(settings: Settings) -> Path:
    return max(settings.checkpoints.glob("step-*"))


def exact(state: object) -> tuple[object, dict[str, bytes]]:
    tensors: dict[str, torch.Tensor] = {}
    return encode(state, tensors), {name: each.numpy().tobytes() for name, each in tensors.items()}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_whose_processes_are_killed_has_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    result, report = run(tmp_path / "killed", "--seconds", SECONDS, "--rate", 500, "--kills", KILLS)
    print(report, ", ".join(result["kills"]))
    assert len(result["kills"]) == KILLS
    assert {name for name, count in result["restarts"].items() if count} >= set(result["kills"])
    killed = Settings.read(tmp_path / "killed")
    with Follower(killed.published) as follower:
        follower.poll()
        assert follower.version == result["final_version"] == result["served_version"]
    verify(killed.folder / EXPORT)

    # The same clicks at once, from a file: neither Redis nor the time of an arrival makes a difference.
    (tmp_path / "whole").mkdir()
    whole = replace(killed, folder=tmp_path / "whole", url=None, paced=False)
    generate(whole)
    train(whole)
    first, second = (read_chain(newest(settings)) for settings in (whole, killed))
    difference = compare_chains(first, second)
    assert all(each.equal for each in (*difference.tables.values(), difference.dense)), difference
    states = [chain[-1].training_state for chain in (first, second)]
    for state in states:  # The scores of the servers depend on the moment. The metrics of the trained model do not.
        state["windows"] = [window["trained"] for window in state["windows"]["done"]]
    assert exact(states[0]) == exact(states[1])
    assert json.loads((whole.folder / "trainer.json").read_text())["final_version"] == result["final_version"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(3))
def test_the_served_model_follows_the_drift_and_a_frozen_one_does_not(tmp_path: Path, seed: int) -> None:
    result, report = run(tmp_path / "run", "--seconds", 30, "--rate", 1000, "--seed", seed)
    print(f"seed {seed}: margin {result['margin']:.4f}\n{report}")
    assert result["margin"] > MARGIN
    assert result["offset"] == 140_000 + 30 * 1000
    assert result["expired"] > 0
    assert result["deltas_applied"] > 1
    assert not any(result["restarts"].values())
    page = (tmp_path / "run" / "page.html").read_text()
    assert "finished" in page
    assert page.count("<polyline") == 3 + 3 + 2 + 2 + 2 + 1
