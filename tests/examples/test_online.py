"""The parts of online training: generated clicks, metrics by window, streams, the
offset in a checkpoint, the page.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from common.command import DataError
from common.run import locked_folder
from online.clicks import (
    ANSWERED,
    CLICK,
    NO_ANSWER,
    NOT_ASKED,
    REFUSED,
    Clicks,
    generated,
)
from online.generator import generate
from online.page import PAINTS, live_windows, page
from online.settings import Settings
from online.streams import ClickStream, FileStream, KafkaStream, RedisStream, read_batch
from online.supervisor import FINISHED, STATE
from online.trainer import train
from online.windows import MODELS, STEP_S, Windows

from torchrec_recstore.checkpoint.compare import compare_chains
from torchrec_recstore.checkpoint.info import read_chain
from torchrec_recstore.inference import Follower

from ..kafka_broker import kafka_broker
from ..redis_server import RedisServer, needs_redis, redis_server
from .commands import run_forked

SMALL = {
    "history": 1024,
    "clicks": 4000,
    "rate": 100,
    "window": 1000,
    "checkpoint_every": 3,
    "expire_s": 8,
    "paced": False,
}
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


def settings(folder: Path, **changes: object) -> Settings:
    folder.mkdir(exist_ok=True)
    made = Settings(**{"folder": folder, "url": None, **SMALL, **changes})  # type: ignore[arg-type]
    made.write()
    assert Settings.read(folder) == made
    return made


def test_the_password_of_the_server_is_in_no_page(tmp_path: Path) -> None:
    made = settings(tmp_path, url="redis://me:secret@example.com:6379/0")
    assert "secret" not in str(made.shown())
    assert (tmp_path / "settings.json").stat().st_mode & 0o777 == 0o600


def test_errors_before_the_start_are_one_line(tmp_path: Path) -> None:
    done = run_forked("online/run.py", "--folder", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert (
        f"error: {tmp_path} exists and has no run to continue: choose a new folder with"
        " --folder" in done.stderr
    )
    settings(tmp_path)
    (tmp_path / STATE).write_text(json.dumps({"status": FINISHED}))
    done = run_forked("online/run.py", "--folder", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert (
        f"error: {tmp_path}: this run has finished: choose a new folder with --folder"
        in done.stderr
    )
    with locked_folder(tmp_path):
        done = run_forked("online/run.py", "--folder", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"error: {tmp_path}: another run is writing there" in done.stderr
    with pytest.raises(DataError, match="the Redis server cannot be used: "):
        RedisStream("redis://127.0.0.1:1", "clicks").problems()


@needs_redis
def test_a_server_that_may_lose_clicks_is_told(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server:
        stream = RedisStream(server.url, "clicks")
        first, second = stream.problems()
        assert "appendonly no" in first
        assert "appendfsync everysec" in second
        stream.append(1, generated(settings(tmp_path / "run"), 1, 1))
        with pytest.raises(DataError, match="the stream clicks exists"):
            stream.problems()
    with redis_server(tmp_path / "durable", *DURABLE) as server:
        assert RedisStream(server.url, "clicks").problems() == []


def without_scores(clicks: Clicks) -> list[tuple[object, ...]]:
    return [tuple(click)[:4] for click in clicks.tolist()]


def test_a_click_depends_on_its_number_only(tmp_path: Path) -> None:
    made = settings(tmp_path)
    whole = generated(made, 1, 5000)
    cuts = [0, 1, 700, 1024, 1025, 3500, 5000]
    parts = [generated(made, first + 1, last) for first, last in pairwise(cuts)]
    assert without_scores(np.concatenate(parts)) == without_scores(whole)
    assert (np.diff(whole["time_ms"]) == 10).all()  # 100 clicks a second
    assert whole["time_ms"][made.history] == made.start_ms
    assert set(np.unique(whole["clicked"])) == {0, 1}
    # they vanish
    assert not set(whole["item"]) & set(
        generated(replace(made, history=0), 10**6, 10**6 + 5000)["item"]
    )
    assert without_scores(generated(replace(made, seed=1), 1, 5000)) != without_scores(
        whole
    )
    assert len(generated(made, 8, 7)) == 0


def plain_auc(scores: list[float], labels: list[int]) -> float:
    """The share of pairs of a click and a non-click in which the click has the higher
    score.

    Ties count half.
    """
    pairs = [
        (a > b) + (a == b) / 2
        for a, x in zip(scores, labels, strict=True)
        if x
        for b, y in zip(scores, labels, strict=True)
        if not y
    ]
    return sum(pairs) / len(pairs)


def test_metrics_by_window_are_those_of_a_plain_computation() -> None:
    random = np.random.default_rng(0)
    clicks = np.zeros(330, CLICK)
    clicks["time_ms"] = np.arange(330)
    clicks["clicked"] = random.random(330) < 0.3
    clicks["served"] = random.normal(size=330).round(1)  # with ties
    clicks["served"][:60] = np.nan
    clicks["frozen"] = np.nan
    clicks["clicked"][200:300] = 0
    logits = torch.from_numpy(random.normal(size=330)).float()
    windows = Windows(100)
    for begin, end in ((0, 30), (30, 250), (250, 251), (251, 330)):
        windows.add(clicks[begin:end], logits[begin:end])
        resumed = Windows(100)
        resumed.load_state(windows.state())
        windows = resumed
    assert [(each["last"], each["time_ms"]) for each in windows.done] == [
        (100, 99),
        (200, 199),
        (300, 299),
    ]
    for number, window in enumerate(windows.done[:2]):
        part = slice(number * 100, number * 100 + 100)
        for name, scores in (("trained", logits.numpy()), ("served", clicks["served"])):
            there = ~np.isnan(scores[part])
            scored, labels = (
                scores[part][there].astype(float),
                clicks["clicked"][part][there],
            )
            assert window[name]["auc"] == pytest.approx(
                plain_auc(scored.tolist(), labels.tolist()), abs=1e-6
            )
            expected = (1 / (1 + np.exp(-scored))).sum() / labels.sum()
            assert window[name]["calibration"] == pytest.approx(expected, abs=1e-6)
    assert [window["served"]["answered"] for window in windows.done] == [0.4, 1.0, 1.0]
    assert windows.done[0]["frozen"] == {
        "answered": 0.0,
        "auc": None,
        "calibration": None,
    }
    assert windows.done[2]["trained"]["auc"] is None  # no click in this window


def test_a_click_without_an_answer_counts_in_the_percentiles() -> None:
    live = np.zeros(1000, CLICK)
    live["served_outcome"], live["frozen_outcome"] = ANSWERED, ANSWERED
    live["age"], live["waited"] = 2.0, 0.2
    live["served_outcome"][600:] = NO_ANSWER  # the follower hangs
    live["age"][600:] = 2 + np.arange(400) / 20
    live["waited"][600:] = 1.1
    live["served_outcome"][900:], live["waited"][900:] = NOT_ASKED, 3.0
    windows = Windows(100)
    history = np.zeros(100, CLICK)
    history["age"] = history["waited"] = np.nan
    for clicks in (history, live[:640], live[640:]):
        windows.add(clicks, torch.zeros(len(clicks)))
        resumed = Windows(100)
        resumed.load_state(windows.state())
        windows = resumed
    found = windows.freshness
    assert (found["age_p50_s"], found["age_p99_s"]) == pytest.approx(
        (2.0, np.sort(live["age"])[990]), abs=STEP_S
    )
    assert found["late"] == 100
    assert list(found["outcomes"]["served"].values()) == [600, 300, 0, 100]
    assert list(found["outcomes"]["frozen"].values()) == [1000, 0, 0, 0]


@pytest.fixture(params=["file", "kafka", pytest.param("redis", marks=needs_redis)])
def stream(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ClickStream]:
    if request.param == "file":
        yield FileStream(tmp_path / "clicks.log")
    elif request.param == "kafka":
        with kafka_broker() as broker:
            stream = KafkaStream(broker.url, "clicks")
            assert stream.problems() == []
            yield stream
    else:
        with redis_server(tmp_path / "redis") as server:
            yield RedisStream(server.url, "clicks")


def test_a_stream_has_each_click_once_and_in_order(
    stream: ClickStream, tmp_path: Path
) -> None:
    clicks = generated(settings(tmp_path / "run"), 1, 1000)
    clicks["served"] = np.linspace(-1, 1, 1000)
    assert stream.last() == 0
    assert len(stream.read(0, 5)) == 0
    stream.append(1, clicks[:600])
    stream.append(1, clicks[:600])  # the answer was lost
    stream.append(501, clicks[500:900])  # a part of it is there
    with pytest.raises(
        DataError, match="ends with click 900, so click 902 cannot be appended"
    ):
        stream.append(902, clicks[901:])
    assert stream.last() == 900
    assert stream.read(0, 2000).tobytes() == clicks[:900].tobytes()
    assert stream.read(123, 77).tobytes() == clicks[123:200].tobytes()
    with pytest.raises(
        DataError, match=r"ends with click 900, and click 901 has been trained on"
    ):
        stream.read(901, 1)
    stream.trim(100)
    assert stream.read(100, 50).tobytes() == clicks[100:150].tobytes()


def test_a_batch_is_cut_by_numbers_and_not_by_arrival(
    stream: ClickStream, tmp_path: Path
) -> None:
    clicks = generated(settings(tmp_path / "run"), 1, 400)
    stream.append(1, clicks[:10])

    def arrive() -> None:
        for first in range(10, 400, 130):
            time.sleep(0.05)
            stream.append(first + 1, clicks[first : first + 130])

    writer = threading.Thread(target=arrive)
    writer.start()
    batches = [read_batch(stream, 0, 256), read_batch(stream, 256, 144)]
    writer.join()
    assert [len(each) for each in batches] == [256, 144]
    assert np.concatenate(batches).tobytes() == clicks.tobytes()


def test_a_record_that_was_not_written_whole_is_written_again(tmp_path: Path) -> None:
    clicks = generated(settings(tmp_path / "run"), 1, 20)
    path = tmp_path / "clicks.log"
    path.write_bytes(clicks[:11].tobytes()[:-7])
    stream = FileStream(path)
    assert stream.last() == 10
    assert len(stream.read(0, 20)) == 10
    stream.append(11, clicks[10:])
    assert path.read_bytes() == clicks.tobytes()


@needs_redis
def test_clicks_of_a_killed_server_are_there_once(tmp_path: Path) -> None:
    clicks = generated(settings(tmp_path / "run"), 1, 600)
    with redis_server(tmp_path / "redis", *DURABLE) as server:
        writer, reader = (
            RedisStream(server.url, "clicks"),
            RedisStream(server.url, "clicks"),
        )
        writer.append(1, clicks[:200])
        after_kill(server, lambda: writer.append(201, clicks[200:400]))
        after_kill(server, lambda: reader.read(0, 10))
        writer.append(401, clicks[400:])
        assert reader.read(0, 1000).tobytes() == clicks.tobytes()
        # A server that loses clicks in the middle is no source.
        with server.client() as client:
            client.xdel("clicks", "300-0")
        with pytest.raises(DataError, match="lacks clicks between 1 and 600"):
            reader.read(0, 1000)


def after_kill(server: RedisServer, action: Callable[[], object]) -> None:
    """Kills a server, calls ``action``, and starts the server in the meantime."""
    server.kill()
    start = threading.Timer(0.3, server.start)
    start.start()
    action()
    start.join()


class Answering(BaseHTTPRequestHandler):
    """A server whose rows are half a second old.

    Unless ``server.goes_on`` is set, it sends a space now and then.
    """

    def do_POST(self) -> None:
        """Answers with a logit for each click."""
        users = json.loads(self.rfile.read(int(self.headers["Content-Length"])))[
            "arguments"
        ]["features"]["user"]
        self.server.on_request(len(users))  # type: ignore[attr-defined]
        body = json.dumps(
            {"outputs": {"y": [0.25] * len(users)}, "seconds_behind": 0.5}
        ).encode()
        with suppress(OSError):
            self.send_response(200)
            self.end_headers()
            while not self.server.goes_on.wait(0.3):  # type: ignore[attr-defined]
                self.wfile.write(b" ")
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def answering(
    on_request: Callable[[int], None] = lambda clicks: None,
) -> Iterator[tuple[str, threading.Event]]:
    """Runs a server.

    Yields its address, and the event that is set while it answers.

    Args:
        on_request: A function that is called with the number of clicks of each request.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    goes_on = server.goes_on = threading.Event()  # type: ignore[attr-defined]
    server.on_request = on_request  # type: ignore[attr-defined]
    goes_on.set()
    threading.Thread(target=server.serve_forever, args=(0.05,)).start()
    try:
        yield f"127.0.0.1:{server.server_port}", goes_on
    finally:
        goes_on.set()
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_the_generator_does_not_wait_for_a_server_that_hangs(tmp_path: Path) -> None:
    stream = FileStream(tmp_path / "clicks.log")
    answered_requests: list[int] = []
    asked = [0]
    unwritten: list[int] = []

    def serve(clicks: int) -> None:
        answered_requests.append(clicks)
        if len(answered_requests) == 8:
            serves.clear()

    def note(clicks: int) -> None:
        if not serves.is_set():
            unwritten.append(1024 + asked[-1] - stream.last())
        asked.append(asked[-1] + clicks)

    with answering(serve) as (served, serves), answering(note) as (frozen, _):
        made = settings(
            tmp_path, clicks=1024 + 350, paced=True, http=served, frozen_http=frozen
        )
        generate(made)  # three and a half seconds of clicks
        assert not serves.is_set(), "the server hangs to the end"
    # The first requests, before the first click, have one click each.
    assert max(unwritten) > 10, (
        "the other server is asked while earlier clicks wait for the one that hangs"
    )
    live = stream.read(1024, 1000)
    assert len(live) == 350
    assert (live["frozen_outcome"] == ANSWERED).all()
    assert not np.isnan(live["frozen"]).any()
    answered = live["served_outcome"] == ANSWERED
    count = int(answered.sum())
    assert answered[:count].all(), "after the server hangs, nothing is answered"
    assert 0 < count < 350
    assert (live["served"][:count] == 0.25).all()
    assert np.isnan(live["served"][count:]).all()
    assert live["age"][:count].min() > 0.49
    assert (live["age"][:count] - live["waited"][:count]).max() < 0.51
    assert set(live["served_outcome"][count:]) == {NO_ANSWER, NOT_ASKED}
    # The age rises in the whole time without an answer, by a second in a second.
    silent = live["age"][count:]
    assert (np.diff(silent) >= 0).all()
    written_s = np.arange(count, 350) / 100 + live["waited"][count:]
    assert np.ptp(silent - written_s) < 0.01
    assert (silent >= live["waited"][count:]).all()


