"""Whatever reads or replaces rows on the host gets those of the device: the results are
those of the CPU, to the bit, and they are not if tables do not settle first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.backend_registration

from tests.device import host_roads, scenarios, simulated, streams
from tests.device.results import results_of
from tests.device.streams import same
from tests.device.test_placement import ROWS, as_on_cpu

pytestmark = pytest.mark.skipif(
    not hasattr(
        torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"
    ),
    reason="this torch has no devices in Python",
)

ALONE = ["evaluated"]
"""The roads on which a table is not called: the group brings rows up to date."""
SLOW = ["column_wise", "delta_tracker", "no_device_rows", "replaced_rows"]
"""The roads that slow tests take."""


def run(names: list[str], path: str) -> None:
    """Takes roads on the CPU, on the device, and there without bringing the host's
    rows up to date.
    """
    device = simulated.register()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found: dict[str, Any] = {}
    for name in names:
        on_cpu = host_roads.program(name, torch.device("cpu"))
        with scenarios.device_rows(ROWS):
            streams.order.clear()
            on_device = host_roads.program(name, device)
            updates = [entry for entry in streams.order if entry[1] == "rows.update"]
            unsettled: Any = None
            if name not in ALONE:
                unsettled = host_roads.program(name, device, settles=False)
        found[name] = (on_cpu, on_device, unsettled, len(updates))
    torch.save(found, path)


def found_by(names: list[str], folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = results_of(run, folder / "found", names)
    return results


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    names = [name for name in host_roads.ROADS if name not in SLOW]
    return found_by(names, tmp_path_factory.mktemp("roads"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by(SLOW, tmp_path_factory.mktemp("slow_roads"))


def check(name: str, found: dict[str, Any]) -> None:
    on_cpu, on_device, unsettled, updates = found[name]
    assert updates
    assert same(as_on_cpu(on_cpu), as_on_cpu(on_device))
    if name not in ALONE:
        assert not same(as_on_cpu(on_cpu), as_on_cpu(unsettled))


@pytest.mark.parametrize(
    "name", [name for name in host_roads.ROADS if name not in SLOW]
)
def test_the_host_has_the_rows_of_the_device(name: str, fast: dict[str, Any]) -> None:
    check(name, fast)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_the_host_has_them_on_more_roads(name: str, slow: dict[str, Any]) -> None:
    check(name, slow)
