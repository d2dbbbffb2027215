"""Collections as they are served: scriptable, exportable, and with rows that a delta replaces."""

# Not with annotations from __future__: fx copies those of forward as they are, and TorchScript reads them.

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_recstore.inference.served_tables import ServedTable


def side_by_side(pooled: Tensor, features: int) -> Tensor:
    """(B, features * dim) of (features * B, dim), whose bags are feature by feature."""
    if features == 1:
        return pooled
    bags = pooled.shape[0] // features
    return pooled.view(features, bags, pooled.shape[1]).transpose(0, 1).reshape(bags, features * pooled.shape[1])


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class ServedEmbeddingBagCollection(nn.Module):
    """Pooled rows of raw ids.

    Args:
        tables: in the collection's order.
        features: names of each table's.
        means: whether each table pools the mean; the others sum.
        keys: of the output: those of all features, table by table.
        weighted: whether weights of the batch count.
    """

    def __init__(
        self,
        tables: Sequence[ServedTable],
        features: list[list[str]],
        means: list[bool],
        keys: list[str],
        weighted: bool,
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)
        self._features = features
        self._means = means
        self._keys = keys
        self._dims = [table.dim for table, names in zip(tables, features, strict=True) for _ in names]
        self._weighted = weighted

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """(B, sum of dims) float32: table by table, feature by feature."""
        by_name = features.to_dict()
        outputs: list[Tensor] = []
        for number, table in enumerate(self.tables):
            names = self._features[number]
            values = _joined([by_name[name].values() for name in names])
            lengths = _joined([by_name[name].lengths() for name in names])
            weights: Tensor | None = None
            if self._weighted:
                weights = _joined([by_name[name].weights() for name in names])
            pooled = table.pooled(values, lengths, weights, self._means[number])  # type: ignore[operator]
            outputs.append(side_by_side(pooled, len(names)))
        return KeyedTensor(keys=self._keys, length_per_key=self._dims, values=torch.cat(outputs, dim=1))


class ServedEmbeddingCollection(nn.Module):
    """The row of each raw id.

    Args:
        tables: in the collection's order.
        features: names of each table's.
        keys: of the output: those of each table's features.
        need_indices: whether the output has the raw ids as its weights.
    """

    def __init__(
        self, tables: Sequence[ServedTable], features: list[list[str]], keys: list[list[str]], need_indices: bool
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)
        self._features = features
        self._keys = keys
        self._need_indices = need_indices

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """By key: values (N, dim) float32, lengths as given."""
        by_name = features.to_dict()
        found: dict[str, JaggedTensor] = {}
        for number, table in enumerate(self.tables):
            for place, name in enumerate(self._features[number]):
                feature = by_name[name]
                found[self._keys[number][place]] = JaggedTensor(
                    values=table.lookup(feature.values()),  # type: ignore[operator]
                    lengths=feature.lengths(),
                    weights=feature.values() if self._need_indices else None,
                )
        return found
