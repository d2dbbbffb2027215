"""Checkpoints are loaded at other world sizes, sharding types and routings without
loss.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec.distributed import DistributedModelParallel

from tests.distributed.workers import run_on_ranks
from torchrec_recstore import load_checkpoint, read_info, save_checkpoint

from . import models

KINDS = (
    "table_wise",
    "row_wise",
    "hash",
    "column_wise",
    "table_column_wise",
    "table_row_wise",
    "grid_shard",
)
Rows = dict[tuple[str, int], dict[str, Tensor]]


def build(
    kind: str, optimizer: EmbOptimType = EmbOptimType.EXACT_ADAGRAD
) -> DistributedModelParallel:
    if kind == "hash":
        return models.recstore("row_wise", optimizer, routing="hash")
    return models.recstore(kind, optimizer)


def whole(model: DistributedModelParallel) -> Rows:
    """Returns the whole rows of all ranks by table and id."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, models.shards(model))
    rows: Rows = {}
    for name, columns, ids, values in (
        shard for of_rank in everywhere for shard in of_rank
    ):
        for i, identity in enumerate(ids.tolist()):
            row = rows.setdefault((name, identity), {})
            for key, value in values.items():
                if value.dim() == 1:
                    assert (
                        key not in row
                        or key == "sum"
                        or torch.equal(row[key], value[i])
                    )
                    row[key] = value[i]
                else:
                    # No id is on two ranks.
                    assert key not in row or row[key][columns.start].isnan()
                    row.setdefault(key, torch.full((models.DIM,), torch.nan))[
                        columns.start : columns.stop
                    ] = value[i]
    return rows


def assert_same(rows: Rows, expected: Rows) -> None:
    assert rows.keys() == expected.keys()
    for key, row in rows.items():
        assert row.keys() == expected[key].keys()
        assert all(torch.equal(row[name], expected[key][name]) for name in row), key


def from_all_to_all(
    rank: int, world_size: int, *, path: str, before: list[int]
) -> None:
    expected: Rows = torch.load(f"{path}/expected.pt", weights_only=False)
    built = {kind: build(kind) for kind in KINDS}
    for number, (kind, model) in enumerate(built.items()):
        models.train(model, steps=1, distinct=70)  # The load must remove these rows.
        # Over all world sizes, each sharding type is loaded into each other sharding
        # type.
        for earlier in before:
            for step in (0, 3):
                saved = KINDS[(number + earlier + world_size + step) % len(KINDS)]
                info = load_checkpoint(model, f"{path}/{earlier}-{saved}")
                assert (info.world_size, info.step) == (earlier, 5)
                assert_same(whole(model), expected)
        save_checkpoint(model, f"{path}/{world_size}-{kind}")
        assert_same(whole(model), expected)
    for number, model in enumerate(built.values()):
        # All pairs of shardings at two ranks, and a third of them at more.
        step = 1 if world_size == 2 else 3
        for saved in KINDS[number % step :: step]:
            load_checkpoint(model, f"{path}/{world_size}-{saved}")
            assert_same(whole(model), expected)
        for name, shards in model.module.sparse.recstore_state.shards.items():
            for shard in shards:
                assert shard.table.steps == shard.table.optimizer_steps == 5, name


@pytest.mark.slow
def test_every_sharding_and_world_size_to_every_other(
    one_rank: None, tmp_path: Path
) -> None:
    world_sizes = (4, 3, 2)
    path, before = str(tmp_path), [1]
    for kind in KINDS:
        model = build(kind)
        models.train(model)
        torch.save(whole(model), tmp_path / "expected.pt")
        save_checkpoint(model, tmp_path / f"1-{kind}")
    for world_size in world_sizes:
        run_on_ranks(world_size, partial(from_all_to_all, path=path, before=before))
        before.append(world_size)
    expected: Rows = torch.load(tmp_path / "expected.pt", weights_only=False)
    assert len(expected) > 50
    for world_size in world_sizes:
        for kind in KINDS:
            load_checkpoint(model, tmp_path / f"{world_size}-{kind}")
            assert_same(whole(model), expected)


def test_equal_tables_give_equal_files(one_rank: None, tmp_path: Path) -> None:
    for name in ("a", "b"):
        model = build("table_wise")
        models.train(model)
        models.shards(model)
        save_checkpoint(
            model, tmp_path / name, training_state={"step": 5, "state": torch.arange(3)}
        )
    names = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert names == sorted(file.name for file in (tmp_path / "b").iterdir())
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (
            tmp_path / "b" / name
        ).read_bytes(), name
    load_checkpoint(model, tmp_path / "a")
    save_checkpoint(model, tmp_path / "c")
    for name in read_info(tmp_path / "a").files.keys() - {"training_state.safetensors"}:
        assert (tmp_path / "a" / name).read_bytes() == (
            tmp_path / "c" / name
        ).read_bytes(), name


def row_wise_states(rank: int, world_size: int, *, path: str) -> None:
    model = build("column_wise", EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    models.train(model)
    save_checkpoint(model, f"{path}/columns")
    everywhere: list[Any] = [None] * world_size
    dist.all_gather_object(everywhere, models.shards(model))
    joined = build("table_wise", EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    load_checkpoint(joined, f"{path}/columns")
    for name, _, _, rows in models.shards(joined):
        halves = [
            values["sum"]
            for of_rank in everywhere
            for table, _, _, values in of_rank
            if table == name
        ]
        assert len(halves) == 2
        assert torch.equal(rows["sum"], torch.stack(halves).double().mean(0).float())
    save_checkpoint(joined, f"{path}/tables")
    load_checkpoint(model, f"{path}/tables")
    rows_of = whole(joined)
    for name, _, ids, rows in models.shards(model):
        assert torch.equal(
            rows["sum"], torch.stack([rows_of[name, i]["sum"] for i in ids.tolist()])
        )


def test_a_row_wise_state_is_averaged_when_columns_join_and_copied_when_they_split(
    tmp_path: Path,
) -> None:
    run_on_ranks(2, partial(row_wise_states, path=str(tmp_path)))
