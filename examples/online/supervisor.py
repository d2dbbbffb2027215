"""Starts the processes of an online run, and starts those again that die.

It also writes the page.
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
FINISHED = "finished"
INTERRUPTED = "interrupted: the same folder continues it"
TICK_S = 0.2
WRITE_S = 1.0
PAUSES_S = (0.2, 1.0, 3.0, 10.0)
"""The pauses before a process is started again after failures in a row."""
STEADY_S = 30.0
"""A failure after this time is not one in a row."""
MAX_SAMPLES = 600  # of the page
SPEED_SAMPLES = 5  # A speed is that of the last five seconds.
ANSWER_S = 0.5  # The follower may take this time to answer.
NO_TRAINER: dict[str, Any] = {
    "offset": 0,
    "rows": {},
    "expired": 0,
    "windows": [],
    "final_version": None,
    "outcomes": {},
    "late": 0,
    "age_p50_s": None,
    "age_p99_s": None,
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
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        restarts: int,
    ) -> None:
        self.name = name
        self.restarts = restarts - 1  # _start() counts this start
        self._command = list(command)
        self._log = log
        self._failures = 0  # in a row
        self._restart_at: float | None = None
        self._start()

    @property
    def pid(self) -> int:
        """The id of the process, or of the last process if none runs."""
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
        if self._restart_at is None:
            is_killed = status < 0
            is_steady = time.monotonic() - self._begin > STEADY_S
            if is_killed or is_steady:
                self._failures = 0
            else:
                self._failures += 1
            if self._failures > len(PAUSES_S):
                raise DataError(
                    f"the {self.name} has failed {self._failures} times in a row, see"
                    f" {self._log}"
                )
            pause_s = PAUSES_S[max(self._failures - 1, 0)]
            self._restart_at = time.monotonic() + pause_s
        elif time.monotonic() >= self._restart_at:
            self._start()

    def kill(self) -> None:
        """Kills the process by SIGKILL."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ends the process by SIGTERM, and by SIGKILL after ten seconds."""
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
        self._begin = time.monotonic()
        self._restart_at = None
        self.restarts += 1


