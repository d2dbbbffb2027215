"""Tests of a training command that is stopped, killed and resumed.

Its result is the same as without interruption.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import train
from common.checkpoints import CheckpointFolder
from common.command import DataError
from common.curves import read_curves
from common.run import sole_use
from common.schedule import lr_factor, lr_scheduler
from criteo import CriteoFile
from generator import Generator
from sources import batches_of, behind, good_rows

from torchrec_recstore import export_dense_weights, save_checkpoint

from ..distributed.workers import run_on_ranks
from .commands import ROOT
from .training import settings_of as small
from .training import train_here, train_on_ranks

FLAGS = (
    "--dim",
    4,
    "--num-embeddings",
    100,
    "--batch-size",
    60,
    "--sharding",
    "row_wise",
)
OF_THE_PROCESS = (
    *(
        "train_samples_per_second",
        "resumed",
        "resume",
        "checkpoint",
        "checkpoint_every",
        "keep",
    ),
    # counts of lookups since the process began
    *("counts", "counts_since_step", "hit_rate"),
    "log_dir",
)


settings_of = partial(small, dim=4, batch_size=60, limit_rows=1500)


def lasting(result: dict[str, Any]) -> dict[str, Any]:
    """Returns the result of a run without the values that depend on the process."""
    return {key: value for key, value in result.items() if key not in OF_THE_PROCESS}


def result_of(path: Path) -> dict[str, Any]:
    """Returns the result in a run's JSON file without the values that depend on the
    process.
    """
    return lasting(json.loads(path.read_text()))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def stopped_after(step: int, folder: Path, copy: Path) -> Path:
    """Copies a run's folder in the state after the checkpoint of the given step."""
    copy.mkdir()
    for path in folder.glob("step-*"):
        if int(path.name.removeprefix("step-")) <= step:
            shutil.copytree(path, copy / path.name)
    return copy


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    return list(Generator(3000, 1).lines(0, 3000))


