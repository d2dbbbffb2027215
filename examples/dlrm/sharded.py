"""Builds a DLRM with sharded tables, as RecStore tables or, for comparison, as stock FUSED tables."""

from __future__ import annotations

import torch
from common.sharding import shard, table_name
from criteo import ID_NAMES, NUM_DENSE
from settings import Settings
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.keyed import CombinedOptimizer


def _unsharded(settings: Settings) -> DLRMTrain:
    tables = [
        EmbeddingBagConfig(
            name=table_name(feature),
            embedding_dim=settings.dim,
            num_embeddings=settings.declared_rows,
            feature_names=[feature],
            data_type=DataType[settings.dtype.upper()],
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
    """Builds the sharded model and its optimizer. Collective; the process group must be initialized.

    Returns:
        The model, which takes a ``Batch`` and returns (loss, (loss, logits, labels)), and the optimizer of its dense
        part. The embeddings are updated in the backward pass.
    """
    torch.manual_seed(settings.seed)
    return shard(settings, ID_NAMES, _unsharded(settings))
