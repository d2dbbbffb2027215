"""Exported models have the outputs of the model in evaluation mode, for every kind of
collection.
"""

from __future__ import annotations

import copy
import resource
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_recstore.inference import (
    export_delta,
    export_for_inference,
    read_delta,
    scriptable,
)
from torchrec_recstore.modules import (
    RecStoreEmbedding,
    RecStoreEmbeddingBag,
    RecStoreEmbeddingBagCollection,
)
from torchrec_recstore.options import (
    LFU,
    LRU,
    ConstantInit,
    MinFrequency,
    NormalInit,
    RocksDBStore,
    Scored,
    TableOptions,
    UniformInit,
)
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.sharders import (
    RecStoreEmbeddingCollectionSharder,
    RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
    RecStoreSharder,
    table_stats,
)

from ...distributed.workers import run_on_ranks
from ...sharders.models import batch as batch_of
from ...sharders.models import collection, sharded
from ..models import BAGS, SEQUENCES, Model, batch, quantisation_bound, train

QUANTISED = [torch.float16, torch.int8, torch.quint4x2]


class Pooled(nn.Module):
    """A model with a collection of bags. Its output is a tensor for each key."""

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags

    def forward(self, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        return self.bags(features).to_dict()


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


@pytest.mark.usefixtures("one_rank")
class TestSharded:
    @pytest.mark.parametrize("weighted", [False, True])
    def test_bags(self, weighted: bool) -> None:
        model = sharded(
            collection(*copy.deepcopy(BAGS), is_weighted=weighted),
            {"learning_rate": 0.3},
        )
        for _ in range(4):
            model(batch(weighted=weighted)).values().sum().backward()
        model.eval()
        some, before = batch(weighted=weighted), table_stats(model)
        ids = {table.name: table.ids() for table in model.module.recstore_tables()}
        wanted = {key: value.detach() for key, value in model(some).to_dict().items()}
        exported = export_for_inference(model, dtype=torch.float32)
        assert_same(exported(some).to_dict(), wanted)
        assert [
            type(module).__name__
            for module in exported.modules()
            if "RecStore" in type(module).__name__
        ] == []
        assert not exported.training
        assert exported(some).keys() == [
            "f@t",
            "g",
            "h",
            "f@u",
        ], "the order of the unsharded module"
        # The given model has not changed, and can be trained further.
        assert table_stats(model) == before
        for table in model.module.recstore_tables():
            assert torch.equal(table.ids(), ids[table.name])
        model.train()
        model(batch(weighted=weighted)).values().sum().backward()

    def test_rows_split_over_ranks_and_sequences(self) -> None:
        ec = EmbeddingCollection(
            tables=SEQUENCES, device=torch.device("meta"), need_indices=True
        )
        model = sharded(ec, {"learning_rate": 0.3}, sharding_type="row_wise")
        for _ in range(3):
            model(batch())["h"].values().sum().backward()
        model.eval()
        some = batch()
        wanted, exported = (
            model(some)["h"],
            export_for_inference(model, dtype=torch.float32)(some)["h"],
        )
        assert torch.equal(exported.values(), wanted.values())
        assert torch.equal(exported.lengths(), wanted.lengths())
        assert torch.equal(exported.weights(), some["h"].values()), "raw ids, not rows"

    @pytest.mark.parametrize("as_dict", [False, True])
    def test_feature_processors(self, as_dict: bool, tmp_path: Path) -> None:
        tables = [
            EmbeddingBagConfig(
                name="t", embedding_dim=4, num_embeddings=9, feature_names=["f", "g"]
            )
        ]
        processors = (
            {name: PositionWeightedModule(max_feature_length=3) for name in ("f", "g")}
            if as_dict
            else PositionWeightedModuleCollection(
                {"f": 3, "g": 3}, device=torch.device("cpu")
            )
        )
        unsharded = FeatureProcessedEmbeddingBagCollection(
            collection(*tables, is_weighted=True), processors
        )
        model = DistributedModelParallel(
            Pooled(unsharded),
            sharders=[RecStoreFeatureProcessedEmbeddingBagCollectionSharder()],
            device=torch.device("cpu"),
        )
        with torch.no_grad():
            for number, weight in enumerate(model.parameters()):
                if weight.numel():
                    weight.copy_(torch.linspace(0.5, 1.5 + number, weight.numel()))
        some = batch_of(f=[[1, 2, 1], [3]], g=[[], [5, 1]])
        torch.cat(list(model(some).values()), dim=1).sum().backward()
        model.eval()
        wanted = {key: value.detach() for key, value in model(some).items()}
        exported = export_for_inference(model, tmp_path / "m.pt", dtype=torch.float32)
        script = torch.jit.load(tmp_path / "m.pt")
        assert_same(exported(some), wanted)
        assert_same(script(some), wanted)
        # The processors return a batch without strides, so that the collection cannot
        # see them.
        varying = KeyedJaggedTensor(
            ["f", "g"],
            torch.tensor([1, 2, 3, 4]),
            lengths=torch.ones(4, dtype=torch.int64),
            stride_per_key_per_rank=[[1], [3]],
        )
        for served in (exported, script):
            with pytest.raises(Exception, match="stride_per_key_per_rank"):
                served(varying)

    def test_tables_of_torchrec_come_along(self, tmp_path: Path) -> None:
        ebc = EmbeddingBagCollection(
            tables=copy.deepcopy(BAGS), device=torch.device("cpu")
        )
        plans: dict[str, ParameterConstraints] = {
            "t": RecStoreConstraints(sharding_types=["table_wise"]),
            "m": ParameterConstraints(
                sharding_types=["table_wise"], compute_kernels=["fused"]
            ),
            "u": ParameterConstraints(
                sharding_types=["data_parallel"], compute_kernels=["dense"]
            ),
        }
        model = sharded(ebc, {"learning_rate": 0.3}, constraints=plans)
        some = batch()
        # The table has 100 rows.
        some = KeyedJaggedTensor(
            some.keys(), some.values() % 100, lengths=some.lengths()
        )
        model(some).values().sum().backward()
        model.eval()
        wanted = {key: value.detach() for key, value in model(some).to_dict().items()}
        exported = export_for_inference(model, tmp_path / "m.pt", dtype=torch.float32)(
            some
        ).to_dict()
        for key, value in wanted.items():
            # FBGEMM sums in another order.
            torch.testing.assert_close(exported[key], value)
        assert_same(torch.jit.load(tmp_path / "m.pt")(some).to_dict(), exported)

    def test_what_cannot_be_exported(self, tmp_path: Path) -> None:
        model = sharded(
            collection(
                EmbeddingBagConfig(
                    name="odd", embedding_dim=5, num_embeddings=9, feature_names=["f"]
                )
            )
        )
        for error, message, arguments in (
            (
                ValueError,
                "'odd' has dim 5: int4 .* multiple of 4",
                {"dtype": torch.quint4x2},
            ),
            (ValueError, "'odd' has dim 5: int8 .* multiple of 2", {}),
            (
                ValueError,
                "dtype must be one of .*got torch.float64",
                {"dtype": torch.float64},
            ),
            (
                ValueError,
                "min_frequency must be at least 0, got -1",
                {"min_frequency": -1},
            ),
            (TypeError, "top_rows must be an int, got float", {"top_rows": 1.0}),
            (
                FileNotFoundError,
                "is no directory",
                {"path": tmp_path / "none" / "m.pt"},
            ),
        ):
            with pytest.raises(error, match=message):
                export_for_inference(model, **arguments)
        with pytest.raises(ValueError, match="Linear has no tables"):
            export_for_inference(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "weighted", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_eager_model_and_its_file(weighted: bool, tmp_path: Path) -> None:
    model = train(Model(weighted=weighted), weighted=weighted)
    exported = export_for_inference(model, tmp_path / "m.pt", dtype=torch.float32)
    loaded = torch.jit.load(tmp_path / "m.pt")
    for some in (
        batch(weighted=weighted),
        batch(1, weighted=weighted),
        batch(weighted=weighted, dtype=torch.int32),
        KeyedJaggedTensor(
            ["f", "g", "h"], torch.empty(0, dtype=torch.int64), lengths=torch.zeros(6, dtype=torch.int64),
            weights=torch.empty(0) if weighted else None,
        ),
    ):  # fmt: skip
        wanted = model(some).detach()
        assert torch.equal(exported(some), wanted)
        assert torch.equal(loaded(some), wanted)
        assert torch.equal(exported.bags(some).values(), model.bags(some).values())
    for table in (
        model.bags.embedding_bags["t"].table,
        model.rows.embeddings["s"].table,
    ):
        assert torch.equal(loaded.recstore_ids(table.name), table.ids())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.pt"]


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_quantised_within_a_step(dtype: torch.dtype, tmp_path: Path) -> None:
    model = train(Model(), steps=6)
    exported = export_for_inference(model, tmp_path / "m.pt", dtype=dtype)
    loaded = torch.jit.load(tmp_path / "m.pt")
    some = batch()
    assert torch.equal(loaded(some), exported(some)), (
        "TorchRec's module and the file read the same"
    )
    pooled, wanted = exported.bags(some), model.bags(some)
    off = 0.0
    for config, keys in zip(BAGS, (["f@t", "g"], ["h"], ["f@u"]), strict=True):
        table = model.bags.embedding_bags[config.name].table
        bounds = quantisation_bound(table.lookup(table.ids()), dtype)
        mean = config.pooling == PoolingType.MEAN
        for key, name in zip(keys, config.feature_names, strict=True):
            feature = some[name]
            known = table.contains(feature.values())
            of_ids = torch.zeros(len(known))
            of_ids[known] = bounds[
                torch.searchsorted(table.ids(), feature.values()[known])
            ]
            lengths = feature.lengths()
            allowed = torch.zeros(len(lengths)).index_add_(
                0, torch.repeat_interleave(torch.arange(len(lengths)), lengths), of_ids
            )
            if mean:
                allowed /= lengths.clamp(min=1)
            error = (pooled[key] - wanted[key]).abs().amax(1)
            assert bool((error <= allowed + 1e-6).all()), key
            off = max(off, float(error.max()))
    assert off > 0, "nothing was rounded"


def test_rows_that_are_left_out() -> None:
    bags = RecStoreEmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"]
            )
        ]
    )
    for ids in ([5, 7, -3], [5, 7, 9], [5, 9]):
        bags(batch_of(f=[ids])).values().sum().backward()
    bags.eval()
    every = batch_of(f=[[id] for id in (5, 7, 9, -3)])
    rows = bags(every).values().detach()
    for arguments, stay in (
        ({"min_frequency": 2}, [True, True, True, False]),
        ({"min_frequency": 3}, [True, False, False, False]),
        # Ids 7 and 9 have equal frequencies: the smallest id stays.
        ({"top_rows": 2}, [True, True, False, False]),
        ({"top_rows": 9}, [True] * 4),
        ({"min_frequency": 4}, [False] * 4),
        ({"top_rows": 1, "min_frequency": 2}, [True, False, False, False]),
    ):
        exported = export_for_inference(bags, dtype=torch.float32, **arguments)
        assert torch.equal(
            exported(every).values(), rows * torch.tensor(stay)[:, None]
        ), arguments
        empty = export_for_inference(bags, **arguments)  # No row is exported.
        assert empty(every).values().shape == (4, 4)


