"""Modules and groups below a CUDA device, with torch alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks.device import traced
from tests.cuda.marks import CPU, CUDA, WITH_TORCH
from torchrec_recstore.kernels import PooledGroup, SequenceGroup
from torchrec_recstore.kernels.device_copies import CopyTarget
from torchrec_recstore.modules import RecStoreEmbedding, RecStoreEmbeddingBag
from torchrec_recstore.optim import RowWiseAdagrad
from torchrec_recstore.store import Table

DEVICES = [pytest.param(CPU, id="cpu"), pytest.param(CUDA, id="cuda", marks=WITH_TORCH)]
DIM = 8
BAGS = 200
IDS = torch.randint(
    -(2**63), 2**63 - 1, (4 * BAGS,), generator=torch.Generator().manual_seed(3)
)
OFFSETS = torch.arange(0, 4 * BAGS, 4)


def bags_step(
    device: torch.device, mode: str, weighted: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    torch.manual_seed(0)
    bags = nn.Sequential(RecStoreEmbeddingBag(9, DIM, mode=mode, name="t")).to(device)[
        0
    ]  # type: ignore[arg-type]
    weights = torch.rand(len(IDS)).to(device).requires_grad_() if weighted else None
    for _ in range(3):
        out = bags(IDS.to(device), OFFSETS.to(device), weights)
        assert out.device == device
        (out * out).sum().backward()
    return (
        out.detach().cpu(),
        bags.table.lookup(IDS),
        None if weights is None else weights.grad,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("mode", "weighted"),
    [("sum", False), ("sum", True), ("mean", False), ("max", False)],
)
def test_bags_are_those_of_the_cpu(
    device: torch.device, mode: str, weighted: bool
) -> None:
    (out, rows, grad), (wanted, wanted_rows, wanted_grad) = (
        bags_step(each, mode, weighted) for each in (device, CPU)
    )
    assert torch.equal(out, wanted)
    assert torch.equal(rows, wanted_rows)
    # the rows were trained
    assert not torch.equal(rows, Table(DIM, name="t").lookup(IDS))
    if grad is not None and wanted_grad is not None:
        assert grad.device == device
        assert torch.equal(grad.cpu(), wanted_grad)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_a_model_with_dense_layers(device: torch.device) -> None:
    """The dense layers may differ in the last bits, so that their results are only
    close.
    """
    losses = {}
    for each in (device, CPU):
        torch.manual_seed(0)
        model = nn.Sequential(
            RecStoreEmbedding(9, DIM, name="t"), nn.Linear(DIM, 1)
        ).to(each)
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            loss = (model(IDS.to(each)) - 1).square().mean()
            loss.backward()
            optimizer.step()
        assert len(model[0].table) == len(IDS.unique())
        losses[each] = loss.item()
    torch.testing.assert_close(losses[device], losses[CPU])


@pytest.mark.parametrize("device", DEVICES)
def test_groups_with_ids_on_the_host(device: torch.device) -> None:
    found = {}
    for each in (device, CPU):
        tables = [
            Table(DIM, optimizer=RowWiseAdagrad(0.1), name=f"t{i}") for i in range(2)
        ]
        pooled, rows = PooledGroup(tables[:1], [0], "sum"), SequenceGroup(tables[1:])
        to = None if each == CPU else CopyTarget(each, torch.float32)
        for _ in range(3):
            out = pooled(
                IDS,
                torch.cat([OFFSETS, torch.tensor([len(IDS)])]),
                None,
                train=True,
                to=to,
            )
            flat = rows(IDS, [len(IDS)], train=True, to=to)
            assert out.device == flat.device == each
            ((out * out).sum() + (flat * flat).sum()).backward()
        found[each] = [
            out.detach().cpu(),
            flat.detach().cpu(),
            *(table.lookup(IDS) for table in tables),
        ]
    assert all(map(torch.equal, found[device], found[CPU]))


@pytest.mark.parametrize("device", [pytest.param(CUDA, id="cuda", marks=WITH_TORCH)])
def test_a_step_copies_ids_rows_and_gradients_once(device: torch.device) -> None:
    bags = RecStoreEmbeddingBag(9, DIM, mode="sum", name="t")
    ids = IDS.view(BAGS, 4).to(device)

    def step() -> None:
        out = bags(ids)
        (out * out).sum().backward()

    step()
    seen, rows = traced(step, device), BAGS * DIM * 4
    assert sorted(seen.down.sizes) == sorted([IDS.numel() * 8, rows])
    assert seen.up.sizes == [rows]
    assert seen.up.pageable == seen.down.pageable == 0
    assert set(seen.waits) == {"cudaEventSynchronize"}
