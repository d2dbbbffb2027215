"""The rows of a model on several ranks as Arrow, in every sharding."""

from __future__ import annotations

from functools import partial

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed import DistributedModelParallel

from tests.checkpoint import models
from torchrec_recstore import insert_rows, table_rows, table_stats

from .test_reshard import build
from .workers import run_on_ranks

KINDS = ("row_wise", "column_wise", "hash", "grid_shard", "table_wise")


def trained(kind: str, steps: int = 3) -> DistributedModelParallel:
    model = build(kind, EmbOptimType.ADAM)
    for step in range(steps):
        model(models.batch(100 * dist.get_rank() + step)).sum().backward()
    return model


def without_steps(rows: pa.Table) -> pa.Table:
    return rows.drop_columns(["last_step"])


def rows_travel(rank: int, world_size: int, *, kinds: tuple[str, ...]) -> None:
    expected: dict[str, pa.Table] = {}
    for name in ("user", "item"):
        expected[name] = table_rows(trained(kinds[0]), name)
        assert expected[name].num_rows > world_size
    for kind in kinds:
        model = trained(kind)
        other = build(kind, EmbOptimType.ADAM)
        for name, rows in expected.items():
            of_kind = table_rows(model, name)
            assert of_kind["id"].to_pylist() == rows["id"].to_pylist()
            assert of_kind.num_rows == table_stats(model)[name].rows
            assert of_kind.schema == rows.schema
            # each rank writes a part of the rows, wherever they belong
            share = rows.slice(rank * 3, 3 if rank < world_size - 1 else None)
            insert_rows(other, name, share)
            written = table_rows(other, name)
            assert set(written["last_step"].to_pylist()) == {0}, "it has no steps"
            assert without_steps(written).equals(without_steps(rows)), (kind, name)
    gathered: list[object] = [None] * world_size
    dist.all_gather_object(gathered, expected["user"].to_pylist())
    assert all(rows == gathered[0] for rows in gathered)


def some_rows_and_refusals(rank: int, world_size: int) -> None:
    model = trained("row_wise")
    rows = table_rows(model, "user")
    ids = torch.tensor(rows["id"].to_pylist())
    wanted = ids[rank : rank + 1]
    some = table_rows(model, "user", ids=wanted)
    assert some["id"].to_pylist() == ids[:world_size].tolist()
    assert some.equals(rows.slice(0, world_size))
    # the row of the last rank counts
    weight = pa.array([[float(rank)] * models.DIM], pa.list_(pa.float32()))
    insert_rows(model, "user", pa.table({"id": ids[:1].tolist(), "weight": weight}))
    read = table_rows(model, "user", ids=ids[:1])
    assert read["weight"].to_pylist() == [[world_size - 1.0] * models.DIM]
    before = table_rows(model, "user")
    wrong = rows if rank < world_size - 1 else rows.drop_columns(["weight"])
    with pytest.raises(ValueError, match="needs one column 'weight'"):
        insert_rows(model, "user", wrong)
    with pytest.raises(TypeError, match="table_rows: ids"):
        table_rows(model, "user", ids=ids if rank < world_size - 1 else ids.float())
    assert table_rows(model, "user").equals(before)


def everything(rank: int, world_size: int, *, kinds: tuple[str, ...]) -> None:
    rows_travel(rank, world_size, kinds=kinds)
    some_rows_and_refusals(rank, world_size)


@pytest.mark.parametrize(
    ("world_size", "kinds"),
    [
        (2, ("row_wise", "column_wise")),
        *[pytest.param(n, KINDS, marks=pytest.mark.slow) for n in (1, 4)],
    ],
)
def test_rows_as_arrow(world_size: int, kinds: tuple[str, ...]) -> None:
    run_on_ranks(world_size, partial(everything, kinds=kinds))
