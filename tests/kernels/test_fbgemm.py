"""The pooled group against FBGEMM's own CPU tables: forward, and weights after five
steps of each optimizer.

Weight decay is checked in tests/store/test_oracle.py: FBGEMM 1.8.0 has the formula only
on GPUs, and its CPU kernel of row-wise Adagrad differs from the formula.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.optim import SGD, Adagrad, Optimizer, RowWiseAdagrad
from torchrec_recstore.store import Table

ROWS, DIM, BATCH, FEATURE_TABLES = 60, 20, 16, [0, 1, 1]
CASES: list[tuple[Optimizer, dict[str, Any]]] = [
    (SGD(0.1), {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}),
    (
        Adagrad(0.1, eps=1e-2),
        {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1, "eps": 1e-2},
    ),
    (
        RowWiseAdagrad(0.1, eps=1e-2),
        {
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": 0.1,
            "eps": 1e-2,
        },
    ),
]


def _batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.randint(0, 6, (len(FEATURE_TABLES) * BATCH,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.randint(0, ROWS, (int(offsets[-1]),), generator=generator), offsets


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize(("optimizer", "params"), CASES)
def test_five_steps(optimizer: Optimizer, params: dict[str, Any], pooling: Any) -> None:
    reference = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)] * 2,
        feature_table_map=FEATURE_TABLES,
        pooling_mode=PoolingMode.SUM if pooling == "sum" else PoolingMode.MEAN,
        device=torch.device("cpu"),
        **params,
    )
    tables = [Table(DIM, optimizer=optimizer, name=name) for name in "ab"]
    for table, weights in zip(tables, reference.split_embedding_weights(), strict=True):
        weights.copy_(table.lookup(torch.arange(ROWS), train=True))
    group = PooledGroup(tables, FEATURE_TABLES, pooling)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        ids, offsets = _batch(generator)
        out, expected = group(ids, offsets, train=True), reference(ids, offsets)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
        grad = torch.randn(out.shape, generator=generator)
        out.backward(grad)
        expected.backward(grad)
    for table, weights in zip(tables, reference.split_embedding_weights(), strict=True):
        torch.testing.assert_close(
            table.lookup(torch.arange(ROWS)), weights.detach(), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize(("optimizer", "params"), [CASES[0], CASES[2]])
def test_five_steps_of_fp16_rows(
    optimizer: Optimizer, params: dict[str, Any], pooling: Any
) -> None:
    """The error is at most one rounding to fp16, because FBGEMM's SGD also rounds the
    step.

    It has no bf16 on CPU.
    """
    reference = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)] * 2,
        feature_table_map=FEATURE_TABLES,
        pooling_mode=PoolingMode.SUM if pooling == "sum" else PoolingMode.MEAN,
        weights_precision=SparseType.FP16,
        device=torch.device("cpu"),
        **params,
    )
    tables = [Table(DIM, torch.float16, optimizer, name=name) for name in "ab"]
    every = torch.arange(ROWS)
    for table, weights in zip(tables, reference.split_embedding_weights(), strict=True):
        weights.copy_(table.lookup(every, train=True))
    group = PooledGroup(tables, FEATURE_TABLES, pooling)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        ids, offsets = _batch(generator)
        before = {table.name: table.lookup(every).float() for table in tables}
        out, expected = group(ids, offsets, train=True), reference(ids, offsets)
        assert out.dtype is expected.dtype
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
        grad = torch.randn(out.shape, generator=generator)
        out.backward(grad)
        expected.backward(grad)
        for table, weights in zip(
            tables, reference.split_embedding_weights(), strict=True
        ):
            ours, theirs = table.lookup(every).float(), weights.detach().float()
            numbers = torch.stack(
                [
                    before[table.name].abs(),
                    ours.abs(),
                    (ours - before[table.name]).abs(),
                ]
            )
            assert ((ours - theirs).abs() <= 2**-10 * numbers.amax(0) + 2**-24).all()
            table.insert(every, weights.detach())
