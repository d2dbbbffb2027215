"""Ranks with batches of different sizes on gloo: the errors of TorchRec that
docs/errors.md quotes, with any tables.
"""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.test_utils.emb_sharder import TestEBCSharder, TestECSharder

from tests.parity.run_cell import FUSED_PARAMS, on_fused_kernels
from torchrec_recstore.sharders import (
    RecStoreEmbeddingCollectionSharder,
    RecStoreSharder,
)

from .test_sharded_equals_unsharded import ROW, TABLE, plan_of, recstore
from .workers import run_in_processes

DOCUMENT = Path(__file__).parents[2] / "docs" / "errors.md"
BAGS_MESSAGE = "ProcessGroupGloo::allgather: invalid tensor size at index"
SEQUENCES_MESSAGE = "cannot reshape tensor of 0 elements into shape [-1, 0]"
OTHER_RANK_MESSAGES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out",
    "Broken pipe",
)


def bags() -> nn.Module:
    table = EmbeddingBagConfig(
        name="t", embedding_dim=8, num_embeddings=100, feature_names=["f"]
    )
    return EmbeddingBagCollection([table], device=torch.device("meta"))


def sequences() -> nn.Module:
    table = EmbeddingConfig(
        name="t", embedding_dim=8, num_embeddings=100, feature_names=["f"]
    )
    return EmbeddingCollection([table], device=torch.device("meta"))


def error_of_a_step(
    module: nn.Module, kernel: str, sharding: str, examples: int, world_size: int
) -> str:
    """Returns the error of a training step on this rank. Empty: there is none."""
    plan = plan_of(module, {"t": recstore(sharding)}, world_size)
    sharders = [
        RecStoreSharder(dict(FUSED_PARAMS)),
        RecStoreEmbeddingCollectionSharder(dict(FUSED_PARAMS)),
    ]
    if kernel == "stock":
        plan = on_fused_kernels(plan)
        sharders = [
            kind(sharding, "fused", dict(FUSED_PARAMS))
            for kind in (TestEBCSharder, TestECSharder)
        ]
    model = DistributedModelParallel(
        module, plan=plan, sharders=sharders, device=torch.device("cpu")
    )
    ids = torch.arange(2 * examples)
    features = KeyedJaggedTensor(["f"], ids, lengths=torch.full((examples,), 2))
    try:
        output = model(features).wait()
        rows = (
            output.values()
            if isinstance(module, EmbeddingBagCollection)
            else output["f"].values()
        )
        rows.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def unequal_bags(rank: int, world_size: int, kernel: str) -> None:
    assert error_of_a_step(bags(), kernel, TABLE, (4, 2)[rank], world_size) == ""
    assert BAGS_MESSAGE in error_of_a_step(
        bags(), kernel, ROW, (4, 2)[rank], world_size
    )


def empty_sequences(rank: int, world_size: int, kernel: str) -> None:
    assert error_of_a_step(sequences(), kernel, ROW, (4, 2)[rank], world_size) == ""
    error = error_of_a_step(sequences(), kernel, ROW, (4, 0)[rank], world_size)
    messages = OTHER_RANK_MESSAGES if rank == 0 else (SEQUENCES_MESSAGE,)
    assert any(message in error for message in messages), error


def in_group(
    rank: int, world_size: int, scenario: str, kernel: str, directory: str
) -> None:
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    method = f"file://{directory}/rendezvous"
    limit = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=method, rank=rank, world_size=world_size, timeout=limit
    )
    {"bags": unequal_bags, "sequences": empty_sequences}[scenario](
        rank, world_size, kernel
    )


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["stock", "recstore"])
@pytest.mark.parametrize("scenario", ["bags", "sequences"])
def test_the_errors_are_those_of_the_page(scenario: str, kernel: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_in_processes(
            2, partial(in_group, scenario=scenario, kernel=kernel, directory=directory)
        )


def test_the_page_has_the_errors() -> None:
    page = DOCUMENT.read_text()
    assert BAGS_MESSAGE in page
    assert SEQUENCES_MESSAGE in page
