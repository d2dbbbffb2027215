"""Distributes the rows of a save of several servers over another number of servers.

Tests: tests/service/test_agreement.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.checkpoint.files import CheckpointError
from torchrec_recstore.checkpoint.info import CheckpointInfo, TableInfo, read_info
from torchrec_recstore.store import TableState
from torchrec_recstore.store.parts import Owned
from torchrec_recstore_service.tables.hosted_checkpoints import saved_specs
from torchrec_recstore_service.wire.table_spec import TableSpec


def sent_info(path: Path) -> CheckpointInfo:
    """Reads the metadata of a checkpoint that another server or a client has sent.

    Raises:
        CheckpointError: It is damaged, or it is a delta: the path of its base would be
            one on this machine.
        FileNotFoundError: There is none.
    """
    info = read_info(path)
    if info.delta_of is not None:
        raise CheckpointError(
            f"{path} is a delta of {info.delta_of.path}, and servers send whole saves"
            " only"
        )
    return info


def joined(root: Path, parts: int) -> tuple[CheckpointInfo, dict[str, TableSpec]]:
    """Returns the parts of a save as one checkpoint.

    Args:
        root: The directory that has the part of server ``i`` as the directory ``i``.
        parts: The number of parts.

    Returns:
        The metadata of a checkpoint at ``root``, and the specification of each table,
        by table name.

    Raises:
        CheckpointError: A part is damaged or given twice, or the parts do not have the
            same tables.
        FileNotFoundError: A part is missing.
    """
    infos = [sent_info(root / str(part)) for part in range(parts)]
    part_specs = [saved_specs(info) for info in infos]
    all_shards = [(part, parts) for part in range(parts)]
    for name in part_specs[0]:
        shards = sorted(specs[name].shard for specs in part_specs if name in specs)
        if shards != all_shards:
            numbers = ", ".join(f"{part + 1} of {count}" for part, count in shards)
            raise CheckpointError(
                f"table {name!r} needs all of its parts, each once, got {numbers}: name"
                " all servers"
            )

    specs = _as_whole(part_specs[0])
    for specs_of_part in part_specs[1:]:
        if _as_whole(specs_of_part) != specs:
            raise CheckpointError(
                f"{root}: the parts of the save do not have the same tables"
            )

    tables = {name: _as_one(name, infos) for name in specs}
    files = {}
    for part, info in enumerate(infos):
        for name, file in info.files.items():
            files[f"{part}/{name}"] = file
    whole_info = replace(
        infos[0],
        path=root,
        tables=tables,
        files=files,
    )
    return whole_info, specs


def _as_whole(specs: Mapping[str, TableSpec]) -> dict[str, TableSpec]:
    """Returns the specifications of whole tables, for those of parts."""
    return {name: replace(spec, shard=(0, 1)) for name, spec in specs.items()}


def owned_by(member: int, slots: Sequence[int]) -> Owned:
    """Returns a function that selects the ids, (N,) int64, of a server: (N,) bool."""
    is_owned = torch.tensor(slots) == member

    def owned(ids: Tensor) -> Tensor:
        slot_of_ids = ops.mix_ids(ids, True).remainder_(len(is_owned))
        return is_owned[slot_of_ids]

    return owned


def _as_one(name: str, infos: Sequence[CheckpointInfo]) -> TableInfo:
    tables = [info.tables[name] for info in infos]
    states = []
    parts = []
    sightings = []
    for number, table in enumerate(tables):
        states.append(TableState(table.steps, table.optimizer_steps, table.times))
        for part in table.parts:
            parts.append(replace(part, file=f"{number}/{part.file}"))
        for file in table.sightings:
            sightings.append(f"{number}/{file}")

    state = TableState.merged(states)
    return replace(
        tables[0],
        rows=sum(table.rows for table in tables),
        steps=state.steps,
        optimizer_steps=state.optimizer_steps,
        times=state.times,
        parts=tuple(parts),
        sightings=tuple(sightings),
    )
