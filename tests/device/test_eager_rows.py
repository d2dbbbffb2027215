"""Modules without sharding whose tables have rows on the simulated device: results equal
to the bit to those on the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.backend_registration

from tests.device import eager_rows, simulated, streams
from tests.device.results import results_of
from tests.device.test_device import same

pytestmark = pytest.mark.skipif(
    not hasattr(
        torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"
    ),
    reason="this torch has no devices in Python",
)

DELAYED = ["bags", "sequences"]
"""The programs that also run with copies at random moments."""
SEED = 54


def run(path: str) -> None:
    device = simulated.register()
    found: dict[str, Any] = {}
    for name, program in eager_rows.PROGRAMS.items():
        on_cpu = program(torch.device("cpu"))
        found[name] = (on_cpu, *eager_rows.updates_on_device(program, device))
        if name in DELAYED:
            with streams.delays(SEED):
                at_random = eager_rows.updates_on_device(program, device)
            found[f"{name}, delayed"] = (on_cpu, *at_random)
    found["refusals"] = eager_rows.refusals(device)
    found["arrivals"] = eager_rows.arrivals_after_prefetch(device)
    torch.save(found, path)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("eager_rows") / "found"
    results: dict[str, Any] = results_of(run, path)
    return results


@pytest.mark.parametrize(
    "name", [*eager_rows.PROGRAMS, *(f"{name}, delayed" for name in DELAYED)]
)
def test_results_are_those_of_the_cpu(name: str, found: dict[str, Any]) -> None:
    on_cpu, on_device, updates = found[name]
    assert same(on_cpu, on_device)
    assert updates


@pytest.mark.parametrize("name", eager_rows.REFUSED)
def test_what_cannot_be_on_the_device_is_named(
    name: str, found: dict[str, Any]
) -> None:
    on_cpu, on_device = found["refusals"][name]
    assert on_cpu == "nothing"
    beginning = "table 't': rows cannot be in the memory of a device: "
    assert on_device.startswith(beginning)
    assert eager_rows.REFUSED[name][1] in on_device
    assert on_device.endswith("use device_rows=0")


def test_a_lookup_with_other_tables_is_refused(found: dict[str, Any]) -> None:
    _, message = found["refusals"]["other tables"]
    assert message.startswith("table 't_user' has rows in the memory of a device, and")
    assert "enable_fusion=False" in message


def test_a_lookup_after_a_prefetch_copies_no_row(found: dict[str, Any]) -> None:
    arrivals = found["arrivals"]
    for name in ("bags", "sequences"):
        assert arrivals.pop(f"{name}, all") > 0
    assert set(arrivals.values()) == {0}
