"""Host tables below a device: results equal to the bit to those on the CPU, and as few copies as the rows need.

The device is :mod:`tests.device.simulated`. It belongs to a process, so that each test runs in a process of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.utils.backend_registration

from tests.device import scenarios, simulated

pytestmark = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no devices in Python",
)

SHORT = [name for name in scenarios.SCENARIOS if name not in ("long_bounds", "copies_of_a_step")]


def run(names: list[str], path: str) -> None:
    """Runs scenarios on the CPU and on the device, and saves what they have found."""
    device = simulated.register()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {}
    for name in names:
        scenario = scenarios.SCENARIOS[name]
        on_cpu = None if name == "copies_of_a_step" else scenario(torch.device("cpu"))
        simulated.copies.clear()
        found[name] = (on_cpu, scenario(device), len(simulated.copies))
    torch.save(found, path)


def found_by(names: list[str], folder: Path) -> dict[str, tuple[Any, Any, int]]:
    process = mp.get_context("spawn").Process(target=run, args=(names, str(folder / "found")))
    process.start()
    process.join(280)
    assert process.exitcode == 0
    found: dict[str, tuple[Any, Any, int]] = torch.load(folder / "found", weights_only=False)
    return found


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any, int]]:
    return found_by([*SHORT, "copies_of_a_step"], tmp_path_factory.mktemp("device"))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", SHORT)
def test_results_are_those_of_the_cpu(name: str, short: dict[str, tuple[Any, Any, int]]) -> None:
    on_cpu, on_device, copies = short[name]
    assert on_cpu
    assert same(on_cpu, on_device)
    assert copies


def test_a_step_copies_ids_rows_and_gradients_once(short: dict[str, tuple[Any, Any, int]]) -> None:
    found = short["copies_of_a_step"][1]
    assert set(found) == {f"{name} {step}" for name in ("fp32", "fp16") for step in ("step", "prefetched")}
    for step, (copies, sizes) in found.items():
        down = [] if step.endswith("prefetched") else [("down", sizes["ids"])]  # the prefetch has copied the ids
        assert copies == [*down, ("up", sizes["rows"]), ("down", sizes["rows"])], step
    assert found["fp16 step"][1]["rows"] * 2 == found["fp32 step"][1]["rows"]  # 16 bits cross the bus


@pytest.mark.slow
def test_a_thousand_steps_with_eviction_expiry_and_a_cold_store(tmp_path: Path) -> None:
    on_cpu, on_device, _ = found_by(["long_bounds"], tmp_path)["long_bounds"]
    assert on_cpu["cold_stats"]["t_item"].cold_hits > 0 < on_cpu["stats"]["t_item"].expired
    assert same(on_cpu, on_device)


def test_the_device_refuses_whoever_reads_its_memory(tmp_path: Path) -> None:
    process = mp.get_context("spawn").Process(target=_misuse, args=(str(tmp_path / "said"),))
    process.start()
    process.join(200)
    said = (tmp_path / "said").read_text()
    assert "got a tensor on the device" in said
    assert "ids must be on the CPU, got sim:0" in said


def _misuse(path: str) -> None:
    from torchrec_recstore import Table, ops

    device = simulated.register()
    ids = torch.arange(3).to(device)
    said = []
    for call in (lambda: ops.mix_ids(ids, False), lambda: Table(4).lookup(ids)):
        try:
            call()
        except (NotImplementedError, ValueError) as error:
            said.append(str(error))
    Path(path).write_text("\n".join(said))
