"""A compiled model trains as the eager model: losses, rows, states, bookkeeping and
statistics are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    table_wise,
)
from torchrec.distributed.train_pipeline.train_pipelines import (
    TorchCompileConfig,
    TrainPipelinePT2,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.pt2.utils import kjt_for_pt2_tracing

from torchrec_recstore import ops
from torchrec_recstore.options import LRU, Expiry, MinFrequency, TableOptions
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.sharders import (
    RecStoreEmbeddingCollectionSharder,
    RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
    RecStoreSharder,
    table_stats,
)
from torchrec_recstore.sharders.plan_entries import RECSTORE_KERNEL
from torchrec_recstore.store import Table
from torchrec_recstore.triples import release

from .workers import run_on_ranks

pytestmark = pytest.mark.skipif(
    release(version("torchrec")) < (1, 8),
    reason=(
        "TorchRec 1.7 compiles no row-wise tables, and torch.compile of a model fails"
        " there with stock tables, too"
    ),
)

FEATURES = ("f0", "f1", "f2")
MOST_IDS = 4  # The largest number of ids in a bag.
CPU = torch.device("cpu")
META = torch.device("meta")
STEPS = 12
BOUNDED = TableOptions(
    max_rows=64, eviction=LRU(), expiry=Expiry(steps=6), admission=MinFrequency(2)
)
OPTIONS = {
    "bounded": BOUNDED,
    "bounded_rows": BOUNDED,
    "timed": TableOptions(expiry=Expiry(seconds=86400)),
}
"""The options of the tables of a collection."""


def bags(
    prefix: str, pooling: PoolingType = PoolingType.SUM, weighted: bool = False
) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(
            name=f"{prefix}_{name}",
            num_embeddings=hint,
            embedding_dim=dim,
            feature_names=features,
            pooling=pooling,
        )
        for name, hint, dim, features in (
            ("a", 2**40, 8, ["f0", "f1"]),
            ("b", 100, 4, ["f2"]),
        )
    ]
    return EmbeddingBagCollection(tables=tables, device=META, is_weighted=weighted)


def rows(prefix: str) -> EmbeddingCollection:
    tables = [
        EmbeddingConfig(
            name=f"{prefix}_a",
            num_embeddings=2**40,
            embedding_dim=4,
            feature_names=["f0", "f1"],
        ),
        EmbeddingConfig(
            name=f"{prefix}_b",
            num_embeddings=100,
            embedding_dim=4,
            feature_names=["f2"],
        ),
    ]
    return EmbeddingCollection(tables=tables, device=META)


def processed(prefix: str) -> FeatureProcessedEmbeddingBagCollection:
    positions = PositionWeightedModuleCollection(
        dict.fromkeys(FEATURES, MOST_IDS), device=CPU
    )
    for weight in positions.parameters():
        weight.data.copy_(torch.linspace(0.5, 1.5, len(weight)))
    return FeatureProcessedEmbeddingBagCollection(
        bags(prefix, weighted=True), positions
    )


KINDS = {
    "sum": lambda: [bags("sum")],
    "processed": lambda: [processed("processed")],
    "options": lambda: [
        bags("weighted", weighted=True),
        bags("timed"),
        bags("bounded"),
        rows("bounded_rows"),
    ],
    "pooled": lambda: [
        bags("weighted", weighted=True),
        bags("mean", PoolingType.MEAN),
        bags("timed"),
    ],
    "several": lambda: [
        bags("mean", PoolingType.MEAN),
        processed("processed"),
        rows("one"),
        rows("two"),
    ],
}
"""The collections of a model: a graph of several takes less time to compile than
graphs of one.
"""
WEIGHTED = {"options", "pooled"}
"""The models whose batches have weights."""
SHARDINGS = {"_a": "row_wise", "_b": "table_wise"}


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.collections = nn.ModuleList(KINDS[kind]())
        self.sequential = [
            isinstance(each, EmbeddingCollection) for each in self.collections
        ]
        width = sum(12 if sequential else 20 for sequential in self.sequential)
        self.over = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for collection, sequential in zip(
            self.collections, self.sequential, strict=True
        ):
            out = collection(batch)
            if sequential:
                outputs += [
                    out[feature].to_padded_dense(MOST_IDS).sum(1)
                    for feature in FEATURES
                ]
            else:
                outputs.append(out.values())
        loss = ((self.over(torch.cat(outputs, dim=1)) - 1) ** 2).mean()
        return loss, loss.detach()


def batch(step: int, rank: int, weighted: bool) -> KeyedJaggedTensor:
    """Returns bags of 0 to 4 ids. Half of the ids of a step are new."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, MOST_IDS + 1, (3 * 5,), generator=generator)
    n = int(lengths.sum())
    old, new = (
        torch.randint(0, 50, (n,), generator=generator),
        torch.randint(-(2**62), 2**62, (n,), generator=generator),
    )
    ids = torch.where(torch.rand(n, generator=generator) < 0.5, old, new)
    weights = torch.rand(n, generator=generator) + 0.5 if weighted else None
    return kjt_for_pt2_tracing(
        KeyedJaggedTensor(list(FEATURES), ids, weights, lengths=lengths)
    )


