"""The soak: what it judges, on series whose slopes are known, and a short run of all
processes.
"""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.packages import ROOT
from tests.redis_server import needs_redis

sys.path.insert(0, str(ROOT / "benchmarks"))
soak: Any = importlib.import_module("soak")
soak_series: Any = importlib.import_module("soak_series")
sys.path.remove(str(ROOT / "benchmarks"))

HOUR_S = 3600
FLAT = 100e6


def series(
    anon: Callable[[float], float],
    *,
    begin: int = 0,
    end: int = 2 * HOUR_S,
    pid: int = 1,
    shmem: Callable[[float], float] = lambda second: 0.0,
    files: Callable[[float], int] = lambda second: 10,
    threads: Callable[[float], int] = lambda second: 4,
) -> list[Any]:
    """The samples of a process, one each 10 s.

    Each function takes the second of the run; memory is in bytes.
    """
    samples = []
    for second in range(begin, end, 10):
        sample = soak_series.Sample(
            second=float(second),
            process="trainer",
            pid=pid,
            rss=int(anon(second) + shmem(second)) + 50_000_000,
            anon=int(anon(second)),
            file=50_000_000,
            shmem=int(shmem(second)),
            files=files(second),
            threads=threads(second),
            children=0,
            processor_s=0.0,
        )
        samples.append(sample)
    return samples


def grows(mb_an_hour: float) -> Callable[[float], float]:
    return lambda second: FLAT + mb_an_hour * 1e6 * second / HOUR_S


def judged(samples: list[Any]) -> Any:
    (judgement,) = soak_series.judge(samples)
    return judgement


def test_the_slope_of_several_series_does_not_depend_on_their_heights() -> None:
    first = [(x, 2.0 * x + 100) for x in range(5)]
    second = [(x, 2.0 * x - 70) for x in range(8, 12)]
    assert soak_series.slope([first, [], second]) == pytest.approx(2.0)
    assert soak_series.slope([[(1.0, 3.0)], []]) is None


def test_a_flat_process_passes() -> None:
    noise = random.Random(0)
    judgement = judged(series(lambda second: FLAT + noise.gauss(0, 2e6)))
    assert judgement.problems == []
    assert judgement.series == 1
    assert abs(judgement.last["anon"]) < 1
    assert judgement.anon_mb == pytest.approx((100, 100), abs=1)
    assert judgement.rss_mb == pytest.approx((150, 150), abs=1)


def test_a_process_that_leaks_memory_fails() -> None:
    for name in ("anon", "shmem"):
        leak = grows(soak_series.MB_AN_HOUR + 1)
        samples = (
            series(leak) if name == "anon" else series(lambda second: FLAT, shmem=leak)
        )
        judgement = judged(samples)
        assert judgement.first[name] == pytest.approx(soak_series.MB_AN_HOUR + 1)
        assert judgement.last[name] == pytest.approx(soak_series.MB_AN_HOUR + 1)
        (problem,) = judgement.problems
        assert (
            f"trainer: {soak_series.MEMORY[name]} grows by 7.0 MB an hour, of 6 allowed"
            == problem
        )
    assert judged(series(grows(soak_series.MB_AN_HOUR - 1))).problems == []


def test_growth_that_ends_passes() -> None:
    judgement = judged(
        series(lambda second: FLAT + min(second, 0.45 * 2 * HOUR_S) * 1e4)
    )
    assert judgement.first["anon"] > 30
    assert judgement.last["anon"] == pytest.approx(0, abs=1e-6)
    assert judgement.problems == []
    late = judged(series(lambda second: FLAT + min(second, 0.7 * 2 * HOUR_S) * 1e4))
    assert late.last["anon"] > soak_series.MB_AN_HOUR
    assert late.last_quarter["anon"] == pytest.approx(0, abs=1e-6)


def test_a_step_of_a_process_that_was_started_again_is_no_growth() -> None:
    samples = series(lambda second: FLAT, end=5000)
    samples += series(lambda second: 2 * FLAT, begin=5000, pid=2)
    judgement = judged(samples)
    assert judgement.series == 2
    assert judgement.last["anon"] == pytest.approx(0, abs=1e-6)
    assert judgement.problems == []
    leak = grows(8)
    samples = series(leak, end=5000)
    samples += series(
        lambda second: leak(second) - leak(5000) + FLAT, begin=5000, pid=2
    )
    assert judged(samples).last["anon"] == pytest.approx(8)


def test_the_growth_of_a_young_process_is_not_judged() -> None:
    def settles(second: float) -> float:
        return FLAT * (1 + min(second, 500) / 500)

    assert judged(series(settles)).problems == []


def test_files_and_threads_that_grow_fail() -> None:
    def at_three_quarters(more: int) -> Callable[[float], int]:
        return lambda second: 10 if second < 1.5 * HOUR_S else 10 + more

    for name in ("files", "threads"):
        judgement = judged(series(lambda second: FLAT, **{name: at_three_quarters(3)}))
        assert judgement.counts[name] == judgement.counts_of_last[name] == (10, 13)
        assert judgement.problems == [
            f"trainer: {name} grow from 10 to 13, by 2 allowed"
        ]
        assert (
            judged(series(lambda second: FLAT, **{name: at_three_quarters(2)})).problems
            == []
        )


