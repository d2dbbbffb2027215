"""Saves a model: writes a snapshot in parts, and then renames the checkpoint."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.checkpoint.background import AsyncSave, raise_unreported
from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.checkpoint.files import FileInfo
from torchrec_recstore.checkpoint.info import (
    DENSE,
    TRAINING_STATE,
    CheckpointInfo,
    DeltaOf,
    PartInfo,
    TableInfo,
    read_chain,
)
from torchrec_recstore.checkpoint.writer import (
    PartWriter,
    Progress,
    SavedShard,
    finish,
    reporting,
    warn_of_nonfinite,
    write_shard,
)
from torchrec_recstore.encoding import encode
from torchrec_recstore.sharders.gather import (
    all_gathered,
    refused_together,
    whole_environment,
)
from torchrec_recstore.sharders.model_tables import (
    ModelTable,
    dense_tensors,
    recstore_tables,
)
from torchrec_recstore.store import TableState
from torchrec_recstore.store.table import check_applied

# By the model's process group: the same ranks with a group that only writing threads
# use.
_background_groups: WeakKeyDictionary[dist.ProcessGroup, ShardingEnv] = (
    WeakKeyDictionary()
)


def save_checkpoint(
    model: nn.Module,
    path: str | Path,
    *,
    delta_of: str | Path | None = None,
    overwrite: bool = False,
    training_state: Any = None,
    progress: Progress | None = None,
) -> CheckpointInfo:
    """Saves every RecStore table and the rest of the model's state. Collective.

    A checkpoint is complete or does not exist: the files are written into a hidden
    directory next to ``path``, synced to the disk, and then the directory is renamed. A
    save that fails changes nothing and can be repeated. Rank 0 locks the path
    meanwhile.

    Args:
        model: ``DistributedModelParallel``, or any module that contains sharded
            modules.
        path: The checkpoint's directory, on a filesystem that all ranks share.
        delta_of: The path of a checkpoint that this model has saved or loaded. If it is
            given, only the rows that have changed since that checkpoint and the ids
            that have left are written. Loading the delta needs that checkpoint, at the
            same path relative to the delta. Default: None, a full checkpoint.
        overwrite: Whether an existing checkpoint at ``path`` may be replaced, in one
            atomic operation. Default: False.
        training_state: The state that the training loop needs to resume, in addition to
            the model: the ``state_dict`` of the dense optimizer and of the scheduler,
            the position in the data. It consists of tensors, None, bool, int, float,
            str, and lists, tuples and dicts of these, and is the same on every rank.
        progress: A callback that is called after each part of 32 MB with the number of
            rows that are written and the number of all rows of this rank's shards.

    Raises:
        FileExistsError: ``path`` exists. With ``overwrite``: ``path`` is not a
            checkpoint, a delta in the same directory needs it, or it holds files that
            do not belong to the checkpoint.
        BlockingIOError: Another process is saving to ``path``, or is replacing a
            checkpoint that the delta needs. The message names the process.
        ValueError: This model has neither saved nor loaded ``delta_of``, a table uses
            one of TorchRec's own sharded kernels, or another save of the model is still
            being written.
        TypeError: ``training_state`` contains a value of another type.
        OSError: A file cannot be written.
        RuntimeError: A rank has died. All of these errors are raised on every rank.
        Exception: The error of an earlier :func:`async_save` that failed and was not
            waited for. Nothing has been saved, and the call can be repeated.

    Warns:
        RecStoreWarning: Rows of a table have NaN or infinity. They are saved. Each
            table is named once, by rank 0.
    """
    return _Save(
        model,
        path,
        delta_of,
        overwrite,
        training_state,
        progress,
        polite=False,
    ).write()


def async_save(
    model: nn.Module,
    path: str | Path,
    *,
    delta_of: str | Path | None = None,
    overwrite: bool = False,
    training_state: Any = None,
    progress: Progress | None = None,
) -> AsyncSave:
    """Takes a snapshot of the model, and writes it while training continues.

    Collective.

    See :func:`save_checkpoint`; the arguments are the same. The checkpoint holds the
    model at the moment of the call. A row that changes while the checkpoint is being
    written is copied first, so memory grows by the rows that change. Dense tensors are
    copied at the call. A thread of low priority writes the files and calls
    ``progress``. The backend gloo must be available, because the writing threads use a
    process group of gloo.

    A process that ends before its checkpoint is written waits for it. If the checkpoint
    cannot be written, ``wait()`` raises the error, or the next ``save_checkpoint`` or
    ``async_save`` does. If none of them is called, the error is printed when the
    process ends, and its exit status is 1.

    Raises:
        FileExistsError, BlockingIOError, ValueError, TypeError, OSError, Exception: See
            :func:`save_checkpoint`.
    """
    save = _Save(
        model,
        path,
        delta_of,
        overwrite,
        training_state,
        progress,
        polite=True,
    )
    try:
        return AsyncSave(save.path, save.write)
    except RuntimeError:  # The system cannot start a thread.
        save.snapshots.close()
        raise


class _Save:
    """A save that has taken its snapshot.

    Its construction and :meth:`write` are collective.

    A ``polite`` save is written by a thread of low priority, with a process group that
    training does not use.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str | Path,
        delta_of: str | Path | None,
        overwrite: bool,
        training_state: Any,
        progress: Progress | None,
        *,
        polite: bool,
    ) -> None:
        env = whole_environment()
        self.env = _background_environment(env) if polite else env
        self.path = Path(os.path.realpath(path))
        self._polite = polite
        self._progress = progress
        self._shards: dict[str, list[SavedShard]] = {}
        self._delta_of: DeltaOf | None = None
        self._destination: Destination | None = None
        self._tensors: dict[str, Tensor] = {}
        with ExitStack() as undo:
            with refused_together(env):
                raise_unreported()
                self._tables = recstore_tables(model)
                for table in self._tables:
                    table.state.copies.check()
                check_applied(
                    (shard.table for table in self._tables for shard in table.shards),
                    saves=True,
                )
                bases = [] if delta_of is None else read_chain(delta_of)
                marks = self._marks_since(bases)
                if env.rank == 0:  # Rank 0 holds the lock of the path for all ranks.
                    destination = Destination(
                        self.path, overwrite=overwrite, bases=bases
                    )
                    self._destination = undo.enter_context(destination)
                self._training_state = encode(training_state, self._tensors)
                self._dense = dense_tensors(model, self._tables)
                for table in self._tables:
                    self._take_snapshots(
                        table,
                        None if marks is None else marks[table.name],
                        undo,
                    )
                if polite:  # Training changes the tensors while the copies are written.
                    self._copy_tensors()
            self._choose_removals(env)
            self.snapshots = undo.pop_all()  # and the lock of the path

    def _copy_tensors(self) -> None:
        """Replaces the tensors that are saved by copies of them."""
        for key, value in self._dense.items():
            self._dense[key] = value.clone()
        for key, value in self._tensors.items():
            self._tensors[key] = value.detach().clone()

    def _take_snapshots(
        self,
        table: ModelTable,
        marks: Sequence[int] | None,
        undo: ExitStack,
    ) -> None:
        """Takes a snapshot of each shard of a table.

        With marks, it has the rows that have changed since the shard's mark.
        """
        # Where rows are kept, and whether this model trains them, are no properties of
        # the rows.
        options = replace(
            table.state.options,
            cold_store=None,
            frozen=False,
            device_rows=None,
        )
        self._shards[table.name] = []
        for number, shard in enumerate(table.shards):
            snapshot = shard.table.snapshot(None if marks is None else marks[number])
            undo.enter_context(snapshot)
            saved_shard = SavedShard(
                name=table.name,
                table=shard.table,
                snapshot=snapshot,
                options=options,
                state=shard.table.state(),
            )
            self._shards[table.name].append(saved_shard)

    def _marks_since(
        self,
        chain: Sequence[CheckpointInfo],
    ) -> Mapping[str, Sequence[int]] | None:
        """Returns the change marks that the base of a delta has set in each table.

        They are those of the table's shards. The result is None without base.
        """
        if not chain:
            return None
        base = chain[-1]
        for info in chain:
            if self.path in (info.path, *info.path.parents):
                raise ValueError(
                    f"a delta of {base.path} cannot replace {self.path}, which is"
                    " needed to load it"
                )
        marks = {}
        for table in self._tables:
            module_marks = table.module.recstore_state.marks.get(base.checksum, {})
            if table.config_name in module_marks and table.name in base.tables:
                marks[table.name] = module_marks[table.config_name]
        if len(marks) < len(self._tables):
            raise ValueError(
                f"delta_of: this model has neither saved nor loaded {base.path}: save"
                " without delta_of"
            )
        self._delta_of = DeltaOf(
            os.path.relpath(base.path, self.path.parent),
            base.checksum,
        )
        return marks

    def _choose_removals(self, env: ShardingEnv) -> None:
        """Lets each table of a delta list the ids that left, or those that stay.

        The fewer ones are listed.
        """
        if self._delta_of is None:
            return
        local_counts = {}
        for name, shards in self._shards.items():
            local_counts[name] = _IdCounts.of_shards(shards)
        gathered = all_gathered(local_counts, env)
        with refused_together(env):
            for name, shards in self._shards.items():
                are_known = True
                leaving = 0
                staying = 0
                for rank_counts in gathered:
                    counts = rank_counts[name]
                    are_known = are_known and counts.are_known
                    leaving += counts.leaving
                    staying += counts.staying
                for shard in shards:
                    if are_known and leaving <= staying:
                        shard.removal = "left"
                        shard.listed = shard.snapshot.left
                    else:
                        shard.removal = "stay"
                        shard.listed = shard.table.ids()

    def write(self) -> CheckpointInfo:
        """Writes the checkpoint, and keeps its change marks for a later delta."""
        with self.snapshots:
            info = self._write()
        for table in self._tables:
            state = table.module.recstore_state
            base = None if info.delta_of is None else info.delta_of.checksum
            state.note_rows_of(table.config_name, info.checksum, base)
            shards = self._shards[table.name]
            marks = state.marks.setdefault(info.checksum, {})
            marks[table.config_name] = [shard.snapshot.mark for shard in shards]
        return info

    def _write(self) -> CheckpointInfo:
        """Writes this rank's files.

        Rank 0 then adds the metadata and publishes the checkpoint.
        """
        staging: Path | None = None
        with refused_together(self.env):
            if self._destination is not None:
                staging = self._destination.stage()
        staging = all_gathered(staging, self.env)[0]
        assert staging is not None
        files = _RankFiles({}, {}, {})
        with refused_together(self.env):
            files = self._write_files(staging)
        gathered = all_gathered(files, self.env)
        info: CheckpointInfo | None = None
        with refused_together(self.env):
            if self._destination is not None:
                info = self._published(self._destination, gathered)
        infos = all_gathered(info, self.env)
        info = infos[0]
        assert info is not None
        self._warn_of_nonfinite(gathered)
        return info

    def _warn_of_nonfinite(self, gathered: Sequence[_RankFiles]) -> None:
        """Warns on rank 0 about each table with rows that are not finite.

        A later save does not warn about the table again.
        """
        if self.env.rank != 0:
            return
        counts: Counter[tuple[str, int]] = Counter()
        for rank_files in gathered:
            counts.update(rank_files.nonfinite)
        # All column shards of a table have the same ids: their counts are not added.
        rows_of_tables: dict[str, int] = {}
        for (name, _), count in counts.items():
            largest_count = rows_of_tables.get(name, 0)
            rows_of_tables[name] = max(count, largest_count)

        for table in self._tables:
            warned_tables = table.module.recstore_state.nonfinite_tables
            count = rows_of_tables.get(table.name, 0)
            if count and table.config_name not in warned_tables:
                warned_tables.add(table.config_name)
                warn_of_nonfinite(table.name, count)

    def _write_files(self, staging: Path) -> _RankFiles:
        writer = PartWriter(staging, self.env.rank, polite=self._polite)
        total_rows = 0
        for shards in self._shards.values():
            total_rows += sum(len(shard.snapshot) for shard in shards)
        on_rows = reporting(self._progress, total_rows)

        shard_infos: dict[str, list[TableInfo]] = {}
        try:
            for name, shards in self._shards.items():
                shard_infos[name] = []
                for shard in shards:
                    info = write_shard(writer, shard, on_rows)
                    shard_infos[name].append(info)
            if self.env.rank == 0:
                writer.tensors(DENSE, self._dense)
                writer.tensors(TRAINING_STATE, self._tensors)
        finally:
            files = writer.close()
        return _RankFiles(shard_infos, files, writer.nonfinite)

    def _published(
        self,
        destination: Destination,
        gathered: Sequence[_RankFiles],
    ) -> CheckpointInfo:
        """Writes the metadata of all ranks' files, and publishes the checkpoint.

        Rank 0 calls it.
        """
        files: dict[str, FileInfo] = {}
        for rank_files in gathered:
            files.update(rank_files.files)
        for name, file in files.items():
            path = destination.staging / name
            if not path.is_file() or path.stat().st_size != file.bytes:
                raise OSError(
                    f"rank 0 does not see {path}, which another rank has written: "
                    f"all ranks must share the filesystem of {self.path.parent}"
                )
        tables = {}
        for table in self._tables:
            shard_infos: list[TableInfo] = []
            for rank_files in gathered:
                shard_infos += rank_files.shards.get(table.name, ())
            tables[table.name] = _merged(shard_infos)
        info = CheckpointInfo(
            path=self.path,
            step=max((merged.steps for merged in tables.values()), default=0),
            world_size=self.env.world_size,
            tables=tables,
            files=files,
            dense=tuple(sorted(self._dense)),
            delta_of=self._delta_of,
        )
        return finish(destination, info, self._training_state)


