"""Finds the rows of a table whose vectors are nearest to a query.

The index of FAISS follows a served model.

Tests: tests/serving/retrieval/test_retrieval.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_recstore.checkpoint.files import whole_file
from torchrec_recstore.utils import warn_user
from torchrec_recstore_serving.export.opening import is_hashed
from torchrec_recstore_serving.export.sorted_tables import served_table
from torchrec_recstore_serving.retrieval.vector_index import QUERIES, VectorIndex, faiss

Tower = str | Callable[[torch.jit.ScriptModule, Tensor], Tensor]
"""What maps rows to vectors: a path in the served model, or a function of the served
model and (N,) ids.
"""

_PIECE_ROWS = 1 << 16  # The number of rows whose vectors are computed at a time.
_DELTA_KEYS = {"base", "version", "checksum", "format"}


class _Readers:
    """A lock that many threads hold for reading, or one for writing.

    A thread that reads may read again within it.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers = 0
        self._writing = False
        self._of_thread = threading.local()
        """Its ``depth``: how many times the thread holds the lock for reading."""

    @contextmanager
    def reading(self) -> Iterator[None]:
        depth = getattr(self._of_thread, "depth", 0)
        with self._condition:
            self._condition.wait_for(lambda: depth > 0 or not self._writing)
            self._readers += 1
        self._of_thread.depth = depth + 1
        try:
            yield
        finally:
            self._of_thread.depth = depth
            with self._condition:
                self._readers -= 1
                self._condition.notify_all()

    def refuse_reader(self) -> None:
        if getattr(self._of_thread, "depth", 0):
            raise RuntimeError(
                "this thread holds a version of the index, and would wait for itself:"
                " end hold() first"
            )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """There is only one writer at a time."""
        with self._condition:
            self._writing = True
            self._condition.wait_for(lambda: self._readers == 0)
        try:
            yield
        finally:
            with self._condition:
                self._writing = False
                self._condition.notify_all()


@dataclass(frozen=True)
class _Changes:
    """The changes of a table in a delta.

    Args:
        ids: (N,) int64. The ids of the rows that are new or have changed.
        rows: (N, ...). These rows in the row format.
        removed: (M,) int64. The ids that no longer have a row.
    """

    ids: Tensor
    rows: Tensor
    removed: Tensor


