"""Hostile names in the replies of servers never lead a client or another server to
other files.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
import torch
from google.protobuf.descriptor import MethodDescriptor
from typer.testing import CliRunner

from tests.outside.fields import changed_document, text_fields, with_text
from tests.outside.files import with_checksum
from tests.outside.names import ROUNDS, SEED, HostileNames
from tests.outside.sandbox import MARKED_WEIGHT, Sandbox
from tests.outside.servers import SERVICE, Server
from tests.service.test_set_calls import Server as PlainServer
from torchrec_recstore import RecStoreClient
from torchrec_recstore.cli import app
from torchrec_recstore.optim import SGD
from torchrec_recstore_service.server.save_names import SaveId
from torchrec_recstore_service.wire import recstore_pb2 as pb

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

IDS = torch.arange(5)


@pytest.fixture
def names(sandbox: Sandbox) -> HostileNames:
    print(f"RECSTORE_TEST_SEED={SEED} RECSTORE_TEST_NAMES={ROUNDS}")
    return HostileNames(random.Random(SEED), sandbox.root, ("x", "monday", "stopped-0"))


class HostilePrimary:
    """The replies of a primary to the server that becomes its backup, with a hostile
    name in one field.

    Args:
        path: The path of the primary's data directory.
    """

    def __init__(self, path: Path) -> None:
        self._server = PlainServer(path)
        self.copy = pb.Saved(name="copy", id="copy1")
        self.state = self._server.calls.copy(SaveId(self.copy.id), lambda: None)

    def read(self, file: str, offset: int) -> pb.ReadFileReply:
        """Reads a piece of a file of the copy."""
        request = pb.ReadFileRequest(save=self.copy, file=file, offset=offset)
        return self._server.calls.read_file(request)

    def close(self) -> None:
        """Ends the server."""
        self._server.tables.close()
        self._server.directory.close()


def test_no_reply_of_a_primary_leads_its_backup_out_of_its_directory(
    sandbox: Sandbox, tmp_path: Path, names: HostileNames
) -> None:
    chosen = random.Random(SEED)
    primary = HostilePrimary(tmp_path / "primary")
    backup = PlainServer(sandbox.data)
    taken = Counter[str]()
    checksum = _checksum_of_a_victim(sandbox)

    def follow(
        copy: pb.Saved, state: object, read: Callable[[str, int], pb.ReadFileReply]
    ) -> None:
        with sandbox.watched():
            with suppress(ValueError, OSError, TypeError, KeyError, AttributeError):
                backup.calls.follow(copy, state, read)  # type: ignore[arg-type]
                taken["followed"] += 1
            for name in backup.tables.specs():
                rows = backup.tables.pull(name, backup.tables.ids(name))
                assert not bool((rows == MARKED_WEIGHT).any())
        assert not list(sandbox.data.glob(".received-*")), "a copy is left"

    def hostile_read(kind: str, name: str) -> Callable[[str, int], pb.ReadFileReply]:
        def read(file: str, offset: int) -> pb.ReadFileReply:
            taken[kind] += 1
            if not file:
                reply = primary.read(file, offset)
                if kind == "files":
                    return pb.ReadFileReply(files=[*reply.files, name])
                return reply
            if kind == "files" and file == name:
                return pb.ReadFileReply(content=b"abc", last=True)
            reply = primary.read(file, offset)
            if kind == "metadata" and file == "metadata.json":
                document = changed_document(json.loads(reply.content), chosen, name)
                with suppress(ValueError, TypeError):
                    return pb.ReadFileReply(
                        content=with_checksum(document).encode(), last=True
                    )
            if kind == "base" and file == "metadata.json":
                document = json.loads(reply.content)
                document["delta_of"] = {"path": name, "checksum": checksum}
                return pb.ReadFileReply(
                    content=with_checksum(document).encode(), last=True
                )
            return reply

        return read

    follow(primary.copy, primary.state, primary.read)
    assert taken["followed"] == 1
    for _ in range(max(20, ROUNDS // 2)):
        name = chosen.choice((names.escape, names.unicode))()
        follow(pb.Saved(name="copy", id=name), primary.state, primary.read)
        follow(
            primary.copy, changed_document(primary.state, chosen, name), primary.read
        )
        for kind in ("files", "metadata", "base"):
            follow(primary.copy, primary.state, hostile_read(kind, name))
    for name in names.escapes():
        follow(primary.copy, primary.state, hostile_read("base", name))
    assert taken["files"]
    assert taken["metadata"]
    primary.close()
    backup.tables.close()
    backup.directory.close()


def _checksum_of_a_victim(sandbox: Sandbox) -> str:
    document = json.loads((sandbox.victims[0] / "metadata.json").read_bytes())
    return str(document["checksum"])


class HostileServer:
    """A server that answers by gRPC, with a hostile name in a field of the replies to
    one method.

    Args:
        server: The server that answers.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self.method = ""
        self.path: tuple[str, ...] = ()
        self.name = b""
        self.changed = 0
        self._grpc = grpc.server(ThreadPoolExecutor(8))
        handlers = {method.name: self._handler(method) for method in SERVICE.methods}
        generic = grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)
        self._grpc.add_generic_rpc_handlers((generic,))
        self.address = f"127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._grpc.start()

    def _handler(self, method: MethodDescriptor) -> grpc.RpcMethodHandler:
        def answer(
            requests: Iterator[bytes], context: grpc.ServicerContext
        ) -> Iterator[bytes]:
            code, details, replies = self._server.call(method.name, list(requests))
            if code is not grpc.StatusCode.OK:
                context.abort(code, details)
            if method.name == "Attach" and self.method != "Attach":
                replies = [b""]  # rows go by gRPC, too
            for reply in replies:
                if method.name == self.method:
                    self.changed += 1
                    message = getattr(pb, method.output_type.name).FromString(reply)
                    reply = with_text(message, self.path, self.name)
                yield reply

        return grpc.stream_stream_rpc_method_handler(answer)

    def close(self) -> None:
        """Ends the server."""
        self._grpc.stop(None)


