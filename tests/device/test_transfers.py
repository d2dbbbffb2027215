"""The copies of a step with rows on a simulated device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import torch.utils.backend_registration

from tests.device import simulated, transfers
from tests.device.streams import Counts
from tests.device.test_device_rows import load

pytestmark = pytest.mark.skipif(
    not hasattr(
        torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"
    ),
    reason="this torch has no devices in Python",
)

SMALL_BYTES = 1_000
"""Settings, segments and paddings of a copy, for three tables: 26 of them have 8,000
bytes, beside 852,000 of slots.
"""


def run(path: str) -> None:
    """Runs the scenarios on the device, and saves what they have found."""
    device = simulated.register()
    found = {}
    for name, scenario in transfers.SCENARIOS.items():
        found[name] = scenario(device)
    torch.save(found, path)


def run_full(path: str) -> None:
    device = simulated.register()
    torch.save(transfers.counted_steps(transfers.FULL, device), path)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("transfers") / "found"
    _in_process(run, path)
    return load(path)


def _in_process(target: Any, path: Path) -> None:
    process = mp.get_context("spawn").Process(target=target, args=(str(path),))
    process.start()
    process.join(580)
    assert process.exitcode == 0


def test_a_step_copies_twice_up_and_once_down(found: dict[str, Any]) -> None:
    for counts in found["a_part"]["steps"]:
        assert len(counts.up) == 2
        assert len(counts.down) == 1


def test_a_step_copies_no_byte_twice(found: dict[str, Any]) -> None:
    """Up go a slot for each position, and for each row that arrives the row, its slot
    and the slot of the row that leaves. Down go the rows that leave.
    """
    row_bytes = found["a_part"]["row_bytes"]
    positions = found["a_part"]["positions"]
    for counts in found["a_part"]["steps"]:
        packed, rows = counts.up
        arrivals, rest = divmod(rows, row_bytes)
        assert arrivals > 10
        assert rest == 0
        assert packed <= 4 * positions + 8 * arrivals + SMALL_BYTES
        assert counts.down[0] <= rows


def test_rows_that_are_all_on_the_device_are_not_copied(found: dict[str, Any]) -> None:
    positions = found["all_rows"]["positions"]
    for counts in found["all_rows"]["steps"]:
        assert counts.down == []
        assert len(counts.up) == 1
        assert counts.up[0] <= 4 * positions + SMALL_BYTES


def test_a_step_launches_at_most_eight_kernels(found: dict[str, Any]) -> None:
    for counts in found["a_part"]["steps"]:
        assert len(counts.kernels) <= 8
        assert len(counts.named(simulated.PREFIX)) == len(counts.kernels)


@pytest.mark.slow
def test_bytes_of_a_step_of_26_tables(tmp_path: Path) -> None:
    """Zipf 1.05, a batch of 8,192, 26 tables of a million ids, 10 % of the rows on the
    device: 55 MB up and 55 MB down without device rows.
    """
    path = tmp_path / "found"
    _in_process(run_full, path)
    steps: list[Counts] = load(path)["steps"]  # type: ignore[assignment]
    up = sum(sum(counts.up) for counts in steps) / len(steps)
    down = sum(sum(counts.down) for counts in steps) / len(steps)
    assert transfers.FULL_TABLES * up <= 8.5e6
    assert transfers.FULL_TABLES * down <= 8e6