def spoil(lines: list[bytes]) -> list[bytes]:
    """Returns the lines, a tenth of which are made bad."""
    chosen = set(random.Random(0).sample(range(len(lines)), len(lines) // 10))
    return [b"bad\n" if number in chosen else line for number, line in enumerate(lines)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "changes", "steps"),
    [
        # The first epoch ends at step 20, and the second epoch ends at step 40.
        (
            "generated",
            {
                "epochs": 2,
                "lr_schedule": "cosine",
                "warmup_steps": 5,
                "optimizer": "adagrad",
            },
            (7, 20, 28, 40),
        ),
        (
            "bad rows",
            {"skip_bad_rows": True, "lr_schedule": "linear", "limit_rows": None},
            (14,),
        ),
        pytest.param(
            "gzip",
            {"limit_rows": 2000, "sharding": "row_wise"},
            (21,),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_that_went_on_equals_one_that_never_stopped(
    lines: list[bytes],
    tmp_path: Path,
    data: str,
    changes: dict[str, Any],
    steps: tuple[int, ...],
) -> None:
    if data != "generated":
        path = tmp_path / "rows"
        path.write_bytes(
            b"".join(spoil(lines))
            if data == "bad rows"
            else gzip.compress(b"".join(lines))
        )
        changes |= {"data": path}
    whole = tmp_path / "whole"
    settings = {"checkpoint_every": 7, "keep": 100} | changes
    train_here(
        settings_of(checkpoint=whole, json_out=tmp_path / "whole.json", **settings)
    )
    last = names(whole)[-1]
    for step in steps:
        part = stopped_after(step, whole, tmp_path / f"part{step}")
        train_here(
            settings_of(
                checkpoint=part,
                json_out=tmp_path / "part.json",
                resume=True,
                **settings,
            )
        )
        assert (
            f"at step {step} of"
            in json.loads((tmp_path / "part.json").read_text())["resumed"]
        )
        assert result_of(tmp_path / "part.json") == result_of(tmp_path / "whole.json")
        assert names(part) == names(whole)
        assert content(part / last) == content(whole / last)


@pytest.mark.slow
@pytest.mark.parametrize("reset", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_that_has_ended_goes_on_with_more_epochs(
    tmp_path: Path, reset: bool
) -> None:
    """It ends like a run that was given all epochs, and the rows are reset between
    epochs only.
    """
    settings = partial(
        settings_of,
        limit_rows=1200,
        checkpoint_every=7,
        keep=100,
        reset_rows_each_epoch=reset,
    )
    whole = train_here(settings(checkpoint=tmp_path / "whole", epochs=3))
    for epochs in (1, 2):
        train_here(settings(checkpoint=tmp_path / "run", epochs=epochs, resume=True))
    part = train_here(settings(checkpoint=tmp_path / "run", epochs=3, resume=True))
    assert "at step 32 of 48" in part["resumed"]
    assert lasting(part) == lasting(whole)
    assert names(tmp_path / "run") == names(tmp_path / "whole")
    last = names(tmp_path / "whole")[-1]
    assert content(tmp_path / "run" / last) == content(tmp_path / "whole" / last)
    # in the middle of the last epoch
    again = stopped_after(35, tmp_path / "whole", tmp_path / "again")
    assert lasting(
        train_here(settings(checkpoint=again, epochs=3, resume=True))
    ) == lasting(whole)
    with pytest.raises(
        DataError,
        match="step-000000048 has trained in epoch 3: --epochs must be at least 3",
    ):
        train_here(settings(checkpoint=tmp_path / "run", epochs=2, resume=True))


def test_a_run_with_a_schedule_has_its_number_of_epochs(tmp_path: Path) -> None:
    settings = partial(
        settings_of, limit_rows=300, lr_schedule="linear", checkpoint=tmp_path / "run"
    )
    train_here(settings())
    with pytest.raises(DataError, match=r"--epochs 1, not 2$"):
        train_here(settings(epochs=2, resume=True))


def test_a_run_without_checkpoints_is_the_same_run(tmp_path: Path) -> None:
    train_here(settings_of(json_out=tmp_path / "without.json"))
    train_here(
        settings_of(
            checkpoint=tmp_path / "run", resume=True, json_out=tmp_path / "with.json"
        )
    )
    assert result_of(tmp_path / "with.json") == result_of(tmp_path / "without.json")
    assert json.loads((tmp_path / "with.json").read_text())["resumed"] is None


def test_old_checkpoints_and_the_leavings_of_a_killed_run_are_cleared_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (run / ".step-000000003.saving-0123456789ab").mkdir(parents=True)
    (run / ".step-000000003.saving-0123456789ab" / "half").write_bytes(b"x")
    (run / ".step-000000003.lock").touch()
    (run / "notes").mkdir()
    train_here(settings_of(checkpoint=run, checkpoint_every=6, keep=2))
    assert names(run) == ["notes", "step-000000018", "step-000000020"]
    said = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("checkpoint ")
    ]
    assert [line.split()[1] for line in said] == [
        f"{run}/step-{step:09}:" for step in (6, 12, 18, 20)
    ]


@pytest.mark.usefixtures("one_rank")
def test_looking_for_the_newest_checkpoint_leaves_alone_what_a_run_is_writing(
    tmp_path: Path,
) -> None:
    """An export during a training works."""
    writing = tmp_path / ".step-000000003.saving-0123456789ab" / "half"
    writing.parent.mkdir()
    writing.touch()
    assert CheckpointFolder(tmp_path, 1).newest() is None
    assert writing.exists()


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_that_a_kept_one_is_a_delta_of_stays(tmp_path: Path) -> None:
    model, _ = train.build(settings_of())
    run = tmp_path / "run"
    save_checkpoint(model, run / "step-000000001")
    for step in (2, 3):
        save_checkpoint(
            model, run / f"step-{step:09}", delta_of=run / f"step-{step - 1:09}"
        )
    folder = CheckpointFolder(run, keep=2)
    folder.save(model, 4, {})
    assert names(run) == [f"step-{step:09}" for step in (1, 2, 3, 4)]
    folder.save(model, 5, {})
    assert names(run) == [f"step-{step:09}" for step in (4, 5)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resume": True}, "--resume needs --checkpoint DIR"),
        ({"checkpoint_every": 5}, "--checkpoint-every needs --checkpoint DIR"),
        ({"checkpoint": Path("/proc/run")}, "/proc/run: No such file or directory"),
        ({"checkpoint": Path(__file__)}, "test_resume.py: this is not a folder"),
        ({"checkpoint": Path(__file__) / "run"}, "test_resume.py/run: Not a directory"),
        (
            {"checkpoint": Path("run"), "backend": "fused"},
            "save stock tables with torch.distributed.checkpoint",
        ),
        ({"warmup_steps": 21}, "--warmup-steps 21 is more than the run's 20 steps"),
    ],
)
def test_flags_that_cannot_be_followed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        train_here(settings_of(**changes))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of checkpoints of a run."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train_here(settings_of(checkpoint=run, limit_rows=300))
    return run


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"resume": False},
            (
                "run has checkpoints already, up to step-000000004: resume the run with"
                " --resume"
            ),
        ),
        ({"dim": 8}, "step-000000004 belongs to a run with --dim 4, not 8$"),
        (
            {"optimizer": "sgd", "seed": 3},
            "--seed 0, not 3; --optimizer rowwise_adagrad, not sgd$",
        ),
        (
            {"limit_rows": 400},
            "--data 300 generated rows of seed 0, not 400 generated rows of seed 0$",
        ),
        (
            {"batch_size": 30, "reset_rows_each_epoch": True},
            "--batch-size 60, not 30; --reset-rows-each-epoch False, not True$",
        ),
        (
            {"lr": 0.02, "warmup_steps": 1},
            "--lr 0.01, not 0.02; --warmup-steps 0, not 1$",
        ),
    ],
)
def test_checkpoints_of_another_run(
    finished: Path, changes: dict[str, Any], message: str
) -> None:
    before = content(finished)
    with pytest.raises(DataError, match=message):
        train_here(
            settings_of(
                **{"checkpoint": finished, "limit_rows": 300, "resume": True} | changes
            )
        )
    assert content(finished) == before


