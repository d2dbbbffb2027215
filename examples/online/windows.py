"""AUC and calibration of clicks that are scored before they are trained on, by window."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from online.clicks import Clicks
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

MODELS = ("trained", "served", "frozen")
KEPT = 1000
"""The number of windows that are kept."""


class Windows:
    """The metrics of consecutive windows. Window k has the clicks from ``k * size + 1`` to ``(k + 1) * size``.

    Args:
        size: The number of clicks of a window.

    Attributes:
        done: One dict for each window that is complete, the oldest first: ``last``, the number of its last click,
            ``time_ms``, the time of this click, ``clicked``, the share of clicks with the label 1, and for each name of
            ``MODELS`` a dict with ``answered``, the share of clicks that the model has scored, ``auc``, and
            ``calibration``, the sum of the predictions over the sum of the labels. A metric is None if it is undefined.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.done: list[dict[str, Any]] = []
        self._open = torch.empty(0, 2 + len(MODELS), dtype=torch.float64)  # label, time, logits of each model
        self._last = 0

    def add(self, clicks: Clicks, logits: Tensor) -> None:
        """Adds clicks in their order, and computes the metrics of windows that are complete.

        Args:
            clicks: (B,) of the dtype ``CLICK``.
            logits: (B,) float. The logits of the trained model, from before it was trained on these clicks.
        """
        columns = [clicks["clicked"], clicks["time_ms"], logits.detach().numpy(), clicks["served"], clicks["frozen"]]
        rows = torch.from_numpy(np.stack([column.astype(np.float64) for column in columns], axis=1))
        self._open = torch.cat([self._open, rows])
        while len(self._open) >= self.size:
            self._last += self.size
            self.done = [*self.done, self._metrics(self._open[: self.size])][-KEPT:]
            self._open = self._open[self.size :]

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"last": self._last, "done": self.done, "open": self._open.clone()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues from the state of a checkpoint."""
        self._last, self.done, self._open = state["last"], state["done"], state["open"]

    def _metrics(self, rows: Tensor) -> dict[str, Any]:
        labels = rows[:, 0]
        metrics: dict[str, Any] = {"last": self._last, "time_ms": int(rows[-1, 1]), "clicked": float(labels.mean())}
        for name, logits in zip(MODELS, rows[:, 2:].T, strict=True):
            answered = ~logits.isnan()
            metrics[name] = {"answered": float(answered.double().mean())} | quality(logits[answered], labels[answered])
        return metrics


def quality(logits: Tensor, labels: Tensor) -> dict[str, float | None]:
    """Returns the AUC, and the calibration: the sum of the predictions over the sum of the labels.

    Args:
        logits: (N,) float64.
        labels: (N,) float64, 0 or 1.
    """
    positives = float(labels.sum())
    if positives in (0.0, float(len(labels))):
        return {"auc": None, "calibration": None}
    predictions = torch.sigmoid(logits)
    auc = float(binary_auroc(predictions, labels.long()))
    return {"auc": auc, "calibration": float(predictions.sum()) / positives}
