"""A call that runs out of memory changes no table.

Each allocation fails in turn, together with all later ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_CHILD = """
import ctypes, dataclasses, torch
from torchrec_recstore import LRU, MinFrequency, RowWiseAdagrad, Table, TableOptions
from torchrec_recstore.kernels import PooledGroup, SequenceGroup

torch.set_num_threads(1)
fail_from = ctypes.CDLL(None).fail_from
fail_from.argtypes, fail_from.restype = [ctypes.c_long], ctypes.c_long
NEW = torch.arange(1000, 1020)

class Tables:
    def __init__(self):
        seen_twice = MinFrequency(2, counter_bytes=4096)
        options = [TableOptions(max_rows=50, eviction=LRU()), TableOptions(), TableOptions(admission=seen_twice)]
        self.all = [Table(4, optimizer=RowWiseAdagrad(lr=0.1), options=o, name=f"t{i}") for i, o in enumerate(options)]
        self.pooled = PooledGroup(self.all, [0, 1, 2], "sum")
        self.rows = SequenceGroup(self.all)
        self.outputs = []
        for step in range(5):
            self.forward(torch.arange(20 * step, 20 * step + 20))
            self.backward()
    def forward(self, ids=NEW):
        n = len(ids)
        out = self.pooled(ids.repeat(3), torch.arange(3 * n + 1), train=True)
        self.outputs.append(out)
    def backward(self):
        self.outputs.pop().sum().backward()
    def forward_rows(self):
        self.rows(NEW.repeat(3), [len(NEW)] * 3, train=True)
    def state(self):
        state = []
        for table in self.all:
            rows = {name: values.tolist() for name, values in table.read_rows(table.ids()).items()}
            # Only the capacity of the index and of the list of free slots may have grown.
            state.append((table.ids().tolist(), rows, dataclasses.replace(table.stats(), bytes=0)))
        return state

CALLS = {
    "forward": (lambda t: None, Tables.forward),
    "backward": (Tables.forward, lambda t: t.outputs[-1].sum().backward(retain_graph=True)),
    "sequence forward": (lambda t: None, Tables.forward_rows),
    "lookup": (lambda t: None, lambda t: t.all[0].lookup(NEW, train=True)),
    "update": (lambda t: None, lambda t: t.all[0].update(NEW, torch.ones(20, 4))),
    "insert": (lambda t: None, lambda t: t.all[0].insert(NEW, torch.ones(20, 4))),
    "remove": (Tables.forward, lambda t: t.all[1].remove(torch.arange(70))),
    "lookup of a table without bounds": (lambda t: None, lambda t: t.all[1].lookup(NEW + 5, train=True)),
}
failures = 0
for name, (before, call) in CALLS.items():
    untouched = Tables()
    before(untouched)
    call(untouched)
    expected = untouched.state()
    first = 0
    while True:
        tables = Tables()
        before(tables)
        was = tables.state()
        fail_from(first)
        try:
            call(tables)
            failed = False
        except (MemoryError, RuntimeError) as error:
            failed = True
            assert "memory" in str(error) or "bad_alloc" in str(error), (name, first, error)
        fail_from(-1)
        if not failed:
            break
        failures += 1
        assert tables.state() == was, (name, first)
        call(tables)
        assert tables.state() == expected, (name, first)
        first += 1
    assert tables.state() == expected, (name, first)
    print(name, first)
assert failures > 100, failures
"""


@pytest.mark.slow  # make test has C++ tests of the same for the core
def test_what_fails_for_want_of_memory_changes_nothing(tmp_path: Path) -> None:
    shim = tmp_path / "failing_memory.so"
    source = Path(__file__).with_name("failing_memory.cpp")
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-O1", str(source), "-o", str(shim), "-ldl"],
        check=True,
    )
    environment = {**os.environ, "LD_PRELOAD": str(shim)}
    run = subprocess.run(
        [sys.executable, "-c", _CHILD],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
