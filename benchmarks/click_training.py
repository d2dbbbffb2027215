"""Trains DLRM over the tables of click_tables.py on the logs of click_logs.py."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from click_logs import ClickLog
from click_tables import Tables
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc
from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch

EVALUATION_BATCH = 4_096
DENSE_LR = 0.001
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""The quantile of Student's t for a 95 % interval, by the number of seeds."""


class Layers(NamedTuple):
    """The sizes of DLRM's dense layers.

    The layer of ``dim`` units at the end of the bottom layers is added.
    """

    bottom: list[int]
    top: list[int]


CRITEO_LAYERS = Layers([512, 256], [512, 512, 256])
"""Those of examples/dlrm/train.py."""
SMALL_LAYERS = Layers([32], [64, 32])


class ClickModel(nn.Module):
    """TorchRec's DLRM, whose tables are any of click_tables.py.

    Args:
        tables: The tables, with ``dim`` columns.
        log: The log, which has the number of features.
        layers: The sizes of the dense layers.
        dim: The columns of the tables.
    """

    def __init__(
        self,
        tables: Tables,
        log: ClickLog,
        layers: Layers,
        dim: int,
    ) -> None:
        super().__init__()
        num_features = len(log.features)
        pairs = num_features * (num_features + 1) // 2
        self.tables = tables
        self.bottom = DenseArch(log.dense.shape[1], [*layers.bottom, dim])
        self.interaction = InteractionArch(num_features)
        self.top = OverArch(dim + pairs, [*layers.top, 1])

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Returns the logits (B,) of dense features (B, D) and raw ids (F, B)."""
        rows = self.tables(ids)
        interactions = self.interaction(self.bottom(dense), rows)
        logits: Tensor = self.top(interactions)
        return logits.squeeze(1)

    def dense_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that the tables' optimizer does not update."""
        parameters: list[nn.Parameter] = []
        for part in (self.bottom, self.interaction, self.top):
            parameters += part.parameters()
        return parameters


class Trainer:
    """Trains a model over one log, part by part.

    Args:
        tables: The tables.
        log: The log.
        layers: The sizes of the dense layers.
        dim: The columns of the tables.
        batch: The samples of a step.
    """

    def __init__(
        self,
        tables: Tables,
        log: ClickLog,
        layers: Layers,
        dim: int,
        batch: int,
    ) -> None:
        self.model = ClickModel(tables, log, layers, dim)
        self.batch = batch
        self.optimizer = torch.optim.Adam(self.model.dense_parameters(), lr=DENSE_LR)

    def train(self, part: ClickLog) -> float:
        """Trains on a part once, in order, and returns the seconds."""
        self.model.train()
        begin = time.perf_counter()
        for first in range(0, len(part), self.batch):
            batch = part.part(first, first + self.batch)
            self.optimizer.zero_grad(set_to_none=True)
            logits = self.model(batch.dense, batch.ids)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
            loss.backward()
            self.optimizer.step()
        return time.perf_counter() - begin

    @torch.no_grad()
    def evaluate(self, part: ClickLog) -> tuple[float, float]:
        """Returns the AUC and the logloss of a part."""
        self.model.eval()
        pieces = []
        for first in range(0, len(part), EVALUATION_BATCH):
            batch = part.part(first, first + EVALUATION_BATCH)
            batch_logits = self.model(batch.dense, batch.ids)
            pieces.append(batch_logits.double())
        logits = torch.cat(pieces)
        probabilities = logits.sigmoid()
        labels = part.labels
        auc = binary_auroc(probabilities, labels.long())
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.double())
        return float(auc), float(loss)


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the results to a JSON file at once, so that a run can be interrupted."""
    lines = [f" {json.dumps(row)}" for row in rows]
    content = ",\n".join(lines)
    new_path = path.with_suffix(".new")
    new_path.write_text(f"[\n{content}\n]\n")
    os.replace(new_path, path)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and half of the 95 % interval of the results of seeds."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.nan
    count = len(values)
    deviation = float(np.std(values, ddof=1))
    error = deviation / math.sqrt(count)
    return mean, T_95[count] * error
