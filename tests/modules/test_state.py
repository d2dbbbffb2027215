"""The state of eager modules in ``state_dict``, copies, pickles and on devices, as for
any torch module.
"""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from tests.modules.child import put_rows
from tests.modules.collections import IDS, bag_tables, batch, sequence_tables
from tests.processes import START_METHOD
from torchrec_recstore.modules import (
    RecStoreEmbedding,
    RecStoreEmbeddingBag,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
)
from torchrec_recstore.modules.table_module import TableModule
from torchrec_recstore.optim import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    PartialRowWiseAdam,
    RowWiseAdagrad,
)
from torchrec_recstore.options import (
    LFU,
    LRU,
    Expiry,
    MinFrequency,
    RocksDBStore,
    Scored,
    TableOptions,
)

DEFAULTS = TableOptions()


class Model(nn.Module):
    """A model with both collections, a module of one table and a dense layer.

    Each has a table with ``options``.
    """

    def __init__(
        self,
        options: TableOptions = DEFAULTS,
        device: Any = None,
        **more: Any,
    ) -> None:
        super().__init__()
        self.options = options
        arguments = {"device": device, **more}
        self.ebc = RecStoreEmbeddingBagCollection(
            bag_tables(), options={"t1": options}, **arguments
        )
        self.ec = RecStoreEmbeddingCollection(
            sequence_tables(), options={"t1": options}, **arguments
        )
        self.emb = RecStoreEmbedding(9, 4, name="one", options=options, **arguments)
        self.dense = nn.Linear(4, 1, device=device)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Returns a number that depends on every row."""
        rows = [jagged.values() for jagged in self.ec(features).values()]
        rows.append(self.emb(features.values()))
        total: Tensor = (
            self.dense(torch.cat(rows)).sum() + (self.ebc(features).values() ** 2).sum()
        )
        return total


def train(model: nn.Module, first: int, last: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        loss = model(batch(step, batch_size=3))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def states(model: nn.Module) -> dict[str, Tensor]:
    return model.state_dict()


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert list(first) == list(second)
    for key, value in first.items():
        assert torch.equal(second[key], value), key


def of_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def of_state_dict(model: nn.Module) -> nn.Module:
    """Loads the state from a file of tensors into a model with other rows."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert isinstance(model, Model)
    fresh = Model(model.options, optimizer=Adam(lr=0.01))
    train(fresh, 50, 52)
    assert (
        str(fresh.load_state_dict(torch.load(file)))
        == "<All keys matched successfully>"
    )
    return fresh


BOUNDS = {
    "no bounds": lambda path: TableOptions(),
    "lfu": lambda path: TableOptions(max_rows=10, eviction=LFU(2)),
    "admission": lambda path: TableOptions(
        admission=MinFrequency(2, counter_bytes=2**12)
    ),
    "expiry": lambda path: TableOptions(expiry=Expiry(2), missing="init"),
    "cold": lambda path: TableOptions(
        max_rows=9, cold_store=RocksDBStore(str(path)), expiry=Expiry(4)
    ),
}


@pytest.mark.parametrize("bounds", BOUNDS)
def test_a_copy_trains_on_to_the_bit(bounds: str, tmp_path: Path) -> None:
    """A copy has the rows, optimizer state, clocks, sightings and cold rows, and it
    changes independently.
    """
    model = Model(BOUNDS[bounds](tmp_path), optimizer=Adam(lr=0.01))
    train(model, 0, 4)
    before = states(model)
    copies = [way(model) for way in (copy.deepcopy, of_torch_save, of_state_dict)]
    losses = []
    for other in copies:
        assert type(other) is Model
        assert_same(states(other), before)
        losses.append(train(other, 4, 7))
        assert_same(states(model), before)
    if bounds == "cold":
        stats = model.emb.table.stats()
        assert stats.cold_rows > 0
        assert stats.cold_rows + stats.rows == len(before["emb.weight_id"])
    assert losses == [train(model, 4, 7)] * 3
    after = states(model)
    for other in copies:
        assert_same(states(other), after)
    assert any(not torch.equal(after[key], before[key]) for key in after)