@pytest.mark.parametrize(
    "name", ["metadata.json", "dense.safetensors", "training_state.safetensors"]
)
def test_a_damaged_checkpoint_is_named(
    finished: Path, tmp_path: Path, name: str
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    path = run / "step-000000004" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"step-000000004/{name} is damaged"):
        train_here(settings_of(checkpoint=run, limit_rows=300, resume=True))


@pytest.mark.usefixtures("one_rank")
def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        sole_use(tmp_path / "run"),
        pytest.raises(DataError, match="run: another run is writing there"),
    ):
        train.train(settings_of(checkpoint=tmp_path / "run"))
    train.train(settings_of(checkpoint=tmp_path / "run", limit_rows=300))


def dense_of(file: CriteoFile, part: range) -> list[list[float]]:
    return [
        row for rows in file.rows(part.start, part.stop) for row in rows.dense.tolist()
    ]


@pytest.mark.parametrize("packed", [False, True])
def test_a_place_in_a_file_with_bad_lines_is_found(
    lines: list[bytes], tmp_path: Path, packed: bool
) -> None:
    spoiled = spoil(lines[:200])
    path = tmp_path / "rows"
    path.write_bytes(gzip.compress(b"".join(spoiled)) if packed else b"".join(spoiled))
    file = CriteoFile(path, skip_bad_rows=True, chunk_bytes=3000)
    file.scan()
    for part in (range(200), range(31, 171)):
        whole = dense_of(file, part)
        assert good_rows(file.bad_lines, part) == len(whole)
        for count in range(len(whole) + 1):
            rest = behind(file.bad_lines, part, count)
            assert good_rows(file.bad_lines, rest) == len(whole) - count
        for count in (0, 1, 60, len(whole)):
            rest = behind(file.bad_lines, part, count)
            assert [
                label
                for rows in file.rows(rest.start, rest.stop)
                for label in rows.dense.tolist()
            ] == whole[count:]


