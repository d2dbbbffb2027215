"""Measures a whole training step of TorchRec's DLRM.

    python benchmarks/dlrm.py [--dim 64] [--batch-size 2048] [--steps 30]

The sides are RecStore tables, FUSED tables, and no tables. Without tables, the dense
part trains on embeddings that were computed before. The three sides are interleaved in
one process. Prints one JSON row with the milliseconds per step and the ratios.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from measure import (
    ROOT,
    Side,
    Timing,
    clock,
    emit,
    interleave,
    ratios,
    spread,
    step_seconds,
)

sys.path.insert(0, str(ROOT / "examples"))
sys.path.insert(0, str(ROOT / "examples" / "dlrm"))

from generator import Generator
from sources import batches_of_rank, cut
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch
from train import Settings, build

BATCHES = 8


class DenseAlone(nn.Module):
    """The dense layers of DLRM, which take embeddings (B, 26, dim)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dense = DenseArch(13, [512, 256, dim])
        self.interaction = InteractionArch(26)
        self.over = OverArch(dim + 26 * 27 // 2, [512, 512, 256, 1])

    def forward(
        self,
        dense: Tensor,
        embeddings: Tensor,
        labels: Tensor,
    ) -> Tensor:
        """Returns the loss, ()."""
        interactions = self.interaction(self.dense(dense), embeddings)
        logits = self.over(interactions).squeeze(1)
        targets = labels.float()
        return nn.functional.binary_cross_entropy_with_logits(logits, targets)


def settings_of(
    backend: Literal["recstore", "fused"],
    dim: int,
    batch_size: int,
    **limits: Any,
) -> Settings:
    """Returns the settings of the example, with generated rows."""
    return Settings(
        backend=backend,
        dim=dim,
        batch_size=batch_size,
        **limits,
    )


def make_batches(settings: Settings, modulo: int | None) -> list[Batch]:
    """Returns the first batches of the generator."""
    num_rows = BATCHES * settings.batch_size
    generator = Generator(num_rows, seed=0)
    rows = generator.rows(0, num_rows)
    row_batches = cut(rows, settings.batch_size)
    return list(batches_of_rank(row_batches, modulo=modulo))


def sharded_side(settings: Settings) -> Side:
    """Returns a function that runs a training step of a sharded DLRM."""
    model, optimizer = build(settings)
    batches = make_batches(settings, settings.modulo)
    model.train()

    def side(i: int) -> Timing:
        batch = batches[i % BATCHES]
        begin = clock()
        optimizer.zero_grad(set_to_none=True)
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        return (clock() - begin,)

    return side


def dense_side(settings: Settings) -> Side:
    """Returns a function that runs a training step of the dense part only.

    Embeddings get gradients but no update.
    """
    model = DenseAlone(settings.dim)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.dense_lr)
    batches = make_batches(settings, None)
    embeddings = torch.randn(settings.batch_size, 26, settings.dim) * 0.01

    def side(i: int) -> Timing:
        batch = batches[i % BATCHES]
        begin = clock()
        optimizer.zero_grad(set_to_none=True)
        inputs = embeddings.detach().requires_grad_()
        loss = model(batch.dense_features, inputs, batch.labels)
        loss.backward()
        optimizer.step()
        return (clock() - begin,)

    return side


def main() -> None:
    """Runs the measurement and prints the JSON row."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path(folder) / 'store'}",
            rank=0,
            world_size=1,
        )
    recstore = settings_of("recstore", arguments.dim, arguments.batch_size)
    fused = settings_of("fused", arguments.dim, arguments.batch_size)
    sides = {
        "recstore": sharded_side(recstore),
        "fused": sharded_side(fused),
        "dense": dense_side(recstore),
    }
    timings = interleave(sides, arguments.steps, warm_up=BATCHES)
    # Ratios of consecutive steps, so that a drift of the machine's speed does not
    # matter.
    over_fused = spread(ratios(timings["fused"], timings["recstore"]), 1)
    dense_over_recstore = spread(ratios(timings["dense"], timings["recstore"]), 1)
    emit(
        {
            "benchmark": "dlrm",
            "dim": arguments.dim,
            "batch_size": arguments.batch_size,
            "step_ms": {name: spread(step_seconds(timings[name])) for name in sides},
            "samples_per_second_over_fused": round(over_fused["median"], 3),
            "step_over_dense_alone": round(1 / dense_over_recstore["median"], 3),
        }
    )
    sys.stdout.flush()
    os._exit(0)  # the shutdown of gloo sometimes aborts (torch 2.13)


if __name__ == "__main__":
    main()
