"""A follower leaves a lost history, reads again after a bad read, ends at once, and
knows how old its rows are.
"""

from __future__ import annotations

import copy
import re
import resource
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import nn

from torchrec_recstore.inference import DeltaPublisher, Follower, export_for_inference
from torchrec_recstore.utils import RecStoreWarning
from torchrec_recstore_serving.publish import bad_reads
from torchrec_recstore_serving.publish import publisher as publisher_module
from torchrec_recstore_serving.publish.destinations import publications_at
from torchrec_recstore_serving.publish.publications import Kind

from ...processes import ForkedCommand, run_forked_command
from ...redis_server import RedisServer, free_port
from ..predict.test_access import scraped
from ..predict.test_predictor import FollowCommand
from .test_publisher import Clicks, assert_follows, change, publish, trained, wait_for

DELTAS = 8
SERVING = health_pb2.HealthCheckResponse.SERVING


def emptied(place: str, request: pytest.FixtureRequest) -> None:
    """Removes everything that has been published."""
    if "://" in place:
        server: RedisServer = request.getfixturevalue("server")
        with server.client() as client:
            client.flushall()
    else:
        shutil.rmtree(place)


@pytest.mark.parametrize("lost", ["all publications", "the last publications"])
def test_a_history_that_forked(
    lost: str, place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The trainer continues from an old checkpoint, and the place has lost what was
    published after the checkpoint.
    """
    if lost != "all publications" and "://" in place:
        pytest.skip("the backup is one of a directory")
    torch.manual_seed(0)
    model = Clicks()
    change(model, -1)
    checkpoint = copy.deepcopy(model)
    with Follower(place) as follower:
        publisher = DeltaPublisher(model, place, every_s=0, full_every_s=1e6)
        for step in range(4):
            publish(publisher)
            if step == 1 and "://" not in place:
                shutil.copytree(
                    place, tmp_path / "backup", ignore=shutil.ignore_patterns(".*")
                )
            change(model, step)
        with torch.no_grad():
            model(torch.tensor([[987_654]]))
        assert follower.poll()
        assert (follower.state.number, follower.state.history_changes) == (4, 0)
        lost_rows = follower.model.recstore_rows("t")
        publisher._release()  # It dies, and publishes nothing more.
        emptied(place, request)
        if lost == "the last publications":
            shutil.copytree(tmp_path / "backup", place)
        with DeltaPublisher(
            checkpoint, place, every_s=0, full_every_s=1e6
        ) as publisher:
            for step in range(1 + DELTAS):
                publish(publisher)
                change(checkpoint, 100 + step)
            publish(publisher)
            with pytest.warns(
                RecStoreWarning, match="the publisher has begun another history"
            ):
                assert follower.poll()
            assert_follows(follower, checkpoint, tmp_path)
            assert follower.model.recstore_rows(
                "t"
            ).shape != lost_rows.shape or not torch.equal(
                follower.model.recstore_rows("t"), lost_rows
            )
            state = follower.state
            assert (state.history_changes, state.problem, state.versions_behind) == (
                1,
                None,
                0,
            )
            change(checkpoint, 1)
            publish(publisher)
            assert follower.poll()
            assert follower.state.history_changes == 1


def test_the_command_counts_a_lost_history(tmp_path: Path) -> None:
    """A trainer that is killed has left its publications, which are then deleted."""
    place, port = tmp_path / "published", free_port()
    code = (
        "import sys, time\nfrom tests.serving.publish.test_publisher import DeltaPublisher,"
        " change, publish, trained\nmodel, publisher = trained(), None\npublisher ="
        " DeltaPublisher(model, sys.argv[1], every_s=0)\nfor step in range(4):\n   "
        " change(model, step)\n    publish(publisher)\nprint('published',"
        " flush=True)\ntime.sleep(600)\n"
    )
    trainer = ForkedCommand(["-c", code, str(place)])
    command = FollowCommand(
        place,
        "--http",
        "127.0.0.1:0",
        "--poll-every",
        "0.02",
        "--metrics",
        f"127.0.0.1:{port}",
    )
    try:
        wait_for(
            lambda: "published" in trainer.stdout or not trainer.process.is_alive()
        )
        assert "published" in trainer.stdout, trainer.stderr
        wait_for(lambda: command.http("/state")[1]["number"] == 4)
        trainer.kill()
        model = trained()
        with DeltaPublisher(
            model, tmp_path / "new", every_s=0, full_every_s=1e6
        ) as publisher:
            for step in range(1 + DELTAS):
                change(model, step)
                publish(publisher)
        place.rename(tmp_path / "lost")
        (tmp_path / "new").rename(place)
        wait_for(lambda: command.http("/state")[1]["number"] == 1 + DELTAS)
        state = command.http("/state")[1]
        assert (state["history_changes"], state["problem"]) == (1, None)
        assert scraped(port)["recstore_follow_history_changes_total"] == 1
        export_for_inference(model, tmp_path / "full.pt", index="hash")
        assert (
            state["version"] == torch.jit.load(tmp_path / "full.pt").recstore_version()
        )
    finally:
        trainer.kill()
        command.command.terminate()
        assert command.command.wait(60) == 0, command.command.stderr


def test_an_old_record_of_the_newest_publication(tmp_path: Path) -> None:
    """The cache of a network's file system may bring back an old file: the rows do not
    go back.
    """
    place, model = tmp_path / "published", trained()
    with (
        DeltaPublisher(model, place, every_s=0, full_every_s=1e6) as publisher,
        Follower(place) as follower,
    ):
        publish(publisher)
        old = (place / "latest.json").read_bytes()
        change(model, 0)
        publish(publisher)
        assert follower.poll()
        new = (place / "latest.json").read_bytes()
        (place / "latest.json").write_bytes(old)
        assert not follower.poll()
        assert (follower.state.number, follower.state.history_changes) == (2, 0)
        (place / "latest.json").write_bytes(new)
        assert not follower.poll()
        assert_follows(follower, model, tmp_path)
        assert follower.state.fulls_loaded == 1


def test_a_pinned_publication(place: str, tmp_path: Path) -> None:
    """A pinned follower serves what was published under its number, and nothing before
    or after it.
    """
    model, versions = trained(), {}
    with DeltaPublisher(model, place, every_s=0, full_every_s=1e6) as publisher:
        for number in range(1, 7):
            if number == 4:
                publisher._writer._next_full = 0  # type: ignore[union-attr]
            publish(publisher)
            export_for_inference(model, tmp_path / "full.pt", index="hash")
            versions[number] = torch.jit.load(tmp_path / "full.pt").recstore_version()
            change(model, number)
        for number, version in versions.items():
            with Follower(place, pinned=number) as follower:
                assert follower.poll()
                state = follower.state
                assert (state.version, state.number, state.pinned, state.newest) == (
                    version,
                    number,
                    number,
                    6,
                )
                assert (state.fulls_loaded, state.deltas_applied) == (
                    1,
                    (number - 1) % 3,
                )
                assert (state.problem, state.waits_for) == (None, "nothing")
        with Follower(place, pinned=8) as follower:
            with pytest.warns(
                RecStoreWarning, match="publication 8 has not been published yet"
            ):
                assert not follower.poll()
            for number in (7, 8, 9):
                publish(publisher)
                change(model, number)
                assert follower.poll() == (number == 8)
                assert (follower.version is None, follower.state.number) == (
                    number < 8,
                    0 if number < 8 else 8,
                )
                assert follower.state.waits_for == (
                    "publication 8" if number < 8 else "nothing"
                )
            assert follower.versions_behind == 1
        publisher._writer._next_full = 0  # type: ignore[union-attr]
        change(model, 10)
        publish(publisher)
        with (
            Follower(place, pinned=3) as follower,
            pytest.warns(
                RecStoreWarning,
                match="publication 3 has been deleted, because there are newer",
            ),
        ):
            assert not follower.poll()
    with pytest.raises(
        ValueError, match="pinned must be the number of a publication, from 1, got 0"
    ):
        Follower(place, pinned=0)


def next_read(follower: Follower, pauses: list[float]) -> bool:
    """Polls when the file that could not be used is read again; before this time, a
    poll does not read it.
    """
    said = re.search(r"again in ([\d.]+) s", follower.state.waits_for)
    if said is not None:
        pauses.append(float(said[1]))
        assert not follower.poll(), "it is not read yet"
        wait_for(lambda: "again in 0.0 s" in follower.state.waits_for)
        time.sleep(0.05)
    return follower.poll()


def test_a_read_that_fails_for_a_moment(tmp_path: Path) -> None:
    """A file that is missing or not whole yet is read again, with growing pauses."""
    place, model = tmp_path / "published", trained()
    with (
        DeltaPublisher(model, place, every_s=0, full_every_s=1e6) as publisher,
        Follower(place) as follower,
    ):
        publish(publisher)
        assert follower.poll()
        change(model, 0)
        publish(publisher)
        delta = place / "000000000002.delta"
        whole = delta.read_bytes()
        pauses: list[float] = []
        for present in (None, b"", whole[: len(whole) // 2], whole[:-1]):
            delta.unlink()
            if present is not None:
                delta.write_bytes(present)
            else:
                delta.mkdir()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RecStoreWarning)
                assert not next_read(follower, pauses)
            assert "publication 2 cannot be applied: " in str(follower.state.problem)
            assert str(delta) in str(follower.state.problem)
            assert follower.state.waits_for.startswith(
                "delta 2, which is read again in "
            )
            if present is None:
                delta.rmdir()
                delta.touch()
        assert pauses == sorted(pauses)
        assert pauses[-1] > 2 * pauses[0]
        delta.write_bytes(whole)
        assert next_read(follower, pauses)
        assert_follows(follower, model, tmp_path)
        assert (follower.state.problem, follower.state.waits_for) == (
            None,
            "publication 3",
        )


def test_a_moment_without_memory(tmp_path: Path) -> None:
    # In a process of its own, whose heap has no room that other tests have left.
    call = (
        f"from {__name__} import *;"
        f" read_without_memory(Path({str(tmp_path / 'published')!r}))"
    )
    done = run_forked_command(["-c", call], timeout_s=200)
    assert done.returncode == 0, done.stderr


def read_without_memory(place: Path) -> None:
    """A follower refuses a delta for which there is no memory, and applies it when
    there is.
    """
    model = trained()
    model.dense = dense = nn.Parameter(torch.zeros(100_000_000 // 4))
    with Follower(place) as follower:
        with DeltaPublisher(model, place, every_s=0, full_every_s=1e6) as publisher:
            publish(publisher)
            assert follower.poll()
            with torch.no_grad():
                dense.add_(1)
            publish(publisher)
        # The publisher has ended, so that its thread frees nothing from here on.
        used = (
            int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1])
            * 1024
        )  # type: ignore[index]
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + 20_000_000, before[1]))
        try:
            with pytest.warns(
                RecStoreWarning, match="publication 2 cannot be applied: .*[mM]emory"
            ):
                assert not follower.poll()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        assert next_read(follower, [])
        assert follower.state.problem is None


@pytest.mark.parametrize("kind", ["delta", "program", "full"])
def test_a_checksum_that_is_wrong_again_and_again(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damaged bytes are given up after eight reads, until the next full export."""
    monkeypatch.setattr(bad_reads, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(bad_reads, "_LONGEST_PAUSE_S", 0.02)
    place, model = tmp_path / "published", trained()
    with (
        DeltaPublisher(model, place, every_s=0, full_every_s=1e6) as publisher,
        Follower(place) as follower,
    ):
        publish(publisher)
        if kind == "delta":
            assert follower.poll()
            change(model, 0)
            publish(publisher)
        number: int = 2 if kind == "delta" else 1
        file = publications_at(place).path_of(number, kind)
        good = file.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecStoreWarning)
            for bit, reads, end in (
                (1, 5, False),
                (2, 5, False),
                (2, 3, True),
            ):  # The bytes change once, as in a file that is being copied.
                file.write_bytes(good[:-100] + bytes([good[-100] ^ bit]) + good[-99:])
                for _ in range(reads):
                    next_read(follower, [])
                assert f"{file.name} is damaged: its checksum does not fit" in str(
                    follower.state.problem
                )
                assert ("again in" in follower.state.waits_for) == (not end)
        assert "in 8 reads" in str(follower.state.problem)
        assert follower.state.waits_for == "a full export"
        file.write_bytes(good)
        time.sleep(0.1)
        assert not follower.poll(), "it is not read again"
        publisher._writer._next_full = 0  # type: ignore[union-attr]
        change(model, 1)
        publish(publisher)
        assert follower.poll()
        assert_follows(follower, model, tmp_path)
        assert follower.state.problem is None


def test_close_does_not_wait_for_the_next_look(
    place: str, request: pytest.FixtureRequest
) -> None:
    with DeltaPublisher(trained(), place, every_s=0) as publisher:
        publish(publisher)
        for paused in (False, True) if "://" in place else (False,):
            follower = Follower(place)
            follower.start(every_s=3600)  # longer than pytest waits
            wait_for(lambda follower=follower: follower.version is not None)  # type: ignore[misc]
            server: RedisServer | None = (
                request.getfixturevalue("server") if "://" in place else None
            )
            try:
                if server is not None and paused:
                    server.pause()
                    time.sleep(0.1)
                follower.close()
            finally:
                if server is not None:
                    server.resume()
            assert follower.model.recstore_version() == follower.version


def test_sigterm_does_not_wait_for_the_next_look(place: str) -> None:
    with DeltaPublisher(trained(), place, every_s=0) as publisher:
        publish(publisher)
    command = FollowCommand(
        place,
        "--http",
        "127.0.0.1:0",
        "--poll-every",
        "3600",
        "--report-every",
        "3600",
    )
    wait_for(lambda: command.http("/health")[0] == 200)
    command.command.terminate()
    assert command.command.wait(280) == 0, command.command.stderr
    assert command.lines()[-1]["event"] == "stopped"


class ClockAhead:
    """The clock of a machine that is an hour ahead."""

    monotonic, sleep = staticmethod(time.monotonic), staticmethod(time.sleep)

    @staticmethod
    def time() -> float:
        return time.time() + 3600


def test_a_dead_publisher_with_a_clock_ahead(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health checks fail when the rows are too old, whatever the clock of the publisher
    says.
    """
    monkeypatch.setattr(publisher_module, "time", ClockAhead)
    model, port = trained(), free_port()
    command = FollowCommand(
        place,
        "--http",
        "127.0.0.1:0",
        "--poll-every",
        "0.02",
        "--max-age",
        "5",
        "--metrics",
        f"127.0.0.1:{port}",
    )
    health = health_pb2_grpc.HealthStub(
        grpc.insecure_channel(command.serving["address"])
    )
    try:
        assert command.http("/health") == (
            503,
            {"serving": False, "reason": "no full export has been loaded yet"},
        )
        with DeltaPublisher(model, place, every_s=0) as publisher:
            publish(publisher)
            wait_for(
                lambda: (
                    command.http("/health") == (200, {"serving": True, "reason": None})
                )
            )
            wait_for(
                lambda: health.Check(health_pb2.HealthCheckRequest()).status == SERVING
            )
            end = time.monotonic() + 6
            # A model that does not change is fresh while the publisher says so.
            while time.monotonic() < end:
                publish(publisher)
                assert command.http("/health")[0] == 200
            assert command.http("/state")[1]["publication_age_s"] == 0
        wait_for(lambda: command.http("/health")[0] == 503)
        document = command.http("/health")[1]
        assert re.match(
            r"the rows are older than --max-age 5: 0\.0 s by the clock of the"
            r" publisher, and the last news of them "
            r"arrived [\d.]+ s ago; the follower waits for publication 2",
            document["reason"],
        )
        wait_for(
            lambda: health.Check(health_pb2.HealthCheckRequest()).status != SERVING
        )
        state, metrics = command.http("/state")[1], scraped(port)
        assert (state["not_ready"] is None, state["waits_for"]) == (
            False,
            "publication 2",
        )
        assert state["seconds_behind"] == state["arrival_age_s"] > 5
        assert (
            metrics["recstore_follow_arrival_age_s"]
            == metrics["recstore_follow_seconds_behind"]
            > 5
        )
        assert (
            metrics["recstore_follow_publication_age_s"],
            metrics["recstore_follow_not_ready"],
        ) == (0, 1)
        assert (
            command.http("/predict", {"arguments": {"ids": [[1, 2, 3, 4]]}})[0] == 200
        ), "it still answers"
        monkeypatch.undo()
        with DeltaPublisher(model, place, every_s=0) as publisher:
            publish(publisher)
            wait_for(lambda: command.http("/health")[0] == 200)
    finally:
        command.command.terminate()
        assert command.command.wait(60) == 0, command.command.stderr


def delete(place: str, what: str, server: Callable[[], RedisServer]) -> None:
    """Deletes a part of what has been published, as an operator or another program
    might do.
    """
    if "://" not in place:
        names = {
            "entries": "000000000002.json",
            "a full export": "000000000001.pt",
            "a delta": "000000000002.delta",
        }
        (Path(place) / names[what]).unlink()
        return
    with server().client() as client:
        if what == "entries":
            client.xtrim("clicks", maxlen=1, approximate=False)
        elif what == "a full export":
            assert client.delete("clicks:1:full:0") == 1
        else:
            assert client.delete("clicks:2:delta:0") == 1


@pytest.mark.parametrize("changed", [True, False])
@pytest.mark.parametrize("what", ["entries", "a full export", "a delta"])
def test_publications_that_others_delete(
    what: str,
    changed: bool,
    place: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "://" in place:
        monkeypatch.setattr(
            "torchrec_recstore_serving.publish.redis_publications._INLINE_BYTES", 0
        )
    model = trained()
    with DeltaPublisher(model, place, every_s=0, full_every_s=1e6) as publisher:
        for step in range(3):
            publish(publisher)
            change(model, step)
        publish(publisher)
        delete(place, what, lambda: request.getfixturevalue("server"))
        if changed:
            change(model, 3)
        with pytest.warns(
            RecStoreWarning, match="has lost publications: a full export is published"
        ):
            publish(publisher)
        with Follower(place) as follower:
            assert follower.poll()
            assert_follows(follower, model, tmp_path)
        change(model, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RecStoreWarning)
            publish(publisher)