def test_frequencies_are_halved_as_eviction_has_it() -> None:
    options = TableOptions(max_rows=50, eviction=LFU(half_life_steps=2))
    table = RecStoreEmbedding(50, 4, options=options, name="t")
    for ids in ([1, 2], [1, 2], [1, 2], [3], [3]):
        table(torch.tensor(ids)).sum().backward()
    table.eval()
    ids = torch.tensor([1, 2, 3])
    kept = (
        export_for_inference(table, dtype=torch.float32, min_frequency=1)(ids)
        .abs()
        .sum(1)
        > 0
    )
    seen = table.table.read_rows(ids)
    assert seen["frequency"].tolist() == [2, 2, 2], "as of their last steps"
    assert kept.tolist() == [True, True, True]
    for _ in range(4):
        table.train()
        table(torch.tensor([9])).sum().backward()
    kept = (
        export_for_inference(table.eval(), dtype=torch.float32, min_frequency=1)(ids)
        .abs()
        .sum(1)
        > 0
    )
    assert kept.tolist() == [False, False, False], "by now"


def test_occurrences_select_rows_and_scores_do_not(tmp_path: Path) -> None:
    ids = torch.tensor([1, 1, 1, 2])
    counting = TableOptions(max_rows=50, eviction=LFU(count="occurrences"))
    table = RecStoreEmbedding(50, 4, options=counting, name="t")
    table(ids).sum().backward()
    exported = export_for_inference(table.eval(), dtype=torch.float32, min_frequency=2)
    assert (exported(torch.tensor([1, 2])).abs().sum(1) > 0).tolist() == [True, False]
    scored = RecStoreEmbedding(
        50, 4, options=TableOptions(max_rows=50, eviction=Scored()), name="scored"
    )
    scored(ids).sum().backward()
    for selection in ({"min_frequency": 1}, {"top_rows": 1}):
        with pytest.raises(
            ValueError,
            match=r"table 'scored' evicts by scores \(eviction=Scored\(\)\), so that",
        ):
            export_for_inference(scored.eval(), **selection)
    assert export_for_inference(scored.eval())(ids).shape == (4, 4)


