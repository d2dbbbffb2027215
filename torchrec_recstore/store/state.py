"""What a table knows besides its rows: its clocks, and how often its admission has seen ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_recstore.store.parts import Owned


class Sightings(NamedTuple):
    """How often admission has seen ids that have no row.

    Args:
        ids: (N,) int64. The ids.
        counts: (N,) uint8. How often each id was seen in a generation of the counter.
        generations: (N,) uint8. The generation: 0 for the present one, 1 for the older one. ``csrc/sightings.h``
            describes the generations.
    """

    ids: Tensor
    counts: Tensor
    generations: Tensor

    def take(self, which: Tensor) -> Sightings:
        """Returns some of the entries: ``which`` are their positions, (n,) int64, or a mask, (N,) bool."""
        return Sightings(*(tensor[which] for tensor in self))


def no_sightings() -> Sightings:
    """Returns the sightings of a new table."""
    none = torch.empty(0, dtype=torch.uint8)
    return Sightings(torch.empty(0, dtype=torch.int64), none, none)


_SIGHTINGS = dict(zip(("sighting_ids", "sighting_counts", "sighting_generations"), Sightings._fields, strict=True))


@dataclass(frozen=True, eq=False)
class TableState:
    """The state of a table, or of a shard of it, that is not in its rows.

    Args:
        steps: The number of training lookups. The rows' ``last_step`` refers to it. Default: 0.
        optimizer_steps: The number of updates, which the bias correction of Adam and LAMB uses. Default: 0.
        times: The times of the steps; see ``ops.table_times``. Default: None, if rows do not expire after a time.
        sightings: What admission has counted. Default: None, if admission does not count.
    """

    steps: int = 0
    optimizer_steps: int = 0
    times: tuple[int, ...] | None = None
    sightings: Sightings | None = None

    @staticmethod
    def merged(states: Iterable[TableState]) -> TableState:
        """Returns the state of a table from the states of its shards, which hold different ids.

        The clocks are those of the shard that is ahead. Sightings are exact, because they are counted by id.

        Args:
            states: The state of each shard. Of column shards, which hold the same ids, one has the sightings.
        """
        states = list(states)
        counted = [state.sightings for state in states if state.sightings is not None]
        return TableState(
            steps=max((state.steps for state in states), default=0),
            optimizer_steps=max((state.optimizer_steps for state in states), default=0),
            # The shards have the same ticks. Their clocks differ a little.
            times=max((state.times for state in states if state.times), key=lambda times: times[1], default=None),
            sightings=Sightings(*map(torch.cat, zip(*counted, strict=True))) if counted else None,
        )

    def owned(self, owned: Owned | None) -> TableState:
        """Returns the state of a shard: the clocks of the table, and the sightings of the shard's ids."""
        if owned is None or self.sightings is None:
            return self
        return replace(self, sightings=self.sightings.take(owned(self.sightings.ids)))

    def tensors(self) -> dict[str, Tensor]:
        """Returns the state as tensors, of which :meth:`from_tensors` makes it again.

        ``steps`` and ``optimizer_steps`` are (1,) int64; ``times`` is (T,) int64; ``sighting_ids``, (N,) int64,
        ``sighting_counts`` and ``sighting_generations``, (N,) uint8. The last four are only there if the table has
        them.
        """
        named = {"steps": torch.tensor([self.steps]), "optimizer_steps": torch.tensor([self.optimizer_steps])}
        if self.times is not None:
            named["times"] = torch.tensor(self.times, dtype=torch.int64)
        if self.sightings is not None:
            named |= {key: getattr(self.sightings, field) for key, field in _SIGHTINGS.items()}
        return named

    @staticmethod
    def from_tensors(named: Mapping[str, Tensor]) -> TableState:
        """Returns the state of :meth:`tensors`. Other tensors are ignored. Missing ones are as in a new table.

        Raises:
            ValueError: A tensor has another shape or another dtype. The message names the tensor.
        """
        found = {key: named[key].detach().to("cpu") for key in STATE_KEYS if key in named}
        for key, value in found.items():
            size, dtype = None, torch.int64
            if key in ("steps", "optimizer_steps"):
                size = 1
            elif key != "times":
                size, dtype = len(found.get("sighting_ids", ())), torch.int64 if key == "sighting_ids" else torch.uint8
            if value.dtype is not dtype or value.dim() != 1 or size not in (None, len(value)):
                expected = f"({'T' if size is None else size},)"
                got = f"{value.dtype} of shape {tuple(value.shape)}"
                raise ValueError(f"{key} must be {dtype} of shape {expected}, got {got}")
        sightings = None
        if any(key in found for key in _SIGHTINGS):
            missing = [key for key in _SIGHTINGS if key not in found]
            if missing:
                raise ValueError(f"the sightings have no {', '.join(missing)}")
            sightings = Sightings(*(found[key] for key in _SIGHTINGS))
        return TableState(
            steps=int(found["steps"]) if "steps" in found else 0,
            optimizer_steps=int(found["optimizer_steps"]) if "optimizer_steps" in found else 0,
            times=tuple(found["times"].tolist()) if "times" in found else None,
            sightings=sightings,
        )


STATE_KEYS = ("steps", "optimizer_steps", "times", *_SIGHTINGS)
"""The names of the tensors of a :class:`TableState`."""