def test_the_age_goes_on_after_the_generator_was_killed(tmp_path: Path) -> None:
    made = settings(
        tmp_path,
        clicks=1024 + 40,
        paced=True,
        http="127.0.0.1:1",
        frozen_http="127.0.0.1:1",
    )
    stream = FileStream(tmp_path / "clicks.log")
    clicks = generated(made, 1, 1024 + 10)
    clicks["age"][-1], clicks["waited"][-1] = 7.0, 0.1
    stream.append(1, clicks)
    made.opened.write_text(str(int(1000 * (time.time() - 0.1))))
    generate(made)
    live = stream.read(1034, 100)
    assert len(live) == 30
    assert set(live["served_outcome"]) <= {REFUSED, NOT_ASKED}
    # It was 7 s when the last click was written, 0.1 s after its time.
    expected = 6.9 + np.arange(1, 31) / 100 + live["waited"]
    assert live["age"] == pytest.approx(expected, abs=0.01)


@pytest.mark.slow
def test_a_run_continues_from_the_offset_of_its_checkpoint(tmp_path: Path) -> None:
    whole, parted = settings(tmp_path / "whole"), settings(tmp_path / "parted")
    for made in (whole, parted):
        generate(made)
        assert FileStream(made.folder / "clicks.log").last() == made.clicks
    train(whole)
    for clicks in (1024, 2560, 4000):  # at the end of batches
        train(replace(parted, clicks=clicks))
    first, second = (
        read_chain(made.checkpoints / "step-000000016") for made in (whole, parted)
    )
    assert compare_chains(first, second).equal
    state = first[-1].training_state
    assert state["offset"] == 4000
    assert [window["last"] for window in state["windows"]["done"]] == [
        1000,
        2000,
        3000,
        4000,
    ]
    assert state["report"]["expired"] > 0
    for made in (whole, parted):
        written = json.loads((made.folder / "trainer.json").read_text())
        assert written["offset"] == 4000
        with Follower(made.published) as follower:
            follower.poll()
            assert follower.version == written["final_version"]
    # A trainer that was killed at its end publishes the same model again.
    train(parted)
    assert (
        json.loads((parted.folder / "trainer.json").read_text())["final_version"]
        == written["final_version"]
    )


