"""Sends calls with hostile names to a parameter server whose data directory has victims
around it.

All strings and bytes of all requests are found by the descriptors of the service, so a
new field is fuzzed as soon as it is in recstore.proto. A new method needs a journey
that calls it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import grpc
import numpy as np
import torch
from google.protobuf.message import Message

from tests.outside.fields import Path, text_fields, with_text
from tests.outside.names import HostileNames
from tests.outside.sandbox import MARKED_WEIGHT, MARKER, Sandbox
from tests.service.in_process import Methods, called
from tests.serving.publish.test_publisher import wait_for
from torchrec_recstore.optim import SGD
from torchrec_recstore.options import LRU, TableOptions
from torchrec_recstore_service.server.calls import CallThreads, RequestMemory
from torchrec_recstore_service.server.data_directory import DataDirectory
from torchrec_recstore_service.server.handlers import Handlers
from torchrec_recstore_service.server.listening import GrpcServer, ListenOptions
from torchrec_recstore_service.server.native import CallCounts
from torchrec_recstore_service.server.pair import PairOptions, Role
from torchrec_recstore_service.server.server import ParameterServer
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.tables.limits import Limits
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.recstore_pb2_grpc import (
    add_ParameterServerServicer_to_server,
)
from torchrec_recstore_service.wire.table_spec import TableSpec

SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServer"]
DIM = 4
IDS = torch.arange(8)
_NAMES = 3  # other hostile names before a call
_FAILURES = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
_MARKED_BYTES = np.float32(MARKED_WEIGHT).tobytes()

Call = tuple[str, list[Message]]
"""A method, and the messages of the call."""

Replies = list[bytes] | None
"""The replies of a call. None: the call was refused."""

Journey = Generator[Call, Replies, None]
"""Calls that depend on each other. Each gets the replies of the call before."""


class Server:
    """A server of a set of one in this process, whose calls do not go by gRPC.

    Args:
        sandbox: The sandbox, in which the server has the data directory.
        pair: The options of a server of a pair. Default: None, the server is in none.
    """

    def __init__(self, sandbox: Sandbox, pair: PairOptions | None = None) -> None:
        self.tables = HostedTables(Limits(max_tables=30, max_rows=1000, eviction=LRU()))
        self.directory = DataDirectory(sandbox.data)
        self.service = ParameterServer(self.tables, self.directory, CallCounts())
        options = ListenOptions("127.0.0.1:0")
        self._listener = GrpcServer(
            options,
            SERVICE.full_name,
            lambda handlers: add_ParameterServerServicer_to_server(
                self.service, handlers
            ),
            ("Save", "Load", "Look", "Replicate"),
        )
        self._is_in_pair = pair is not None
        self.service.begin(options, self._listener, pair)
        self._listener.start()
        methods = Methods()
        threads = {"": CallThreads(1, "names")}
        handlers = Handlers(methods, threads, RequestMemory(1 << 30), frozenset())
        add_ParameterServerServicer_to_server(self.service, handlers)
        self._handlers = methods.handlers
        if pair is not None:
            self.service.start(lambda serving: None)
            wait_for(lambda: self.service._pair.role >= Role.ALONE)

    @property
    def label(self) -> str:
        """The label of the run of the server. Empty before the first."""
        return self.service._set._run

    def call(
        self, method: str, messages: list[bytes]
    ) -> tuple[grpc.StatusCode, str, list[bytes]]:
        """Makes a call.

        Returns its status, the message of the error, and the replies.
        """
        return called(self._handlers[method], messages)

    def close(self) -> None:
        """Ends the server. One of a pair saves its tables and gives the lease back."""
        if self._is_in_pair:
            self.service.save_to_stop()
        self._listener.stop()
        self.service.close()
        self.tables.close()
        self.directory.close()


@dataclass(frozen=True)
class Values:
    """The names that the calls of a journey have in common."""

    name: str = "monday"
    other_name: str = "tuesday"
    id: str = "x"
    token: str = "token"
    set: str = "set"
    table: str = "t"
    file: str = "file"
    client: str = "client"
    epoch: str = ""
    """The label of the run. Empty: that of the server."""
    server: str = "server"
    address: str = "127.0.0.1:1"


class Journeys:
    """Makes calls that a server accepts, if the values are those by default."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._number = 0

    def all(self) -> dict[str, Callable[[Values], Journey]]:
        """Returns the journeys by name."""
        return {
            "tables": self.tables,
            "save": self.save,
            "abort": self.abort,
            "load": self.load,
            "reshard": self.reshard,
            "resume": self.resume,
            "replicate": self.replicate,
        }

    def begin(self, values: Values) -> Journey:
        """Begins an epoch with a table, if there is none, and writes a file of a save."""
        if not self._server.label:
            yield "Load", [self._load("COMMIT", values, pb.Saved())]
        spec = TableSpec(DIM, torch.float32, SGD(lr=1.0), TableOptions(max_rows=100))
        request = pb.CreateRequest(
            table=values.table, spec=spec.to_json(), epoch=self._epoch(values)
        )
        yield "Create", [request]
        yield (
            "WriteFile",
            [
                pb.WriteFileRequest(
                    id=values.id, part=0, file=values.file, content=b"abc"
                )
            ],
        )

    def tables(self, values: Values) -> Journey:
        """Calls everything that concerns a table."""
        yield from self.begin(values)
        epoch = self._epoch(values)
        ids = IDS.numpy().tobytes()
        rows = torch.ones(len(IDS), DIM).numpy().tobytes()
        kinds = (pb.WriteHeader.PUSH, pb.WriteHeader.UPDATE)
        for kind in kinds:
            header = self._write_header(values, kind)
            header.table = values.table
            yield (
                "Write",
                [
                    pb.WriteRequest(header=header),
                    pb.WriteRequest(ids=ids, rows=rows),
                ],
            )
        header = self._write_header(values, pb.WriteHeader.UPDATE)
        header.tables.add(table=values.table, ids=len(IDS))
        yield (
            "Write",
            [
                pb.WriteRequest(header=header),
                pb.WriteRequest(ids=ids, rows=rows),
            ],
        )
        header = self._write_header(values, pb.WriteHeader.UPDATE)
        header.table = values.table
        initial = {"initial_ids": ids, "initial_rows": rows}
        parts = [
            pb.WriteRequest(header=header),
            pb.WriteRequest(ids=ids, rows=rows, **initial),
        ]
        yield "Write", parts
        pull = pb.PullHeader(table=values.table, epoch=epoch)
        yield "Pull", [pb.PullRequest(header=pull), pb.PullRequest(ids=ids)]
        pull = pb.PullHeader(
            epoch=epoch, tables=[pb.TableIds(table=values.table, ids=len(IDS))]
        )
        yield "Pull", [pb.PullRequest(header=pull, ids=ids)]
        yield "Ids", [pb.IdsRequest(table=values.table, epoch=epoch)]
        yield "Stats", [pb.StatsRequest(table=values.table, epoch=epoch)]
        row = torch.ones(DIM).numpy().tobytes()
        look = pb.LookRequest(
            table=values.table, epoch=epoch, by="dot", count=3, row=row
        )
        yield "Look", [look]
        yield "Describe", [pb.DescribeRequest()]
        yield "Attach", [pb.AttachRequest()]
        yield "Drop", [pb.DropRequest(table=values.table, epoch=epoch)]

    def save(self, values: Values) -> Journey:
        """Makes a save, reads it, and lets the next save replace it."""
        yield from self.begin(values)
        save = pb.Saved(name=values.name, id=self._new_id(values))
        reply = yield "Save", [self._save("RESERVE", values, save)]
        if reply is not None:
            save.number = pb.SaveReply.FromString(reply[0]).number
        yield "Save", [self._save("PREPARE", values, save, servers=[values.address])]
        yield from self._read(save, values)
        commit = {"decided": [save.id], "forget": [values.other_name]}
        yield "Save", [self._save("COMMIT", values, save, **commit)]
        yield from self._read(save, values)
        yield "ReadFile", [pb.ReadFileRequest(save=pb.Saved(name=values.name))]

    def abort(self, values: Values) -> Journey:
        """Begins a save and gives it up, also after files of it were received."""
        yield from self.begin(values)
        save = pb.Saved(name=values.name, id=values.id)
        reply = yield "Save", [self._save("RESERVE", values, save)]
        if reply is not None:
            save.number = pb.SaveReply.FromString(reply[0]).number
        yield "Save", [self._save("PREPARE", values, save)]
        yield "Save", [self._save("ABORT", values, save)]
        yield from self.begin(values)
        load = self._load("ABORT", values, save)
        load.parts = 1
        yield "Load", [load]

    def load(self, values: Values) -> Journey:
        """Loads the last save."""
        yield from self.begin(values)
        saves = self._server.directory.saves
        save = saves[-1] if saves else pb.Saved()
        if save.name and values.name != Values.name:
            save = pb.Saved(name=values.name, id=save.id)
        for phase in ("PREPARE", "ABORT", "PREPARE", "COMMIT"):
            yield "Load", [self._load(phase, values, save)]

    def reshard(self, values: Values) -> Journey:
        """Copies a save of this server to itself, as if it were one of other servers."""
        yield from self.begin(values)
        saves = self._server.directory.saves
        if not saves:
            yield from self.save(values)
            saves = self._server.directory.saves
        source = saves[-1] if saves else pb.Saved(name="none")
        reply = yield "ReadFile", [pb.ReadFileRequest(save=source)]
        files = [] if reply is None else pb.ReadFileReply.FromString(reply[0]).files
        copy = pb.Saved(
            name=values.other_name, id=self._new_id(values), number=self._number
        )
        for file in files:
            reply = yield "ReadFile", [pb.ReadFileRequest(save=source, file=file)]
            if reply is not None:
                content = pb.ReadFileReply.FromString(reply[0]).content
                yield (
                    "WriteFile",
                    [pb.WriteFileRequest(id=copy.id, file=file, content=content)],
                )
        for phase in ("RESHARD", "PREPARE", "COMMIT"):
            load = self._load(phase, values, copy)
            load.parts = 1
            yield "Load", [load]

    def resume(self, values: Values) -> Journey:
        """Makes the phases of a resuming, which a server that does not wait refuses."""
        yield from self.begin(values)
        member = self._server.directory.membership
        for phase in ("PREPARE", "NOTE", "COMMIT"):
            yield (
                "Resume",
                [
                    pb.ResumeRequest(
                        phase=pb.ResumeRequest.Phase.Value(phase),
                        epoch=values.epoch or ("" if member is None else member.label),
                        before="" if member is None else member.run,
                        run="run",
                    )
                ],
            )

    def replicate(self, values: Values) -> Journey:
        """Makes the calls of a backup. A server that is in no pair refuses them."""
        yield from self.begin(values)
        for phase in ("COPY", "ALIVE", "FOLLOW", "MEMBER", "TAKE_OVER"):
            yield (
                "Replicate",
                [
                    pb.ReplicateRequest(
                        phase=pb.ReplicateRequest.Phase.Value(phase),
                        server=values.server,
                        rows=values.address,
                        address=values.address,
                        secret="0" * 32,
                        state="{}",
                    )
                ],
            )

    def _read(self, save: pb.Saved, values: Values) -> Journey:
        reply = yield "ReadFile", [pb.ReadFileRequest(save=save)]
        files = [] if reply is None else pb.ReadFileReply.FromString(reply[0]).files
        if values.file != Values.file:
            files = [values.file]
        for file in files:
            yield "ReadFile", [pb.ReadFileRequest(save=save, file=file)]

    def _epoch(self, values: Values) -> str:
        return values.epoch or self._server.label

    def _new_id(self, values: Values) -> str:
        self._number += 1
        return values.id if values.id != Values.id else f"id{self._number}"

    def _write_header(self, values: Values, kind: int) -> pb.WriteHeader:
        self._number += 1
        return pb.WriteHeader(
            epoch=self._epoch(values),
            client=values.client,
            request=self._number,
            kind=kind,
            ids=len(IDS),
            float32=True,
        )

    def _save(
        self, phase: str, values: Values, save: pb.Saved, **more: Any
    ) -> pb.SaveRequest:
        return pb.SaveRequest(
            phase=pb.SaveRequest.Phase.Value(phase),
            epoch=self._epoch(values),
            save=save,
            overwrite=True,
            **more,
        )

    def _load(self, phase: str, values: Values, save: pb.Saved) -> pb.LoadRequest:
        member = self._server.directory.membership
        self._number += 1
        return pb.LoadRequest(
            phase=pb.LoadRequest.Phase.Value(phase),
            token=(
                values.token
                if values.token != Values.token
                else f"token{self._number // 8}"
            ),
            save=save,
            exact=True,
            set=(
                values.set if member is None or values.set != Values.set else member.set
            ),
            members=1,
            epoch=1 if member is None else member.epoch + 1,
            slots=[0],
        )


