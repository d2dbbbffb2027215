"""A publisher, a follower or Redis is killed; afterwards the follower is equal to a
full export, to the bit.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torchrec_recstore.inference import DeltaPublisher, Follower, export_for_inference
from torchrec_recstore.utils import RecStoreWarning
from torchrec_recstore_serving.publish.publications import latest_of, publication_of

from ...processes import run_forked_command
from ...redis_server import RedisServer, needs_redis, redis_server
from ..predict.test_predictor import FollowCommand
from .test_publisher import assert_follows, change, publish, trained, wait_for

# What a follower may say: a publisher that starts again has no delta, and trims what a
# slow follower has not read.
EXPECTED = re.compile(
    "because the publisher began anew|No such file|has no publication"
)


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory if it can be: each fsync would wait for what other tests write
    to the disk.

    A program that is killed loses nothing in memory either.
    """
    if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 2**28:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            yield Path(folder)
    else:
        yield tmp_path


@pytest.fixture
def server(memory_folder: Path) -> Iterator[RedisServer]:
    arguments = ("--appendonly", "yes", "--appendfsync", "always")
    with redis_server(
        memory_folder / "redis", *arguments, password="correct-horse"
    ) as started:
        yield started


@pytest.fixture(params=["directory", pytest.param("redis", marks=needs_redis)])
def place(request: pytest.FixtureRequest, memory_folder: Path) -> str:
    if request.param == "directory":
        return str(memory_folder / "published")
    return f"{request.getfixturevalue('server').url}/0?stream=clicks"


LATEST = {"number": 3, "version": "v", "time": 1.0, "fulls": [1, 3], "run": "r"}
PUBLICATION = {
    "number": 3,
    "version": "v",
    "base": None,
    "time": 1.0,
    "full": True,
    "run": "r",
}
NO_NUMBERS = ["../../victim", "3", -1, 1.5, True, None, 10**12, [3], {"a": 1}]


@pytest.mark.parametrize("number", NO_NUMBERS)
@pytest.mark.parametrize("field", ["number", "fulls"])
def test_a_record_with_a_number_that_is_none(field: str, number: object) -> None:
    """The number of a publication is a part of the path to which a follower copies its
    files.
    """
    latest = {**LATEST, field: [1, number] if field == "fulls" else number}
    with pytest.raises(
        ValueError, match="the place is not what a DeltaPublisher writes"
    ):
        latest_of(json.dumps(latest), "the place")
    if field == "number":
        with pytest.raises(
            ValueError, match="the place is not what a DeltaPublisher writes"
        ):
            publication_of(json.dumps({**PUBLICATION, field: number}), 3, "the place")


@pytest.mark.parametrize("field", ["version", "run", "time", "full", "base"])
@pytest.mark.parametrize("value", [[], {}, ["x"]])
def test_a_record_with_a_field_of_another_type(field: str, value: object) -> None:
    with pytest.raises(
        ValueError, match="the place is not what a DeltaPublisher writes"
    ):
        publication_of(json.dumps({**PUBLICATION, field: value}), 3, "the place")


@pytest.mark.parametrize("time", [math.nan, math.inf, -math.inf, 10**400])
def test_a_record_with_a_time_that_is_not_finite(time: float) -> None:
    with pytest.raises(
        ValueError, match="the place is not what a DeltaPublisher writes: time is"
    ):
        publication_of(json.dumps({**PUBLICATION, "time": time}), 3, "the place")
    with pytest.raises(
        ValueError, match="the place is not what a DeltaPublisher writes: time is"
    ):
        latest_of(json.dumps({**LATEST, "time": time}), "the place")


def test_a_record_that_is_right() -> None:
    assert latest_of(json.dumps(LATEST), "the place").fulls == (1, 3)
    assert publication_of(json.dumps(PUBLICATION), 3, "the place").full


def kill_publishers(place: str, folder: Path, kills: int) -> None:
    with warnings.catch_warnings(record=True) as warned, Follower(place) as follower:
        warnings.simplefilter("always")
        follower.start(0.01)
        arguments = [
            "-m",
            "tests.serving.publish.dying_publisher",
            place,
            str(folder),
            str(kills),
        ]
        # On a disk that other tests write to, four publications have taken 24 s.
        done = run_forked_command(arguments, timeout_s=80 * (kills + 1))
        assert done.returncode == 0, done.stderr
        final = torch.jit.load(folder / "final.pt")
        wait_for(lambda: follower.version == final.recstore_version())
        assert torch.equal(follower.model.recstore_rows("t"), final.recstore_rows("t"))
        assert torch.equal(follower.model.recstore_ids("t"), final.recstore_ids("t"))
    told = [
        str(each.message)
        for each in warned
        if issubclass(each.category, RecStoreWarning)
    ]
    assert [each for each in told if not EXPECTED.search(each)] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_publishers_that_are_killed(place: str, tmp_path: Path) -> None:
    kill_publishers(place, tmp_path, kills=8)


def kill_redis(server: RedisServer, folder: Path, kills: int) -> None:
    """Kills the server at random moments while publications are written and read, and
    starts it again.
    """
    place = f"{server.url}/0?stream=clicks"
    model = trained()
    moments = random.Random(0)
    with warnings.catch_warnings(record=True) as warned, Follower(place) as follower:
        warnings.simplefilter("always")
        with DeltaPublisher(model, place, every_s=0, full_every_s=0.1) as publisher:
            publish(publisher)
            follower.start(0.01)
            for kill in range(kills):
                change(model, kill)
                publisher.step()
                threading.Event().wait(moments.uniform(0, 0.05))
                server.kill()
                server.start()
                publish(publisher)
        # The end of the block has published the rest.
        export_for_inference(model, folder / "full.pt", index="hash")
        version = torch.jit.load(folder / "full.pt").recstore_version()
        wait_for(lambda: follower.version == version)
        assert_follows(follower, model, folder)
    told = [
        str(each.message)
        for each in warned
        if issubclass(each.category, RecStoreWarning)
    ]
    # The append-only file has every publication, so that nothing is lost.
    assert [
        each for each in told if not re.search("cannot be read at the moment", each)
    ] == []


@needs_redis
def test_a_redis_server_that_is_killed(server: RedisServer, tmp_path: Path) -> None:
    kill_redis(server, tmp_path, kills=2)


@needs_redis
@pytest.mark.slow
def test_a_redis_server_that_is_killed_often(
    server: RedisServer, tmp_path: Path
) -> None:
    kill_redis(server, tmp_path, kills=15)


@pytest.mark.slow
def test_a_follower_that_is_killed(place: str, tmp_path: Path) -> None:
    """``recstore follow`` keeps nothing: the next one begins with the newest full
    export and catches up.
    """
    model = trained()
    with DeltaPublisher(model, place, every_s=0, full_every_s=1e6) as publisher:
        publish(publisher)
        for kill in range(3):
            command = FollowCommand(
                place, "--poll-every", "0.01", "--report-every", "0.05"
            )
            for step in range(3):
                change(model, 3 * kill + step)
                publish(publisher)
            command.command.kill()
    export_for_inference(model, tmp_path / "full.pt", index="hash")
    version = torch.jit.load(tmp_path / "full.pt").recstore_version()
    command = FollowCommand(place, "--poll-every", "0.01", "--report-every", "0.05")
    try:
        wait_for(lambda: command.lines()[-1].get("version") == version)
        state = command.lines()[-1]
        assert (state["fulls_loaded"], state["deltas_applied"], state["problem"]) == (
            1,
            9,
            None,
        )
    finally:
        command.command.terminate()
        assert command.command.wait(60) == 0
