"""Errors of options and of a single table."""

from __future__ import annotations

import pickle
import sys
from importlib import util
from pathlib import Path

import pytest
import torch

import torchrec_recstore
from tests.errors.situations import raise_from_a_fork, situation
from torchrec_recstore import ops
from torchrec_recstore.optim import SGD, Adam
from torchrec_recstore.options import LRU, Expiry, NormalInit, RocksDBStore, TableOptions, UniformInit
from torchrec_recstore.store import Table

THREE = torch.arange(3)


@situation("An option that needs another option")
def eviction_without_a_bound() -> None:
    TableOptions(eviction=LRU())


@situation("An expiry with two limits, or with none")
def steps_and_seconds() -> None:
    Expiry(steps=1000, seconds=86400)


@situation("A number out of range")
def no_rows() -> None:
    TableOptions(max_rows=0)


@situation("Bounds of an initializer in the wrong order")
def low_above_high() -> None:
    UniformInit(1.0, -1.0)


@situation("An argument of an optimizer out of range")
def negative_learning_rate() -> None:
    Adam(lr=-0.1)


@situation("An option of the wrong type")
def an_initializer_by_name() -> None:
    TableOptions(initializer="normal")  # type: ignore[arg-type]


@situation("A number of the wrong type")
def seed_as_text() -> None:
    TableOptions(initializer=NormalInit(0.0, 1.0), seed="7")  # type: ignore[arg-type]


@situation("Columns that the table does not have")
def too_many_columns() -> None:
    Table(8, columns=range(4, 12))


@situation("Ids that are not int64")
def float_ids() -> None:
    Table(4, name="t_user").lookup(torch.tensor([1.0]))


@situation("Gradients or weights of the wrong shape")
def narrow_gradients() -> None:
    Table(4, name="t_user").update(THREE, torch.ones(3, 2))


@situation("Tensors on another device")
def ids_elsewhere() -> None:
    Table(4, name="t_user").contains(torch.empty(3, dtype=torch.int64, device="meta"))


@situation("A full table without eviction")
def no_eviction() -> None:
    table = Table(4, name="t_user", options=TableOptions(max_rows=2))
    table.lookup(THREE[:2], train=True)
    table.lookup(THREE, train=True)


@situation("A step that needs more rows than max_rows")
def working_set_too_large() -> None:
    Table(4, name="t_user", options=TableOptions(max_rows=2, eviction=LRU())).lookup(THREE, train=True)


@situation("A closed table")
def closed() -> None:
    table = Table(4, name="t_user")
    table.close()
    table.lookup(THREE)


@situation("A table in a forked process")
def forked() -> None:
    table = Table(4, name="t_user")
    raise_from_a_fork(lambda: table.lookup(THREE))


@situation("A cold store on disk in a forked process")
def forked_with_rocksdb(tmp_path: Path) -> None:
    options = TableOptions(max_rows=2, cold_store=RocksDBStore(str(tmp_path / "first")))
    with Table(4, name="t_user", options=options):
        other = TableOptions(max_rows=2, cold_store=RocksDBStore(str(tmp_path / "second")))
        raise_from_a_fork(lambda: Table(4, name="t_item", options=other))


@situation("Reading a row that does not exist")
def reading_absent_rows() -> None:
    Table(4, name="t_user").read_rows(THREE)


@situation("A table during a save")
def two_snapshots() -> None:
    table = Table(4, name="t_user", optimizer=SGD(lr=0.1))
    with table.snapshot(), table.snapshot():
        pass


@situation("Copying or pickling a table")
def pickled() -> None:
    pickle.dumps(Table(4, name="t_user"))


@situation("A cold store that is not registered")
def an_unknown_store() -> None:
    Table(4, name="t_user", options=TableOptions(max_rows=2, cold_store="s3://rows"))


@situation("More memory than the machine has")
def too_wide() -> None:
    Table(2**24, name="t_user").lookup(torch.arange(2**18))


@situation("The native extension is missing")
def no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torchrec_recstore, "_C")
    monkeypatch.setitem(sys.modules, "torchrec_recstore._C", None)
    assert ops.__file__ is not None
    spec = util.spec_from_file_location("ops_again", ops.__file__)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(util.module_from_spec(spec))


@situation("The package of a cold store is missing")
def no_rocksdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "torchrec_recstore.store.rocksdb_store", raising=False)
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    Table(4, name="t_user", options=TableOptions(max_rows=2, cold_store=RocksDBStore(str(tmp_path))))


@situation("A name that the package does not have")
def a_typing_error() -> None:
    torchrec_recstore.TableOption  # noqa: B018
