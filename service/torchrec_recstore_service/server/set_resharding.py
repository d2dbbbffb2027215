"""Distributes the rows of a save of several servers over another number of servers.

Tests: tests/service/test_agreement.py.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    written = [saved_specs(info) for info in infos]
    for name in written[0]:
        shards = sorted(specs[name].shard for specs in written if name in specs)
        if shards != [(part, parts) for part in range(parts)]:
            numbers = ", ".join(f"{part + 1} of {of}" for part, of in shards)
            raise CheckpointError(
                f"table {name!r} needs all of its parts, each once, got {numbers}: name"
                " all servers"
            )
    specs = [
        {name: replace(spec, shard=(0, 1)) for name, spec in of_part.items()}
        for of_part in written
    ]
    if any(others != specs[0] for others in specs[1:]):
        raise CheckpointError(
            f"{root}: the parts of the save do not have the same tables"
        )
    tables = {name: _as_one(name, infos) for name in specs[0]}
    files = {
        f"{part}/{name}": file
        for part, info in enumerate(infos)
        for name, file in info.files.items()
    }
    return replace(infos[0], path=root, tables=tables, files=files), specs[0]


def owned_by(member: int, slots: Sequence[int]) -> Owned:
    """Returns the function that says which ids, (N,) int64, belong to a server: (N,)
    bool.
    """
    mine = torch.tensor(slots) == member

    def owned(ids: Tensor) -> Tensor:
        return mine[ops.mix_ids(ids, True).remainder_(len(mine))]

    return owned


def _as_one(name: str, infos: Sequence[CheckpointInfo]) -> TableInfo:
    of = [info.tables[name] for info in infos]
    state = TableState.merged(
        TableState(table.steps, table.optimizer_steps, table.times) for table in of
    )
    return replace(
        of[0],
        rows=sum(table.rows for table in of),
        steps=state.steps,
        optimizer_steps=state.optimizer_steps,
        times=state.times,
        parts=tuple(
            replace(p, file=f"{i}/{p.file}")
            for i, table in enumerate(of)
            for p in table.parts
        ),
        sightings=tuple(
            f"{i}/{file}" for i, table in enumerate(of) for file in table.sightings
        ),
    )
