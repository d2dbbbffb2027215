"""Makes the index of :class:`Retrieval` from a model.

Tests: tests/serving/retrieval/test_retrieval.py.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from torchrec_recstore.checkpoint.files import check_path
from torchrec_recstore.sharders.gather import refused_together, whole_environment
from torchrec_recstore_serving.export.from_model import read_model
from torchrec_recstore_serving.export.hashed_tables import check_index
from torchrec_recstore_serving.export.scriptable_modules import scriptable
from torchrec_recstore_serving.export.torchscript import scripted
from torchrec_recstore_serving.retrieval.retrieval import Retrieval, Tower


def export_retrieval(
    model: nn.Module,
    table: str,
    path: str | Path | None = None,
    *,
    tower: Tower | None = None,
    metric: str = "inner_product",
    clusters: int = 1,
    min_recall: float = 0.995,
    queries: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
    index: str = "hash",
) -> Retrieval:
    """Makes an index of FAISS for the rows of a table that are nearest to a query.

    Collective if sharded.

    A :class:`Follower` keeps the index up to date. See :class:`Retrieval`.

    Args:
        model: The trained model; see :func:`export_for_inference`. Or a served model,
            as ``torch.jit.load`` returns it.
        table: The table's name, as the served model has it in ``recstore_tables()``.
        path: The file of FAISS's index, for ``faiss.read_index``. Rank 0 writes it
            completely or not at all. The id -1 is not in it. Default: None, no file.
        tower: See :class:`Retrieval`. Default: None.
        metric: See :class:`Retrieval`. Default: ``"inner_product"``.
        clusters: See :class:`Retrieval`. Default: 1.
        min_recall: See :class:`Retrieval`. Default: 0.995.
        queries: See :class:`Retrieval`. Default: None.
        dtype: The data type in which the rows of a trained model are exported. Default:
            ``torch.int8``.
        index: How the served model of a trained model searches ids. The version of the
            index is that of a publication if ``dtype`` and ``index`` are those of the
            :class:`DeltaPublisher`. Default: ``"hash"``.

    Returns:
        The index, on every rank.

    Raises:
        TypeError, ValueError, OSError, ColdStoreError: See
            :func:`export_for_inference`; or the model has no such table or tower. All
            of these errors are raised on every rank.
        RuntimeError: See :meth:`Retrieval.write`.
        ImportError: FAISS is missing, or see :func:`export_for_inference`.
    """
    served = model if isinstance(model, torch.jit.ScriptModule) else None
    env = whole_environment()
    with refused_together(env):
        retrieval = Retrieval(
            table,
            tower=tower,
            metric=metric,
            clusters=clusters,
            min_recall=min_recall,
            queries=queries,
        )
        check_index(index)
        if path is not None and env.rank == 0:
            check_path(Path(path))
    exported = model
    if served is None:
        exported = read_model(model, dtype, 0, None, env, marks={})
    with refused_together(env):
        if served is None:
            served = scripted(scriptable(exported, index=index))
        elif not hasattr(served, "recstore_format"):
            raise ValueError(
                "model is not a model that export_for_inference or export_checkpoint"
                " has written"
            )
        retrieval.update(served)
        if path is not None and env.rank == 0:
            retrieval.write(path)
    return retrieval
