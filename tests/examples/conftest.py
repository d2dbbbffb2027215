"""Makes the examples' modules importable, as they are when their scripts run, and has torch use one thread."""

import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"

sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "dlrm")]


@pytest.fixture(autouse=True)
def _one_thread(_seed_and_threads: None) -> None:
    """Tests share the machine, and on small batches threads wait for each other more than they work."""
    torch.set_num_threads(1)
