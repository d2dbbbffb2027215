"""Programs that end while a checkpoint is being written, each in forked processes that
exit as programs do.

python -m tests.checkpoint.leaving DIRECTORY PROGRAM_WORLD-SIZE ...
"""

from __future__ import annotations

import atexit
import errno
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore import async_save, save_checkpoint
from torchrec_recstore.checkpoint import writer
from torchrec_recstore.checkpoint.destination import Destination

from . import models

Program = Callable[[int, DistributedModelParallel, Path], None]


def slowly(seconds: float = 0.5) -> None:
    """Makes the writing of every checkpoint file take some time."""
    write = writer.write_tensors

    def wait(path: Path, tensors: dict[str, torch.Tensor]) -> object:
        time.sleep(seconds)
        return write(path, tensors)

    writer.write_tensors = wait  # type: ignore[assignment]


def no_room(destination: Destination) -> Path:
    raise OSError(errno.ENOSPC, "No space left on device", os.fspath(destination.path))


def finished_at_exit(rank: int, model: DistributedModelParallel, path: Path) -> None:
    slowly()
    async_save(model, path)
    # All ranks of a save share the path. Another save is refused on every rank.
    with pytest.raises(
        BlockingIOError,
        match=rf"{path} cannot be written: process \d+ on host .* has been writing it",
    ):
        save_checkpoint(model, path)
    atexit.register(lambda: (path.parent / f"atexit_{rank}").touch())
    if rank == 0:
        dist.destroy_process_group()


class ClosedAtExit(logging.Handler):
    """A handler that makes a file when the exit function of ``logging`` closes it.

    That function was registered before this package was imported.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def close(self) -> None:
        self.path.touch()
        super().close()


def failed_unasked(rank: int, model: DistributedModelParallel, path: Path) -> None:
    Destination.stage = no_room  # type: ignore[method-assign]
    async_save(model, path)
    atexit.register(lambda: (path.parent / f"atexit_{rank}").touch())
    logging.getLogger().addHandler(ClosedAtExit(path.parent / f"logging_{rank}"))
    threading.Thread(
        target=lambda: (time.sleep(0.5), (path.parent / f"thread_{rank}").touch())
    ).start()


def failed_and_asked(rank: int, model: DistributedModelParallel, path: Path) -> None:
    stage = Destination.stage
    Destination.stage = no_room  # type: ignore[method-assign]
    saving = async_save(model, path)
    while not saving.done():
        time.sleep(0.01)
    Destination.stage = stage  # type: ignore[method-assign]
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
        save_checkpoint(model, path.with_name("later"))
    async_save(model, path.with_name("later"))


def failed_late(rank: int, model: DistributedModelParallel, path: Path) -> None:
    """The next save begins before the first save has failed, and is refused because the
    first one is being written.
    """
    slowly()
    Destination.publish = no_room  # type: ignore[method-assign, assignment]
    async_save(model, path)
    with pytest.raises(ValueError, match="being saved already"):
        save_checkpoint(model, path.with_name("later"))


def left_with_an_error(rank: int, model: DistributedModelParallel, path: Path) -> None:
    slowly()
    async_save(model, path)
    raise SystemExit(3)


def a_rank_dies(rank: int, model: DistributedModelParallel, path: Path) -> None:
    slowly()
    async_save(model, path)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def interrupted(rank: int, model: DistributedModelParallel, path: Path) -> None:
    """Ctrl-C while the process waits for its checkpoint."""
    # a shell lets the programs that it starts in the background ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    slowly(30)
    async_save(model, path)
    atexit.register(lambda: (path.parent / f"atexit_{rank}").touch())

    def interrupt() -> None:
        threading.main_thread().join()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()


def failed_in_a_fork(rank: int, model: DistributedModelParallel, path: Path) -> None:
    """A child process of multiprocessing calls no exit functions."""
    dist.destroy_process_group()
    process = multiprocessing.get_context("fork").Process(
        target=run, args=(failed_and_done, 0, 1, path.parent, "child")
    )
    process.start()
    process.join()


def failed_and_done(rank: int, model: DistributedModelParallel, path: Path) -> None:
    Destination.stage = no_room  # type: ignore[method-assign]
    saving = async_save(model, path)
    while not saving.done():
        time.sleep(0.01)


PROGRAMS: dict[str, tuple[Program, int]] = {
    "finished_at_exit_1": (finished_at_exit, 1),
    "finished_at_exit_2": (finished_at_exit, 2),
    "failed_unasked_1": (failed_unasked, 1),
    "failed_and_asked_1": (failed_and_asked, 1),
    "failed_late_1": (failed_late, 1),
    "left_with_an_error_1": (left_with_an_error, 1),
    "a_rank_dies_2": (a_rank_dies, 2),
    "interrupted_1": (interrupted, 1),
    "failed_in_a_fork_1": (failed_in_a_fork, 1),
}


def run(
    program: Program,
    rank: int,
    world_size: int,
    directory: Path,
    rendezvous_file: str = "rendezvous",
) -> None:
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    rendezvous = f"file://{directory}/{rendezvous_file}"
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=world_size
    )
    model = models.recstore("row_wise")
    models.train(model)
    program(rank, model, directory / "saved")


def main(directory: Path, names: Sequence[str]) -> None:
    results = {}
    for name in names:
        program, world_size = PROGRAMS[name]
        (directory / name).mkdir()
        children = []
        for rank in range(world_size):
            child = os.fork()
            if child == 0:
                os.dup2(
                    os.open(
                        directory / name / f"stderr_{rank}", os.O_CREAT | os.O_WRONLY
                    ),
                    2,
                )
                run(program, rank, world_size, directory / name)
                return
            children.append(child)
        codes = [
            os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children
        ]
        results[name] = codes
    (directory / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)  # libgomp's threads do not survive a fork
    main(Path(sys.argv[1]), sys.argv[2:])
