"""On which NUMA nodes the rows lie: RECSTORE_MEMORY."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.processes import run_forked_command

ROWS = """
import torch
from torchrec_recstore.store import Table
table = Table(64)
table.lookup(torch.arange(50_000), train=True)
print(sum("interleave" in line for line in open("/proc/self/numa_maps")))
"""


@pytest.mark.parametrize(
    ("memory", "spread"),
    [
        pytest.param("interleave", True, id="asked for"),
        pytest.param("local", False, id="turned off"),
        pytest.param("", False, id="one node"),
    ],
)
def test_rows_are_spread_over_nodes(memory: str, spread: bool) -> None:
    if not memory and os.path.exists("/sys/devices/system/node/node1"):
        pytest.skip("this machine has several nodes")
    done = _rows(memory)
    if "but the system forbids it" in done.stderr:
        pytest.skip("this container forbids mbind")
    assert done.returncode == 0, done.stderr
    mappings = int(done.stdout)
    # those of the rows, of their bookkeeping and of the index
    assert mappings > 1 if spread else mappings == 0


def test_another_value_is_refused() -> None:
    assert (
        "RECSTORE_MEMORY must be interleave or local, got 'spread'"
        in _rows("spread").stderr
    )


def _rows(memory: str) -> subprocess.CompletedProcess[str]:
    """Makes rows in a process of its own, which prints the number of its interleaved
    mappings.
    """
    environment = {**os.environ, "RECSTORE_MEMORY": memory}
    return run_forked_command(["-c", ROWS], environment)
