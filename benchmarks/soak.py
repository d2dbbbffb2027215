"""Runs everything together for hours, and measures whether a process grows.

    make soak HOURS=2
    python benchmarks/soak.py run runs/soak --hours 2
    # judges and draws the samples that a run has written so far
    python benchmarks/soak.py report runs/soak

A soak runs these processes, and kills some of them in the first 55 % of the time, at
moments that ``--seed`` tells:

- the online example: Redis, generator, trainer (rows expire), follower (HTTP and gRPC),
  frozen follower, and the supervisor that starts them again;
- a pair of parameter servers, with the Redis server of its lease, and a server that
  evicts rows to an SSDStore. They save their rows on a schedule, and a client updates
  and reads rows on both;
- a process whose table evicts to a shared SSDStore that it opens again each minute;
- a client that asks the follower for predictions over gRPC.

Every few seconds it reads each process's memory, files, threads and children from
/proc. At the end it compares:

- the online model with that of an undisturbed run, to the bit;
- each row that the clients have read with an exact oracle;
- all rows of the servers again, after these were stopped and started.

The folder gets ``samples.jsonl``, which grows while the run goes on, ``soak.json`` and
``soak.png``. The files benchmarks/soak.json and docs/soak.png are those of the run that
docs/operations.md describes.

Exit status: 0 if all of this was exact and flat, otherwise 1. ``soak_series.py`` says
what counts as flat.
"""

# ruff: noqa: E402  (the modules of the examples are found by a path that is set first)

from __future__ import annotations

import json
import math
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from soak_series import (
    MB_AN_HOUR,
    Judgement,
    Sample,
    children_of,
    judge,
    plot,
    sample_of,
    thinned,
)

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from common.command import DataError
from online.settings import Settings
from online.supervisor import FINISHED, REDIS, STATE, Process

VICTIMS = (
    "trainer",
    "generator",
    "pair-0",
    "follower",
    "redis",
    "generator",
    "pair-1",
    "follower",
    "generator",
)
"""The processes that are killed, in this order and again from the first one."""
FIRST_KILL = 0.04
LAST_KILL = 0.55
"""The shares of the time between which processes are killed.

A trainer that is killed first is killed early.
"""
TICK_S = 0.5
START_S = 300.0
"""The longest time in seconds until the online example answers.

It then has trained on its history.
"""
END_S = 300.0
"""The longest time in seconds that a process may take to end by itself."""
CLIENTS = ("rows", "cold", "asks")
SERVERS = ("pair-0", "pair-1", "server")
app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help=__doc__,
)


class SoakError(RuntimeError):
    """A soak that cannot go on."""


