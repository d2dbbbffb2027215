"""The client of programs that were written for RecStore: the plain client, with the
singleton, the arguments and the calls of theirs.

Nothing else of this distribution needs what stands here. See docs/service.md.

Tests: tests/service/test_seed_calls.py.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from torchrec_recstore.optim import Optimizer, RowWiseAdagrad
from torchrec_recstore.options import TableOptions
from torchrec_recstore.utils import warn_user
from torchrec_recstore_service.client.call_arguments import (
    check_makers,
    checked_ids,
    checked_name,
    checked_shape,
)
from torchrec_recstore_service.client.plain_client import (
    PlainClient,
    TableRead,
    tables_on_servers,
)
from torchrec_recstore_service.tables.initial_rows import InitFunc

_of_process: list[RecStoreClient] = []  # none, or the client of the process
_making = threading.Lock()  # held while the client of the process is made
os.register_at_fork(after_in_child=lambda: _of_process.clear())
os.register_at_fork(
    before=_making.acquire,
    after_in_parent=_making.release,
    after_in_child=_making.release,
)


class _OneOfProcess(type):
    """Returns the client of the process for a call without servers.

    RecStore's programs make it in many places.
    """

    def __call__(cls, servers: Sequence[str] | None = None, **arguments: Any) -> Any:
        if servers is not None or arguments.get("private"):
            return super().__call__(servers, **arguments)
        with _making:
            if not _of_process:
                _of_process.append(super().__call__(servers, **arguments))
            else:
                _of_process[0]._check_same(**arguments)
            return _of_process[0]


class RecStoreClient(PlainClient, metaclass=_OneOfProcess):
    """A client of named embedding tables in this process or on parameter servers.

    All calls of ``RecStoreClient()`` without servers return the same client, until it
    is closed. A call with servers makes a client of its own each time.

    A table takes any int64 id. Rows are created when they are written or updated.
    ``pull`` creates no rows: an id without a row reads as its initial row. Methods may
    be called from any thread. Arguments are checked before anything is sent, and an
    invalid argument changes nothing. The client is also a context manager.

    Args:
        servers: The address of each server, as ``host:port``, in any order. Ids are
            distributed over the servers by hash. The first client of new servers makes
            them a set. Default: None, the tables are in this process.
        private: Whether a client without servers has tables of its own, which no other
            client of this process sees. Default: False, it is the client of the
            process.
        library_path: Has no effect, and a warning says so: the package contains its
            library. It is accepted for programs that were written for RecStore.
            Default: None.
        role: Has no effect, and a warning says so. It is accepted for programs that
            were written for RecStore. Default: "default".
        token: The token of the servers, if they require one.
        tls_ca: The path of a PEM file with the CA certificates that sign the servers'
            certificates. Connections are encrypted if it is given.
        tls_cert: The path of a PEM file with this client's certificate, if the servers
            require one.
        tls_key: The path of a PEM file with the private key of ``tls_cert``.
        timeout_s: The longest time in seconds that a call may take. Saves and loads
            have no limit. Default: 30.
        shared_memory: Whether rows travel by shared memory to servers on this host that
            run as the same user. Default: True.

    Raises:
        TypeError, ValueError: An argument is invalid. All methods raise these errors
            too, for invalid arguments, for a table that does not exist and after
            :meth:`close`. The message names the argument and the table.
        ImportError: ``servers`` is given and grpcio is not installed.
        ServiceError: A server cannot be reached, or refuses a call. All methods that
            call a server raise it.
        MemoryError: There is not enough memory for the rows.

    Example::

        client = RecStoreClient()
        client.init_data("user", (1_000_000, 64))
        ids = torch.tensor([7, -1])
        rows = client.pull("user", ids)  # (2, 64)
        client.update("user", ids, torch.ones(2, 64))
    """

    # of __init__, because the metaclass hides it
    __signature__: ClassVar[inspect.Signature]

    def __init__(
        self,
        servers: Sequence[str] | None = None,
        *,
        private: bool = False,
        library_path: str | Path | None = None,
        role: str = "default",
        token: str | None = None,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        timeout_s: float = 30.0,
        shared_memory: bool = True,
    ) -> None:
        super().__init__(
            servers,
            token=token,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
            timeout_s=timeout_s,
            shared_memory=shared_memory,
        )
        # the ids that init_data has named, by table
        self._ranges: dict[str, range] = {}
        self._warned_of: set[str] = set()
        self._warn_of(library_path, role)

    def init_data(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        part_policy: object = None,
        init_func: InitFunc | None = None,
        is_gdata: bool = True,
        base_offset: int = 0,
        initialize_values: bool = True,
        *,
        row_func: InitFunc | None = None,
        optimizer: Optimizer = RowWiseAdagrad(lr=0.01),  # noqa: B008  (frozen)
        options: TableOptions = TableOptions(),  # noqa: B008  (frozen)
    ) -> None:
        """Creates a table without rows.

        A table that was created with the same arguments is not changed.

        Without ``init_func`` and ``row_func``, the initializer of ``options`` makes the
        initial rows of all ids.

        Args:
            name: The name of the table. The name and ``options.seed`` determine the
                initial rows.
            shape: (rows, dim). ``rows`` is not a limit: it is the value of
                ``options.expected_rows`` if that is None.
            dtype: The dtype of the weights: ``torch.float32``, ``float16``,
                ``bfloat16`` or ``int8``. Rows of an ``int8`` table are read and written
                as float32. Default: ``float32``.
            part_policy: Has no effect, and a warning says so: ids are distributed over
                the servers by hash. A function in its place is ``init_func``. Default:
                None.
            init_func: A function ``(shape, dtype) -> tensor`` that makes the initial
                rows of the ids from ``base_offset`` to ``base_offset + rows - 1``. It
                is called once, with the whole shape, and this client keeps the rows, at
                most 4 GiB. Other ids have no initial row. Default: None.
            is_gdata: Has no effect, and a warning says so if it is False. Default:
                True.
            base_offset: The first id of the table, for ``init_func`` and for
                ``prefetch(ids)`` without a table's name: the ids from ``base_offset``
                to ``base_offset + rows - 1`` are then the table's. It changes no id.
                Default: 0.
            initialize_values: If False, ``init_func`` is not called, and a warning says
                so. Default: True.
            row_func: A function ``(shape, dtype) -> tensor`` that makes the initial row
                of any id. This client calls it with ``(1, dim)`` when the row of an id
                is needed for the first time; torch's default generator is then seeded
                for the id. Default: None.
            optimizer: The optimizer that :meth:`update` applies.
            options: The options of the table. ``cold_store`` must be None. ``max_rows``
                counts the rows of all servers. Each :meth:`update` is one step.

        Raises:
            ValueError: The table exists and was created with other arguments. The
                message names the difference.
        """
        self._open()
        row_count, _ = checked_shape(checked_name(name), shape)
        if not isinstance(is_gdata, bool):
            raise TypeError(
                f"table {name!r}: is_gdata must be a bool, got"
                f" {type(is_gdata).__name__}: pass base_offset by its name"
            )
        part_policy, init_func = _policy_and_init_func(name, part_policy, init_func)
        is_ignored = init_func is not None and not initialize_values
        if is_ignored and isinstance(options, TableOptions):
            check_makers(name, init_func, row_func, options)
        super().init_data(
            name,
            shape,
            dtype,
            init_func=None if is_ignored else init_func,
            base_offset=base_offset,
            row_func=row_func,
            optimizer=optimizer,
            options=options,
        )
        self._ranges[name] = range(base_offset, base_offset + row_count)
        if is_ignored:
            warn_user(
                "init_func of init_data has no effect with initialize_values=False:"
                " options.initializer applies"
            )
        if part_policy is not None and self._is_first("part_policy"):
            warn_user(
                "part_policy of init_data has no effect: a hash of the id selects its"
                " server"
            )
        if not is_gdata and self._is_first("is_gdata"):
            warn_user("is_gdata of init_data has no effect: there is no graph")

    def data_name_list(self) -> list[str]:
        """Returns the names of the tables that :meth:`init_data` of this client has
        made or found.
        """
        return list(self._ranges)

    def get_data_meta(self, name: str) -> tuple[torch.dtype, tuple[int, int]]:
        """Returns the dtype of the weights of a table, and (rows, dim), where ``rows``
        is ``options.expected_rows``.
        """
        spec = self.spec(name)
        expected_rows = spec.options.expected_rows
        return spec.dtype, (0 if expected_rows is None else expected_rows, spec.dim)

    def prefetch(  # type: ignore[override]  # the two arguments in either order
        self,
        ids: Tensor | str,
        name: str | Tensor | None = None,
    ) -> int:
        """Starts a :meth:`pull` in another thread.

        The two arguments may have either order, as their types tell.

        ``prefetch(ids)`` without a name reads each id from the table that has it: the
        client's only table, or the table whose ids ``init_data`` has named by
        ``base_offset`` and ``shape``.

        Args:
            ids: (N,) of integers. The ids whose rows are read. The tensor may be
                changed after this call.
            name: The name of the table. Default: None.

        Returns:
            A handle for :meth:`wait_for_prefetch` or :meth:`wait_and_get`. A row that
            is written before that call is read either as it was before the write or as
            it is after the write.

        Raises:
            ValueError: There is no name, and an id belongs to no table, to two tables
                or to a table of another dim than the other ids.
        """
        if not isinstance(ids, Tensor) and (
            isinstance(ids, str) or isinstance(name, Tensor)
        ):
            ids, name = name, ids  # type: ignore[assignment]
        if isinstance(ids, Tensor) and isinstance(name, Tensor):
            raise TypeError("prefetch takes ids, or ids and the name of a table")
        # the plain client checks the types
        table = cast(str | None, name)
        row_ids = cast(Tensor, ids)
        if table is None:
            return self._prefetch(self._reads_by_range(row_ids))
        return super().prefetch(table, row_ids)

    def wait_and_get(
        self,
        handle: int,
        embedding_dim: int,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Waits for a prefetch and returns its rows on a device.

        See :meth:`wait_for_prefetch`.

        Args:
            handle: The handle of the prefetch.
            embedding_dim: The number of columns of the rows.
            device: The device of the result. Default: the CPU.

        Raises:
            ValueError: The rows have another number of columns. They have then been
                fetched.
        """
        rows = self.wait_for_prefetch(handle)
        if rows.shape[1] != embedding_dim:
            raise ValueError(
                f"embedding_dim is {embedding_dim}, but the rows of the prefetch have"
                f" {rows.shape[1]} columns"
            )
        return rows.to(device)

    def set_ps_config(self, host: str, port: int) -> None:
        """Connects the client to one server, ``host:port``, with the token and the
        certificates of the constructor.

        Raises:
            ValueError: The client has used tables already, which are on its present
                servers or in this process.
        """
        self._open()
        address = f"{host}:{int(port)}"
        if self._servers == [address]:
            return
        if self._specs:
            names = ", ".join(map(repr, sorted(self._specs)))
            raise ValueError(
                f"{self!r} has tables already ({names}): call set_ps_config"
                " before init_data, or make another client,"
                f" RecStoreClient([{address!r}])"
            )
        tables = tables_on_servers([address], self._access)
        self._tables.close()
        self._tables = tables
        self._servers = [address]

    def set_ps_backend(self, backend: str) -> None:
        """Has no effect but a warning: the client selects the transport itself.

        Raises:
            TypeError: ``backend`` is not a str.
        """
        if not isinstance(backend, str):
            raise TypeError(f"backend must be a str, got {type(backend).__name__}")
        if self._is_first(f"set_ps_backend {backend}"):
            warn_user(
                f"set_ps_backend({backend!r}) has no effect: the client selects the"
                " transport itself"
            )

    def close(self) -> None:
        """Waits for all updates, and frees the tables or closes the connections.

        It may be called twice. The next call of ``RecStoreClient()`` makes a new client
        of the process.

        An update that has failed and that nobody has waited for gives a warning.
        """
        if self in _of_process:
            _of_process.remove(self)
        super().close()

    def _check_same(
        self,
        library_path: object = None,
        role: str = "default",
        **access: object,
    ) -> None:
        """Checks the arguments of a call that returns this client, which was made with
        other ones perhaps.
        """
        access.pop("private", None)
        for argument, value in access.items():
            if self._access[argument] != value:
                raise ValueError(
                    "the client of this process was made with"
                    f" {argument}={self._access[argument]}, and {argument}={value} is"
                    " given: pass private=True for a client of its own, or close the"
                    " first one"
                )
        self._warn_of(library_path, role)

    def _warn_of(self, library_path: object, role: str) -> None:
        if library_path is not None:
            warn_user(
                f"RecStoreClient(library_path={str(library_path)!r}) has no effect:"
                " there is no library to load"
            )
        if role != "default":
            warn_user(
                f"RecStoreClient(role={role!r}) has no effect: all clients are equal"
            )

    def _is_first(self, argument: str) -> bool:
        """Returns whether the client has not yet warned that an argument has no effect."""
        is_first = argument not in self._warned_of
        self._warned_of.add(argument)
        return is_first

    def _reads_by_range(self, ids: Tensor) -> list[TableRead]:
        """Returns a read of each table that has one of the ids, for a prefetch without
        a table's name.
        """
        self._open()
        if len(self._ranges) == 1:
            [name] = self._ranges
            return [self._table_read(name, ids.clone())]
        dims = {name: self.spec(name).dim for name in self._ranges}
        return [
            self._table_read(name, ids_of_table, positions)
            for name, ids_of_table, positions in split_by_range(ids, self._ranges, dims)
        ]


