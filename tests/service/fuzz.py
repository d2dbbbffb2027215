"""Sends random and damaged messages to a parameter server, in the process and by gRPC.

``python -m tests.service.fuzz --calls 1000000`` sends a tenth of the calls by gRPC. A call may succeed or be refused.
It must not fail in the server, and the rows of the table "kept" must not change.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import torch
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from torchrec_recstore.optim import Adagrad
from torchrec_recstore.options import LRU, TableOptions
from torchrec_recstore.rpc import recstore_pb2 as pb
from torchrec_recstore.rpc.protocol import VERSION, VERSION_KEY
from torchrec_recstore.rpc.recstore_pb2_grpc import add_ParameterServerServicer_to_server
from torchrec_recstore.rpc.table_spec import TableSpec
from torchrec_recstore.service import RecStoreClient
from torchrec_recstore.service.calls import CallThreads, RequestMemory
from torchrec_recstore.service.data_directory import DataDirectory
from torchrec_recstore.service.handlers import Handlers
from torchrec_recstore.service.hosted import HostedBackend, Limits
from torchrec_recstore.service.listening import GrpcServer, ListenOptions
from torchrec_recstore.service.metrics import NoObserver
from torchrec_recstore.service.server import ParameterServer

SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServer"]
KEPT = "kept"
OTHERS = ("other", "another \N{SNOWMAN}")
DIM = 4
_IDS = torch.arange(-500, 500)
_FAILURES = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)


class Messages:
    """Makes the messages of calls.

    Args:
        seed: The seed.
        epoch: The epoch of the server. Only calls that cannot change the table "kept" are for this epoch.
    """

    def __init__(self, seed: int, epoch: str) -> None:
        self._random = random.Random(seed)
        self._epoch = epoch
        self._numbers = (0, 1, 2, 3, 7, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
        spec = TableSpec(DIM, torch.float32, Adagrad(lr=0.1), TableOptions(max_rows=100, eviction=LRU()))
        self._spec = spec.to_json()

    def call(self) -> tuple[str, list[bytes]]:
        """Returns the method of a call, and its messages."""
        chosen = self._random
        method = chosen.choice(SERVICE.methods)
        count = chosen.choice((0, 1, 1, 1, 2, 3)) if method.client_streaming else 1
        how = chosen.random()
        if how < 0.1:
            return method.name, [chosen.randbytes(chosen.randrange(200)) for _ in range(count)]
        messages = [self._message(method.input_type, number).SerializeToString() for number in range(count)]
        if how < 0.5:
            messages = [self._damaged(message) for message in messages]
        return method.name, messages

    def _message(self, kind: Any, number: int) -> Message:
        name = kind.name
        if name == "PullRequest":
            header = pb.PullHeader(table=self._table(), epoch=self._epoch, want=self._random.randrange(4))
            return pb.PullRequest(header=header if number == 0 else None, ids=self._bytes(8))
        if name == "WriteRequest":
            if number == 0:
                return pb.WriteRequest(header=self._write_header())
            return pb.WriteRequest(
                ids=self._bytes(8),
                rows=self._bytes(4 * DIM),
                initial_ids=self._bytes(8) if self._random.random() < 0.2 else b"",
                initial_rows=self._bytes(4 * DIM) if self._random.random() < 0.2 else b"",
            )
        if name == "CreateRequest":
            return pb.CreateRequest(
                table=self._table(), epoch=self._epoch, spec=self._damaged(self._spec.encode()).decode(errors="replace")
            )
        if name == "DropRequest":
            return pb.DropRequest(table=self._random.choice(OTHERS), epoch=self._epoch)
        # The other messages begin and end saves and epochs, as the commands of operators do. Here they are for another.
        return self._filled(getattr(pb, name)())

    def _write_header(self) -> Message:
        table = self._table()
        return pb.WriteHeader(
            table=table,
            epoch="x" if table == KEPT else self._epoch,
            client=self._random.choice(("a", "b", "c" * 64, "d" * 65, "")),
            request=self._random.choice((*self._numbers, self._random.randrange(10**6))),
            done_before=self._random.choice((0, 0, 1, self._random.randrange(10**6))),
            kind=self._random.randrange(5),
            ids=self._random.choice((0, 1, 2, 3, 2**63)),
            float32=self._random.random() < 0.9,
        )

    def _filled(self, message: Message) -> Message:
        """Sets fields of a message to extreme values."""
        for field in message.DESCRIPTOR.fields:
            if self._random.random() < 0.3:
                continue
            for _ in range(self._random.randrange(3) if field.is_repeated else 1):
                if field.type == FieldDescriptor.TYPE_MESSAGE:
                    inner = getattr(message, field.name)
                    self._filled(inner.add() if field.is_repeated else inner)
                    continue
                value = self._value(message, field)
                if field.is_repeated:
                    getattr(message, field.name).append(value)
                else:
                    setattr(message, field.name, value)
        return message

    def _value(self, message: Message, field: Any) -> Any:
        if field.name == "phase":  # a save or load of the others' epochs could not go on meanwhile
            return self._random.choice((0, 7))
        if field.type == FieldDescriptor.TYPE_STRING:
            return self._random.choice(("", "x", "..", "/etc", "a/b", "\0", "y" * 300, "\N{SNOWMAN}", "z" * 40))
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._random.randbytes(self._random.randrange(40))
        if field.type == FieldDescriptor.TYPE_BOOL:
            return self._random.random() < 0.5
        largest = 2**32 if field.type == FieldDescriptor.TYPE_UINT32 else 2**64
        return self._random.choice(self._numbers) % largest

    def _table(self) -> str:
        return self._random.choice((KEPT, *OTHERS, "", "missing", "l" * 2000))

    def _bytes(self, size: int) -> bytes:
        more = self._random.choice((0, 0, 0, 0, 1))
        return self._random.randbytes(size * self._random.randrange(4) + more)

    def _damaged(self, message: bytes) -> bytes:
        changed = bytearray(message)
        for _ in range(self._random.randrange(4)):
            place = self._random.randrange(len(changed) + 1)
            how = self._random.randrange(3)
            if how == 0:
                changed[place:place] = self._random.randbytes(self._random.randrange(1, 9))
            elif how == 1:
                del changed[place : place + self._random.randrange(1, 9)]
            elif place < len(changed):
                changed[place] = self._random.randrange(256)
        # A damaged header must not become one for the table that is kept.
        return b"" if KEPT.encode() in changed and self._epoch.encode() in changed else bytes(changed)


class _RefusedError(Exception):
    pass


class _Context:
    """The context of a call that does not come from gRPC."""

    code: grpc.StatusCode | None = None
    details = ""

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = code, details
        raise _RefusedError

    def is_active(self) -> bool:
        return True

    def set_trailing_metadata(self, metadata: object) -> None:
        pass

    def cancel(self) -> None:
        pass


class _Methods:
    """Takes the place of a ``grpc.Server``, and keeps the handlers."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.handlers.update(handlers)