class Soak:
    """A run of all processes; also a context manager that ends them.

    Args:
        folder: The folder of the run, which exists and is empty.
        hours: The time of the live clicks.
        rate: The clicks a second.
        kills: The number of processes that are killed.
        seed: The seed of the clicks and of the moments of the kills.
        every_s: The time between two samples.
    """

    def __init__(
        self,
        folder: Path,
        hours: float,
        rate: int,
        kills: int,
        seed: int,
        every_s: float,
    ) -> None:
        self.folder = folder
        self.kills: list[tuple[float, str]] = []
        self._seconds = hours * 3600
        self._every_s = every_s
        self._kills_left = kill_moments(self._seconds, kills, seed)
        self._live: float | None = None  # the moment of the first live click
        self._begin = time.monotonic()
        self._next_sample = 0.0
        self._parts: dict[str, Process] = {}
        self._stack = ExitStack()
        with self._stack:
            self._start_lease()
            self._start_servers()
            command = [sys.executable, str(ROOT / "examples" / "online" / "run.py")]
            command += ["--folder", str(self.online)]
            command += ["--seconds", str(round(self._seconds))]
            command += ["--rate", str(rate)]
            command += ["--seed", str(seed)]
            self._run("supervisor", command)
            self._stack = self._stack.pop_all()

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def online(self) -> Path:
        """The folder of the online example."""
        return self.folder / "online"

    def run(self) -> None:
        """Runs until the online example has ended, and ends the clients.

        Raises:
            SoakError: A process has failed.
        """
        self._wait_for_clicks()
        for name in CLIENTS:
            self._run(name, client_command(name, self.folder))
        supervisor = self._parts["supervisor"]
        limit_s = 2 * self._seconds + START_S
        while supervisor.runs:
            self._tick()
            if self._second() > limit_s:
                raise SoakError(f"the online example has not ended after {limit_s:g} s")
        if not supervisor.has_ended:
            raise SoakError(
                f"the online example has failed, see {self.folder / 'supervisor.log'}"
            )
        # What comes is the end of the run, and is not judged.
        self._next_sample = math.inf
        (self.folder / "stop").touch()
        self._wait_for_ends(CLIENTS)

    def compare_again(self) -> None:
        """Stops the servers, starts them again, and compares all rows.

        Raises:
            SoakError: A row is not exact, or a process has failed.
        """
        for name in SERVERS:
            say(f"stopping {name}")
            self._parts.pop(name).stop()
        self._start_servers()
        self._run("again", client_command("again", self.folder))
        self._wait_for_ends(["again"])

    def _start_lease(self) -> None:
        if REDIS is None:
            raise SoakError(
                "neither redis-server nor valkey-server is on this machine: install one"
                " of them"
            )
        lease = self.folder / "lease"
        lease.mkdir()
        self._lease_port = free_port()
        command = [REDIS]
        command += ["--port", str(self._lease_port)]
        command += ["--bind", "127.0.0.1"]
        command += ["--dir", str(lease)]
        command += ["--appendonly", "yes"]
        command += ["--save", ""]
        command += ["--maxmemory-policy", "noeviction"]
        self._run("lease", command)
        self._addresses = {name: f"127.0.0.1:{free_port()}" for name in SERVERS}
        server = self._addresses["server"]
        first_of_pair = self._addresses["pair-0"]
        second_of_pair = self._addresses["pair-1"]
        pair = f"{first_of_pair}/{second_of_pair}"
        # the servers that each server is started with, itself included
        self._sets = {"pair-0": pair, "pair-1": pair, "server": server}
        (self.folder / "servers").write_text(f"{pair}\n{server}\n")

    def _start_servers(self) -> None:
        for name, address in self._addresses.items():
            command = [sys.executable, "-m", "torchrec_recstore.cli", "serve"]
            command += ["--listen", address]
            command += ["--data", str(self.folder / name)]
            if name == "server":
                command += ["--max-rows", "2000"]
                command += ["--cold-store", str(self.folder / "server-cold")]
            else:
                command += ["--replicate", "soak"]
                command += ["--lease", f"redis://127.0.0.1:{self._lease_port}/0"]
            command += ["--save-every", "60"]
            command += ["--keep", "2"]
            command += ["--servers", self._sets[name]]
            self._run(name, command)

    def _wait_for_clicks(self) -> None:
        opened = self.online / "opened"
        while not opened.exists():
            self._tick()
            if self._second() > START_S:
                raise SoakError(
                    f"the online example has not begun after {START_S:g} s, see"
                    f" {self.folder}"
                )
        self._live = time.monotonic()
        say("live clicks begin")

    def _wait_for_ends(self, names: Sequence[str]) -> None:
        processes = {name: self._parts[name] for name in names}
        until = time.monotonic() + END_S
        while any(process.runs for process in processes.values()):
            self._tick()
            if time.monotonic() > until:
                either = " or ".join(names)
                raise SoakError(f"{either} does not end, see {self.folder}")
        for name, process in processes.items():
            if not process.has_ended:
                raise SoakError(f"{name} has failed, see {self.folder / name}.log")

    def _tick(self) -> None:
        for name, process in self._parts.items():
            # They are not killed: one that ends early has failed.
            if name in ("supervisor", "again", *CLIENTS):
                if not process.runs and not process.has_ended:
                    raise SoakError(f"{name} has failed, see {self.folder / name}.log")
            else:
                process.watch()
        self._kill_one()
        if time.monotonic() >= self._next_sample:
            self._next_sample = time.monotonic() + self._every_s
            self._sample()
        time.sleep(TICK_S)

    def _kill_one(self) -> None:
        if self._live is None or not self._kills_left:
            return
        moment, victim = self._kills_left[0]
        if time.monotonic() - self._live < moment:
            return
        pid = self._pids().get(victim)
        if pid is None:  # It is being started again: it is killed when it runs.
            return
        self._kills_left.pop(0)
        os.kill(pid, signal.SIGKILL)
        self.kills.append((round(self._second(), 1), victim))
        say(f"killed {victim}, process {pid}")
        (self.folder / "kills.json").write_text(json.dumps(self.kills))

    def _sample(self) -> None:
        samples = []
        for name, pid in self._pids().items():
            sample = sample_of(name, pid, self._second())
            if sample is not None:
                samples.append(asdict(sample))
        with (self.folder / "samples.jsonl").open("a") as file:
            for sample_fields in samples:
                print(json.dumps(sample_fields), file=file)

        minute_load, _, _ = os.getloadavg()
        with (self.folder / "loads").open("a") as file:
            print(minute_load, file=file)

    def _pids(self) -> dict[str, int]:
        """Returns the processes that run, by name."""
        pids = {}
        for name, process in self._parts.items():
            if process.runs:
                pids[name] = process.pid
        pids["soak"] = os.getpid()
        state = self.online / STATE
        if "supervisor" in pids and state.exists():
            # The state may be a second old: a process that was killed is no child any
            # more.
            children = set(children_of(pids["supervisor"]))
            processes = json.loads(state.read_bytes())["processes"]
            for name, process_state in processes.items():
                pid = process_state["pid"]
                if pid in children:
                    pids[name] = pid
        return pids

    def _second(self) -> float:
        return time.monotonic() - self._begin

    def _run(self, name: str, command: list[str]) -> None:
        log = self.folder / f"{name}.log"
        process = Process(name, command, log, 0)
        self._parts[name] = process
        self._stack.callback(process.stop)
        say(f"started {name}, process {process.pid}")


