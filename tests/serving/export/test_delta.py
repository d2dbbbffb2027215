"""An exported model with a delta is equal to a full export at the time of the delta."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, KeyedTensor, PoolingType

from torchrec_recstore.checkpoint import save_checkpoint
from torchrec_recstore.inference import (
    export_checkpoint,
    export_checkpoint_delta,
    export_delta,
    export_for_inference,
    read_delta,
)
from torchrec_recstore.modules import RecStoreEmbedding, RecStoreEmbeddingBagCollection
from torchrec_recstore.options import LRU, MinFrequency, TableOptions
from torchrec_recstore_serving.export.delta import DeltaTable
from torchrec_recstore_serving.export.from_checkpoint import ExportInfo
from torchrec_recstore_serving.export.verification import (
    checksum_of,
    scripted_function,
    sign_zip,
)

from ...checkpoint.models import DIM, recstore
from ..models import BAGS, Model, batch, train

DTYPES = [torch.float32, torch.float16, torch.int8, torch.quint4x2]


def signed(delta: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Makes a delta with a correct checksum, so that other errors in the delta are
    found.
    """
    tensors = {key: value for key, value in delta.items() if value is not None}
    return tensors | {"checksum": scripted_function(checksum_of)(tensors)}


def assert_same_model(
    one: torch.jit.ScriptModule, other: torch.jit.ScriptModule
) -> None:
    assert one.recstore_version() == other.recstore_version()
    for name in other.recstore_tables():
        assert torch.equal(one.recstore_ids(name), other.recstore_ids(name))
        assert torch.equal(one.recstore_rows(name), other.recstore_rows(name))
    some = batch()
    assert torch.equal(one(some), other(some))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_of_a_live_model(dtype: torch.dtype, tmp_path: Path) -> None:
    model = train(Model(TableOptions(max_rows=60, eviction=LRU())))
    export_for_inference(model, tmp_path / "base.pt", dtype=dtype)
    served = torch.jit.load(tmp_path / "base.pt")
    for step in range(2):
        before = served.recstore_version()
        train(model, 1)
        # New ids, for which other ids are evicted.
        ids = torch.arange(100, 130) + 50 * step
        model.train()
        model(
            KeyedJaggedTensor(
                ["g", "h", "f"], ids.repeat(3), lengths=torch.full((9,), 10)
            )
        ).sum().backward()
        with torch.no_grad():
            model.eval().over[0].weight += 1
        info = export_delta(
            model,
            tmp_path / "delta.safetensors",
            base=served if step else tmp_path / "base.pt",
        )
        export_for_inference(model, tmp_path / "full.pt", dtype=dtype)
        full = torch.jit.load(tmp_path / "full.pt")
        assert (info.base, info.version) == (before, full.recstore_version())
        assert info.dense == ("over.0.weight",)
        assert info.tables["t"].removed > 0
        assert info.bytes == (tmp_path / "delta.safetensors").stat().st_size
        delta = read_delta(tmp_path / "delta.safetensors")
        assert served.apply_delta(delta)
        assert_same_model(served, full)
        assert not served.apply_delta(delta), "it has it already"
        assert_same_model(served, full)


def test_rows_that_have_not_changed_are_not_in_it(tmp_path: Path) -> None:
    model = train(Model())
    export_for_inference(model, tmp_path / "base.pt", dtype=torch.int8)
    info = export_delta(model, tmp_path / "delta", base=tmp_path / "base.pt")
    assert info.base == info.version
    assert {(table.rows, table.removed) for table in info.tables.values()} == {(0, 0)}
    model.train()
    model(
        KeyedJaggedTensor(
            ["g", "h", "f"], torch.tensor([7]), lengths=torch.tensor([0, 0, 1])
        )
    ).sum().backward()
    info = export_delta(model.eval(), tmp_path / "delta", base=tmp_path / "base.pt")
    assert {name: table.rows for name, table in info.tables.items()} == {
        "t": 1,
        "m": 0,
        "u": 1,
        "s": 0,
    }
    known = ["base", "checksum", "format", "version"]
    assert sorted(read_delta(tmp_path / "delta")) == sorted(
        [
            *known,
            *(f"{name}/{kind}" for name in "tu" for kind in ("ids", "rows", "removed")),
        ]
    )


