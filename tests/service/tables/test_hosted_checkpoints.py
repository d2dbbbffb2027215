"""Tests of saving and loading the tables of one process."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from torchrec_recstore import load_checkpoint, save_checkpoint
from torchrec_recstore.checkpoint import writer
from torchrec_recstore.checkpoint.files import CheckpointError
from torchrec_recstore.checkpoint.info import read_info
from torchrec_recstore.checkpoint.reader import load_rows
from torchrec_recstore.cli import app
from torchrec_recstore.optim import SGD, Adam, Optimizer, RowWiseAdagrad
from torchrec_recstore.options import (
    LFU,
    LRU,
    MinFrequency,
    RocksDBStore,
    Scored,
    TableOptions,
)
from torchrec_recstore.utils import RecStoreWarning
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.tables.limits import Limits
from torchrec_recstore_service.wire.table_spec import TableSpec

from ...checkpoint import models

DIM = models.DIM


def spec(
    optimizer: Optimizer = SGD(lr=1.0),  # noqa: B008  (frozen)
    options: TableOptions = TableOptions(),  # noqa: B008  (frozen)
    **more: object,
) -> TableSpec:
    return TableSpec(DIM, torch.float32, optimizer, options, **more)  # type: ignore[arg-type]


SPECS = {
    "adam": spec(Adam(lr=0.1)),
    "bounded": spec(RowWiseAdagrad(lr=0.1), TableOptions(max_rows=60, eviction=LFU(5))),
    "held back": spec(
        options=TableOptions(admission=MinFrequency(3, counter_bytes=1024)),
        initial_rows="some",
    ),
    "bf16": TableSpec(3, torch.bfloat16, SGD(lr=0.5), TableOptions(seed=-1)),
}


UNLIMITED = Limits()


def made(
    limits: Limits = UNLIMITED,
    specs: dict[str, TableSpec] = SPECS,
) -> HostedTables:
    tables = HostedTables(limits)
    for name, one in specs.items():
        tables.create(name, one)
    return tables


def train(tables: HostedTables, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(-60, 60, (30,), generator=generator)
        for name, one in SPECS.items():
            grads = torch.randn(30, one.dim, generator=generator)
            distinct = ids.unique()
            tables.update(
                name,
                ids,
                grads,
                (distinct, distinct[:, None].expand(-1, one.dim).float()),
            )


def held(tables: HostedTables) -> dict[str, tuple[list[int], Tensor, int]]:
    return {
        name: (
            tables.ids(name).tolist(),
            rows_of(tables, name),
            tables.stats(name).steps,
        )
        for name in tables.specs()
    }


def rows_of(tables: HostedTables, name: str) -> Tensor:
    return tables.pull(name, tables.ids(name))


def assert_same(one: HostedTables, other: HostedTables) -> None:
    held_by_one, held_by_other = held(one), held(other)
    assert held_by_one.keys() == held_by_other.keys()
    for name, (ids, rows, steps) in held_by_one.items():
        assert held_by_other[name][0] == ids
        assert torch.equal(held_by_other[name][1], rows)
        assert held_by_other[name][2] == steps


def one_table(value: float = 1.0, **more: object) -> HostedTables:
    tables = made(specs={"t": spec(**more)})
    tables.push("t", torch.arange(5), torch.full((5, DIM), value))
    return tables


def recstore(*arguments: object) -> str:
    result = CliRunner().invoke(
        app, [str(argument) for argument in arguments], catch_exceptions=False
    )
    assert result.exit_code in (0, 1), result.output
    return result.stdout


@pytest.mark.parametrize("there", [True, False])
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, there: bool) -> None:
    """Optimizer states, frequencies, sightings, clocks and specifications are saved."""
    tables = made()
    train(tables, range(12))
    tables.save(tmp_path / "saved")
    loaded = made() if there else HostedTables()
    if there:
        train(loaded, range(20, 23))
    loaded.load(tmp_path / "saved")
    assert loaded.specs() == tables.specs()
    for step in range(30, 40):
        assert_same(loaded, tables)
        train(tables, range(step, step + 1))
        train(loaded, range(step, step + 1))
    assert tables.stats("bounded").evicted > 0
    assert tables.stats("held back").refused > 0


def test_cold_rows_and_other_limits(tmp_path: Path) -> None:
    tables = made(
        Limits(max_rows=10, cold_store=RocksDBStore(str(tmp_path / "cold"))),
        {"t": spec()},
    )
    for first in range(0, 90, 9):
        tables.update("t", torch.arange(first, first + 9), torch.ones(9, DIM))
    assert tables.stats("t").cold_rows == 80
    tables.save(tmp_path / "saved")
    whole = HostedTables()
    whole.load(tmp_path / "saved")
    assert whole.stats("t").rows == 90
    assert torch.equal(rows_of(whole, "t"), rows_of(tables, "t"))
    few = HostedTables(Limits(max_rows=40, eviction=LRU()))
    few.load(tmp_path / "saved")
    assert few.stats("t").rows == 40
    assert 89 in few.ids("t")
    tables.update("t", torch.arange(9), torch.ones(9, DIM))
    tables.load(tmp_path / "saved")
    assert torch.equal(rows_of(tables, "t"), rows_of(whole, "t"))
    tables.close()


def test_recstore_looks_at_it(tmp_path: Path) -> None:
    tables = made()
    train(tables, range(3))
    tables.save(tmp_path / "one")
    info = read_info(tmp_path / "one")
    assert set(info.tables) == set(SPECS)
    assert (info.step, info.world_size, info.delta_of, info.dense) == (3, 1, None, ())
    assert info.tables["adam"].rows == len(tables.ids("adam"))
    told = json.loads(recstore("inspect", tmp_path / "one", "--json"))
    assert told["verified"]
    assert told["tables"]["bf16"]["rows"] == len(tables.ids("bf16"))
    tables.update("adam", torch.tensor([1000]), torch.ones(1, DIM))
    tables.save(tmp_path / "two")
    assert "adam" in recstore("diff", tmp_path / "one", tmp_path / "two")
    recstore("compact", tmp_path / "two", tmp_path / "compact")
    loaded = HostedTables()
    loaded.load(tmp_path / "compact")
    assert_same(loaded, tables)


def test_a_models_checkpoint_and_back(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    models.train(model)
    save_checkpoint(model, tmp_path / "full", training_state={"epoch": 1})
    models.train(model, steps=3, distinct=60)
    save_checkpoint(model, tmp_path / "delta", delta_of=tmp_path / "full")
    for known in (False, True):
        tables = HostedTables()
        if known:
            for name in models.TABLES:
                tables.create(name, spec(RowWiseAdagrad(lr=3.0)))
                tables.push(name, torch.tensor([5]), torch.ones(1, DIM))
        tables.load(tmp_path / "delta")
        for name, _, ids, rows in models.shards(model):
            assert torch.equal(tables.ids(name), ids)
            assert torch.equal(tables.pull(name, ids), rows["weight"])
        optimizer = tables.specs()["user"].optimizer
        assert isinstance(optimizer, RowWiseAdagrad)
        assert optimizer.lr == (3.0 if known else 0.1)
    tables.update("user", torch.tensor([5]), torch.ones(1, DIM))
    tables.save(tmp_path / "served")
    load_checkpoint(model, tmp_path / "served", strict=False)
    (user,) = (shard for shard in models.shards(model) if shard[0] == "user")
    assert torch.equal(user[3]["weight"], rows_of(tables, "user"))


def test_options_of_a_model_that_servers_do_not_have(
    one_rank: None, tmp_path: Path
) -> None:
    bound = 10_000
    refused = {
        "scored": TableOptions(max_rows=bound, eviction=Scored()),
        "occurrences": TableOptions(max_rows=bound, eviction=LFU(count="occurrences")),
    }
    for name, options in refused.items():
        model = models.recstore(options=options)
        models.train(model)
        save_checkpoint(model, tmp_path / name)
        with pytest.raises(
            ValueError,
            match=r"table '(user|item)' of .*: eviction=.* cannot be used on servers",
        ):
            HostedTables().load(tmp_path / name)
    recording = models.recstore(options=TableOptions(left_ids=5))
    load_checkpoint(recording, tmp_path / "scored")
    save_checkpoint(recording, tmp_path / "recording")
    tables = HostedTables()
    tables.load(tmp_path / "recording")
    assert tables.specs()["user"].options.left_ids is None
    for name, _, ids, rows in models.shards(recording):
        assert torch.equal(tables.pull(name, ids), rows["weight"])


def test_temporary_tables_are_left_out(tmp_path: Path) -> None:
    tables = one_table()
    tables.create("passing", spec(temporary=True))
    tables.push("passing", torch.arange(3), torch.ones(3, DIM))
    tables.save(tmp_path / "saved")
    assert set(read_info(tmp_path / "saved").tables) == {"t"}
    tables.push("t", torch.arange(9), torch.zeros(9, DIM))
    tables.load(tmp_path / "saved")
    assert len(tables.ids("t")) == 5
    assert len(tables.ids("passing")) == 3
    other = made(specs={"t": spec(temporary=True)})
    with pytest.raises(ValueError, match="'t' is a temporary table in this process"):
        other.load(tmp_path / "saved")


@pytest.mark.parametrize(
    ("there", "error"),
    [
        ({"u": spec()}, "no table 'u', but this process has it"),
        (
            {"t": TableSpec(DIM + 1, torch.float32, SGD(lr=1.0), TableOptions())},
            "'t' has dim 8 .* 9 in this process",
        ),
        ({"t": spec(Adam(lr=1.0))}, "'t' was saved with the optimizer SGD"),
        ({"t": spec(initial_rows="others")}, "'t' was made with another init_func"),
        (
            {"t": spec(shard=(1, 2))},
            "part 1 of 1 of table 't', but this process has part 2 of 2",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit(
    tmp_path: Path, there: dict[str, TableSpec], error: str
) -> None:
    one_table().save(tmp_path / "saved")
    tables = made(specs=there)
    (name,) = there
    tables.push(name, torch.tensor([7]), torch.ones(1, there[name].dim))
    with pytest.raises(ValueError, match=error):
        tables.load(tmp_path / "saved")
    assert tables.specs() == there
    assert tables.ids(name).tolist() == [7]


def test_a_damaged_checkpoint_changes_nothing(tmp_path: Path) -> None:
    tables = made()
    train(tables, range(3))
    tables.save(tmp_path / "saved")
    before = held(tables)
    train(tables, range(3, 5))
    now = held(tables)
    assert now.keys() == before.keys()
    for file in sorted((tmp_path / "saved").iterdir()):
        whole = file.read_bytes()
        for damaged in (
            whole[:-1],
            whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:],
            None,
        ):
            if damaged is None:
                file.unlink()
            else:
                file.write_bytes(damaged)
            for into in (tables, HostedTables()):
                specs = into.specs()
                with pytest.raises((CheckpointError, FileNotFoundError), match="saved"):
                    into.load(tmp_path / "saved")
                assert into.specs() == specs
        file.write_bytes(whole)
    for name, (ids, rows, steps) in now.items():
        assert (tables.ids(name).tolist(), tables.stats(name).steps) == (ids, steps)
        assert torch.equal(rows_of(tables, name), rows)
    tables.load(tmp_path / "saved")
    assert torch.equal(rows_of(tables, "adam"), before["adam"][1])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        tables.load(tmp_path / "nowhere")


def test_paths_that_are_taken(tmp_path: Path) -> None:
    one_table(1.0).save(tmp_path / "saved")
    tables = one_table(2.0)
    with pytest.raises(FileExistsError, match="overwrite"):
        tables.save(tmp_path / "saved")
    tables.save(tmp_path / "saved", overwrite=True)
    loaded = HostedTables()
    loaded.load(tmp_path / "saved")
    assert rows_of(loaded, "t").unique().tolist() == [2.0]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    with pytest.raises(FileExistsError, match="no checkpoint"):
        tables.save(tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "letter").read_text() == "dear"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "saved"]


def test_a_full_disk(small_disk: Path) -> None:
    tables = one_table()
    tables.save(small_disk / "first")
    tables.push("t", torch.arange(30_000), torch.ones(30_000, DIM))
    for path, overwrite in (("second", False), ("first", True)):
        with pytest.raises(OSError, match="No space left on device"):
            tables.save(small_disk / path, overwrite)
        assert [file.name for file in small_disk.iterdir()] == ["first"]
    loaded = HostedTables()
    loaded.load(small_disk / "first")
    assert len(loaded.ids("t")) == 5
    assert tables.delete("t", torch.arange(100, 30_000)) == 29_900
    tables.save(small_disk / "second")


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Two events: a file of a save is about to be written, and the file may be written."""
    begun, go = threading.Event(), threading.Event()
    write = writer.write_tensors

    def waits(path: Path, tensors: dict[str, Tensor]) -> object:
        begun.set()
        assert go.wait(60)
        return write(path, tensors)

    monkeypatch.setattr(writer, "write_tensors", waits)
    return begun, go


