from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import (
    EmbeddingBagConfig,
    PoolingType,
    pooling_type_to_str,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    reorder_inverse_indices,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_recstore.modules.collection import DEFAULT_OPTIONS, EagerCollection, given_configs
from torchrec_recstore.modules.features import Features
from torchrec_recstore.modules.table_module import TableModule
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions


class RecStoreEmbeddingBagCollection(EagerCollection, EmbeddingBagCollectionInterface):  # type: ignore[misc]
    """TorchRec's ``EmbeddingBagCollection`` over tables that take any int64 id, in one process.

    The output is as its output: order, names and shapes. In training a new id gets its row, and backward updates rows
    with the fused optimizer; the numbers are those of the sharded module, to the bit. In evaluation, or with a table's
    ``weight.requires_grad`` off, nothing changes; an id without a row reads as ``TableOptions.missing`` says.

    Symbols: ``F`` features, ``B`` batch size.

    Args:
        embedding_bag_configs: of the tables: ``EmbeddingBagConfig``, or mappings of its arguments.
        lr: of the default optimizer.
        enable_fusion: look all tables that share pooling up in one native call; otherwise a call a table. The numbers
            are the same.
        fusion_k: accepted for compatibility; it limits nothing, ids have 64 bits.
        tables: TorchRec's name of ``embedding_bag_configs``; give one of the two.
        is_weighted: whether per-sample weights of the input count.
        device: ``cpu`` or ``meta``. Input on another device is copied to the CPU, and the output back.
        optimizer: of ``torchrec_recstore.optim``, for all tables; None: ``RowWiseAdagrad(lr)``.
        options: of all tables, or a mapping by table name.
        fused: whether backward updates the rows; otherwise it collects gradients for ``SparseSGD`` and the like.

    Raises:
        TypeError, ValueError: an argument that makes no sense, or a table that RecStore does not support; the message
            names it.
        ColdStoreError, ImportError: a cold store cannot be opened.

    Example::

        user = EmbeddingBagConfig(name="t_user", embedding_dim=16, num_embeddings=2**40, feature_names=["user"])
        ebc = RecStoreEmbeddingBagCollection([user])
        ids = KeyedJaggedTensor(["user"], values=torch.tensor([7, -1, 2**62]), lengths=torch.tensor([2, 1]))
        ebc(ids).values().sum().backward()  # makes three rows and updates them
    """

    def __init__(
        self,
        embedding_bag_configs: Sequence[EmbeddingBagConfig | Mapping[str, Any]] | None = None,
        lr: float = 0.01,
        enable_fusion: bool = True,
        fusion_k: int = 30,
        *,
        tables: Sequence[EmbeddingBagConfig | Mapping[str, Any]] | None = None,
        is_weighted: bool = False,
        device: torch.device | str | int | None = None,
        optimizer: Optimizer | None = None,
        options: TableOptions | Mapping[str, TableOptions] = DEFAULT_OPTIONS,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self._embedding_bag_configs = given_configs(
            embedding_bag_configs, tables, "embedding_bag_configs", EmbeddingBagConfig
        )
        self._is_weighted = is_weighted
        self._poolings = [_pooling(config) for config in self._embedding_bag_configs]
        self.embedding_bags = self._set_up(
            self._embedding_bag_configs, lr, enable_fusion, fusion_k, optimizer, options, fused, device
        )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows.

        Args:
            features: ids of at least the tables' features, of any integer type; a ``TensorDict`` too. A batch whose
                size varies by feature needs inverse indices, as with TorchRec's module.

        Returns:
            (B, sum of dims) float32 on the device of ``features``: table by table, feature by feature.

        Raises:
            KeyError: a feature is missing.
            TypeError: ids that are not integers.
            RuntimeError: the module is on the meta device.
            ValueError, MemoryError, ColdStoreError: as for :class:`torchrec_recstore.kernels.PooledKernel`.
        """
        batch = Features(maybe_td_to_kjt(features, None), self._is_weighted)
        modules = self._modules_by_table()
        flat_names = [name for names in self._feature_names for name in names]
        inverse = reorder_inverse_indices(batch.given.inverse_indices_or_none(), flat_names).to("cpu")
        pooled: dict[int, list[Tensor]] = {}
        whole: Tensor | None = None
        for numbers, trains in self._groups(self._poolings):
            feature_tables = [place for place, number in enumerate(numbers) for _ in self._feature_names[number]]
            names = [name for number in numbers for name in self._feature_names[number]]
            bags, counts = batch.bags(names)
            group = [modules[number] for number in numbers]
            out = self._lookups.bags(group, feature_tables, self._poolings[numbers[0]], bags, train=trains)
            if len(numbers) == len(modules) and counts is None and inverse.numel() == 0:
                whole = out
                break
            dims = [group[place].table.dim for place in feature_tables]
            parts = iter(torch.split(out, dims, dim=1))
            sizes = iter([out.shape[0]] * len(names) if counts is None else counts)
            for number in numbers:
                pooled[number] = [next(parts)[: next(sizes)] for _ in self._feature_names[number]]
        if whole is None:
            every = [part for number in range(len(modules)) for part in pooled[number]]
            if inverse.numel():
                every = [part.index_select(0, which) for part, which in zip(every, inverse, strict=True)]
            whole = torch.cat(every, dim=1)
        lengths = [c.embedding_dim for c in self._embedding_bag_configs for _ in c.feature_names]
        keys = [name for names in self._names_by_table for name in names]
        return KeyedTensor(keys=keys, length_per_key=lengths, values=whole.to(batch.device))

    def is_weighted(self) -> bool:
        """Whether per-sample weights of the input count."""
        return self._is_weighted

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables' configs, in their order."""
        return self._embedding_bag_configs

    def _modules_by_table(self) -> list[TableModule]:
        return list(self.embedding_bags.values())  # type: ignore[arg-type]


def _pooling(config: EmbeddingBagConfig) -> Any:
    if config.pooling not in (PoolingType.SUM, PoolingType.MEAN):
        raise ValueError(f"RecStore table {config.name!r}: pooling must be SUM or MEAN, got {config.pooling}")
    return pooling_type_to_str(config.pooling)