def test_the_keys_of_a_state() -> None:
    ebc = RecStoreEmbeddingBagCollection(
        bag_tables(), optimizer=PartialRowWiseAdam(lr=0.1)
    )
    for step in range(3):
        ebc(batch(step)).values().sum().backward()
    state = ebc.state_dict()
    table = ebc.embedding_bags["t1"].table
    rows = len(table)
    shapes = {
        key.removeprefix("embedding_bags.t1."): tuple(v.shape)
        for key, v in state.items()
        if ".t1." in key
    }
    assert shapes == {
        "weight": (rows, 6),
        "weight_id": (rows,),
        "exp_avg": (rows, 6),
        "exp_avg_sq": (rows,),
        "last_step": (rows,),
        "frequency": (rows,),
        "steps": (1,),
        "optimizer_steps": (1,),
    }
    assert torch.equal(state["embedding_bags.t1.weight_id"], table.ids())
    assert torch.equal(state["embedding_bags.t1.weight"], table.lookup(table.ids()))
    assert (
        int(state["embedding_bags.t1.steps"]),
        int(state["embedding_bags.t1.optimizer_steps"]),
    ) == (3, 3)
    assert all(key.startswith("embedding_bags.") for key in state)
    assert [name for name, _ in ebc.named_parameters()] == [
        f"embedding_bags.t{i}.weight" for i in range(3)
    ]