def test_equal_content_has_an_equal_fingerprint(
    lines: list[bytes], tmp_path: Path
) -> None:
    contents = {
        "plain": lines[:50],
        "other": [*lines[:49], lines[50]],
        "longer": lines[:51],
    }
    files = {name: b"".join(parts) for name, parts in contents.items()} | {
        "packed": gzip.compress(b"".join(lines[:50]))
    }
    found = {}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        file = CriteoFile(tmp_path / name, chunk_bytes=1000)
        file.scan()
        found[name] = file.fingerprint
    assert found["plain"] == found["packed"]
    assert len(set(found.values())) == 3


def test_schedules() -> None:
    assert [lr_factor("constant", 4, 10, step) for step in range(6)] == [
        0.25,
        0.5,
        0.75,
        1.0,
        1.0,
        1.0,
    ]
    assert [lr_factor("linear", 2, 6, step) for step in range(8)] == [
        0.5,
        1.0,
        1.0,
        0.75,
        0.5,
        0.25,
        0.0,
        0.0,
    ]
    cosine = [lr_factor("cosine", 0, 4, step) for step in range(5)]
    assert cosine == pytest.approx(
        [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]
    )
    assert lr_factor("cosine", 5, 5, 5) == 0


def weights_after_one_step(warmup_steps: int) -> list[torch.Tensor]:
    """Returns the row of id 0, which most samples have, and the bias of a layer."""
    settings = settings_of(optimizer="sgd", lr=1000.0, dense_lr=0.1)
    model, optimizer = train.build(settings)
    scheduler = lr_scheduler(optimizer, "constant", warmup_steps, 10)
    for _ in train.plain_steps(
        model, optimizer, batches_of(settings, Generator(60, 0), range(60), 60)
    ):
        scheduler.step()
    bias = model.state_dict()["model.over_arch.model.1.bias"]
    return [export_dense_weights(model, "t_C26", 1), bias]


@pytest.mark.usefixtures("one_rank")
def test_the_schedule_drives_embeddings_and_dense_layers() -> None:
    for full, half, quarter in zip(
        *map(weights_after_one_step, (1, 2, 4)), strict=True
    ):
        assert (full - half).abs().max() > 1e-3
        torch.testing.assert_close(
            full - half, 2 * (half - quarter), rtol=1e-3, atol=1e-6
        )


