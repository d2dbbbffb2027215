"""Online training as a user runs it: it follows the drift, and a run whose processes
are killed has the same bits.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from online.generator import generate
from online.settings import Settings
from online.supervisor import FINISHED, INTERRUPTED, REDIS, STATE
from online.trainer import EXPORT, train

from torchrec_recstore.checkpoint.compare import compare_chains
from torchrec_recstore.checkpoint.info import read_chain
from torchrec_recstore.encoding import encode
from torchrec_recstore.inference import Follower, verify

from ..redis_server import free_port
from .commands import ROOT

KILLS = int(os.environ.get("ROUNDS", "4"))
"""The number of processes that are killed: each of the four once. ``ROUNDS=50`` takes
about ten minutes.
"""
SECONDS = 10 * KILLS
RATE = 500
HISTORY = 20_000
"""Fewer clicks than the example's: what a model has learned matters to its bits only
where it is compared with the frozen one.
"""
MARGIN = 0.05


def run(folder: Path, *flags: object) -> tuple[dict[str, Any], str]:
    command = [
        sys.executable,
        str(ROOT / "examples/online/run.py"),
        "--folder",
        str(folder),
        *map(str, flags),
    ]
    out = folder.with_suffix(".json")
    done = subprocess.run(
        [*command, "--json", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


def folder_with_settings(folder: Path, seconds: int, **changes: Any) -> Path:
    """Makes the folder of a run that has been interrupted before its first click."""
    url = None
    folder.mkdir()
    if REDIS is not None:
        url = f"redis://127.0.0.1:{free_port()}"
        (folder / "redis").mkdir()
    Settings(
        folder=folder,
        url=url,
        history=HISTORY,
        clicks=HISTORY + seconds * RATE,
        rate=RATE,
        start_ms=time.time_ns() // 1_000_000,
        window=4 * RATE,
        checkpoint_every=10,
        **changes,
    ).write()
    return folder


def newest(settings: Settings) -> Path:
    return max(settings.checkpoints.glob("step-*"))


def exact(state: object) -> tuple[object, dict[str, bytes]]:
    tensors: dict[str, torch.Tensor] = {}
    return encode(state, tensors), {
        name: each.numpy().tobytes() for name, each in tensors.items()
    }


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_whose_processes_are_killed_has_the_bits_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    folder = folder_with_settings(tmp_path / "killed", SECONDS)
    result, report = run(folder, "--kills", KILLS)
    print(report, ", ".join(result["kills"]))
    assert len(result["kills"]) == KILLS
    assert {name for name, count in result["restarts"].items() if count} >= set(
        result["kills"]
    )
    killed = Settings.read(tmp_path / "killed")
    with Follower(killed.published) as follower:
        follower.poll()
        assert follower.version == result["final_version"] == result["served_version"]
    verify(killed.folder / EXPORT)

    same_as_undisturbed(killed, tmp_path / "whole", result)


def same_as_undisturbed(killed: Settings, folder: Path, result: dict[str, Any]) -> None:
    """Compares the last checkpoint of a run with that of one that reads the same clicks
    from a file, at once.
    """
    folder.mkdir()
    whole = replace(killed, folder=folder, url=None, paced=False)
    generate(whole)
    train(whole)
    first, second = (read_chain(newest(settings)) for settings in (whole, killed))
    difference = compare_chains(first, second)
    assert all(
        each.equal for each in (*difference.tables.values(), difference.dense)
    ), difference
    states = [chain[-1].training_state for chain in (first, second)]
    # The scores of the servers depend on the moment. The metrics of the trained model
    # do not.
    for state in states:
        state["windows"] = [window["trained"] for window in state["windows"]["done"]]
    assert exact(states[0]) == exact(states[1])
    assert (
        json.loads((whole.folder / "trainer.json").read_text())["final_version"]
        == result["final_version"]
    )


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 400
    while not is_so():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_stopped_follower_is_seen_and_an_interrupted_run_goes_on(
    tmp_path: Path,
) -> None:
    seconds_of_clicks = 24  # the run must not end before it is interrupted
    folder = folder_with_settings(
        tmp_path / "run", seconds_of_clicks, publish_every_s=1.0
    )
    command = [
        sys.executable,
        str(ROOT / "examples/online/run.py"),
        "--folder",
        str(folder),
    ]

    def state() -> dict[str, Any]:
        path = folder / STATE
        return json.loads(path.read_text()) if path.exists() else {"samples": []}

    def second() -> float:
        samples = state()["samples"]
        return samples[-1]["second"] if samples else -1.0

    # Tests that a shell has started with `&` ignore Ctrl-C, and so would this process.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        wait_until(lambda: second() > 2, process)
        follower = state()["processes"]["follower"]["pid"]
        os.kill(follower, signal.SIGSTOP)
        begin = second()
        wait_until(lambda: second() > begin + 7, process)
        stopped = [
            each["age_s"] for each in state()["samples"] if each["second"] > begin + 1
        ]
        os.kill(follower, signal.SIGCONT)
        assert (np.diff(stopped) > 0).all(), "the rows become older"
        assert stopped[-1] > 6
        wait_until(lambda: second() > begin + 10, process)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"interrupted: continue with --folder {folder}" in errors
    assert "Traceback" not in errors
    assert "the run was interrupted" in out
    assert not any(
        Path(f"/proc/{each['pid']}").exists() for each in state()["processes"].values()
    )
    page = (folder / "page.html").read_text()
    assert INTERRUPTED in page
    assert "http-equiv" not in page

    offset = state()["offset"]
    interrupted = state()
    # later than the last click that was written, as it may be by chance
    interrupted["samples"][-1]["second"] += 1.0
    (folder / STATE).write_text(json.dumps(interrupted))
    result, report = run(folder)
    print(report)
    assert result["status"] == FINISHED
    clicks = seconds_of_clicks * RATE
    assert result["offset"] == HISTORY + clicks > offset > HISTORY
    seconds = [each["second"] for each in result["samples"]]
    assert seconds == sorted(seconds)
    assert seconds[-1] < seconds_of_clicks + 30, (
        "the time of the interruption does not count"
    )
    counts = result["outcomes"]["served"]
    assert sum(counts.values()) == clicks
    assert counts["no answer in time"] + counts["not asked"] > 5 * RATE
    assert sum(result["outcomes"]["frozen"].values()) == clicks
    assert result["age_p99_s"] > 5
    same_as_undisturbed(Settings.read(folder), tmp_path / "whole", result)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_served_model_follows_the_drift_and_a_frozen_one_does_not(
    tmp_path: Path,
) -> None:
    result, report = run(tmp_path / "run", "--seconds", 30, "--rate", 1000)
    print(f"margin {result['margin']:.4f}\n{report}")
    assert result["margin"] > MARGIN
    assert result["offset"] == 140_000 + 30 * 1000
    assert result["expired"] > 0
    assert result["deltas_applied"] > 1
    assert not any(result["restarts"].values())
    page = (tmp_path / "run" / "page.html").read_text()
    assert "finished" in page
    assert page.count("<polyline") == 3 + 3 + 2 + 2 + 2 + 2 + 1
