"""A process group of one rank, in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torchrec.distributed import comm


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """The default group, gloo, of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    comm._INTRA_PG = comm._CROSS_PG = None  # torchrec 1.8.0 keeps the groups of the nodes of the one just destroyed
