"""The roads: how the tables of a model get into another model, into other ranks, or
into another sharding.

To add a road, write a subclass of :class:`Road` and add it to :data:`ROADS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore import (
    load_checkpoint,
    load_distributed_checkpoint,
    reshard,
    save_checkpoint,
)
from torchrec_recstore.checkpoint import compact_checkpoint
from torchrec_recstore.checkpoint.info import read_info
from torchrec_recstore_service.server.set_resharding import joined, owned_by
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.tables.hosted_checkpoints import saved_specs

SERVERS = 3


class Road:
    """A way from one model to another. Both halves are collective."""

    same_process = False
    """Whether the road only leads to a model in the same processes."""
    same_layout = False
    """Whether the road only leads to a model with the same layout."""

    def prepare(self, model: DistributedModelParallel, path: Path) -> None:
        """Does what must be done before the last training steps before the road, such
        as a save of a delta's base.
        """

    def leave(self, model: DistributedModelParallel, path: Path) -> None:
        """Writes the tables of the old model to ``path``."""

    def arrive(
        self,
        model: DistributedModelParallel,
        path: Path,
        old: DistributedModelParallel | None,
    ) -> Any:
        """Brings the tables into the new model, and returns the model that has them.

        Args:
            model: The new model, which has been trained on other batches.
            path: The path of :meth:`leave`.
            old: The old model, if the road leads to a model in the same process.
        """
        raise NotImplementedError


class Checkpoint(Road):
    """``save_checkpoint`` and ``load_checkpoint``."""

    def leave(self, model: DistributedModelParallel, path: Path) -> None:
        save_checkpoint(model, path)

    def arrive(
        self,
        model: DistributedModelParallel,
        path: Path,
        old: DistributedModelParallel | None,
    ) -> Any:
        load_checkpoint(model, path)
        return model


class Delta(Checkpoint):
    """A full checkpoint before the last steps, and a delta of it after them."""

    def prepare(self, model: DistributedModelParallel, path: Path) -> None:
        save_checkpoint(model, path.with_name(f"{path.name}-base"))

    def leave(self, model: DistributedModelParallel, path: Path) -> None:
        save_checkpoint(model, path, delta_of=path.with_name(f"{path.name}-base"))


class Compacted(Delta):
    """A delta that ``compact_checkpoint`` has folded into a full checkpoint."""

    def leave(self, model: DistributedModelParallel, path: Path) -> None:
        delta = path.with_name(f"{path.name}-delta")
        save_checkpoint(model, delta, delta_of=path.with_name(f"{path.name}-base"))
        if dist.get_rank() == 0:
            compact_checkpoint(delta, path)
        dist.barrier()


class Distributed(Road):
    """``torch.distributed.checkpoint``: a save of the model and its fused optimizer,
    loaded by our function.
    """

    def leave(self, model: DistributedModelParallel, path: Path) -> None:
        state = {
            "model": model.state_dict(),
            "optimizer": model.fused_optimizer.state_dict(),
        }
        dcp.save(state, checkpoint_id=path)

    def arrive(
        self,
        model: DistributedModelParallel,
        path: Path,
        old: DistributedModelParallel | None,
    ) -> Any:
        load_distributed_checkpoint(model, path)
        return model


class StateDict(Road):
    """``state_dict`` of the model and of its fused optimizer, loaded into another
    model.
    """

    same_process = same_layout = True

    def arrive(
        self,
        model: DistributedModelParallel,
        path: Path,
        old: DistributedModelParallel | None,
    ) -> Any:
        assert old is not None
        model.load_state_dict(old.state_dict())
        model.fused_optimizer.load_state_dict(old.fused_optimizer.state_dict())
        return model


class InPlace(Road):
    """``reshard``, which changes the plan of the old model in place."""

    same_process = True

    def arrive(
        self,
        model: DistributedModelParallel,
        path: Path,
        old: DistributedModelParallel | None,
    ) -> Any:
        assert old is not None
        reshard(old, model.plan)
        return old


class Servers(Checkpoint):
    """A checkpoint that a server loads and saves, divided among three servers, and
    joined again.
    """

    def leave(self, model: DistributedModelParallel, path: Path) -> None:
        saved = path.with_name(f"{path.name}-of-the-model")
        save_checkpoint(model, saved)
        if dist.get_rank() == 0:
            one, whole, parts = (
                HostedTables(),
                path.with_name(f"{path.name}-of-one"),
                path.with_name(f"{path.name}-3"),
            )
            one.load(saved)
            one.save(whole)
            info = read_info(whole)
            slots = [slot % SERVERS for slot in range(64)]
            for member in range(SERVERS):
                specs = {
                    name: _of_server(spec, member)
                    for name, spec in saved_specs(info).items()
                }
                one.write_part(
                    info, specs, owned_by(member, slots), parts / str(member), {}
                )
            info, specs = joined(parts, SERVERS)
            one.write_part(
                info,
                specs,
                lambda ids: torch.ones_like(ids, dtype=torch.bool),
                path,
                {},
            )
            one.close()
        dist.barrier()


def _of_server(spec: Any, member: int) -> Any:
    from dataclasses import replace

    return replace(spec, shard=(member, SERVERS))


ROADS: dict[str, Road] = {
    "checkpoint": Checkpoint(),
    "delta": Delta(),
    "compacted": Compacted(),
    "dcp": Distributed(),
    "state_dict": StateDict(),
    "reshard": InPlace(),
    "servers": Servers(),
}
