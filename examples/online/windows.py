"""AUC and calibration of clicks that are scored before they are trained on, by window."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from online.clicks import ANSWERED, HISTORY, LATE_S, OUTCOMES, Clicks

MODELS = ("trained", "served", "frozen")
SERVERS = ("served", "frozen")
MAX_WINDOWS = 1000
"""The number of windows that are kept."""
STEP_S = 0.1
"""The precision of the ages."""


class Windows:
    """The metrics of consecutive windows.

    Window k has the clicks from ``k * size + 1`` to ``(k + 1) * size``.

    Args:
        size: The number of clicks of a window.

    Attributes:
        done: One dict for each window that is complete, the oldest first: ``last``, the
            number of its last click, ``time_ms``, the time of this click, ``clicked``,
            the share of clicks with the label 1, and for each name of ``MODELS`` a dict
            with ``answered``, the share of clicks that the model has scored, ``auc``,
            and ``calibration``, the sum of the predictions over the sum of the labels.
            A metric is None if it is undefined.
        outcomes: The number of live clicks by server and by the outcome of the request;
            see ``OUTCOMES``.
        late: The number of live clicks that are late.
        ages: The number of live clicks by the age of the rows of the served model, in
            steps of ``STEP_S``. A click without an answer counts too: its age is that
            of the rows that have answered last.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.done: list[dict[str, Any]] = []
        # label, time, logits of each model
        self._open = torch.empty(0, 2 + len(MODELS), dtype=torch.float64)
        self._last = 0
        self.outcomes = {
            name: dict.fromkeys(OUTCOMES[ANSWERED:], 0) for name in SERVERS
        }
        self.late = 0
        self.ages: dict[int, int] = {}

    def add(self, clicks: Clicks, logits: Tensor) -> None:
        """Adds clicks in their order.

        The metrics of windows that are then complete are computed.

        Args:
            clicks: (B,) of the dtype ``CLICK``.
            logits: (B,) float. The logits of the trained model, from before it was
                trained on these clicks.
        """
        columns = [
            clicks["clicked"],
            clicks["time_ms"],
            logits.detach().numpy(),
            clicks["served"],
            clicks["frozen"],
        ]
        float_columns = [column.astype(np.float64) for column in columns]
        rows = torch.from_numpy(np.stack(float_columns, axis=1))
        self._open = torch.cat([self._open, rows])
        while len(self._open) >= self.size:
            self._last += self.size
            complete = self._open[: self.size]
            windows = [*self.done, self._metrics(complete)]
            self.done = windows[-MAX_WINDOWS:]
            self._open = self._open[self.size :]
        is_live = clicks["served_outcome"] != HISTORY
        self._count(clicks[is_live])

    @property
    def freshness(self) -> dict[str, Any]:
        """The counts of live clicks, and percentiles of the age of their rows.

        The ages are in seconds, over all live clicks.
        """
        return {
            "outcomes": self.outcomes,
            "late": self.late,
            "age_p50_s": self._percentile(50),
            "age_p99_s": self._percentile(99),
        }

    def _count(self, live: Clicks) -> None:
        for name in SERVERS:
            outcomes = self.outcomes[name]
            counts = _counts(live[f"{name}_outcome"])
            for number, count in counts.items():
                outcomes[OUTCOMES[number]] += count
        is_late = live["waited"] > LATE_S
        self.late += int(is_late.sum())
        steps = np.round(live["age"] / STEP_S).astype(np.int64)
        for step, count in _counts(steps).items():
            self.ages[step] = self.ages.get(step, 0) + count

    def _percentile(self, percent: int) -> float | None:
        remaining = sum(self.ages.values()) * percent // 100
        for step, count in sorted(self.ages.items()):
            remaining -= count
            if remaining < 0:
                return step * STEP_S
        return None

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {
            "last": self._last,
            "done": self.done,
            "open": self._open.clone(),
            "outcomes": self.outcomes,
            "late": self.late,
            "ages": list(self.ages.items()),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues from the state of a checkpoint."""
        self._last = state["last"]
        self.done = state["done"]
        self._open = state["open"]
        self.outcomes = state["outcomes"]
        self.late = state["late"]
        self.ages = dict(state["ages"])

    def _metrics(self, rows: Tensor) -> dict[str, Any]:
        labels = rows[:, 0]
        metrics: dict[str, Any] = {
            "last": self._last,
            "time_ms": int(rows[-1, 1]),
            "clicked": float(labels.mean()),
        }
        logits_of_models = rows[:, 2:].T
        for name, logits in zip(MODELS, logits_of_models, strict=True):
            answered = ~logits.isnan()
            share = answered.double().mean()
            metrics[name] = {
                "answered": float(share),
                **quality(logits[answered], labels[answered]),
            }
        return metrics


def _counts(values: npt.NDArray[np.int64]) -> dict[int, int]:
    """Returns how often each value occurs."""
    distinct, counts = np.unique(values, return_counts=True)
    return dict(zip(distinct.tolist(), counts.tolist(), strict=True))


def quality(logits: Tensor, labels: Tensor) -> dict[str, float | None]:
    """Returns the AUC and the calibration of predictions.

    The calibration is the sum of the predictions over the sum of the labels. Both are
    None if there is only one label.

    Args:
        logits: (N,) float64.
        labels: (N,) float64, 0 or 1.
    """
    positives = float(labels.sum())
    if positives in (0.0, float(len(labels))):
        return {"auc": None, "calibration": None}
    predictions = torch.sigmoid(logits)
    auc = binary_auroc(predictions, labels.long())
    predicted_positives = float(predictions.sum())
    return {
        "auc": float(auc),
        "calibration": predicted_positives / positives,
    }
