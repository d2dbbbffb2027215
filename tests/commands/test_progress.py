"""Tests of the progress bars of commands, which are shown only on a terminal."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from rich.progress import Task, TaskID

from tests.packages import PYTHON_PATH
from torchrec_recstore import save_checkpoint
from torchrec_recstore.commands.progress import TimeLeftColumn, rate

from ..checkpoint import models
from ..processes import run_forked_command
from ..terminal import run_in_terminal

# All commands run in one process, because each new process would import torch again.
COMMANDS = ["inspect full", "compact full new", "diff full new"]
UNITS = {"verifying": "bytes", "folding": "rows", "comparing": "rows"}
RUN = [
    sys.executable,
    "-c",
    f"""
from torchrec_recstore.cli import app
for command in {COMMANDS}:
    app(command.split(), standalone_mode=False)
""",
]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def checkpoint(one_rank: None, tmp_path: Path) -> Path:
    model = models.recstore()
    models.train(model)
    save_checkpoint(model, tmp_path / "full")
    return tmp_path / "full"


@pytest.fixture(autouse=True)
def _find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)


@pytest.mark.slow
def test_on_a_terminal(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint.parent)
    status, out, seen = run_in_terminal(RUN)
    assert status == 0
    assert out.endswith("equal\n")
    frames = [
        frame
        for frame in ESCAPES.sub("", seen).replace("\r", "\n").splitlines()
        if frame.strip()
    ]
    # The bars follow one another. The last frame of a bar precedes the first frame of
    # the next bar.
    names = [frame.split()[0] for frame in frames]
    last = [
        frame
        for frame, name, after in zip(frames, names, [*names[1:], ""], strict=True)
        if name != after
    ]
    assert [frame.split()[0] for frame in last] == [
        "verifying",
        "folding",
        "verifying",
        "comparing",
    ]
    for frame in last:
        unit = UNITS[frame.split()[0]]
        # A frame has the amount done, the total, the rate, and the remaining time,
        # which is zero at the end.
        assert re.search(
            r"([\d.]+)/\1 [kMG]?B" if unit == "bytes" else r"(\d+)/\1 ", frame
        ), frame
        assert re.search(
            r"[\d.]+ [kMG]?B/s" if unit == "bytes" else r"[\d.]+[kMG]? rows/s", frame
        ), frame
        assert frame.rstrip().endswith("0:00:00"), frame
    assert seen.rstrip().endswith("\x1b[2K")  # the last bar is erased


STEPS = """
import time
from torchrec_recstore.commands.progress import steps
with steps(3) as begin:
    for name in ("kernel", "store", "dlrm"):
        begin(name)
        time.sleep(0.6)
"""


@pytest.mark.slow
def test_long_steps() -> None:
    status, _, seen = run_in_terminal([sys.executable, "-c", STEPS])
    assert status == 0
    frames = [
        frame.rstrip()
        for frame in re.split(r"[\r\n]+", ESCAPES.sub("", seen))
        if frame.strip()
    ]
    for pattern in (
        r"^kernel .* 0/3 0:00:0\d$",
        r"^dlrm .* 2/3 0:00:\d\d, about 0:00:\d\d left$",
    ):
        assert any(re.search(pattern, frame) for frame in frames), frames


def test_time_left_of_long_steps() -> None:
    task = Task(TaskID(0), "", total=3, completed=0, _get_time=lambda: 60.0)
    task.start_time = 0.0
    assert str(TimeLeftColumn().render(task)) == "0:01:00"
    task.completed = 1
    task.fields["done_after"] = 50.0  # and the next has run for ten seconds
    assert str(TimeLeftColumn().render(task)) == "0:01:00, about 0:01:30 left"


def test_nothing_where_it_is_no_terminal(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then treats any file as a terminal
    monkeypatch.chdir(checkpoint.parent)
    run = run_forked_command(RUN[1:])
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(
    ("per_second", "unit", "expected"),
    [
        (12.3, "rows", "12 rows/s"),
        (12345.0, "rows", "12.3k rows/s"),
        (3.2e6, "rows", "3.2M rows/s"),
        (4e9, "rows", "4.0G rows/s"),
        (3.1e8, "bytes", "310.0 MB/s"),
    ],
)
def test_rates(per_second: float, unit: str, expected: str) -> None:
    assert rate(per_second, unit) == expected  # type: ignore[arg-type]
