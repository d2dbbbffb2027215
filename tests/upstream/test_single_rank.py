"""TorchRec's tests of one rank, which its wheel carries: state dicts, optimizer states,
collections as models.
"""

from __future__ import annotations

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from .sharders import BagSharder

from . import adapted  # noqa: F401, before TorchRec's test modules  # isort: skip
from torchrec.distributed.test_utils.test_model_parallel_base import (  # isort: skip
    ModelParallelSingleRankBase,
    ModelParallelSparseOnlyBase,
    ModelParallelStateDictBase,
)

OPTIMIZERS = [
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.ADAM,
    EmbOptimType.PARTIAL_ROWWISE_ADAM,
    EmbOptimType.LAMB,
    EmbOptimType.PARTIAL_ROWWISE_LAMB,
    EmbOptimType.LARS_SGD,
]


class TestStateDict(ModelParallelStateDictBase):
    backend = "gloo"


class TestSparseOnly(ModelParallelSparseOnlyBase):
    backend = "gloo"


class OneRank(ModelParallelSingleRankBase):
    """Two equal models of two tables and of a weighted one."""

    __test__ = False

    def runTest(self) -> None:
        raise NotImplementedError

    def setUp(self) -> None:
        super().setUp(backend="gloo")

    def _create_tables(self) -> None:
        for kind, tables, count in (
            ("feature", self.tables, 2),
            ("weighted", self.weighted_tables, 1),
        ):
            tables += [
                EmbeddingBagConfig(
                    name=f"{kind}_table_{i}",
                    feature_names=[f"{kind}_{i}"],
                    embedding_dim=8 * (1 + i),
                    num_embeddings=20,
                )
                for i in range(count)
            ]


@pytest.mark.parametrize(
    "sharding",
    [
        pytest.param("table_wise", marks=pytest.mark.slow),
        "column_wise",
        pytest.param("row_wise", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_states_go_from_model_to_model(
    optimizer: EmbOptimType, sharding: str
) -> None:
    case = OneRank()
    case.setUp()
    try:
        params = {"optimizer": optimizer, "learning_rate": 0.5}
        (first, second), batch = case._generate_dmps_and_batch(
            [BagSharder(sharding, fused_params=params)]
        )
        for _ in range(2):
            case._train_models(first, first, batch)
        second.load_state_dict(first.state_dict())
        second.fused_optimizer.load_state_dict(first.fused_optimizer.state_dict())
        case._train_models(first, second, batch)
        case._eval_models(first, second, batch)
        case._compare_models(first, second)
    finally:
        case.tearDown()


del ModelParallelSingleRankBase, ModelParallelSparseOnlyBase, ModelParallelStateDictBase
