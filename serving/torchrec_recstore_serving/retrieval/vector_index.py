"""An index of FAISS over vectors with ids, of which vectors can be replaced and
removed.

Tests: tests/serving/retrieval/test_retrieval.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_AT = 100  # The number of results for which the recall is measured.
QUERIES = 128  # The number of queries with which it is measured.
# The recall is measured again when one of this number of vectors has changed.
_CHANGES = 50
_ROWS_PER_CLUSTER = 39  # FAISS advises against fewer (faiss 1.15.1).


def faiss() -> Any:
    """Imports FAISS.

    Raises:
        ImportError: The package is missing.
    """
    try:
        import faiss
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{error.name} is missing: pip install 'torchrec-recstore[retrieval]'"
        ) from error
    return faiss


def recall(found: Tensor, exact: Tensor) -> float:
    """Returns the mean share of the ids of an exact search that another search has
    found.

    Args:
        found: (Q, k) int64. The ids that the search has found, without duplicates in a
            row.
        exact: (Q, k) int64. The ids of the exact search.
    """
    if exact.numel() == 0:
        return 1.0
    return float((found.unsqueeze(2) == exact.unsqueeze(1)).any(1).float().mean())


class VectorIndex:
    """Vectors with ids, any int64, in an ``IndexIVFFlat``.

    With one cluster, a search reads all of them.

    FAISS leaves the id -1 out of its results, because it marks missing results with -1
    (faiss 1.15.1). So the vector of this id is not in FAISS's index.

    The recall is measured again whenever a fiftieth of the vectors has changed, and a
    search then reads as many clusters as it needs.

    Args:
        index: FAISS's index.
        min_recall: See :class:`Retrieval`.
        queries: (Q, D) float32. The queries with which the recall is measured. None:
            vectors of the index.
    """

    def __init__(self, index: Any, min_recall: float, queries: Tensor | None) -> None:
        self.index = index
        self.alone: Tensor | None = None
        """(D,) float32. The vector of the id -1. None: there is none."""
        self.min_recall = min_recall
        self.given = queries
        self.sample = torch.empty(0, self.dim)
        """(Q, D) float32: vectors of the index, the queries if none are given."""
        self.changed = 0
        """The number of vectors that have changed since the recall was measured."""
        self.probes_of_new = 1
        """The number of clusters that a search read when they were new."""
        self._random = torch.Generator().manual_seed(0)

    @classmethod
    def made(
        cls,
        ids: Tensor,
        vectors: Tensor,
        metric: str,
        clusters: int,
        min_recall: float,
        queries: Tensor | None,
        before: VectorIndex | None,
    ) -> VectorIndex:
        """Makes an index. See :class:`Retrieval`.

        Args:
            ids: (N,) int64, with N above 0 and without duplicates. The ids.
            vectors: (N, D) float32. Their vectors.
            metric: The metric.
            clusters: The number of clusters.
            min_recall: The least recall.
            queries: (Q, D) float32. The queries.
            before: The index whose clusters are used, unless it is worn. None: there is
                none.
        """
        library = faiss()
        dim, count = vectors.shape[1], _count(clusters, len(ids))
        by_product = metric == "inner_product"
        coarse = (library.IndexFlatIP if by_product else library.IndexFlatL2)(dim)
        if (
            before is not None
            and before.dim == dim
            and not before.is_worn(clusters, len(ids))
        ):
            coarse.add(before.index.quantizer.reconstruct_n(0, before.index.nlist))
        elif count == 1:
            coarse.add(np.zeros((1, dim), np.float32))
        kind = library.METRIC_INNER_PRODUCT if by_product else library.METRIC_L2
        index = library.IndexIVFFlat(coarse, dim, coarse.ntotal or count, kind)
        is_new = not coarse.ntotal
        if is_new:
            index.train(vectors.numpy())
        index.is_trained = True
        # So that an id is removed without a search.
        index.set_direct_map_type(library.DirectMap.Hashtable)
        made = cls(index, min_recall, queries)
        made._add(ids, vectors)
        made.sample = vectors[
            torch.randperm(len(vectors), generator=made._random)[:QUERIES]
        ]
        made.measure()
        made.probes_of_new = (
            int(index.nprobe) if is_new or before is None else before.probes_of_new
        )
        return made

    def __len__(self) -> int:
        return int(self.index.ntotal) + (self.alone is not None)

    @property
    def dim(self) -> int:
        """The number of columns of the vectors."""
        return int(self.index.d)

    def is_worn(self, clusters: int, count: int) -> bool:
        """Returns whether ``count`` vectors need new clusters: they are too few, or a
        search reads too many.
        """
        return bool(
            _count(clusters, count) >= 2 * self.index.nlist
            or self.index.nprobe > 2 * self.probes_of_new
        )

    def change(self, gone: Tensor, ids: Tensor, vectors: Tensor) -> None:
        """Removes the vectors of ``gone`` (M,), of which some may have none, and then
        adds those of ``ids``.
        """
        self.index.remove_ids(faiss().IDSelectorArray(gone.contiguous().numpy()))
        if bool((gone == -1).any()):
            self.alone = None
        self._add(ids, vectors)
        self.changed += len(gone)
        # Of the sample, the share of the new vectors in the index is exchanged.
        count = min(
            len(self.sample),
            len(ids),
            -(-len(self.sample) * len(ids) // max(1, len(self))),
        )
        places = torch.randperm(len(self.sample), generator=self._random)[:count]
        self.sample[places] = vectors[
            torch.randperm(len(ids), generator=self._random)[:count]
        ]

    def _add(self, ids: Tensor, vectors: Tensor) -> None:
        lone = ids == -1
        if bool(lone.any()):
            self.alone = vectors[lone][0].clone()
            ids, vectors = ids[~lone], vectors[~lone]
        if len(ids):
            self.index.add_with_ids(
                vectors.contiguous().numpy(), ids.contiguous().numpy()
            )

    def search(
        self, queries: Tensor, k: int, probes: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the scores and ids of the nearest vectors; see
        :meth:`Retrieval.search`.

        Args:
            queries: (Q, D) float32.
            k: The number of results.
            probes: The number of clusters that are read. Default: None, as many as the
                recall needs.
        """
        parameters = faiss().SearchParametersIVF(nprobe=probes or self.index.nprobe)
        scores, ids = (
            torch.from_numpy(each)
            for each in self.index.search(queries.numpy(), k, params=parameters)
        )
        by_product = self.index.metric_type == faiss().METRIC_INNER_PRODUCT
        scores = scores.masked_fill(ids == -1, -torch.inf if by_product else torch.inf)
        if self.alone is not None:
            own = (
                queries @ self.alone
                if by_product
                else (queries - self.alone).square().sum(1)
            )
            scores, places = torch.cat([scores, own.unsqueeze(1)], 1).topk(
                k, dim=1, largest=by_product
            )
            ids = torch.cat([ids, torch.full((len(ids), 1), -1)], 1).gather(1, places)
        return scores, ids

    def measure(self) -> None:
        """Sets the number of clusters that a search reads. Searches may run meanwhile.

        It is the least power of two whose mean recall is ``min_recall``, or all
        clusters.
        """
        self.changed = 0
        queries = self.sample if self.given is None else self.given
        if self.index.nlist == 1 or not len(self) or not len(queries):
            return
        k, probes = min(_AT, len(self)), 1
        exact = self.search(queries, k, self.index.nlist)[1]
        while (
            probes < self.index.nlist
            and recall(self.search(queries, k, probes)[1], exact) < self.min_recall
        ):
            probes *= 2
        self.index.nprobe = min(probes, int(self.index.nlist))

    def measure_again(self) -> None:
        """Calls :meth:`measure` if enough vectors have changed."""
        if self.changed * _CHANGES >= len(self):
            self.measure()


def _count(clusters: int, count: int) -> int:
    """Returns the number of clusters for a number of vectors."""
    return min(clusters, max(1, count // _ROWS_PER_CLUSTER))
