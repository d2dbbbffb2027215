"""An index of FAISS over vectors with ids, which can be replaced and removed.

Tests: tests/serving/retrieval/test_retrieval.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrec_recstore.installing import install

_RECALL_AT = 100  # The number of results for which the recall is measured.
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
        raise ImportError(f"{error.name} is missing: {install('retrieval')}") from error
    return faiss


def recall(ids: Tensor, exact_ids: Tensor) -> float:
    """Returns the mean share of the ids of an exact search that a search has found.

    Args:
        ids: (Q, k) int64. The ids that the search has found, without duplicates in a
            row.
        exact_ids: (Q, k) int64. The ids of the exact search.
    """
    if exact_ids.numel() == 0:
        return 1.0
    equal = ids.unsqueeze(2) == exact_ids.unsqueeze(1)
    is_found = equal.any(1)
    return float(is_found.float().mean())


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

    def __init__(
        self,
        index: Any,
        min_recall: float,
        queries: Tensor | None,
    ) -> None:
        self.index = index
        self._minus_one: Tensor | None = None
        """(D,) float32. The vector of the id -1. None: there is none."""
        self.min_recall = min_recall
        self._queries = queries
        self._sample = torch.empty(0, self.dim)
        """(Q, D) float32: vectors of the index, which are the queries if there are no
        others.
        """
        self.changed = 0
        """The number of vectors that have changed since the recall was measured."""
        self.probes_of_new = 1
        """The number of clusters that a search read when they were new."""
        self._random = torch.Generator().manual_seed(0)

    @classmethod
    def build(
        cls,
        ids: Tensor,
        vectors: Tensor,
        metric: str,
        clusters: int,
        min_recall: float,
        queries: Tensor | None,
        previous: VectorIndex | None,
    ) -> VectorIndex:
        """Makes an index. See :class:`Retrieval`.

        Args:
            ids: (N,) int64, with N above 0 and without duplicates. The ids.
            vectors: (N, D) float32. Their vectors.
            metric: The metric.
            clusters: The number of clusters.
            min_recall: The least recall.
            queries: (Q, D) float32. The queries.
            previous: The index whose clusters are used, unless it is worn. None: there is
                none.
        """
        library = faiss()
        dim = vectors.shape[1]
        if metric == "inner_product":
            centers = library.IndexFlatIP(dim)
            faiss_metric = library.METRIC_INNER_PRODUCT
        else:
            centers = library.IndexFlatL2(dim)
            faiss_metric = library.METRIC_L2

        cluster_count = _cluster_count(clusters, len(ids))
        is_new = False
        if previous is not None and previous._can_lend(dim, clusters, len(ids)):
            cluster_count = int(previous.index.nlist)
            centers.add(previous.index.quantizer.reconstruct_n(0, cluster_count))
        elif cluster_count == 1:
            centers.add(np.zeros((1, dim), np.float32))
        else:
            is_new = True
        index = library.IndexIVFFlat(centers, dim, cluster_count, faiss_metric)
        if is_new:
            index.train(vectors.numpy())
        index.is_trained = True
        # So that an id is removed without a search.
        index.set_direct_map_type(library.DirectMap.Hashtable)
        vector_index = cls(index, min_recall, queries)
        vector_index._add(ids, vectors)
        order = torch.randperm(len(vectors), generator=vector_index._random)
        vector_index._sample = vectors[order[:QUERIES]]
        vector_index.measure()
        if is_new or previous is None:
            vector_index.probes_of_new = int(index.nprobe)
        else:
            vector_index.probes_of_new = previous.probes_of_new
        return vector_index

    def __len__(self) -> int:
        return int(self.index.ntotal) + (self._minus_one is not None)

    @property
    def dim(self) -> int:
        """The number of columns of the vectors."""
        return int(self.index.d)

    def _can_lend(self, dim: int, clusters: int, count: int) -> bool:
        """Returns whether another index of ``count`` vectors can use the clusters."""
        return self.dim == dim and not self.is_worn(clusters, count)

    def is_worn(self, clusters: int, count: int) -> bool:
        """Returns whether ``count`` vectors need new clusters.

        The clusters are too few, or a search reads too many.
        """
        too_few = _cluster_count(clusters, count) >= 2 * self.index.nlist
        too_many_probes = self.index.nprobe > 2 * self.probes_of_new
        return bool(too_few or too_many_probes)

    def change(self, removed: Tensor, ids: Tensor, vectors: Tensor) -> None:
        """Removes and adds vectors.

        Args:
            removed: (M,) int64. The ids whose vectors are removed. Some may have none.
            ids: (N,) int64. The ids whose vectors are then added.
            vectors: (N, D) float32. Their vectors.
        """
        self.index.remove_ids(faiss().IDSelectorArray(removed.contiguous().numpy()))
        if bool((removed == -1).any()):
            self._minus_one = None
        self._add(ids, vectors)
        self.changed += len(removed)
        self._exchange_sample(vectors)

    def _exchange_sample(self, vectors: Tensor) -> None:
        """Replaces vectors of the sample by new vectors.

        Their number is in proportion to their share in the index.
        """
        sample_size = len(self._sample)
        share = math.ceil(sample_size * len(vectors) / max(1, len(self)))
        count = min(sample_size, len(vectors), share)
        places = torch.randperm(sample_size, generator=self._random)[:count]
        chosen = torch.randperm(len(vectors), generator=self._random)[:count]
        self._sample[places] = vectors[chosen]

    def _add(self, ids: Tensor, vectors: Tensor) -> None:
        is_minus_one = ids == -1
        if bool(is_minus_one.any()):
            matching_vectors = vectors[is_minus_one]
            self._minus_one = matching_vectors[0].clone()
            ids = ids[~is_minus_one]
            vectors = vectors[~is_minus_one]
        if len(ids):
            vector_array = vectors.contiguous().numpy()
            id_array = ids.contiguous().numpy()
            self.index.add_with_ids(vector_array, id_array)

    def search(
        self,
        queries: Tensor,
        k: int,
        probes: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the scores and ids of the nearest vectors.

        See :meth:`Retrieval.search`.

        Args:
            queries: (Q, D) float32.
            k: The number of results.
            probes: The number of clusters that are read. Default: None, as many as the
                recall needs.
        """
        parameters = faiss().SearchParametersIVF(nprobe=probes or self.index.nprobe)
        score_array, id_array = self.index.search(queries.numpy(), k, params=parameters)
        scores = torch.from_numpy(score_array)
        ids = torch.from_numpy(id_array)

        by_product = self.index.metric_type == faiss().METRIC_INNER_PRODUCT
        worst = -torch.inf if by_product else torch.inf
        is_missing = ids == -1
        scores = scores.masked_fill(is_missing, worst)
        if self._minus_one is None:
            return scores, ids

        if by_product:
            scores_of_minus_one = queries @ self._minus_one
        else:
            differences = queries - self._minus_one
            scores_of_minus_one = differences.square().sum(1)
        all_scores = torch.cat([scores, scores_of_minus_one.unsqueeze(1)], 1)
        minus_ones = torch.full((len(ids), 1), -1)
        all_ids = torch.cat([ids, minus_ones], 1)
        scores, places = all_scores.topk(k, dim=1, largest=by_product)
        return scores, all_ids.gather(1, places)

    def measure(self) -> None:
        """Sets the number of clusters that a search reads. Searches may run meanwhile.

        It is the least power of two whose mean recall is ``min_recall``, or all
        clusters.
        """
        self.changed = 0
        queries = self._sample if self._queries is None else self._queries
        if self.index.nlist == 1 or not len(self) or not len(queries):
            return
        k = min(_RECALL_AT, len(self))
        _, exact_ids = self.search(queries, k, self.index.nlist)
        probes = 1
        while probes < self.index.nlist:
            _, ids = self.search(queries, k, probes)
            if recall(ids, exact_ids) >= self.min_recall:
                break
            probes *= 2
        self.index.nprobe = min(probes, int(self.index.nlist))

    def measure_again(self) -> None:
        """Calls :meth:`measure` if enough vectors have changed."""
        if self.changed * _CHANGES >= len(self):
            self.measure()


def _cluster_count(clusters: int, count: int) -> int:
    """Returns the number of clusters for a number of vectors."""
    return min(clusters, max(1, count // _ROWS_PER_CLUSTER))
