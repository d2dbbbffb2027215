"""8-bit rows on two ranks: shardings, Redis, torch.distributed.checkpoint, ``recstore
inspect`` and ``diff``.

Optimizer state is in float32 or in float16.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torchrec.distributed import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType
from typer.testing import CliRunner

from tests.redis_server import needs_redis, redis_server
from torchrec_recstore.checkpoint import (
    load_checkpoint,
    load_distributed_checkpoint,
    save_checkpoint,
)
from torchrec_recstore.cli import app
from torchrec_recstore.options import LRU, RedisStore, TableOptions
from torchrec_recstore.store import Table

from .test_bounded_tables import (
    GRID,
    MAX_ROWS,
    ROW,
    TABLE,
    bags,
    batch_of,
    build,
    train_step,
)
from .workers import run_on_ranks

STEPS = 6


def trained(
    name: str,
    sharding_type: str,
    options: TableOptions,
    world_size: int,
    steps: int,
    state_dtype: torch.dtype,
) -> tuple[DistributedModelParallel, list[Table]]:
    """Returns a model that has been trained on the same batches, and this rank's
    shards.
    """
    config = bags(name, data_type=DataType.INT8)
    model, shards = build(
        config, sharding_type, options, world_size, {"state_dtype": state_dtype}
    )
    assert all(
        (shard.dtype, shard.state_dtype) == (torch.int8, state_dtype)
        for shard in shards
    )
    for step in range(steps):
        train_step(model, batch_of(config, step, dist.get_rank()))
    return model, shards


def rows_of(shards: list[Table]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    return [(ids := shard.ids(), shard.read_rows(ids)) for shard in shards]


def assert_equal_rows(one: list[Table], other: list[Table]) -> None:
    for (ids, rows), (other_ids, other_rows) in zip(
        rows_of(one), rows_of(other), strict=True
    ):
        assert torch.equal(ids, other_ids)
        for key in rows:
            assert torch.equal(rows[key], other_rows[key]), key


def eight_bits(rank: int, world_size: int, *, url: str, path: Path) -> None:
    os.chdir(path)
    full, half = torch.float32, torch.float16
    for sharding_type, kept in (
        (ROW, full),
        (TABLE, full),
        (GRID, full),
        (ROW, half),
        (GRID, half),
    ):
        name, free = (
            f"{sharding_type}_{'t' if kept is full else 'half'}",
            TableOptions(),
        )
        bounded = TableOptions(
            max_rows=MAX_ROWS, eviction=LRU(), cold_store=RedisStore(url)
        )
        model, shards = trained(name, sharding_type, bounded, world_size, STEPS, kept)
        plain, plain_shards = trained(
            name, sharding_type, free, world_size, STEPS, kept
        )
        assert not shards or sum(shard.stats().cold_rows for shard in shards) > 0
        assert_equal_rows(shards, plain_shards)
        # The distributed checkpoint has float32 weights and states. Rows that are made
        # of them have the same bits.
        state = {
            "model": plain.state_dict(),
            "optimizer": plain.fused_optimizer.state_dict(),
        }
        dcp.save(state, checkpoint_id=f"{name}_dcp")
        loaded, loaded_shards = trained(name, sharding_type, free, world_size, 1, kept)
        load_distributed_checkpoint(loaded, f"{name}_dcp")
        assert_equal_rows(loaded_shards, plain_shards)
        save_checkpoint(model, f"{name}_saved")
        # States in float16 have the same values in float32.
        for kind in {kept, full}:
            again, again_shards = trained(
                name, sharding_type, free, world_size, 1, kind
            )
            load_checkpoint(again, f"{name}_saved")
            assert_equal_rows(again_shards, plain_shards)
        save_checkpoint(plain, f"{name}_plain")
        train_step(plain, batch_of(bags(name), STEPS, rank))
        save_checkpoint(plain, f"{name}_later")
        if rank == 0:
            inspected = CliRunner().invoke(app, ["inspect", f"{name}_saved"])
            assert inspected.exit_code == 0, inspected.output
            assert "int8" in inspected.output
            same = CliRunner().invoke(
                app, ["diff", f"{name}_saved", f"{name}_plain", "--json"]
            )
            found = json.loads(same.output)["tables"][name]
            assert (found["added"], found["gone"], found["changed"]) == (0, 0, 0), found
            later = CliRunner().invoke(
                app, ["diff", f"{name}_plain", f"{name}_later", "--json"]
            )
            found = json.loads(later.output)["tables"][name]
            assert found["changed"] > 0, found
            assert found["largest"]["weight"] > 0, found
        dist.barrier()


@needs_redis
@pytest.mark.slow
def test_rows_keep_their_bits_in_redis_checkpoints_and_every_sharding(
    tmp_path: Path,
) -> None:
    with redis_server(tmp_path / "redis") as server:
        run_on_ranks(2, partial(eight_bits, url=server.url, path=tmp_path))
