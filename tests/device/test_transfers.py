"""The copies of a step with rows on a simulated device."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.backend_registration

from tests.device import simulated, transfers
from tests.device.results import results_of
from tests.device.streams import Counts, same

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
    results: dict[str, Any] = results_of(run, path, timeout_s=580)
    return results


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


def test_a_failed_copy_changes_nothing(found: dict[str, Any]) -> None:
    """Each copy of a step fails once: the results are those of the CPU."""
    plain = found["failures"]["plain"]
    results = found["failures"]["results"]
    assert not results[-1]["failed"]
    assert sum(result["failed_in_forward"] for result in results) >= 3
    failed_in_backward = [
        result
        for result in results
        if result["failed"] and not result["failed_in_forward"]
    ]
    assert len(failed_in_backward) >= 2
    for result in results:
        assert same(result["found"], plain["found"])
        assert same(result["rows"], plain["rows"])


def test_rows_are_brought_again_after_a_failed_copy(found: dict[str, Any]) -> None:
    failed = found["failed_settle"]
    assert len(failed["errors"]) == 2
    assert same(failed["rows"], failed["plain"])


def test_all_rows_are_brought_in_parts(found: dict[str, Any]) -> None:
    in_parts = found["in_parts"]
    assert len(in_parts["down"]) > 4
    assert max(in_parts["down"]) == in_parts["most"]
    assert same(in_parts["rows"], in_parts["plain"])


def test_an_update_without_memory_runs_on_the_host(found: dict[str, Any]) -> None:
    assert same(found["without_memory"]["rows"], found["without_memory"]["plain"])


def test_the_last_table_that_closes_frees_the_arena(found: dict[str, Any]) -> None:
    *before, last = found["floats_after_closing"]
    assert min(before) > 0
    assert last == 0


@pytest.mark.parametrize("kernel", ["scatter", "update"])
def test_every_call_raises_after_rows_are_lost(
    kernel: str, found: dict[str, Any]
) -> None:
    first, *later = found["lost"][kernel]
    assert f"the kernel {kernel} has failed" in first
    for message in later:
        assert message.startswith("RuntimeError: tables t0, t1, t2: a copy to the")
        assert "load the last checkpoint in a new process" in message


def test_a_lookup_without_room_warns_once(found: dict[str, Any]) -> None:
    of_batch, of_batches = found["room_warnings"]
    assert of_batch == [
        "table 't0': a batch of 40 distinct ids does not fit into 15 device rows, so"
        " that its group's training lookup runs on the host: set"
        " TableOptions(device_rows=...) to at least the distinct ids of two batches, or"
        " to 0"
    ]
    (message,) = of_batches
    assert message.startswith("tables 't0', 't1', 't2': a training lookup runs on the")


def test_no_memory_for_an_arena_names_the_tables(found: dict[str, Any]) -> None:
    message = found["no_memory_for_an_arena"]
    assert message.startswith(
        "tables 't0', 't1', 't2': the device has no memory for their 300 device rows,"
        " 0.00 GiB: use a smaller TableOptions(device_rows=...)"
    )
    assert message.endswith("tried to allocate more than there is")


def test_a_table_is_closed_while_rows_of_others_land(found: dict[str, Any]) -> None:
    result = found["closed_while_rows_land"]
    assert result["is_landing"]
    assert same(result["rows"], result["plain"])


@pytest.mark.parametrize("kernel", ["scatter", "update"])
def test_a_kernel_that_is_not_compiled_loses_no_row(
    kernel: str, found: dict[str, Any]
) -> None:
    result = found["not_compiled"][kernel]
    assert result["message"] == f"the kernel {kernel} was not compiled"
    assert same(result["rows"], result["plain"])


@pytest.mark.parametrize("options", ["unlimited", "bounded"])
def test_prefetched_rows_change_no_result(options: str, found: dict[str, Any]) -> None:
    plain, on_device = found["prefetches"][options]
    for result in on_device:
        assert same(result["found"], plain["found"])
        assert same(result["rows"], plain["rows"])


def test_a_lookup_after_a_prefetch_copies_no_row(found: dict[str, Any]) -> None:
    _, (result, *_) = found["prefetches"]["unlimited"]
    rows_ahead = 0
    counted = result["counted"]
    for before, now in itertools.pairwise(counted):
        _, of_prefetch, removes = before
        of_forward = now[0]
        rows_ahead += len(of_prefetch.up) == 2
        if removes:  # rows of the batch have left the table after the prefetch
            continue
        assert len(of_forward.up) == 1
        assert of_forward.down == []
        assert of_forward.named(simulated.PREFIX) == [simulated.PREFIX + "pool"]
    assert rows_ahead > 20


def test_late_copies_change_no_result(found: dict[str, Any]) -> None:
    plain = found["delayed"]["plain"]
    for result in found["delayed"]["delayed"]:
        assert same(result["found"], plain["found"])
        assert same(result["rows"], plain["rows"])


@pytest.mark.slow
def test_bytes_of_a_step_of_26_tables(tmp_path: Path) -> None:
    """Zipf 1.05, a batch of 8,192, 26 tables of a million ids, 10 % of the rows on the
    device: 55 MB up and 55 MB down without device rows.
    """
    full = results_of(run_full, tmp_path / "found", timeout_s=580)
    steps: list[Counts] = full["steps"]
    up = sum(sum(counts.up) for counts in steps) / len(steps)
    down = sum(sum(counts.down) for counts in steps) / len(steps)
    assert transfers.FULL_TABLES * up <= 8.5e6
    assert transfers.FULL_TABLES * down <= 8e6