class Retrieval:
    """An index of FAISS over the rows of one table of a served model.

    It finds the rows that are nearest to a query.

    A vector of the index is the row of an id, or the output of a tower. Ids are any
    int64. A :class:`Follower` keeps the index up to date: it computes the vectors of
    the rows that a delta has changed or added, and removes those of removed rows. All
    vectors are computed again if the delta changes dense parameters that the vectors
    may depend on, if there is no delta for the version of the index, and if the
    clusters are worn: a search must read more than twice as many as when they were new,
    or there are rows for twice as many. Only worn clusters are computed again.

    Any number of threads may search while a follower changes the index. A search waits
    for the short time in which vectors are exchanged, and not while they are computed.
    The index is one of FAISS's ``IndexIVFFlat``, with float32 vectors. Its searches use
    the threads of ``faiss.omp_set_num_threads``.

    Args:
        table: The table's name, one of ``recstore_tables()`` of the served model.
        tower: What computes the vectors. Default: None, the row is the vector. A string
            is the path of a submodule of the served model that maps (N, dim) float32
            rows to (N, D) vectors: it depends on the parameters below this path. A
            function gets the served model and (N,) int64 ids and returns (N, D): it may
            depend on the dense parameters and on all tables.
        metric: ``"inner_product"`` or ``"l2"``. Default: ``"inner_product"``.
        clusters: The number of clusters into which k-means divides the vectors. A
            search reads as many of the nearest clusters as ``min_recall`` needs. An
            index has no more clusters than one for 39 rows. Default: 1, each search
            reads all vectors and is exact.
        min_recall: The least mean recall of the 100 best rows against an exact search.
            It is measured with 128 queries when all vectors are computed, and again
            whenever a fiftieth of them has changed. Default: 0.995.
        queries: (Q, D) floating point. The queries with which the recall is measured;
            the first 128 are used. Queries of users may lie apart from the rows, and
            may then need more clusters. Default: None, vectors of the index.

    Raises:
        TypeError, ValueError: An argument is invalid.
        ImportError: FAISS is missing.
    """

    def __init__(
        self,
        table: str,
        *,
        tower: Tower | None = None,
        metric: str = "inner_product",
        clusters: int = 1,
        min_recall: float = 0.995,
        queries: Tensor | None = None,
    ) -> None:
        faiss()
        if not isinstance(table, str):
            raise TypeError(
                f"table must be the name of a table, got {type(table).__name__}"
            )
        # A module can be called, but it is not the served one.
        is_function = callable(tower) and not isinstance(tower, nn.Module)
        if not (tower is None or isinstance(tower, str) or is_function):
            raise TypeError(
                "tower must be the path of a module in the served model, or a function"
                f" of the served model and ids, got {type(tower).__name__}"
            )
        if metric not in ("inner_product", "l2"):
            raise ValueError(f'metric must be "inner_product" or "l2", got {metric!r}')
        if isinstance(clusters, bool) or not isinstance(clusters, int):
            raise TypeError(f"clusters must be an int, got {type(clusters).__name__}")
        if clusters < 1:
            raise ValueError(f"clusters must be at least 1, got {clusters}")
        if not 0 < min_recall <= 1:
            raise ValueError(
                f"min_recall must be above 0 and at most 1, got {min_recall}"
            )
        self.table = table
        self.metric = metric
        self.clusters = clusters
        self.min_recall = float(min_recall)
        self.tower = tower
        self._queries: Tensor | None = None
        if queries is not None:
            self._queries = _checked_vectors(queries, "queries")[:QUERIES]
        self._index: VectorIndex | None = None
        """The index. None: there is no vector."""
        self._version: str | None = None
        self._served: torch.jit.ScriptModule | None = None
        self._readers = _Readers()
        self._updating = threading.Lock()

    @property
    def version(self) -> str | None:
        """The version of the served model whose vectors the index has.

        None: there is none yet.
        """
        return self._version

    @property
    def dim(self) -> int | None:
        """The number of columns of the vectors. None: the index has no vector."""
        return None if self._index is None else self._index.dim

    @property
    def probes(self) -> int:
        """The number of clusters that a search reads."""
        return 1 if self._index is None else int(self._index.index.nprobe)

    def __len__(self) -> int:
        return 0 if self._index is None else len(self._index)

    @contextmanager
    def hold(self) -> Iterator[torch.jit.ScriptModule]:
        """Keeps the version of the index for several calls of this thread.

        A context manager.

        Yields the served model of this version, so that the tower of the queries and
        the index are of one version. An update waits meanwhile.

        Raises:
            RuntimeError: The index has no served model yet.
        """
        with self._readers.reading():
            if self._served is None:
                raise RuntimeError(
                    f"the index of table {self.table!r} has no served model yet: call"
                    " update, or follow"
                )
            yield self._served

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Returns the rows with the best scores for each query, in descending order.

        Args:
            queries: (Q, D) floating point.
            k: The number of rows.

        Returns:
            (Q, k) float32: the inner products, or the squares of the L2 distances; and
            (Q, k) int64: the ids. If fewer rows are found, the other scores are
            -infinity, or infinity with ``"l2"``, and the other ids are -1.

        Raises:
            TypeError, ValueError: An argument is invalid.
            RuntimeError: The index has no version yet.
        """
        if isinstance(k, bool) or not isinstance(k, int):
            raise TypeError(f"k must be an int, got {type(k).__name__}")
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        vectors = _checked_vectors(queries, "queries")
        with self._readers.reading():
            if self._version is None:
                raise RuntimeError(
                    f"the index of table {self.table!r} has no rows yet: call update,"
                    " or follow"
                )
            if self._index is None:
                worst = -torch.inf if self.metric == "inner_product" else torch.inf
                scores = torch.full((len(vectors), k), worst)
                ids = torch.full((len(vectors), k), -1)
                return scores, ids
            if vectors.shape[1] != self._index.dim:
                raise ValueError(
                    f"queries have {vectors.shape[1]} columns, and the vectors of"
                    f" {self.table!r} have {self._index.dim}"
                )
            return self._index.search(vectors, k)

    def write(self, path: str | Path) -> None:
        """Writes FAISS's index into a file, for ``faiss.read_index``, completely or not
        at all.

        The file does not have the id -1, because FAISS cannot return it.

        Raises:
            RuntimeError: The index has no vector, or FAISS cannot write the file.
            OSError: The directory cannot be written to.
        """
        with self._readers.reading():
            if self._index is None:
                raise RuntimeError(
                    f"the index of table {self.table!r} has no vector yet, and FAISS"
                    " writes no such file"
                )
            with whole_file(Path(path)) as beside:
                faiss().write_index(self._index.index, str(beside))

    def update(
        self,
        served: torch.jit.ScriptModule,
        delta: dict[str, Tensor] | None = None,
    ) -> None:
        """Brings the index to the version of a served model.

        A :class:`Follower` calls it for each publication.

        Args:
            served: The served model, as ``torch.jit.load`` returns it. The index keeps
                it, and it must not change until the next call.
            delta: The delta that has made this version from the version of the index,
                the result of :func:`read_delta`. Only its rows are read if that is
                enough. Default: None, all vectors are computed, unless the index has
                this version already.

        Raises:
            TypeError, ValueError: The model has no such table or tower, or the tower
                does not return vectors.
            RuntimeError: This thread is within :meth:`hold`. After each of these errors
                the index is as it was.

        Warns:
            RecStoreWarning: Vectors have NaN or infinity. They are not in the index.
        """
        self._readers.refuse_reader()
        with self._updating, torch.no_grad():
            version = served.recstore_version()
            if version == self._version:
                with self._readers.writing():
                    self._served = served
                return
            changes = None if delta is None else self._changes(served, delta)
            if changes is None:
                self._rebuild(served, version)
            else:
                self._change(served, version, changes)

    def _changes(
        self,
        served: torch.jit.ScriptModule,
        delta: dict[str, Tensor],
    ) -> _Changes | None:
        """Returns the changes of the table; None if all vectors must be computed."""
        if self._index is None:
            return None
        base = bytes(delta["base"].tolist()).decode()
        if base != self._version:
            return None
        ids_key = f"{self.table}/ids"
        rows_key = f"{self.table}/rows"
        removed_key = f"{self.table}/removed"
        other_keys = delta.keys() - {ids_key, rows_key, removed_key, *_DELTA_KEYS}
        if callable(self.tower) and other_keys:
            return None
        if isinstance(self.tower, str):
            # A delta of a model with a sorted index has a tensor under one of its names
            # only.
            prefix = f"dense/{self.tower}." if is_hashed(served) else "dense/"
            if any(key.startswith(prefix) for key in other_keys):
                return None
        if ids_key not in delta:
            nothing = torch.empty(0, dtype=torch.int64)
            return _Changes(nothing, nothing, nothing)
        if self._index.is_worn(self.clusters, len(self)):
            return None
        return _Changes(delta[ids_key], delta[rows_key], delta[removed_key])

    def _change(
        self,
        served: torch.jit.ScriptModule,
        version: str,
        changes: _Changes,
    ) -> None:
        """Brings the index to a version by the changes since its own."""
        assert self._index is not None
        vectors = self._vectors(served, changes.ids, changes.rows)
        ids, vectors = self._finite(changes.ids, vectors)
        if len(vectors) and vectors.shape[1] != self._index.dim:
            raise ValueError(
                f"the tower of table {self.table!r} returned {vectors.shape[1]}"
                f" columns, and {self._index.dim} before"
            )
        removed = torch.cat([changes.ids, changes.removed])
        with self._readers.writing():
            # If memory runs out within FAISS, the next update computes all vectors.
            self._version = None
            self._index.change(removed, ids, vectors)
            self._version = version
            self._served = served
        self._index.measure_again()

    def _rebuild(self, served: torch.jit.ScriptModule, version: str) -> None:
        """Makes a new index of all vectors of a served model."""
        module = self._module(served)
        ids = served.recstore_ids(self.table)
        rows = served.recstore_rows(self.table)
        if module.has_ids:
            rows = rows[1:]
        else:
            ids = torch.arange(len(rows))
        ids, vectors = self._finite(ids, self._vectors(served, ids, rows))
        index = None
        if len(ids):
            index = VectorIndex.build(
                ids=ids,
                vectors=vectors,
                metric=self.metric,
                clusters=self.clusters,
                min_recall=self.min_recall,
                queries=self._queries,
                previous=self._index,
            )
        with self._readers.writing():
            self._index = index
            self._version = version
            self._served = served

    def _module(self, served: torch.jit.ScriptModule) -> Any:
        for _, module in served.named_modules():
            if hasattr(module, "has_ids") and module.name == self.table:
                return module
        raise ValueError(
            f"the served model has no table {self.table!r}: its tables are"
            f" {served.recstore_tables()}"
        )

    def _vectors(
        self,
        served: torch.jit.ScriptModule,
        ids: Tensor,
        rows: Tensor,
    ) -> Tensor:
        """Returns the vectors of ids, (N, D) float32.

        ``rows`` are the rows of the ids in the row format.
        """
        module = self._module(served)
        tower = self._tower_of(served)
        pieces: list[Tensor] = []
        for begin in range(0, len(ids), _PIECE_ROWS):
            piece_ids = ids[begin : begin + _PIECE_ROWS]
            if callable(self.tower):
                vectors = self.tower(served, piece_ids)
            else:
                piece_rows = rows[begin : begin + _PIECE_ROWS]
                table = served_table(
                    name=self.table,
                    dim=module.dim,
                    row_format=module.row_format,
                    ids=None,
                    rows=piece_rows,
                )
                vectors = tower(table.lookup(torch.arange(len(piece_rows))))
            self._check_vectors(vectors, len(piece_ids))
            pieces.append(vectors.detach().to("cpu", torch.float32))
        if not pieces:
            return torch.empty(0, self.dim or 1)
        return torch.cat(pieces).contiguous()

    def _check_vectors(self, vectors: object, count: int) -> None:
        """Refuses a result of the tower that is not a vector for each row."""
        tower = f"the tower of table {self.table!r}"
        if not isinstance(vectors, Tensor):
            raise TypeError(
                f"{tower} must return a tensor of vectors, got {type(vectors).__name__}"
            )
        if vectors.dim() != 2 or len(vectors) != count or not vectors.shape[1]:
            raise ValueError(
                f"{tower} must return ({count}, D) for {count} rows, got the shape"
                f" {tuple(vectors.shape)}"
            )

    def _tower_of(self, served: torch.jit.ScriptModule) -> Callable[[Tensor], Tensor]:
        """Returns the function of rows that returns their vectors."""
        if not isinstance(self.tower, str):
            return lambda rows: rows
        modules = dict(served.named_modules(remove_duplicate=False))
        tower: Any = modules.get(self.tower)
        if tower is None:
            raise ValueError(
                f"the served model has no module {self.tower!r}, the tower of table"
                f" {self.table!r}"
            )
        if not tower._c._has_method("forward"):
            raise ValueError(
                f"{self.tower!r}, the tower of table {self.table!r}, cannot be called"
                " in the served model, because TorchRec's tracer has compiled the"
                " model: pass a function of the served model and ids as tower"
            )
        call: Callable[[Tensor], Tensor] = tower
        return call

    def _finite(self, ids: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the vectors without NaN and infinity, and their ids.

        Warns of the other vectors.
        """
        is_finite = vectors.isfinite().all(1)
        if bool(is_finite.all()):
            return ids, vectors
        other_ids = ids[~is_finite]
        warn_user(
            f"table {self.table!r}: {len(other_ids)} vectors have NaN or infinity"
            f" and cannot be found, the first of id {int(other_ids[0])}"
        )
        return ids[is_finite], vectors[is_finite]


def _checked_vectors(vectors: object, name: str) -> Tensor:
    if not isinstance(vectors, Tensor) or not vectors.is_floating_point():
        kind = vectors.dtype if isinstance(vectors, Tensor) else type(vectors).__name__
        raise TypeError(
            f"{name} must be a tensor of floating point numbers, got {kind}"
        )
    if vectors.dim() != 2:
        raise ValueError(
            f"{name} must have the shape (Q, D), got {tuple(vectors.shape)}"
        )
    return vectors.detach().to("cpu", torch.float32).contiguous()


def as_sequence(retrieval: Retrieval | Sequence[Retrieval]) -> tuple[Retrieval, ...]:
    """Returns the indexes that a follower keeps up to date.

    Raises:
        TypeError: One of them is no :class:`Retrieval`.
    """
    if isinstance(retrieval, Retrieval):
        return (retrieval,)
    indexes = tuple(retrieval)
    for index in indexes:
        if not isinstance(index, Retrieval):
            raise TypeError(
                "retrieval must be a Retrieval or a sequence of these, got"
                f" {type(index).__name__}"
            )
    return indexes
