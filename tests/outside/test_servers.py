"""Hostile names in all fields of all calls never lead a server out of its data
directory.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from tests.outside.names import ROUNDS, SEED
from tests.outside.sandbox import Sandbox
from tests.outside.servers import SERVICE, Fuzzer, Server, hostile_fields
from tests.redis_server import needs_redis, redis_server
from torchrec_recstore_service.server import received, reservations
from torchrec_recstore_service.server.pair import PairOptions
from torchrec_recstore_service.server.save_names import SaveId
from torchrec_recstore_service.server.set_calls import SetCalls
from torchrec_recstore_service.wire import recstore_pb2 as pb

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture
def sandbox(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    monkeypatch.setattr(reservations, "UNPREPARED_S", 0.0)  # no save waits for another
    monkeypatch.setattr(reservations, "SILENT_S", 0.0)
    monkeypatch.setattr(received, "GIVES_WAY_S", 0.0)
    return sandbox


def _fuzz(sandbox: Sandbox, make_server: Callable[[], Server], rounds: int) -> Fuzzer:
    print(f"RECSTORE_TEST_SEED={SEED} RECSTORE_TEST_NAMES={rounds}")
    fuzzer = Fuzzer(sandbox, random.Random(SEED), make_server)
    try:
        assert fuzzer.accepted() == {method.name for method in SERVICE.methods}, (
            "add a journey"
        )
        for number in range(rounds):
            fuzzer.round(number)
    finally:
        fuzzer.close()
    return fuzzer


def test_no_field_of_a_call_leads_out_of_the_data_directory(sandbox: Sandbox) -> None:
    rounds = max(ROUNDS // 2, len(hostile_fields()))
    results = _fuzz(sandbox, lambda: Server(sandbox), rounds).results
    assert results.fields.keys() == set(hostile_fields())
    assert {"OK", "INVALID_ARGUMENT"} <= results.statuses.keys()
    print(dict(results.statuses))


@needs_redis
def test_no_field_of_a_call_to_a_pair_leads_out(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    with redis_server(tmp_path / "redis") as redis:
        options = PairOptions("pair", redis.url, "127.0.0.1:0")
        results = _fuzz(
            sandbox, lambda: Server(sandbox, options), len(hostile_fields())
        ).results
    replicated = {path for method, path in hostile_fields() if method == "Replicate"}
    assert all(results.fields["Replicate", path] for path in replicated)
    assert {"OK", "INVALID_ARGUMENT"} <= results.statuses.keys()


@needs_redis
@pytest.mark.parametrize("address", ["unix:/run/x:80", "unix-abstract:x:80"])
@pytest.mark.parametrize("field", ["address", "rows"])
def test_a_server_calls_no_socket_that_a_client_names(
    sandbox: Sandbox, tmp_path: Path, field: str, address: str
) -> None:
    addresses = {"address": "127.0.0.1:1", "rows": "127.0.0.1:1", field: address}
    request = pb.ReplicateRequest(
        phase=pb.ReplicateRequest.COPY, server="other", **addresses
    )
    with redis_server(tmp_path / "redis") as redis:
        server = Server(sandbox, PairOptions("pair", redis.url, "127.0.0.1:0"))
        try:
            code, details, _ = server.call("Replicate", [request.SerializeToString()])
        finally:
            server.close()
    assert code is grpc.StatusCode.INVALID_ARGUMENT, details
    assert "must be HOST:PORT" in details


def test_the_fuzzer_finds_names_that_nothing_has_checked(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check of the ids of saves, a client could delete a directory beside
    the server's.
    """
    monkeypatch.setattr(SaveId, "check", lambda name: None)
    with pytest.raises(AssertionError, match=r"created: \[|outside of the directory"):
        _fuzz(sandbox, lambda: Server(sandbox), len(hostile_fields()))


def test_the_fuzzer_finds_the_deletion_of_a_directory_beside(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One unchecked call is enough: the abort of a save discards what was received for
    it.
    """
    checked_save = SetCalls.save

    def save(
        calls: SetCalls, request: pb.SaveRequest, is_active: Callable[[], bool]
    ) -> pb.SaveReply:
        if request.phase == pb.SaveRequest.ABORT:
            received_for_it = calls._directory.path / f".received-{request.save.id}"
            shutil.rmtree(received_for_it, ignore_errors=True)
            return pb.SaveReply()
        return checked_save(calls, request, is_active)

    monkeypatch.setattr(SetCalls, "save", save)
    with pytest.raises(AssertionError, match=r"x/(\.\./)+victim.*deleted: .*/victim"):
        _fuzz(sandbox, lambda: Server(sandbox), len(hostile_fields()))