@dataclass
class Results:
    """What a fuzzer has done."""

    statuses: Counter[str] = field(default_factory=Counter)
    """The number of calls with a hostile name, by their status."""
    fields: Counter[tuple[str, Path]] = field(default_factory=Counter)
    """The number of calls with a hostile name, by method and field."""


def hostile_fields() -> list[tuple[str, Path]]:
    """Returns each string and each bytes of each request of the service, with its
    method.
    """
    return [
        (method.name, path)
        for method in SERVICE.methods
        for path in text_fields(method.input_type)
    ]


class Fuzzer:
    """Sends hostile names, and checks after each journey that the victims are as they
    were.

    Args:
        sandbox: The sandbox.
        chosen: The source of random numbers.
        make_server: A function that starts a server.
    """

    def __init__(
        self, sandbox: Sandbox, chosen: random.Random, make_server: Callable[[], Server]
    ) -> None:
        self._sandbox = sandbox
        self._random = chosen
        self._make_server = make_server
        begins = ("x", "monday", "0", "x/0", ".received-x", "stopped-0")
        self._names = HostileNames(chosen, sandbox.root, begins)
        escapes = self._names.escapes()
        self._escapes = [
            [name for name in escapes if name.count("../") == ups]
            for ups in range(1, max(name.count("../") for name in escapes) + 1)
        ]
        self._turn = 0
        self._server = make_server()
        self._journeys = Journeys(self._server)
        self._calling: dict[str, list[str]] = {}  # by method, the journeys that call it
        self.results = Results()

    def accepted(self) -> set[str]:
        """Makes all journeys without a hostile name.

        Returns the methods of the accepted calls.
        """
        methods: set[str] = set()
        for name, journey in self._journeys.all().items():
            for method, code, details in self._travel(
                journey(Values()), lambda call: []
            ):
                assert code is grpc.StatusCode.OK or name in ("resume", "replicate"), (
                    name,
                    method,
                    details,
                )
                methods.add(method)
                if name not in self._calling.setdefault(method, []):
                    self._calling[method].append(name)
        return methods

    def round(self, number: int) -> None:
        """Makes a journey with hostile names: in one field, or wherever a name is
        repeated.
        """
        if number % 50 == 49:
            self.restart()
        self._with_one_field(number)
        self._with_one_value()

    def restart(self) -> None:
        """Starts the next server on the same directory."""
        self._server.close()
        self._server = self._make_server()
        self._journeys = Journeys(self._server)

    def close(self) -> None:
        """Ends the server."""
        self._server.close()

    def _with_one_field(self, number: int) -> None:
        """Makes a journey in which each call of a method comes after the same call with
        other names.
        """
        every = hostile_fields()
        method, path = every[number % len(every)]

        def hostile_calls(call: Call) -> list[list[bytes]]:
            if call[0] != method:
                return []
            names = [name.encode() for name in self._next_escapes()]
            names += [self._names.bytes() for _ in range(_NAMES)]
            calls = []
            for name in names:
                messages = [message.SerializeToString() for message in call[1]]
                place = self._random.randrange(len(messages))
                messages[place] = with_text(call[1][place], path, name)
                calls.append(messages)
            self.results.fields[method, path] += len(calls)
            return calls

        before = self.results.fields[method, path]
        for name in self._random.sample(
            self._calling[method], len(self._calling[method])
        ):
            self._travel(self._journeys.all()[name](Values()), hostile_calls)
            self._check_rows()
            # The first time, all journeys are made, because each has other phases. A
            # journey may call the method in other states of the server only; then the
            # next one is made.
            if number >= len(every) and self.results.fields[method, path] > before:
                return

    def _next_escapes(self) -> list[str]:
        """Returns the paths that go up so often, or twice more often, by turns.

        Victims lie beside four directories in a row. One of both numbers leads to a
        victim, if the path begins at most two directories deep in the data directory.
        """
        first = self._turn % len(self._escapes)
        second = (first + 2) % len(self._escapes)
        self._turn += 1
        return [*self._escapes[first], *self._escapes[second]]

    def _with_one_value(self) -> None:
        """Makes a journey whose calls all have the same hostile name."""
        chosen = self._random.choice(fields(Values)).name
        values = replace(Values(), **{chosen: self._names.unicode()})
        journey = self._random.choice(list(self._journeys.all().values()))
        for _, code, _ in self._travel(journey(values), lambda call: []):
            self.results.statuses[code.name] += 1
        self._check_rows()

    def _travel(
        self, journey: Journey, hostile_calls: Callable[[Call], list[list[bytes]]]
    ) -> list[tuple[str, grpc.StatusCode, str]]:
        """Makes the calls of a journey, and hostile ones before each of them."""
        outcomes = []
        replies: Replies = None
        begun = False
        while True:
            try:
                call = journey.send(replies) if begun else next(journey)
            except StopIteration:
                return outcomes
            begun = True
            method, messages = call
            for hostile in hostile_calls(call):
                code, _, _ = self._watched_call(method, hostile)
                self.results.statuses[code.name] += 1
            sent = [message.SerializeToString() for message in messages]
            code, details, answers = self._watched_call(method, sent)
            outcomes.append((method, code, details))
            replies = answers if code is grpc.StatusCode.OK else None

    def _watched_call(
        self, method: str, sent: list[bytes]
    ) -> tuple[grpc.StatusCode, str, list[bytes]]:
        """Makes a call, and checks the victims.

        Raises:
            AssertionError: The call has failed in the server, or has read or changed a
                victim.
        """
        try:
            with self._sandbox.watched():
                code, details, answers = self._server.call(method, sent)
            # The primary has called the address of the backup, where no server is.
            assert code not in _FAILURES or "cannot be reached" in details, details
            for answer in (*answers, details.encode()):
                assert MARKER not in answer, "the reply has what only the victims have"
                assert _MARKED_BYTES not in answer, "the reply has a row of a victim"
        except AssertionError as error:
            raise AssertionError(f"{method} of {sent}: {error}") from error
        return code, details, answers

    def _check_rows(self) -> None:
        for name, spec in self._server.tables.specs().items():
            if spec.dim == DIM and spec.dtype is torch.float32:
                ids = self._server.tables.ids(name)
                weights = self._server.tables.pull(name, ids)
                assert not bool((weights == MARKED_WEIGHT).any()), (
                    f"table {name!r} has marked rows"
                )
