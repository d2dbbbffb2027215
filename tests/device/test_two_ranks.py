"""Two ranks with rows on the simulated device, a crash between them: outputs and rows
are those of ranks on the CPU that never stop, to the bit.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.backend_registration

from tests.device import two_ranks
from tests.device.streams import same
from tests.distributed.workers import run_on_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(
        torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"
    ),
    reason="this torch has no devices in Python",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding_type", "routing"),
    [
        ("table_wise", "block"),
        ("row_wise", "block"),
        ("row_wise", "hash"),
        ("column_wise", "block"),
    ],
)
def test_a_crash_changes_nothing(
    sharding_type: str, routing: str, tmp_path: Path
) -> None:
    for phase in ("cpu", "before", "after"):
        run_on_ranks(
            two_ranks.RANKS,
            partial(
                two_ranks.train,
                sharding_type=sharding_type,
                routing=routing,
                path=str(tmp_path),
                phase=phase,
            ),
        )
    arrivals = 0
    for rank in range(two_ranks.RANKS):
        on_cpu = load(tmp_path / f"cpu-{rank}")
        on_device = load(tmp_path / f"after-{rank}")
        seen = load(tmp_path / f"before-{rank}") + on_device["seen"]
        assert same(on_cpu["seen"], seen)
        assert same(on_cpu["rows"], on_device["rows"])
        for stats in on_device["stats"].values():
            arrivals += stats.device_arrivals
            assert 0 < stats.device_rows <= two_ranks.ROWS
    assert arrivals > two_ranks.ROWS * 2


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)
