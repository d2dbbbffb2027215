"""The native library that answers calls on rows without Python: csrc/library.cpp.

Tests: tests/service/test_applied.py and test_native_rows.py.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import (
    POINTER,
    byref,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int64,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

import grpc

from torchrec_recstore_service.wire.protocol import NOT_PRIMARY, REMOTE_ERRORS

_FOLDER = Path(__file__).parent.parent


class ServerStoppingError(RuntimeError):
    """The server is stopping and accepts no more writes."""


class CallRefusedError(Exception):
    """A call is refused with a gRPC status before the server has carried it out.

    Args:
        code: The status.
        details: The message.
        kind: The name of the error that clients raise. Default: "", for a
            :class:`ServiceError`.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        details: str,
        kind: str = "",
    ) -> None:
        super().__init__(details)
        self.code = code
        self.kind = kind


class NativeStatus(ctypes.Structure):
    """What a function reports besides its result. ``check`` raises it."""

    _fields_ = (
        ("code", c_int),
        ("details", c_char * 4096),
        ("error", c_char * 64),
    )

    def check(self) -> None:
        """Raises the error that the function has reported, if it has reported one."""
        if not self.code:
            return
        details = self.details.decode(errors="replace")
        error = self.error.decode()
        if error == ServerStoppingError.__name__:
            raise ServerStoppingError(details)
        if error == NOT_PRIMARY:
            raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, details, error)
        if error in REMOTE_ERRORS:
            raise REMOTE_ERRORS[error](details)
        code = next(code for code in grpc.StatusCode if code.value[0] == self.code)
        raise CallRefusedError(code, details)


class PythonCall(ctypes.Structure):
    """A call that Python answers: see row_server.h."""

    _fields_ = (
        ("connection", c_int64),
        ("message", c_void_p),
        ("message_bytes", c_int64),
        ("arrays", c_void_p * 4),
        ("sizes", c_int64 * 4),
        ("from_primary", c_int),
        ("room", c_int64),
    )


VISIT_WRITE = ctypes.CFUNCTYPE(None, c_char_p, c_uint64, c_int64, c_uint64)
"""A function of a client, the number below which it repeats no request, and a request
and its answer.
"""
_VISIT_COUNT = ctypes.CFUNCTYPE(None, c_char_p, c_char_p, c_char_p, c_double)
_STATUS = POINTER(NativeStatus)
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "applied_new": (c_void_p, [c_int64, c_double]),
    "applied_delete": (None, [c_void_p]),
    "applied_begin": (
        c_void_p,
        [
            c_void_p,
            c_char_p,
            c_int64,
            c_uint64,
            c_uint64,
            POINTER(c_uint64),
            _STATUS,
        ],
    ),
    "applied_finish": (
        None,
        [c_void_p, c_char_p, c_int64, c_uint64, c_void_p, c_int, c_uint64],
    ),
    "applied_begin_change": (None, [c_void_p, _STATUS]),
    "applied_end_change": (None, [c_void_p]),
    "applied_close": (None, [c_void_p]),
    "applied_reopen": (None, [c_void_p]),
    "applied_check_open": (None, [c_void_p, _STATUS]),
    "applied_clients": (c_int64, [c_void_p]),
    "applied_each": (None, [c_void_p, VISIT_WRITE]),
    "applied_clear": (None, [c_void_p]),
    "applied_add": (None, [c_void_p, c_char_p, c_uint64, c_int64, c_uint64]),
    "gate_new": (c_void_p, []),
    "gate_delete": (None, [c_void_p]),
    "gate_set_run": (None, [c_void_p, c_char_p]),
    "gate_set_end": (None, [c_void_p, c_double]),
    "gate_has_ended": (c_int, [c_void_p]),
    "gate_enter": (None, [c_void_p]),
    "gate_leave": (None, [c_void_p]),
    "gate_close": (None, [c_void_p]),
    "gate_open": (None, [c_void_p]),
    "replica_new": (c_void_p, []),
    "replica_delete": (None, [c_void_p]),
    "replica_role": (c_int, [c_void_p]),
    "replica_set_role": (None, [c_void_p, c_int]),
    "replica_lose": (None, [c_void_p]),
    "replica_reason": (c_char_p, [c_void_p]),
    "replica_begin_turn": (c_void_p, [c_void_p, c_int, _STATUS]),
    "replica_end_turn": (None, [c_void_p]),
    "replica_send": (
        None,
        [
            c_void_p,
            c_char_p,
            c_uint64,
            POINTER(c_void_p),
            POINTER(c_uint64),
        ],
    ),
    "replica_wait": (None, [c_void_p, _STATUS]),
    "replica_follow": (None, [c_void_p, c_char_p, c_int, *[c_char_p] * 6, _STATUS]),
    "replica_wait_lost": (c_int, [c_void_p, c_double]),
    "request_text": (None, [c_char_p, c_int64, c_char_p, _STATUS]),
    "memory_new": (c_void_p, [c_uint64]),
    "memory_delete": (None, [c_void_p]),
    "memory_take": (c_int, [c_void_p, c_uint64]),
    "memory_give_back": (None, [c_void_p, c_uint64]),
    "memory_held": (c_uint64, [c_void_p]),
    "counts_new": (c_void_p, []),
    "counts_delete": (None, [c_void_p]),
    "counts_call": (None, [c_void_p, c_char_p, c_char_p, c_double]),
    "counts_ids": (None, [c_void_p, c_char_p, c_char_p, c_int64]),
    "counts_each": (None, [c_void_p, _VISIT_COUNT]),
    "calls_new": (c_void_p, [c_int64, *[c_void_p] * 4, c_uint64, c_uint64]),
    "calls_delete": (None, [c_void_p]),
    "calls_add": (
        None,
        [c_void_p, c_char_p, c_int64, c_int64, c_int64, c_int64, c_double],
    ),
    "calls_remove": (None, [c_void_p, c_char_p]),
    "patience_s": (c_double, []),
    "bytes_per_s": (c_double, []),
    "server_new": (
        c_void_p,
        [c_void_p, c_void_p, c_void_p, c_int, c_int64, c_uint64, _STATUS],
    ),
    "server_delete": (None, [c_void_p]),
    "server_listen": (c_int, [c_void_p, c_char_p, c_int, _STATUS]),
    "server_listen_memory": (None, [c_void_p, c_uint64, c_uint64, _STATUS]),
    "server_memory_offer": (None, [c_void_p, c_char_p, c_uint64]),
    "server_memory_connections": (c_int64, [c_void_p]),
    "server_memory_running": (c_int64, [c_void_p]),
    "server_memory_bytes": (c_int64, [c_void_p]),
    "server_name": (c_char_p, [c_void_p]),
    "server_set_token": (None, [c_void_p, c_char_p]),
    "server_set_backup": (None, [c_void_p, c_int, c_char_p]),
    "server_set_tls": (
        None,
        [c_void_p, c_char_p, c_char_p, c_char_p, c_char_p, _STATUS],
    ),
    "server_next": (c_int, [c_void_p, POINTER(PythonCall)]),
    "server_reply": (
        c_int,
        [
            c_void_p,
            c_int64,
            c_int,
            c_char_p,
            c_char_p,
            c_void_p,
            c_uint64,
            c_void_p,
            c_uint64,
            c_uint64,
            c_int,
        ],
    ),
    "server_stop": (None, [c_void_p, c_double]),
    "server_connections": (c_int64, [c_void_p]),
    "server_running": (c_int64, [c_void_p]),
    "server_waiting": (c_int64, [c_void_p]),
    "server_ended": (c_int64, [c_void_p]),
}


