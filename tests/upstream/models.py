"""TorchRec's shared test, ``sharding_single_rank_test``, and the models that it tests
here.

It trains a model of sharded tables for one step beside the same model unsharded and
compares their predictions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.test_utils.multi_process import MultiProcessTestBase
from torchrec.distributed.test_utils.test_model import TestSparseNN
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
)

from . import adapted  # noqa: F401, before TorchRec's test modules

# isort: off
from torchrec.distributed.test_utils.test_model_parallel import ModelParallelTestShared
from torchrec.distributed.test_utils.test_sharding import sharding_single_rank_test
# isort: on

Case = TypeVar("Case", bound=MultiProcessTestBase)


@contextmanager
def set_up(case: Case) -> Iterator[Case]:
    """Gives one of TorchRec's test cases between its ``setUp`` and ``tearDown``."""
    case.setUp()
    yield case
    case.tearDown()


class PooledModels(ModelParallelTestShared):
    """``EmbeddingBagCollection``: six tables, of which two share features, and two
    tables of weighted bags.
    """

    __test__ = False

    def runTest(self) -> None:  # so that it can be made outside a unittest suite
        raise NotImplementedError

    def setUp(self) -> None:
        super().setUp(backend="gloo")

    def check(
        self, sharder: ModuleSharder[Any], sharding: str, world_size: int, **kwargs: Any
    ) -> None:
        """Shards the model and compares it with the unsharded one."""
        names = [
            *self.table_names,
            *(f"weighted_table_{i}" for i in range(self.num_weighted_features)),
        ]
        self._test_sharding(
            [sharder],
            world_size=world_size,
            local_size=_ranks_of_a_node(sharding, world_size),
            constraints={name: _constraint(sharding) for name in names},
            **copy.deepcopy(kwargs),  # it changes some of them
        )


class OtherModels(MultiProcessTestBase):
    """A model with the given tables."""

    __test__ = False

    def runTest(self) -> None:
        raise NotImplementedError

    def check(
        self,
        sharders: Sequence[ModuleSharder[Any]],
        sharding: str,
        world_size: int,
        model_class: type[nn.Module],
        tables: Sequence[BaseEmbeddingConfig],
        **kwargs: Any,
    ) -> None:
        """Shards the model and compares it with the unsharded one."""
        arguments = {
            "model_class": model_class,
            "tables": list(tables),
            "embedding_groups": {"group": _embedding_names(tables)},
            "sharders": list(sharders),
            "optim": EmbOptimType.EXACT_SGD,
            "backend": "gloo",
            "local_size": _ranks_of_a_node(sharding, world_size),
            "constraints": {table.name: _constraint(sharding) for table in tables},
            "global_constant_batch": True,
            **copy.deepcopy(kwargs),  # it changes some of them
        }
        if world_size == 1:
            sharding_single_rank_test(rank=0, world_size=1, **arguments)
        else:
            self._run_multi_process_test(
                callable=sharding_single_rank_test, world_size=world_size, **arguments
            )


def sequence_tables() -> list[EmbeddingConfig]:
    """Six tables, of which two share features."""
    return [
        EmbeddingConfig(
            num_embeddings=10 + 7 * (i % 4),
            embedding_dim=8,
            name=f"table_{i}",
            feature_names=[f"feature_{i % 4}"],
        )
        for i in range(6)
    ]


def processed_tables() -> list[EmbeddingBagConfig]:
    """Four tables, each with the name of its feature, as :class:`FeatureProcessedNN`
    needs them.
    """
    return [
        EmbeddingBagConfig(
            num_embeddings=10 + 7 * i,
            embedding_dim=8 * (1 + i % 2),
            name=f"feature_{i}",
            feature_names=[f"feature_{i}"],
        )
        for i in range(4)
    ]


class FeatureProcessedNN(TestSparseNN):
    """TorchRec's test model with position weights on two of its tables."""

    def __init__(self, tables: list[EmbeddingBagConfig], **kwargs: Any) -> None:
        lengths = {table.name: 30 for table in tables[:2]}
        super().__init__(tables, max_feature_lengths=lengths, **kwargs)


def _constraint(sharding: str) -> ParameterConstraints:
    # Columns are split into four. The planner uses some sharding types only on request.
    return ParameterConstraints(sharding_types=[sharding], min_partition=4)


def _ranks_of_a_node(sharding: str, world_size: int) -> int:
    return 1 if sharding == "grid_shard" else world_size  # which is over several nodes


def _embedding_names(tables: Sequence[BaseEmbeddingConfig]) -> list[str]:
    features = [feature for table in tables for feature in table.feature_names]
    return [
        f"{feature}@{table.name}" if features.count(feature) > 1 else feature
        for table in tables
        for feature in table.feature_names
    ]
