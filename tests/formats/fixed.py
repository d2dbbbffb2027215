"""Writes small files of the present formats, and the values that the files hold.

    python -m tests.formats.fixed

replaces the files beside this module, in ``checkpoint_N`` and ``export_N``, where N is
the number of the format. test_formats.py loads them.
"""

# Not with annotations from __future__: fx copies those of forward as they are, and
# TorchScript reads them.

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology

from tests.distributed.workers import run_on_ranks
from torchrec_recstore import optim
from torchrec_recstore.checkpoint import info as checkpoint_info
from torchrec_recstore.checkpoint import save_checkpoint, writer
from torchrec_recstore.inference import (
    export_delta,
    export_for_inference,
    read_delta,
)
from torchrec_recstore.modules import (
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
)
from torchrec_recstore.options import (
    LFU,
    LRU,
    ConstantInit,
    Expiry,
    MinFrequency,
    NormalInit,
    RocksDBStore,
    TableOptions,
    UniformInit,
)
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.sharders import RecStoreSharder
from torchrec_recstore.store import Table
from torchrec_recstore_service.server.applied import AppliedRequests
from torchrec_recstore_service.server.data_directory import DataDirectory, Membership
from torchrec_recstore_service.server.save_names import SaveName
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.tables.limits import Limits
from torchrec_recstore_service.wire.table_spec import TableSpec
from torchrec_recstore_serving.export import verification
from torchrec_recstore_serving.export.row_formats import DTYPES

CHECKPOINTS = Path(__file__).parent / f"checkpoint_{checkpoint_info.VERSION}"
EXPORTS = Path(__file__).parent / f"export_{verification.FORMAT}"
INDEXES = ("sorted", "hash")
DIM = 8
OPTIONS = {
    "user": TableOptions(
        initializer=UniformInit(-0.5, 0.5),
        seed=3,
        max_rows=64,
        eviction=LFU(half_life_steps=4),
        expiry=Expiry(steps=1000),
        admission=MinFrequency(2),
    ),
    "item": TableOptions(
        initializer=ConstantInit(0.25), expected_rows=1000, missing="init"
    ),
}
OPTIMIZERS: dict[str, optim.Optimizer] = {
    "sgd": optim.SGD(lr=0.5),
    "adam": optim.Adam(lr=0.5),
    "partial_adam": optim.PartialRowWiseAdam(lr=0.5),
    "rowwise": optim.RowWiseAdagrad(lr=0.5),
}
DTYPES_OF_ROWS = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
TRAINING_STATE = {
    "step": 5,
    "position": (1, "epoch", None, True, float("inf")),
    "optimizer": {
        "state": {0: {"exp_avg": torch.tensor([0.5, -1.5])}},
        "groups": [{"lr": 0.1}],
    },
}
SET = Membership("0123456789abcdef", 0, 1, (0,), 3, "token", None, ("token",))
BAGS = [
    EmbeddingBagConfig(
        name="t", embedding_dim=8, num_embeddings=100, feature_names=["f", "g"]
    ),
    EmbeddingBagConfig(
        name="m",
        embedding_dim=4,
        num_embeddings=100,
        feature_names=["h"],
        pooling=PoolingType.MEAN,
    ),
]
ROWS = [
    EmbeddingConfig(name="s", embedding_dim=8, num_embeddings=100, feature_names=["h"])
]


def ids_of(step: int) -> Tensor:
    """The ids of a step: small ids, and the least and greatest int64."""
    return torch.tensor([step, step + 1, -3, 2 * step - 9, -(2**63), 2**63 - 1])


