"""Online training on clicks from Kafka: what is refused, an outage, and exactly once
although processes are killed.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from common.command import DataError
from online.clicks import generated
from online.generator import generate
from online.streams import KafkaStream, read_batch
from online.trainer import train

from tests.packages import PYTHON_PATH
from torchrec_recstore.checkpoint.compare import compare_chains
from torchrec_recstore.checkpoint.info import read_chain

from ..kafka_broker import KafkaBroker, kafka_broker
from .commands import ROOT, run_forked
from .test_online import settings


@pytest.fixture
def broker() -> Iterator[KafkaBroker]:
    with kafka_broker() as made:
        yield made


def stream_of(broker: KafkaBroker, topic: str = "clicks") -> KafkaStream:
    stream = KafkaStream(broker.url, topic)
    assert stream.problems() == []
    return stream


@pytest.mark.parametrize(
    "url",
    [
        "kafka://me:secret@host:9092",
        "kafka://host:9092/?password=secret",
        "kafka://secret",
    ],
)
def test_a_url_with_a_password_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(
        DataError,
        match=r"^--url must be kafka://host:port, or several .* without credentials$",
    ):
        settings(tmp_path, url=url)


def test_a_refused_url_is_an_error_in_one_line(tmp_path: Path) -> None:
    done = run_forked(
        "online/run.py",
        "--folder",
        tmp_path / "run",
        "--url",
        "kafka://me:secret@host:9092",
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "error: --url must be kafka://host:port" in done.stderr
    assert "secret" not in done.stdout + done.stderr
    assert not (tmp_path / "run").exists()


def test_several_brokers_are_one_url(tmp_path: Path) -> None:
    made = settings(tmp_path, url="kafka://one:9092,[::1]:9093")
    assert made.shown()["url"] == made.url


def test_clicks_that_the_retention_has_deleted_are_refused(
    broker: KafkaBroker, tmp_path: Path
) -> None:
    clicks = generated(settings(tmp_path), 1, 600)
    stream_of(broker).append(1, clicks)
    broker.delete_records("clicks", 300)
    stream = KafkaStream(broker.url, "clicks")  # a trainer that starts again
    with pytest.raises(
        DataError,
        match="clicks begins with click 301, and click 300 is the next one to train",
    ):
        stream.read(299, 10)
    assert read_batch(stream, 300, 300).tobytes() == clicks[300:].tobytes()
    with pytest.raises(
        DataError,
        match="the topic clicks has records: delete it, or choose another folder",
    ):
        stream.problems()


@pytest.mark.parametrize(
    ("key", "found"), [(b"10", "b'10'"), (b"12", "b'12'"), (None, "None")]
)
def test_a_record_out_of_place_is_refused(
    broker: KafkaBroker, tmp_path: Path, key: bytes | None, found: str
) -> None:
    clicks = generated(settings(tmp_path), 1, 20)
    writer, reader = stream_of(broker), KafkaStream(broker.url, "clicks")
    writer.append(1, clicks[:10])
    assert len(read_batch(reader, 0, 10)) == 10
    broker.produce("clicks", key, clicks[10].tobytes())
    misplaced = (
        f"clicks has a record of 80 bytes with the key {found} at offset 10, where"
        " click 11 is expected at"
    )
    for _ in range(2):  # It does not pass with the next read.
        with pytest.raises(DataError, match=misplaced):
            reader.read(10, 1)
    with pytest.raises(
        DataError,
        match="the key b'11' at offset 11: another process writes to the topic",
    ):
        writer.append(11, clicks[10:11])


def test_a_record_that_is_no_click_is_refused(broker: KafkaBroker) -> None:
    stream = stream_of(broker)
    broker.produce("clicks", b"1", b"something")
    with pytest.raises(
        DataError, match="clicks has a record of 9 bytes with the key b'1' at offset 0"
    ):
        read_batch(stream, 0, 1)


def test_clicks_are_there_once_after_an_outage(
    broker: KafkaBroker, tmp_path: Path
) -> None:
    clicks = generated(settings(tmp_path), 1, 600)
    writer, reader = stream_of(broker), KafkaStream(broker.url, "clicks")
    writer.append(1, clicks[:200])
    assert len(read_batch(reader, 0, 200)) == 200
    broker.stop()
    threading.Timer(0.3, broker.start).start()
    append = threading.Thread(target=writer.append, args=(201, clicks[200:]))
    append.start()
    assert read_batch(reader, 200, 400).tobytes() == clicks[200:].tobytes()
    append.join()
    assert KafkaStream(broker.url, "clicks").last() == 600


def test_a_broker_that_does_not_answer_is_named(
    broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = stream_of(broker)
    monkeypatch.setattr("online.streams.QUERY_S", 0.2)
    monkeypatch.setattr("online.streams.RETRY_S", 0.2)
    broker.stop()
    with pytest.raises(
        DataError, match=r"the Kafka topic clicks cannot be reached for 0.2 s: .*"
    ):
        stream.problems()
    broker.start()


GENERATOR = """
import pathlib, sys
from online import generator
generator.MAX_CLICKS = 20
generator.generate(generator.Settings.read(pathlib.Path(sys.argv[1])))
"""
"""A generator that appends few clicks at a time, so that it can be killed between them.
"""


CLICKS = 12_000


def start(role: str, folder: Path) -> subprocess.Popen[bytes]:
    program = {
        "generator": ["-c", GENERATOR],
        "trainer": [str(ROOT / "examples/online/worker.py"), "trainer"],
    }[role]
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'examples'}:{PYTHON_PATH}",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen([sys.executable, *program, str(folder)], env=environment)


@pytest.mark.slow
def test_killed_processes_have_the_bits_of_an_undisturbed_run(
    broker: KafkaBroker, tmp_path: Path
) -> None:
    whole = settings(tmp_path / "whole", clicks=CLICKS)
    generate(whole)
    train(whole)

    killed, stream = (
        settings(tmp_path / "killed", clicks=CLICKS, url=broker.url),
        stream_of(broker),
    )
    progress: dict[str, Callable[[], int]] = {
        "generator": stream.last,
        "trainer": lambda: max(
            (int(path.name[5:]) for path in killed.checkpoints.glob("step-*[0-9]")),
            default=0,
        ),
    }
    processes = {role: start(role, killed.folder) for role in progress}
    kills = random.Random(0)

    def wait_for_progress(role: str) -> None:
        before = progress[role]()
        while progress[role]() == before:
            assert processes[role].poll() is None
            time.sleep(0.002)

    # The trainer takes some seconds to start.
    for role in ["generator"] * 2 + ["trainer"] * 2:
        wait_for_progress(role)
        time.sleep(kills.uniform(0, 0.05))
        assert processes[role].poll() is None, (
            f"the {role} has ended before it was killed"
        )
        processes[role].kill()
        processes[role].wait()
        processes[role] = start(role, killed.folder)
        if role == "generator":  # It waits while the broker is gone.
            wait_for_progress(role)
            broker.stop()
            time.sleep(1)
            assert processes[role].poll() is None
            broker.start()
    assert [process.wait(100) for process in processes.values()] == [0, 0]

    assert (
        read_batch(stream, 0, CLICKS).tobytes()
        == generated(killed, 1, CLICKS).tobytes()
    )
    chains = [
        read_chain(max(made.checkpoints.glob("step-*"))) for made in (whole, killed)
    ]
    assert compare_chains(*chains).equal
    first, second = (chain[-1].training_state for chain in chains)
    assert first["offset"] == second["offset"] == CLICKS
    assert first["windows"]["done"] == second["windows"]["done"]
    versions = {
        json.loads((made.folder / "trainer.json").read_text())["final_version"]
        for made in (whole, killed)
    }
    assert len(versions) == 1
