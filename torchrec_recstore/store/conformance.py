"""A test that a cold store fulfills the protocol: :func:`check_cold_store`."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
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
_EXTREME_IDS = torch.tensor(
    [
        2**63 - 1,
        0,
        -1,
        -(2**63),
        1,
        2**31,
        -(2**31) - 1,
        256,
    ]
)


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
    copied_options = pickle.loads(pickle.dumps(options))
    _expect(
        copied_options == options,
        "options can be pickled, and are compared by value",
    )
    checks = SHARED_CHECKS if is_shared(options) else CHECKS
    for check in checks:
        check(options)


@contextmanager
def _opened(
    options: object,
    name: str = "conformance/0",
    row_bytes: int = ROW_BYTES,
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
        is_found, rows = store.get(_EXTREME_IDS)
        has_no_rows = not is_found.any() and rows.shape == (0, ROW_BYTES)
        _expect(has_no_rows, "a new store has no rows")
        scanned_ids, _ = _scanned(store)
        _expect(len(scanned_ids) == 0, "a scan of an empty store returns no ids")


def _keeps_rows(options: object) -> None:
    with _opened(options) as store:
        ids = _EXTREME_IDS
        rows = _rows(len(ids))
        rows[0] = 0
        rows[1] = 255
        store.put(ids, rows)
        promise = "get returns rows byte for byte, in the order of the ids"
        _expect_rows(store, ids, rows, promise)

        promise = "get returns rows in the order of the ids"
        _expect_rows(
            store,
            ids.flip(0),
            rows.flip(0),
            promise,
        )

        pairs_of_ids = torch.stack([ids, ids], dim=1)
        strided_ids = pairs_of_ids[:, 0]
        _expect_rows(store, strided_ids, rows, "ids may be strided")

        other_ids = ids[:4] + 16
        wide_rows = rows[:4].repeat(1, 2)
        strided_rows = wide_rows[:, ::2]
        store.put(other_ids, strided_rows)
        _expect_rows(store, other_ids, strided_rows, "rows may be strided")


def _overwrites(options: object) -> None:
    with _opened(options) as store:
        ids = torch.arange(-50, 50)
        rows = _rows(100)
        store.put(ids, rows)
        rows[20:60] = _rows(40, seed=1)
        store.put(ids[20:60], rows[20:60])
        promise = "a second put replaces the rows of its ids and no others"
        _expect_rows(store, ids, rows, promise)
        _expect_scan(
            store,
            ids,
            rows,
            "a scan returns the rows that were put last",
        )


def _reports_missing_ids(options: object) -> None:
    with _opened(options) as store:
        even_ids = torch.arange(0, 2000, 2)
        rows = _rows(1000)
        store.put(even_ids, rows)

        ids = torch.arange(2000).flip(0)
        is_found, read_rows = store.get(ids)
        is_bool = is_found.dtype == torch.bool and is_found.shape == ids.shape
        _expect(is_bool, "found is (N,) bool")

        is_even = ids % 2 == 0
        _expect(
            torch.equal(is_found, is_even),
            "found is True for the ids that have a row, and for no others",
        )
        _expect(
            torch.equal(read_rows, rows.flip(0)),
            "get returns rows in the order of the ids that have one",
        )

        odd_ids = torch.tensor([1, 3, 5])
        is_found, read_rows = store.get(odd_ids)
        has_no_rows = not is_found.any() and read_rows.shape == (0, ROW_BYTES)
        _expect(has_no_rows, "rows of missing ids are (0, row bytes)")


def _deletes(options: object) -> None:
    with _opened(options) as store:
        ids = torch.arange(-500, 500)
        rows = _rows(1000)
        store.put(ids, rows)

        is_deleted = ids % 3 == 0
        deleted_ids = ids[is_deleted]
        ids_without_rows = torch.tensor([10**6, -(10**6)])
        store.delete(torch.cat([deleted_ids, ids_without_rows]))

        remaining_rows = rows[~is_deleted]
        is_found, read_rows = store.get(ids)
        _expect(
            torch.equal(is_found, ~is_deleted),
            "deleted ids are not found, all others are",
        )
        _expect(
            torch.equal(read_rows, remaining_rows),
            "a delete leaves the other rows as they were",
        )
        _expect_scan(
            store,
            ids[~is_deleted],
            remaining_rows,
            "a scan returns no deleted id",
        )

        new_rows = rows[is_deleted].flip(0)
        store.put(deleted_ids, new_rows)
        _expect_rows(
            store,
            deleted_ids,
            new_rows,
            "a deleted id can be put again",
        )


def _takes_empty_batches(options: object) -> None:
    with _opened(options) as store:
        store.put(torch.tensor([7]), _rows(1))
        no_ids = torch.empty(0, dtype=torch.int64)
        is_found, rows = store.get(no_ids)
        is_empty = is_found.shape == (0,) and rows.shape == (0, ROW_BYTES)
        _expect(is_empty, "a get of no ids returns (0,) and (0, row bytes)")
        has_dtypes = is_found.dtype == torch.bool and rows.dtype == torch.uint8
        _expect(has_dtypes, "a get of no ids returns bool and uint8")

        store.put(no_ids, rows)
        store.delete(no_ids)
        _expect_scan(
            store,
            torch.tensor([7]),
            _rows(1),
            "empty puts and deletes change nothing",
        )


def _takes_big_batches(options: object) -> None:
    with _opened(options, row_bytes=140) as store:
        random_numbers = torch.randperm(20_000, generator=_generator(2))
        ids = random_numbers * 7919 - 10**8
        rows = _rows(20_000, 140)
        store.put(ids, rows)
        _expect_rows(store, ids, rows, "get returns a batch of 20,000 rows")
        _expect_scan(
            store,
            ids,
            rows,
            "a scan returns every id once, with its row",
        )
        store.delete(ids[1:])
        _expect_scan(
            store,
            ids[:1],
            rows[:1],
            "a batch of 19,999 ids is deleted",
        )


def _takes_any_row_size(options: object) -> None:
    for row_bytes in (1, 8, 4097):
        with _opened(options, row_bytes=row_bytes) as store:
            ids = torch.arange(64)
            rows = _rows(64, row_bytes)
            store.put(ids, rows)
            _expect_rows(
                store,
                ids,
                rows,
                f"get returns rows of {row_bytes} bytes",
            )


def _snapshots_ascend(options: object) -> None:
    # 10 MB: more than one batch of most scans
    with _opened(options, row_bytes=1000) as store:
        if not store.ascending_snapshots:
            return
        random_numbers = torch.randperm(10_000, generator=_generator(3))
        random_ids = random_numbers * 613 - 10**6
        ids = torch.cat([random_ids, _EXTREME_IDS]).sort().values
        # so that ids above all others can be put during the scan
        ids = ids[ids < 2**63 - 1]
        rows = _rows(len(ids), 1000)
        store.put(ids, rows)

        scan = store.scan()
        store.delete(ids[::2])
        store.delete(ids[-1:])
        store.put(ids[1::2], rows[1::2].flip(0))

        batches = [next(scan)]
        ids_in_between = torch.arange(10**8, 10**8 + 100)
        ids_at_the_end = torch.arange(2**63 - 100, 2**63 - 1)
        store.put(ids_in_between, _rows(100, 1000))
        store.put(ids_at_the_end, _rows(99, 1000))
        batches.extend(scan)

        scanned_ids, scanned_rows = _concatenated(batches)
        _expect(
            torch.equal(scanned_ids, ids),
            "ascending_snapshots: a scan returns the ids at the time of its call,"
            " ascending",
        )
        _expect(
            torch.equal(scanned_rows, rows),
            "ascending_snapshots: a scan returns the rows at the time of its call",
        )


def _keeps_stores_apart(options: object) -> None:
    odd = "a name: of {1} \N{SNOWMAN}[0]?/" + "x" * 300
    names = (
        "conformance/0",
        "conformance/00",
        "conformance/0*",
        "..",
        odd,
    )
    ids = torch.arange(10)
    rows = _rows(10)
    other_rows = _rows(10, seed=1)
    for other_name in names:
        with _opened(options) as store, _opened(options, other_name) as other_store:
            store.put(ids, rows)
            is_found, _ = other_store.get(ids)
            _expect(
                not is_found.any(),
                f"stores named 'conformance/0' and {other_name!r} do not share rows",
            )

            other_store.put(ids, other_rows)
            _expect_scan(
                store,
                ids,
                rows,
                f"a scan returns no rows of a store named {other_name!r}",
            )

            other_store.close()
            _expect_rows(
                store,
                ids,
                rows,
                f"closing a store named {other_name!r} does not change 'conformance/0'",
            )


def _serves_several_threads(options: object) -> None:
    with _opened(options) as store:
        ids = torch.arange(1000)
        rows = _rows(1000)
        _in_a_thread(lambda: store.put(ids[:500], rows[:500]))
        store.put(ids[500:], rows[500:])
        promise = "calls may come from several threads, one after the other"
        _in_a_thread(lambda: _expect_rows(store, ids, rows, promise))

        _in_a_thread(lambda: store.delete(ids[:10]))
        _expect_scan(
            store,
            ids[10:],
            rows[10:],
            "rows that one thread has deleted are gone for all threads",
        )


def _closes(options: object) -> None:
    store = open_cold_store(options, name="conformance/0", row_bytes=ROW_BYTES)
    ids = torch.arange(10)
    rows = _rows(10)
    store.put(ids, rows)
    store.close()
    store.close()
    _expect_closed("get", lambda: store.get(ids))
    _expect_closed("put", lambda: store.put(ids, rows))
    _expect_closed("delete", lambda: store.delete(ids))
    _expect_closed("scan", lambda: list(store.scan()))

    with _opened(options) as next_store:
        is_found, _ = next_store.get(ids)
        _expect(not is_found.any(), "a store deletes its rows when it is closed")


def _shares_rows_by_name(options: object) -> None:
    with (
        _opened(options) as store,
        _opened(options) as namesake,
        _opened(options, "conformance/1") as store_of_other_name,
    ):
        ids = torch.cat([_EXTREME_IDS, torch.arange(1000, 2000)])
        rows = _rows(1008)
        store.put(ids, rows)
        _expect_rows(
            namesake,
            ids,
            rows,
            "stores of one name have the same rows",
        )
        ascending = _ids(namesake).sort().values
        has_all_ids = torch.equal(ascending, ids.sort().values)
        _expect(has_all_ids, "ids returns every id once")
        has_no_ids = len(_ids(store_of_other_name)) == 0
        _expect(has_no_ids, "stores of another name have other rows")

        new_rows = rows[:10].flip(0)
        namesake.put(ids[:10], new_rows)
        namesake.delete(ids[500:])
        _expect_rows(
            store,
            ids[:10],
            new_rows,
            "a store has the rows that other stores of its name put",
        )
        is_found, _ = store.get(ids[500:])
        _expect(
            not is_found.any(),
            "rows that one store deletes are gone for all stores of its name",
        )

        scan = namesake.scan()
        store.delete(ids[:100])
        scanned_ids: set[int] = set()
        for batch_ids, _ in scan:
            scanned_ids.update(batch_ids.tolist())
        has_rest = scanned_ids.issuperset(ids[100:500].tolist())
        _expect(has_rest, "a scan returns all rows that no store deletes")


def _outlives_its_users(options: object) -> None:
    ids = torch.arange(-50, 50)
    rows = _rows(100)
    with _opened(options) as namesake:
        name = f"conformance/0/{ROW_BYTES}"
        store = open_cold_store(options, name=name, row_bytes=ROW_BYTES)
        store.put(ids, rows)
        store.close()
        store.close()
        promise = "a shared store keeps its rows when it is closed"
        _expect_rows(namesake, ids, rows, promise)
        _expect_closed("get", lambda: store.get(ids))


CHECKS = (
    _starts_empty,
    _keeps_rows,
    _overwrites,
    _reports_missing_ids,
    _deletes,
    _takes_empty_batches,
    _keeps_stores_apart,
    _closes,
    _takes_any_row_size,
    _snapshots_ascend,
    _serves_several_threads,
    _takes_big_batches,
)
SHARED_CHECKS = (
    _starts_empty,
    _keeps_rows,
    _overwrites,
    _reports_missing_ids,
    _deletes,
    _takes_empty_batches,
    _shares_rows_by_name,
    _outlives_its_users,
    _takes_any_row_size,
    _snapshots_ascend,
    _serves_several_threads,
    _takes_big_batches,
)


def _ids(store: ColdStore) -> Tensor:
    return cast(SharedColdStore, store).ids()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _rows(
    n: int,
    row_bytes: int = ROW_BYTES,
    seed: int = 0,
) -> Tensor:
    return torch.randint(
        0,
        256,
        (n, row_bytes),
        dtype=torch.uint8,
        generator=_generator(seed),
    )


def _scanned(store: ColdStore) -> tuple[Tensor, Tensor]:
    """Returns all ids and rows of a scan, sorted by id."""
    batches = list(store.scan())
    for ids, rows in batches:
        are_ids = ids.dtype == torch.int64 and ids.dim() == 1
        _expect(are_ids, "a scan's ids are (n,) int64")
        are_rows = rows.dtype == torch.uint8 and len(rows) == len(ids)
        _expect(are_rows, "a scan's rows are (n, row bytes) uint8")
    if not batches:
        no_ids = torch.empty(0, dtype=torch.int64)
        no_rows = torch.empty(0, 0, dtype=torch.uint8)
        return no_ids, no_rows
    ids, rows = _concatenated(batches)
    ids, order = ids.sort()
    return ids, rows[order]


def _concatenated(batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    ids = torch.cat([batch_ids for batch_ids, _ in batches])
    rows = torch.cat([batch_rows for _, batch_rows in batches])
    return ids, rows


def _expect_scan(
    store: ColdStore,
    ids: Tensor,
    rows: Tensor,
    promise: str,
) -> None:
    ids, order = ids.sort()
    scanned_ids, scanned_rows = _scanned(store)
    has_ids = torch.equal(scanned_ids, ids)
    _expect(has_ids, f"{promise}: the scan returns the ids that were put, each once")
    has_rows = torch.equal(scanned_rows, rows[order])
    _expect(has_rows, f"{promise}: the scan returns the rows that were put")


def _expect_rows(
    store: ColdStore,
    ids: Tensor,
    rows: Tensor,
    promise: str,
) -> None:
    is_found, read_rows = store.get(ids)
    is_bool = is_found.dtype == torch.bool and is_found.shape == ids.shape
    _expect(is_bool and bool(is_found.all()), f"{promise}: all have rows")
    is_equal = read_rows.dtype == torch.uint8 and torch.equal(read_rows, rows)
    _expect(is_equal, promise)


def _in_a_thread(call: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(call).result()


def _expect_closed(name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except ColdStoreError:
        return
    _expect(False, f"{name} after close raises ColdStoreError")


def _expect(is_kept: bool, promise: str) -> None:
    if not is_kept:  # not an assert statement, because Python's option -O removes these
        raise AssertionError(f"broken promise of a cold store: {promise}")