@dataclass(frozen=True)
class _RankFiles:
    """The files that a rank has written."""

    shards: Mapping[str, list[TableInfo]]  # of each shard, by the name of the table
    files: Mapping[str, FileInfo]  # by their names
    # the number of rows with NaN or infinity, by table and first column of the shard
    nonfinite: Mapping[tuple[str, int], int]


@dataclass(frozen=True)
class _IdCounts:
    """The numbers of ids of a table's shards on one rank."""

    are_known: bool  # Whether all shards know which ids have left.
    leaving: int  # since the base of a delta, of the shards that know it
    staying: int

    @staticmethod
    def of_shards(shards: Sequence[SavedShard]) -> _IdCounts:
        are_known = True
        leaving = 0
        staying = 0
        for shard in shards:
            if shard.snapshot.left is None:
                are_known = False
            else:
                leaving += len(shard.snapshot.left)
            staying += shard.snapshot.table_rows
        return _IdCounts(are_known, leaving, staying)


def _merged(infos: Sequence[TableInfo]) -> TableInfo:
    """Merges the metadata of the shards of a table."""
    state = TableState.merged(
        TableState(info.steps, info.optimizer_steps, info.times) for info in infos
    )
    columns: set[tuple[int, int]] = set()
    parts: list[PartInfo] = []
    removed: list[PartInfo] = []
    sightings: list[str] = []
    for info in infos:
        columns.update(info.columns)
        parts += info.parts
        removed += info.removed
        sightings += info.sightings
    return replace(
        infos[0],
        rows=sum(info.rows for info in infos),
        steps=state.steps,
        optimizer_steps=state.optimizer_steps,
        times=state.times,
        columns=tuple(sorted(columns)),
        parts=tuple(parts),
        removed=tuple(removed),
        sightings=tuple(sightings),
    )


def _background_environment(env: ShardingEnv) -> ShardingEnv:
    """Returns an environment of the same ranks with a group that training does not use.

    The first call makes it.
    """
    if env.process_group is None:
        return env
    if env.process_group not in _background_groups:
        group = dist.new_group(backend="gloo")
        _background_groups[env.process_group] = ShardingEnv.from_process_group(group)
    return _background_groups[env.process_group]
