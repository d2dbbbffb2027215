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
from torchrec_recstore import ops, plugins
from torchrec_recstore.optim import SGD, Adam, RowOptimizer
from torchrec_recstore.options import (
    LRU,
    Expiry,
    NormalInit,
    RocksDBStore,
    TableOptions,
    UniformInit,
)
from torchrec_recstore.store import Table

THREE = torch.arange(3)


@situation(
    "ValueError",
    "TableOptions.eviction needs max_rows: an unbounded table evicts nothing",
)
def eviction_without_a_bound() -> None:
    TableOptions(eviction=LRU())


@situation(
    "ValueError", "Expiry needs either steps or seconds, got steps=1000, seconds=86400"
)
def steps_and_seconds() -> None:
    Expiry(steps=1000, seconds=86400)


@situation("ValueError", "TableOptions.max_rows must be at least 1, got 0")
def no_rows() -> None:
    TableOptions(max_rows=0)


@situation("ValueError", "UniformInit.low must not exceed high, got low=1.0, high=-1.0")
def low_above_high() -> None:
    UniformInit(1.0, -1.0)


@situation("ValueError", "Adam.lr must be finite and not negative, got -0.1")
def negative_learning_rate() -> None:
    Adam(lr=-0.1)


@situation(
    "ValueError",
    "table 't_user': RowOptimizer 'typo' does not compile: step:1:...: error:"
    " 'gradient' was not ...",
)
def code_that_does_not_compile() -> None:
    Table(
        4,
        name="t_user",
        optimizer=RowOptimizer(name="typo", step="w -= lr * gradient;"),
    )


@situation(
    "ValueError",
    "table 't_user': RowOptimizer 'own' needs a C++ compiler: install g++, or set"
    " CXX: ...",
)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    Table(4, name="t_user", optimizer=RowOptimizer(name="own", step="w -= lr * g;"))


@situation(
    "TypeError",
    "TableOptions.initializer must be UniformInit or NormalInit or ConstantInit,"
    " got str",
)
def an_initializer_by_name() -> None:
    TableOptions(initializer="normal")  # type: ignore[arg-type]


@situation("TypeError", "TableOptions.seed must be an int, got str")
def seed_as_text() -> None:
    TableOptions(initializer=NormalInit(0.0, 1.0), seed="7")  # type: ignore[arg-type]


@situation(
    "ValueError", "columns must be a range of step 1 within range(8), got range(4, 12)"
)
def too_many_columns() -> None:
    Table(8, columns=range(4, 12))


@situation("TypeError", "ids must be an int64 tensor, got torch.float32")
def float_ids() -> None:
    Table(4, name="t_user").lookup(torch.tensor([1.0]))


@situation("ValueError", "grads must have the shape (3, 4), got (3, 2)")
def narrow_gradients() -> None:
    Table(4, name="t_user").update(THREE, torch.ones(3, 2))


@situation(
    "ValueError",
    "table 't_user': a gradient is NaN or infinite, and nonfinite='raise': no row"
    " was ...",
)
def a_gradient_that_is_not_finite() -> None:
    Table(4, name="t_user", options=TableOptions(nonfinite="raise")).update(
        THREE, torch.full((3, 4), torch.nan)
    )


@situation("ValueError", "ids must be on the CPU, got meta")
def ids_elsewhere() -> None:
    Table(4, name="t_user").contains(torch.empty(3, dtype=torch.int64, device="meta"))


@situation(
    "ValueError",
    "table 't_user' needs 3 rows, max_rows is 2 for this shard, and it has no eviction",
)
def no_eviction() -> None:
    """A full table without eviction.

    Cause: the table has `max_rows` rows, and neither `eviction` nor `cold_store` is
    set. Fix: set one of them, or increase `max_rows`.
    """
    table = Table(4, name="t_user", options=TableOptions(max_rows=2))
    table.lookup(THREE[:2], train=True)
    table.lookup(THREE, train=True)


@situation(
    "ValueError", "table 't_user' needs 3 rows at once, max_rows is 2 for this shard"
)
def working_set_too_large() -> None:
    """A step that needs more rows than max_rows.

    Cause: all rows of a step, and of forwards whose backward is pending, must be in
    memory together, in each shard. Fix: increase `max_rows`, or use smaller batches.
    With `routing="hash"` the shards of a row-wise table fill evenly.
    """
    Table(4, name="t_user", options=TableOptions(max_rows=2, eviction=LRU())).lookup(
        THREE, train=True
    )


@situation("ValueError", "table 't_user' is closed")
def closed() -> None:
    table = Table(4, name="t_user")
    table.close()
    table.lookup(THREE)


