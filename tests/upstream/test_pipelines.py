"""TorchRec's pipelines over its test model, each beside a plain loop over the same
batches.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.test_utils import test_model
from torchrec.distributed.test_utils.pipeline_config import PipelineConfig
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from .models import PooledModels
from .tables import KERNEL

# isort: off
from torchrec.distributed.test_utils.test_sharding import (
    DistributedModelParallel,
    create_test_sharder,
)
# isort: on

CPU = torch.device("cpu")
STEPS = 6
# the module in whose backward these pipelines do a part of their work
SITE = {"site_fqn": "sparse.ebc"}
TRAINING: dict[str, dict[str, str]] = {
    "base": {},
    "sparse": {},
    "sparse_lite": {},
    "prefetch": {},
    "semi": {},
    "fused": {},
    "hybrid_base": {},
    "sparse-threading": {},
    "sparse-bwd-opt": SITE,
    "sparse-opt-stash": SITE,
    "sparse-emb-stash": SITE,
    "prefetch-ems": {},
}
EVALUATION = ["eval-sdd", "eval-fused", "eval-cpu-sparse"]


class Models(PooledModels):
    """The tables of TorchRec's shared test, in a model of each of the two loops."""

    __test__ = False

    def __init__(self, sharding: str) -> None:
        super().__init__()
        self.setUp()
        self._build_tables_and_groups()
        self.sharding = sharding

    def model(self) -> tuple[Any, CombinedOptimizer]:
        """The model, the same each time, and its optimizers."""
        torch.manual_seed(0)
        model = test_model.TestSparseNN(
            tables=self.tables,
            weighted_tables=self.weighted_tables,
            embedding_groups=self.embedding_groups,
            sparse_device=torch.device("meta"),
        )
        sharder = create_test_sharder(
            "embedding_bag_collection", self.sharding, KERNEL, {"learning_rate": 50.0}
        )
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        sharded = DistributedModelParallel(
            model, env=env, sharders=[sharder], device=CPU
        )
        parameters = dict(in_backward_optimizer_filter(sharded.named_parameters()))
        dense = KeyedOptimizerWrapper(
            parameters, lambda params: torch.optim.SGD(params, lr=0.1)
        )
        return sharded, CombinedOptimizer([sharded.fused_optimizer, dense])

    def batches(self) -> list[test_model.ModelInput]:
        """The batches, as each of the loops is given them."""
        torch.manual_seed(0)
        tables: list[EmbeddingBagConfig] = self.tables
        return [
            test_model.ModelInput.generate(
                tables=tables,
                weighted_tables=self.weighted_tables,
                batch_size=8,
                world_size=1,
                num_float_features=10,
            )[0]
            for _ in range(STEPS)
        ]


def progress(pipeline: Any, batches: list[test_model.ModelInput]) -> list[Tensor]:
    """The predictions of a pipeline, to the end of the batches."""
    iterator, predictions = iter(batches), []
    while True:
        try:
            predictions.append(_prediction(pipeline.progress(iterator)))
        except StopIteration:
            return predictions


def _prediction(output: Any) -> Tensor:
    prediction: Tensor = output[1] if isinstance(output, tuple) else output
    return prediction.detach().clone()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize(
    "sharding",
    [
        pytest.param("table_wise", marks=pytest.mark.slow),
        pytest.param("column_wise", marks=pytest.mark.slow),
        "row_wise",
    ],
)
def test_training(name: str, sharding: str) -> None:
    models = Models(sharding)
    model, optimizer = models.model()
    expected = []
    for batch in models.batches():
        optimizer.zero_grad()
        loss, prediction = model(batch)
        loss.backward()
        optimizer.step()
        expected.append(_prediction(prediction))
    kwargs = {
        **TRAINING[name],
        **({"sharding_type": sharding} if TRAINING[name] else {}),
    }
    pipeline = PipelineConfig(name, kwargs=kwargs).generate_pipeline(
        *models.model(), CPU
    )
    torch.testing.assert_close(
        progress(pipeline, models.batches()), expected, rtol=0, atol=0
    )


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", EVALUATION)
def test_evaluation(name: str) -> None:
    models = Models("row_wise")
    model, optimizer = models.model()
    for batch in models.batches():
        model(batch)[0].backward()
        optimizer.step()
    with torch.no_grad():  # in training mode, since these pipelines want the loss too
        expected = [_prediction(model(batch)) for batch in models.batches()]
    pipeline = PipelineConfig(name).generate_pipeline(model, optimizer, CPU)
    torch.testing.assert_close(
        progress(pipeline, models.batches()), expected, rtol=0, atol=0
    )