def _die_too() -> None:
    """Makes the kernel kill this process when the supervisor dies.

    Ctrl-C does not reach this process.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.setpgrp()


class Supervisor:
    """The processes of a run; also a context manager that ends them.

    A run that was interrupted goes on.

    Args:
        settings: The settings, which are written to the run's folder.
        redis_port: The port of the Redis server to start, or None.
        kills: The number of SIGKILLs that random processes get, spread over the
            remaining time of the live clicks.
    """

    def __init__(
        self,
        settings: Settings,
        redis_port: int | None,
        kills: int,
    ) -> None:
        self.settings = settings
        saved: dict[str, Any] = {"samples": [], "kills": [], "processes": {}}
        with suppress(FileNotFoundError):
            saved = json.loads((settings.folder / STATE).read_bytes())
        self.kills: list[str] = saved["kills"]
        self._samples: list[dict[str, Any]] = saved["samples"]
        self._restarts = {}
        for name, process in saved["processes"].items():
            self._restarts[name] = process["restarts"]

        begin_s = 0.0
        if self._samples:
            begin_s = self._samples[-1]["second"]
        end_s = (settings.clicks - settings.history) / settings.rate
        self._random = random.Random(settings.seed)
        kill_times = [self._random.uniform(begin_s, end_s) for _ in range(kills)]
        self._kill_times = sorted(kill_times)
        self._victims: list[str] = []  # shuffled, so that each of them is killed
        self._follower_state: dict[str, Any] = {}  # its last answer
        # the moment of the rows of this answer, in seconds since 1970
        self._rows_time: float | None = None
        self.processes: dict[str, Process] = {}
        self._stack = ExitStack()
        with self._stack:
            self._run_all(redis_port)
            self._stack = self._stack.pop_all()

    def _run_all(self, redis_port: int | None) -> None:
        settings = self.settings
        if redis_port is not None:
            redis = _redis(settings.redis, redis_port)
            self._run("redis", redis)
        self._run_worker("trainer")
        follower = _follow(settings.published, settings.grpc, settings.http)
        self._run("follower", follower)
        frozen = _follow(settings.frozen, settings.frozen_grpc, settings.frozen_http)
        self._run("frozen", frozen)
        self._run_worker("generator")

    def _run_worker(self, role: str) -> None:
        script = Path(__file__).with_name("worker.py")
        folder = str(self.settings.folder)
        self._run(role, [sys.executable, str(script), role, folder])

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, until_s: float) -> dict[str, Any]:
        """Runs until the trainer has seen all clicks, or until Ctrl-C.

        The follower then serves the model of this moment.

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
        end = time.monotonic() + until_s
        write_at = 0.0
        while True:
            for process in self.processes.values():
                process.watch()
            self._freeze()
            self._kill_one()
            if time.monotonic() >= write_at:
                state = self._write("running", live=True)
                write_at = time.monotonic() + WRITE_S
                if self.processes["trainer"].has_ended and _serves_final(state):
                    return self._write(FINISHED, live=False)
            if time.monotonic() > end:
                raise DataError(
                    f"the run has not ended after {until_s:g} s, see"
                    f" {self.settings.folder}"
                )
            time.sleep(TICK_S)

    def state(self) -> dict[str, Any]:
        """Returns the state of the run, which the page shows.

        It has the numbers of the trainer and of the follower, and the processes.
        """
        trainer_state = dict(NO_TRAINER)
        with suppress(FileNotFoundError):
            content = (self.settings.folder / "trainer.json").read_bytes()
            trainer_state = json.loads(content)
        follower_answers = self._ask_follower()
        served_version = None
        if follower_answers:
            served_version = self._follower_state.get("version")
        age_s = None
        if self._rows_time is not None:
            # The rows of a follower that does not answer become older, until it answers
            # again.
            age_s = time.time() - self._rows_time
        processes = {
            name: {"pid": process.pid, "restarts": process.restarts}
            for name, process in self.processes.items()
        }
        return {
            **trainer_state,
            "age_s": age_s,
            "served_version": served_version,
            "deltas_applied": self._follower_state.get("deltas_applied", 0),
            "fulls_loaded": self._follower_state.get("fulls_loaded", 0),
            "kills": self.kills,
            "processes": processes,
            "settings": self.settings.shown(),
        }

    def _ask_follower(self) -> bool:
        """Asks the follower for its state, and returns whether it answers."""
        url = f"http://{self.settings.http}/state"
        with (
            suppress(OSError, HTTPException, ValueError),
            urllib.request.urlopen(url, timeout=ANSWER_S) as response,
        ):
            self._follower_state = json.load(response)
            seconds_behind = self._follower_state.get("seconds_behind")
            if seconds_behind is not None:
                self._rows_time = time.time() - seconds_behind
            return True
        return False

    def _write(self, status: str, live: bool) -> dict[str, Any]:
        """Writes the state and the page, and returns the state."""
        state = {
            "status": status,
            **self.state(),
            "samples": self._samples,
        }
        second = self._second()
        if second is not None:
            self._add_sample(state, second)
        if len(self._samples) > MAX_SAMPLES:
            del self._samples[: MAX_SAMPLES // 2 : 2]
        folder = self.settings.folder
        state_text = json.dumps(state)
        page_text = page(state, live)
        write_whole(folder / STATE, state_text.encode())
        write_whole(folder / "page.html", page_text.encode())
        return state

    def _add_sample(self, state: dict[str, Any], second: float) -> None:
        # The trainer is behind by the time since the newest click that it has trained
        # on.
        live_clicks = state["offset"] - self.settings.history
        behind_s = second - live_clicks / self.settings.rate
        sample = {
            "offset": state["offset"],
            "age_s": state["age_s"],
            "rows": state["rows"],
            "expired": state["expired"],
            "second": second,
            "behind_s": max(0.0, behind_s),
            "written": self._written(),
        }
        # A run that goes on begins at the last click that was written, which is a
        # little earlier than the last sample before the interruption. Such a sample is
        # removed, because its time did not count.
        while self._samples and self._samples[-1]["second"] > second:
            self._samples.pop()
        earlier = self._samples[-SPEED_SAMPLES:][0] if self._samples else sample
        sample["samples_per_second"] = _rate(earlier, sample, "offset")
        sample["clicks_per_second"] = _rate(earlier, sample, "written")
        self._samples.append(sample)

    def _run(self, name: str, command: Sequence[str]) -> None:
        log = self.settings.folder / f"{name}.log"
        process = Process(
            name,
            command,
            log,
            self._restarts.get(name, 0),
        )
        self.processes[name] = process
        self._stack.callback(process.stop)

    def _freeze(self) -> None:
        """Copies the first full export to the directory of the frozen model."""
        source = publications_at(self.settings.published)
        frozen = publications_at(self.settings.frozen)
        latest = source.latest()
        if latest is None or frozen.latest() is not None:
            return
        number = latest.fulls[0]
        frozen.claim(latest.run)
        # A trainer that starts again may replace the export.
        with closing(frozen), suppress(FileNotFoundError):
            for kind in FULL:
                path = source.fetch(number, kind, self.settings.folder)
                shutil.copyfile(path, frozen.path_of(number, kind))
            publication = replace(source.publication(number), base=None)
            frozen.append(publication, None)

    def _second(self) -> float | None:
        """Returns the time since the first live click, in seconds.

        It is None before the first live click.
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
        """Kills a random process if its time has come."""
        second = self._second()
        if not self._kill_times or second is None or second < self._kill_times[0]:
            return
        if not self._victims:
            self._victims = [name for name in self.processes if name != "frozen"]
            self._random.shuffle(self._victims)
        victim = self._victims[-1]
        if self.processes[victim].runs:
            self._kill_times.pop(0)
            self._victims.pop()
            self.kills.append(victim)
            self.processes[victim].kill()


def _serves_final(state: dict[str, Any]) -> bool:
    """Returns whether the follower serves the model of the end of the training."""
    final_version = state["final_version"]
    return final_version is not None and state["served_version"] == final_version


def _rate(
    earlier: dict[str, Any],
    later: dict[str, Any],
    counter: str,
) -> float | None:
    """Returns how much a counter has grown a second between two samples."""
    seconds = later["second"] - earlier["second"]
    if seconds <= 0:
        return None
    # A trainer that starts again goes back to the offset of its checkpoint.
    return max(0, later[counter] - earlier[counter]) / seconds


def _redis(folder: Path, port: int) -> list[str]:
    """Returns the command of a Redis server.

    The server has every click on the disk before it answers.
    """
    assert REDIS is not None
    folder.mkdir(exist_ok=True)
    options = {
        "--port": str(port),
        "--bind": "127.0.0.1",
        "--dir": str(folder),
        "--appendonly": "yes",
        "--appendfsync": "always",
        "--save": "",
        "--maxmemory-policy": "noeviction",
    }
    command = [REDIS]
    for option, value in options.items():
        command += [option, value]
    return command


def _follow(source: Path, grpc: str, http: str) -> list[str]:
    """Returns the command of a follower."""
    command = [sys.executable, "-m", "torchrec_recstore.cli", "follow", str(source)]
    command += ["--listen", grpc]
    command += ["--http", http]
    command += ["--threads", "1"]
    return command
