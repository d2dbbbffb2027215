from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import (
    EmbeddingConfig,
)
from torchrec.modules.embedding_modules import (
    EmbeddingCollectionInterface,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_recstore.modules.collection import DEFAULT_OPTIONS, EagerCollection, given_configs
from torchrec_recstore.modules.features import Features
from torchrec_recstore.modules.table_module import TableModule
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions


class RecStoreEmbeddingCollection(EagerCollection, EmbeddingCollectionInterface):  # type: ignore[misc]
    """TorchRec's ``EmbeddingCollection`` over tables that take any int64 id, in one process.

    As :class:`RecStoreEmbeddingBagCollection`, with a row an id instead of pooled bags.

    Args:
        embedding_configs: of the tables: ``EmbeddingConfig``, or mappings of its arguments; all of one dim.
        lr, enable_fusion, fusion_k, device, optimizer, options, fused: as for :class:`RecStoreEmbeddingBagCollection`.
        tables: TorchRec's name of ``embedding_configs``; give one of the two.
        need_indices: whether the output has the ids as its weights.

    Raises:
        TypeError, ValueError, ColdStoreError, ImportError: as there; tables of several dims.

    Example::

        item = EmbeddingConfig(name="t_item", embedding_dim=8, num_embeddings=2**40, feature_names=["item"])
        ec = RecStoreEmbeddingCollection([item])
        ids = KeyedJaggedTensor(["item"], values=torch.tensor([5, -3, 5]), lengths=torch.tensor([2, 1]))
        ec(ids)["item"].values()  # (3, 8)
    """

    def __init__(
        self,
        embedding_configs: Sequence[EmbeddingConfig | Mapping[str, Any]] | None = None,
        lr: float = 0.01,
        enable_fusion: bool = True,
        fusion_k: int = 30,
        *,
        tables: Sequence[EmbeddingConfig | Mapping[str, Any]] | None = None,
        need_indices: bool = False,
        device: torch.device | str | int | None = None,
        optimizer: Optimizer | None = None,
        options: TableOptions | Mapping[str, TableOptions] = DEFAULT_OPTIONS,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self._embedding_configs = given_configs(embedding_configs, tables, "embedding_configs", EmbeddingConfig)
        self._embedding_dim = self._embedding_configs[0].embedding_dim
        for config in self._embedding_configs:
            if config.embedding_dim != self._embedding_dim:
                raise ValueError(
                    f"the tables of a collection must have one embedding_dim: {config.name!r} has "
                    f"{config.embedding_dim}, not {self._embedding_dim}"
                )
        self._need_indices = need_indices
        self.embeddings = self._set_up(
            self._embedding_configs, lr, enable_fusion, fusion_k, optimizer, options, fused, device
        )

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """The row of each id.

        Args:
            features: ids of at least the tables' features, of any integer type; a ``TensorDict`` too.

        Returns:
            By feature (``feature@table`` where tables share it): values (ids of the feature, dim) float32 on the device
            of ``features``, lengths as given, and with ``need_indices`` the ids as weights.

        Raises:
            KeyError, TypeError, RuntimeError, ValueError, MemoryError, ColdStoreError: as for
                :class:`RecStoreEmbeddingBagCollection`.
        """
        batch = Features(maybe_td_to_kjt(features, None), False)
        modules = self._modules_by_table()
        rows: dict[int, Tensor] = {}
        for numbers, trains in self._groups([None] * len(modules)):
            ids = [batch.ids(self._feature_names[number]) for number in numbers]
            counts = [len(some) for some in ids]
            group = [modules[number] for number in numbers]
            parts = self._lookups.rows(group, torch.cat(ids) if len(ids) > 1 else ids[0], counts, train=trains)
            rows.update(zip(numbers, parts, strict=True))
        found: dict[str, JaggedTensor] = {}
        for number, names in enumerate(self._names_by_table):
            jagged = [batch.jagged[name] for name in self._feature_names[number]]
            first = 0
            for name, one in zip(names, jagged, strict=True):
                count = len(one.values())
                found[name] = JaggedTensor(
                    values=rows[number][first : first + count].to(batch.device),
                    lengths=one.lengths(),
                    weights=one.values() if self._need_indices else None,
                )
                first += count
        return found

    def need_indices(self) -> bool:
        """Whether the output has the ids as its weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Columns of every table."""
        dim: int = self._embedding_dim
        return dim

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables' configs, in their order."""
        return self._embedding_configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """The keys of the output, table by table."""
        return self._names_by_table

    def _modules_by_table(self) -> list[TableModule]:
        return list(self.embeddings.values())  # type: ignore[arg-type]