def test_files_of_a_new_role_in_the_first_half_are_no_growth() -> None:
    judgement = judged(
        series(
            lambda second: FLAT, files=lambda second: 10 if second < HOUR_S / 2 else 14
        )
    )
    assert judgement.counts["files"] == (10, 14)
    assert judgement.counts_of_last["files"] == (14, 14)
    assert judgement.problems == []


def test_a_process_without_a_series_that_is_long_enough_fails() -> None:
    samples = series(lambda second: FLAT, end=4000)
    for begin in range(4000, 2 * HOUR_S, 500):
        samples += series(lambda second: FLAT, begin=begin, end=begin + 500, pid=begin)
    anon, shmem = judged(samples).problems
    assert anon == "trainer: too few samples in the last half to judge RssAnon"
    assert shmem == "trainer: too few samples in the last half to judge RssShmem"


def test_samples_of_a_process_that_runs() -> None:
    code = (
        "import sys, threading, time; kept = bytearray(40_000_000); kept[::1000] = b'1'"
        " * 40_000;threading.Thread(target=time.sleep, args=(60,),"
        " daemon=True).start();print('ready', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        sample = soak_series.sample_of("child", process.pid, 1.0)
        process.kill()
        process.wait()
    assert sample.threads == 2
    assert sample.files >= 3
    assert sample.anon > 40_000_000
    assert sample.rss == sample.anon + sample.file + sample.shmem
    assert soak_series.sample_of("child", process.pid, 2.0) is None


def test_a_process_that_nobody_waits_for_has_no_sample() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    end = time.monotonic() + 60
    while soak_series.sample_of("child", process.pid, 1.0) is not None:
        assert time.monotonic() < end
        threading.Event().wait(0.01)
    assert Path(f"/proc/{process.pid}").exists()
    process.wait()


def test_the_moments_of_kills_are_seeded() -> None:
    moments = soak.kill_moments(1000.0, 12, 5)
    assert moments == soak.kill_moments(1000.0, 12, 5)
    assert moments != soak.kill_moments(1000.0, 12, 6)
    assert [second for second, _ in moments] == sorted(second for second, _ in moments)
    assert {victim for _, victim in moments} == set(soak.VICTIMS)
    assert moments[0][0] >= 1000 * soak.FIRST_KILL
    assert moments[-1][0] <= 1000 * soak.LAST_KILL


def test_what_the_plot_has(tmp_path: Path) -> None:
    samples = series(lambda second: FLAT)
    (points,) = soak_series.thinned(samples)
    assert len(points["second"]) == len(points["anon"]) <= soak_series.POINTS
    soak_series.plot([points], [(5.0, "trainer")], tmp_path / "soak.png")
    assert (tmp_path / "soak.png").stat().st_size > 10_000


def test_the_page_has_the_table_of_the_results() -> None:
    document = json.loads((ROOT / "benchmarks" / "soak.json").read_text())
    page = (ROOT / "docs" / "operations.md").read_text()
    assert "\n".join(soak_series.table_lines(document["processes"])) in page


@needs_redis
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_short_soak(tmp_path: Path) -> None:
    folder = tmp_path / "soak"
    flags = (
        "--hours",
        0.012,
        "--rate",
        300,
        "--kills",
        3,
        "--every",
        1,
        "--bound",
        1e6,
    )
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "soak.py"),
        "run",
        str(folder),
        *map(str, flags),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    document = json.loads((folder / "soak.json").read_text())
    assert document["exact"] == dict.fromkeys(
        ("rows", "cold", "asks", "again", "online"), True
    ), done.stdout
    assert [victim for _, victim in document["kills"]] == list(soak.VICTIMS[:3])
    processes = {process["process"]: process for process in document["processes"]}
    # A process that has started within the run, and is older than the warm-up, is
    # judged.
    assert processes.keys() >= {
        "trainer",
        "follower",
        "frozen",
        "generator",
        "redis",
        "supervisor",
    }
    assert processes.keys() >= {
        "pair-0",
        "pair-1",
        "lease",
        "server",
        "rows",
        "cold",
        "asks",
        "soak",
    }
    assert processes["trainer"]["series"] == processes["pair-0"]["series"] == 2
    assert processes["frozen"]["last"]["anon"] is not None
    reports = document["reports"]
    assert reports["rows"]["updates"] > 100
    # More ids than memory has room for have come, so that rows were evicted to the cold
    # stores, and read there.
    assert reports["rows"]["cold_rows"] > 1000
    assert reports["cold"]["evicted"] > 1000
    assert reports["asks"]["answered"] > 10
    # The verdict of so short a run, in which files and threads have not settled, is
    # that of its problems.
    problems = [
        problem for process in processes.values() for problem in process["problems"]
    ]
    assert (done.returncode == 0) == (not problems)
    assert (folder / "soak.png").stat().st_size > 10_000
    leak = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "soak.py"),
            "report",
            str(folder),
            "--bound",
            "0",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert leak.returncode == 1
    assert "MB an hour, of 0 allowed" in leak.stdout
