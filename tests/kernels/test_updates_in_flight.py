"""Every public call that reads or changes a table sees the updates whose gradients are
still on their way from an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.store.shared_store import ROWS, SharedDictOptions
from torchrec_recstore import ops
from torchrec_recstore.kernels import PooledGroup, SequenceGroup
from torchrec_recstore.kernels.device_copies import Arriving
from torchrec_recstore.optim import Adam
from torchrec_recstore.options import LRU, Expiry, MinFrequency, Scored, TableOptions
from torchrec_recstore.store import Table
from torchrec_recstore.store.parts import Part
from torchrec_recstore.store.table import check_applied
from torchrec_recstore.store.table_state import TableState

DIM = 4
IDS = torch.tensor([3, -7, 11, 3])
OFFSETS = torch.tensor([0, 1, 3, 4])
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, -1.0])
GRADS = torch.arange(1.0, 1 + len(IDS) * DIM).view(len(IDS), DIM)
OTHER_IDS = torch.tensor([11, 40])
graph_ops = torch.ops.recstore_ops
BOUNDS = TableOptions(max_rows=100, eviction=Scored(), left_ids=100)
SHARED = TableOptions(max_rows=100, cold_store=SharedDictOptions())
CLOCKS = TableOptions(
    max_rows=100, eviction=LRU(), expiry=Expiry(steps=90), admission=MinFrequency(2)
)


class Arrived(Arriving):
    """A gradient that has been copied to the host."""

    def __init__(self, grad: Tensor) -> None:
        self._grad = grad

    def wait(self) -> Tensor:
        return self._grad


@pytest.fixture(autouse=True)
def _no_waiting_updates() -> Iterator[None]:
    ROWS.clear()
    yield
    ops.waiting_updates.clear()


def table_with_rows(options: TableOptions = BOUNDS, name: str = "t_user") -> Table:
    table = Table(DIM, optimizer=Adam(lr=0.1), options=options, name=name)
    for _ in range(2):  # MinFrequency(2) admits the ids in the second step.
        table.lookup(IDS, train=True)
    return table


def send_update(table: Table) -> PooledGroup:
    """Runs a forward and a backward of an accelerator, whose gradient then arrives."""
    group = PooledGroup([table], [0], "sum")
    _, context = group.training_lookup(IDS, OFFSETS, (), None)
    group.update_later(context, Arrived(GRADS[:3].clone()), ())
    return group


@dataclass
class Given:
    """What the calls below get besides the table, made before the update is sent."""

    table: Table
    part: Part
    state: TableState


def given(options: TableOptions) -> Given:
    table = table_with_rows(options)
    return Given(table, table.part(IDS[:2]), table.state())


TableCall = Callable[[Table, Given], object]


def all_rows(table: Table) -> object:
    """Returns all that the table holds, after the call that is tested."""
    return table.ids(), table.read_rows(table.ids()), table.state(), table.stats()


def after(call: Callable[[Table, Given], object]) -> TableCall:
    """Returns a function that makes a call, and returns its result and the rows."""

    def call_and_read(table: Table, other: Given) -> object:
        result = call(table, other)
        # What follows would finish the update itself.
        assert not ops.waiting_updates
        return result, all_rows(table)

    return call_and_read


def read_snapshot(table: Table, other: Given) -> object:
    with table.snapshot() as snapshot:
        moment = (snapshot.mark, snapshot.steps, snapshot.optimizer_steps)
        part = snapshot.read(len(snapshot))
    return moment, part.ids, part.rows


def rows_since_mark(table: Table, other: Given) -> object:
    mark = table.mark()
    with table.snapshot(since=mark) as snapshot:
        return len(snapshot)


def exchange(table: Table, other: Given) -> object:
    table.exchange_rows(other.table)
    assert not ops.waiting_updates
    return all_rows(other.table)


def close(table: Table, other: Given) -> object:
    table.close()
    return len(ops.waiting_updates)


def shared_rows() -> object:
    return {name: dict(rows) for name, rows in ROWS.items()}


def flush(table: Table, other: Given) -> object:
    table.flush()
    return shared_rows()


def refresh(table: Table, other: Given) -> object:
    table.refresh()
    return shared_rows()


def close_shared(table: Table, other: Given) -> object:
    table.close()
    return shared_rows()


TABLE_CALLS: dict[str, TableCall] = {
    "lookup": lambda table, other: table.lookup(IDS),
    "update": after(lambda table, other: table.update(OTHER_IDS, GRADS[:2])),
    "insert": after(lambda table, other: table.insert(OTHER_IDS, GRADS[:2])),
    "insert_all": after(lambda table, other: table.insert_all(OTHER_IDS, GRADS[:2])),
    "read_rows": lambda table, other: table.read_rows(IDS),
    "write_rows": after(
        lambda table, other: table.write_rows(OTHER_IDS, other.part.rows)
    ),
    "part": lambda table, other: table.part(IDS).rows,
    "parts": lambda table, other: [(part.ids, part.rows) for part in table.parts()],
    "write": after(lambda table, other: table.write(other.part)),
    "state": lambda table, other: table.state(),
    "set_state": after(lambda table, other: table.set_state(other.state)),
    "set_time": after(lambda table, other: table.set_time(1.7e9)),
    "mark": rows_since_mark,
    "shrink": after(lambda table, other: table.shrink()),
    "snapshot": read_snapshot,
    "exchange_rows": after(exchange),
    "take_rows": after(lambda table, other: table.take_rows(other.table)),
    "contains": lambda table, other: table.contains(IDS),
    "remove": after(lambda table, other: table.remove(IDS[:1])),
    "set_scores": after(lambda table, other: table.set_scores(IDS, WEIGHTS)),
    "left_ids": lambda table, other: table.left_ids(),
    "ids": lambda table, other: table.ids(),
    "optimizer_steps": lambda table, other: table.optimizer_steps,
    "set_optimizer_steps": after(lambda table, other: table.set_optimizer_steps(7)),
    "steps": lambda table, other: table.steps,
    "stats": lambda table, other: table.stats(),
    "close": close,
    "__len__": lambda table, other: len(table),
}
SHARED_CALLS: dict[str, TableCall] = {
    "flush": flush,
    "refresh": refresh,
    "close": close_shared,
    "__len__": lambda table, other: len(table),
}
# These neither read nor change rows, counts or clocks.
WITHOUT_ROWS = {
    "add_left_ids",
    "check_records_left",
    "check_unshared",
    "empty_copy",
    "image_bytes",
    "image_layout",
    "is_being_saved",
    "locate_rows",
    "reserve",
}


def same(value: Any, expected: Any) -> bool:
    if isinstance(value, Tensor):
        return torch.equal(value, expected)
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
        return all(
            same(getattr(value, name), getattr(expected, name)) for name in names
        )
    if isinstance(value, dict):
        return value.keys() == expected.keys() and all(
            same(value[key], expected[key]) for key in value
        )
    if isinstance(value, (list, tuple)):
        return len(value) == len(expected) and all(map(same, value, expected))
    return bool(value == expected)


def check_call(options: TableOptions, call: TableCall) -> None:
    """Checks that a call after an update in flight is one after the update."""
    other = given(options)
    table = table_with_rows(options)
    send_update(table)
    ops.finish_updates()
    expected = call(table, other)
    ROWS.clear()
    other = given(options)
    table = table_with_rows(options)
    send_update(table)
    assert ops.waiting_updates
    result = call(table, other)
    assert not ops.waiting_updates
    assert same(result, expected)


@pytest.mark.parametrize("name", TABLE_CALLS)
def test_every_call_of_a_table_sees_the_updates_in_flight(name: str) -> None:
    # A table that records which ids leave it reads its ids before it exchanges rows.
    clock_calls = ("state", "set_state", "set_time", "exchange_rows")
    check_call(CLOCKS if name in clock_calls else BOUNDS, TABLE_CALLS[name])


@pytest.mark.parametrize("name", SHARED_CALLS)
def test_calls_of_shared_cold_stores_see_the_updates_in_flight(name: str) -> None:
    check_call(SHARED, SHARED_CALLS[name])


def test_the_calls_above_are_all_calls_of_a_table() -> None:
    public = {name for name in vars(Table) if not name.startswith("_")}
    assert public | {"__len__"} == {*TABLE_CALLS, *SHARED_CALLS, *WITHOUT_ROWS}


def train(group: PooledGroup) -> Tensor:
    return cast(Tensor, group(IDS, OFFSETS, train=True))


def evaluate_without_grad(group: PooledGroup) -> Tensor:
    with torch.no_grad():
        return cast(Tensor, group(IDS, OFFSETS, train=False))


def prefetch(group: PooledGroup) -> object:
    group.prefetch(OTHER_IDS, [len(OTHER_IDS)])
    return len(ops.waiting_updates)


def read_sequence(group: PooledGroup) -> Tensor:
    return cast(Tensor, SequenceGroup(group.tables)(IDS, [len(IDS)], train=False))


def check_gradients(group: PooledGroup) -> object:
    check_applied(group.tables)
    return len(ops.waiting_updates)


GROUP_CALLS: dict[str, Callable[[PooledGroup], object]] = {
    "train": train,
    "evaluate": lambda group: group(IDS, OFFSETS, train=False),
    "evaluate without grad": evaluate_without_grad,
    "prefetch": prefetch,
    "sequence": read_sequence,
    "check_applied": check_gradients,
}


@pytest.mark.parametrize("name", GROUP_CALLS)
def test_every_call_of_a_group_sees_the_updates_in_flight(name: str) -> None:
    def call(table: Table, other: Given) -> object:
        return GROUP_CALLS[name](PooledGroup([table], [0], "sum"))

    check_call(BOUNDS, call)


def test_reads_of_graphs_see_the_updates_in_flight() -> None:
    def call(table: Table, other: Given) -> object:
        group = PooledGroup([table], [0], "sum")
        anchor = torch.empty(0, requires_grad=True)
        return graph_ops.graph_read(group._graph_handle, anchor, IDS, OFFSETS, [], None)

    check_call(BOUNDS, call)


def rows_after_backward(in_graph: bool, late: bool) -> Tensor:
    """Returns rows after an update in flight and one of a backward on the host."""
    table = table_with_rows()
    group = PooledGroup([table], [0], "sum")
    anchor = torch.empty(0, requires_grad=True)
    if in_graph:
        handle = group._graph_handle
        out, _ = graph_ops.graph_lookup(handle, anchor, IDS, OFFSETS, [], None)
    else:
        out = group(IDS, OFFSETS, train=True)
    send_update(table)
    if not late:
        ops.finish_updates()
    out.sum().backward()
    assert not ops.waiting_updates
    return table.lookup(IDS)


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_backward_on_the_host_comes_after_the_updates_in_flight(
    in_graph: bool,
) -> None:
    expected = rows_after_backward(in_graph, late=False)
    assert torch.equal(rows_after_backward(in_graph, late=True), expected)


def weight_gradients(late: bool) -> Tensor | None:
    """Returns the gradients of per-sample weights of an evaluation lookup."""
    table = table_with_rows()
    group = PooledGroup([table], [0], "sum")
    group.untrained = True
    weights = WEIGHTS.clone().requires_grad_()
    out = group(IDS, OFFSETS, weights, train=False)
    send_update(table)
    if not late:
        ops.finish_updates()
    out.sum().backward()
    assert not ops.waiting_updates
    return weights.grad


def test_gradients_of_weights_see_the_updates_in_flight() -> None:
    expected = weight_gradients(late=False)
    result = weight_gradients(late=True)
    assert expected is not None
    assert result is not None
    assert torch.equal(result, expected)


def test_gradients_in_flight_count_as_gradients_that_have_not_been_applied() -> None:
    table = table_with_rows()
    group = PooledGroup([table], [0], "sum", accumulation_steps=2)
    _, context = group.training_lookup(IDS, OFFSETS, (), None)
    group.update_later(context, Arrived(GRADS[:3].clone()), ())
    with pytest.raises(ValueError, match="1 backward passes have not been applied"):
        check_applied([table])


def test_translating_an_error_and_a_read_of_a_snapshot_carry_out_no_update() -> None:
    table = table_with_rows()
    with table.snapshot() as snapshot:
        send_update(table)
        snapshot.read(len(snapshot))
        with pytest.raises(ValueError, match=r"^rows: no$"), ops.native_errors("rows"):
            raise RuntimeError("recstore invalid argument: no")
        assert len(ops.waiting_updates) == 1
