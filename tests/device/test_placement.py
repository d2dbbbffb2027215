"""Sharded models whose tables have rows on the simulated device: results equal to the
bit to those on the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.backend_registration

from tests.device import device_rows, scenarios, simulated, steps, streams
from tests.device.results import results_of
from tests.device.streams import same
from torchrec_recstore import TableStats

pytestmark = pytest.mark.skipif(
    not hasattr(
        torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"
    ),
    reason="this torch has no devices in Python",
)

ROWS = 14
"""The rows of a table on the device. Some batches need more of a table."""
ROWS_OF_TWO_BATCHES = 56
"""The rows of a table on the device that two batches need at most. Their ids are not all
of them.
"""
EQUAL = [
    "sum",
    "mean",
    "weighted",
    "half_outputs",
    "feature_processors",
    "variable_batches",
    "checkpoints",
    "pipelines",
    "sequences",
    "bounds",
    "schedules",
]
DELAYED = ["feature_processors", "sequences", "pipelines"]
"""The scenarios that also run with copies at random moments."""
SEED = 54


def run(path: str) -> None:
    """Runs scenarios on the CPU, and on the device with rows there."""
    device = simulated.register()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found: dict[str, Any] = {}
    for name in EQUAL:
        scenario = steps.SCENARIOS[name]
        on_cpu = scenario(torch.device("cpu"))
        streams.order.clear()
        with scenarios.device_rows(ROWS):
            on_device = scenario(device)
        updates = [entry for entry in streams.order if entry[1] == "rows.update"]
        found[name] = (on_cpu, on_device, len(updates))
        if name in DELAYED:
            with scenarios.device_rows(ROWS), streams.delays(SEED):
                found[f"{name}, delayed"] = (on_cpu, scenario(device), len(updates))
    on_cpu = steps.prefetched_rows(torch.device("cpu"))
    with scenarios.device_rows(ROWS_OF_TWO_BATCHES):
        found["prefetched"] = (on_cpu, steps.prefetched_rows(device))
    torch.save(found, path)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("placement") / "found"
    results: dict[str, Any] = results_of(run, path)
    return results


def as_on_cpu(value: Any) -> Any:
    """A value with the statistics that a table of the CPU has."""
    if isinstance(value, TableStats):
        return device_rows.as_on_cpu(value)
    if isinstance(value, dict):
        return {key: as_on_cpu(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_on_cpu(item) for item in value]
    return value


@pytest.mark.parametrize("name", [*EQUAL, *(f"{name}, delayed" for name in DELAYED)])
def test_results_are_those_of_the_cpu(name: str, found: dict[str, Any]) -> None:
    on_cpu, on_device, updates = found[name]
    assert same(as_on_cpu(on_cpu), as_on_cpu(on_device))
    assert updates


def test_a_lookup_after_a_prefetch_copies_no_row(found: dict[str, Any]) -> None:
    """Two groups of the pipeline, whose tables have more rows than the device."""
    (on_cpu, _), (on_device, arrivals) = found["prefetched"]
    assert same(as_on_cpu(on_cpu), as_on_cpu(on_device))
    assert len(arrivals["prefetch"]) == len(arrivals["training_lookup"]) == 2 * 20
    assert sum(arrivals["prefetch"][-10:]) > 0
    assert sum(arrivals["training_lookup"]) == 0
    stats = on_device["stats"].values()
    assert any(table.device_rows < table.rows for table in stats)
    assert sum(table.device_arrivals for table in stats) == sum(arrivals["prefetch"])
