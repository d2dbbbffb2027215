"""Saving a model: a snapshot of one moment is written in parts and renamed when it is complete."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.checkpoint.files import FileInfo
from torchrec_recstore.checkpoint.info import (
    DENSE,
    TRAINING_STATE,
    CheckpointInfo,
    DeltaOf,
    TableInfo,
    read_chain,
)
from torchrec_recstore.checkpoint.writer import PartWriter, Progress, RowCount, SavedShard, finish, write_shard
from torchrec_recstore.encoding import encode
from torchrec_recstore.sharders.gather import all_gathered, refused_together, whole_environment
from torchrec_recstore.sharders.model_tables import dense_tensors, recstore_tables

# Those that are being written, and those that have failed and that nobody has asked for yet.
_open: set[AsyncSave] = set()


class AsyncSave:
    """A checkpoint that is being written beside training; see :func:`torchrec_recstore.async_save`.

    Args:
        path: of the checkpoint.
        write: writes it.
    """

    def __init__(self, path: Path, write: Callable[[], CheckpointInfo]) -> None:
        self._path = path
        self._info: CheckpointInfo | None = None
        self._error: BaseException | None = None
        # A daemon, so that an interrupt at the end of the process is not followed by another wait for it.
        self._thread = threading.Thread(target=self._write, args=(write,), name="checkpoint", daemon=True)
        _open.add(self)
        try:
            self._thread.start()
        except RuntimeError:
            _open.discard(self)
            raise

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return not self._thread.is_alive()

    def wait(self) -> CheckpointInfo:
        """Waits until the checkpoint is whole on every rank.

        Raises:
            OSError, MemoryError, RuntimeError: it could not be written; there is nothing at its path. MemoryError:
                there was no room to keep the rows that training changed meanwhile.
        """
        self._thread.join()
        _open.discard(self)
        if self._error is not None:
            raise self._error
        assert self._info is not None
        return self._info

    def _write(self, write: Callable[[], CheckpointInfo]) -> None:
        try:
            self._info = write()
            _open.discard(self)
        except BaseException as error:  # it belongs to whoever asks, see below
            traceback.clear_frames(error.__traceback__)  # which hold copies of tensors
            note = f"This is the error of async_save to {self._path}, whose wait() had not been called."
            error.__notes__ = [note]  # add_note, which Python 3.10 lacks
            self._error = error


def raise_unasked() -> None:
    """Raises the error of an :func:`torchrec_recstore.async_save` that has failed and was not waited for, once."""
    for save in list(_open):
        if save._error is not None:
            _open.discard(save)
            raise save._error


def _finish() -> None:
    """Lets the process end when its checkpoints are written, and tells of those that are not."""
    failed = False
    for save in list(_open):
        why: str | None
        try:
            save._thread.join()
            why = None if save._error is None else "".join(traceback.format_exception(save._error))
        except KeyboardInterrupt:
            why = "It was being written when the process was interrupted.\n"
        if why is not None:
            print(f"async_save: the checkpoint {save._path} has not been written.\n{why}", file=sys.stderr, flush=True)
            failed = True
    if failed:
        atexit.register(_leave)


def _leave() -> None:
    """Ends the process with status 1."""
    # Nothing else changes the status of an interpreter that has begun to end. The exit functions of others come first.
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


# Not atexit: before its functions are called, the threads of concurrent.futures, which write the files, are ended by a
# function that was registered like this one. The last one to be registered is called first. Private; checked on
# Python 3.11.
threading._register_atexit(_finish)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_open.clear)


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

    What is at ``path`` afterwards is whole: files are written beside it, synced, and then renamed. A save that failed
    has changed nothing and can be repeated. One job at a time saves to a path: rank 0 holds a lock on it.

    Args:
        model: ``DistributedModelParallel``, or anything that contains sharded modules.
        path: the checkpoint's directory, on a filesystem that all ranks share.
        delta_of: a checkpoint that this model has saved or loaded; then only rows that have changed since are
            written, and which ids have left. It is needed to load the delta, from where it lies relative to it.
        overwrite: whether a checkpoint at ``path`` may be replaced, which happens at once.
        training_state: what the training loop needs to go on beside the model, the same on every rank: the dense
            optimizer's and the scheduler's ``state_dict``, the position in the data. Tensors, None, bool, int, float,
            str; lists, tuples and dicts of these.
        progress: called after every part of 32 MB with the rows written and the rows of all, of this rank's shards.

    Returns:
        What was saved.

    Raises:
        FileExistsError: there is something at ``path``; with ``overwrite``: it is no checkpoint, a delta beside it
            needs it, or it holds files that are not the checkpoint's.
        BlockingIOError: another process is saving to ``path``, or is replacing a checkpoint that the delta needs. The
            message names the process.
        ValueError: ``delta_of`` is no checkpoint that this model has saved or loaded, a table is on one of TorchRec's
            own sharded kernels, or another save is still being written.
        TypeError: something in ``training_state`` that is not saved.
        OSError: a file cannot be written.
        RuntimeError: a rank has died. All of these on every rank.
        Exception: the error of an :func:`async_save` that has failed and was not waited for; nothing has been saved,
            and the call can be repeated.
    """
    save = _Save(model, path, delta_of, overwrite, training_state, whole_environment(), progress, polite=False)
    return save.write()