@situation(
    "ValueError",
    "table 't_user': the table was made before this process was forked, and a forked"
    " process cannot use it: start processes with multiprocessing's start method"
    " 'spawn' or 'forkserver' (DataLoader: multiprocessing_context='spawn') and make"
    " the table there",
)
def forked() -> None:
    table = Table(4, name="t_user")
    raise_from_a_fork(lambda: table.lookup(THREE))


@situation(
    "ColdStoreError",
    "cold store RocksDBStore('...') cannot be opened: this process was forked from a"
    " process that uses RocksDB, and does not have its threads: start it with"
    " multiprocessing's start method 'spawn' or 'forkserver'",
)
def forked_with_rocksdb(tmp_path: Path) -> None:
    options = TableOptions(max_rows=2, cold_store=RocksDBStore(str(tmp_path / "first")))
    with Table(4, name="t_user", options=options):
        other = TableOptions(
            max_rows=2, cold_store=RocksDBStore(str(tmp_path / "second"))
        )
        raise_from_a_fork(lambda: Table(4, name="t_item", options=other))


@situation("ValueError", "table 't_user': id 0 has no row")
def reading_absent_rows() -> None:
    """Reading a row that does not exist.

    Cause: `read_rows` reads whole rows with their state, and the id has no row. Fix:
    call `contains` first, or call `lookup`, which accepts ids without a row.
    """
    Table(4, name="t_user").read_rows(THREE)


@situation(
    "ValueError",
    "table 't_user': the table is being saved already: wait until the save has ended",
)
def two_snapshots() -> None:
    """A table during a save.

    Cause: a snapshot of the table is open, for example the snapshot of an `async_save`.
    Fix: call `AsyncSave.wait()`, or close the snapshot.
    """
    table = Table(4, name="t_user", optimizer=SGD(lr=0.1))
    with table.snapshot(), table.snapshot():
        pass


@situation(
    "TypeError", "table 't_user' owns native memory and cannot be copied or pickled"
)
def pickled() -> None:
    """Copying or pickling a table.

    Cause: the table was passed to another process, or to `copy.deepcopy`. Fix: make a
    table in the other process, and fill it from `read_rows` or a checkpoint. Eager
    modules can be copied and pickled.
    """
    pickle.dumps(Table(4, name="t_user"))


@situation(
    "TypeError",
    "TableOptions.cold_store: no cold store is registered for str: use SSDStore,"
    " RocksDBStore, RedisStore or ServerStore, or register one with"
    " open_cold_store.register",
)
def an_unknown_store() -> None:
    Table(4, name="t_user", options=TableOptions(max_rows=2, cold_store="s3://rows"))


@situation(
    "MemoryError",
    "table 't_user': out of memory: cannot allocate a buffer of 17592186044416 bytes",
)
def too_wide() -> None:
    """More memory than the machine has.

    Cause: a batch or a table needs more memory than is free. Fix: use smaller batches,
    `max_rows` with a cold store, more ranks, or a machine with more memory
    ([memory.md](memory.md)).
    """
    Table(2**24, name="t_user").lookup(torch.arange(2**18))


@situation(
    "ImportError",
    "the native extension torchrec_recstore._C is missing or does not fit this torch"
    " (..., needs 2.11 or later): run `make build` in the repository, or `pip install"
    " --no-build-isolation .` with torch installed",
)
def no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torchrec_recstore, "_C")
    monkeypatch.setitem(sys.modules, "torchrec_recstore._C", None)
    assert ops.__file__ is not None
    spec = util.spec_from_file_location("ops_again", ops.__file__)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(util.module_from_spec(spec))


@situation(
    "ImportError",
    "RocksDBStore(path='...') needs a package that is missing: pip install rocksdict"
    " (...)",
)
def no_rocksdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(
        sys.modules, "torchrec_recstore.store.rocksdb_store", raising=False
    )
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    plugins.plugin.cache_clear()
    Table(
        4,
        name="t_user",
        options=TableOptions(max_rows=2, cold_store=RocksDBStore(str(tmp_path))),
    )


@situation(
    "ImportError",
    "this needs torchrec-recstore-serving, which is not installed: pip install"
    " path/to/torchrec_recstore/serving",
)
def no_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_entry_points", lambda **wanted: ())
    plugins.plugin.__wrapped__("export")


@situation(
    "AttributeError", "module 'torchrec_recstore' has no attribute 'TableOption'"
)
def a_typing_error() -> None:
    torchrec_recstore.TableOption  # noqa: B018