def workers(torchrun: subprocess.Popen[str]) -> dict[int, int]:
    """Returns the process ids of torchrun's workers, by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == torchrun.pid:
                environment = dict(
                    entry.split(b"=", 1)
                    for entry in (folder / "environ").read_bytes().split(b"\0")
                    if b"=" in entry
                )
                found[int(environment[b"RANK"])] = int(folder.name)
        except (OSError, KeyError):
            continue  # the process has just ended or is just starting
    return found


class Job:
    """A training command on generated rows under torchrun, in the background.

    Args:
        ranks: The number of processes.
        flags: The flags of the training command.
    """

    def __init__(self, ranks: int, *flags: object) -> None:
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            "--max-restarts=3",
        ]
        command = [
            sys.executable,
            *torchrun,
            str(ROOT / "examples" / "dlrm" / "train.py"),
            *map(str, (*FLAGS, *flags)),
        ]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self) -> str:
        """Waits until the command has succeeded and returns its output."""
        output, _ = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, output
        return output


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    """Starts jobs, and ends the jobs that a failed test leaves running."""
    jobs: list[Job] = []

    def start(*arguments: Any) -> Job:
        jobs.append(Job(*arguments))
        return jobs[-1]

    yield start
    for each in jobs:
        each.process.kill()


@pytest.mark.slow
def test_a_killed_rank_brings_the_job_back(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    flags = (
        "--limit-rows",
        3000,
        "--lr-schedule",
        "cosine",
        "--checkpoint-every",
        8,
        "--keep",
        100,
        "--resume",
    )
    settings = settings_of(
        limit_rows=3000,
        lr_schedule="cosine",
        sharding="row_wise",
        checkpoint_every=8,
        keep=100,
    )
    settings = replace(settings, no_log=False, log_dir=tmp_path / "log", log_every=4)
    train_on_ranks(
        2,
        replace(
            settings, checkpoint=tmp_path / "whole", json_out=tmp_path / "whole.json"
        ),
    )
    places = (
        "--checkpoint",
        tmp_path / "killed",
        "--log-every",
        4,
        "--json",
        tmp_path / "killed.json",
    )
    killed = job(2, *flags, *places)
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("killed/step-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(workers(killed.process)[1], signal.SIGKILL)
    assert "resumed at step " in killed.end()
    assert result_of(tmp_path / "killed.json") == result_of(tmp_path / "whole.json")
    assert names(tmp_path / "killed") == ["log", *names(tmp_path / "whole")]
    assert_same_curves(tmp_path / "killed" / "log", tmp_path / "log")
    last = names(tmp_path / "whole")[-1]
    assert last == "step-000000040"
    assert content(tmp_path / "killed" / last) == content(tmp_path / "whole" / last)

    # The run is resumed from the middle on fewer ranks.
    part = stopped_after(24, tmp_path / "whole", tmp_path / "part")
    train_here(
        settings_of(
            limit_rows=3000,
            lr_schedule="cosine",
            checkpoint=part,
            resume=True,
            json_out=tmp_path / "one.json",
        )
    )
    one, two = (result_of(tmp_path / f"{name}.json") for name in ("one", "whole"))
    check_close(one, two)


def assert_same_curves(log: Path, whole: Path) -> None:
    """The curves have no gaps and no repeated points, and equal those of a run without
    interruption, except times.
    """
    curves, expected = read_curves(log), read_curves(whole)
    assert list(curves) == list(expected)
    for tag, curve in expected.items():
        assert curves[tag].samples == curve.samples, tag
        if not tag.startswith(("step_ms/", "speed/", "memory/", "bytes/")):
            assert curves[tag].values == curve.values, tag
    assert curves["loss/training"].samples == list(range(240, 2401, 240))


def check_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    """A run on another number of ranks has the same rows, and results that differ only
    by rounding.
    """
    for key in ("train_samples", "train_steps", "rows"):
        assert one[key] == other[key]
    for key in ("train_loss", "test_logloss", "test_auc", "val_auc"):
        assert one[key] == pytest.approx(other[key], abs=2e-3)


def on_three_ranks(folder: Path, rank: int, world_size: int) -> None:
    settings = partial(settings_of, sharding="row_wise", checkpoint_every=8, keep=100)
    whole = lasting(train.train(settings(checkpoint=folder / "whole")))
    if rank == 0:
        stopped_after(8, folder / "whole", folder / "part")
    dist.barrier()
    part = train.train(settings(checkpoint=folder / "part", resume=True))
    assert "at step 8 of 20" in part["resumed"]
    assert lasting(part) == whole
    assert content(folder / "part" / "step-000000020") == content(
        folder / "whole" / "step-000000020"
    )

    grown = train.train(settings(checkpoint=folder / "one", resume=True))
    assert "at step 8 of 20" in grown["resumed"]
    check_close(grown, whole)


@pytest.mark.slow
def test_three_ranks_go_on_as_if_never_stopped_and_from_where_one_was(
    tmp_path: Path,
) -> None:
    train_here(
        settings_of(checkpoint=tmp_path / "all_of_one", checkpoint_every=8, keep=100)
    )
    stopped_after(8, tmp_path / "all_of_one", tmp_path / "one")
    run_on_ranks(3, partial(on_three_ranks, tmp_path))