def changes(tables: HostedTables) -> None:
    tables.push("t", torch.arange(5), torch.zeros(5, DIM))
    tables.update("t", torch.arange(3, 7), torch.ones(4, DIM))
    tables.delete("t", torch.arange(2))
    tables.create("new", spec())


@pytest.mark.parametrize(
    "meanwhile",
    [changes, lambda tables: tables.drop("t"), lambda tables: tables.drop("u")],
)
def test_tables_go_on_while_they_are_saved(
    tmp_path: Path,
    held_up: tuple[threading.Event, threading.Event],
    meanwhile: Callable[[HostedTables], None],
) -> None:
    begun, go = held_up
    tables = one_table()
    tables.create("u", spec())
    tables.push("u", torch.arange(3), torch.ones(3, DIM))
    with ThreadPoolExecutor() as threads:
        saving = threads.submit(tables.save, tmp_path / "saved")
        assert begun.wait(60)
        meanwhile(tables)
        go.set()
        saving.result()
    loaded = HostedTables()
    loaded.load(tmp_path / "saved")
    assert {name: len(loaded.ids(name)) for name in loaded.specs()} == {"t": 5, "u": 3}
    assert rows_of(loaded, "t").unique().tolist() == [1.0]
    tables.save(tmp_path / "again")
    assert set(read_info(tmp_path / "again").tables) == set(tables.specs())


