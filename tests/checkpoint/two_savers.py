"""Two processes save to one path at the same time.

Every save that a process acknowledges exists and can be loaded.

python -m tests.checkpoint.two_savers --rounds 1000

Every round forks two processes. Each process makes its own model, because a forked
process cannot use the tables of its parent. Each process stops at a random call to the
filesystem. Then the first process runs to its end, and after it the second process. In
half of the rounds one of the processes is killed instead of stopped. A process
acknowledges its save after ``save_checkpoint`` has returned. Rounds of three kinds take
turns:

- ``new``: both save to a path where nothing is.
- ``overwrite``: both replace a checkpoint that has been acknowledged before.
- ``base``: one saves a delta of a checkpoint, the other one replaces that checkpoint.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore import load_checkpoint, save_checkpoint
from torchrec_recstore.checkpoint import writer
from torchrec_recstore.store import Table

from . import models

KINDS = ("new", "overwrite", "base")


def tables(model: DistributedModelParallel) -> list[Table]:
    return [
        shard.table
        for shards in model.module.sparse.recstore_state.shards.values()
        for shard in shards
    ]


def mark(model: DistributedModelParallel, saver: int) -> None:
    """Writes the saver's number into every row, so that the files of two savers differ."""
    for table in tables(model):
        ids = table.ids()
        table.insert(ids, torch.full((len(ids), models.DIM), float(saver)))


