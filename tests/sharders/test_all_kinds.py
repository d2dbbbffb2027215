"""``get_recstore_sharders`` places the tables of every kind of collection in RecStore."""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_recstore import SGD, get_recstore_sharders, table_stats
from torchrec_recstore.sharders import (
    RecStoreEmbeddingCollectionSharder,
    RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
    RecStoreSharder,
)
from torchrec_recstore.sharders.model_tables import tables_of_rank

from .models import bag, batch, collection, sequence, sequences


class Model(nn.Module):
    """A collection of each kind, each with one table that has a feature of the same
    name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bags = collection(bag("bags", features=["bags"]))
        self.sequences = sequences(sequence("sequences", features=["sequences"]))
        self.processed = FeatureProcessedEmbeddingBagCollection(
            collection(bag("processed", features=["processed"]), is_weighted=True),
            {"processed": PositionWeightedModule(max_feature_length=3)},
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        bags: Tensor = self.bags(features).values().sum()
        rows: Tensor = self.sequences(features)["sequences"].values().sum()
        processed: Tensor = self.processed(features).values().sum()
        return bags + rows + processed


def test_a_model_with_every_kind(one_rank: None) -> None:
    sharders = get_recstore_sharders(
        {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
    )
    model = DistributedModelParallel(
        Model(), sharders=sharders, device=torch.device("cpu")
    )
    ids = [[1, 2], [3]]
    model(batch(bags=ids, sequences=ids, processed=ids)).backward()
    stats = table_stats(model)
    assert {name: table.rows for name, table in stats.items()} == {
        "bags": 3,
        "sequences": 3,
        "processed": 3,
    }
    for table in tables_of_rank(model, ""):
        assert table.optimizer == SGD(lr=0.5)


def test_the_arguments_are_those_of_each_sharder(one_rank: None) -> None:
    fused_params = {"learning_rate": 0.5}
    bags, rows, processed = get_recstore_sharders(
        fused_params, {}, optimizer=SGD(lr=0.5), accumulation_steps=2
    )
    assert type(bags) is RecStoreSharder
    assert type(rows) is RecStoreEmbeddingCollectionSharder
    assert type(processed) is RecStoreFeatureProcessedEmbeddingBagCollectionSharder
    assert repr(bags) == repr(
        RecStoreSharder(fused_params, optimizer=SGD(lr=0.5), accumulation_steps=2)
    )
    assert repr(rows).partition("(")[2] == repr(bags).partition("(")[2]
    assert (
        repr(processed)
        == f"RecStoreFeatureProcessedEmbeddingBagCollectionSharder(ebc_sharder={bags!r})"
    )
    assert fused_params == {"learning_rate": 0.5}
    for sharder in (bags, rows, processed):
        assert sharder.qcomm_codecs_registry == {}


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="optimizer must be one of"):
        get_recstore_sharders(optimizer="sgd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="accumulation_steps"):
        get_recstore_sharders(accumulation_steps=0)