def build(
    kind: str, world_size: int
) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model(kind)
    params = {"learning_rate": 0.05, "eps": 1e-8}
    sharders = [
        RecStoreSharder(fused_params=dict(params)),
        RecStoreEmbeddingCollectionSharder(fused_params=dict(params)),
        RecStoreFeatureProcessedEmbeddingBagCollectionSharder(
            ebc_sharder=RecStoreSharder(fused_params=dict(params))
        ),
    ]
    names = [config.name for each in model.modules() for config in configs_of(each)]
    constraints = {
        name: RecStoreConstraints(
            sharding_types=[SHARDINGS[name[-2:]]],
            options=OPTIONS.get(name[:-2], TableOptions()),
        )
        for name in names
    }
    planner = RecStorePlanner(
        topology=Topology(world_size=world_size, compute_device="cpu"),
        constraints=constraints,
        debug=False,
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(model, plan=plan, sharders=sharders, device=CPU)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    return sharded, torch.optim.SGD(list(dense.values()), lr=0.1)


def configs_of(module: nn.Module) -> list[EmbeddingBagConfig] | list[EmbeddingConfig]:
    if isinstance(module, EmbeddingBagCollection):
        return module.embedding_bag_configs()
    return module.embedding_configs() if isinstance(module, EmbeddingCollection) else []


@contextmanager
def pt2_settings() -> Iterator[None]:
    """Restores the settings that TrainPipelinePT2 changes for the whole process
    (torchrec 1.8.0).
    """
    torch._dynamo.reset()
    settings = torch._dynamo.config.patch(
        skip_torchrec=False,
        capture_scalar_outputs=True,
        capture_dynamic_output_shape_ops=True,
        force_unspec_int_unbacked_size_like_on_torchrec_kjt=True,
    )
    try:
        with settings:
            yield
    finally:
        torch._dynamo.reset()


def train(
    kind: str, caller: str, backend: str, rank: int, world_size: int
) -> tuple[list[Tensor], nn.Module]:
    """Returns the losses and the trained model.

    ``caller`` is "eager", "pipeline" or "model".
    """
    model, optimizer = build(kind, world_size)
    batches = iter([batch(step, rank, kind in WEIGHTED) for step in range(STEPS)])
    if caller == "pipeline":
        configs = TorchCompileConfig(backend=backend, compile_on_iter=2)
        pipeline = TrainPipelinePT2(
            model, optimizer, CPU, configs, input_transformer=kjt_for_pt2_tracing
        )
        return [pipeline.progress(batches) for _ in range(STEPS)], model
    called = model if caller == "eager" else torch.compile(model, backend=backend)
    losses = []
    for each in batches:
        optimizer.zero_grad()
        loss, detached = called(each)
        loss.backward()
        optimizer.step()
        losses.append(detached)
    return losses, model


def compiled_equals_eager(
    rank: int, world_size: int, kind: str, backend: str, caller: str
) -> None:
    wanted, eager = train(kind, "eager", backend, rank, world_size)
    assert len(set(map(float, wanted))) == STEPS
    with pt2_settings():
        losses, compiled = train(kind, caller, backend, rank, world_size)
        unique = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    same = torch.equal
    if backend != "aot_eager":
        same = partial(torch.allclose, atol=1e-5, rtol=1e-5)
    assert same(torch.stack(losses), torch.stack(wanted)), (losses, wanted)
    assert unique > 0
    assert table_stats(eager) == table_stats(compiled)
    for one, other in zip(tables_of(eager), tables_of(compiled), strict=True):
        assert torch.equal(one.ids(), other.ids())
        pairs = [ops.table_export(table.handle, table.ids()) for table in (one, other)]
        assert all(map(same, *pairs)), one.name
        if one.name.startswith("timed"):
            assert len(other.state().times or ()) > 7


def tables_of(model: nn.Module) -> list[Table]:
    modules = [
        module for module in model.modules() if hasattr(module, "recstore_tables")
    ]
    return [table for module in modules for table in module.recstore_tables()]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("backend", "kind", "caller"),
    [("aot_eager", "options", "pipeline"), ("inductor", "several", "model")],
)
@pytest.mark.usefixtures("one_rank")
def test_one_rank(backend: str, kind: str, caller: str) -> None:
    compiled_equals_eager(0, 1, kind, backend, caller)


