"""A small model with RecStore tables for any world size, and functions that read its
rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    KeyedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType

from torchrec_recstore.options import TableOptions
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.sharders import RecStoreSharder

DIM = 8
TABLES = {"user": ["u"], "item": ["i", "j"]}


class Model(nn.Module):
    """A linear layer on pooled rows."""

    def __init__(self, rows: int = 100, data_type: DataType = DataType.FP32) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=name,
                embedding_dim=DIM,
                num_embeddings=rows,
                feature_names=features,
                data_type=data_type,
            )
            for name, features in TABLES.items()
        ]
        self.sparse = EmbeddingBagCollection(
            tables=configs, device=torch.device("meta")
        )
        self.over = nn.Linear(3 * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """(B, 1)."""
        pooled: KeyedTensor = self.sparse(features)
        out: Tensor = self.over(
            torch.cat([pooled[key] for key in ("u", "i", "j")], dim=1)
        )
        return out


def recstore(
    sharding_type: str = "table_wise",
    optimizer: EmbOptimType = EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    routing: Literal["block", "hash"] = "block",
    options: TableOptions | dict[str, TableOptions] | None = None,
    data_type: DataType = DataType.FP32,
) -> DistributedModelParallel:
    """The model, all of its tables in RecStore, with the same options or with those of
    a dict by their names.
    """
    by_table = options if isinstance(options, dict) else dict.fromkeys(TABLES, options)
    torch.manual_seed(0)
    model, world = Model(data_type=data_type), dist.get_world_size()
    sharders = [
        RecStoreSharder(fused_params={"optimizer": optimizer, "learning_rate": 0.1})
    ]
    constraints = {
        name: RecStoreConstraints(
            sharding_types=[sharding_type],
            min_partition=(
                DIM // 2
                if sharding_type in ("column_wise", "table_column_wise", "grid_shard")
                else None
            ),
            options=by_table[name] or TableOptions(routing=routing),
        )
        for name in TABLES
    }
    planner = RecStorePlanner(
        topology=Topology(
            world_size=world, local_world_size=world, compute_device="cpu"
        ),
        constraints=constraints,
        debug=False,
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(
        model, plan=plan, sharders=sharders, device=torch.device("cpu")
    )


def stock(
    sharding_type: str = "table_wise",
    optimizer: EmbOptimType = EmbOptimType.EXACT_SGD,
    env: ShardingEnv | None = None,
) -> DistributedModelParallel:
    """The model with TorchRec's own tables."""
    torch.manual_seed(0)
    model = Model()
    sharders = [
        EmbeddingBagCollectionSharder(
            fused_params={"optimizer": optimizer, "learning_rate": 0.1}
        )
    ]
    constraints = {
        name: ParameterConstraints(
            sharding_types=[sharding_type],
            compute_kernels=["fused"],
            min_partition=DIM // 2,
        )
        for name in TABLES
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        constraints=constraints,
        debug=False,
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(
        model, env, plan=plan, sharders=sharders, device=torch.device("cpu")
    )


def batch(
    seed: int, low: int = -(2**62), high: int = 2**62, distinct: int = 40
) -> KeyedJaggedTensor:
    """Four bags for each feature.

    The ids are drawn from ``distinct`` ids in [low, high).
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(
        low, high, (distinct,), generator=torch.Generator().manual_seed(1)
    )
    lengths = torch.randint(0, 4, (12,), generator=generator)
    return KeyedJaggedTensor(
        keys=["u", "i", "j"],
        values=ids[
            torch.randint(0, distinct, (int(lengths.sum()),), generator=generator)
        ],
        lengths=lengths,
    )


def train(model: DistributedModelParallel, steps: int = 5, **kinds: int) -> None:
    """Trains only the tables, on batches that differ by rank."""
    for step in range(steps):
        model(batch(100 * dist.get_rank() + step, **kinds)).sum().backward()


def shards(
    model: DistributedModelParallel,
) -> list[tuple[str, range, Tensor, dict[str, Tensor]]]:
    """The shards of this rank: table, columns, ids and all data of the rows."""
    found = []
    for name, local in model.module.sparse.recstore_state.shards.items():
        for shard in local:
            ids = shard.table.ids()
            found.append((name, shard.table.columns, ids, shard.table.read_rows(ids)))
    return found


def assert_holds(
    model: DistributedModelParallel,
    before: list[tuple[str, range, Tensor, dict[str, Tensor]]],
) -> None:
    """Checks that the shards of this rank equal those of :func:`shards`, including last
    steps and frequencies.
    """
    for (_, _, ids, rows), (_, _, ids_now, rows_now) in zip(
        before, shards(model), strict=True
    ):
        assert torch.equal(ids, ids_now)
        assert rows.keys() == rows_now.keys()
        for key, values in rows.items():
            assert torch.equal(values, rows_now[key]), key


def write_down(model: DistributedModelParallel, directory: str | Path) -> None:
    """Writes the rows of this rank's tables to files, which :func:`whole_tables` of
    another run reads.
    """
    torch.save(shards(model), Path(directory, f"held_by_{dist.get_rank()}.pt"))


def whole_tables(directory: str | Path) -> dict[str, dict[int, dict[str, Tensor]]]:
    """The rows by table and id: ``weight`` (dim,), ``state`` (dim,), ``last_step`` and
    ``frequency``.

    A row-wise state is repeated over its columns.
    """
    tables: dict[str, dict[int, dict[str, Tensor]]] = {name: {} for name in TABLES}
    for path in Path(directory).glob("held_by_*.pt"):
        for name, columns, ids, rows in torch.load(path, weights_only=False):
            state = rows["sum"] if "sum" in rows else torch.zeros(len(ids))
            state = (
                state
                if state.dim() == 2
                else state.unsqueeze(1).expand(-1, len(columns))
            )
            for i, identity in enumerate(ids.tolist()):
                row = tables[name].setdefault(
                    identity,
                    {k: torch.full((DIM,), torch.nan) for k in ("weight", "state")},
                )
                row["weight"][columns.start : columns.stop] = rows["weight"][i]
                row["state"][columns.start : columns.stop] = state[i]
                row.update({key: rows[key][i] for key in ("last_step", "frequency")})
    return tables
