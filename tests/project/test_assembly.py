"""The loops of the usual dims keep their vectors in registers."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess

import pytest

# GCC passes a vector that is wider than the registers through the stack, which took up
# to hundreds of references in one of these functions. LAMB and FTRL have up to 26
# references, because they have more constants than registers. With float16 states, FTRL
# has 62 in AVX2, and LAMB and Adam have 58, because the function that rounds states is
# inlined twice and has constants of its own. If it is called for each register instead,
# Adam takes half as long again.
MOST = 65
# A user-defined optimizer widens and rounds float16 states of both kinds in one
# function, whose loops are unrolled at 64 columns: it has 103 in AVX2.
# benchmarks/options.py compares its time with that of built-in optimizers.
MOST_OF_USERS = 110
HOT = re.compile(
    r"recstore::(avx2|avx512)::\(anonymous namespace\)::"
    r"(?:pool_bags|pool_block|update_rows)<recstore::\1::\(anonymous"
    r" namespace\)::Float32Row,.*\b(?:16|32|64|128)l?\b"
    r"|recstore::(avx2|avx512)::\(anonymous namespace\)::\w+Step::(?:run|step<true,"
    r" .*)<?.*\b(?:16|32|64|128)l\b"
)
ON_STACK = re.compile(r"%[yz]mm.*\(%r[sb]p|\(%r[sb]p.*%[yz]mm")


@pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("objdump") is None,
    reason="needs objdump on x86-64",
)
def test_hot_loops_keep_their_vectors_in_registers() -> None:
    extension = importlib.util.find_spec("torchrec_recstore._C")
    assert extension is not None
    assert extension.origin is not None
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", extension.origin]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    on_stack: dict[str, int] = {}
    name = None
    for line in run.stdout.splitlines():
        if line.endswith(">:"):
            found = line[line.index("<") + 1 : -2]
            name = found if HOT.search(found) else None
            if name is not None:
                on_stack.setdefault(name, 0)
        elif name is not None and ON_STACK.search(line):
            on_stack[name] += 1
    if not on_stack:
        pytest.skip(
            "the extension has no symbols, or another compiler has inlined the loops"
        )
    most = {
        name: MOST_OF_USERS if "RowOptimizerStep::run<" in name else MOST
        for name in on_stack
    }
    assert {name: count for name, count in on_stack.items() if count > most[name]} == {}
