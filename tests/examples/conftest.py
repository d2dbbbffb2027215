"""Makes the modules of the examples importable, as they are when the scripts run, and
limits torch to one thread.
"""

import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"

sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "dlrm")]


@pytest.fixture(autouse=True)
def _one_thread(_seed_and_threads: None) -> None:
    """Limits torch to one thread: tests share the machine, and on small batches threads
    mostly wait for each other.
    """
    torch.set_num_threads(1)