class WithTorchRecsTable(nn.Module):
    """A model with one of TorchRec's own tables and one RecStore table."""

    def __init__(self) -> None:
        super().__init__()
        self.own = EmbeddingBagCollection(tables=[copy.deepcopy(BAGS[1])])
        self.bags = RecStoreEmbeddingBagCollection(BAGS[:1], lr=0.3)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        own: KeyedTensor = self.own(features)
        pooled: KeyedTensor = self.bags(features)
        return torch.cat([own.values(), pooled.values()], dim=1)


def test_rows_of_torchrecs_tables(tmp_path: Path) -> None:
    model = WithTorchRecsTable().eval()
    export_for_inference(model, tmp_path / "base.pt", dtype=torch.float16)
    with torch.no_grad():
        model.own.embedding_bags["m"].weight[[3, 50]] += 1
    info = export_delta(model, tmp_path / "delta", base=tmp_path / "base.pt")
    assert info.tables["m"] == DeltaTable(2, 0)
    (tmp_path / "plain").touch()
    assert {path.name for path in tmp_path.iterdir()} == {"base.pt", "delta", "plain"}
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1, (
        "readable as any other file"
    )
    export_for_inference(model, tmp_path / "full.pt", dtype=torch.float16)
    served = torch.jit.load(tmp_path / "base.pt")
    delta = read_delta(tmp_path / "delta")
    with pytest.raises(
        torch.jit.Error,
        match="table m is TorchRec's own, and the delta has rows beyond it",
    ):
        served.apply_delta(signed(delta | {"m/ids": torch.tensor([3, 100])}))
    assert served.apply_delta(delta)
    assert_same_model(served, torch.jit.load(tmp_path / "full.pt"))


def test_with_rows_that_are_left_out(tmp_path: Path) -> None:
    """Rows that have not changed can enter or leave the export because other rows
    changed.
    """
    model = train(Model(), 2)
    export_for_inference(model, tmp_path / "base.pt", top_rows=10)
    served = torch.jit.load(tmp_path / "base.pt")
    train(model, 2)
    export_delta(model, tmp_path / "delta", base=served, top_rows=10)
    export_for_inference(model, tmp_path / "full.pt", top_rows=10)
    served.apply_delta(read_delta(tmp_path / "delta"))
    assert_same_model(served, torch.jit.load(tmp_path / "full.pt"))
    assert all(
        len(served.recstore_ids(name)) == 10 for name in served.recstore_tables()
    )


def assert_refused(
    served: torch.jit.ScriptModule, delta: dict[str, Tensor], message: str
) -> None:
    """A refused delta changes nothing."""
    version = served.recstore_version()
    rows = {
        name: served.recstore_rows(name).clone() for name in served.recstore_tables()
    }
    with pytest.raises(torch.jit.Error, match=message):
        served.apply_delta(delta)
    assert served.recstore_version() == version
    assert all(
        torch.equal(served.recstore_rows(name), some) for name, some in rows.items()
    )


