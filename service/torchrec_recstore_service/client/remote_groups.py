"""Groups of tables whose rows a client reads and updates elsewhere, usually on
parameter servers.

A training lookup reads each distinct id of the batch once, and pools the rows with the
native code of a table in this process. Its backward sums the gradients of each
distinct id with the same native code, in the order of the batch, and sends the sums.
The results are therefore the same, to the bit, as those of a table in the process.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.kernels.device_copies import CopyTarget, traced
from torchrec_recstore.kernels.pooled_group import PooledGroup
from torchrec_recstore.kernels.sequence_group import SequenceGroup
from torchrec_recstore.kernels.table_group import TableGroup
from torchrec_recstore.optim import SGD, Optimizer
from torchrec_recstore.options import ConstantInit, TableOptions, check_int
from torchrec_recstore.row_types import value_dtype
from torchrec_recstore.store import Table
from torchrec_recstore.store.arguments import among
from torchrec_recstore_service.wire import row_ops
from torchrec_recstore_service.wire.row_requests import RowRead, RowUpdate

_MOST_PREFETCHES = 4  # further prefetches free the oldest one
_LocalGroup = PooledGroup | SequenceGroup
# of the workspace tables, and the indices of the tables that share each of them
_Make = Callable[[Sequence[Table], Sequence[Sequence[int]]], _LocalGroup]
_numbers = itertools.count(1)
_handles = itertools.count(-1, -1)  # the handles of native tables are positive
_passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()


class ClientTable:
    """A table whose rows a client reads and updates elsewhere, usually on parameter
    servers.

    The constructor creates the table if it does not exist. All servers apply
    ``optimizer``; gradients are clipped by value before they are sent, because clipping
    by value comes before the sum over an id.

    Args:
        client: The ``PlainClient``, which imports this module. It must stay open.
        name: The name of the table, on which its initial rows depend.
        shape: (rows, dim). ``rows`` is a hint.
        dtype: The data type of the weights.
        optimizer: The optimizer of the updates.
        options: The options of the table. ``cold_store`` must be None.
        staleness: The number of updates of this process that may be in progress while
            rows are read. With 0, each backward waits for its update. Default: 0.

    Raises:
        TypeError, ValueError: An argument is not valid, or the table exists with
            another specification.
        ServiceError: A server cannot be reached, or refuses the table.
    """

    def __init__(
        self,
        client: Any,
        name: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
        optimizer: Optimizer,
        options: TableOptions,
        staleness: int = 0,
    ) -> None:
        check_int("staleness", staleness, 0)
        self.client = client
        self.name = name
        self.dim = shape[1]
        self.columns = range(self.dim)
        self.dtype = dtype
        self.optimizer = optimizer
        self.options = options
        self.staleness = staleness
        self.handle = next(_handles)
        """A number that no other table has, native tables included."""
        client.init_data(
            name,
            shape,
            dtype,
            optimizer=replace(optimizer, max_gradient=None),
            options=options,
        )

    def lookup(self, ids: Tensor) -> Tensor:
        """Reads rows for evaluation: (N, dim) in the dtype of lookups.

        ``ids``: (N,) int64.
        """
        rows: list[Tensor] = self.client.pull_each(
            [RowRead(self.name, ids, self.options.missing)]
        )
        return rows[0]

    @property
    def value_dtype(self) -> torch.dtype:
        """The dtype of the rows that are read."""
        return value_dtype(self.dtype)

    def __repr__(self) -> str:
        return f"ClientTable({self.name!r}, dim={self.dim}, client={self.client!r})"


class _Workspace:
    """Tables of this process that hold the rows of a pass while it is pooled, and then
    the sums of its gradients.

    Adjacent tables with the same dim and the same clipping share a workspace table,
    because a call for each of many tables would take longer than its work. Row i of a
    workspace table is the row of the i-th distinct id of its tables. Rows are
    overwritten and never removed.
    """

    def __init__(self, tables: Sequence[ClientTable], make: _Make) -> None:
        self._dims = [table.dim for table in tables]
        self._shared = shared_tables(tables)
        zeros = TableOptions(initializer=ConstantInit(0.0))
        # The step from a row of zeros with the learning rate 1 is minus the sum of the
        # gradients, exactly.
        self._tables = []
        for members in self._shared:
            table = tables[members[0]]
            summing = SGD(lr=1.0, max_gradient=table.optimizer.max_gradient)
            workspace_table = Table(
                table.dim,
                torch.float32,
                optimizer=summing,
                options=zeros,
                name=table.name,
            )
            self._tables.append(workspace_table)
        self.group = make(self._tables, self._shared)
        self._numbers = torch.arange(0)

    def write(self, rows: Sequence[Tensor]) -> None:
        """Writes the rows of the distinct ids of each table, (n, dim)."""
        for table, members in zip(self._tables, self._shared, strict=True):
            table_rows = torch.cat([rows[member].float() for member in members])
            self._insert(table, table_rows)

    def sums(
        self,
        context: Tensor,
        grad: Tensor,
        counts: Sequence[int],
        distinct: Sequence[Tensor],
    ) -> list[Tensor]:
        """Returns the sums of gradients: for each table, (n, dim) float32."""
        id_counts = [ids.shape[0] for ids in distinct]
        sizes = [n * dim for n, dim in zip(id_counts, self._dims, strict=True)]
        all_sums = torch.zeros(sum(sizes))
        shared_sizes = [sum(sizes[member] for member in each) for each in self._shared]
        shared_sums = []
        for table, content in zip(
            self._tables, torch.split(all_sums, shared_sizes), strict=True
        ):
            shared_sums.append(content.view(-1, table.dim))
            self._insert(table, shared_sums[-1])
        self.group.update(
            context,
            grad,
            False,
            merged(counts, self._shared),
        )
        for table, table_sums in zip(self._tables, shared_sums, strict=True):
            n = table_sums.shape[0]
            if n:
                ops.table_read(table.handle, self._first_numbers(n), table_sums)
        # in place; the negative of 0.0 would be another zero
        torch.sub(0.0, all_sums, out=all_sums)
        return [
            content.view(-1, dim)
            for content, dim in zip(
                torch.split(all_sums, sizes), self._dims, strict=True
            )
        ]

    def _insert(self, table: Table, rows: Tensor) -> None:
        n = rows.shape[0]
        if n:
            ops.table_insert(table.handle, self._first_numbers(n), rows)

    def _first_numbers(self, n: int) -> Tensor:
        """Returns the ids of the first ``n`` rows: their numbers."""
        if self._numbers.shape[0] < n:
            self._numbers = torch.arange(2 * n)
        return self._numbers[:n]


def shared_tables(tables: Sequence[ClientTable]) -> list[list[int]]:
    """Returns the indices of the tables that share each workspace table: adjacent ones
    with the same dim and the same clipping of gradients.
    """
    shared: list[list[int]] = []
    last_layout = None
    for number, table in enumerate(tables):
        layout = (table.dim, table.optimizer.max_gradient)
        if layout == last_layout:
            shared[-1].append(number)
        else:
            shared.append([number])
        last_layout = layout
    return shared


def merged(counts: Sequence[int], shared: Sequence[Sequence[int]]) -> list[int]:
    """Returns the sums of the counts of the tables that share each workspace table.

    Without counts, as in a group that pools, there are none.
    """
    if not counts:
        return []
    return [sum(counts[table] for table in members) for members in shared]


class _Pass(bytearray):
    """A training lookup until its backward has run or its graph has been freed.

    The context of the lookup is a tensor in the memory of this object, so that it lives
    as long as the context.
    """

    overwritten = False
    """Whether the workspace has gradients in place of the rows."""

    def __init__(
        self,
        free: deque[_Workspace],
        workspace: _Workspace,
        distinct: list[Tensor],
        rows: list[Tensor],
    ) -> None:
        super().__init__(torch.int64.itemsize)
        self.number = next(_numbers)
        self._free = free
        self.workspace = workspace
        self.distinct = distinct
        self.rows = rows
        self.context = torch.empty(0)

    def __del__(self) -> None:
        # ends the native pass before another one begins in the same tables
        del self.context
        self._free.append(self.workspace)


class _Batch:
    """The distinct ids of each table in a batch, (n,) int64, and the row of each id of
    the batch in the workspace.

    Args:
        ids: (N,) int64, table by table.
        counts: The number of ids of each table.
        shared: The indices of the tables that share each workspace table.
    """

    def __init__(
        self,
        ids: Tensor,
        counts: Sequence[int],
        shared: Sequence[Sequence[int]],
    ) -> None:
        distinct_ids, self.places, size_tensor = row_ops.ids_distinct(ids, counts)
        sizes = size_tensor.tolist()
        self.distinct = list(torch.split(distinct_ids, sizes))
        first_rows = [0] * len(sizes)
        for members in shared:
            for previous, table in itertools.pairwise(members):
                first_rows[table] = first_rows[previous] + sizes[previous]
        self.places += torch.repeat_interleave(
            torch.tensor(first_rows),
            torch.tensor(counts),
            output_size=len(ids),
        )


@dataclass(eq=False)
class _Prefetched:
    """A batch whose rows have been requested before its lookup.

    Args:
        ids: (N,) int64. The ids of the batch.
        counts: The number of ids of each table.
        batch: The distinct ids.
        handle: The handle of the request.
        included: The number of updates that the rows are known to include.
    """

    ids: Tensor
    counts: list[int]
    batch: _Batch
    handle: int
    included: int

    def is_for(self, ids: Tensor, counts: Sequence[int]) -> bool:
        """Returns whether a lookup has these ids."""
        return self.counts == list(counts) and torch.equal(self.ids, ids)


class _Updates:
    """The updates of a group, of which at most ``staleness`` are in progress."""

    def __init__(self, tables: Sequence[ClientTable]) -> None:
        self._tables = tables
        self._client = tables[0].client
        self._staleness = tables[0].staleness
        self._pending: deque[int] = deque()
        self.lock = threading.Lock()
        """Held while prefetches, the log, and the updates that are waited for change: a
        prefetch may run beside a step, in another thread.
        """
        self.sent = 0
        self.included = 0
        """The number of the last update that has been carried out, so that all rows
        that are read later include it.
        """
        self.log: dict[int, list[Tensor]] = {}
        """The distinct ids of each table, by the number of the update, for updates that
        a prefetch may lack.
        """

    @property
    def required(self) -> int:
        """The number of the last update that the rows of a lookup must include."""
        return max(0, self.sent - self._staleness)

    def send(
        self,
        distinct: Sequence[Tensor],
        sums: Sequence[Tensor],
        prefetched: Sequence[_Prefetched],
        learning_rate: float | None,
    ) -> None:
        """Sends an update of all tables.

        It waits for the update that was sent ``staleness`` updates before.

        Args:
            distinct: The distinct ids of each table, (n,) int64.
            sums: The gradients of these ids, (n, dim) float32.
            prefetched: The prefetches that have not been looked up.
            learning_rate: The learning rate of this update. None: that of the tables'
                optimizer.
        """
        updates = []
        for table, ids, grads in zip(self._tables, distinct, sums, strict=True):
            update = RowUpdate(
                table=table.name,
                ids=ids,
                grads=grads,
                learning_rate=learning_rate,
            )
            updates.append(update)
        self._wait_for_all_but(max(1, self._staleness) - 1)
        with self.lock:
            # the updates that all prefetches and all later reads include
            included_by_all = self.included
            for prefetch in prefetched:
                included_by_all = min(included_by_all, prefetch.included)
            self.log = {
                number: ids
                for number, ids in self.log.items()
                if number > included_by_all
            }
            self.sent += 1
            self.log[self.sent] = list(distinct)
        if self._staleness:
            self._pending.append(self._client.update_each_async(updates))
        else:
            self._client.update_each(updates)
            self.included += 1

    def wait(self) -> None:
        """Waits for all updates."""
        self._wait_for_all_but(0)

    def count_finished(self) -> None:
        """Counts the updates that have been carried out by now, without waiting.

        An update that has failed stays: the step that waits for it raises its error.
        The caller holds ``lock``.
        """
        while self._pending and self._client.has_finished(self._pending[0]):
            self._pending.popleft()
            self.included += 1

    def _wait_for_all_but(self, count: int) -> None:
        """Waits until at most ``count`` updates are in progress."""
        while True:
            with self.lock:
                if len(self._pending) <= count:
                    return
                handle = self._pending.popleft()
            self._client.wait(handle)
            with self.lock:
                self.included += 1

    def later_ids(
        self,
        table: int,
        included: int,
        last: int,
    ) -> Tensor:
        """Returns the ids of a table, ascending, in the updates with numbers above
        ``included`` and up to ``last``.
        """
        ids_of_updates = [torch.empty(0, dtype=torch.int64)]
        for number, ids in self.log.items():
            if included < number <= last:
                ids_of_updates.append(ids[table])
        ascending_ids: Tensor = torch.unique(torch.cat(ids_of_updates))
        return ascending_ids


class RemoteGroup(TableGroup):
    """The base class of the groups whose rows a client reads and updates.

    Rows are made by the update of a backward: a training lookup reads an id without a
    row as its initial row. A group that is not used by several threads at once reads
    rows that lack at most the last ``staleness`` updates of this process, also if they
    were prefetched.

    Args:
        tables: The tables, of one client, with the same ``staleness``.
        make: A function that makes the group for tables of this process.
    """

    learning_rate = None
    # other processes see an update as soon as backward has returned
    updates_late = False

    def __init__(self, tables: Sequence[ClientTable], make: _Make) -> None:
        super().__init__(tables, 1)
        self._tables = list(tables)
        self._client = tables[0].client
        self._make = make
        self._free: deque[_Workspace] = deque()
        self._updates = _Updates(self._tables)
        self._prefetched: deque[_Prefetched] = deque()
        self._shared = shared_tables(self._tables)
        self._free.append(_Workspace(self._tables, make))
        self._shape_of = self._free[0].group

    def training_lookup(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        counts: Sequence[int],
        weights: Tensor | None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See ``TableGroup.training_lookup``."""
        batch, rows = self._rows(ids, self._table_counts(ids, offsets, counts))
        pass_ = _Pass(
            free=self._free,
            workspace=self._workspace(),
            distinct=batch.distinct,
            rows=rows,
        )
        pass_.workspace.write(rows)
        out, pass_.context = pass_.workspace.group.training_lookup(
            batch.places,
            offsets,
            merged(counts, self._shared),
            weights,
            out,
        )
        context = torch.frombuffer(pass_, dtype=torch.int64)
        context[0] = pass_.number
        _passes[pass_.number] = pass_
        return out, context

    def update(
        self,
        context: Tensor,
        grad: Tensor,
        weight_grads: bool,
        counts: Sequence[int] = (),
        rate: float | None = None,
    ) -> Tensor | None:
        """See ``TableGroup.update``. The gradients are sent; see ``ClientTable``.

        Raises:
            ServiceError: The update that this one waits for has failed.
        """
        pass_ = _passes.get(int(context[0]))
        if pass_ is None:
            raise RuntimeError(
                f"{self._label}: the context of the lookup was copied, and the lookup has"
                " ended"
            )
        gradients_of_weights = None
        if weight_grads:
            if pass_.overwritten:
                pass_.workspace.write(pass_.rows)
            gradients_of_weights = ops.group_weight_gradients(pass_.context, grad)
        pass_.overwritten = True
        sums = pass_.workspace.sums(
            pass_.context,
            grad,
            counts,
            pass_.distinct,
        )
        if rate is None and self.learning_rate is not None:
            rate = self.learning_rate()
        self._updates.send(pass_.distinct, sums, self._prefetched, rate)
        return gradients_of_weights

    def evaluation_lookup(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        counts: Sequence[int],
        weights: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See ``TableGroup.evaluation_lookup``. It waits for all updates of this group.

        If the tables are frozen, training calls this method, too, and the rows may have
        been prefetched.
        """
        self._updates.wait()
        table_counts = self._table_counts(ids, offsets, counts)
        if self.frozen:
            batch, rows = self._rows(ids, table_counts)
        else:
            batch = _Batch(ids, table_counts, self._shared)
            rows = self._client.pull_each(self._evaluation_reads(batch.distinct))
        workspace = self._workspace()
        try:
            workspace.write(rows)
            return workspace.group.evaluation_lookup(
                batch.places,
                offsets,
                merged(counts, self._shared),
                weights,
                out,
            )
        finally:
            self._free.append(workspace)

    def wait_for_updates(self) -> None:
        """Waits for all updates that were sent, or raises the error of one."""
        self._updates.wait()

    def output_shape(
        self,
        offsets: Tensor | None,
        counts: Sequence[int],
    ) -> tuple[int, ...]:
        """See ``TableGroup.output_shape``."""
        return self._shape_of.output_shape(offsets, merged(counts, self._shared))

    def prefetch(self, ids: Tensor, counts: Sequence[int]) -> None:
        """Requests the rows of a coming training lookup in another thread.

        The lookup of the same ids waits for these rows, and reads the rows again that
        this group has updated since. The group keeps the four newest batches. If the
        tables are frozen, a lookup in evaluation discards them.

        Args:
            ids: (N,) int64, table by table. The ids of the batch.
            counts: The number of ids of each feature, or of each table if the group
                does not pool.
        """
        ids = ids.clone()
        table_counts = list(self._prefetch_counts(counts))
        batch = _Batch(ids, table_counts, self._shared)
        surplus = None
        with self._updates.lock:
            # The more updates are known to be in the rows, the fewer are read again.
            self._updates.count_finished()
            included = self._updates.included
            handle = self._client.prefetch_each(self._reads(batch.distinct))
            prefetched = _Prefetched(
                ids=ids,
                counts=table_counts,
                batch=batch,
                handle=handle,
                included=included,
            )
            self._prefetched.append(prefetched)
            if len(self._prefetched) > _MOST_PREFETCHES:
                surplus = self._prefetched.popleft()
        if surplus is not None:
            self._client.wait_for_each(surplus.handle)

    def _workspace(self) -> _Workspace:
        try:
            return self._free.pop()
        except IndexError:
            return _Workspace(self._tables, self._make)

    def _begin_lookup(self, train: bool) -> None:
        """Discards the prefetched batches before a lookup of frozen tables in
        evaluation, which reads them anew.
        """
        if train or not self.frozen or traced():
            return
        with self._updates.lock:
            discarded = list(self._prefetched)
            self._prefetched.clear()
        for prefetched in discarded:
            self._client.wait_for_each(prefetched.handle)

    def _reads(self, distinct: Sequence[Tensor]) -> list[RowRead]:
        """Returns the reads of a lookup in training, which reads frozen tables as a
        lookup in evaluation does.
        """
        if self.frozen:
            return self._evaluation_reads(distinct)
        return [
            RowRead(table.name, ids)
            for table, ids in zip(self._tables, distinct, strict=True)
        ]

    def _evaluation_reads(self, distinct: Sequence[Tensor]) -> list[RowRead]:
        """Returns the reads of a lookup in evaluation: ``TableOptions.missing`` says
        how a missing id reads.
        """
        parts = zip(self._tables, distinct, strict=True)
        return [RowRead(table.name, ids, table.options.missing) for table, ids in parts]

    def _rows(self, ids: Tensor, counts: Sequence[int]) -> tuple[_Batch, list[Tensor]]:
        """Returns the distinct ids of a batch and their rows, prefetched or read now."""
        prefetched = self._take_prefetched(ids, counts)
        if prefetched is not None:
            return prefetched.batch, self._renewed(prefetched)
        batch = _Batch(ids, counts, self._shared)
        return batch, self._client.pull_each(self._reads(batch.distinct))

    def _take_prefetched(
        self,
        ids: Tensor,
        counts: Sequence[int],
    ) -> _Prefetched | None:
        with self._updates.lock:
            for prefetched in self._prefetched:
                if prefetched.is_for(ids, counts):
                    self._prefetched.remove(prefetched)
                    return prefetched
        return None

    def _renewed(self, prefetched: _Prefetched) -> list[Tensor]:
        """Returns the rows of a prefetch, after it has read the rows again that it
        lacks updates of.
        """
        rows: list[Tensor] = self._client.wait_for_each(prefetched.handle)
        required = self._updates.required
        if prefetched.included >= required:
            return rows
        is_stale = []
        stale_ids = []
        for table, ids in enumerate(prefetched.batch.distinct):
            updated = self._updates.later_ids(table, prefetched.included, required)
            is_stale.append(among(ids, updated))
            stale_ids.append(ids[is_stale[-1]])
        if any(len(ids) for ids in stale_ids):
            new_rows = self._client.pull_each(self._reads(stale_ids))
            for table_rows, stale, new in zip(rows, is_stale, new_rows, strict=True):
                table_rows[stale] = new
        return rows

    def _table_counts(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        counts: Sequence[int],
    ) -> Sequence[int]:
        """Returns the number of ids of each table in a batch."""
        raise NotImplementedError

    def _prefetch_counts(self, counts: Sequence[int]) -> Sequence[int]:
        """Returns the number of ids of each table in a batch that is prefetched."""
        raise NotImplementedError


class RemotePooledGroup(RemoteGroup):
    """A :class:`PooledGroup` whose rows a client reads and updates.

    The features of a table are adjacent.

    Args:
        tables: The tables, of one client.
        feature_tables: The index of each feature's table in ``tables``, ascending, in
            the order of the features.
        pooling: See :class:`PooledGroup`.
    """

    def __init__(
        self,
        tables: Sequence[ClientTable],
        feature_tables: Sequence[int],
        pooling: Any,
    ) -> None:
        if list(feature_tables) != sorted(feature_tables):
            raise ValueError(f"feature_tables must ascend, got {list(feature_tables)}")

        def make(
            workspace_tables: Sequence[Table],
            shared: Sequence[Sequence[int]],
        ) -> PooledGroup:
            workspace_of = {}
            for number, members in enumerate(shared):
                workspace_of.update(dict.fromkeys(members, number))
            features = [workspace_of[table] for table in feature_tables]
            return PooledGroup(workspace_tables, features, pooling)

        super().__init__(tables, make)
        # the number of features of each table
        self._feature_counts = [
            list(feature_tables).count(table) for table in range(len(tables))
        ]

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        *,
        train: bool,
        to: CopyTarget | None = None,
    ) -> Tensor:
        """Looks up a batch and pools it.

        See :meth:`PooledGroup.forward`; the arguments are the same.

        Raises:
            TypeError, ValueError, MemoryError: See :meth:`PooledGroup.forward`.
            ServiceError: A server cannot be reached, or refuses the call.
        """
        assert isinstance(self._shape_of, PooledGroup)
        self._shape_of.check(ids, offsets, weights)
        self._begin_lookup(train)
        return self._run(ids, offsets, (), weights, train, to)

    def weight_gradients(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        grad: Tensor,
    ) -> Tensor:
        """See ``TableGroup.weight_gradients``."""
        assert isinstance(self._shape_of, PooledGroup)
        self._updates.wait()
        table_ids = torch.split(ids, list(self._table_counts(ids, offsets, ())))
        rows = []
        for members in self._shared:
            rows_of_tables = [
                self._tables[table].lookup(table_ids[table]) for table in members
            ]
            rows.append(torch.cat(rows_of_tables))
        return self._shape_of.weight_gradients_of(rows, offsets, grad)

    def _table_counts(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        counts: Sequence[int],
    ) -> Sequence[int]:
        assert offsets is not None
        features = sum(self._feature_counts)
        bags = (len(offsets) - 1) // max(1, features)
        ends = offsets[::bags].tolist() if bags else [0] * (features + 1)
        are_ascending = ends == sorted(ends) and ends[0] == 0 and ends[-1] == len(ids)
        if len(offsets) != features * bags + 1 or not are_ascending:
            raise ValueError(
                f"offsets must ascend from 0 to {len(ids)}, with equal bags for"
                f" {features} features"
            )
        return self._sums([end - begin for begin, end in itertools.pairwise(ends)])

    def _prefetch_counts(self, counts: Sequence[int]) -> Sequence[int]:
        return self._sums(counts)

    def _sums(self, counts_of_features: Sequence[int]) -> list[int]:
        """Returns the number of ids of each table, for that of each feature."""
        counts = iter(counts_of_features)
        return [
            sum(itertools.islice(counts, feature_count))
            for feature_count in self._feature_counts
        ]


class RemoteSequenceGroup(RemoteGroup):
    """A :class:`SequenceGroup` whose rows a client reads and updates.

    Args:
        tables: The tables, of one client, in the order of their ids in the batch.
    """

    def __init__(self, tables: Sequence[ClientTable]) -> None:
        super().__init__(
            tables,
            lambda workspace_tables, _: SequenceGroup(workspace_tables),
        )

    def forward(
        self,
        ids: Tensor,
        counts: Sequence[int],
        *,
        train: bool,
        to: CopyTarget | None = None,
    ) -> Tensor:
        """Looks up a batch.

        See :meth:`SequenceGroup.forward`; the arguments are the same.

        Raises:
            TypeError, ValueError, MemoryError: See :meth:`SequenceGroup.forward`.
            ServiceError: A server cannot be reached, or refuses the call.
        """
        if ids.dtype is not torch.int64:
            raise TypeError(f"ids must be int64, got {ids.dtype}")
        self._begin_lookup(train)
        return self._run(ids, None, counts, None, train, to)

    def _table_counts(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        counts: Sequence[int],
    ) -> Sequence[int]:
        if sum(counts) != len(ids) or len(counts) != len(self._tables):
            raise ValueError(
                f"counts must have a number for each of {len(self._tables)} tables, and"
                f" the sum {len(ids)}"
            )
        return counts

    def _prefetch_counts(self, counts: Sequence[int]) -> Sequence[int]:
        return counts