def alone() -> DistributedModelParallel:
    """A trained model in a forked process that is the only rank of its group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = models.recstore()
    models.train(model)
    return model


class Saver:
    """A forked process that saves once, and that stops or is killed at one of its calls
    to the filesystem.

    Args:
        prepare: Makes the model.
        save: Saves the model. The answer is the error that it raises.
        at: The number of the call, among the calls of ``save``.
        signal_: The signal at that call: SIGSTOP or SIGKILL.
    """

    def __init__(
        self,
        prepare: Callable[[], DistributedModelParallel],
        save: Callable[[DistributedModelParallel], object],
        at: int = 0,
        signal_: signal.Signals = signal.SIGSTOP,
    ) -> None:
        self._text, answer = os.pipe()
        self._ended = False
        self.pid = os.fork()
        if self.pid == 0:
            calls = 0

            def count(event: str, arguments: object) -> None:
                nonlocal calls
                if event == "open" or event.startswith(("os.", "shutil.", "fcntl.")):
                    calls += 1
                    if calls == at:
                        os.kill(os.getpid(), signal_)

            try:
                model = prepare()
                sys.addaudithook(count)
                save(model)
                os.write(answer, f"saved {calls}".encode())
            except Exception as error:
                os.write(answer, f"{type(error).__name__}: {error}".encode())
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(answer)

    def wait(self) -> None:
        """Waits until the process has stopped or ended."""
        if not self._ended:
            self._ended = not os.WIFSTOPPED(os.waitpid(self.pid, os.WUNTRACED)[1])

    def answer(self) -> str:
        """Lets the process run to its end.

        Returns ``saved`` and the number of calls, or the error, or nothing.
        """
        while not self._ended:
            os.kill(self.pid, signal.SIGCONT)
            self.wait()
        with os.fdopen(self._text) as text:
            return text.read()


def saved(save: Callable[[DistributedModelParallel], object], number: int) -> str:
    """The answer of a saver that is not stopped."""

    def prepare() -> DistributedModelParallel:
        model = alone()
        mark(model, number)
        return model

    saver = Saver(prepare, save)
    saver.wait()
    answer = saver.answer()
    assert answer.startswith("saved "), answer
    return answer


def held(path: Path) -> int | None:
    """The number of the saver of all rows of a checkpoint.

    None if there is no checkpoint.
    """
    if not path.exists():
        return None
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            model = alone()
            load_checkpoint(model, path)
            (value,) = {
                float(value)
                for table in tables(model)
                for value in table.lookup(table.ids()).unique()
            }
            os.write(writer, str(int(value)).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as answer:
        text = answer.read()
    assert text, f"{path} does not load, or has the rows of several savers"
    return int(text)


class Rounds:
    """Rounds in one directory, and their outcomes.

    Args:
        directory: An empty directory.
        seed: The seed of the moments at which savers are stopped or killed.
    """

    def __init__(self, directory: Path, seed: int = 0) -> None:
        writer.PART_BYTES = 700  # several files for each table
        self.outcomes: Counter[str] = Counter()
        self._directory = directory
        self._random = random.Random(seed)
        self._calls = int(
            saved(
                lambda model: save_checkpoint(model, directory / "whole"), 1
            ).removeprefix("saved ")
        )

    def play(self, kind: str, kill: bool) -> None:
        """Runs one round.

        Raises:
            AssertionError: an acknowledged checkpoint is lost.
        """
        path, base = self._directory / "saved", self._directory / "base"
        for rest in self._directory.iterdir():
            shutil.rmtree(rest) if rest.is_dir() else rest.unlink()
        if kind != "new":
            saved(
                lambda model: save_checkpoint(
                    model, path if kind == "overwrite" else base
                ),
                1,
            )

        def prepare(saver: int) -> DistributedModelParallel:
            model = alone()
            if kind == "base" and saver == 2:
                load_checkpoint(model, base)
            mark(model, saver)
            return model

        def save(model: DistributedModelParallel, saver: int) -> None:
            if kind == "base" and saver == 2:
                save_checkpoint(model, path, delta_of=base)
            else:
                save_checkpoint(
                    model, base if kind == "base" else path, overwrite=kind != "new"
                )

        savers = {}
        victim = self._random.choice((2, 3)) if kill else 0
        for number in self._random.sample((2, 3), 2):
            at, what = (
                self._random.randint(1, self._calls),
                (signal.SIGKILL if number == victim else signal.SIGSTOP),
            )
            savers[number] = Saver(
                partial(prepare, number), partial(save, saver=number), at, what
            )
            savers[number].wait()
        answers = {number: saver.answer() for number, saver in savers.items()}
        answers = {
            number: "saved" if text.startswith("saved ") else text
            for number, text in answers.items()
        }
        acknowledged: set[int | None] = {
            number for number, answer in answers.items() if answer == "saved"
        }
        for number, answer in answers.items():
            self.outcomes[
                f"{kind}:"
                f" {'acknowledged' if answer == 'saved' else answer.split(':')[0] or 'killed'}"
            ] += 1
            other = savers[5 - number].pid
            refused = answer.startswith(("BlockingIOError", "FileExistsError"))
            # the base was replaced before this process had locked it
            if (kind, number) == ("base", 2):
                refused = refused or "has neither saved nor loaded" in answer
                refused = (
                    refused
                    or "base has been replaced or deleted since it was read" in answer
                )
            assert refused or answer in (
                "saved",
                "" if number == victim else "saved",
            ), (kind, number, answer)
            if answer.startswith("BlockingIOError"):
                # A process that is stopped between locking and writing its name is not
                # known.
                named = f"process {other} " in answer
                self.outcomes[
                    f"refused by a holder that is {'named' if named else 'not known'}"
                ] += 1
                assert named or "another process has been using it" in answer, answer
                assert os.fspath(base if kind == "base" else path) in answer, answer
        if kind == "base":
            assert held(base) in ({1, 3} if 3 not in acknowledged else {3})
            if 2 in acknowledged:
                assert held(path) == 2
        else:
            expected = acknowledged or {1 if kind == "overwrite" else None, victim}
            if (
                kind == "overwrite"
                # the killed process may have replaced the checkpoint that the other
                # process had acknowledged
            ):
                expected |= {victim}
            assert held(path) in expected, (kind, victim, answers)
        # The save is repeated, although files of the killed process are still there.
        target = path.with_name("alone") if kind == "base" else path
        saved(lambda model: save_checkpoint(model, target, overwrite=True), 4)
        if kind != "base":
            assert {entry.name for entry in self._directory.iterdir()} == {"saved"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="Count the rounds that fail instead of stopping.",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lost: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        rounds = Rounds(Path(directory), arguments.seed)
        for number in range(arguments.rounds):
            kind = KINDS[number % len(KINDS)]
            try:
                rounds.play(kind, kill=number % 2 == 1)
            except Exception:
                if not arguments.keep_going:
                    raise
                lost[kind] += 1
                print(traceback.format_exc().strip().split("\n")[-1][:300])
    print(f"{arguments.rounds} rounds: {dict(sorted(rounds.outcomes.items()))}")
    print(f"rounds that failed: {dict(lost) or 'none'}")
    sys.stdout.flush()
    os._exit(1 if lost else 0)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    main()