def _use(address: str) -> None:
    """Calls everything that a client can call."""
    with RecStoreClient([address], timeout_s=2.0) as client:
        for call in (
            lambda: client.init_data("t", (5, 4), torch.float32, optimizer=SGD(lr=1.0)),
            lambda: client.push("t", IDS, torch.ones(5, 4)),
            lambda: client.update("t", IDS, torch.ones(5, 4)),
            lambda: client.pull("t", IDS),
            lambda: client.exists("t", IDS),
            lambda: client.stats("t"),
            lambda: CliRunner().invoke(app, ["top", address, "--timeout", "2"]),
            lambda: client.delete("t", IDS[:1]),
            lambda: client.save("monday", overwrite=True),
            lambda: client.load("monday"),
        ):
            with suppress(Exception):  # whatever a hostile server makes of a call
                call()


@pytest.mark.parametrize(
    "method",
    [
        name
        for name in SERVICE.methods_by_name
        if list(text_fields(SERVICE.methods_by_name[name].output_type))
    ],
)
def test_no_reply_leads_a_client_to_other_files(
    sandbox: Sandbox, names: HostileNames, method: str
) -> None:
    server = Server(sandbox)
    hostile = HostileServer(server)
    paths = list(text_fields(SERVICE.methods_by_name[method].output_type))
    _use(hostile.address)
    for path in paths:
        for name in (names.escape().encode(), names.bytes()):
            hostile.method, hostile.path, hostile.name = method, path, name
            with sandbox.watched():
                _use(hostile.address)
    hostile.close()
    server.close()
    # by clients of one server
    never_called = ("Resume", "Replicate", "ReadFile", "Ids")
    assert hostile.changed or method in never_called