def test_frequencies_begin_with_the_row() -> None:
    options = TableOptions(admission=MinFrequency(3), max_rows=1, eviction=LRU())
    table = RecStoreEmbedding(50, 4, options=options, name="t")
    # Id 1 is admitted in the third step; then it is evicted and returns.
    for others, steps, counted in ((0, 5, 3), (3, 2, 2)):
        for id in [2] * others + [1] * steps:
            table.train()(torch.tensor([id])).sum().backward()
        for least in (counted, counted + 1):
            exported = export_for_inference(
                table.eval(), dtype=torch.float32, min_frequency=least
            )
            assert bool(exported(torch.tensor([1])).any()) == (least == counted), (
                steps,
                least,
            )


def test_frequencies_that_are_not_known() -> None:
    table = RecStoreEmbedding(3, 2, _weight=torch.ones(3, 2), name="t").eval()
    for arguments in ({"min_frequency": 1}, {"top_rows": 2}):
        with pytest.raises(
            ValueError, match="'t' has rows that no training step has looked up"
        ):
            export_for_inference(table, **arguments)
    assert bool((export_for_inference(table)(torch.arange(3)) == 1).all())


def test_rows_in_a_cold_store(tmp_path: Path) -> None:
    options = TableOptions(
        max_rows=60, eviction=LRU(), cold_store=RocksDBStore(str(tmp_path / "cold"))
    )
    model = Model(options)
    for first in range(0, 160, 40):
        ids = torch.arange(first, first + 40).repeat(3)
        model(
            KeyedJaggedTensor(["g", "h", "f"], ids, lengths=torch.full((6,), 20))
        ).sum().backward()
    model.eval()
    assert model.bags.embedding_bags["m"].table.stats().cold_rows > 0
    ids = torch.arange(200).repeat(3)
    every = KeyedJaggedTensor(["g", "h", "f"], ids, lengths=torch.full((600,), 1))
    assert torch.equal(
        export_for_inference(model, dtype=torch.float32)(every), model(every).detach()
    )