class Sharded(nn.Module):
    """Two tables and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=name, embedding_dim=DIM, num_embeddings=2**40, feature_names=[name]
            )
            for name in OPTIONS
        ]
        self.sparse = EmbeddingBagCollection(
            tables=configs, device=torch.device("meta")
        )
        self.over = nn.Linear(2, 1)
        with torch.no_grad():
            self.over.weight.copy_(torch.tensor([[0.5, -2.0]]))
            self.over.bias.fill_(0.125)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """(B, 2 * DIM)."""
        pooled: KeyedTensor = self.sparse(features)
        return pooled


def sharded(
    sharding_type: str = "table_wise",
    optimizer: EmbOptimType = EmbOptimType.EXACT_ROWWISE_ADAGRAD,
) -> DistributedModelParallel:
    """The model, with its tables in RecStore."""
    split = DIM // 2 if sharding_type == "column_wise" else None
    constraints = {
        name: RecStoreConstraints(
            sharding_types=[sharding_type], min_partition=split, options=options
        )
        for name, options in OPTIONS.items()
    }
    sharders = [
        RecStoreSharder(fused_params={"optimizer": optimizer, "learning_rate": 0.5})
    ]
    model = Sharded()
    planner = RecStorePlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        constraints=constraints,
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(
        model, plan=plan, sharders=sharders, device=torch.device("cpu")
    )


def train(model: DistributedModelParallel, steps: range) -> None:
    """Trains with exact gradients, so that rows are equal on every machine."""
    for step in steps:
        ids = ids_of(step + 7 * dist.get_rank())
        features = KeyedJaggedTensor(
            list(OPTIONS), torch.cat([ids, ids]), lengths=torch.tensor([3, 3, 2, 4])
        )
        values = model(features).values()
        (
            values * (torch.arange(values.numel()).view_as(values) % 5 - 2)
        ).sum().backward()


def shards(model: DistributedModelParallel) -> list[Table]:
    """The shards of this rank, of all tables."""
    return [
        shard.table
        for of_table in model.module.sparse.recstore_state.shards.values()
        for shard in of_table
    ]


def write_expected(tables: list[Table], path: Path) -> None:
    """Writes the rows of all ranks' tables as plain safetensors, and their clocks as
    JSON.

    Collective.

    Args:
        tables: The shards of this rank.
        path: The path without a suffix.
    """
    mine = [
        (
            table.name,
            table.columns,
            table.ids(),
            table.read_rows(table.ids()),
            table.steps,
            table.optimizer_steps,
        )
        for table in tables
    ]
    everywhere: list[Any] = [mine]
    if dist.is_initialized():
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, mine)
        if dist.get_rank() != 0:
            return
    tensors: dict[str, Tensor] = {}
    clocks: dict[str, tuple[int, int]] = {}
    found: dict[str, list[dict[str, Tensor]]] = {}
    for name, columns, ids, rows, steps, optimizer_steps in (
        shard for of_rank in everywhere for shard in of_rank
    ):
        found.setdefault(f"{name}/{columns.start}-{columns.stop}", []).append(
            {"ids": ids, **rows}
        )
        clocks[name] = max(clocks.get(name, (0, 0)), (steps, optimizer_steps))
    for shard, of_ranks in found.items():
        order = torch.cat([each["ids"] for each in of_ranks]).argsort()
        for key in of_ranks[0]:
            tensors[f"{shard}/{key}"] = torch.cat([each[key] for each in of_ranks])[
                order
            ]
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(tensors, path.with_suffix(".safetensors"))
    path.with_suffix(".json").write_text(json.dumps(clocks) + "\n")


@contextmanager
def small_parts() -> Iterator[None]:
    """Makes the parts of checkpoints small, so that each table has several."""
    before = writer.PART_BYTES
    writer.PART_BYTES = 400
    try:
        yield
    finally:
        writer.PART_BYTES = before


def write_model_checkpoints(to: Path) -> None:
    """Writes a full checkpoint and two deltas of one rank, and the same model by
    ``torch.distributed.checkpoint``.
    """
    model = sharded()
    user, item = (
        table for name in OPTIONS for table in shards(model) if table.name == name
    )
    train(model, range(5))
    with small_parts():
        save_checkpoint(model, to / "full", training_state=TRAINING_STATE)
    write_expected(shards(model), to / "expected" / "full")
    user.remove(torch.tensor([-3]))
    item.remove(torch.tensor([0, 2**63 - 1]))
    train(model, range(5, 7))
    save_checkpoint(
        model, to / "delta", delta_of=to / "full", training_state={"step": 7}
    )
    write_expected(shards(model), to / "expected" / "delta")
    ids = item.ids()
    item.remove(ids[2:])
    user.remove(user.ids()[1:])
    train(model, range(40, 41))
    with torch.no_grad():
        model.module.over.bias.fill_(2.5)
    save_checkpoint(model, to / "second_delta", delta_of=to / "delta")
    write_expected(shards(model), to / "expected" / "second_delta")
    with _inside(to):  # the path is written into the checkpoint
        dcp.save(
            {
                "model": model.state_dict(),
                "optimizer": model.fused_optimizer.state_dict(),
            },
            checkpoint_id="dcp",
        )


@contextmanager
def _inside(directory: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def write_checkpoints_of_ranks(rank: int, world_size: int, *, to: Path) -> None:
    """Writes checkpoints of two ranks: row-wise and column-wise."""
    for name, optimizer in (
        ("row_wise", EmbOptimType.ADAM),
        ("column_wise", EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    ):
        model = sharded(name, optimizer)
        train(model, range(5))
        save_checkpoint(model, to / name)
        write_expected(shards(model), to / "expected" / name)


def write_server_data(to: Path) -> None:
    """Writes the files of a stopped server: a table of each data type, one in a cold
    store, one whose rows expire.
    """
    with tempfile.TemporaryDirectory() as cold:
        tables = HostedTables(Limits(cold_store=RocksDBStore(cold)))
        for dtype, (name, optimizer) in zip(
            DTYPES_OF_ROWS, OPTIMIZERS.items(), strict=True
        ):
            options = TableOptions(
                initializer=NormalInit(0.0, 0.5, truncate_std=2.0), missing="init"
            )
            tables.create(
                name, TableSpec(DIM, dtype, optimizer, options, lossless=name == "sgd")
            )
        bounded = TableOptions(
            initializer=ConstantInit(1.5), max_rows=12, eviction=LRU()
        )
        tables.create(
            "cold",
            TableSpec(DIM, torch.float32, optim.Adagrad(lr=0.5), bounded, shard=(1, 3)),
        )
        tables.create(
            "temporary",
            TableSpec(
                DIM, torch.float32, optim.SGD(lr=0.5), TableOptions(), temporary=True
            ),
        )
        for name in tables.specs():
            for step in range(3):
                ids = ids_of(3 * step)[:4]
                tables.push(name, ids, torch.arange(4 * DIM).view(4, DIM) / 8 - step)
                tables.update(
                    name, ids, torch.arange(4 * DIM).view(4, DIM) % 5 / 4 - 0.5
                )
        options = TableOptions(initializer=ConstantInit(1.5), expiry=Expiry(seconds=60))
        tables.create(
            "timed",
            TableSpec(DIM, torch.float32, optim.RowWiseAdagrad(lr=0.5), options),
        )
        timed = tables._by_name()["timed"].table
        for step in range(3):
            timed.set_time(EVENT_TIME + 20 * step)
            timed.lookup(torch.tensor([step, 100]), train=True)
        directory = DataDirectory(to / "server")
        directory.set_membership(SET)
        tables.save(directory.checkpoint(SaveName("stopped-0")))
        applied = AppliedRequests()
        applied.once("client", 6, 6, lambda: 3)
        applied.once("client", 7, 6, lambda: 1)
        state = {
            "checkpoint": "stopped-0",
            "epoch": SET.label,
            "applied": applied.to_json(),
        }
        directory.set_last(SaveName("stopped-0"), state)
        directory.close()
        (to / "server" / "lock").unlink()
        write_expected(
            [hosted.table for hosted in hosted_tables(tables)],
            to / "expected" / "server",
        )
        tables.close()


EVENT_TIME = 1_700_000_000.0
"""The time of the first step of the table "timed", in seconds since 1970.