def pipelines_on_two_ranks(rank: int, world_size: int) -> None:
    for backend, kind in (("aot_eager", "pooled"), ("inductor", "processed")):
        compiled_equals_eager(rank, world_size, kind, backend, "pipeline")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_ranks() -> None:
    run_on_ranks(2, pipelines_on_two_ranks)


def read(model: nn.Module, features: KeyedJaggedTensor) -> Tensor:
    rows: Tensor = model(features)["f2"].values()
    return rows


def rows_on_two_ranks(rank: int, world_size: int) -> None:
    for kernel, sharder in (
        ("fused", EmbeddingCollectionSharder()),
        (RECSTORE_KERNEL, RecStoreEmbeddingCollectionSharder()),
    ):
        rows = Small().rows
        placed = {"row": table_wise(rank=0, compute_kernel=kernel)}
        plan = construct_module_sharding_plan(
            rows, placed, sharder, world_size, world_size, "cpu"
        )
        model = nn.Sequential(rows)
        sharded = DistributedModelParallel(
            model, plan=ShardingPlan({"0": plan}), sharders=[sharder], device=CPU
        )
        features = batch(0, rank, weighted=False)
        features._values %= 50
        read(sharded, features)
        raised = ""
        with pt2_settings():
            try:
                torch.compile(read, backend="aot_eager")(
                    sharded, kjt_for_pt2_tracing(features)
                )
            except torch._dynamo.exc.TorchRuntimeError as error:
                raised = str(error)
        of_ranks: list[str] = [""] * world_size
        # A rank on which the sizes happen to agree does not raise an error.
        dist.all_gather_object(of_ranks, raised)
        assert any("Split sizes" in text for text in of_ranks), kernel


@pytest.mark.slow
def test_rows_on_two_ranks_raise_while_they_are_traced_as_those_of_stock_tables_do() -> (
    None
):
    """TorchRec 1.8.0 traces the output distribution of an EmbeddingCollection with
    wrong sizes: docs/compile.md.
    """
    run_on_ranks(2, rows_on_two_ranks)


class Small(nn.Module):
    """A model that also works with TorchRec's own tables on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name="bag",
                    num_embeddings=50,
                    embedding_dim=4,
                    feature_names=["f0", "f1"],
                )
            ],
            device=META,
        )
        self.rows = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name="row", num_embeddings=50, embedding_dim=4, feature_names=["f2"]
                )
            ],
            device=META,
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows: Tensor = self.rows(features)["f2"].values()
        return self.bags(features).values().sum() + rows.sum()  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_there_is_no_graph_break_that_stock_tables_have_not() -> None:
    breaks = {}
    for kernel, sharders in {
        "fused": [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()],
        "customized_kernel": [RecStoreSharder(), RecStoreEmbeddingCollectionSharder()],
    }.items():
        model = Small()
        plan = {
            path: construct_module_sharding_plan(
                module,
                {table: table_wise(rank=0, compute_kernel=kernel)},
                sharder,
                1,
                1,
                "cpu",
            )
            for path, module, table, sharder in zip(
                ("bags", "rows"),
                (model.bags, model.rows),
                ("bag", "row"),
                sharders,
                strict=True,
            )
        }
        sharded = DistributedModelParallel(
            model, plan=ShardingPlan(plan), sharders=sharders, device=CPU
        )
        batches = [batch(step, 0, weighted=False) for step in range(2)]
        for each in batches:
            each._values %= 50
        sharded(batches[0])
        with pt2_settings():
            torch._dynamo.utils.counters.clear()
            torch.compile(sharded, backend="aot_eager")(
                kjt_for_pt2_tracing(batches[1])
            ).backward()
            # The first line has the reason. The lines after it have the place in the
            # code.
            breaks[kernel] = {
                reason.partition("\n")[0]
                for reason in torch._dynamo.utils.counters["graph_break"]
            }
    assert breaks["fused"]
    assert breaks["customized_kernel"] <= breaks["fused"]


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.usefixtures("one_rank")
def test_export_is_refused_by_name(strict: bool) -> None:
    model, _ = build("sum", 1)
    model.eval()
    example = batch(0, 0, weighted=False)
    model(example)

    class Evaluated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sharded = model.module

        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            loss: Tensor = self.sharded(
                KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths)
            )[1]
            return loss

    with (
        pt2_settings(),
        pytest.raises(Exception, match="export_for_inference") as error,
    ):
        torch.export.export(
            Evaluated(), (example.values(), example.lengths()), strict=strict
        )
    assert "sum_a" in str(error.value)