def test_initial_rows_of_unseen_ids() -> None:
    configs = [
        EmbeddingBagConfig(
            name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"]
        )
    ]
    some = batch_of(f=[[1, 8], [9]])
    for initializer in (
        ConstantInit(0.3),
        UniformInit(0.3, 0.3),
        NormalInit(0.3, 0.0),
        NormalInit(-0.3, 0.0, 2.0),
    ):
        alike = TableOptions(initializer=initializer, missing="init")
        bags = RecStoreEmbeddingBagCollection(configs, options=alike).eval()
        assert bags(some).values().all()
        assert torch.equal(
            export_for_inference(bags, dtype=torch.float32)(some).values(),
            bags(some).values(),
        )
    bags = RecStoreEmbeddingBagCollection(
        configs, options=TableOptions(missing="init")
    ).eval()
    with pytest.warns(UserWarning, match="'t' have missing='init'") as caught:
        exported = export_for_inference(bags, dtype=torch.float32)
    # the other warning says that the tables were never trained
    assert ["missing=" in str(warning.message) for warning in caught].count(True) == 1
    assert not exported(some).values().any()


@pytest.mark.parametrize("padding", [pytest.param(None, marks=pytest.mark.slow), 3])
def test_embedding_and_bag(padding: int | None, tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.float16):
        rows = RecStoreEmbedding(50, 4, padding, lr=0.3, dtype=dtype, name="rows")
        some = torch.randint(-5, 20, (6, 3))
        rows(some).float().sum().backward()
        rows.eval()
        exported = export_for_inference(rows, tmp_path / "rows.pt", dtype=torch.float32)
        for ids in (some, some + 9, some[:0]):
            assert torch.equal(exported(ids), rows(ids))
            assert torch.equal(torch.jit.load(tmp_path / "rows.pt")(ids), rows(ids))
    offsets, weights = torch.tensor([0, 2, 2, 11]), torch.rand(18)
    for mode in ("sum", "mean", "max"):
        for include in (False, True):
            bags = RecStoreEmbeddingBag(
                50,
                4,
                mode=mode,
                padding_idx=padding,
                include_last_offset=include,
                lr=0.3,
                name="bags",
            )
            bags(some).sum().backward()
            bags.eval()
            exported = export_for_inference(
                bags, tmp_path / "bags.pt", dtype=torch.float32
            )
            loaded = torch.jit.load(tmp_path / "bags.pt")
            arguments: list[tuple[Tensor, ...]] = [
                (some,),
                (some.view(-1), offsets),
                (some[:0],),
            ]
            if mode == "sum":
                arguments += [(some.view(-1), offsets, weights)]
            for each in arguments:
                assert torch.equal(exported(*each), bags(*each)), (mode, include)
                assert torch.equal(loaded(*each), bags(*each))
    assert (export_for_inference(bags)(some) - bags(some)).abs().max() < 0.01


