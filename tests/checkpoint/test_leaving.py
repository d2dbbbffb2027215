"""Programs that end without waiting for their checkpoints write them, or print that
they are not written.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from torchrec_recstore import read_info
from torchrec_recstore.checkpoint.fold import check_files

from .leaving import PROGRAMS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the programs of :mod:`tests.checkpoint.leaving`, and returns the directory of
    their files.
    """
    directory = tmp_path_factory.mktemp("left")
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.leaving", str(directory), *PROGRAMS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return directory


def statuses(left: Path, program: str) -> list[int]:
    found: list[int] = json.loads((left / "results.json").read_text())[program]
    return found


def check_saved(path: Path, world_size: int) -> None:
    info = read_info(path)
    assert info.world_size == world_size
    assert all(table.rows > 0 for table in info.tables.values())
    check_files([info])


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_process_that_ends_waits_for_its_checkpoint(
    left: Path, world_size: int
) -> None:
    """The checkpoint is written even if a rank has destroyed the process group."""
    program = f"finished_at_exit_{world_size}"
    assert statuses(left, program) == [0] * world_size
    check_saved(left / program / "saved", world_size)
    for rank in range(world_size):
        assert (left / program / f"stderr_{rank}").read_text() == ""
        assert (left / program / f"atexit_{rank}").exists()


def test_an_error_that_nobody_asked_for_is_printed_and_is_the_status(
    left: Path,
) -> None:
    directory = left / "failed_unasked_1"
    assert statuses(left, directory.name) == [1]
    output = (directory / "stderr_0").read_text()
    path = directory / "saved"
    assert output.startswith(
        f"async_save: the checkpoint {path} has not been written.\nTraceback"
    )
    assert f"OSError: [Errno 28] No space left on device: '{path}'" in output
    # Exit functions and threads still run to their end.
    assert (directory / "atexit_0").exists()
    assert (directory / "logging_0").exists()
    assert (directory / "thread_0").exists()
    assert not path.exists()


def test_an_error_that_the_next_save_has_raised_is_not_told_again(
    left: Path,
) -> None:
    assert statuses(left, "failed_and_asked_1") == [0]
    assert (left / "failed_and_asked_1" / "stderr_0").read_text() == ""
    check_saved(left / "failed_and_asked_1" / "later", 1)


def test_a_save_that_fails_after_the_next_one_was_refused(left: Path) -> None:
    assert statuses(left, "failed_late_1") == [1]
    assert (
        "No space left on device" in (left / "failed_late_1" / "stderr_0").read_text()
    )


def test_another_status_stays_as_it_is(left: Path) -> None:
    assert statuses(left, "left_with_an_error_1") == [3]
    check_saved(left / "left_with_an_error_1" / "saved", 1)


def test_a_rank_that_dies_is_told_of_by_those_that_live(left: Path) -> None:
    assert statuses(left, "a_rank_dies_2") == [1, -9]
    assert (
        "RuntimeError: a rank of the job has died"
        in (left / "a_rank_dies_2" / "stderr_0").read_text()
    )
    assert not (left / "a_rank_dies_2" / "saved").exists()


def test_a_process_that_is_interrupted_while_it_waits_says_what_is_not_written(
    left: Path,
) -> None:
    directory = left / "interrupted_1"
    assert statuses(left, directory.name) == [1]
    assert (
        f"async_save: the checkpoint {directory / 'saved'} has not been written.\n"
        "It was being written when the process was interrupted.\n"
    ) in (directory / "stderr_0").read_text()
    assert (directory / "atexit_0").exists()
    assert not (directory / "saved").exists()


def test_a_forked_child_of_multiprocessing_prints_the_error(left: Path) -> None:
    assert statuses(left, "failed_in_a_fork_1") == [0]
    assert (
        "No space left on device"
        in (left / "failed_in_a_fork_1" / "stderr_0").read_text()
    )
