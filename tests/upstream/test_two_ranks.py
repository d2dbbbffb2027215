"""TorchRec's tests of several ranks, which its wheel carries, over every sharding by
hypothesis.
"""

from __future__ import annotations

import pytest

from . import adapted  # noqa: F401, before TorchRec's test modules  # isort: skip

# isort: skip
from torchrec.distributed.test_utils.test_model_parallel import _ModelParallelBase

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class TestModelParallel(_ModelParallelBase):
    backend = "gloo"


del _ModelParallelBase
