"""Sharded models name what cannot be on the simulated device when they are made, and
tables with and without rows there work together.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.backend_registration
from torchrec import EmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import DataType

from tests.device import simulated
from tests.device.device_rows import as_on_cpu
from tests.device.results import results_of
from tests.device.scenarios import META, bag_tables, batches, host, trained
from tests.device.streams import same
from torchrec_recstore import (
    RecStoreConstraints,
    RecStorePlanner,
    RecStoreSharder,
    TableOptions,
    read_info,
    save_checkpoint,
    table_stats,
)
from torchrec_recstore.optim import SGD, Adam, Ftrl, Optimizer, RowOptimizer

pytestmark = pytest.mark.skipif(
    not hasattr(
        torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"
    ),
    reason="this torch has no devices in Python",
)

ASKED = RecStoreConstraints(options=TableOptions(device_rows=16))
OFF = RecStoreConstraints(options=TableOptions(device_rows=0))
UNSET = RecStoreConstraints()
CACHED = RecStoreConstraints(
    options=TableOptions(expected_rows=160), cache_params=CacheParams(load_factor=0.1)
)
ROW_OPTIMIZER = RowOptimizer(lr=0.1, name="plain", states={}, step="w -= lr * g;")

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "int8": ({"data_type": DataType.INT8}, "dtype=torch.int8"),
    "state": (
        {"optimizer": Adam(lr=0.1), "state_dtype": torch.float16},
        "state_dtype=torch.float16",
    ),
    "optimizer": ({"optimizer": ROW_OPTIMIZER}, "'plain' is a RowOptimizer"),
    "power": ({"optimizer": Ftrl(lr=0.1, lr_power=-0.4)}, r"Ftrl.lr_power=-0.4"),
    "frozen": (
        {"user": RecStoreConstraints(options=TableOptions(device_rows=9, frozen=True))},
        "the table is frozen",
    ),
}
TOGETHER = {
    "one of two": (ASKED, UNSET, (True, False)),
    "off": (OFF, OFF, (False, False)),
    "unset": (UNSET, UNSET, (False, False)),
    "load factor": (UNSET, CACHED, (False, True)),
}
"""The constraints of two tables, and whether they have rows on the device."""


def model(
    device: torch.device,
    *,
    user: RecStoreConstraints = ASKED,
    item: RecStoreConstraints = UNSET,
    data_type: DataType = DataType.FP32,
    optimizer: Optimizer = SGD(lr=0.1),  # noqa: B008  (frozen)
    **fused: Any,
) -> Any:
    tables = bag_tables()
    for table in tables:
        table.data_type = data_type
    module = EmbeddingBagCollection(tables, device=META)
    sharders: list[Any] = [
        RecStoreSharder(optimizer=optimizer, fused_params=fused or None)
    ]
    planner = RecStorePlanner(
        topology=Topology(world_size=1, compute_device="cpu"),
        constraints={"t_user": user, "t_item": item},
    )
    plan = planner.collective_plan(module, sharders, dist.group.WORLD)
    return DistributedModelParallel(
        module,
        plan=plan,
        sharders=sharders,
        device=device,
        init_data_parallel=False,
        init_parameters=False,
    )


def run(path: str) -> None:
    device = simulated.register()
    cpu = torch.device("cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found: dict[str, Any] = {}
    for name, (arguments, _) in REFUSED.items():
        model(cpu, **arguments)
        unasked = {"user": OFF, **arguments} if name != "frozen" else {"user": OFF}
        model(device, **unasked)
        try:
            model(device, **arguments)
            found[name] = "nothing"
        except ValueError as error:
            found[name] = str(error)
    for name, (user, item, _) in TOGETHER.items():
        outcomes = []
        for place in (cpu, device):
            together = model(place, user=user, item=item)
            seen = trained(together, batches(8, place))
            stats = table_stats(together)
            outcomes.append((list(map(host, seen)), dict(stats)))
        found[name] = outcomes
    save_checkpoint(model(device), f"{path}-saved")
    found["saved"] = read_info(f"{path}-saved").tables["t_user"].options
    torch.save(found, path)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("refusals") / "found"
    results: dict[str, Any] = results_of(run, path)
    return results


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_on_the_device_is_named(
    name: str, found: dict[str, Any]
) -> None:
    beginning = "table 't_user': rows cannot be in the memory of a device: "
    assert found[name].startswith(beginning)
    assert REFUSED[name][1] in found[name]
    assert found[name].endswith("use device_rows=0")


@pytest.mark.parametrize("name", TOGETHER)
def test_tables_with_and_without_rows_there(name: str, found: dict[str, Any]) -> None:
    (on_cpu, cpu_stats), (on_device, stats) = found[name]
    assert same(on_cpu, on_device)
    for table, has_rows in zip(("t_user", "t_item"), TOGETHER[name][2], strict=True):
        assert bool(stats[table].device_arrivals) is has_rows
        assert as_on_cpu(stats[table]) == as_on_cpu(cpu_stats[table])


def test_a_checkpoint_does_not_say_where_rows_were(found: dict[str, Any]) -> None:
    assert found["saved"].device_rows is None
