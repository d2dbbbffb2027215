"""Starts the processes of an online run, starts those again that die, and writes the
page.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

from common.command import DataError
from common.report import write_whole
from online.page import page
from online.settings import Settings

from torchrec_recstore_serving.publish.destinations import publications_at
from torchrec_recstore_serving.publish.publications import FULL

STATE = "state.json"
"""The file with the state of a run. A run that goes on reads it."""
FINISHED, INTERRUPTED = "finished", "interrupted: the same folder continues it"
TICK_S, WRITE_S = 0.2, 1.0
PAUSES_S = (0.2, 1.0, 3.0, 10.0)
"""The pauses before a process is started again, if it has failed several times in a
row.
"""
STEADY_S = 30.0  # A process that has run for so long has not failed in a row.
SAMPLES = 600  # of the page
SPEED_SAMPLES = 5  # A speed is that of the last five seconds.
ANSWER_S = 0.5  # The follower may take this time to tell its state.
UNSEEN: dict[str, Any] = {
    "outcomes": {},
    "late": 0,
    "age_p50_s": None,
    "age_p99_s": None,
}
BEFORE = {
    "offset": 0,
    "rows": {},
    "expired": 0,
    "windows": [],
    "final_version": None,
    **UNSEEN,
}
"""``trainer.json`` before the trainer has written it."""
REDIS = shutil.which("redis-server") or shutil.which("valkey-server")


class Process:
    """A process that is started again whenever it dies, until it ends with status 0.

    Args:
        name: The name of the process.
        command: The command line.
        log: The file to which its output is appended.
        restarts: The number of restarts so far.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path, restarts: int
    ) -> None:
        self.name, self.restarts = name, restarts - 1
        self._command, self._log = list(command), log
        self._failures, self._next = 0, 0.0
        self._start()

    @property
    def pid(self) -> int:
        """The id of the process, or of the process that was there last."""
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended with status 0."""
        return self._process.poll() == 0

    def watch(self) -> None:
        """Starts the process again if it has died.

        Raises:
            DataError: The process has failed several times in a row, without being
                killed by a signal.
        """
        status = self._process.poll()
        if status is None or status == 0:
            return
        if not self._next:
            self._failures = (
                0
                if status < 0 or time.monotonic() - self._began > STEADY_S
                else self._failures + 1
            )
            if self._failures > len(PAUSES_S):
                raise DataError(
                    f"the {self.name} has failed {self._failures} times in a row, see"
                    f" {self._log}"
                )
            self._next = time.monotonic() + PAUSES_S[max(self._failures - 1, 0)]
        elif time.monotonic() >= self._next:
            self._start()

    def kill(self) -> None:
        """Kills the process by SIGKILL."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ends the process by SIGTERM, and by SIGKILL if it takes more than ten
        seconds.
        """
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()

    def _start(self) -> None:
        # One thread: the processes share the cores. A run has the same bits for every
        # number of threads.
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                preexec_fn=_die_too,
            )
        self._began, self._next = time.monotonic(), 0.0
        self.restarts += 1


def _die_too() -> None:
    """Makes the kernel kill this process when the supervisor dies, and keeps Ctrl-C to
    the supervisor.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.setpgrp()


