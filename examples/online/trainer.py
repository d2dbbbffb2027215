"""The process that trains on the clicks in their order.

It scores each click before it trains on it, saves checkpoints, and publishes. A trainer
that was killed continues from its newest checkpoint, which contains the offset: the
number of clicks that the model, the optimizers and the metrics of this checkpoint have
seen.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import torch.nn.functional as F
from common.checkpoints import CheckpointFolder
from common.processes import process_group
from common.report import write_whole
from common.run import sole_use
from torch import nn

from online.clicks import Clicks
from online.model import build, features_of
from online.settings import Settings
from online.streams import read_batch, stream_of
from online.windows import Windows
from torchrec_recstore import set_time, table_stats
from torchrec_recstore.inference import (
    DeltaPublisher,
    export_for_inference,
    load_library,
)

KEEP = 2  # checkpoints
REPORT_S = 0.5
EXPORT = "model.pt"
"""The full export at the end of a run."""


def train(settings: Settings) -> None:
    """Trains until the last click.

    Raises:
        DataError: The stream has lost clicks, or a checkpoint cannot be read or
            written.
    """
    torch.set_num_threads(1)
    with process_group(), sole_use(settings.checkpoints):
        _train(settings)


def _train(settings: Settings) -> None:
    stream = stream_of(settings)
    model, optimizer = build(settings)
    windows = Windows(settings.window)
    report = Report(settings, model)
    checkpoints = CheckpointFolder(settings.checkpoints, KEEP)
    checkpoints.sweep()
    offset = 0
    step = 0
    newest = checkpoints.newest()
    if newest is not None:
        state = checkpoints.load(model, newest.path)
        offset = state["offset"]
        step = state["step"]
        optimizer.load_state_dict(state["optimizer"])
        windows.load_state(state["windows"])
        report.load_state(state["report"])
    saved_offset = offset
    publisher = None
    while offset < settings.clicks:
        if publisher is None and offset >= settings.history:
            publisher = _publisher(settings, model)
            # The first full export: the frozen model, if the run has just begun.
            publisher.step()
            report.write(offset, windows, at_once=True)
        # A batch is cut by the numbers of the clicks, so that a run that was disturbed
        # has the same batches.
        end = settings.history if offset < settings.history else settings.clicks
        count = min(settings.batch_size, end - offset)
        clicks = read_batch(stream, offset, count)
        _train_step(model, optimizer, clicks, windows)
        offset += count
        step += 1
        if publisher is not None:
            publisher.step()
        if offset == settings.clicks or step % settings.checkpoint_every == 0:
            # One checkpoint has everything that belongs together, and it exists
            # completely or not at all.
            state = {
                "offset": offset,
                "step": step,
                "optimizer": optimizer.state_dict(),
                "windows": windows.state(),
                "report": report.state(),
            }
            checkpoints.save(model, step, state)
            # The previous checkpoint is kept, and a run may resume from it.
            stream.trim(saved_offset)
            saved_offset = offset
        report.write(offset, windows)
    with publisher or _publisher(settings, model):
        pass  # The end of the block publishes the model as it is now.
    # The follower must arrive at this model.
    path = settings.folder / EXPORT
    export_for_inference(
        model,
        path,
        dtype=torch.float32,
        index="hash",
    )
    load_library()
    version = torch.jit.load(path).recstore_version()
    report.write(
        offset,
        windows,
        at_once=True,
        final_version=version,
    )


def _train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clicks: Clicks,
    windows: Windows,
) -> None:
    """Scores the clicks, and trains on them."""
    # Rows expire by the time of the clicks.
    last_ms = int(clicks["time_ms"][-1])
    set_time(model, last_ms / 1000)
    logits = model(features_of(clicks))
    windows.add(clicks, logits)  # before the update
    labels = torch.from_numpy(clicks["clicked"]).float()
    loss = F.binary_cross_entropy_with_logits(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _publisher(settings: Settings, model: nn.Module) -> DeltaPublisher:
    return DeltaPublisher(
        model,
        settings.published,
        every_s=settings.publish_every_s,
        dtype=torch.float32,
    )


class Report:
    """Writes ``trainer.json``, the numbers of the page.

    They are the offset, the rows, and the metrics by window.

    Args:
        settings: The settings of the run.
        model: The model.
    """

    def __init__(self, settings: Settings, model: nn.Module) -> None:
        self._path = settings.folder / "trainer.json"
        self._model = model
        self._expired = 0  # before the run was resumed
        self._next = 0.0

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        tables = table_stats(self._model)
        expired = sum(stats.expired for stats in tables.values())
        return {"expired": self._expired + expired}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues from the state of a checkpoint."""
        self._expired = state["expired"]

    def write(
        self,
        offset: int,
        windows: Windows,
        *,
        at_once: bool = False,
        final_version: str | None = None,
    ) -> None:
        """Writes the file, twice a second.

        Args:
            offset: The number of clicks that were trained on.
            windows: The metrics.
            at_once: Whether to write now.
            final_version: The version of the full export at the end of the run.
        """
        if time.monotonic() < self._next and not at_once:
            return
        self._next = time.monotonic() + REPORT_S
        tables = table_stats(self._model)
        document = {
            "offset": offset,
            "rows": {name: stats.rows for name, stats in tables.items()},
            "expired": self.state()["expired"],
            "windows": windows.done,
            **windows.freshness,
            "final_version": final_version,
        }
        write_whole(self._path, json.dumps(document).encode())
