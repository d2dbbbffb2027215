"""``EmbeddingBagCollection`` in TorchRec's shared test: shardings, poolings, weights,
batches, optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from .adapted import one_start
from .exceptions import entries
from .models import PooledModels, set_up
from .tables import KERNEL

# isort: off
from torchrec.distributed.test_utils.test_sharding import create_test_sharder
# isort: on

SHARDINGS = [kind.value for kind in ShardingType if kind != ShardingType.DATA_PARALLEL]
HALF = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
KINDS: dict[str, dict[str, Any]] = {
    "sum": {},
    "mean": {"pooling": PoolingType.MEAN},
    "fp16": {"data_type": DataType.FP16},
    "varying batch per rank": {"variable_batch_size": True},
    "varying batch per feature": {
        "variable_batch_per_feature": True,
        "has_weighted_tables": False,
    },
    "same batch on all ranks, varying per feature": {
        "variable_batch_per_feature": True,
        "has_weighted_tables": False,
        "global_constant_batch": True,
    },
    "empty batch": {"allow_zero_batch_size": True},
    "offsets": {"use_offsets": True},
    "int32": {
        "indices_dtype": torch.int32,
        "offsets_dtype": torch.int32,
        "lengths_dtype": torch.int32,
    },
    "qcomms": {"qcomms_config": HALF},
}
# The loss is nearly flat in the rows; eps, whose defaults differ from FBGEMM's, keeps
# signs of near-zeros out.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 50.0}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.2, "eps": 1e-6}),
    "Adam": (torch.optim.Adam, {"lr": 0.2, "eps": 1e-6}),
    "RowWiseAdagrad": (RowWiseAdagrad, {"lr": 0.2, "eps": 1e-6}),
}


UNEQUAL = [
    "varying batch per rank",
    "varying batch per feature",
    "same batch on all ranks, varying per feature",
    "empty batch",
]
"""Kinds that gloo does not reduce and scatter, as the shardings by rows do."""
BY_ROWS = ["row_wise", "table_row_wise"]


def fails(sharding: str, kind: str) -> bool:
    """Whether stock tables fail on two ranks: by gloo, or on one rank already."""
    name = f"test_pooled.py::test_one_rank[{sharding}-{kind}]"
    by_gloo = sharding in BY_ROWS and kind in UNEQUAL
    return by_gloo or any(entry.matches(name) for entry in entries())


@pytest.fixture
def pooled() -> Iterator[PooledModels]:
    with set_up(PooledModels()) as models:
        yield models


def sharder(sharding: str, kernel: str = KERNEL, **kwargs: Any) -> Any:
    return create_test_sharder("embedding_bag_collection", sharding, kernel, **kwargs)


def cases() -> list[Any]:
    """Each kind with each sharding as parameters of a test.

    Each kind is there once, and each sharding, in what are not slow tests.
    """
    return [
        pytest.param(
            sharding,
            kind,
            marks=[]
            if sharding == "row_wise" or kind == "varying batch per rank"
            else [pytest.mark.slow],
            id=f"{sharding}-{kind}",
        )
        for sharding in SHARDINGS
        for kind in KINDS
    ]


@pytest.mark.parametrize(("sharding", "kind"), cases())
def test_one_rank(pooled: PooledModels, sharding: str, kind: str) -> None:
    qcomms = KINDS[kind].get("qcomms_config")
    pooled.check(sharder(sharding, qcomms_config=qcomms), sharding, 1, **KINDS[kind])


def check_on_two_ranks(sharding: str, kind: str) -> None:
    qcomms = KINDS[kind].get("qcomms_config")
    with set_up(PooledModels()) as pooled:
        pooled.check(
            sharder(sharding, qcomms_config=qcomms), sharding, 2, **KINDS[kind]
        )


@pytest.mark.slow
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_two_ranks(sharding: str) -> None:
    with one_start(2):
        for kind in KINDS:
            if not fails(sharding, kind):
                check_on_two_ranks(sharding, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "kind"), zip(BY_ROWS * 2, UNEQUAL, strict=True))
def test_unequal_batches(sharding: str, kind: str) -> None:
    """A case that fails would end those that begin with it."""
    check_on_two_ranks(sharding, kind)


def test_two_ranks_row_wise(pooled: PooledModels) -> None:
    pooled.check(sharder("row_wise"), "row_wise", 2, pooling=PoolingType.MEAN)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_optimizers(pooled: PooledModels, sharding: str, optimizer: str) -> None:
    config = {"embedding_bags": OPTIMIZERS[optimizer]}
    pooled.check(
        sharder(sharding),
        sharding,
        1,
        apply_optimizer_in_backward_config=config,
        has_weighted_tables=False,
    )


@pytest.mark.slow
def test_optimizers_on_two_ranks() -> None:
    with one_start(2):
        for sharding, optimizer in product(["table_wise", "row_wise"], OPTIMIZERS):
            with set_up(PooledModels()) as pooled:
                pooled.check(
                    sharder(sharding),
                    sharding,
                    2,
                    apply_optimizer_in_backward_config={
                        "embedding_bags": OPTIMIZERS[optimizer]
                    },
                    has_weighted_tables=False,
                )