def test_names_in_a_file_are_distinct(tmp_path: Path) -> None:
    model = nn.Sequential(
        *(RecStoreEmbedding(9, 2, name=name) for name in ("t", "t", "0.t"))
    )
    with pytest.raises(ValueError, match=r"more than one table '0\.t'"):
        export_for_inference(model, tmp_path / "m.pt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_takes_little_more_memory_than_it_writes(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    table = RecStoreEmbedding(9, 16, name="t").eval()
    table.table.insert(torch.arange(600_000), torch.randn(600_000, 16))
    # Imports all modules.
    export_for_inference(
        RecStoreEmbedding(9, 16, name="t"), tmp_path / "m.pt", dtype=dtype
    )
    Path("/proc/self/clear_refs").write_text("5")  # This resets VmHWM.
    before = _memory("VmRSS")
    export_for_inference(table, tmp_path / "m.pt", dtype=dtype)
    assert _memory("VmHWM") - before < 3 * (tmp_path / "m.pt").stat().st_size, (
        "and of pieces that are read"
    )


def _memory(field: str) -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field)
    )
    return int(line.split()[1]) * 1024


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    table, path = RecStoreEmbedding(9, 4, name="t"), tmp_path / "m.pt"
    with pytest.raises(OSError, match=r"cannot be written: .*: '/proc/m.pt'"):
        export_for_inference(table, "/proc/m.pt")
    path.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"cannot be written: .*: '{path}'"):
            export_for_inference(table, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


class Unscriptable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = RecStoreEmbedding(9, 2, name="t")

    def forward(self, ids: Tensor) -> Tensor:
        return (
            self.rows(ids)
            if float(ids.sum()) > id(self)
            else torch.from_numpy(ids.numpy())
        )


def test_a_model_that_torchscript_cannot_take(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="TorchScript cannot compile Unscriptable"):
        export_for_inference(Unscriptable(), tmp_path / "m.pt")
    assert list(tmp_path.iterdir()) == []


class Unannotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name="t", embedding_dim=2, num_embeddings=9, feature_names=["f"]
            )
        ]
        self.bags = RecStoreEmbeddingBagCollection(tables)

    def forward(self, features):  # type: ignore[no-untyped-def]
        return self.bags(features).values()


def test_a_forward_without_types_is_named(tmp_path: Path) -> None:
    says = (
        r"^Unannotated.forward \(.*test_from_model.py:\d+\) has no type for features, .*"
        r" features: KeyedJaggedTensor\n"
    )
    with pytest.raises(ValueError, match=says):
        export_for_inference(Unannotated(), tmp_path / "m.pt")


