from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# OpenMP's threads wait by spinning for milliseconds, in which tests' other processes could work. Read with torch.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
import torch.distributed as dist

from .upstream.summary import pytest_terminal_summary as pytest_terminal_summary  # with xdist too


@pytest.fixture(autouse=True)
def _seed_and_threads() -> Iterator[None]:
    """Each test starts from the same seed and leaves the number of threads as it found it."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """The default process group, gloo, of the test's own process alone."""
    from torchrec.distributed import comm  # here, since tests of the store do without TorchRec

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    comm._INTRA_PG = comm._CROSS_PG = None  # torchrec 1.8.0 keeps the groups of the nodes of the one just destroyed
