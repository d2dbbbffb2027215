"""A use of a sharded model: what users do with it, tried with TorchRec's own tables and
with RecStore tables.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.test_utils.emb_sharder import TestEBCSharder
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.checkpoint import models
from tests.parity.run_cell import CPU, on_fused_kernels
from torchrec_recstore import (
    RecStoreConstraints,
    RecStorePlanner,
    RecStoreSharder,
    load_dense_weights,
)

ROWS = 100  # of each table
FUSED_PARAMS = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}


@dataclass(frozen=True)
class Models:
    """Makes models that are equal with TorchRec's own tables and with RecStore tables.

    Args:
        kernel: "recstore", or "stock" for TorchRec's FUSED kernel.
        folder: For files. All ranks have the same folder.
    """

    kernel: str
    folder: Path

    def __call__(
        self,
        seed: int = 0,
        sharding: str = "table_wise",
        *,
        fresh: bool = False,
        env: ShardingEnv | None = None,
        prepare: Callable[[nn.Module], Any] = lambda whole: None,
    ) -> DistributedModelParallel:
        """A sharded model, whose weights depend only on the seed.

        Args:
            fresh: Whether the weights are those of a new model, so that a RecStore
                table has no row.
            env: The ranks of the model. Default: all ranks.
            prepare: It is called with the model before the model is sharded.
        """
        ranks = dist.get_world_size() if env is None else env.world_size
        whole = models.Model()
        prepare(whole)
        topology = Topology(
            world_size=ranks, local_world_size=ranks, compute_device="cpu"
        )
        constraints = {
            name: RecStoreConstraints(
                sharding_types=[sharding], min_partition=models.DIM // 2
            )
            for name in models.TABLES
        }
        sharders: list[Any] = [RecStoreSharder(dict(FUSED_PARAMS))]
        # The same on every rank.
        plan = RecStorePlanner(
            topology=topology, constraints=constraints, debug=False
        ).plan(whole, sharders)
        if self.kernel == "stock":
            plan, sharders = (
                on_fused_kernels(plan),
                [TestEBCSharder(sharding, "fused", dict(FUSED_PARAMS))],
            )
        model = DistributedModelParallel(
            whole, env, plan=plan, sharders=sharders, device=CPU
        )
        if fresh:
            return model
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.module.over.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            weights = {
                name: torch.randn(ROWS, models.DIM, generator=generator)
                for name in models.TABLES
            }
            if self.kernel == "recstore":
                load_dense_weights(model, weights)
                return model
            for name, weight in weights.items():
                for shard in model.state_dict()[weight_key(name)].local_shards():
                    (row, column), (rows, columns) = (
                        shard.metadata.shard_offsets,
                        shard.metadata.shard_sizes,
                    )
                    shard.tensor.copy_(
                        weight[row : row + rows, column : column + columns]
                    )
        return model

    def with_optimizer(
        self, seed: int = 0, sharding: str = "table_wise"
    ) -> tuple[Any, CombinedOptimizer]:
        """A model, and the optimizer of all of its parameters as TorchRec's examples
        make it.
        """
        model = self(seed, sharding)
        return model, CombinedOptimizer([model.fused_optimizer, dense_optimizer(model)])


@dataclass(frozen=True)
class Use:
    """A use, whose function returns a result that must not depend on the tables'
    kernel.

    Args:
        function: Its docstring describes the use in the document.
        needs: The package that the use needs.
        differs: Why the results differ and what to call, if they cannot be equal.
    """

    function: Callable[[Models], Any]
    world_size: int = 1
    needs: str = ""
    differs: str = ""

    @property
    def name(self) -> str:
        """The use in words."""
        return " ".join((self.function.__doc__ or "").split())

    @property
    def topic(self) -> str:
        """The heading of the uses of the function's module."""
        return (
            self.function.__module__.rpartition(".")[2].replace("_", " ").capitalize()
        )

    @property
    def slow(self) -> bool:
        """Whether the use is not tried in make test: it starts more processes, or
        imports large packages.
        """
        return self.world_size > 1 or bool(self.needs)

    @property
    def possible(self) -> bool:
        """Whether the package that the use needs is installed."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    def run(self, kernel: str, folder: Path) -> Any:
        """Returns the result on this rank, of numbers, strings, lists and dicts."""
        torch.manual_seed(0)
        return _plain(self.function(Models(kernel, folder)))


USES: list[Use] = []


def use(function: Callable[[Models], Any] | None = None, **more: Any) -> Any:
    """Registers a use."""

    def register(function: Callable[[Models], Any]) -> Callable[[Models], Any]:
        USES.append(Use(function, **more))
        return function

    return register if function is None else register(function)


def weight_key(table: str) -> str:
    return f"sparse.embedding_bags.{table}.weight"


def dense_optimizer(model: DistributedModelParallel) -> KeyedOptimizerWrapper:
    """Adam of the parameters that are in no table."""
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(
        parameters, lambda params: torch.optim.Adam(params, lr=0.01)
    )


def batch(seed: int) -> Any:
    return models.batch(seed, low=0, high=ROWS)


def loss_of(model: DistributedModelParallel, seed: int) -> Tensor:
    return model(batch(seed)).square().sum()


def train(
    model: DistributedModelParallel,
    optimizer: Any = None,
    steps: int = 3,
    first: int = 0,
) -> None:
    """Trains the model on batches that are numbered from ``first``."""
    for step in range(first, first + steps):
        if optimizer is not None:
            optimizer.zero_grad()
        loss_of(model, 10 * step + dist.get_rank()).backward()
        if optimizer is not None:
            optimizer.step()


def predictions(model: DistributedModelParallel) -> Tensor:
    """The model's predictions for a batch, in evaluation mode."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        predicted: Tensor = model(batch(999))
    model.train(was_training)
    return predicted


def check_equal(found: Tensor, expected: Tensor) -> None:
    """Raises AssertionError if the model that has got a state does not predict what the
    state's model predicts.
    """
    assert torch.allclose(found, expected, atol=1e-5), (
        "the model has other weights than those that were loaded"
    )


def carried(
    new: Models, carry: Callable[[Any, Any], None], sharding: str = "table_wise"
) -> list[Tensor]:
    """The predictions of a model to which ``carry`` has carried a trained one, then
    those after further training.

    Args:
        carry: Takes the trained model with its optimizer, and another model with its
            optimizer.
    """
    source = new.with_optimizer(sharding=sharding)
    train(*source)
    target = new.with_optimizer(seed=1, sharding=sharding)
    train(*target, steps=1, first=7)
    carry(source, target)
    before = predictions(target[0])
    check_equal(before, predictions(source[0]))
    train(*target, first=3)
    return [before, predictions(target[0])]


def local_tensors(value: Any) -> list[Tensor]:
    """The tensors of this rank's shards of a ``ShardedTensor``, or the plain tensor."""
    return (
        [shard.tensor for shard in value.local_shards()]
        if isinstance(value, ShardedTensor)
        else [value]
    )


def common(keys: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """The keys that stock tables have, too: a RecStore table has its ids and number of
    rows besides.
    """
    return sorted(
        key for key in keys if not key.endswith((".weight_id", ".weight_rows"))
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, Iterator)):
        return [_plain(each) for each in value]
    return value