def kill_moments(seconds: float, kills: int, seed: int) -> list[tuple[float, str]]:
    """Returns the moments of the kills, in seconds after the first live click, and the
    victims.

    Each kill has a slot of the same length, and is in its first three quarters: a
    process that was killed has started again before the next one is killed, if the run
    is not too short.
    """
    generator = random.Random(seed)
    slot_s = (LAST_KILL - FIRST_KILL) * seconds / max(kills, 1)
    moments = []
    for number in range(kills):
        slots = number + 0.75 * generator.random()
        moment = FIRST_KILL * seconds + slot_s * slots
        victim = VICTIMS[number % len(VICTIMS)]
        moments.append((moment, victim))
    return moments


def client_command(name: str, folder: Path) -> list[str]:
    """Returns the command of a client of soak_clients.py."""
    script = Path(__file__).with_name("soak_clients.py")
    return [
        sys.executable,
        str(script),
        name,
        str(folder),
    ]


def compare_online(folder: Path) -> bool:
    """Returns whether the online model is that of an undisturbed run.

    The undisturbed run reads the same clicks at once, without a server.

    Args:
        folder: The folder of the online example. The other run gets the folder beside
            it.
    """
    from torchrec_recstore.checkpoint.compare import compare_chains
    from torchrec_recstore.checkpoint.info import read_chain

    soaked = Settings.read(folder)
    undisturbed = replace(
        soaked,
        folder=folder.with_name("undisturbed"),
        url=None,
        paced=False,
    )
    undisturbed.folder.mkdir()
    undisturbed.write()
    for role in ("generator", "trainer"):
        say(f"the {role} of the undisturbed run")
        _run_worker(role, undisturbed.folder)
    undisturbed_checkpoint = max(undisturbed.checkpoints.glob("step-*"))
    soaked_checkpoint = max(soaked.checkpoints.glob("step-*"))
    difference = compare_chains(
        read_chain(undisturbed_checkpoint),
        read_chain(soaked_checkpoint),
    )
    parts = [*difference.tables.values(), difference.dense]
    state = json.loads((folder / STATE).read_text())
    served_version = state["served_version"]
    return (
        all(part.equal for part in parts)
        and undisturbed_checkpoint.name == soaked_checkpoint.name
        and _final_version(undisturbed.folder) == served_version
        and _final_version(soaked.folder) == served_version
        and state["status"] == FINISHED
    )