class Traceable(nn.Module):
    """A model that TorchScript can compile only after a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.rows = Model(), RecStoreEmbedding(9, 2, name="more")
        self.twice = partial(torch.mul, other=2)

    def forward(self, features: KeyedJaggedTensor, ids: Tensor) -> Tensor:
        return self.twice(self.model(features)) + self.rows(ids).sum()


# The tracer needs these names: with annotations from __future__, annotations are text.
Traceable.forward.__annotations__ = {
    "features": KeyedJaggedTensor,
    "ids": Tensor,
    "return": Tensor,
}


def test_a_model_that_torchscript_takes_from_a_trace(tmp_path: Path) -> None:
    model, ids = Traceable(), torch.tensor([3, 4])
    model(batch(), ids).sum().backward()
    model.eval()
    with pytest.raises(RuntimeError, match="partial"):
        torch.jit.script(scriptable(export_for_inference(model)))
    export_for_inference(model, tmp_path / "m.pt", dtype=torch.float32)
    some, served = batch(), torch.jit.load(tmp_path / "m.pt")
    assert torch.equal(served(some, ids), model(some, ids).detach())
    train_on = model.train()
    train_on(batch(), ids).sum().backward()
    with torch.no_grad():
        model.model.over[2].bias += 1
    info = export_delta(model.eval(), tmp_path / "delta", base=served)
    assert info.dense == ("model.over.2.bias",)
    assert served.apply_delta(read_delta(tmp_path / "delta"))
    assert torch.equal(served(some, ids), model(some, ids).detach())


def test_a_table_on_the_meta_device() -> None:
    with pytest.raises(ValueError, match="table 't' is on the meta device"):
        export_for_inference(collection(BAGS[0]))


def two_ranks(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    ebc = collection(
        *(
            EmbeddingBagConfig(
                name=name, embedding_dim=dim, num_embeddings=64, feature_names=[f]
            )
            for name, f, dim in TABLES
        )
    )
    kinds = {"rows": "row_wise", "columns": "column_wise", "whole": "table_wise"}
    constraints: dict[str, ParameterConstraints] = {
        name: RecStoreConstraints(
            sharding_types=[kind], min_partition=4 if kind == "column_wise" else None
        )
        for name, kind in kinds.items()
    }
    # Of TorchRec's own tables, a rank has two parts of one table and no part of the
    # other table.
    for name, kind in (("stock_columns", "column_wise"), ("stock_whole", "table_wise")):
        constraints[name] = ParameterConstraints(
            sharding_types=[kind], compute_kernels=["fused"], min_partition=4
        )
    sharders = [
        RecStoreSharder({"learning_rate": 0.3}),
        RecStoreEmbeddingCollectionSharder(),
    ]
    plan = RecStorePlanner(constraints=constraints).collective_plan(
        nn.Sequential(ebc), sharders
    )
    model = DistributedModelParallel(
        nn.Sequential(ebc), plan=plan, sharders=sharders, device=torch.device("cpu")
    )
    torch.manual_seed(rank)
    for _ in range(3):
        model(for_all(batch())).values().sum().backward()
    model.eval()
    some = batch()
    # Each bag has one id, so that no rank computes a sum.
    some = for_all(
        KeyedJaggedTensor(
            some.keys(), some.values()[:12], lengths=torch.tensor([1] * 12)
        )
    )
    wanted = model(some).to_dict()
    exported = export_for_inference(model, dtype=torch.float32)
    assert_same(
        {key: value.detach() for key, value in wanted.items()}, exported(some).to_dict()
    )
    checksum = torch.stack(
        [tensor.double().sum() for tensor in exported.state_dict().values()]
    )
    other = checksum.clone()
    torch.distributed.broadcast(other, 0)
    assert torch.equal(checksum, other), "the same on every rank"
    path = Path(f"/proc/{rank}-none/m.pt")
    with pytest.raises(FileNotFoundError, match="0-none is no directory"):
        export_for_inference(model, path)


def for_all(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    ids = features.values().clone()
    # The ids of feature x, which TorchRec's own tables look up.
    ids[features.offset_per_key()[-2] :] %= 64
    return KeyedJaggedTensor(features.keys(), ids, lengths=features.lengths())


TABLES = [
    ("rows", "f", 8),
    ("columns", "g", 8),
    ("whole", "h", 8),
    ("stock_columns", "x", 16),
    ("stock_whole", "x", 8),
]


def test_two_ranks() -> None:
    run_on_ranks(2, two_ranks)