def test_loading_is_strict() -> None:
    emb = RecStoreEmbedding(9, 4, optimizer=RowWiseAdagrad(lr=0.1))
    emb(IDS).sum().backward()
    before = states(emb)
    for keys, state in (
        (["sum"], {key: value for key, value in before.items() if key != "sum"}),
        (["weight"], {key: value for key, value in before.items() if key != "weight"}),
        (["exp_avg"], {**before, "exp_avg": before["weight"]}),
    ):
        with pytest.raises(
            RuntimeError,
            match=f'(Missing|Unexpected) key\\(s\\) in state_dict: "{keys[0]}"',
        ):
            RecStoreEmbedding(9, 4).load_state_dict(state)
        other = RecStoreEmbedding(9, 4)
        result = other.load_state_dict(state, strict=False)
        assert [*result.missing_keys, *result.unexpected_keys] == keys
        assert len(other.table) == (0 if keys == ["weight"] else len(IDS))
    other = RecStoreEmbedding(9, 4, optimizer=LAMB(lr=0.1))
    with pytest.raises(
        RuntimeError, match=r"Missing key.*exp_avg.*\n.*Unexpected key.*sum"
    ):
        other.load_state_dict(before)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        (
            "weight",
            torch.zeros(10, 5),
            r"weight must have the shape \(10, 4\), got \(10, 5\)",
        ),
        ("weight", torch.tensor(1.0), r"weight must have the shape \(0, 4\)"),
        (
            "weight",
            torch.zeros(10, 4, dtype=torch.int64),
            "weight must have a floating-point dtype, got torch.int64",
        ),
        ("weight_id", torch.arange(9), r"weight_id must have the shape \(10,\)"),
        (
            "weight_id",
            torch.zeros(10, dtype=torch.int64),
            "weight_id must not contain the same id twice",
        ),
        ("weight_id", torch.arange(10).int(), "weight_id must be int64"),
        ("sum", torch.zeros(10, 4), r"sum must have the shape \(10,\)"),
        ("optimizer_steps", torch.tensor([-1]), "optimizer steps must be within"),
        (
            "steps",
            torch.tensor(1),
            r"steps must be torch.int64 of shape \(1,\), got torch.int64 of shape \(\)",
        ),
        ("steps", 1, "steps must be a tensor, got int"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(
    key: str, value: Any, match: str
) -> None:
    model = nn.ModuleDict(
        {
            "emb": RecStoreEmbedding(9, 4, name="t"),
            "other": RecStoreEmbedding(9, 4, name="t"),
        }
    )
    state = RecStoreEmbedding(9, 4, _weight=torch.randn(9, 4)).state_dict()
    state = {
        name: torch.cat([part, part[:1]]) if len(part) > 1 else part
        for name, part in state.items()
    }
    state["weight_id"][-1] = 99
    model["emb"](torch.tensor([3])).sum().backward()
    before = states(model["emb"])
    given = {f"emb.{name}": part for name, part in {**state, key: value}.items()}
    given |= {f"other.{name}": part for name, part in state.items()}
    with pytest.raises(
        RuntimeError, match=rf"While loading the rows of emb.weight: .*{match}"
    ):
        model.load_state_dict(given)
    assert_same(states(model["emb"]), before)
    assert_same(states(model["other"]), state)


def test_a_bounded_table_keeps_what_its_eviction_would() -> None:
    source = RecStoreEmbedding(9, 4)
    for first in range(0, 20, 5):
        source(torch.arange(first, first + 5)).sum().backward()
    kept = RecStoreEmbedding(9, 4, options=TableOptions(max_rows=8, eviction=LRU()))
    kept.load_state_dict(source.state_dict())
    assert len(kept.table) == 8
    assert bool(kept.table.contains(torch.arange(15, 20)).all())
    full = RecStoreEmbedding(9, 4, options=TableOptions(max_rows=8), name="full")
    full(torch.arange(3))
    with pytest.raises(RuntimeError, match=r"table 'full'.*max_rows"):
        full.load_state_dict(source.state_dict())
    assert len(full.table) == 3


def test_scores_are_not_taken_for_counts_nor_counts_for_scores() -> None:
    """A state says which of the two its frequencies are.

    In a table with the other kind they begin at 0.
    """
    scored_options = TableOptions(max_rows=8, eviction=Scored())
    counted_options = TableOptions(max_rows=8, eviction=LFU())
    ids = torch.arange(3)
    scored = RecStoreEmbedding(9, 4, options=scored_options)
    scored(ids).sum().backward()
    scored.table.set_scores(ids, torch.tensor([-2.0, 0.0, 2.0]))
    counted = RecStoreEmbedding(9, 4, options=counted_options)
    for _ in range(2):
        counted(ids).sum().backward()
    codes = scored.table.read_rows(ids)["frequency"].tolist()
    assert min(codes) > 2
    expected = {
        (scored, scored_options): codes,
        (scored, counted_options): [0, 0, 0],
        (counted, scored_options): [0, 0, 0],
        (counted, counted_options): [2, 2, 2],
    }
    for (source, options), frequencies in expected.items():
        other = RecStoreEmbedding(9, 4, options=options)
        other.load_state_dict(source.state_dict())
        rows = other.table.read_rows(ids)
        assert rows["frequency"].tolist() == frequencies
        assert (
            rows["last_step"].tolist()
            == source.table.read_rows(ids)["last_step"].tolist()
        )
    assert copy.deepcopy(scored).table.read_rows(ids)["frequency"].tolist() == codes
    assert (
        pickle.loads(pickle.dumps(scored)).table.read_rows(ids)["frequency"].tolist()
        == codes
    )
    lacking = {
        key: value
        for key, value in scored.state_dict().items()
        if key != "encoded_score"
    }
    with pytest.raises(
        RuntimeError, match=r'Missing key\(s\) in state_dict: "encoded_score"'
    ):
        RecStoreEmbedding(9, 4, options=scored_options).load_state_dict(lacking)


def test_the_state_of_a_stock_module_loads() -> None:
    """Row i becomes the row of id i."""
    stock = EmbeddingBagCollection(tables=bag_tables(stock=True))
    ebc = RecStoreEmbeddingBagCollection(bag_tables())
    ebc(batch(0)).values().sum().backward()
    ebc.load_state_dict(stock.state_dict())
    for name, module in ebc.embedding_bags.items():
        assert torch.equal(module.table.ids(), torch.arange(len(IDS)))
        assert torch.equal(
            module.table.lookup(torch.arange(len(IDS))),
            stock.embedding_bags[name].weight,
        )
        assert (module.table.steps, module.table.optimizer_steps) == (0, 0)


def test_16_bit_rows_round_trip() -> None:
    half = RecStoreEmbedding(9, 4, dtype=torch.bfloat16, optimizer=SGD(lr=0.1))
    half(IDS).float().sum().backward()
    other = RecStoreEmbedding(9, 4, dtype=torch.bfloat16, optimizer=SGD(lr=0.1))
    other.load_state_dict(half.state_dict())
    assert_same(states(other), states(half))
    assert states(half)["weight"].dtype is torch.bfloat16
    wide = RecStoreEmbedding(9, 4, optimizer=SGD(lr=0.1))
    wide.load_state_dict(half.state_dict())
    assert torch.equal(states(wide)["weight"], states(half)["weight"].float())
    for converted in (half.half(), half.to(torch.float64)):
        assert converted.table.dtype is torch.bfloat16
        assert converted(IDS).dtype is torch.bfloat16


def test_8_bit_rows_round_trip() -> None:
    """State dicts, copies and pickles have float32 weights of 8-bit rows, from which
    the same rows are made.
    """
    small = RecStoreEmbedding(9, 4, dtype=torch.int8, optimizer=Adagrad(lr=0.1))
    assert small(IDS).dtype is torch.float32
    small(IDS).square().sum().backward()
    rows = small.table.read_rows(small.table.ids())
    assert states(small)["weight"].dtype is torch.float32
    loaded = RecStoreEmbedding(9, 4, dtype=torch.int8, optimizer=Adagrad(lr=0.1))
    loaded.load_state_dict(small.state_dict())
    for other in (loaded, copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        assert other.table.dtype is torch.int8
        for key, value in other.table.read_rows(small.table.ids()).items():
            assert torch.equal(value, rows[key]), key
    assert small.half().table.dtype is torch.int8
    wide = RecStoreEmbedding(9, 4, optimizer=Adagrad(lr=0.1))
    wide.load_state_dict(small.state_dict())
    assert torch.equal(states(wide)["weight"], states(small)["weight"])


def test_meta_and_back() -> None:
    model = Model()
    train(model, 0, 2)
    table = model.emb.table
    assert model.to("cpu").emb.table is table
    model.to("meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model.ebc.device == torch.device("meta")
    assert [
        tuple(v.shape) for k, v in model.state_dict().items() if k == "emb.weight"
    ] == [(0, 4)]
    assert model.emb(torch.empty(2, 3, dtype=torch.int64, device="meta")).shape == (
        2,
        3,
        4,
    )
    for call in (
        lambda: model.emb(IDS),
        lambda: model.ebc(batch(0)),
        lambda: model.ec(batch(0)),
    ):
        with pytest.raises(RuntimeError, match="is on the meta device"):
            call()
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        model.to("cpu")
    copy.deepcopy(model).to_empty(device="cpu")
    model.to_empty(device="cpu")
    assert len(model.emb.table) == 0
    model.dense.reset_parameters()
    train(model, 0, 2)
    bags = RecStoreEmbeddingBag(9, 4, device="meta", include_last_offset=True)
    none = torch.empty(3, dtype=torch.int64, device="meta")
    assert bags(none, none).shape == (2, 4)
    assert bags(none[None]).shape == (1, 4)


@pytest.mark.filterwarnings("ignore:for .* meta")
def test_loading_into_meta() -> None:
    model = Model()
    train(model, 0, 2)
    for made in (Model(device="meta"), Model().to("meta")):
        state = copy.deepcopy(model.state_dict())
        with pytest.warns(
            UserWarning, match="on the meta device have no rows.*assign=True"
        ):
            made.load_state_dict(state, strict=False)
        made.load_state_dict(state, assign=True)
        assert_same(states(made), states(model))
        assert train(made, 2, 4) == train(copy.deepcopy(model), 2, 4)
    with torch.device("meta"):
        assert Model().emb.weight.is_meta


def test_a_reset_forgets_rows() -> None:
    emb = RecStoreEmbedding(9, 4)
    ebc = RecStoreEmbeddingBagCollection(bag_tables())
    first = emb(IDS).detach()
    emb(IDS).sum().backward()
    ebc(batch(0)).values().sum().backward()
    for module in (emb, ebc):
        module.reset_parameters()
    assert [table.table.steps for table in ebc.embedding_bags.values()] == [0] * 3
    assert torch.equal(emb(IDS), first)


def test_hooks_and_modes() -> None:
    model = nn.Sequential(RecStoreEmbedding(9, 4), nn.Linear(4, 1))
    seen: list[str] = []
    emb = model[0]
    emb.register_forward_pre_hook(lambda *_: seen.append("before"))
    emb.register_forward_hook(lambda *_: seen.append("after"))
    emb.register_full_backward_hook(
        lambda _, __, grads: seen.append(f"backward {tuple(grads[0].shape)}")
    )
    emb.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    emb.register_load_state_dict_pre_hook(lambda *_: seen.append("loading"))
    emb.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    # No input requires a gradient.
    with pytest.warns(UserWarning, match="Full backward hook"):
        model(IDS).sum().backward()
    model.load_state_dict(model.state_dict())
    assert seen == ["before", "after", "backward (10, 4)", "saved", "loading", "loaded"]
    model.eval()
    model(torch.tensor([77]))
    assert len(emb.table) == len(IDS)
    assert all(not p.requires_grad for p in model.requires_grad_(False).parameters())


def test_a_subclass_keeps_its_own_state() -> None:
    class Scaled(RecStoreEmbedding):
        def __init__(self) -> None:
            super().__init__(9, 4, name="t")
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.register_buffer("seen", torch.tensor(0))
            self.head = nn.Linear(4, 4)

    first, second = Scaled(), Scaled()
    first(IDS).sum().backward()
    first.scale.data.fill_(3.0)
    first.seen += 5
    second.load_state_dict(first.state_dict())
    assert_same(states(second), states(first))
    assert float(second.scale.detach()) == 3.0
    assert [name for name, _ in second.named_parameters()][:2] == ["weight", "scale"]
    second.to("meta").to_empty(device="cpu")
    assert [name for name, _ in second.named_parameters()][:2] == ["weight", "scale"]


def test_processes_get_copies() -> None:
    emb = RecStoreEmbedding(9, 4)
    emb(IDS).sum().backward()
    for module in (emb, nn.Sequential(emb)):
        with pytest.raises(RuntimeError, match="cannot be shared by processes"):
            module.share_memory()
    context = mp.get_context(START_METHOD)
    found = context.SimpleQueue()
    process = context.Process(target=put_rows, args=(emb, found))
    process.start()
    rows = found.get()
    process.join()
    assert torch.equal(torch.from_numpy(rows), states(emb)["weight"])


@pytest.mark.usefixtures("one_rank")
def test_data_parallel_is_refused() -> None:
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(RecStoreEmbedding(9, 4, name="t"), nn.Linear(4, 1))
    )
    with pytest.raises(
        RuntimeError,
        match=r"table\(s\) 't': DistributedDataParallel cannot keep .* RecStoreSharder",
    ):
        model(IDS)
    assert len(model.module[0].table) == 0
    model.eval()
    model(IDS)


def test_memory_goes_with_the_module(tmp_path: Path) -> None:
    """A copy, and a module that has moved to meta, do not keep the table alive, and
    there is no reference cycle.
    """
    import gc
    import weakref

    options = TableOptions(max_rows=4, cold_store=RocksDBStore(str(tmp_path)))
    ebc = RecStoreEmbeddingBagCollection(bag_tables(), options={"t1": options})
    gc.collect()
    gc.disable()
    try:
        tables = [weakref.ref(module.table) for module in ebc.embedding_bags.values()]
        ebc(batch(0, batch_size=2)).values().sum().backward()
        ebc.to("meta")
        assert [table() for table in tables] == [None] * 3
        emb = RecStoreEmbedding(9, 4)
        emb(IDS).sum().backward()
        table = weakref.ref(emb.table)
        del emb
        assert table() is None
    finally:
        gc.enable()
    assert isinstance(ebc.embedding_bags["t1"], TableModule)


def test_writes_into_a_state_or_a_parameter_are_refused() -> None:
    model = Model()
    train(model, 0, 2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = model.state_dict()
    state["emb.weight"].fill_(3.0)
    model.load_state_dict(state)
    assert model.emb.table.lookup(state["emb.weight_id"]).unique().tolist() == [3.0]
    model.load_state_dict(before)
    for key, name in (("ebc.embedding_bags.t1.weight", "t1"), ("emb.last_step", "one")):
        model.state_dict()[key].zero_()
        with pytest.raises(
            RuntimeError,
            match=rf"table '{name}': a tensor of state_dict\(\) has been written to",
        ):
            model.eval()(batch(3, batch_size=3))
    copied = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    for each in (model, copied, loaded):
        with pytest.raises(
            RuntimeError,
            match=(
                r"table 't0': uniform_ would change no row.*TableOptions\(initializer"
            ),
        ):
            each.apply(
                lambda module: [
                    parameter.data.uniform_()
                    for parameter in module.parameters(recurse=False)
                ]
            )
        with pytest.raises(
            RuntimeError, match=r"table 'one': normal_ would change no row"
        ):
            nn.init.normal_(each.emb.weight)
        with pytest.raises(
            RuntimeError, match=r"table 'one': data would change no row"
        ):
            each.emb.weight.data = torch.zeros(9, 4)
        assert all(
            torch.equal(value, before[key])
            for key, value in each.state_dict().items()
            if "dense" not in key
        )