def _run_worker(role: str, folder: Path) -> None:
    """Runs the trainer or the generator of an online run to its end."""
    worker = ROOT / "examples" / "online" / "worker.py"
    command = [
        sys.executable,
        str(worker),
        role,
        str(folder),
    ]
    log = folder / f"{role}.log"
    process = Process(role, command, log, 0)
    while process.runs:
        time.sleep(TICK_S)
    if not process.has_ended:
        raise SoakError(f"the undisturbed {role} has failed, see {folder}")


def _final_version(folder: Path) -> Any:
    """Returns the version of the full export at the end of an online run."""
    trainer = json.loads((folder / "trainer.json").read_text())
    return trainer["final_version"]


def read_samples(folder: Path) -> list[Sample]:
    """Returns the samples that a run has written so far."""
    lines = (folder / "samples.jsonl").read_text().splitlines()
    samples = []
    for line in lines:
        fields = json.loads(line)
        samples.append(Sample(**fields))
    return samples


def cores(samples: Sequence[Sample]) -> float:
    """Returns the processor time of all processes over the time of the run, in cores."""
    first_s: dict[tuple[str, int], float] = {}
    last_s: dict[tuple[str, int], float] = {}
    for sample in samples:
        process = (sample.process, sample.pid)
        first_s.setdefault(process, sample.processor_s)
        last_s[process] = sample.processor_s
    used_s = sum(last_s[process] - first_s[process] for process in last_s)
    seconds = [sample.second for sample in samples]
    length_s = max(seconds) - min(seconds)
    return used_s / max(length_s, 1.0)


def print_judgements(judgements: Sequence[Judgement]) -> None:
    """Prints a table with a line for each process."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="after the warm-up -> at the end; slopes in MB an hour")
    table.add_column("process")
    for title in (
        "starts",
        "RSS, MB",
        "RssAnon, MB",
        "first half",
        "last half",
        "last quarter",
        "shmem, last half",
        "files",
        "threads",
    ):
        table.add_column(title, justify="right")

    def slope_text(value: float | None) -> str:
        return "-" if value is None else f"{value:+.2f}"

    def change_text(values: tuple[float, float]) -> str:
        begins, ends = values
        return f"{begins:g} -> {ends:g}"

    for judgement in judgements:
        rss_begins, rss_ends = judgement.rss_mb
        anon_begins, anon_ends = judgement.anon_mb
        table.add_row(
            judgement.process,
            str(judgement.series),
            f"{rss_begins:.0f} -> {rss_ends:.0f}",
            f"{anon_begins:.1f} -> {anon_ends:.1f}",
            slope_text(judgement.first["anon"]),
            slope_text(judgement.last["anon"]),
            slope_text(judgement.last_quarter["anon"]),
            slope_text(judgement.last["shmem"]),
            change_text(judgement.counts["files"]),
            change_text(judgement.counts["threads"]),
        )
    Console(width=145).print(table)


def finish(
    folder: Path,
    document: dict[str, Any],
    bound: float,
) -> bool:
    """Judges the samples, and writes the results and the plot.

    Returns:
        Whether all is exact and flat.
    """
    samples = read_samples(folder)
    kills_file = folder / "kills.json"
    kills = []
    if kills_file.exists():
        kills = json.loads(kills_file.read_text())
    judgements = judge(samples, bound)
    series = thinned(samples)
    used_cores = round(cores(samples), 2)
    loads_file = folder / "loads"
    if loads_file.exists():
        loads = [float(load) for load in loads_file.read_text().split()]
        document = document | {"median_load": median(loads)}
    document = document | {
        "kills": kills,
        "mb_an_hour": bound,
        "cores": used_cores,
        "processes": [asdict(judgement) for judgement in judgements],
        "series": series,
    }
    # NaN is not JSON, and a process that is too young to be judged has no value.
    text = json.dumps(document, separators=(",", ":"))
    text = text.replace("NaN", "null")
    (folder / "soak.json").write_text(text + "\n")
    plot(series, kills, folder / "soak.png")
    print_judgements(judgements)
    problems = []
    for judgement in judgements:
        problems += judgement.problems
    for name, is_exact in document.get("exact", {}).items():
        if is_exact:
            print(f"{name}: exact")
        else:
            print(f"{name}: NOT EXACT")
            problems.append(f"{name}: not exact")
    victims = ", ".join(victim for _, victim in kills) or "none"
    print(f"kills: {victims}; cores: {used_cores}")
    for problem in problems:
        print(f"problem: {problem}")
    print("FAILED" if problems else "flat and exact")
    return not problems


def free_port() -> int:
    """Returns a port that is free now.

    It is below those that the kernel gives to connections.
    """
    port_range = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    first_of_kernel = int(port_range.split()[0])
    end = first_of_kernel if first_of_kernel > 20_000 else 32_768
    while True:
        port = random.SystemRandom().randrange(10_000, end)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def say(text: str) -> None:
    """Prints a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


