"""Sends random and damaged messages to a parameter server, in the process and by gRPC.

``python -m tests.service.fuzz --calls 1000000`` sends a tenth of the calls by gRPC. A
call may succeed or be refused. It must not fail in the server, and the rows of the
table "kept" must not change. One call of a hundred is a phase of a save or a load, in
any order and with valid epochs: "kept" has then the rows of the save that was loaded.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import torch
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.service.fuzz_phases import DIM, IDS, KEPT, Phases
from tests.service.in_process import Methods, called
from torchrec_recstore.optim import Adagrad
from torchrec_recstore.options import LRU, TableOptions
from torchrec_recstore_service import RecStoreClient
from torchrec_recstore_service.server import received, reservations
from torchrec_recstore_service.server.calls import CallThreads, RequestMemory
from torchrec_recstore_service.server.data_directory import DataDirectory
from torchrec_recstore_service.server.handlers import Handlers
from torchrec_recstore_service.server.listening import GrpcServer, ListenOptions
from torchrec_recstore_service.server.native import CallCounts
from torchrec_recstore_service.server.server import ParameterServer
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.tables.limits import Limits
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.protocol import VERSION, VERSION_KEY
from torchrec_recstore_service.wire.recstore_pb2_grpc import (
    add_ParameterServerServicer_to_server,
)
from torchrec_recstore_service.wire.table_spec import TableSpec

SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServer"]
OTHERS = ("other", "another \N{SNOWMAN}")
_PHASES = 0.01  # the share of the calls that are phases of saves and loads
_Carry = Callable[[str, list[bytes]], tuple[grpc.StatusCode, str, list[bytes]]]
_FAILURES = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)


class Messages:
    """Makes the messages of calls.

    Args:
        seed: The seed.
        epoch: The epoch of the server. Only calls that cannot change the table "kept"
            are for this epoch.
    """

    def __init__(self, seed: int, epoch: str) -> None:
        self._random = random.Random(seed)
        self.epoch = epoch
        self._numbers = (
            0,
            1,
            2,
            3,
            7,
            2**31 - 1,
            2**32 - 1,
            2**63 - 1,
            2**63,
            2**64 - 1,
        )
        spec = TableSpec(
            DIM,
            torch.float32,
            Adagrad(lr=0.1),
            TableOptions(max_rows=100, eviction=LRU()),
        )
        self._spec = spec.to_json()

    def call(self) -> tuple[str, list[bytes]]:
        """Returns the method of a call, and its messages."""
        chosen = self._random
        method = chosen.choice(SERVICE.methods)
        count = chosen.choice((0, 1, 1, 1, 2, 3)) if method.client_streaming else 1
        how = chosen.random()
        if how < 0.1:
            return method.name, [
                chosen.randbytes(chosen.randrange(200)) for _ in range(count)
            ]
        messages = [
            self._message(method.input_type, number).SerializeToString()
            for number in range(count)
        ]
        if how < 0.5:
            messages = [self._damaged(message) for message in messages]
        return method.name, messages

    def _message(self, kind: Any, number: int) -> Message:
        name = kind.name
        if name == "PullRequest":
            header = pb.PullHeader(
                table=self._table(), epoch=self.epoch, want=self._random.randrange(4)
            )
            return pb.PullRequest(
                header=header if number == 0 else None, ids=self._bytes(8)
            )
        if name == "WriteRequest":
            if number == 0:
                return pb.WriteRequest(header=self._write_header())
            return pb.WriteRequest(
                ids=self._bytes(8),
                rows=self._bytes(4 * DIM),
                initial_ids=self._bytes(8) if self._random.random() < 0.2 else b"",
                initial_rows=(
                    self._bytes(4 * DIM) if self._random.random() < 0.2 else b""
                ),
            )
        if name == "CreateRequest":
            return pb.CreateRequest(
                table=self._table(),
                epoch=self.epoch,
                spec=self._damaged(self._spec.encode()).decode(errors="replace"),
            )
        if name == "DropRequest":
            return pb.DropRequest(table=self._random.choice(OTHERS), epoch=self.epoch)
        # The other messages begin and end saves and epochs, as the commands of
        # operators do. Here they are for another.
        return self._filled(getattr(pb, name)())

    def _write_header(self) -> Message:
        table = self._table()
        return pb.WriteHeader(
            table=table,
            epoch="x" if table == KEPT else self.epoch,
            client=self._random.choice(("a", "b", "c" * 64, "d" * 65, "")),
            request=self._random.choice(
                (*self._numbers, self._random.randrange(10**6))
            ),
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
        # a save or load of the others' epochs could not go on meanwhile
        if field.name == "phase":
            return self._random.choice((0, 7))
        if field.type == FieldDescriptor.TYPE_STRING:
            return self._random.choice(
                ("", "x", "..", "/etc", "a/b", "\0", "y" * 300, "\N{SNOWMAN}", "z" * 40)
            )
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._random.randbytes(self._random.randrange(40))
        if field.type == FieldDescriptor.TYPE_BOOL:
            return self._random.random() < 0.5
        number = self._random.choice(self._numbers)
        if field.type == FieldDescriptor.TYPE_INT64:
            return (number + 2**63) % 2**64 - 2**63
        return number % (2**32 if field.type == FieldDescriptor.TYPE_UINT32 else 2**64)

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
                changed[place:place] = self._random.randbytes(
                    self._random.randrange(1, 9)
                )
            elif how == 1:
                del changed[place : place + self._random.randrange(1, 9)]
            elif place < len(changed):
                changed[place] = self._random.randrange(256)
        # A damaged header must not become one for the table that is kept.
        return (
            b""
            if KEPT.encode() in changed and self.epoch.encode() in changed
            else bytes(changed)
        )


def fuzz(
    calls: int,
    seed: int,
    directory: Path,
    report: Callable[[str], object] = lambda line: None,
) -> Counter[str]:
    """Makes ``calls`` calls and checks what they leave.

    Returns the number of calls by status.

    Raises:
        AssertionError: A call has failed in the server, or has changed a row.
    """
    tables = HostedTables(Limits(max_tables=20, max_rows=1000, eviction=LRU()))
    data = DataDirectory(directory)
    service = ParameterServer(tables, data, CallCounts())
    options = ListenOptions("127.0.0.1:0")
    server = GrpcServer(
        options,
        SERVICE.full_name,
        lambda handlers: add_ParameterServerServicer_to_server(service, handlers),
        ("Save", "Load", "Look"),
    )
    service.begin(options, server)
    server.start()
    client = RecStoreClient([server.address], shared_memory=False)
    for table in (KEPT, *OTHERS):
        client.init_data(table, (10, DIM), torch.float32, optimizer=Adagrad(lr=0.1))
        client.push(table, IDS, torch.zeros(len(IDS), DIM))
    client.close()
    chosen = random.Random(seed + 1)
    phases = Phases(chosen, tables, data)
    messages = Messages(seed, phases.label)
    methods, memory = Methods(), RequestMemory(1 << 30)
    threads = CallThreads(1, "fuzz")
    add_ParameterServerServicer_to_server(
        service, Handlers(methods, {"": threads}, memory, frozenset())
    )
    statuses: Counter[str] = Counter()
    begin = time.monotonic()

    def in_process(
        method: str, sent: list[bytes]
    ) -> tuple[grpc.StatusCode, str, list[bytes]]:
        answer = called(methods.handlers[method], sent)
        assert memory.held == threads.running == 0
        return answer

    def by_grpc(
        method: str, sent: list[bytes]
    ) -> tuple[grpc.StatusCode, str, list[bytes]]:
        call = channel.stream_stream(f"/{SERVICE.full_name}/{method}")(
            iter(sent), metadata=[(VERSION_KEY, VERSION)], timeout=300
        )
        try:
            return grpc.StatusCode.OK, "", list(call)
        except grpc.RpcError as error:
            return error.code(), error.details(), []

    def send(carry: _Carry, number: int) -> None:
        def call(method: str, sent: list[bytes]) -> tuple[bool, list[bytes]]:
            code, details, replies = carry(method, sent)
            _count(statuses, code, details, method, sent)
            return code is grpc.StatusCode.OK, replies

        for _ in range(number):
            if chosen.random() < _PHASES:
                phases.step(call)
                messages.epoch = phases.label
            else:
                call(*messages.call())
            if statuses.total() % 10_000 == 0:
                phases.check()
                report(
                    f"{statuses.total()} calls, {time.monotonic() - begin:.0f} s,"
                    f" {dict(phases.done)}"
                )

    with (
        # no save waits for another
        mock.patch.multiple(reservations, UNPREPARED_S=0.0, SILENT_S=0.0),
        mock.patch.object(received, "GIVES_WAY_S", 0.0),
        grpc.insecure_channel(server.address) as channel,
    ):
        send(in_process, calls - calls // 10)
        send(by_grpc, calls // 10)
    phases.check()
    server.stop()
    service.close()
    return statuses


def _count(
    statuses: Counter[str],
    code: grpc.StatusCode,
    details: str,
    method: str,
    messages: list[bytes],
) -> None:
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
        print(
            dict(
                fuzz(
                    arguments.calls,
                    arguments.seed,
                    Path(directory),
                    lambda line: print(line, flush=True),
                )
            )
        )


if __name__ == "__main__":
    main()