# Sphinx finds the types of a text in the module of a class, and a signature has no
# module.
_of_init = inspect.signature(RecStoreClient.__init__, eval_str=True)
# without self
RecStoreClient.__signature__ = _of_init.replace(
    parameters=[*_of_init.parameters.values()][1:]
)


def get_kv_client() -> RecStoreClient:
    """Returns the client of the process, as ``RecStoreClient()`` does, for programs
    that were written for RecStore.
    """
    return RecStoreClient()


def split_by_range(
    ids: object,
    ranges: Mapping[str, range],
    dims: Mapping[str, int],
) -> list[tuple[str, Tensor, Tensor]]:
    """Splits the ids of a read without a table's name.

    Args:
        ids: (N,) of integers. The ids of all tables.
        ranges: The ids of each table, by name.
        dims: The dim of each table, by name.

    Returns:
        For each table with ids, the name, the ids, and their positions in ``ids``.

    Raises:
        TypeError, ValueError: ``ids`` are not (N,) integers. Or an id belongs to no
            table, to two tables or to a table of another dim than the other ids.
    """
    if not ranges:
        raise ValueError(
            "prefetch(ids) without the name of a table needs a table of init_data"
        )
    fix = "name the table, prefetch(name, ids), or give each table its own base_offset"
    row_ids = checked_ids(next(iter(ranges)), ids)
    has_table = torch.zeros(len(row_ids), dtype=torch.bool)
    parts = []
    for name, ids_of_table in ranges.items():
        last_id = min(ids_of_table.stop, 2**63) - 1
        is_in_table = (row_ids >= ids_of_table.start) & (row_ids <= last_id)
        is_in_two = is_in_table & has_table
        if bool(is_in_two.any()):
            raise ValueError(
                f"id {int(row_ids[is_in_two][0])} is in the ids of table {name!r} and"
                f" of another one: {fix}"
            )
        has_table |= is_in_table
        positions = is_in_table.nonzero()[:, 0]
        parts.append((name, row_ids[positions], positions))
    if not bool(has_table.all()):
        first_id = int(row_ids[~has_table][0])
        raise ValueError(f"id {first_id} is in the ids of no table: {fix}")
    # a read without ids is one of the first table
    parts_with_ids = [part for part in parts if len(part[1])] or parts[:1]
    if len({dims[name] for name, *_ in parts_with_ids}) > 1:
        names = ", ".join(repr(name) for name, *_ in parts_with_ids)
        raise ValueError(
            f"tables {names} have rows of different dims: prefetch the ids of each"
            " table by its name"
        )
    return parts_with_ids


def _policy_and_init_func(
    name: str,
    part_policy: object,
    init_func: object,
) -> tuple[object, Any]:
    """Returns ``part_policy`` and ``init_func``.

    ``init_data`` once had them in the opposite order: a function is never a
    ``part_policy``.

    Raises:
        TypeError: Both are functions.
    """
    if not callable(part_policy):
        return part_policy, init_func
    if callable(init_func):
        raise TypeError(
            f"table {name!r}: part_policy and init_func are both functions: pass"
            " init_func by its name only"
        )
    return init_func, part_policy
