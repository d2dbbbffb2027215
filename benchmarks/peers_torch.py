"""The sides of peers.py that are torch's: a process for each of them.

python benchmarks/peers_torch.py recstore|fused|managed|embedding_bag
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from peers_protocol import Shape, answer
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.mc_modules import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from torchrec_recstore import Adagrad, RecStoreEmbeddingBag

LR = 0.01


class TorchSide:
    """A table whose ``forward`` takes ids and offsets, (N,) int64, of bags of one id.

    Args:
        shape: The sizes.
    """

    is_numbered = False

    def __init__(self, shape: Shape) -> None:
        torch.set_num_threads(shape.threads)
        self.shape = shape
        self.filled_rows = shape.rows

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Returns the rows of ids, (N, dim)."""
        raise NotImplementedError

    def update(self) -> None:
        """Updates the rows of the last forward, if backward does not."""

    def train(self, is_training: bool) -> None:
        """Tells the modules whether a forward is of a training step."""

    def fill(self, ids: Any, weights: Any) -> float | None:
        """See :class:`peers_protocol.Side`."""
        return None

    def lookup(self, ids: Any) -> float:
        """See :class:`peers_protocol.Side`."""
        values = torch.from_numpy(ids)
        offsets = torch.arange(len(values))
        self.train(False)
        with torch.no_grad():
            begin = time.perf_counter()
            self.forward(values, offsets)
            return time.perf_counter() - begin

    def step(self, ids: Any, gradient: Any) -> float:
        """See :class:`peers_protocol.Side`."""
        values = torch.from_numpy(ids)
        offsets = torch.arange(len(values))
        grad = torch.from_numpy(gradient)
        self.train(True)
        begin = time.perf_counter()
        self.forward(values, offsets).backward(grad)
        self.update()
        return time.perf_counter() - begin

    def rows(self) -> int:
        """See :class:`peers_protocol.Side`."""
        return self.filled_rows

    def check(self, ids: Any) -> list[float]:
        """See :class:`peers_protocol.Side`."""
        self.train(False)
        values = torch.from_numpy(ids)
        offsets = torch.arange(len(values))
        with torch.no_grad():
            rows = self.forward(values, offsets)
        first_column: list[float] = rows[:, 0].tolist()
        return first_column

    def state(self) -> dict[str, Any]:
        """Returns the tensors that are saved."""
        raise NotImplementedError

    def save(self, folder: Path) -> float:
        """See :class:`peers_protocol.Side`."""
        folder.mkdir()
        begin = time.perf_counter()
        torch.save(self.state(), folder / "table.pt")
        return time.perf_counter() - begin

    def load(self, folder: Path) -> float:
        """See :class:`peers_protocol.Side`."""
        begin = time.perf_counter()
        loaded = torch.load(folder / "table.pt")
        for name, tensor in self.state().items():
            tensor.copy_(loaded[name])
        return time.perf_counter() - begin


class RecStore(TorchSide):
    """RecStore's module without sharding, with Adagrad.

    Args:
        shape: The sizes.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.bag = RecStoreEmbeddingBag(
            2**40,
            shape.dim,
            mode="sum",
            optimizer=Adagrad(LR),
        )

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """See :class:`TorchSide`."""
        rows: Tensor = self.bag(ids, offsets)
        return rows

    def train(self, is_training: bool) -> None:
        """See :class:`TorchSide`."""
        self.bag.train(is_training)

    def fill(self, ids: Any, weights: Any) -> float | None:
        """See :class:`peers_protocol.Side`."""
        values = torch.from_numpy(ids)
        rows = torch.from_numpy(weights)
        begin = time.perf_counter()
        self.bag.table.insert(values, rows)
        return time.perf_counter() - begin

    def rows(self) -> int:
        """See :class:`peers_protocol.Side`."""
        return len(self.bag.table)

    def state(self) -> dict[str, Any]:
        """See :class:`TorchSide`."""
        state: dict[str, Any] = self.bag.state_dict()
        return state

    def load(self, folder: Path) -> float:
        """See :class:`peers_protocol.Side`."""
        begin = time.perf_counter()
        self.bag.load_state_dict(torch.load(folder / "table.pt"))
        return time.perf_counter() - begin


class Fused(TorchSide):
    """FBGEMM's table of a fixed number of rows, which TorchRec's FUSED tables are.

    Args:
        shape: The sizes.
    """

    is_numbered = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.kernel = SplitTableBatchedEmbeddingBagsCodegen(
            [(shape.rows, shape.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ADAGRAD,
            learning_rate=LR,
        )
        (weights,) = self.kernel.split_embedding_weights()
        nn.init.uniform_(weights, -0.001, 0.001)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """See :class:`TorchSide`."""
        last_end = torch.tensor([len(ids)])
        ends = torch.cat([offsets, last_end])
        rows: Tensor = self.kernel(ids, ends)
        return rows

    def state(self) -> dict[str, Any]:
        """See :class:`TorchSide`."""
        (weights,) = self.kernel.split_embedding_weights()
        ((state,),) = self.kernel.split_optimizer_states()
        return {"weights": weights, "state": state}


class Managed(Fused):
    """TorchRec's managed collision in front of FBGEMM's table.

    It makes the rows of new ids in each step. Its rows are not made anew, which its
    sharded module cannot do on a CPU.

    Args:
        shape: The sizes.
    """

    is_numbered = False

    def __init__(self, shape: Shape) -> None:
        # the last row is that of all ids without a row
        super().__init__(shape._replace(rows=shape.rows + 1))
        config = EmbeddingBagConfig(
            name="t",
            embedding_dim=shape.dim,
            num_embeddings=shape.rows + 1,
            feature_names=["f"],
        )
        module = MCHManagedCollisionModule(
            shape.rows + 1,
            torch.device("cpu"),
            LFU_EvictionPolicy(),
            eviction_interval=1,
        )
        self.managed = ManagedCollisionCollection({"t": module}, [config])

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """See :class:`TorchSide`."""
        features = KeyedJaggedTensor(
            ["f"],
            ids,
            lengths=torch.ones(len(ids), dtype=torch.int32),
        )
        remapped = self.managed(features)
        self.managed.evict()
        return super().forward(remapped.values(), offsets)

    def train(self, is_training: bool) -> None:
        """See :class:`TorchSide`."""
        self.managed.train(is_training)

    def state(self) -> dict[str, Any]:
        """See :class:`TorchSide`."""
        return {**super().state(), **self.managed.state_dict()}


class Bag(TorchSide):
    """``torch.nn.EmbeddingBag(sparse=True)`` with ``torch.optim.SparseAdam``.

    Args:
        shape: The sizes.
    """

    is_numbered = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.bag = nn.EmbeddingBag(
            shape.rows,
            shape.dim,
            mode="sum",
            sparse=True,
        )
        self.optimizer = torch.optim.SparseAdam(self.bag.parameters(), lr=LR)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """See :class:`TorchSide`."""
        rows: Tensor = self.bag(ids, offsets)
        return rows

    def update(self) -> None:
        """See :class:`TorchSide`."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """See :class:`TorchSide`."""
        (weights,) = self.bag.parameters()
        state = self.optimizer.state[weights]
        return {
            "weights": weights.detach(),
            "exp_avg": state["exp_avg"],
            "exp_avg_sq": state["exp_avg_sq"],
        }


SIDES = {
    "recstore": RecStore,
    "fused": Fused,
    "managed": Managed,
    "embedding_bag": Bag,
}


if __name__ == "__main__":
    answer(SIDES[sys.argv[1]])
