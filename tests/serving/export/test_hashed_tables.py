"""Models with a hash index: equal outputs, deltas of what has changed, and copies that
change while others answer.
"""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from torchrec_recstore.checkpoint import load_checkpoint, save_checkpoint
from torchrec_recstore.inference import (
    export_checkpoint,
    export_checkpoint_delta,
    export_delta,
    export_for_inference,
    load_library,
    read_delta,
    verify,
)
from torchrec_recstore.modules import RecStoreEmbedding
from torchrec_recstore.options import LRU, TableOptions
from torchrec_recstore.store import Table
from torchrec_recstore_serving.export import changed_rows, from_model
from torchrec_recstore_serving.export.description import described

from ...checkpoint.models import recstore
from ..models import Model, batch, train
from .test_delta import (
    SharedParts,
    WithTorchRecsTable,
    assert_refused,
    assert_same_model,
    signed,
)

try:
    load_library()
except ImportError as error:
    pytest.skip(
        f"this torch has no library of served models: {error}", allow_module_level=True
    )

SMALL = TableOptions(max_rows=60, eviction=LRU())


def step(model: nn.Module, number: int) -> None:
    """One step of training, with new ids for which other ids are evicted, and a change
    of the dense layer.
    """
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(number * 3 - 40, number * 3 + 40, (90,), generator=generator)
    model.train()
    model(
        KeyedJaggedTensor(["g", "h", "f"], ids, lengths=torch.full((9,), 10))
    ).sum().backward()
    with torch.no_grad():
        model.eval().over[0].weight.add_(torch.randn(3, 40, generator=generator))


