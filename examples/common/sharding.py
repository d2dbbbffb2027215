"""A model's tables sharded by TorchRec: in RecStore, or in stock FUSED tables to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_recstore import RecStoreConstraints, RecStorePlanner, RecStoreSharder, TableOptions, table_stats

EPS = 1e-8
HINT_ROWS = 2**40
"""``num_embeddings`` of a RecStore table, which has no size: a hint that nobody has to think about."""


@dataclass(frozen=True)
class Tables:
    """The embedding tables of a model, and how they are trained.

    Attributes:
        backend: "recstore" or "fused".
        names: of all tables.
        dim: width of every table.
        num_embeddings: rows of a fused table.
        optimizer: "sgd", "adagrad" or "rowwise_adagrad", fused into backward.
        lr: of that optimizer.
        sharding: how every table lies on the ranks.
        batch_rows: samples of a step on one rank.
        seed: of RecStore's initial rows.
    """

    backend: Literal["recstore", "fused"]
    names: Sequence[str]
    dim: int
    num_embeddings: int
    optimizer: str
    lr: float
    sharding: str
    batch_rows: int
    seed: int

    def declared_rows(self) -> int:
        """What the configs give as ``num_embeddings``."""
        return HINT_ROWS if self.backend == "recstore" else self.num_embeddings

    def _plan(self, model: nn.Module) -> tuple[ShardingPlan, list[ModuleSharder[Any]]]:
        optimizer = EmbOptimType[f"EXACT_{self.optimizer.upper()}"]
        fused_params = {"optimizer": optimizer, "learning_rate": self.lr, "eps": EPS}
        topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
        sharders: list[ModuleSharder[Any]]
        planner: EmbeddingShardingPlanner
        if self.backend == "recstore":
            sharders = [RecStoreSharder(fused_params=fused_params)]
            options = TableOptions(seed=self.seed)
            dynamic = {
                name: RecStoreConstraints(sharding_types=[self.sharding], options=options) for name in self.names
            }
            planner = RecStorePlanner(topology=topology, batch_size=self.batch_rows, constraints=dynamic)
        else:
            sharders = [EmbeddingBagCollectionSharder(fused_params=fused_params)]
            kernels = [EmbeddingComputeKernel.FUSED.value]
            static = {
                name: ParameterConstraints(sharding_types=[self.sharding], compute_kernels=kernels)
                for name in self.names
            }
            planner = EmbeddingShardingPlanner(topology=topology, batch_size=self.batch_rows, constraints=static)
        group = dist.group.WORLD
        assert group is not None
        return planner.collective_plan(model, sharders, group), sharders

    def shard(self, model: nn.Module, dense_lr: float) -> tuple[DistributedModelParallel, CombinedOptimizer]:
        """Shards the model's tables; collective, the process group stands.

        Args:
            model: unsharded, its tables on the meta device.
            dense_lr: learning rate of the dense layers, which Adam trains.

        Returns:
            The sharded model and its optimizer; the embeddings are updated in backward.
        """
        plan, sharders = self._plan(model)
        sharded = DistributedModelParallel(model, plan=plan, sharders=sharders, device=torch.device("cpu"))
        dense_parameters = dict(in_backward_optimizer_filter(sharded.named_parameters()))
        # Adagrad here loses up to 0.04 of DLRM's AUC on some seeds: its first steps kill units of the dense layers.
        dense = KeyedOptimizerWrapper(dense_parameters, lambda params: torch.optim.Adam(params, lr=dense_lr))
        return sharded, CombinedOptimizer([sharded.fused_optimizer, dense])

    def sizes(self, model: nn.Module) -> tuple[dict[str, int], dict[str, int]]:
        """Returns rows and bytes of every table of the sharded model over all ranks; collective."""
        if self.backend == "recstore":
            stats = table_stats(model)
            return {name: each.rows for name, each in stats.items()}, {name: each.bytes for name, each in stats.items()}
        # FBGEMM on CPU keeps float32: the weights, and one state of the same shape, of one number a row, or none.
        state = {"sgd": 0, "adagrad": self.dim, "rowwise_adagrad": 1}[self.optimizer]
        table_bytes = 4 * (self.dim + state) * self.num_embeddings
        return dict.fromkeys(self.names, self.num_embeddings), dict.fromkeys(self.names, table_bytes)