def async_save(
    model: nn.Module,
    path: str | Path,
    *,
    delta_of: str | Path | None = None,
    overwrite: bool = False,
    training_state: Any = None,
    progress: Progress | None = None,
) -> AsyncSave:
    """As :func:`save_checkpoint`, but returns as soon as the snapshot is taken. Collective.

    The checkpoint is the model of this moment, whatever is trained while it is written: a row that is about to change
    is copied first, so memory grows by the rows that change meanwhile; dense tensors are copied at once. Files are
    written by a thread of low priority, which also calls ``progress``. The process group needs gloo, for a group of the
    writing threads' own.

    A process that ends before its checkpoint is written waits for it. If the checkpoint cannot be written, ``wait()``
    raises the error, or the next ``save_checkpoint`` or ``async_save`` does. If none of them is called, the error is
    printed when the process ends, and its exit status is 1.

    Returns:
        The save, for :meth:`AsyncSave.wait`.

    Raises:
        FileExistsError, BlockingIOError, ValueError, TypeError, OSError, Exception: as :func:`save_checkpoint`.
    """
    env = whole_environment()
    background = _background_environment(env)
    save = _Save(model, path, delta_of, overwrite, training_state, env, progress, polite=True)
    save.env = background
    try:
        return AsyncSave(save.path, save.write)
    except RuntimeError:  # no thread can be started
        save.give_up()
        raise


_background_groups: WeakKeyDictionary[dist.ProcessGroup, ShardingEnv] = WeakKeyDictionary()


def _background_environment(env: ShardingEnv) -> ShardingEnv:
    """The same ranks with a process group that training does not use. Collective where there is none yet."""
    if env.process_group is None:
        return env
    if env.process_group not in _background_groups:
        group = dist.new_group(backend="gloo")
        _background_groups[env.process_group] = ShardingEnv.from_process_group(group)
    return _background_groups[env.process_group]


