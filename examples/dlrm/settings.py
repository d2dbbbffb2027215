"""Settings of a run, free of torch, so that the command line answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Backend = Literal["recstore", "fused"]
Sharding = Literal["table_wise", "row_wise"]
Optimizer = Literal["sgd", "adagrad", "rowwise_adagrad"]


@dataclass(frozen=True)
class Settings:
    """What a run is asked to do; the command's flags, one by one.

    Attributes:
        data: a Criteo TSV, plain or gzip; None generates rows.
        backend: "recstore" (tables without a size, raw ids) or "fused" (stock TorchRec, ids modulo the table's size).
        dim: width of the embeddings.
        num_embeddings: rows of a fused table; RecStore has no use for it.
        batch_size: samples of a step over all ranks.
        epochs: passes over the training part.
        optimizer: of the embeddings, fused into their backward.
        lr: of the embeddings.
        dense_lr: of the dense layers, which Adam trains.
        seed: of the dense weights, the tables and the generator.
        limit_rows: only the first so many rows exist; how many the generator makes.
        sharding: how every table lies on the ranks.
        skip_bad_rows: bad lines are left out and counted instead of being an error.
        json_out: where the result goes too.
    """

    data: Path | None
    backend: Backend
    dim: int
    num_embeddings: int
    batch_size: int
    epochs: int
    optimizer: Optimizer
    lr: float
    dense_lr: float
    seed: int
    limit_rows: int | None
    sharding: Sharding
    skip_bad_rows: bool
    json_out: Path | None

    @property
    def modulo(self) -> int | None:
        """What ids have to be taken modulo of, if anything."""
        return self.num_embeddings if self.backend == "fused" else None