def fuzz(calls: int, seed: int, directory: Path, report: Callable[[str], object] = lambda line: None) -> Counter[str]:
    """Makes ``calls`` calls and checks what they leave. Returns the number of calls by status.

    Raises:
        AssertionError: A call has failed in the server, or has changed a row.
    """
    tables = HostedBackend(Limits(max_tables=20, max_rows=1000, eviction=LRU()))
    service = ParameterServer(tables, DataDirectory(directory), NoObserver())
    server = GrpcServer(
        ListenOptions("127.0.0.1:0"),
        SERVICE.full_name,
        lambda handlers: add_ParameterServerServicer_to_server(service, handlers),
        ("Save", "Load"),
    )
    service.begin()
    server.start()
    client = RecStoreClient([server.address], shared_memory=False)
    rows = torch.randn(len(_IDS), DIM)
    for table in (KEPT, *OTHERS):
        client.init_data(table, (10, DIM), torch.float32, optimizer=Adagrad(lr=0.1))
        client.push(table, _IDS, rows)
    described = service.Describe(pb.DescribeRequest(), _Context())
    messages = Messages(seed, f"{described.set}/{described.epoch}")
    methods, memory = _Methods(), RequestMemory(1 << 30)
    threads = CallThreads(1, "fuzz")
    add_ParameterServerServicer_to_server(service, Handlers(methods, {"": threads}, memory, frozenset()))
    statuses: Counter[str] = Counter()
    begin = time.monotonic()

    def check() -> None:
        assert torch.equal(client.pull(KEPT, _IDS), rows)
        assert torch.equal(tables.ids(KEPT), _IDS)
        assert memory.held == threads.running == 0

    for number in range(calls - calls // 10):
        method, sent = messages.call()
        code, details = _called(methods.handlers[method], sent)
        _count(statuses, code, details, method, sent)
        if number % 10_000 == 9_999:
            check()
            report(f"{number + 1} calls in the process, {time.monotonic() - begin:.0f} s")
    with grpc.insecure_channel(server.address) as channel:
        for number in range(calls // 10):
            method, sent = messages.call()
            call = channel.stream_stream(f"/{SERVICE.full_name}/{method}")(
                iter(sent), metadata=[(VERSION_KEY, VERSION)], timeout=300
            )
            try:
                for _ in call:
                    pass
                code, details = grpc.StatusCode.OK, ""
            except grpc.RpcError as error:
                code, details = error.code(), error.details()
            _count(statuses, code, details, method, sent)
            if number % 10_000 == 9_999:
                check()
                report(f"{number + 1} calls by gRPC, {time.monotonic() - begin:.0f} s")
    check()
    client.close()
    server.stop()
    service.close()
    return statuses


def _called(handler: Any, messages: list[bytes]) -> tuple[grpc.StatusCode, str]:
    context = _Context()
    raw: Iterator[bytes] = iter(messages)
    try:
        if handler.response_streaming:
            for _ in handler.stream_stream(raw, context):
                pass
        else:
            handler.stream_unary(raw, context)
    except _RefusedError:
        assert context.code is not None
        return context.code, context.details
    return grpc.StatusCode.OK, ""


def _count(statuses: Counter[str], code: grpc.StatusCode, details: str, method: str, messages: list[bytes]) -> None:
    assert code not in _FAILURES, (method, messages, details)
    assert len(details) < 5000
    statuses[code.name] += 1


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(dict(fuzz(arguments.calls, arguments.seed, Path(directory), lambda line: print(line, flush=True))))


if __name__ == "__main__":
    main()