def test_rows_that_are_not_finite_are_named_once_a_table(tmp_path: Path) -> None:
    tables = one_table()
    tables.create("u", spec())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecStoreWarning)
        tables.save(tmp_path / "finite")
    rows = torch.ones(3, DIM)
    rows[0, 1] = torch.nan
    rows[2, 0] = -torch.inf
    tables.push("u", torch.arange(3), rows)
    with pytest.warns(RecStoreWarning) as caught:
        tables.save(tmp_path / "first")
    (warning,) = caught
    text = "table 'u': 2 of the saved rows have NaN or infinity"
    assert str(warning.message).startswith(text)
    rows[1] = torch.nan
    tables.push("u", torch.arange(3), rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecStoreWarning)
        tables.save(tmp_path / "second")
    tables.drop("u")
    tables.create("u", spec())
    tables.push("u", torch.arange(3), rows)
    with pytest.warns(RecStoreWarning, match="3 of the saved rows"):
        tables.save(tmp_path / "third")


def test_closing_waits_for_a_save(
    tmp_path: Path, held_up: tuple[threading.Event, threading.Event]
) -> None:
    begun, go = held_up
    tables = one_table()
    with ThreadPoolExecutor() as threads:
        saving = threads.submit(tables.save, tmp_path / "saved")
        assert begun.wait(60)
        closing = threads.submit(tables.close)
        assert not closing.done()
        go.set()
        saving.result()
        closing.result()
    loaded = HostedTables()
    loaded.load(tmp_path / "saved")
    assert len(loaded.ids("t")) == 5
    for call in (
        lambda: tables.save(tmp_path / "other"),
        lambda: tables.load(tmp_path / "saved"),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_updates_while_a_checkpoint_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are replaced at once: no call sees the table in between."""
    tables = one_table()
    tables.save(tmp_path / "saved")
    tables.push("t", torch.arange(5), torch.full((5, DIM), 6.0))
    seen = []

    def loads(*arguments: Any, **named: Any) -> None:
        load_rows(*arguments, **named)
        # a call in another thread must not wait for the load
        with ThreadPoolExecutor() as threads:
            threads.submit(
                tables.update, "t", torch.arange(5), torch.ones(5, DIM)
            ).result(60)
            seen.append(
                threads.submit(rows_of, tables, "t").result(60).unique().tolist()
            )

    monkeypatch.setattr(
        "torchrec_recstore_service.tables.hosted_checkpoints.load_rows", loads
    )
    tables.load(tmp_path / "saved")
    assert seen == [[5.0]]
    assert rows_of(tables, "t").unique().tolist() == [1.0]
    assert tables.stats("t").steps == 0