def test_what_is_refused(tmp_path: Path) -> None:
    model = train(Model())
    export_for_inference(model, tmp_path / "base.pt")
    served = torch.jit.load(tmp_path / "base.pt")
    version = served.recstore_version()
    with torch.no_grad():
        model.over[0].weight += 1
    first = export_delta(train(model), tmp_path / "first", base=served)
    ahead = copy.deepcopy(served)
    ahead.apply_delta(read_delta(tmp_path / "first"))
    export_delta(train(model), tmp_path / "second", base=ahead)
    with pytest.raises(
        torch.jit.Error,
        match=f"the delta is one of version {first.version}.*of version {version}",
    ):
        served.apply_delta(read_delta(tmp_path / "second"))
    good = read_delta(tmp_path / "first")
    weight = good["dense/over.0.weight"]
    ids = good["s/ids"]
    for message, changed in (
        ("this is no delta: it has no base", {"base": None}),
        ("one of another model: it has nobody/ids", {"nobody/ids": ids}),
        (
            "table t: the delta's rows are of another dim",
            {"t/rows": good["t/rows"][:, :4]},
        ),
        (
            "table t: the delta has not an int64 id for each row",
            {"t/ids": good["t/ids"][1:]},
        ),
        # A later table is invalid. The tables before it do not change.
        (
            "table s: the delta's rows are of another dim",
            {"s/rows": good["s/rows"].float()},
        ),
        (
            "table s: the delta has not an int64 id for each row",
            {"s/ids": ids[:, None]},
        ),
        (
            "table s: the delta's removed ids are no vector of int64",
            {"s/removed": ids[:0, None]},
        ),
        (
            "table s: the delta has an id more than once",
            {"s/ids": torch.zeros_like(ids)},
        ),
        ("table s: the delta has an id more than once", {"s/removed": ids[:1]}),
        ("the delta has no s/rows", {"s/rows": None}),
        (
            "over.0.weight is of another shape or data type",
            {"dense/over.0.weight": weight.double()},
        ),
        (
            "over.0.weight is of another shape or data type",
            {"dense/over.0.weight": weight[:1]},
        ),
    ):
        assert_refused(served, signed({**good, **changed}), message)
    for name in ("t/rows", "u/ids", "dense/over.0.weight", "version", "checksum"):
        flipped = good[name].clone()
        flipped.view(-1)[-1:].view(torch.uint8)[-1] ^= 1
        assert_refused(served, good | {name: flipped}, "the delta is damaged")
    with pytest.raises(FileNotFoundError, match="there is no exported model at"):
        export_delta(model, tmp_path / "x", base=tmp_path / "none.pt")
    with pytest.raises(ValueError, match="base is not a model that"):
        export_delta(model, tmp_path / "x", base=torch.jit.script(nn.Linear(1, 1)))
    newer = torch.jit.script(nn.Linear(1, 1))
    newer.define("def recstore_format(self) -> int:\n    return 2\n")
    with pytest.raises(
        ValueError,
        match=r"base has the format 2, which torchrec_recstore .* does not know",
    ):
        export_delta(model, tmp_path / "x", base=newer)
    other = torch.jit.load(tmp_path / "base.pt")
    with pytest.raises(ValueError, match=r"the model has the tables .*, base has"):
        export_delta(train(Model()).bags, tmp_path / "x", base=other)
    assert not (tmp_path / "x").exists()
    torch.save({}, tmp_path / "first")
    for use in (
        read_delta,
        lambda path: export_delta(model, tmp_path / "x", base=path),
    ):
        with pytest.raises(
            ValueError,
            match="first is neither an exported model nor a delta, or it is damaged",
        ):
            use(tmp_path / "first")
    sign_zip(tmp_path / "first")
    with pytest.raises(
        ValueError, match=r"first cannot be loaded as an exported model: ."
    ):
        export_delta(model, tmp_path / "x", base=tmp_path / "first")
    # No file can be created there.
    with pytest.raises(OSError, match="/proc/x cannot be written: "):
        export_delta(model, "/proc/x", base=served)


def test_a_number_that_has_changed(tmp_path: Path) -> None:
    """A changed attribute is refused: the outputs would differ from those of a full
    export of the same version.
    """
    model = train(Model())
    export_for_inference(model, tmp_path / "base.pt")
    export_delta(model, tmp_path / "delta", base=tmp_path / "base.pt")
    model.bags.embedding_bag_configs()[0].pooling = PoolingType.MEAN
    with pytest.raises(
        ValueError, match=r"bags\._means is \[True.*, and \[False.* in base: export"
    ):
        export_delta(model, tmp_path / "delta", base=tmp_path / "base.pt")