class Supervisor:
    """The processes of a run; also a context manager that ends them.

    A run that was interrupted goes on.

    Args:
        settings: The settings, which are written to the run's folder.
        redis_port: The port of the Redis server to start, or None.
        kills: The number of SIGKILLs that random processes get, spread over the time of
            the live clicks that is left.
    """

    def __init__(self, settings: Settings, redis_port: int | None, kills: int) -> None:
        self.settings = settings
        before: dict[str, Any] = {"samples": [], "kills": [], "processes": {}}
        with suppress(FileNotFoundError):
            before = json.loads((settings.folder / STATE).read_bytes())
        self._samples: list[dict[str, Any]] = before["samples"]
        self._random = random.Random(settings.seed)
        done_s = self._samples[-1]["second"] if self._samples else 0.0
        live_s = (settings.clicks - settings.history) / settings.rate
        self._kills_at = sorted(
            self._random.uniform(done_s, live_s) for _ in range(kills)
        )
        self._victims: list[str] = []  # shuffled, so that each of them is killed
        self.kills: list[str] = before["kills"]
        self._restarts = {
            name: each["restarts"] for name, each in before["processes"].items()
        }
        self._follower: dict[str, Any] = {}  # its last answer
        # the moment of the rows of this answer, in seconds since 1970
        self._fresh: float | None = None
        self.processes: dict[str, Process] = {}
        self._stack = ExitStack()
        with self._stack:
            if redis_port is not None:
                self._run("redis", _redis(settings.redis, redis_port))
            worker = [sys.executable, str(Path(__file__).with_name("worker.py"))]
            self._run("trainer", [*worker, "trainer", str(settings.folder)])
            self._run(
                "follower", _follow(settings.published, settings.grpc, settings.http)
            )
            self._run(
                "frozen",
                _follow(settings.frozen, settings.frozen_grpc, settings.frozen_http),
            )
            self._run("generator", [*worker, "generator", str(settings.folder)])
            self._stack = self._stack.pop_all()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, until_s: float) -> dict[str, Any]:
        """Runs until the trainer has seen all clicks and the follower serves the model
        of this moment, or until Ctrl-C.

        Args:
            until_s: The longest time, in seconds.

        Returns:
            The state at the end; see :meth:`state`. Its ``status`` is ``FINISHED`` or
            ``INTERRUPTED``.

        Raises:
            DataError: A process fails again and again, or the run takes too long. The
                page says so.
        """
        try:
            return self._run_to_end(until_s)
        except KeyboardInterrupt:
            return self._write(INTERRUPTED, live=False)
        except DataError as error:
            self._write(f"failed: {error}", live=False)
            raise

    def _run_to_end(self, until_s: float) -> dict[str, Any]:
        end, write_at = time.monotonic() + until_s, 0.0
        while True:
            for process in self.processes.values():
                process.watch()
            self._freeze()
            self._kill_one()
            if time.monotonic() >= write_at:
                state, write_at = (
                    self._write("running", live=True),
                    time.monotonic() + WRITE_S,
                )
                final = state["final_version"]
                if (
                    self.processes["trainer"].has_ended
                    and final is not None
                    and state["served_version"] == final
                ):
                    return self._write(FINISHED, live=False)
            if time.monotonic() > end:
                raise DataError(
                    f"the run has not ended after {until_s:g} s, see"
                    f" {self.settings.folder}"
                )
            time.sleep(TICK_S)

    def state(self) -> dict[str, Any]:
        """Returns what the page shows: the numbers of the trainer and of the follower,
        and the processes.
        """
        trainer = dict(BEFORE)
        with suppress(FileNotFoundError):
            trainer = json.loads((self.settings.folder / "trainer.json").read_bytes())
        answers, url = False, f"http://{self.settings.http}/state"
        with (
            suppress(OSError, HTTPException, ValueError),
            urllib.request.urlopen(url, timeout=ANSWER_S) as answer,
        ):
            self._follower, answers = json.load(answer), True
            if self._follower.get("seconds_behind") is not None:
                self._fresh = time.time() - self._follower["seconds_behind"]
        return {
            **trainer,
            # The rows of a follower that does not answer become older, until it answers
            # again.
            "age_s": None if self._fresh is None else time.time() - self._fresh,
            "served_version": self._follower.get("version") if answers else None,
            "deltas_applied": self._follower.get("deltas_applied", 0),
            "fulls_loaded": self._follower.get("fulls_loaded", 0),
            "kills": self.kills,
            "processes": {
                name: {"pid": p.pid, "restarts": p.restarts}
                for name, p in self.processes.items()
            },
            "settings": self.settings.shown(),
        }

    def _write(self, status: str, live: bool) -> dict[str, Any]:
        state = {"status": status, **self.state(), "samples": self._samples}
        second = self._second()
        if second is not None:
            # The trainer is behind by the time since the newest click that it has
            # trained on.
            behind = (
                second - (state["offset"] - self.settings.history) / self.settings.rate
            )
            sample = {
                name: state[name] for name in ("offset", "age_s", "rows", "expired")
            }
            sample |= {
                "second": second,
                "behind_s": max(0.0, behind),
                "written": self._written(),
            }
            # A run that goes on begins at the last click that was written, which is a
            # little earlier than the last sample before the interruption. Such a sample
            # gives way, because its time did not count.
            while self._samples and self._samples[-1]["second"] > second:
                self._samples.pop()
            before = self._samples[-SPEED_SAMPLES:][0] if self._samples else sample
            for name, count in (
                ("samples_per_second", "offset"),
                ("clicks_per_second", "written"),
            ):
                # A trainer that starts again goes back to the offset of its checkpoint.
                past = second - before["second"]
                sample[name] = (
                    max(0, sample[count] - before[count]) / past if past > 0 else None
                )
            self._samples.append(sample)
        if len(self._samples) > SAMPLES:
            del self._samples[: SAMPLES // 2 : 2]
        write_whole(self.settings.folder / STATE, json.dumps(state).encode())
        write_whole(self.settings.folder / "page.html", page(state, live).encode())
        return state

    def _run(self, name: str, command: Sequence[str]) -> None:
        self.processes[name] = process = Process(
            name,
            command,
            self.settings.folder / f"{name}.log",
            self._restarts.get(name, 0),
        )
        self._stack.callback(process.stop)

    def _freeze(self) -> None:
        """Copies the first full export to the directory of the frozen model."""
        source, frozen = (
            publications_at(self.settings.published),
            publications_at(self.settings.frozen),
        )
        latest = source.latest()
        if latest is None or frozen.latest() is not None:
            return
        number = latest.fulls[0]
        frozen.claim(latest.run)
        # A trainer that starts again may replace the export.
        with closing(frozen), suppress(FileNotFoundError):
            for kind in FULL:
                shutil.copyfile(
                    source.fetch(number, kind, self.settings.folder),
                    frozen.path_of(number, kind),
                )
            frozen.append(replace(source.publication(number), base=None), None)

    def _second(self) -> float | None:
        """Returns the time since the first live click, in seconds.

        None: there is none yet.
        """
        with suppress(FileNotFoundError):
            return time.time() - int(self.settings.opened.read_text()) / 1000
        return None

    def _written(self) -> int:
        """Returns the number of the last click that the generator has written."""
        with suppress(FileNotFoundError):
            return int(self.settings.written.read_text())
        return self.settings.history

    def _kill_one(self) -> None:
        second = self._second()
        if not self._kills_at or second is None or second < self._kills_at[0]:
            return
        if not self._victims:
            self._victims = [name for name in self.processes if name != "frozen"]
            self._random.shuffle(self._victims)
        if self.processes[self._victims[-1]].runs:
            self._kills_at.pop(0)
            self.kills.append(self._victims.pop())
            self.processes[self.kills[-1]].kill()


def _redis(folder: Path, port: int) -> list[str]:
    """Returns the command of a server that has every click on the disk before it
    answers.
    """
    assert REDIS is not None
    folder.mkdir(exist_ok=True)
    durable = [
        "--appendonly",
        "yes",
        "--appendfsync",
        "always",
        "--save",
        "",
        "--maxmemory-policy",
        "noeviction",
    ]
    return [
        REDIS,
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--dir",
        str(folder),
        *durable,
    ]


def _follow(source: Path, grpc: str, http: str) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "torchrec_recstore.cli",
        "follow",
        str(source),
        "--listen",
        grpc,
        "--http",
        http,
    ]
    return [*command, "--threads", "1"]
