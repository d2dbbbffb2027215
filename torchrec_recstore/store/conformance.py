"""A test that a cold store fulfills the protocol: :func:`check_cold_store`."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from torchrec_recstore.options import is_shared
from torchrec_recstore.store.cold_backends import open_cold_store
from torchrec_recstore.store.cold_store import (
    ColdStore,
    ColdStoreError,
    SharedColdStore,
)

ROW_BYTES = 52
_EXTREME_IDS = torch.tensor([2**63 - 1, 0, -1, -(2**63), 1, 2**31, -(2**31) - 1, 256])


def check_cold_store(options: object) -> None:
    """Opens cold stores with ``options`` and tests every promise of :class:`ColdStore`.

    The test takes a few seconds and 10 MB. If ``options.shared`` is set, it tests the
    promises of :class:`SharedColdStore` instead, in stores whose names begin with
    ``conformance/``, and leaves these stores empty.

    Example::

        from torchrec_recstore.store.conformance import check_cold_store

        def test_my_store() -> None:
            check_cold_store(MyStore("..."))

    Args:
        options: The options of the cold store, of a type that is registered with
            :func:`open_cold_store`.

    Raises:
        AssertionError: The cold store breaks a promise. The message names the promise.
    """
    _expect(hash(options) is not None, "options are hashable")
    _expect(
        pickle.loads(pickle.dumps(options)) == options,
        "options can be pickled, and are compared by value",
    )
    for check in SHARED_CHECKS if is_shared(options) else CHECKS:
        check(options)


@contextmanager
def _opened(
    options: object, name: str = "conformance/0", row_bytes: int = ROW_BYTES
) -> Iterator[ColdStore]:
    if is_shared(options):
        # shared stores of one name share their rows, and so have one row size
        name = f"{name}/{row_bytes}"
    store = open_cold_store(options, name=name, row_bytes=row_bytes)
    try:
        yield store
    finally:
        if is_shared(options):
            store.delete(_ids(store))
        store.close()


def _starts_empty(options: object) -> None:
    with _opened(options) as store:
        found, rows = store.get(_EXTREME_IDS)
        _expect(
            not found.any() and rows.shape == (0, ROW_BYTES), "a new store has no rows"
        )
        _expect(not len(_scanned(store)[0]), "a scan of an empty store returns no ids")


def _keeps_rows(options: object) -> None:
    with _opened(options) as store:
        ids, rows = _EXTREME_IDS, _rows(len(_EXTREME_IDS))
        rows[0], rows[1] = 0, 255
        store.put(ids, rows)
        _expect_rows(
            store, ids, rows, "get returns rows byte for byte, in the order of the ids"
        )
        _expect_rows(
            store, ids.flip(0), rows.flip(0), "get returns rows in the order of the ids"
        )
        _expect_rows(
            store, torch.stack([ids, ids], dim=1)[:, 0], rows, "ids may be strided"
        )
        store.put(ids[:4] + 16, rows.repeat(1, 2)[:4, ::2])
        _expect_rows(
            store, ids[:4] + 16, rows.repeat(1, 2)[:4, ::2], "rows may be strided"
        )


def _overwrites(options: object) -> None:
    with _opened(options) as store:
        ids, rows = torch.arange(-50, 50), _rows(100)
        store.put(ids, rows)
        rows[20:60] = _rows(40, seed=1)
        store.put(ids[20:60], rows[20:60])
        _expect_rows(
            store, ids, rows, "a second put replaces the rows of its ids and no others"
        )
        _expect_scan(store, ids, rows, "a scan returns the rows that were put last")


def _reports_missing_ids(options: object) -> None:
    with _opened(options) as store:
        ids, rows = torch.arange(0, 2000, 2), _rows(1000)
        store.put(ids, rows)
        asked = torch.arange(2000).flip(0)
        found, got = store.get(asked)
        _expect(
            found.dtype == torch.bool and found.shape == asked.shape,
            "found is (N,) bool",
        )
        _expect(
            torch.equal(found, asked % 2 == 0),
            "found is True for the ids that have a row, and for no others",
        )
        _expect(
            torch.equal(got, rows.flip(0)),
            "get returns rows in the order of the ids that have one",
        )
        found, got = store.get(torch.tensor([1, 3, 5]))
        _expect(
            not found.any() and got.shape == (0, ROW_BYTES),
            "rows of missing ids are (0, row bytes)",
        )


def _deletes(options: object) -> None:
    with _opened(options) as store:
        ids, rows = torch.arange(-500, 500), _rows(1000)
        store.put(ids, rows)
        gone = ids % 3 == 0
        store.delete(torch.cat([ids[gone], torch.tensor([10**6, -(10**6)])]))
        found, got = store.get(ids)
        _expect(torch.equal(found, ~gone), "deleted ids are not found, all others are")
        _expect(
            torch.equal(got, rows[~gone]), "a delete leaves the other rows as they were"
        )
        _expect_scan(store, ids[~gone], rows[~gone], "a scan returns no deleted id")
        store.put(ids[gone], rows[gone].flip(0))
        _expect_rows(
            store, ids[gone], rows[gone].flip(0), "a deleted id can be put again"
        )


def _takes_empty_batches(options: object) -> None:
    with _opened(options) as store:
        store.put(torch.tensor([7]), _rows(1))
        none = torch.empty(0, dtype=torch.int64)
        found, rows = store.get(none)
        _expect(
            found.shape == (0,) and rows.shape == (0, ROW_BYTES),
            "a get of no ids returns (0,) and (0, row bytes)",
        )
        _expect(
            found.dtype == torch.bool and rows.dtype == torch.uint8,
            "a get of no ids returns bool and uint8",
        )
        store.put(none, rows)
        store.delete(none)
        _expect_scan(
            store, torch.tensor([7]), _rows(1), "empty puts and deletes change nothing"
        )


def _takes_big_batches(options: object) -> None:
    with _opened(options, row_bytes=140) as store:
        ids, rows = (
            torch.randperm(20_000, generator=_generator(2)) * 7919 - 10**8,
            _rows(20_000, 140),
        )
        store.put(ids, rows)
        _expect_rows(store, ids, rows, "get returns a batch of 20,000 rows")
        _expect_scan(store, ids, rows, "a scan returns every id once, with its row")
        store.delete(ids[1:])
        _expect_scan(store, ids[:1], rows[:1], "a batch of 19,999 ids is deleted")


def _takes_any_row_size(options: object) -> None:
    for row_bytes in (1, 8, 4097):
        with _opened(options, row_bytes=row_bytes) as store:
            ids, rows = torch.arange(64), _rows(64, row_bytes)
            store.put(ids, rows)
            _expect_rows(store, ids, rows, f"get returns rows of {row_bytes} bytes")


def _snapshots_ascend(options: object) -> None:
    # 10 MB: more than one batch of most scans
    with _opened(options, row_bytes=1000) as store:
        if not store.ascending_snapshots:
            return
        ids = (
            torch.cat(
                [
                    torch.randperm(10_000, generator=_generator(3)) * 613 - 10**6,
                    _EXTREME_IDS,
                ]
            )
            .sort()
            .values
        )
        # so that ids above all others can be put during the scan
        ids = ids[ids < 2**63 - 1]
        rows = _rows(len(ids), 1000)
        store.put(ids, rows)
        scan = store.scan()
        store.delete(ids[::2])
        store.delete(ids[-1:])
        store.put(ids[1::2], rows[1::2].flip(0))
        first = next(scan)
        store.put(torch.arange(10**8, 10**8 + 100), _rows(100, 1000))
        store.put(torch.arange(2**63 - 100, 2**63 - 1), _rows(99, 1000))
        seen, seen_rows = map(torch.cat, zip(first, *scan, strict=True))
        promise = (
            "ascending_snapshots: a scan returns the ids at the time of its call,"
            " ascending"
        )
        _expect(torch.equal(seen, ids), promise)
        promise = "ascending_snapshots: a scan returns the rows at the time of its call"
        _expect(torch.equal(seen_rows, rows), promise)


def _keeps_stores_apart(options: object) -> None:
    odd = "a name: of {1} \N{SNOWMAN}[0]?/" + "x" * 300
    for other in ("conformance/0", "conformance/00", "conformance/0*", "..", odd):
        with _opened(options) as one, _opened(options, other) as two:
            ids, rows = torch.arange(10), _rows(20)
            one.put(ids, rows[:10])
            _expect(
                not two.get(ids)[0].any(),
                f"stores named 'conformance/0' and {other!r} do not share rows",
            )
            two.put(ids, rows[10:])
            _expect_scan(
                one,
                ids,
                rows[:10],
                f"a scan returns no rows of a store named {other!r}",
            )
            two.close()
            _expect_rows(
                one,
                ids,
                rows[:10],
                f"closing a store named {other!r} does not change 'conformance/0'",
            )


def _serves_several_threads(options: object) -> None:
    with _opened(options) as store:
        ids, rows = torch.arange(1000), _rows(1000)
        _in_a_thread(lambda: store.put(ids[:500], rows[:500]))
        store.put(ids[500:], rows[500:])
        _in_a_thread(
            lambda: _expect_rows(
                store,
                ids,
                rows,
                "calls may come from several threads, one after the other",
            )
        )
        _in_a_thread(lambda: store.delete(ids[:10]))
        _expect_scan(
            store,
            ids[10:],
            rows[10:],
            "rows that one thread has deleted are gone for all threads",
        )


def _closes(options: object) -> None:
    store = open_cold_store(options, name="conformance/0", row_bytes=ROW_BYTES)
    ids, rows = torch.arange(10), _rows(10)
    store.put(ids, rows)
    store.close()
    store.close()
    _expect_closed("get", lambda: store.get(ids))
    _expect_closed("put", lambda: store.put(ids, rows))
    _expect_closed("delete", lambda: store.delete(ids))
    _expect_closed("scan", lambda: list(store.scan()))
    with _opened(options) as again:
        _expect(
            not again.get(ids)[0].any(), "a store deletes its rows when it is closed"
        )


def _shares_rows_by_name(options: object) -> None:
    with (
        _opened(options) as one,
        _opened(options) as two,
        _opened(options, "conformance/1") as other,
    ):
        ids, rows = torch.cat([_EXTREME_IDS, torch.arange(1000, 2000)]), _rows(1008)
        one.put(ids, rows)
        _expect_rows(two, ids, rows, "stores of one name have the same rows")
        _expect(
            torch.equal(_ids(two).sort().values, ids.sort().values),
            "ids returns every id once",
        )
        _expect(not len(_ids(other)), "stores of another name have other rows")
        two.put(ids[:10], rows[:10].flip(0))
        two.delete(ids[500:])
        _expect_rows(
            one,
            ids[:10],
            rows[:10].flip(0),
            "a store has the rows that other stores of its name put",
        )
        _expect(
            not one.get(ids[500:])[0].any(),
            "rows that one store deletes are gone for all stores of its name",
        )
        scan = two.scan()
        one.delete(ids[:100])
        seen = torch.cat(
            [torch.empty(0, dtype=torch.int64), *(some for some, _ in scan)]
        )
        _expect(
            set(ids[100:500].tolist()) <= set(seen.tolist()),
            "a scan returns all rows that no store deletes",
        )


def _outlives_its_users(options: object) -> None:
    ids, rows = torch.arange(-50, 50), _rows(100)
    with _opened(options) as other:
        store = open_cold_store(
            options, name=f"conformance/0/{ROW_BYTES}", row_bytes=ROW_BYTES
        )
        store.put(ids, rows)
        store.close()
        store.close()
        _expect_rows(
            other, ids, rows, "a shared store keeps its rows when it is closed"
        )
        _expect_closed("get", lambda: store.get(ids))


_FIRST = (
    _starts_empty,
    _keeps_rows,
    _overwrites,
    _reports_missing_ids,
    _deletes,
    _takes_empty_batches,
)
_LAST = (
    _takes_any_row_size,
    _snapshots_ascend,
    _serves_several_threads,
    _takes_big_batches,
)
CHECKS = (*_FIRST, _keeps_stores_apart, _closes, *_LAST)
SHARED_CHECKS = (*_FIRST, _shares_rows_by_name, _outlives_its_users, *_LAST)


def _ids(store: ColdStore) -> Tensor:
    return cast(SharedColdStore, store).ids()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _rows(n: int, row_bytes: int = ROW_BYTES, seed: int = 0) -> Tensor:
    return torch.randint(
        0, 256, (n, row_bytes), dtype=torch.uint8, generator=_generator(seed)
    )


def _scanned(store: ColdStore) -> tuple[Tensor, Tensor]:
    """Returns all ids and rows of a scan, sorted by id."""
    batches = list(store.scan())
    for ids, rows in batches:
        _expect(
            ids.dtype == torch.int64 and ids.dim() == 1, "a scan's ids are (n,) int64"
        )
        _expect(
            rows.dtype == torch.uint8 and len(rows) == len(ids),
            "a scan's rows are (n, row bytes) uint8",
        )
    if not batches:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, 0, dtype=torch.uint8)
    ids, rows = map(torch.cat, zip(*batches, strict=True))
    return ids.sort().values, rows[ids.argsort()]


def _expect_scan(store: ColdStore, ids: Tensor, rows: Tensor, promise: str) -> None:
    ids, order = ids.sort()
    scanned, scanned_rows = _scanned(store)
    _expect(
        torch.equal(scanned, ids),
        f"{promise}: the scan returns the ids that were put, each once",
    )
    _expect(
        torch.equal(scanned_rows, rows[order]),
        f"{promise}: the scan returns the rows that were put",
    )


def _expect_rows(store: ColdStore, ids: Tensor, rows: Tensor, promise: str) -> None:
    found, got = store.get(ids)
    _expect(
        found.dtype == torch.bool and found.shape == ids.shape and bool(found.all()),
        f"{promise}: all have rows",
    )
    _expect(got.dtype == torch.uint8 and torch.equal(got, rows), promise)


def _in_a_thread(call: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(call).result()


def _expect_closed(name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except ColdStoreError:
        return
    _expect(False, f"{name} after close raises ColdStoreError")


def _expect(kept: bool, promise: str) -> None:
    if not kept:  # not an assert statement, because Python's option -O removes these
        raise AssertionError(f"broken promise of a cold store: {promise}")