class SharedParts(nn.Module):
    """A model with two of each module, or with one module at two paths."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.towers = nn.ModuleList(self._tower(name) for name in "ab")
        if shared:
            self.towers[1] = nn.Sequential(self.towers[0][0], self.towers[0][1])
        self.register_buffer("shift", torch.zeros(2, dtype=torch.float64))
        self.scale = torch.tensor(1.0)  # It is neither a parameter nor a buffer.

    def _tower(self, name: str) -> nn.Module:
        return nn.Sequential(
            RecStoreEmbedding(50, 4, name=name, lr=0.3), nn.Linear(4, 2)
        )

    def forward(self, ids: Tensor) -> Tensor:
        out = [tower(ids) for tower in self.towers]
        return (torch.cat(out, dim=1) * self.scale).double() + self.shift.sum()


@pytest.mark.slow
def test_what_a_model_has_at_several_paths_and_plain_tensors(tmp_path: Path) -> None:
    """Models of one TorchScript class share their methods, also if only one of them
    shares modules between paths.
    """
    ids = torch.arange(5)
    for shared in (True, False, True):
        model = SharedParts(shared)
        export_for_inference(model.eval(), tmp_path / "base.pt")
        model.train()(ids).sum().backward()
        model.scale = torch.tensor(3.0)
        with torch.no_grad():
            model.shift += 1
            model.towers[1][1].weight += 1
        info = export_delta(model.eval(), tmp_path / "delta", base=tmp_path / "base.pt")
        weight = f"towers.{0 if shared else 1}.1.weight"
        assert sorted(info.dense) == ["scale", "shift", weight]
        full = export_for_inference(model, tmp_path / "full.pt")
        for served in (
            torch.jit.load(tmp_path / "base.pt"),
            copy.deepcopy(torch.jit.load(tmp_path / "base.pt")),
        ):
            assert served.recstore_tables() == (["a"] if shared else ["a", "b"])
            served.apply_delta(read_delta(tmp_path / "delta"))
            assert torch.equal(served(ids), full(ids))
            assert (
                served.recstore_version()
                == torch.jit.load(tmp_path / "full.pt").recstore_version()
            )


class Traced(nn.Module):
    """A model that only TorchRec's tracer can compile, with a collection that its
    forward does not use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used = RecStoreEmbedding(50, 4, name="a", lr=0.3)
        self.unused = RecStoreEmbeddingBagCollection(BAGS, lr=0.3)

    def forward(self, ids):  # type: ignore[no-untyped-def]  # The tracer copies annotations unchanged.
        return sum([self.used(ids)], torch.zeros(()))


def test_a_collection_that_is_not_used(tmp_path: Path) -> None:
    model, ids = Traced(), torch.arange(5)
    export_for_inference(model.eval(), tmp_path / "base.pt")
    model.train()(ids).sum().backward()
    info = export_delta(model.eval(), tmp_path / "delta", base=tmp_path / "base.pt")
    assert {name: table.rows for name, table in info.tables.items()} == {
        "a": 5,
        "t": 0,
        "m": 0,
        "u": 0,
    }
    served = torch.jit.load(tmp_path / "base.pt")
    served.apply_delta(read_delta(tmp_path / "delta"))
    assert torch.equal(served(ids), export_for_inference(model)(ids))


def test_a_name_that_torchscript_reserves(tmp_path: Path) -> None:
    model = nn.ModuleDict({"in": RecStoreEmbedding(50, 4, name="a")})
    with pytest.raises(
        ValueError,
        match=r"the model has 'in', a name that TorchScript's files cannot have",
    ):
        export_for_inference(model, tmp_path / "model.pt")


