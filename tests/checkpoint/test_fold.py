"""A folded chain holds the same rows as a table into which the chain is loaded."""

from __future__ import annotations

import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec.distributed import DistributedModelParallel
from typer.testing import CliRunner

from tests.distributed.workers import run_on_ranks
from torchrec_recstore import (
    CheckpointError,
    RecStoreWarning,
    compact_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from torchrec_recstore.checkpoint import fold, writer
from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.cli import app
from torchrec_recstore.store import Table

from . import models

Shards = list[tuple[str, range, Tensor, dict[str, Tensor]]]


def tables_of(model: DistributedModelParallel) -> dict[str, Table]:
    return {
        name: shards[0].table
        for name, shards in model.module.sparse.recstore_state.shards.items()
    }


def assert_equal_shards(one: Shards, other: Shards) -> None:
    for (_, columns, ids, rows), (_, other_columns, other_ids, other_rows) in zip(
        one, other, strict=True
    ):
        assert columns == other_columns
        assert torch.equal(ids, other_ids)
        assert all(torch.equal(rows[key], other_rows[key]) for key in rows)


@pytest.mark.usefixtures("one_rank")
def test_folded_rows_that_are_not_finite_are_named(
    tmp_path: Path, small_parts: None
) -> None:
    model = models.recstore()
    models.train(model)
    save_checkpoint(model, tmp_path / "full")
    table = tables_of(model)["user"]
    ids = table.ids()[[0, 3, 7]]
    weights = table.lookup(ids)
    weights[0, 1] = torch.nan
    weights[2, 0] = -torch.inf
    table.insert(ids, weights)
    with pytest.warns(RecStoreWarning, match="2 of the saved rows"):
        save_checkpoint(model, tmp_path / "delta", delta_of=tmp_path / "full")
    with pytest.warns(RecStoreWarning) as caught:
        compact_checkpoint(tmp_path / "delta", tmp_path / "folded")
    (warning,) = caught
    text = "table 'user': 2 of the saved rows have NaN or infinity"
    assert str(warning.message).startswith(text)
    assert warning.filename == __file__
    command = ["compact", str(tmp_path / "delta"), str(tmp_path / "by command")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    assert result.stderr.startswith(f"warning: {text}")
    assert result.stderr.count("\n") == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecStoreWarning)
        compact_checkpoint(tmp_path / "full", tmp_path / "finite")


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def make_parts_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PART_BYTES", 700)
    monkeypatch.setattr(fold, "_LEAST_ROWS", 3)
    monkeypatch.setattr(fold, "_WINDOW_BYTES", 0)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes parts of a few rows and windows of fewer rows, so that a table has many
    parts and a part many windows.
    """
    make_parts_small(monkeypatch)


@pytest.mark.parametrize(
    "optimizer", [EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.ADAM]
)
def test_gives_the_files_of_a_full_save(
    one_rank: None, tmp_path: Path, small_parts: None, optimizer: EmbOptimType
) -> None:
    model = models.recstore(optimizer=optimizer)
    save_checkpoint(model, tmp_path / "0")
    for delta in range(1, 6):
        models.train(model, steps=2, distinct=20 * delta)
        user, item = tables_of(model).values()
        user.remove(user.ids()[:3])
        if delta == 3:
            # Most ids are removed, so that the delta lists the ids that stay.
            item.remove(item.ids()[2:])
        if delta == 4:
            user.remove(user.ids())
        state = {
            "optimizer": {"state": {0: torch.ones(3)}, "lr": 0.1},
            "at": (delta, None),
        }
        save_checkpoint(
            model,
            tmp_path / str(delta),
            delta_of=tmp_path / str(delta - 1),
            training_state=state,
        )
    save_checkpoint(model, tmp_path / "whole", training_state=state)
    info = compact_checkpoint(tmp_path / "5", tmp_path / "compacted")
    assert {table.removal for table in info.tables.values()} == {"left"}
    assert max(len(table.parts) for table in info.tables.values()) > 3
    assert files_in(tmp_path / "compacted") == files_in(tmp_path / "whole")
    loaded = models.recstore(optimizer=optimizer)
    load_checkpoint(loaded, tmp_path / "compacted")
    assert_equal_shards(models.shards(model), models.shards(loaded))


def folds_deltas_of_other_shardings(rank: int, world_size: int, *, path: Path) -> None:
    # The change needs no undo, because the process ends with the test.
    make_parts_small(pytest.MonkeyPatch())
    last = None
    for number, sharding in enumerate(["row_wise", "column_wise", "grid_shard"]):
        model = models.recstore(sharding)
        if last is not None:
            load_checkpoint(model, last)
        models.train(model, steps=2, distinct=30 + 20 * number)
        save_checkpoint(model, path / str(number), delta_of=last)
        last = path / str(number)
    assert last is not None
    if rank == 0:
        compact_checkpoint(last, path / "compacted")
    dist.barrier()
    model, other = models.recstore("table_wise"), models.recstore("table_wise")
    load_checkpoint(model, last)
    load_checkpoint(other, path / "compacted")
    assert_equal_shards(models.shards(model), models.shards(other))
    assert sum(len(ids) for _, _, ids, _ in models.shards(model))


def test_each_delta_of_another_sharding(tmp_path: Path) -> None:
    run_on_ranks(2, partial(folds_deltas_of_other_shardings, path=tmp_path))


def test_what_it_cannot_fold(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    models.train(model)
    save_checkpoint(model, tmp_path / "full")
    models.train(model)
    save_checkpoint(model, tmp_path / "delta", delta_of=tmp_path / "full")
    with pytest.raises(FileExistsError, match="full exists already"):
        compact_checkpoint(tmp_path / "delta", tmp_path / "full")
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        compact_checkpoint(tmp_path / "nowhere", tmp_path / "new")
    (part,) = (tmp_path / "full").glob("user-*")
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{part} is damaged"):
        compact_checkpoint(tmp_path / "delta", tmp_path / "new")
    (tmp_path / "full").rename(tmp_path / "moved")
    with pytest.raises(
        FileNotFoundError, match=r"delta is a delta of .*full, which is not there"
    ):
        compact_checkpoint(tmp_path / "delta", tmp_path / "new")
    assert sorted(
        path.name for path in tmp_path.iterdir() if "rendezvous" not in path.name
    ) == ["delta", "moved"]


def test_a_fold_that_fails_leaves_nothing(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    models.train(model)
    save_checkpoint(model, tmp_path / "full")
    (part,) = (tmp_path / "full").glob("user-*")  # the last table
    part.unlink()
    with pytest.raises(CheckpointError, match=f"{part} is missing"):
        compact_checkpoint(tmp_path / "full", tmp_path / "new")
    assert sorted(
        path.name for path in tmp_path.iterdir() if "rendezvous" not in path.name
    ) == ["full"]


def test_a_full_disk_is_named(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error while a file is copied names the target that could not be written, and
    not the source.
    """
    model = models.recstore()
    save_checkpoint(model, tmp_path / "full", training_state={"epoch": torch.ones(1)})

    def full(destination: Destination) -> Path:
        staging = stage(destination)
        (staging / "training_state.safetensors").symlink_to("/dev/full")
        return staging

    stage = Destination.stage
    monkeypatch.setattr(Destination, "stage", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        compact_checkpoint(tmp_path / "full", tmp_path / "new")
    assert re.fullmatch(
        r".*/\.new\.saving-[0-9a-f]{12}/training_state\.safetensors",
        error.value.filename,
    )
    assert not (tmp_path / "new").exists()
