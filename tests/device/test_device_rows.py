"""Rows on a simulated device: results equal to the bit to those on the CPU, in any
mixture of passes on the device and on the host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.backend_registration

from tests.device import device_rows, simulated, streams
from tests.device.results import results_of, run_in_process
from torchrec_recstore import SGD
from torchrec_recstore.kernels import PooledGroup, SequenceGroup
from torchrec_recstore.kernels.device_copies import CopyTarget
from torchrec_recstore.store import Table

pytestmark = pytest.mark.skipif(
    not hasattr(
        torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"
    ),
    reason="this torch has no devices in Python",
)


FAST = [
    "bounded",
    "weighted",
    "sequences",
    "admission",
    "nonfinite",
    "cold, failing copies",
    "in a graph",
    "accumulated",
    "SGD and SGD",
]
"""The programs that run in ``make test``."""
SLOW = [name for name in device_rows.PROGRAMS if name not in FAST]


def run(names: list[str], path: str) -> None:
    """Runs programs on the CPU and on the device, and saves what they have found."""
    device = simulated.register()
    found = {}
    for name in names:
        found[name] = device_rows.run(device_rows.PROGRAMS[name], device)
    torch.save(found, path)


def found_by(names: list[str], path: Path) -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = results_of(run, path, names, timeout_s=1200)
    return found


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    return found_by(FAST, tmp_path_factory.mktemp("device_rows") / "fast")


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    return found_by(SLOW, tmp_path_factory.mktemp("device_rows") / "slow")


@pytest.mark.parametrize(
    ("dtype", "rows", "message"),
    [
        (torch.int8, 5, "'t': .*dtype=torch.int8; use device_rows=0"),
        (torch.float32, 0, "'t': .*needs at least one device row"),
    ],
)
@pytest.mark.parametrize("pools", [True, False])
def test_what_cannot_be_on_a_device_is_refused(
    dtype: torch.dtype, rows: int, message: str, pools: bool
) -> None:
    with Table(4, dtype=dtype, name="t") as table:
        group: device_rows.Group = SequenceGroup([table])
        if pools:
            group = PooledGroup([table], [0], "sum")
        with pytest.raises(ValueError, match=message):
            group.put_on_device(torch.device("cpu"), [rows])
        assert group.device_rows is None


def test_statistics() -> None:
    """A group with room for two rows of one table."""
    run_in_process(count_rows)


def count_rows() -> None:
    device = simulated.register()
    table = Table(4, name="t", optimizer=SGD(lr=1.0))
    group = PooledGroup([table], [0], "sum")
    group.put_on_device(device, [2])
    to = CopyTarget(device, torch.float32)

    def train(*ids: int) -> None:
        offsets = torch.arange(len(ids) + 1)
        out = group(torch.tensor(ids), offsets, train=True, to=to)
        out.backward(torch.ones(len(ids), 4).to(device))

    def counts() -> tuple[int, int, int, int]:
        stats = table.stats()
        return (
            stats.device_rows,
            stats.device_hits,
            stats.device_arrivals,
            stats.device_written_back,
        )

    assert counts() == (0, 0, 0, 0)
    train(1, 1)
    assert counts() == (1, 0, 1, 0)
    train(1, 2)
    assert counts() == (2, 1, 2, 0)
    train(1, 2, 3)  # on the host, which brings the rows back
    assert counts() == (2, 1, 2, 2)
    train(3)  # takes the place of a row that is as new on the host
    assert counts() == (2, 1, 3, 2)
    table.lookup(torch.tensor([1, 2, 3]))
    assert counts() == (2, 1, 3, 3)
    table.remove(torch.tensor([3]))
    assert counts() == (1, 1, 3, 3)


@pytest.mark.parametrize("name", FAST)
def test_equal(name: str, fast: dict[str, tuple[Any, Any]]) -> None:
    on_cpu, on_device = fast[name]
    assert streams.difference(on_cpu, on_device) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_equal_in_more_programs(name: str, slow: dict[str, tuple[Any, Any]]) -> None:
    on_cpu, on_device = slow[name]
    assert streams.difference(on_cpu, on_device) == ""
