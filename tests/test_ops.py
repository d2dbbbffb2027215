"""opcheck on every op, and a list that a new op cannot escape."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import pytest
import torch
from torch.library import opcheck
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore import ops, table_fields
from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.kernels.device_interface import INTEGERS, NUMBERS
from torchrec_recstore.optim import SGD
from torchrec_recstore.options import (
    LRU,
    ConstantInit,
    Expiry,
    MinFrequency,
    Scored,
    TableOptions,
)
from torchrec_recstore.sharders.agreed_clock import AgreedClock
from torchrec_recstore.store import Table
from torchrec_recstore_service.wire import row_ops

from .kernels.optimizer_cases import NADAM

IDS = torch.tensor([1, -5, 7])
OFFSETS = torch.tensor([0, 1, 3])
PLACES = torch.tensor([3, 0, 6])
BYTES = torch.ones(4, 5, dtype=torch.uint8)
WINDOW = torch.zeros(15, dtype=torch.uint8)
ROWS = torch.ones(3, 4)
_keep: list[Any] = []
_contexts: list[torch.Tensor] = []


def _table() -> int:
    _keep.append(Table(4))
    return int(_keep[-1].handle)


def _bounded() -> int:
    options = TableOptions(
        max_rows=3, eviction=LRU(), expiry=Expiry(1), admission=MinFrequency(2, 1024)
    )
    _keep.append(Table(4, options=options))
    return int(_keep[-1].handle)


def _scored() -> int:
    _keep.append(Table(4, options=TableOptions(max_rows=9, eviction=Scored())))
    ops.table_lookup(_keep[-1].handle, IDS, True)
    return int(_keep[-1].handle)


def _recording() -> int:
    _keep.append(Table(4, options=TableOptions(left_ids=5)))
    ops.table_lookup(_keep[-1].handle, IDS, True)
    ops.table_remove(_keep[-1].handle, IDS[:2])
    return int(_keep[-1].handle)


def _timed() -> int:
    _keep.append(Table(4, options=TableOptions(expiry=Expiry(seconds=1))))
    return int(_keep[-1].handle)


def _clock() -> int:
    _keep.append(AgreedClock(ShardingEnv.from_local(world_size=1, rank=0), 60, []))
    return int(_keep[-1].handle)


def _table_of(ids: torch.Tensor) -> int:
    handle = _table()
    ops.table_lookup(handle, ids, True)
    return handle


def _marked() -> int:
    handle = _table_of(IDS)
    ops.table_mark(handle)
    ops.table_remove(handle, IDS[:1])
    return handle


def _ssd() -> int:
    store = torch.ops.recstore_ops.ssd_open(tempfile.mktemp(), 8, False)
    torch.ops.recstore_ops.ssd_put(store, IDS, torch.ones(3, 8, dtype=torch.uint8))
    return int(store)


def _snapshot() -> int:
    return ops.snapshot_open(_table_of(IDS), None)


def _pooled_group() -> PooledGroup:
    table = Table(4)
    _keep.extend([table, PooledGroup([table], [0], "sum")])
    return _keep[-1]  # type: ignore[no-any-return]


def _group() -> int:
    return _pooled_group().handle


def _context() -> torch.Tensor:
    return ops.group_forward(_group(), IDS, OFFSETS, None, True)[1]


def _on_device() -> int:
    """A table with device slots, which the group of :func:`_begun` looks up."""
    handle = _table_of(IDS)
    ops.table_make_device_slots(handle, 3)
    return handle


def _begun(table: int | None = None) -> torch.Tensor:
    table = _on_device() if table is None else table
    group = ops.group_create([table], [0], [(0, 0, 0, False)], False)
    return ops.group_begin(group, IDS, OFFSETS, None)


def _planned(table: int | None = None) -> torch.Tensor:
    context = _begun(table)
    assert ops.device_plan(context, [0], [0], torch.zeros(3, dtype=torch.int32))
    _contexts.append(context)
    return context


def _table_with_plan() -> int:
    table = _on_device()
    _planned(table)
    return table


def _prefetched() -> int:
    """A group whose next batch is prefetched, and whose table has device slots."""
    group = ops.group_create([_on_device()], [0], [(0, 0, 0, False)], False)
    ops.group_prefetch(group, IDS, [len(IDS)])
    return group


def _looked_up() -> tuple[int, torch.Tensor]:
    group = _pooled_group()
    return group._graph_handle, group.training_lookup(IDS, OFFSETS, (), torch.ones(3))[
        1
    ]


def _create_arguments(without: str = "", **changed: float) -> tuple[Any, ...]:
    """The arguments of the op ``table_create`` for a table of four columns.

    ``changed`` replaces fields: an int one of the integers, a float one of the numbers.
    """
    integers: dict[str, int] = {
        "column_begin": 0,
        "column_end": 4,
        "seed": 0,
        "missing_reads_init": 0,
        "init": table_fields.initializer_kind(ConstantInit(0.0)),
        "row_type": 0,
        "stochastic_rounding": 0,
        "state_type": 0,
        "nonfinite": 0,
        "optimizer": SGD.kind,
        **table_fields.bounds(TableOptions()),
    }
    numbers = table_fields.initializer_numbers(ConstantInit(0.0)) | SGD().numbers()
    for name, value in changed.items():
        if isinstance(value, int):
            integers[name] = value
        else:
            numbers[name] = value
    integers.pop(without, None)
    numbers.pop(without, None)
    return (
        "t",
        list(integers),
        list(integers.values()),
        list(numbers),
        list(numbers.values()),
        [],
    )


def _create(without: str = "", **changed: float) -> int:
    arguments = _create_arguments(without, **changed)
    return int(torch.ops.recstore_ops.table_create(*arguments))


LAYOUT = (
    ["columns", "row_type", "optimizer", "element_states", "has_row_state"],
    [4, 0, 2, 0, 1],
)
SEGMENTS = torch.tensor([[0, 2, 0, 4, 0]])
DEVICE_SLOTS = torch.tensor([1, 0, 1], dtype=torch.int32)
SETTINGS = (NUMBERS, torch.zeros(1, len(NUMBERS)))
INTEGER_SETTINGS = (INTEGERS, torch.zeros(1, len(INTEGERS), dtype=torch.int64))
FAILED = torch.zeros(2, dtype=torch.int32)


def _sorted_slots() -> tuple[torch.Tensor, torch.Tensor]:
    keys, order = torch.sort(DEVICE_SLOTS, stable=True)
    return keys, order


CASES: dict[str, Any] = {
    "device_abort_moves": lambda: ([_table_with_plan()],),
    "device_commit_moves": lambda: ([_table_with_plan()],),
    "device_dirty": lambda: (_on_device(), None),
    "device_dirty_of_pass": lambda: (_begun(),),
    "device_land_moves": lambda: ([_on_device()], torch.zeros(0)),
    "device_moves": lambda: ([_table_with_plan()], [7]),
    "device_plan_ahead": lambda: ([_prefetched()],),
    "device_plan": lambda: (_begun(), [0], [0], torch.zeros(3, dtype=torch.int32)),
    "device_refused": lambda: (_planned(),),
    "device_has_bags_of_one": lambda: (_begun(),),
    "device_find": lambda: (_on_device(), IDS, 0, 0, True),
    "device_skipped": lambda: (_table(), 1),
    "device_stage_rows": lambda: (
        _on_device(),
        torch.arange(3),
        IDS,
        False,
        None,
        None,
        torch.zeros(3, 8),
    ),
    "device_plan_refresh": lambda: (_begun(),),
    "device_read_on_host": lambda: (_begun(), torch.zeros(2, 4)),
    "device_settle": lambda: (
        _on_device(),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, 8),
    ),
    "device_stage_moves": lambda: ([_table_with_plan()], torch.zeros(24)),
    "device_updated": lambda: (_planned(),),
    "group_begin": lambda: (_group(), IDS, OFFSETS, None),
    "table_make_device_slots": lambda: (_table(), 2),
    "device_settings": lambda: ([_group()], [0.1], NUMBERS, INTEGERS),
    "device_pool": lambda: (
        *LAYOUT,
        torch.ones(2, 8),
        0,
        None,
        DEVICE_SLOTS,
        OFFSETS,
        None,
        SEGMENTS,
        False,
        torch.zeros(8),
    ),
    "device_locate": lambda: (
        OFFSETS,
        None,
        SEGMENTS,
        True,
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(3),
        torch.zeros(3, dtype=torch.int32),
    ),
    "device_weight_gradients": lambda: (
        *LAYOUT,
        torch.ones(2, 8),
        0,
        None,
        DEVICE_SLOTS,
        OFFSETS,
        SEGMENTS,
        False,
        torch.ones(8),
        *SETTINGS,
        torch.zeros(3),
    ),
    "device_check_finite": lambda: (
        torch.ones(8),
        SEGMENTS,
        4,
        *INTEGER_SETTINGS,
        FAILED.clone(),
    ),
    "device_update": lambda: (
        *LAYOUT,
        torch.ones(2, 8),
        0,
        *_sorted_slots(),
        0,
        3,
        torch.tensor([0, 4, 4]),
        torch.ones(3),
        torch.zeros(3, dtype=torch.int32),
        torch.ones(8),
        *SETTINGS,
        *INTEGER_SETTINGS,
        IDS,
        FAILED,
        torch.zeros(1, dtype=torch.int64),
    ),
    "table_create": lambda: _create_arguments(),
    "optimizer_load": lambda: tuple(NADAM.code().values()),
    "table_destroy": lambda: (
        ops.table_create("t", range(4), 0, "zeros", ConstantInit(0.0), SGD()),
    ),
    "table_lookup": lambda: (_table(), IDS, True),
    "table_read": lambda: (_table_of(IDS), IDS, torch.ones(3, 4)),
    "table_update": lambda: (_table(), IDS, torch.ones(3, 4), 0.1),
    "table_insert": lambda: (_table(), IDS, torch.ones(3, 4)),
    "table_remove": lambda: (_table(), IDS),
    "table_contains": lambda: (_table(), IDS),
    "table_ids": lambda: (_table(),),
    "table_stats": lambda: (_table(),),
    "table_optimizer_steps": lambda: (_table(),),
    "table_set_optimizer_steps": lambda: (_table(), 3),
    "table_steps": lambda: (_table(),),
    "table_set_steps": lambda: (_table(), 3),
    "table_times": lambda: (_timed(),),
    "table_set_times": lambda: (_timed(), [0, 5, 0, 0, 0, 0, 0, 1, 4]),
    "table_set_time": lambda: (_timed(), [10]),
    "table_follow_time": lambda: (_timed(), 10),
    "table_export": lambda: (_table_of(IDS), IDS),
    "table_import": lambda: (_table(), IDS, *ops.table_export(_table_of(IDS), IDS)),
    "table_exchange_rows": lambda: (_table(), _table()),
    "table_is_being_saved": lambda: (_table(),),
    "table_sightings": lambda: (_table(),),
    "table_set_sightings": lambda: (
        _bounded(),
        IDS,
        *torch.ones(2, len(IDS), dtype=torch.uint8),
    ),
    "table_set_scores": lambda: (_scored(), IDS, torch.ones(3)),
    "table_score_images": lambda: (
        (handle := _scored()),
        IDS[:2],
        torch.ones(2),
        torch.zeros(2, ops.table_image_bytes(handle), dtype=torch.uint8),
    ),
    "table_record_left": lambda: (_table(), 5),
    "table_take_left": lambda: (_recording(),),
    "table_add_left": lambda: (_recording(), IDS, True),
    "table_image_bytes": lambda: (_table(),),
    "table_absent": lambda: (_table(), IDS),
    "table_may_be_cold": lambda: (_table(), IDS),
    "table_admits": lambda: (_bounded(), IDS, True),
    "table_leaving": lambda: (_bounded(), IDS, 2),
    "table_images": lambda: (_table_of(IDS), IDS),
    "table_evict": lambda: (_table_of(IDS), IDS, ops.table_images(_table_of(IDS), IDS)),
    "table_bring_back": lambda: (
        _table(),
        IDS[:0],
        ops.table_images(_table_of(IDS), IDS[:0]),
        True,
    ),  # twice, of one id, it refuses
    "table_expired": lambda: (_bounded(),),
    "table_note_cold": lambda: (_table(), IDS),
    "table_begin_refilter": lambda: (_table(),),
    "table_keep_cold": lambda: (_table(), IDS),
    "table_may_be_kept": lambda: (_table(), IDS),
    "table_end_refilter": lambda: (_table(),),
    "table_note_left": lambda: (_table(), IDS),
    "table_count_expired": lambda: (_table(), 3),
    "table_mark": lambda: (_table(),),
    "table_locate_rows": lambda: (_table(),),
    "table_reserve": lambda: (_table(), 100),
    "table_shrink": lambda: (_table(),),
    "snapshot_open": lambda: (_table(), None),
    "snapshot_moment": lambda: (_snapshot(),),
    "snapshot_left": lambda: (ops.snapshot_open(_marked(), 1),),
    "snapshot_rows_left": lambda: (_snapshot(),),
    "snapshot_read": lambda: (_snapshot(), 2, False),
    "snapshot_close": lambda: (_snapshot(),),
    "ssd_open": lambda: (tempfile.mktemp(), 8, False),
    "ssd_close": lambda: (_ssd(),),
    "ssd_dropped": lambda: (_ssd(),),
    "ssd_get": lambda: (_ssd(), IDS),
    "ssd_put": lambda: (_ssd(), IDS, torch.ones(3, 8, dtype=torch.uint8)),
    "ssd_delete": lambda: (_ssd(), IDS),
    "ssd_ids": lambda: (_ssd(),),
    "ssd_scan": lambda: (_ssd(),),
    "ssd_scan_read": lambda: (torch.ops.recstore_ops.ssd_scan(_ssd()), 2),
    "ssd_scan_close": lambda: (torch.ops.recstore_ops.ssd_scan(_ssd()),),
    "group_create": lambda: ([_table()], [0, 0], [0], [0], [0], [0], False),
    "group_destroy": lambda: (_group(),),
    "group_forward": lambda: (_group(), IDS, OFFSETS, None, True),
    "group_forward_into": lambda: (
        _group(),
        IDS,
        OFFSETS,
        None,
        True,
        torch.zeros(2, 4),
    ),
    "group_table_ids": lambda: (_group(), IDS, OFFSETS),
    "group_read": lambda: (
        _group(),
        IDS,
        OFFSETS,
        None,
        [IDS[1:2]],
        [ops.table_images(_table_of(IDS), IDS[:1])],
    ),
    "group_prefetch": lambda: (_group(), IDS, [3]),
    "group_backward": lambda: (_context(), torch.ones(2, 4), [0.1], True),
    "graph_lookup": lambda: (
        _pooled_group()._graph_handle,
        torch.empty(0, requires_grad=True),
        IDS,
        OFFSETS,
        [],
        None,
    ),
    "graph_update": lambda: (*_looked_up(), torch.ones(2, 4), [], 3),
    "graph_read": lambda: (
        _pooled_group()._graph_handle,
        torch.empty(0, requires_grad=True),
        IDS,
        OFFSETS,
        [],
        torch.ones(3),
    ),
    "graph_read_backward": lambda: (
        _pooled_group()._graph_handle,
        IDS,
        OFFSETS,
        torch.ones(2, 4),
        False,
        3,
    ),
    "rows_forward": lambda: ([_group(), _group()], IDS, [2, 1], True),
    "rows_forward_into": lambda: (
        [_group(), _group()],
        IDS,
        [2, 1],
        True,
        torch.zeros(12),
    ),
    "rows_begin": lambda: (_group(), IDS),
    "rows_begin_each": lambda: ([_group()], IDS, [3]),
    "rows_read": lambda: (
        [_group(), _group()],
        [IDS, IDS[:2]],
        [torch.zeros(3, 4), torch.zeros(2, 4)],
    ),
    "rows_update": lambda: (
        [_group(), _group()],
        [IDS, IDS[:0]],
        [torch.ones(3, 4), torch.ones(0, 4)],
        [0.1, 0.2],
    ),
    "ids_split": lambda: (IDS, [2, 1], torch.tensor([0, 1, 1]), 2),
    "ids_distinct": lambda: (torch.tensor([7, -7, 7, 7, 2]), [3, 2]),
    "mix_ids": lambda: (IDS, False),
    "row_api": tuple,
    "rows_empty": lambda: (3, 4),
    "rows_put": lambda: (
        [BYTES.clone(), BYTES.clone()],
        PLACES,
        [2, 1],
        torch.zeros(17, dtype=torch.uint8),
        0,
    ),
    "rows_take": lambda: (
        [BYTES.clone(), BYTES.clone()],
        PLACES,
        [2, 1],
        torch.zeros(17, dtype=torch.uint8),
        0,
    ),
    "group_weight_gradients": lambda: (_context(), torch.ones(2, 4)),
    "group_accumulated_backward": lambda: ([_context()], [torch.ones(2, 4)], [0.1]),
    "agree_on_time": lambda: (_clock(), torch.empty(0)),
    "instruction_set": lambda: (),
    "buffer_pool_bytes": lambda: (),
}


def test_every_op_has_a_case() -> None:
    names = {
        name.split("::")[1]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("recstore_ops::")
    }
    # Those of clients, registered where torchrec_recstore_service is imported, have
    # their own tests.
    assert {name for name in names if not name.startswith("emb_")} == set(CASES)


@pytest.mark.parametrize("name", sorted(CASES))
def test_opcheck(name: str) -> None:
    op = getattr(torch.ops.recstore_ops, name).default
    arguments = CASES[name]()
    tensors = any(isinstance(argument, torch.Tensor) for argument in arguments)
    # An op without a tensor has nothing that autograd, fake tensors or tracing could
    # take hold of. A pass is planned once, and test_faketensor calls the op twice.
    checks = (
        ("test_schema", "test_autograd_registration", "test_faketensor")
        if tensors and name != "device_plan"
        else ("test_schema",)
    )
    opcheck(op, arguments, test_utils=checks)


# A second call of the others gives something else: another context, or no row to remove
# any more.
TRACED = [
    "table_lookup",
    "table_contains",
    "table_insert",
    "table_update",
    "table_export",
    "table_images",
    "table_absent",
]


@pytest.mark.parametrize("name", [*TRACED, "group_forward", "graph_read", "mix_ids"])
def test_opcheck_traced(name: str) -> None:
    arguments = CASES[name]()
    if name == "group_forward":
        arguments = (*arguments[:-1], False)
    opcheck(
        getattr(torch.ops.recstore_ops, name).default,
        arguments,
        test_utils="test_aot_dispatch_dynamic",
    )


def test_what_a_compiled_function_does_to_rows_is_done() -> None:
    tables = [Table(4), Table(4)]

    def step(table: int, ids: torch.Tensor) -> torch.Tensor:
        rows = torch.ops.recstore_ops.table_lookup(table, ids, True)
        torch.ops.recstore_ops.table_update(table, ids, rows + 1, 0.5)
        torch.ops.recstore_ops.table_insert(table, ids[:1], torch.ones(1, 4))
        return rows

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for n in (3, 5):
        ids = torch.arange(n) - 2**62
        assert torch.equal(step(tables[0].handle, ids), compiled(tables[1].handle, ids))
    one, other = (ops.table_export(table.handle, table.ids()) for table in tables)
    assert all(map(torch.equal, one, other))
    assert tables[0].stats() == tables[1].stats()


# Destroying what is not there is allowed, and the others take no handle.
TAKE_HANDLE = sorted(
    set(CASES)
    - {
        "table_create",
        "optimizer_load",
        "table_destroy",
        "group_destroy",
        "snapshot_close",
        "ssd_open",
        "ssd_close",
        "ssd_scan_close",
        "instruction_set",
        "buffer_pool_bytes",
        "device_check_finite",
        "device_locate",
        "device_pool",
        "device_update",
        "device_weight_gradients",
        "ids_distinct",
        "ids_split",
        "mix_ids",
        "row_api",
        "rows_empty",
        "rows_put",
        "rows_take",
    }
)

_GONE = torch.tensor([10**9])


@pytest.mark.parametrize("name", TAKE_HANDLE)
def test_an_unknown_handle_is_an_error(name: str) -> None:
    several: Any = {
        op: [10**9, 1]
        for op in (
            "rows_begin_each",
            "rows_forward",
            "rows_forward_into",
            "rows_read",
            "rows_update",
        )
    }
    for op in (
        "device_abort_moves",
        "device_commit_moves",
        "device_land_moves",
        "device_moves",
        "device_plan_ahead",
        "device_stage_moves",
    ):
        several[op] = [10**9]
    bad: Any = {
        "group_create": [10**9],
        "group_accumulated_backward": [_GONE],
        "device_settings": [10**9],
        **several,
    }.get(name, 10**9)
    of_context = (
        "device_dirty_of_pass",
        "device_has_bags_of_one",
        "device_plan",
        "device_plan_refresh",
        "device_read_on_host",
        "device_refused",
        "device_updated",
        "group_backward",
        "group_weight_gradients",
    )
    if name in of_context:
        bad = _GONE
    with pytest.raises((RuntimeError, ValueError), match="handle"):
        getattr(torch.ops.recstore_ops, name)(bad, *CASES[name]()[1:])


_NUMBERS = torch.zeros(3, dtype=torch.int32)


def test_native_checks_do_not_rely_on_the_wrappers() -> None:
    native = torch.ops.recstore_ops
    table, group = _table(), _group()
    for call, names in [
        (lambda: native.table_lookup(table, IDS.int(), False), "ids"),
        (lambda: native.table_lookup(table, IDS[None], False), "ids"),
        (lambda: native.table_update(table, IDS, torch.ones(2, 4), 0.1), "grads"),
        (lambda: native.table_read(table, IDS, torch.ones(2, 4)), "out"),
        (lambda: native.table_make_device_slots(table, 0), "from 1 to"),
        (lambda: native.table_make_device_slots(_on_device(), 1), "already"),
        (lambda: native.device_moves([table], [0]), "no device slots"),
        (lambda: native.device_moves([_on_device()], []), "firsts"),
        (lambda: native.device_commit_moves([table]), "no device slots"),
        (lambda: native.device_plan_ahead([_group()]), "no device slots"),
        (lambda: native.device_plan(_begun(), [0], [0], torch.zeros(3)), "out"),
        (lambda: native.device_plan(_begun(), [], [0], _NUMBERS), "firsts"),
        (lambda: native.device_plan(_begun(), [0], [1], _NUMBERS), "arenas"),
        (lambda: native.device_refused(_begun()), "no plan"),
        (lambda: native.device_read_on_host(_begun(), torch.zeros(3)), "8 elements"),
        (
            lambda: native.device_stage_rows(
                _on_device(), PLACES - 9, IDS, True, None, None, torch.zeros(3, 8)
            ),
            "slots",
        ),
        (lambda: native.device_stage_moves([_on_device()], torch.zeros(8)), "out"),
        (lambda: native.device_land_moves([_on_device()], torch.zeros(8)), "rows"),
        (
            lambda: native.device_settle(
                _on_device(), torch.tensor([3], dtype=torch.int32), torch.zeros(1, 8)
            ),
            "out of range",
        ),
        (
            lambda: native.device_settle(
                _on_device(), torch.tensor([0]), torch.zeros(1, 8)
            ),
            "dirty",
        ),
        (lambda: native.table_read(table, IDS, torch.ones(3, 8)[:, ::2]), "contiguous"),
        (lambda: native.rows_empty(-1, 4), "negative"),
        (lambda: native.ids_split(IDS, [3], PLACES, 3), "owners"),
        (lambda: native.ids_split(IDS, [3], PLACES - 1, 3), "owners"),
        (lambda: native.ids_split(IDS, [3], PLACES[:0], 3), "owners"),
        (lambda: native.ids_split(IDS, [3], PLACES, 0), "n must"),
        (lambda: native.ids_split(IDS, [3], PLACES, 1 << 16), "n must"),
        (lambda: native.ids_split(IDS, [2], PLACES - PLACES, 2), "counts"),
        (lambda: native.ids_distinct(IDS, [2]), "counts"),
        (lambda: native.ids_distinct(IDS.int(), [3]), "ids"),
        (lambda: native.ids_split(IDS, [4, -1], PLACES - PLACES, 2), "counts"),
        (lambda: native.rows_put([BYTES], PLACES[:1], [3], WINDOW, 0), "places"),
        (
            lambda: native.rows_put([BYTES], PLACES, [3], WINDOW, 0),
            "places must be from 0 to 3",
        ),
        (
            lambda: native.rows_put([BYTES], PLACES - 6, [3], WINDOW, 0),
            "places must be from 0 to 3",
        ),
        (lambda: native.rows_put([BYTES[:, :2]], PLACES, [3], WINDOW, 0), "contiguous"),
        (lambda: native.rows_put([BYTES.int()], PLACES, [3], WINDOW, 0), "rows"),
        (lambda: native.rows_put([BYTES], None, [3], WINDOW, 0), "counts"),
        (lambda: native.rows_put([BYTES], None, [4, 0], WINDOW, 0), "counts"),
        (lambda: native.rows_put([BYTES, BYTES], PLACES, [4, -1], WINDOW, 0), "counts"),
        (lambda: native.rows_put([BYTES], None, [4], WINDOW, 6), "window must lie"),
        (lambda: native.rows_put([BYTES], None, [4], WINDOW, -5), "window must lie"),
        (lambda: native.rows_put([BYTES], None, [4], WINDOW, 4), "between two rows"),
        (
            lambda: native.rows_put([BYTES], None, [4], WINDOW[1:], 0),
            "between two rows",
        ),
        (
            lambda: native.rows_take([BYTES], PLACES, [3], WINDOW, 0),
            "places must be from 0 to 3",
        ),
        (
            lambda: native.rows_take(
                [BYTES], None, [4], torch.ones(10, 2, dtype=torch.uint8)[:, 0], 0
            ),
            "contiguous",
        ),
        (lambda: native.rows_take([BYTES], None, [4], WINDOW[None], 0), "window"),
        (lambda: native.rows_read([_group()], [IDS, IDS], [ROWS]), "an entry for each"),
        (lambda: native.rows_read([_group()], [IDS], [ROWS[:2]]), "rows"),
        (
            lambda: native.rows_read([_group()], [IDS], [ROWS.t().contiguous().t()]),
            "contiguous",
        ),
        (lambda: native.rows_read([_group()], [IDS.int()], [ROWS]), "ids"),
        (lambda: native.rows_update([_group()], [IDS], [ROWS[:, :2]], [0.1]), "rows"),
        (lambda: native.rows_update([_group()], [IDS], [ROWS], []), "learning_rates"),
        (
            lambda: native.rows_update(
                [group, group], [IDS, IDS], [ROWS, ROWS], [0.1, 0.1]
            ),
            "different tables",
        ),
        (lambda: native.table_insert(table, IDS, torch.ones(3, 5)), "weights"),
        (lambda: _create(column_begin=4), "columns"),
        (lambda: _create(init=9), "init"),
        (lambda: _create(optimizer=99), "optimizer must"),
        (
            lambda: _create(optimizer=native.optimizer_load(**NADAM.code())),
            "hyperparameters must hold 3",
        ),
        (lambda: _create(eps=-1.0), "eps must be finite and not negative"),
        (lambda: _create(lr_power=1.0), "lr_power must be finite and not positive"),
        (lambda: _create(beta1=1.0), "beta1 must be below 1"),
        (lambda: _create(row_type=4), "row_type"),
        (lambda: _create(state_type=2), "state_type"),
        (lambda: _create(nonfinite=3), "nonfinite"),
        (lambda: _create(max_rows=-1), "bounds"),
        (lambda: _create(half_life=2**32), "half_life"),
        (lambda: _create(without="max_rows"), "field max_rows is missing"),
        (lambda: _create(without="eps"), "field eps is missing"),
        (lambda: _create(most_rows=1), "field most_rows is unknown"),
        (lambda: _create(epsilon=1.0), "field epsilon is unknown"),
        (
            lambda: native.table_create("t", ["seed"], [1, 2], [], [], []),
            "a value for the name of each field",
        ),
        (
            lambda: native.table_create("t", ["seed", "seed"], [1, 2], [], [], []),
            "field seed is there twice",
        ),
        (
            lambda: native.optimizer_load(**(NADAM.code() | {"once_expressions": []})),
            "once_expressions",
        ),
        (
            lambda: native.table_images(_table_of(IDS), torch.tensor([2])),
            "id 2 has no row",
        ),
        (
            lambda: native.table_evict(
                _table_of(IDS), IDS, torch.zeros(3, 5, dtype=torch.uint8)
            ),
            "images",
        ),
        (
            lambda: native.table_bring_back(
                _table(), IDS[[0, 0]], torch.zeros(2, 28, dtype=torch.uint8), True
            ),
            "distinct",
        ),
        (
            lambda: native.table_bring_back(
                _table_of(IDS), IDS[:1], torch.zeros(1, 28, dtype=torch.uint8), True
            ),
            "already",
        ),
        (lambda: native.table_leaving(_table(), IDS, 3), "max_rows"),
        (lambda: native.table_set_time(_timed(), [3, -1]), "time must not be negative"),
        (lambda: native.table_set_time(_timed(), []), "times must not be empty"),
        (lambda: native.table_follow_time(_timed(), -1), "time must not be negative"),
        (
            lambda: native.table_set_times(_bounded(), [0, 5, 0]),
            "do not expire after a time",
        ),
        (
            lambda: native.table_set_times(_timed(), [0, 5]),
            "times of the table's steps",
        ),
        (
            lambda: native.table_set_times(_timed(), [2, 5, 0, 0, 0, 0, 0]),
            "times of the table's steps",
        ),
        (
            lambda: native.table_set_times(_timed(), [1, 5, 0, 0, 0, 0, 0, 3, 4, 2, 5]),
            "times of the table's steps",
        ),
        (
            lambda: native.table_set_sightings(
                _bounded(), IDS, *torch.ones(2, 1, dtype=torch.uint8)
            ),
            "shape of ids",
        ),
        (
            lambda: native.table_set_scores(_scored(), IDS, torch.ones(2)),
            r"shape of ids, \(3,\)",
        ),
        (
            lambda: native.table_set_scores(_scored(), IDS, torch.ones(3).double()),
            "scores must be of dtype float32",
        ),
        (
            lambda: native.table_set_scores(
                _scored(), IDS, torch.tensor([1, 2, math.nan])
            ),
            "scores must be finite",
        ),
        (
            lambda: native.table_set_scores(_bounded(), IDS, torch.ones(3)),
            "does not evict by scores",
        ),
        (
            lambda: native.table_score_images(
                _scored(), IDS, torch.ones(3), torch.zeros(3, 5).byte()
            ),
            "images must",
        ),
        (
            lambda: native.table_score_images(
                _scored(), IDS, torch.ones(2), torch.zeros(3, 5).byte()
            ),
            "shape of ids",
        ),
        (
            lambda: native.table_record_left(_table(), 0),
            r"left_ids must be within 1 and 2\*\*30, got 0",
        ),
        (
            lambda: native.table_record_left(_table(), 2**31),
            r"left_ids must be within 1 and 2\*\*30",
        ),
        (lambda: native.table_take_left(_table()), "does not record which ids leave"),
        (
            lambda: native.table_add_left(_table(), IDS, True),
            "does not record which ids leave",
        ),
        (
            lambda: native.group_read(_group(), IDS, OFFSETS, None, [], []),
            "one entry for each table",
        ),
        (
            lambda: native.group_create([table], [0], [0, 0], [0], [0], [0], False),
            "routings",
        ),
        (lambda: native.rows_forward([_group()], IDS, [2], True), "counts"),
        (
            lambda: native.rows_forward([_group(), _group()], IDS, [3, 1], True),
            "counts",
        ),
        (
            lambda: native.rows_forward([_group(), _group()], IDS, [4, -1], True),
            "counts",
        ),
        (lambda: native.rows_forward([_group()], IDS, [3, 0], True), "counts"),
        (
            lambda: native.rows_forward_into(
                [_group()], IDS, [2], True, torch.zeros(12)
            ),
            "counts",
        ),
        (
            lambda: native.rows_forward_into(
                [_group()], IDS, [3], True, torch.zeros(11)
            ),
            "out must have 12 elements",
        ),
        (
            lambda: native.group_forward_into(
                _group(), IDS, OFFSETS, None, True, torch.zeros(3, 4)
            ),
            "out must have 2 elements in dimension 0",
        ),
        (
            lambda: native.group_forward_into(
                _group(), IDS, OFFSETS, None, True, torch.zeros(2, 4).double()
            ),
            "out must be of dtype float32",
        ),
        (
            lambda: native.group_forward_into(
                _group(), IDS, OFFSETS, None, True, torch.zeros(4, 2).t()
            ),
            "out must be contiguous",
        ),
        (
            lambda: native.group_backward(_context(), torch.ones(3, 4), [0.1], False),
            "grad",
        ),
        (
            lambda: native.group_backward(_context(), torch.ones(2, 4), [], False),
            "learning_rates",
        ),
        (
            lambda: native.group_accumulated_backward([_context()], [IDS, IDS], [0.1]),
            "contexts",
        ),
        (
            lambda: native.group_accumulated_backward(
                [_context()], [torch.ones(3, 4)], [0.1]
            ),
            "grads",
        ),
        (
            lambda: native.group_accumulated_backward(
                [_context(), _context()], [torch.ones(2, 4)] * 2, [0.1]
            ),
            "one group",
        ),
    ]:
        with pytest.raises(RuntimeError, match=names):
            call()


@pytest.mark.parametrize("row_bytes", [16, 64, 250, 256, 272])
@pytest.mark.parametrize("offset", [0, 8])
def test_many_rows_are_put_where_they_belong(row_bytes: int, offset: int) -> None:
    """Many rows are written past the caches if their size and place allow it."""
    n = 3 * 2**20 // row_bytes
    rows = torch.randint(0, 256, (n // 2, row_bytes), dtype=torch.uint8)
    places = torch.randperm(n)[: n // 2]
    out = torch.zeros(n * row_bytes + offset, dtype=torch.uint8)[offset:].view(
        n, row_bytes
    )
    expected = out.clone()
    expected[places] = rows
    row_ops.rows_put([out], places, [len(rows)], rows.view(-1), 0)
    assert torch.equal(out, expected)