def _loaded() -> dict[str, Callable[..., Any]]:
    path = next(_FOLDER.glob("_rows*.so"), None)
    if path is None:
        raise ImportError(
            f"the library of servers is not in {_FOLDER}: run `make build` in the"
            " repository"
        )
    library = ctypes.CDLL(str(path))
    functions = {}
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, f"recstore_{name}")
        function.restype = result
        function.argtypes = arguments
        functions[name] = function
    return functions


native = _loaded()
"""The functions of the library, without the prefix of their names.

They run without the lock of the interpreter.
"""


class Native:
    """An object of the library, which is freed with this one.

    Args:
        kind: The prefix of its functions.
        arguments: The arguments of its constructor.
    """

    def __init__(self, kind: str, *arguments: Any) -> None:
        self._kind = kind
        self.handle = native[f"{kind}_new"](*arguments)
        """The address of the object, for the library's functions."""
        self.free = weakref.finalize(self, native[f"{kind}_delete"], self.handle)
        """Frees the object, once.

        At the end of the process, nobody does: threads may use the object still.
        """
        self.free.atexit = False

    def invoke(self, function: str, *arguments: Any) -> Any:
        """Calls a function of the object."""
        return native[f"{self._kind}_{function}"](self.handle, *arguments)

    def checked(self, function: str, *arguments: Any) -> Any:
        """Calls a function whose last argument is a :class:`NativeStatus`, and raises
        the error that it reports.
        """
        status = NativeStatus()
        result = native[f"{self._kind}_{function}"](
            self.handle,
            *arguments,
            byref(status),
        )
        status.check()
        return result


class RunGate(Native):
    """The run of a server, and a gate that lets many changes of rows in, or one change
    of the tables alone.
    """

    def __init__(self) -> None:
        super().__init__("gate")
        self._run = ""

    @property
    def run(self) -> str:
        """The label of the run, which calls must have.

        Empty: the server answers no call on tables.
        """
        return self._run

    @run.setter
    def run(self, label: str) -> None:
        self._run = label
        self.invoke("set_run", label.encode())

    def set_end(self, in_seconds: float) -> None:
        """Sets in how many seconds the server stops to answer calls on tables."""
        self.invoke("set_end", in_seconds)

    @property
    def has_ended(self) -> bool:
        """Whether that time is over."""
        return bool(self.invoke("has_ended"))

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Returns a context for a change of rows."""
        self.invoke("enter")
        try:
            yield
        finally:
            self.invoke("leave")

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Returns a context during which no change is inside :meth:`shared`."""
        self.invoke("close")
        try:
            yield
        finally:
            self.invoke("open")


class CallCounts(Native):
    """The counts and times of calls, and the number of ids: an observer.

    See :class:`Observer`.
    """

    def __init__(self) -> None:
        super().__init__("counts")
        self._call = native["counts_call"]
        self._ids = native["counts_ids"]

    def call(
        self,
        method: str,
        outcome: str,
        seconds: float,
    ) -> None:
        """Records the end of a call.

        ``outcome`` is ``ok``, ``cancelled`` or the name of an error class.
        """
        self._call(
            self.handle,
            method.encode(),
            outcome.encode(),
            seconds,
        )

    def ids(self, operation: str, table: str, count: int) -> None:
        """Records the number of ids that were pulled, pushed, updated or deleted."""
        self._ids(
            self.handle,
            operation.encode(),
            table.encode(),
            count,
        )

    def numbers(self) -> list[tuple[str, str, str, float]]:
        """Returns all counts: the kind, two labels, and the number."""
        numbers: list[tuple[str, str, str, float]] = []

        def visit(
            kind: bytes,
            label: bytes,
            label_2: bytes,
            number: float,
        ) -> None:
            numbers.append((kind.decode(), label.decode(), label_2.decode(), number))

        self.invoke("each", _VISIT_COUNT(visit))
        return numbers
