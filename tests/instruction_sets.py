"""Runs a function with each instruction set, in one process each, because a process
chooses one instruction set.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch.multiprocessing as mp

from tests.processes import START_METHOD
from torchrec_recstore import ops

INSTRUCTION_SETS = ("baseline", "neon", "avx2", "avx512")


def by_instruction_set(work: Callable[[], list[str]]) -> dict[str, list[str]]:
    """Returns the result of ``work`` for each instruction set that this processor has.

    Args:
        work: at module level, so that it can be sent to other processes, which import
            its module.
    """
    found = {isa: _by(isa, work) for isa in INSTRUCTION_SETS}
    return {isa: result for isa, result in found.items() if result is not None}


def check_same_bits(work: Callable[[], list[str]]) -> None:
    """Checks that ``work`` returns one digest, each time and with each instruction set."""
    digests = by_instruction_set(work)
    assert len({digest for some in digests.values() for digest in some}) == 1, digests


def _by(isa: str, work: Callable[[], list[str]]) -> list[str] | None:
    context = mp.get_context(START_METHOD)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(isa, work, theirs))
    process.start()
    theirs.close()
    try:
        result: list[str] | Exception = ours.recv()
    finally:
        process.join()
    if isinstance(result, Exception):
        if "this processor does not support" in str(result):
            return None
        raise result
    return result


def _work(isa: str, work: Callable[[], list[str]], results: Connection) -> None:
    os.environ["RECSTORE_ISA"] = isa
    try:
        result = work()
        if ops.instruction_set() != isa:
            raise RuntimeError(f"asked for {isa}, got {ops.instruction_set()}")
        results.send(result)
    except Exception as error:
        results.send(error)