def assert_equal(one: torch.jit.ScriptModule, other: torch.jit.ScriptModule) -> None:
    """All rows, weights and outputs are equal to the bit; and so is what each model
    computes from its memory.
    """
    assert_same_model(one, other)
    one.verify()
    state = other.state_dict()
    assert all(
        torch.equal(tensor, state[name]) for name, tensor in one.state_dict().items()
    )


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(torch.float16, marks=pytest.mark.slow),
        pytest.param(torch.int8, marks=pytest.mark.slow),
        pytest.param(torch.quint4x2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_outputs_are_those_of_the_sorted_index(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = train(Model(), weighted=False)
    export_for_inference(model, tmp_path / "sorted.pt", dtype=dtype)
    export_for_inference(model, tmp_path / "hash.pt", dtype=dtype, index="hash")
    verify(tmp_path / "hash.pt")
    one, other = (
        torch.jit.load(tmp_path / "hash.pt"),
        torch.jit.load(tmp_path / "sorted.pt"),
    )
    one.verify()
    for name in other.recstore_tables():
        assert torch.equal(one.recstore_ids(name), other.recstore_ids(name))
        assert torch.equal(one.recstore_rows(name), other.recstore_rows(name))
    some = batch(40)
    if dtype == torch.float32:
        assert torch.equal(one(some), other(some))
    torch.testing.assert_close(one(some), other(some))
    about = described(tmp_path / "hash.pt")
    assert (about["index"], about["dtype"]) == ("hash", one.recstore_row_format())
    assert about["tables"].keys() == described(tmp_path / "sorted.pt")["tables"].keys()


def test_weights_means_and_ids_without_a_row(tmp_path: Path) -> None:
    model = train(Model(weighted=True), weighted=True)
    export_for_inference(model, tmp_path / "m.pt", dtype=torch.float32, index="hash")
    some = batch(30, weighted=True)
    assert torch.equal(torch.jit.load(tmp_path / "m.pt")(some), model(some))


@pytest.mark.slow
def test_a_replica_follows_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 20 deltas, with restarts of the replica, it is equal to a full export."""
    follow(tmp_path, 20, torch.float32, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_replica_follows_a_model_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 60 deltas, with restarts of both sides, and of a replica from a file that a
    replica has written, the replica is equal to a full export.
    """
    follow(tmp_path, 60, torch.int8, monkeypatch)


def follow(
    folder: Path, deltas: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[bool] = []
    exported = from_model.read_model
    monkeypatch.setattr(
        from_model,
        "read_model",
        lambda *args, **more: whole.append(True) or exported(*args, **more),
    )
    model = Model(SMALL)
    for number in range(3):
        step(model, number)
    export_for_inference(model, folder / "base.pt", dtype=dtype, index="hash")
    base, replica = (
        torch.jit.load(folder / "base.pt"),
        torch.jit.load(folder / "base.pt"),
    )
    rows = removed = restarts = 0
    for number in range(deltas):
        step(model, number + 3)
        # The trainer restarts: its tables have forgotten which rows the base has.
        if number % 20 == 9:
            changed_rows._MARKS.clear()
            restarts += 1
        path = folder / f"{number}.safetensors"
        info = export_delta(model, path, base=base)
        rows, removed = rows + info.tables["t"].rows, removed + info.tables["t"].removed
        assert base.apply_delta(read_delta(path))
        assert base.recstore_version() == info.version
        if number % 20 == 14:  # The replica restarts, and applies all deltas again.
            replica = torch.jit.load(folder / "base.pt")
            for again in range(number):
                replica.apply_delta(read_delta(folder / f"{again}.safetensors"))
        if number % 50 == 49:  # A replica writes what it has.
            replica.save(str(folder / "written.pt"))
            replica = torch.jit.load(folder / "written.pt")
        fresh = copy.deepcopy(replica)
        assert fresh.apply_delta(read_delta(path))
        assert not fresh.apply_delta(read_delta(path))
        replica = fresh
        if number % 10 == 9:
            export_for_inference(model, folder / "full.pt", dtype=dtype, index="hash")
            assert_equal(replica, torch.jit.load(folder / "full.pt"))
    export_for_inference(model, folder / "full.pt", dtype=dtype, index="hash")
    assert_equal(replica, torch.jit.load(folder / "full.pt"))
    assert min(rows, removed) > 10 * deltas
    assert len(whole) == 2 + deltas // 10 + restarts, (
        "the other deltas read only the rows that have changed"
    )


@pytest.mark.slow
def test_a_delta_reads_only_what_has_changed_since_its_base(tmp_path: Path) -> None:
    """A base that is not the last version has a delta, too; one of other rows is
    compared as a whole.
    """
    model = Model(SMALL)
    step(model, 0)
    export_for_inference(model, tmp_path / "base.pt", dtype=torch.float32, index="hash")
    for number in (1, 2):
        step(model, number)
        export_delta(model, tmp_path / f"{number}", base=tmp_path / "base.pt")
    export_for_inference(model, tmp_path / "full.pt", dtype=torch.float32, index="hash")
    served = torch.jit.load(tmp_path / "base.pt")
    served.apply_delta(read_delta(tmp_path / "2"))
    assert_equal(served, torch.jit.load(tmp_path / "full.pt"))
    with pytest.raises(torch.jit.Error, match="the delta is one of version"):
        served.apply_delta(read_delta(tmp_path / "1"))


@pytest.mark.slow
def test_a_copy_changes_and_the_original_does_not(tmp_path: Path) -> None:
    model = Model(SMALL)
    step(model, 0)
    export_for_inference(model, tmp_path / "base.pt", index="hash")
    served = torch.jit.load(tmp_path / "base.pt")
    some = batch(50)
    before = served(some)
    versions, outputs = [served], [before]
    for number in range(1, 6):
        step(model, number)
        export_delta(model, tmp_path / "delta", base=versions[-1])
        first, second = copy.deepcopy(versions[-1]), copy.deepcopy(versions[-1])
        # The second one cannot extend the line of versions, and copies the rows.
        for each in (first, second):
            each.apply_delta(read_delta(tmp_path / "delta"))
        export_for_inference(model, tmp_path / "full.pt", index="hash")
        assert_equal(first, torch.jit.load(tmp_path / "full.pt"))
        assert_equal(second, torch.jit.load(tmp_path / "full.pt"))
        versions.append(first if number % 2 else second)
        outputs.append(versions[-1](some))
    for each, output in zip(versions, outputs, strict=True):
        assert torch.equal(each(some), output)
        each.verify()


@pytest.mark.slow
def test_what_is_refused(tmp_path: Path) -> None:
    model = Model(SMALL)
    step(model, 0)
    export_for_inference(model, tmp_path / "base.pt", index="hash")
    served = torch.jit.load(tmp_path / "base.pt")
    step(model, 1)
    export_delta(model, tmp_path / "delta", base=served)
    good = read_delta(tmp_path / "delta")
    rows = good["t/rows"].clone()
    rows[0, -1] ^= 1
    for message, changed in (
        ("takes deltas of format 1", {"format": torch.tensor([2])}),
        (
            "table t: the delta's rows are of another dim",
            {"t/rows": good["t/rows"][:, :4]},
        ),
        (
            "table s: the delta has not an int64 id for each row",
            {"s/ids": good["s/ids"][1:]},
        ),
        (
            "table s: the delta has an id more than once",
            {"s/ids": torch.zeros_like(good["s/ids"])},
        ),
        ("the delta does not lead from this model to version", {"t/rows": rows}),
        (
            "the delta does not lead from this model to version",
            {"t/removed": good["t/removed"][1:]},
        ),
        (
            "the delta does not lead from this model to version",
            {"dense/over.0.weight": torch.zeros(3, 40)},
        ),
    ):
        assert_refused(served, signed({**good, **changed}), message)
    assert served.apply_delta(good)
    export_for_inference(model, tmp_path / "full.pt", index="hash")
    assert_equal(served, torch.jit.load(tmp_path / "full.pt"))
    content = (tmp_path / "delta").read_bytes()
    for damaged in (content[:-1], content[: len(content) // 2], content[:20], b""):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(
            Exception, match=r"[Dd]eserializ|neither an exported model nor a delta"
        ):
            read_delta(tmp_path / "damaged")
    with pytest.raises(
        ValueError, match='index must be "sorted" or "hash", got \'btree\''
    ):
        export_for_inference(model, tmp_path / "x.pt", index="btree")
    arguments: dict[str, Any] = {"index": 1}
    with pytest.raises(TypeError, match='index must be "sorted" or "hash", got int'):
        export_for_inference(model, tmp_path / "x.pt", **arguments)


def test_what_a_model_has_at_several_paths(tmp_path: Path) -> None:
    ids = torch.arange(5)
    for shared in (True, False):
        model = SharedParts(shared)
        export_for_inference(model.eval(), tmp_path / "base.pt", index="hash")
        model.train()(ids).sum().backward()
        with torch.no_grad():
            model.shift += 1
            model.towers[1][1].weight += 1
        export_delta(model.eval(), tmp_path / "delta", base=tmp_path / "base.pt")
        export_for_inference(model, tmp_path / "full.pt", index="hash")
        for served in (
            torch.jit.load(tmp_path / "base.pt"),
            copy.deepcopy(torch.jit.load(tmp_path / "base.pt")),
        ):
            served.apply_delta(read_delta(tmp_path / "delta"))
            assert torch.equal(served(ids), torch.jit.load(tmp_path / "full.pt")(ids))
            assert (
                served.recstore_version()
                == torch.jit.load(tmp_path / "full.pt").recstore_version()
            )


def test_torchrecs_tables_and_padding(tmp_path: Path) -> None:
    model = WithTorchRecsTable().eval()
    export_for_inference(model, tmp_path / "base.pt", dtype=torch.float16, index="hash")
    with torch.no_grad():
        model.own.embedding_bags["m"].weight[[3, 50]] += 1
    export_delta(model, tmp_path / "delta", base=tmp_path / "base.pt")
    export_for_inference(model, tmp_path / "full.pt", dtype=torch.float16, index="hash")
    served = torch.jit.load(tmp_path / "base.pt")
    assert served.apply_delta(read_delta(tmp_path / "delta"))
    assert_equal(served, torch.jit.load(tmp_path / "full.pt"))
    padded = RecStoreEmbedding(50, 4, name="p", padding_idx=2)
    padded.train()(torch.tensor([1, 3]))
    export_for_inference(
        padded.eval(), tmp_path / "p.pt", dtype=torch.float32, index="hash"
    )
    ids = torch.tensor([[1, 2], [3, 4]])
    assert torch.equal(torch.jit.load(tmp_path / "p.pt")(ids), padded(ids))


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_of_a_sharded_model_and_of_checkpoints(tmp_path: Path) -> None:
    model = recstore(options=TableOptions(max_rows=10, eviction=LRU()))

    def train_on(first: int) -> None:
        ids = torch.arange(first, first + 12).repeat_interleave(3) - 5
        model(
            KeyedJaggedTensor(["u", "i", "j"], ids, lengths=torch.full((6,), 6))
        ).sum().backward()

    train_on(0)
    save_checkpoint(model, tmp_path / "one")
    export_for_inference(model, tmp_path / "base.pt", index="hash")
    export_checkpoint(tmp_path / "one", tmp_path / "tables.pt", index="hash")
    train_on(7)
    save_checkpoint(model, tmp_path / "two")
    for path, make in (
        ("base.pt", lambda base: export_delta(model, tmp_path / "delta", base=base)),
        (
            "tables.pt",
            lambda base: export_checkpoint_delta(
                tmp_path / "two", tmp_path / "delta", base=base
            ),
        ),
    ):
        served = torch.jit.load(tmp_path / path)
        info = make(served)
        assert sum(table.removed for table in info.tables.values()) > 0
        assert served.apply_delta(read_delta(tmp_path / "delta"))
        served.verify()
        if path == "base.pt":
            export_for_inference(model, tmp_path / "full.pt", index="hash")
        else:
            export_checkpoint(tmp_path / "two", tmp_path / "full.pt", index="hash")
        assert (
            served.recstore_version()
            == info.version
            == torch.jit.load(tmp_path / "full.pt").recstore_version()
        )
        # The tables have other rows now, and have forgotten their marks.
        load_checkpoint(model, tmp_path / "one")
        if path == "base.pt":
            export_delta(model, tmp_path / "delta", base=served)
            served.apply_delta(read_delta(tmp_path / "delta"))
            assert (
                served.recstore_version()
                == torch.jit.load(tmp_path / path).recstore_version()
            )


def test_requests_while_a_table_changes(tmp_path: Path) -> None:
    """A lookup is of one version, also on a module that is changed in place: all of its
    columns and rows are equal.
    """
    load_library()
    ids = torch.arange(3000) * 7
    native = torch.classes.recstore.ServedTable(0, 16, ids, torch.zeros(3001, 16))
    failures: list[Tensor] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            rows = native.lookup(ids)
            if not bool((rows == rows[0, 0]).all()):
                failures.append(rows)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(200):
            more = torch.arange(5) * 7 + 1 + 7 * 5 * number
            rows = torch.full((3005, 16), float(number + 1))
            native.prepare(
                torch.cat([ids, more]), rows, more - 35 if number else more[:0]
            )
            native.commit()
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert native.count() == 3005
    assert native.recomputed_checksum() == native.checksum()


class TwoTables(nn.Module):
    """Its output has the same number everywhere if all tables and parameters are of one
    version.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a = RecStoreEmbedding(100, 4, name="a")
        self.b = RecStoreEmbedding(100, 4, name="b")
        self.first = nn.Parameter(torch.zeros(4))
        self.last = nn.Parameter(torch.zeros(4))

    def set(self, ids: Tensor, number: int) -> None:
        for table in (self.a.table, self.b.table):
            table.insert(ids, torch.full((len(ids), 4), float(number)))
        with torch.no_grad():
            self.first.fill_(number)
            self.last.fill_(number)

    def forward(self, ids: Tensor) -> Tensor:
        count = ids.shape[0]
        return torch.cat(
            [
                self.first.expand(count, 4),
                self.a(ids),
                self.b(ids),
                self.last.expand(count, 4),
            ]
        )


def test_a_call_is_of_one_version(tmp_path: Path) -> None:
    """A model is changed in place while threads call it."""
    ids = torch.arange(200) * 3
    model = TwoTables().eval()
    model.set(ids, 0)
    export_for_inference(model, tmp_path / "base.pt", dtype=torch.float32, index="hash")
    base, served = (
        torch.jit.load(tmp_path / "base.pt"),
        torch.jit.load(tmp_path / "base.pt"),
    )
    versions, changes_of = {base.recstore_version(): 0}, []
    for number in range(1, 40):
        model.set(ids, number)
        export_delta(model, tmp_path / "delta", base=base)
        changes_of.append(read_delta(tmp_path / "delta"))
        base.apply_delta(changes_of[-1])
        versions[base.recstore_version()] = number
    failures: list[object] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            output = served(ids)
            held = served.recstore_hold()
            held_output, version = served(ids), served.recstore_version()
            held.release()
            if not bool((output == output[0, 0]).all()) or not bool(
                (held_output == versions[version]).all()
            ):
                failures.append((output, held_output, version))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for delta in changes_of:
            assert served.apply_delta(delta)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert served.recstore_version() == base.recstore_version()
    assert torch.equal(served(ids), base(ids))
    model.set(ids, 50)
    export_delta(model, tmp_path / "delta", base=served)
    held = served.recstore_hold()
    with pytest.raises(
        RuntimeError,
        match="this thread holds the model: release it before a delta is applied",
    ):
        served.apply_delta(read_delta(tmp_path / "delta"))
    assert torch.equal(served(ids), base(ids))
    held.release()
    assert served.apply_delta(read_delta(tmp_path / "delta"))
    assert bool((served(ids) == 50).all())


def test_a_large_table_answers_while_the_system_moves_it_to_huge_pages(
    tmp_path: Path,
) -> None:
    model, ids = RecStoreEmbedding(100_000, 16, name="t"), torch.arange(100_000) * 7
    model.table.insert(ids, torch.rand(100_000, 16))
    export_for_inference(
        model.eval(), tmp_path / "m.pt", dtype=torch.float32, index="hash"
    )
    wanted = model(ids)
    for _ in range(5):
        served = torch.jit.load(tmp_path / "m.pt")
        for _ in range(3):
            assert torch.equal(served(ids), wanted)
        model.train()(ids[:100]).sum().backward()
        export_delta(
            model.eval(), tmp_path / "delta", base=torch.jit.load(tmp_path / "m.pt")
        )
        torch.jit.load(tmp_path / "m.pt").apply_delta(read_delta(tmp_path / "delta"))
        served.apply_delta(read_delta(tmp_path / "delta"))
        assert torch.equal(served(ids), model(ids))


def test_many_changes_beside_a_dict() -> None:
    """Inserts, updates and removals, prepared and abandoned ones too, beside a dict;
    the table grows and is copied.
    """
    generator = torch.Generator().manual_seed(0)
    native = torch.classes.recstore.ServedTable(
        0, 3, torch.empty(0, dtype=torch.int64), torch.full((1, 3), 7.0)
    )
    known: dict[int, float] = {}
    for number in range(120):
        some = torch.randint(-2000, 2000, (200,), generator=generator).unique()
        some = some[torch.randperm(len(some), generator=generator)]
        ids, removed = some[:120], some[120:]
        rows = torch.rand(len(ids), 1, generator=generator).expand(-1, 3).contiguous()
        if number % 3 == 0:
            native.prepare(ids + 1000, rows, removed[:0])
            native.abandon()
        assert native.prepare(ids, rows, removed) != native.checksum()
        native.commit()
        known.update(zip(ids.tolist(), rows[:, 0].tolist(), strict=True))
        for id in removed.tolist():
            known.pop(id, None)
        assert native.ids().tolist() == sorted(known)
        every = torch.arange(-3200, 3200)
        wanted = torch.tensor([known.get(id, 7.0) for id in every.tolist()])
        assert torch.equal(native.lookup(every), wanted[:, None].expand(-1, 3))
        assert native.contains(every).tolist() == [id in known for id in every.tolist()]
        assert native.checksum() == native.recomputed_checksum()


def test_marks_are_forgotten_with_their_table() -> None:
    with Table(2, name="t") as table:
        changed_rows.remember({table: table.mark()}, "a")
        assert len(changed_rows._MARKS) > 0
        for number in range(200):
            changed_rows.remember({table: number}, str(number))
        assert len(changed_rows._MARKS[table]) == 127
