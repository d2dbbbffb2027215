"""DLRM with its tables sharded by TorchRec: in RecStore, or in stock FUSED tables to compare with."""

from __future__ import annotations

import torch
from common.processes import rank_and_world_size
from common.sharding import Tables
from criteo_format import ID_NAMES, NUM_DENSE
from settings import Settings
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.keyed import CombinedOptimizer


def table_name(feature: str) -> str:
    """Name of a feature's table."""
    return f"t_{feature}"


def _tables(settings: Settings) -> Tables:
    return Tables(
        backend=settings.backend,
        names=[table_name(feature) for feature in ID_NAMES],
        dim=settings.dim,
        num_embeddings=settings.num_embeddings,
        optimizer=settings.optimizer,
        lr=settings.lr,
        sharding=settings.sharding,
        batch_rows=settings.batch_size // rank_and_world_size()[1],
        seed=settings.seed,
    )


def _unsharded(settings: Settings) -> DLRMTrain:
    tables = [
        EmbeddingBagConfig(
            name=table_name(feature),
            embedding_dim=settings.dim,
            num_embeddings=_tables(settings).declared_rows(),
            feature_names=[feature],
        )
        for feature in ID_NAMES
    ]
    dlrm = DLRM(
        embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        dense_in_features=NUM_DENSE,
        dense_arch_layer_sizes=[512, 256, settings.dim],
        over_arch_layer_sizes=[512, 512, 256, 1],
    )
    return DLRMTrain(dlrm)


def build(settings: Settings) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Builds the sharded model and its optimizer; collective, the process group stands.

    Returns:
        The model, from a ``Batch`` to (loss, (loss, logits, labels)), and the optimizer of its dense part; the
        embeddings are updated in backward.
    """
    torch.manual_seed(settings.seed)
    return _tables(settings).shard(_unsharded(settings), settings.dense_lr)


def table_sizes(settings: Settings, model: nn.Module) -> tuple[dict[str, int], dict[str, int]]:
    """Returns rows and bytes of every table over all ranks; collective."""
    return _tables(settings).sizes(model)