The others follow after 20 s each.
"""


def hosted_tables(tables: HostedTables) -> list[Any]:
    """The tables that saves include."""
    return [
        tables._by_name()[name]
        for name, spec in tables.specs().items()
        if not spec.temporary
    ]


class Served(nn.Module):
    """Both collections and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = RecStoreEmbeddingBagCollection(BAGS, lr=0.5)
        self.rows = RecStoreEmbeddingCollection(ROWS, lr=0.5)
        self.over = nn.Linear(20, 1)
        self.scale = 2
        with torch.no_grad():
            self.over.weight.copy_(torch.arange(20)[None] / 8 - 1)
            self.over.bias.fill_(0.125)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """(B, 1)."""
        pooled: KeyedTensor = self.bags(features)
        rows: dict[str, JaggedTensor] = self.rows(features)
        out: Tensor = self.over(pooled.values())
        return out * self.scale + rows["h"].values().sum()


def features_of(values: Tensor) -> KeyedJaggedTensor:
    """Two bags of each feature of :class:`Served`."""
    return KeyedJaggedTensor(
        ["f", "g", "h"], values, lengths=torch.tensor([3, 1, 2, 2, 1, 3])
    )


def train_served(model: Served, first: int) -> Served:
    """Runs a training step. The model is in evaluation mode afterwards."""
    model.train()(
        features_of(torch.cat([ids_of(first), ids_of(first + 1)]))
    ).sum().backward()
    return model.eval()


