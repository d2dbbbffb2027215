"""What admission has counted, in a checkpoint: the cells of each shard's counter that are not zero."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_recstore.checkpoint.files import CheckpointError, read_tensors
from torchrec_recstore.checkpoint.info import CheckpointInfo
from torchrec_recstore.store import Table

_GENERATIONS, _ROWS = 2, 4  # csrc/sightings.h


def sparse(cells: Tensor) -> dict[str, Tensor]:
    """The tensors of a file.

    Args:
        cells: (2, 4, N) uint8.
    """
    flat = cells.flatten()
    positions = flat.nonzero().squeeze(1)
    return {"position": positions, "count": flat[positions]}


def load_sightings(table: Table, chain: Sequence[CheckpointInfo], name: str) -> None:
    """Gives a shard with admission what a checkpoint's shards have counted, whatever their number and their memory.

    Shards have different ids, so the greater count of a cell is right for the ids of both: the cell of an id is at most
    too high. Of a larger counter cells are put together, of a smaller one they are repeated.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    if table.options.admission is not None and table.options.admission.count > 1:
        table.set_sightings(*merged(chain[-1], name, table.sightings()[0].shape[2]))


def merged(info: CheckpointInfo, name: str, cells: int) -> tuple[Tensor, int]:
    """The counts of all shards as one counter of ``cells`` cells a row has them: (2, 4, cells) uint8; and sightings."""
    counts = torch.zeros(_GENERATIONS, _ROWS, cells, dtype=torch.uint8)
    taken = 0
    for saved in info.tables[name].sightings:
        tensors = read_tensors(info.path / saved.file, info.files[saved.file])
        flat = torch.zeros(_GENERATIONS * _ROWS * saved.cells, dtype=torch.uint8)
        if tensors["position"].numel() and not 0 <= int(tensors["position"].max()) < len(flat):
            raise CheckpointError(f"{info.path / saved.file} does not hold counts of {saved.cells} cells a row")
        flat[tensors["position"]] = tensors["count"]
        found = flat.view(_GENERATIONS, _ROWS, -1)
        if saved.cells > cells:  # a cell's number is the low bits of a hash
            found = found.view(_GENERATIONS, _ROWS, -1, cells).amax(dim=2)
        counts = torch.maximum(counts, found.repeat(1, 1, cells // found.shape[2]))
        taken = max(taken, saved.taken)
    return counts, taken
