"""A follower leaves a lost history, reads again after a bad read, ends at once, and knows how old its rows are."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch

from torchrec_recstore.inference import DeltaPublisher, Follower
from torchrec_recstore.utils import RecStoreWarning

from ..redis_server import RedisServer
from .test_publish import Clicks, assert_follows, change, publish

DELTAS = 8


def emptied(place: str, request: pytest.FixtureRequest) -> None:
    """Removes everything that has been published."""
    if "://" in place:
        server: RedisServer = request.getfixturevalue("server")
        with server.client() as client:
            client.flushall()
    else:
        shutil.rmtree(place)


@pytest.mark.parametrize("lost", ["all publications", "the last publications"])
def test_a_history_that_forked(lost: str, place: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The trainer continues from an old checkpoint, and the place has lost what was published after the checkpoint."""
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
                shutil.copytree(place, tmp_path / "backup", ignore=shutil.ignore_patterns(".*"))
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
        with DeltaPublisher(checkpoint, place, every_s=0, full_every_s=1e6) as publisher:
            for step in range(1 + DELTAS):
                publish(publisher)
                change(checkpoint, 100 + step)
            publish(publisher)
            with pytest.warns(RecStoreWarning, match="the publisher has begun another history"):
                assert follower.poll()
            assert_follows(follower, checkpoint, tmp_path)
            assert follower.model.recstore_rows("t").shape != lost_rows.shape or not torch.equal(
                follower.model.recstore_rows("t"), lost_rows
            )
            state = follower.state
            assert (state.history_changes, state.problem, state.versions_behind) == (1, None, 0)
            change(checkpoint, 1)
            publish(publisher)
            assert follower.poll()
            assert follower.state.history_changes == 1