def test_the_page_shows_each_curve() -> None:
    quality = {"auc": 0.75, "calibration": 1.1, "answered": 1.0}
    windows = [
        {
            "time_ms": 1000 * second,
            "last": 10 * second,
            **dict.fromkeys(MODELS, quality),
        }
        for second in range(5)
    ]
    windows[0] = windows[0] | {
        "frozen": {"auc": None, "calibration": None, "answered": 0.0}
    }
    # The follower hung.
    windows[2] = windows[2] | {
        "served": {"auc": None, "calibration": None, "answered": 0.0}
    }
    sample = {
        "second": 3.0, "samples_per_second": 2e3, "clicks_per_second": 2e3, "age_s": None, "behind_s": 0.5,
        "rows": {"t": 5}, "expired": 0,
    }  # fmt: skip
    state = {
        "status": "running", "offset": 5, "rows": {"t": 5}, "expired": 0, "late": 1234, "age_p50_s": 1.5,
        "outcomes": {"served": {"answered": 4000, "no answer in time": 70, "refused": 0, "not asked": 5000}},
        "age_p99_s": 16.0, "windows": windows, "samples": [sample],
        "processes": {"trainer": {"pid": 7, "restarts": 2}},
        "settings": {"folder": "<b>", "start_ms": 0, "history": 15, "window": 10},
    }  # fmt: skip
    text = page(state, live=True)
    assert "<b>" not in text.partition("<p class")[2].partition("</p>")[0]
    assert text.count("<polyline") == (3 + 1) + (3 + 1) + 2 + 1 + 2 + 1 + 1, (
        "the served model has a gap"
    )
    assert not re.search(r"\bnan\b", text, re.IGNORECASE)
    assert [window["last"] for window in live_windows(state)] == [
        30,
        40,
    ], "the window up to 20 has clicks of the history"
    for name, shown in {
        "unanswered, served": "5,070",
        "late clicks": "1,234",
        "age, p50 and p99": "1.5 s, 16.0 s",
    }.items():
        assert f"<dt>{name}</dt><dd>{shown}</dd>" in text
    (main,) = re.findall(r'<dl class="facts main">(.*?)</dl>', text)
    assert re.findall("<dt>(.*?)</dt>", main) == [
        "AUC, served",
        "age of the served rows",
        "clicks trained a second",
    ]
    titles = re.findall(r'<text dy="-14">([^<]*)</text>', text)
    assert len(titles) == 7
    assert all(titles), "each vertical axis has its unit"
    x_titles = re.findall(r'dy="40" text-anchor="middle">([^<]*)</text>', text)
    assert len(x_titles) == 7
    assert {title.split()[0] for title in x_titles} == {"seconds"}
    marks = re.findall(r'<tspan fill="([^"]+)">.</tspan><tspan dx="5">(\w+)<', text)
    assert {name: paint for paint, name in marks} == PAINTS | {
        "t": "var(--c4, #E69F00)"
    }
    assert len({paint for paint, _ in marks}) == len({name for _, name in marks}), (
        "a colour stands for one thing"
    )
    assert len(set(marks)) == len({name for _, name in marks}), "a thing has one colour"
    assert 'http-equiv="refresh"' in text
    assert re.search(r"running · written at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d<", text)
    assert "http-equiv" not in page(state, live=False)
    assert "http-equiv" not in page(
        state | {"windows": [], "samples": [], "rows": {}}, live=False
    )