@app.command("run")
def run_command(
    folder: Annotated[Path, typer.Argument(help="New folder for the run.")],
    hours: Annotated[
        float, typer.Option(help="Hours of live clicks.", min=0.001)
    ] = 2.0,
    rate: Annotated[int, typer.Option(help="Clicks a second.", min=1)] = 300,
    kills: Annotated[
        int, typer.Option(help="Number of processes that are killed.", min=0)
    ] = 9,
    seed: Annotated[
        int, typer.Option(help="Seed of the clicks and of the kills.", min=0)
    ] = 0,
    every: Annotated[
        float, typer.Option(help="Seconds between two samples.", min=0.1)
    ] = 10.0,
    bound: Annotated[
        float, typer.Option(help="MB an hour up to which memory is flat.", min=0.0)
    ] = MB_AN_HOUR,
) -> None:
    """Run everything together, and fail if something is not exact or grows."""
    if folder.exists():
        raise SystemExit(f"{folder} exists: name a new folder")
    folder.mkdir(parents=True)
    folder = folder.absolute()
    flags = {
        "hours": hours,
        "rate": rate,
        "seed": seed,
        "every_s": every,
    }
    (folder / "flags.json").write_text(json.dumps(flags))
    exact = {}
    try:
        with Soak(folder, hours, rate, kills, seed, every) as soak:
            soak.run()
            soak.compare_again()
        for name in (*CLIENTS, "again"):
            client_report = json.loads((folder / f"{name}.json").read_text())
            exact[name] = bool(client_report["exact"])
        exact["online"] = compare_online(folder / "online")
    except (SoakError, DataError) as error:
        raise SystemExit(
            f"soak: {error}; soak.py report {folder} judges what was measured"
        ) from error
    from measure import conditions

    end = {"exact": exact, "conditions": conditions()}
    (folder / "exact.json").write_text(json.dumps(end))
    report(folder, bound)


@app.command()
def report(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a run, which may still go on.")
    ],
    bound: Annotated[
        float, typer.Option(help="MB an hour up to which memory is flat.", min=0.0)
    ] = MB_AN_HOUR,
) -> None:
    """Judge the samples of a run, and write soak.json and soak.png into its folder."""
    document = json.loads((folder / "flags.json").read_text())
    end = folder / "exact.json"
    if end.exists():
        document |= json.loads(end.read_text())
        reports = {}
        for name in (*CLIENTS, "again"):
            client_report = folder / f"{name}.json"
            if client_report.exists():
                reports[name] = json.loads(client_report.read_text())
        if reports:
            document["reports"] = reports
    if not finish(folder, document, bound):
        raise SystemExit(1)


if __name__ == "__main__":
    app()