class _Save:
    """A save from its moment on. Making one is collective, and so is :meth:`write`."""

    def __init__(
        self,
        model: nn.Module,
        path: str | Path,
        delta_of: str | Path | None,
        overwrite: bool,
        training_state: Any,
        env: ShardingEnv,
        progress: Progress | None,
        *,
        polite: bool,
    ) -> None:
        self.env = env
        self.path = Path(os.path.realpath(path))
        self._polite = polite
        self._progress = progress
        self._shards: dict[str, list[SavedShard]] = {}
        self._delta_of: DeltaOf | None = None
        self._tensors: dict[str, Tensor] = {}
        with ExitStack() as undo:
            with refused_together(env):
                raise_unasked()
                self._tables = recstore_tables(model)
                for table in self._tables:
                    table.state.copies.check()
                bases = [] if delta_of is None else read_chain(delta_of)
                marks = self._marks_since(bases)
                # Rank 0 owns the path for all of them.
                self._destination = (
                    undo.enter_context(Destination(self.path, overwrite=overwrite, bases=bases))
                    if env.rank == 0
                    else None
                )
                self._training_state = encode(training_state, self._tensors)
                self._dense = dense_tensors(model, self._tables)
                for table in self._tables:
                    self._shards[table.name] = []
                    for number, shard in enumerate(table.shards):
                        since = None if marks is None else marks[table.name][number]
                        self._shards[table.name].append(
                            SavedShard(
                                table.name,
                                shard.table,
                                undo.enter_context(shard.table.snapshot(since)),
                                replace(table.state.options, cold_store=None),
                                shard.table.sightings(),
                            )
                        )
                if polite:  # training goes on with the tensors themselves
                    self._dense = {key: value.clone() for key, value in self._dense.items()}
                    self._tensors = {key: value.detach().clone() for key, value in self._tensors.items()}
            self._removal = self._removals()
            self._snapshots = undo.pop_all()

    def give_up(self) -> None:
        """Ends the snapshots, and gives up the path."""
        self._snapshots.close()

    def write(self) -> CheckpointInfo:
        """Writes all of it."""
        with self._snapshots:
            info = self._write()
        self._remember(info)
        return info

    def _write(self) -> CheckpointInfo:
        with refused_together(self.env):
            made = None if self._destination is None else self._destination.stage()
        staging = all_gathered(made, self.env)[0]
        assert staging is not None
        files: dict[str, FileInfo] = {}
        contents: dict[str, TableInfo] = {}
        with refused_together(self.env):
            writer = PartWriter(staging, self.env.rank, polite=self._polite)
            total = sum(len(shard.snapshot) for shards in self._shards.values() for shard in shards)
            count = RowCount(self._progress, total)
            try:
                for name, shards in self._shards.items():
                    for shard in shards:
                        removal, delta = self._removal[name], self._delta_of is not None
                        written = write_shard(writer, shard, removal, delta=delta, on_rows=count.add)
                        contents[name] = _merged([contents.get(name), written])
                if self.env.rank == 0:
                    writer.tensors(DENSE, self._dense)
                    writer.tensors(TRAINING_STATE, self._tensors)
            finally:
                files = writer.close()
        gathered = all_gathered((contents, files), self.env)
        info: CheckpointInfo | None = None
        with refused_together(self.env):
            if self._destination is not None:
                all_files = {file: info for _, of_rank in gathered for file, info in of_rank.items()}
                info = self._published(self._destination, [of_rank for of_rank, _ in gathered], all_files)
        info = all_gathered(info, self.env)[0]
        assert info is not None
        return info

    def _marks_since(self, chain: Sequence[CheckpointInfo]) -> Mapping[str, Sequence[int]] | None:
        if not chain:
            return None
        base = chain[-1]
        if any(self.path in (each.path, *each.path.parents) for each in chain):
            raise ValueError(f"a delta of {base.path} cannot replace {self.path}, which is needed to load it")
        marks = {}
        for table in self._tables:
            of_module = table.module.recstore_state.marks.get(base.checksum, {})
            if table.config_name in of_module and table.name in base.tables:
                marks[table.name] = of_module[table.config_name]
        if len(marks) < len(self._tables):
            raise ValueError(f"delta_of: this model has neither saved nor loaded {base.path}: save without delta_of")
        self._delta_of = DeltaOf(os.path.relpath(base.path, self.path.parent), base.checksum)
        return marks

    def _removals(self) -> dict[str, Literal["left", "stay"]]:
        """How each table of a delta tells which ids have left: by those, or by those that stay where they are fewer."""
        if self._delta_of is None:
            return dict.fromkeys(self._shards, "left")
        local = {
            name: [(None if s.snapshot.left is None else len(s.snapshot.left), s.snapshot.table_rows) for s in shards]
            for name, shards in self._shards.items()
        }
        gathered = all_gathered(local, self.env)
        removal: dict[str, Literal["left", "stay"]] = {}
        with refused_together(self.env):
            for name, shards in self._shards.items():
                counts = [count for of_rank in gathered for count in of_rank[name]]
                left = sum(left for left, _ in counts if left is not None)
                known = all(left is not None for left, _ in counts)
                removal[name] = "left" if known and left <= sum(rows for _, rows in counts) else "stay"
                for shard in shards:
                    shard.ids = shard.table.ids() if removal[name] == "stay" else None
        return removal

    def _published(
        self, destination: Destination, contents: Sequence[Mapping[str, TableInfo]], files: Mapping[str, FileInfo]
    ) -> CheckpointInfo:
        for name, file in files.items():
            written = destination.staging / name
            if not written.is_file() or written.stat().st_size != file.bytes:
                raise OSError(
                    f"rank 0 does not see {written}, which another rank has written: "
                    f"all ranks must share the filesystem of {self.path.parent}"
                )
        tables = {table.name: _merged([of_rank.get(table.name) for of_rank in contents]) for table in self._tables}
        info = CheckpointInfo(
            path=self.path,
            step=max((table.steps for table in tables.values()), default=0),
            world_size=self.env.world_size,
            tables=tables,
            files=files,
            dense=tuple(sorted(self._dense)),
            delta_of=self._delta_of,
        )
        return finish(destination, info, self._training_state)

    def _remember(self, info: CheckpointInfo) -> None:
        for table in self._tables:
            marks = table.module.recstore_state.marks.setdefault(info.checksum, {})
            marks[table.config_name] = [shard.snapshot.mark for shard in self._shards[table.name]]


def _merged(infos: Sequence[TableInfo | None]) -> TableInfo:
    """What the shards of a table say of it, put together."""
    known = [info for info in infos if info is not None]
    first = known[0]
    return replace(
        first,
        rows=sum(info.rows for info in known),
        steps=max(info.steps for info in known),
        optimizer_steps=max(info.optimizer_steps for info in known),
        columns=tuple(sorted({columns for info in known for columns in info.columns})),
        parts=tuple(part for info in known for part in info.parts),
        removed=tuple(part for info in known for part in info.removed),
        sightings=tuple(file for info in known for file in info.sightings),
    )