@pytest.mark.slow
def test_requests_in_flight(tmp_path: Path) -> None:
    """A new model replaces the served model while it is used: each output is that of
    one of the two models.
    """
    model = train(Model())
    export_for_inference(model, tmp_path / "base.pt")
    current = [torch.jit.load(tmp_path / "base.pt")]
    some = batch()
    answers: list[Tensor] = []
    failures: list[BaseException] = []
    done = threading.Event()

    def serve() -> None:
        try:
            while not done.is_set():
                answers.append(current[0](some).detach())
        except BaseException as error:
            failures.append(error)

    allowed = [current[0](some).detach()]
    threads = [threading.Thread(target=serve) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            export_delta(train(model, 1), tmp_path / "delta", base=current[0])
            fresh = copy.deepcopy(current[0])
            fresh.apply_delta(read_delta(tmp_path / "delta"))
            allowed.append(fresh(some).detach())
            seen = len(answers)
            current[0] = fresh
            while len(answers) < seen + 6 and not failures:
                done.wait(0.001)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failures
    kinds = [
        [torch.equal(answer, each) for each in allowed].index(True)
        for answer in answers
    ]
    assert set(kinds) == set(range(6)), "each version was served, and nothing else"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "dtypes", [[torch.int8], pytest.param(DTYPES, marks=pytest.mark.slow)], ids=len
)
def test_of_a_delta_checkpoint(dtypes: list[torch.dtype], tmp_path: Path) -> None:
    model = recstore(
        options=TableOptions(max_rows=10, eviction=LRU(), admission=MinFrequency(2))
    )

    def step(first: int) -> None:
        ids = torch.arange(first, first + 12).repeat_interleave(3) - 5
        model(
            KeyedJaggedTensor(["u", "i", "j"], ids, lengths=torch.full((6,), 6))
        ).sum().backward()

    for first in (0, 0, 5, 5):
        step(first)
    save_checkpoint(model, tmp_path / "full")
    for dtype in dtypes:
        base = tmp_path / f"base-{dtype}.pt"
        info = export_checkpoint(tmp_path / "full", base, dtype=dtype)
        assert_tables_of(model, info, torch.jit.load(base))
    for first in (20, 20, 40, 40):
        step(first)
    save_checkpoint(model, tmp_path / "delta", delta_of=tmp_path / "full")
    for dtype in dtypes:
        served = torch.jit.load(tmp_path / f"base-{dtype}.pt")
        done: list[int] = []
        found = export_checkpoint_delta(
            tmp_path / "delta", tmp_path / "d", base=served, advance=done.append
        )
        info = export_checkpoint(tmp_path / "delta", tmp_path / "now.pt", dtype=dtype)
        assert sum(done) == sum(
            len(table) for table in model.module.sparse.recstore_tables()
        )
        assert found.version == info.version
        assert sum(table.removed for table in found.tables.values()) > 0
        assert served.apply_delta(read_delta(tmp_path / "d"))
        assert_tables_of(model, info, served)
        assert (
            served.recstore_version()
            == torch.jit.load(tmp_path / "now.pt").recstore_version()
            == info.version
        )


def assert_tables_of(
    model: nn.Module, info: ExportInfo, served: torch.jit.ScriptModule
) -> None:
    tables = {table.name: table for table in model.module.sparse.recstore_tables()}
    assert list(info.tables) == served.recstore_tables() == sorted(tables)
    for name, table in tables.items():
        ids = table.ids()
        assert torch.equal(served.recstore_ids(name), ids)
        assert info.tables[name].rows == len(ids)
        rows = served.lookup(name, ids)
        assert rows.shape == (len(ids), DIM)
        exact = info.tables[name].dtype == torch.float32
        torch.testing.assert_close(
            rows, table.lookup(ids), atol=0 if exact else 0.05, rtol=0
        )
