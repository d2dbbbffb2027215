"""Programs that end without waiting for their checkpoints write them, or print that
they are not written.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from torchrec_recstore import read_info
from torchrec_recstore.checkpoint.fold import check_files

from .leaving import PROGRAMS

pytestmark = pytest.mark.timeout(1800)
ROOT = Path(__file__).parents[2]


def run(programs: Iterable[str], directory: Path) -> Path:
    """Runs programs of :mod:`tests.checkpoint.leaving`, and returns the directory of
    their files.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.leaving", str(directory), *programs],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return directory


@pytest.fixture(scope="module")
def left_slowly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(PROGRAMS, tmp_path_factory.mktemp("left_slowly"))


def statuses(left: Path, program: str) -> list[int]:
    found: list[int] = json.loads((left / "results.json").read_text())[program]
    return found


def check_saved(path: Path, world_size: int) -> None:
    info = read_info(path)
    assert info.world_size == world_size
    assert all(table.rows > 0 for table in info.tables.values())
    check_files([info])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_process_that_ends_waits_for_its_checkpoint(
    left_slowly: Path, world_size: int
) -> None:
    """The checkpoint is written even if a rank has destroyed the process group."""
    left = left_slowly
    program = f"finished_at_exit_{world_size}"
    assert statuses(left, program) == [0] * world_size
    check_saved(left / program / "saved", world_size)
    for rank in range(world_size):
        assert (left / program / f"stderr_{rank}").read_text() == ""
        assert (left / program / f"atexit_{rank}").exists()


@pytest.mark.slow
def test_an_error_that_nobody_asked_for_is_printed_and_is_the_status(
    left_slowly: Path,
) -> None:
    directory = left_slowly / "failed_unasked_1"
    assert statuses(left_slowly, directory.name) == [1]
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


@pytest.mark.slow
def test_an_error_that_the_next_save_has_raised_is_not_told_again(
    left_slowly: Path,
) -> None:
    assert statuses(left_slowly, "failed_and_asked_1") == [0]
    assert (left_slowly / "failed_and_asked_1" / "stderr_0").read_text() == ""
    check_saved(left_slowly / "failed_and_asked_1" / "later", 1)


@pytest.mark.slow
def test_a_save_that_fails_after_the_next_one_was_refused(left_slowly: Path) -> None:
    assert statuses(left_slowly, "failed_late_1") == [1]
    assert (
        "No space left on device"
        in (left_slowly / "failed_late_1" / "stderr_0").read_text()
    )


@pytest.mark.slow
def test_another_status_stays_as_it_is(left_slowly: Path) -> None:
    assert statuses(left_slowly, "left_with_an_error_1") == [3]
    check_saved(left_slowly / "left_with_an_error_1" / "saved", 1)


@pytest.mark.slow
def test_a_rank_that_dies_is_told_of_by_those_that_live(left_slowly: Path) -> None:
    assert statuses(left_slowly, "a_rank_dies_2") == [1, -9]
    assert (
        "RuntimeError: a rank of the job has died"
        in (left_slowly / "a_rank_dies_2" / "stderr_0").read_text()
    )
    assert not (left_slowly / "a_rank_dies_2" / "saved").exists()


@pytest.mark.slow
def test_a_process_that_is_interrupted_while_it_waits_says_what_is_not_written(
    left_slowly: Path,
) -> None:
    directory = left_slowly / "interrupted_1"
    assert statuses(left_slowly, directory.name) == [1]
    assert (
        f"async_save: the checkpoint {directory / 'saved'} has not been written.\n"
        "It was being written when the process was interrupted.\n"
    ) in (directory / "stderr_0").read_text()
    assert (directory / "atexit_0").exists()
    assert not (directory / "saved").exists()


@pytest.mark.slow
def test_a_forked_child_of_multiprocessing_prints_the_error(left_slowly: Path) -> None:
    assert statuses(left_slowly, "failed_in_a_fork_1") == [0]
    assert (
        "No space left on device"
        in (left_slowly / "failed_in_a_fork_1" / "stderr_0").read_text()
    )
