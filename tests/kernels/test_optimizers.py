"""Every fused optimizer against its published formula, torch.optim, and FBGEMM if that
has a CPU version.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

import torchrec_recstore
from torchrec_recstore import optim
from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.optim import (
    LAMB,
    LARSSGD,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Optimizer,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RMSprop,
    RowWiseAdagrad,
)
from torchrec_recstore.options import ConstantInit, TableOptions
from torchrec_recstore.store import Table

from ..instruction_sets import check_same_bits
from .optimizer_cases import AS_IN_TORCH, OPTIMIZERS, ROWS, Reference, rows, table


def test_every_optimizer_has_a_case_and_a_public_name() -> None:
    assert {type(optimizer) for optimizer in OPTIMIZERS} == set(
        optim.OPTIMIZERS.values()
    )
    assert all(
        getattr(torchrec_recstore, name) is kind
        for name, kind in optim.OPTIMIZERS.items()
    )


@pytest.mark.parametrize("dim", [1, 4, 16, 33, 64])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_ten_steps_equal_the_published_formula(optimizer: Optimizer, dim: int) -> None:
    made = table(optimizer, dim)
    reference = Reference(optimizer, dict(enumerate(rows(made))))
    generator = torch.Generator().manual_seed(dim)
    for _ in range(10):
        # duplicates, and rows that stay untouched
        ids = torch.randint(0, ROWS, (6,), generator=generator)
        grads = torch.randn(6, dim, generator=generator)
        made.update(ids, grads)
        reference.update(ids.tolist(), grads)
    expected = torch.stack([reference.rows[id_] for id_ in range(ROWS)]).float()
    torch.testing.assert_close(rows(made), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("ours", "theirs", "arguments"), AS_IN_TORCH, ids=repr)
def test_ten_steps_equal_torch_where_every_row_is_touched(
    ours: Optimizer, theirs: type[torch.optim.Optimizer], arguments: dict[str, Any]
) -> None:
    made = table(ours, 20)
    weights = torch.nn.Parameter(rows(made))
    stock = theirs([weights], lr=0.1, **arguments)  # type: ignore[call-arg]
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        weights.grad = torch.randn(ROWS, 20, generator=generator)
        made.update(torch.arange(ROWS), weights.grad)
        stock.step()
    torch.testing.assert_close(rows(made), weights.detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("pooling", [PoolingMode.SUM, PoolingMode.MEAN])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD(0.1, max_gradient=0.3), EmbOptimType.EXACT_SGD),
        (Adagrad(0.1, max_gradient=0.3), EmbOptimType.EXACT_ADAGRAD),
        (RowWiseAdagrad(0.1, max_gradient=0.3), EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    ],
    ids=repr,
)
def test_gradient_clipping_equals_fbgemm(
    ours: Optimizer, theirs: EmbOptimType, pooling: PoolingMode
) -> None:
    made = table(ours, 8)
    stock = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=theirs,
        learning_rate=0.1,
        gradient_clipping=True,
        max_gradient=0.3,
        pooling_mode=pooling,
        device=torch.device("cpu"),
    )
    stock.split_embedding_weights()[0].copy_(rows(made))
    group = PooledGroup([made], [0], "sum" if pooling is PoolingMode.SUM else "mean")
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        ids, offsets = (
            torch.randint(0, ROWS, (12,), generator=generator),
            torch.tensor([0, 3, 3, 8, 12]),
        )
        grad = torch.randn(4, 8, generator=generator)
        group(ids, offsets, train=True).backward(grad)
        stock(ids, offsets).backward(grad)
    torch.testing.assert_close(
        rows(made), stock.split_embedding_weights()[0].detach(), atol=1e-6, rtol=1e-5
    )


def test_only_the_columns_of_a_table_that_clips_are_clipped() -> None:
    zeros = TableOptions(ConstantInit(0.0))
    clips = Table(2, optimizer=SGD(1.0, max_gradient=0.5), options=zeros, name="a")
    plain = Table(3, optimizer=SGD(1.0), options=zeros, name="b")
    group = PooledGroup([clips, plain], [1, 0], "sum")
    weights = torch.ones(2, requires_grad=True)
    out = group(torch.tensor([7, 7]), torch.tensor([0, 1, 2]), weights, train=True)
    out.backward(torch.tensor([[2.0, -2.0, 2.0, 2.0, -2.0]]))
    assert clips.lookup(torch.tensor([7])).tolist() == [[-0.5, 0.5]]
    assert plain.lookup(torch.tensor([7])).tolist() == [[-2.0, 2.0, -2.0]]


def test_bias_correction_counts_the_tables_updates() -> None:
    """The first update of a row is the second update of its table, and its moments are
    corrected for two updates.
    """
    made = table(Adam(0.1), 1)
    made.update(torch.tensor([0]), torch.ones(1, 1))
    before = rows(made)[1]
    made.update(torch.tensor([1]), torch.ones(1, 1))
    m, v = 0.1 / (1 - 0.9**2), 0.001 / (1 - 0.999**2)
    torch.testing.assert_close(
        rows(made)[1], before - 0.1 * m / (v**0.5 + 1e-8), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize(
    "optimizer", [LAMB(0.1), PartialRowWiseLAMB(0.1), LARSSGD(0.1)], ids=repr
)
@pytest.mark.parametrize("gradient", [0.0, 1.0])
def test_rows_of_zeros_and_zero_gradients_stay_finite_and_can_move(
    optimizer: Optimizer, gradient: float
) -> None:
    made = Table(4, optimizer=optimizer, options=TableOptions(ConstantInit(0.0)))
    for start in (0.0, 1.0):
        made.insert(torch.tensor([1]), torch.full((1, 4), start))
        made.update(torch.tensor([1]), torch.full((1, 4), gradient))
        row = made.lookup(torch.tensor([1]))
        assert row.isfinite().all()
        if gradient and not start:
            assert (row != 0).all()


def test_ftrl_keeps_a_row_until_its_first_gradient_and_at_a_rate_of_zero() -> None:
    made = table(Ftrl(0.1, l1=100.0))
    before = rows(made)
    made.update(torch.tensor([1, 2]), torch.tensor([[0.0] * 4, [1.0] * 4]))
    assert torch.equal(rows(made)[1], before[1])
    assert rows(made)[2].tolist() == [0.0] * 4
    still = table(Ftrl(lr=0.0))
    still.update(torch.tensor([1]), torch.ones(1, 4))
    assert torch.equal(rows(still), before)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_a_row_takes_the_memory_that_its_states_say(optimizer: Optimizer) -> None:
    columns, n = 48, 20000
    sizes = []
    for made in (Table(columns, optimizer=SGD()), Table(columns, optimizer=optimizer)):
        made.lookup(torch.arange(n), train=True)
        sizes.append(made.stats().bytes)
    elements = sum(kind == "element" for kind in optim.state_names(optimizer).values())
    assert sizes[1] - sizes[0] == pytest.approx(
        elements * 4 * columns * n, rel=0.02, abs=1000
    )
    assert optim.state_bytes(optimizer, columns) == 4 * columns * elements + 4 * (
        len(optim.state_names(optimizer)) - elements
    )


def _digests() -> list[str]:
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        digest = hashlib.sha256()
        for number, optimizer in enumerate(OPTIMIZERS):
            dim = (16, 33)[number % 2]
            made, generator = table(optimizer, dim), torch.Generator().manual_seed(dim)
            for _ in range(2):
                ids = torch.randint(0, 4000, (9000,), generator=generator)
                made.update(ids, torch.randn(9000, dim, generator=generator))
            digest.update(made.lookup(made.ids()).numpy().tobytes())
        found.append(digest.hexdigest())
    return found


@pytest.mark.slow
def test_bits_depend_neither_on_the_instruction_set_nor_on_threads() -> None:
    check_same_bits(_digests)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: SGD(lr=-1.0), r"SGD\.lr"),
        (lambda: SGD(momentum=1.0), r"SGD\.momentum"),
        (lambda: SGD(max_gradient=0.0), r"SGD\.max_gradient "),
        (lambda: SGD(max_gradient_norm=-1.0), r"SGD\.max_gradient_norm"),
        (lambda: Adagrad(eps=float("nan")), r"Adagrad\.eps"),
        (lambda: Adagrad(weight_decay_mode="none"), r"Adagrad\.weight_decay_mode"),  # type: ignore[arg-type]
        (lambda: RowWiseAdagrad(max_norm=float("inf")), r"RowWiseAdagrad\.max_norm"),
        (lambda: Adam(betas=(0.9, 1.0)), r"Adam\.betas"),
        (lambda: Adam(betas=0.9), r"Adam\.betas"),  # type: ignore[arg-type]
        (lambda: AdamW(weight_decay=-0.1), r"AdamW\.weight_decay"),
        (lambda: PartialRowWiseAdam(betas=(-0.1, 0.9)), r"PartialRowWiseAdam\.betas"),
        (lambda: LAMB(lr=float("inf")), r"LAMB\.lr"),
        (lambda: PartialRowWiseLAMB(eps=-1.0), r"PartialRowWiseLAMB\.eps"),
        (lambda: LARSSGD(eta=-1.0), r"LARSSGD\.eta"),
        (lambda: RMSprop(alpha=1.5), r"RMSprop\.alpha"),
        (lambda: Ftrl(lr_power=0.5), r"Ftrl\.lr_power"),
        (lambda: Ftrl(l1=-1.0), r"Ftrl\.l1"),
        (lambda: Ftrl(beta="1"), r"Ftrl\.beta"),  # type: ignore[arg-type]
    ],
)
def test_bad_values_are_named(make: Any, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        make()


def _hot_ids(optimizer: Optimizer, dim: int, dtype: torch.dtype) -> tuple[Table, Table]:
    """Returns a table whose ids had thousands of gradients, and one that had their
    sums.
    """
    generator = torch.Generator().manual_seed(dim)
    tables = [Table(dim, optimizer=optimizer, dtype=dtype, name="t") for _ in range(2)]
    group = PooledGroup([tables[0]], [0, 0], "sum")
    bags, lengths = 12000, torch.randint(0, 4, (24000,), generator=generator)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    n = int(offsets[-1])
    ids = torch.randint(0, 8, (n,), generator=generator)
    ids[ids > 2] = torch.arange(100, 100 + n)[ids > 2]
    weights = (torch.rand(n, generator=generator) + 0.5).requires_grad_()
    for _ in range(2):
        grad = torch.randn(bags, 2 * dim, generator=generator)
        group(ids, offsets, weights, train=True).backward(grad)
        bag = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        each = (
            grad.unflatten(1, (2, dim))[bag % bags, bag // bags]
            * weights.detach()[:, None]
        )
        distinct = ids.unique()
        last = torch.zeros(int(distinct[-1]) + 1, dim)
        last[ids] = each  # of an id with one position
        for id in range(3):
            # most_summed() of csrc/lookup/backward.cpp
            assert int((ids == id).sum()) > 4096
            # torch's sums in float64
            last[id] = torch.from_numpy(each[ids == id].numpy().cumsum(0)[-1])
        tables[1].update(distinct, last[distinct])
    return tables[0], tables[1]


# csrc/lookup/backward.cpp divides the sums in three ways
@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("dim", [40, 64])
@pytest.mark.parametrize(
    "optimizer",
    [SGD(0.1), RowWiseAdagrad(0.1, max_norm=0.8, max_gradient_norm=0.5)],
    ids=repr,
)
def test_many_gradients_of_an_id_are_summed_in_the_order_of_the_batch(
    optimizer: Optimizer, dim: int, dtype: torch.dtype, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        trained, expected = _hot_ids(optimizer, dim, dtype)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(rows(trained), rows(expected))