def write_exports(to: Path, index: str) -> None:
    """Writes an export of :class:`Served`, a delta of it, and the rows and the outputs
    before and after the delta.

    Args:
        to: The directory of the files.
        index: ``"sorted"`` or ``"hash"``.
    """
    to.mkdir(parents=True)
    model, path, delta = Served(), to / "model.pt", to / "model.delta"
    export_for_inference(
        train_served(model, 3), path, dtype=DTYPES["int4"], index=index
    )
    with torch.no_grad():
        model.over.bias.fill_(2.5)
    export_delta(train_served(model, 11), delta, base=path)
    served = torch.jit.load(path)
    versions = [served.recstore_version()]
    tensors = {f"before/{key}": value for key, value in answer(served).items()}
    served.apply_delta(read_delta(delta))
    versions.append(served.recstore_version())
    tensors |= {f"after/{key}": value for key, value in answer(served).items()}
    safetensors.torch.save_file(tensors, to / "expected.safetensors")
    (to / "expected.json").write_text(json.dumps(versions) + "\n")


def answer(served: torch.jit.ScriptModule) -> dict[str, Tensor]:
    """The rows and the output of a served model."""
    tensors = {
        "output": served(features_of(torch.cat([ids_of(3), ids_of(11)]))).detach()
    }
    for name in served.recstore_tables():
        tensors[f"{name}/ids"] = served.recstore_ids(name).clone()
        tensors[f"{name}/rows"] = served.recstore_rows(name).clone()
    return tensors


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group with this process as its only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Replaces all files."""
    # TorchScript's files name the source of their code, for tracebacks: not by where it
    # lies on this machine.
    find = torch._sources.get_source_lines_and_file

    def found(*arguments: Any) -> tuple[list[str], int, str | None]:
        lines, number, file = find(*arguments)
        return lines, number, file and Path(file).name

    torch._sources.get_source_lines_and_file = (
        torch.jit.frontend.get_source_lines_and_file
    ) = found
    for folder in (CHECKPOINTS, EXPORTS):
        shutil.rmtree(folder, ignore_errors=True)
    CHECKPOINTS.mkdir()
    with one_rank():
        write_model_checkpoints(CHECKPOINTS)
        for index in INDEXES:
            write_exports(EXPORTS / index, index)
    write_server_data(CHECKPOINTS)
    run_on_ranks(2, partial(write_checkpoints_of_ranks, to=CHECKPOINTS))


if __name__ == "__main__":
    main()
