"""Reads, writes and checks the metadata of a checkpoint, ``metadata.json``.

docs/checkpoint.md describes the format.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import xxhash

from torchrec_recstore.checkpoint.files import (
    CheckpointError,
    FileInfo,
    read_tensors,
    write_synced,
)
from torchrec_recstore.encoding import check_fields, decode, encode, not_known
from torchrec_recstore.file_names import FileName
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions

FORMAT = "recstore checkpoint"
VERSION = 1
METADATA = "metadata.json"
DENSE = "dense.safetensors"
TRAINING_STATE = "training_state.safetensors"

_CHECKSUM = re.compile(rb'"checksum": "([0-9a-f]{32})"\n}\n\Z')
_NO_CHECKSUM = b"0" * 32  # The checksum is that of the file with zeros in its place.
_DOCUMENT = (
    "format",
    "version",
    "step",
    "world_size",
    "delta_of",
    "tables",
    "dense",
    "training_state",
    "files",
    "checksum",
)

DTYPES = ("float32", "float16", "bfloat16", "int8")
"""The data types that weights can have."""

_PLAIN_TYPES: dict[Any, type] = {"int": int, "str": str}  # by the annotation of a field

_Entry = TypeVar("_Entry")


@dataclass(frozen=True)
class PartInfo:
    """A file with ids of one shard in ascending order, with or without their rows.

    Args:
        file: The file's name.
        rank: The rank of the shard.
        columns: The first column of the shard and the column after its last.
        rows: The number of ids.
        first_id: The smallest id.
        last_id: The greatest id.
    """

    file: str
    rank: int
    columns: tuple[int, int]
    rows: int
    first_id: int
    last_id: int

    @property
    def block(self) -> tuple[int, int, int]:
        """A key that the parts of all column shards with the same rows share."""
        return self.first_id, self.last_id, self.rows


@dataclass(frozen=True)
class TableInfo:
    """The metadata of a table in a checkpoint.

    Args:
        dim: The number of columns of the whole table.
        dtype: The data type of the weights: ``"float32"``, ``"float16"``,
            ``"bfloat16"`` or ``"int8"``.
        optimizer: The optimizer as it was created, without the learning rate that a
            scheduler has set.
        options: The table's options without its cold store, because rows can be loaded
            into any cold store.
        rows: The number of rows of the whole table.
        steps: The number of training lookups. A row's ``last_step`` refers to it.
        optimizer_steps: The number of updates. The bias correction of Adam and LAMB
            uses it.
        columns: For each column shard, its first column and the column after its last.
        parts: The files with rows: with all rows, or in a delta with the rows that have
            changed since ``delta_of``.
        removal: The ids that the files in ``removed`` list: the ids that have left
            since ``delta_of`` (``"left"``), or all ids that the table has at the delta
            (``"stay"``).
        removed: The files with ids and no rows. Empty if no id left.
        sightings: The files with the counts of admission, one for each shard. A delta
            has all counts, too.
        times: The times of the steps, see ``ops.table_times``. None if rows do not
            expire after a time.
    """

    dim: int
    dtype: str
    optimizer: Optimizer
    options: TableOptions
    rows: int
    steps: int
    optimizer_steps: int
    columns: tuple[tuple[int, int], ...]
    parts: tuple[PartInfo, ...]
    removal: Literal["left", "stay"]
    removed: tuple[PartInfo, ...]
    sightings: tuple[str, ...]
    times: tuple[int, ...] | None


@dataclass(frozen=True)
class DeltaOf:
    """A reference from a delta to its base, which is loaded before the delta.

    Args:
        path: The path of the base, relative to the delta's parent directory.
        checksum: The checksum of the base's metadata.
    """

    path: str
    checksum: str


@dataclass(frozen=True)
class CheckpointInfo:
    """The metadata of a checkpoint.

    Args:
        path: The checkpoint's directory.
        step: The greatest number of training steps of a table.
        world_size: The number of ranks that wrote the checkpoint.
        tables: The metadata of the tables by name.
        files: The sizes and checksums of all files but ``metadata.json``, by name.
        dense: The names of the model's other tensors.
        delta_of: The base of a delta. None for a full checkpoint.
        training_state: The training state that was saved with the model.
        checksum: The checksum of ``metadata.json``, which contains the checksums of all
            other files.
    """

    path: Path
    step: int
    world_size: int
    tables: Mapping[str, TableInfo]
    files: Mapping[str, FileInfo]
    dense: tuple[str, ...]
    delta_of: DeltaOf | None = None
    training_state: Any = None
    checksum: str = field(default="", compare=False)

    @property
    def bytes(self) -> int:
        """The size of all files but ``metadata.json`` in bytes."""
        return sum(file.bytes for file in self.files.values())

    @property
    def base(self) -> Path | None:
        """The path of a delta's base; None for a full checkpoint."""
        if self.delta_of is None:
            return None
        return Path(os.path.normpath(self.path.parent / self.delta_of.path))


def write_metadata(
    directory: Path,
    info: CheckpointInfo,
    training_state: Any,
) -> str:
    """Writes and syncs ``metadata.json``, and returns its checksum.

    ``training_state`` is a state that :func:`encode` has returned.
    """
    tables = {}
    for name, table in sorted(info.tables.items()):
        tables[name] = asdict(table)
        tables[name]["optimizer"] = encode(table.optimizer, {})
        tables[name]["options"] = encode(table.options, {})
    document = {
        "format": FORMAT,
        "version": VERSION,
        "step": info.step,
        "world_size": info.world_size,
        "delta_of": None if info.delta_of is None else asdict(info.delta_of),
        "tables": tables,
        "dense": info.dense,
        "training_state": training_state,
        "files": {name: asdict(file) for name, file in sorted(info.files.items())},
        "checksum": _NO_CHECKSUM.decode(),
    }
    text = (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()
    checksum = xxhash.xxh3_128_hexdigest(text)
    # The checksum replaces the zeros, after which the text has only '"\n}\n'.
    end = text[-4:]
    head = text[: -len(_NO_CHECKSUM) - len(end)]
    write_synced(directory / METADATA, head + checksum.encode() + end)
    return checksum


def _reason(path: Path) -> str:
    """Returns why there is no checkpoint at a path.

    The folder of several checkpoints is a common mistake, and its newest one is named.
    """
    if not path.exists():
        return "no such directory"
    files = []
    for file in path.glob(f"*/{METADATA}"):
        # A hidden folder is a save that was killed, or a checkpoint that is deleted.
        if not file.parent.name.startswith("."):
            files.append(file)
    if not files:
        return f"it has no {METADATA}"
    newest = max(files, key=lambda file: (when_saved_ns(file), file))
    return (
        f"it is a folder with {len(files)} checkpoint(s): pass one of them, of which"
        f" {newest.parent} was saved last"
    )


def when_saved_ns(file: Path) -> int:
    """Returns when a checkpoint's metadata was written, in nanoseconds since 1970, 0 if
    another process has deleted it.
    """
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def read_info(path: str | Path) -> CheckpointInfo:
    """Reads the metadata and the training state of a checkpoint.

    Files with rows are not read.

    Raises:
        FileNotFoundError: There is no checkpoint at ``path``.
        CheckpointError: The metadata is damaged or inconsistent, or has a format that
            this version does not know.
    """
    # The path of a base is relative to the directory itself, not to a link.
    path = Path(os.path.realpath(path))
    file = path / METADATA
    if not file.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}: {_reason(path)}")
    text = file.read_bytes()
    try:
        document = json.loads(text)
        version = document["version"]
        if document["format"] != FORMAT:
            raise ValueError(f"it is of the format {document['format']!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} is damaged: it is no {FORMAT}'s metadata"
        ) from error
    if version != VERSION:
        raise CheckpointError(
            not_known(f"{file} is of version {version} of the format {FORMAT!r}")
        )
    checksum = _checksum(text)
    if checksum is None:
        raise CheckpointError(f"{file} is damaged: its checksum does not fit")
    try:
        info = _info(path, document, checksum)
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    _check_info(info)
    return info


def _checksum(text: bytes) -> str | None:
    """Returns the checksum at the end of the metadata; None if it does not fit."""
    saved = _CHECKSUM.search(text)
    if saved is None:
        return None
    begin, end = saved.span(1)
    hashed_text = text[:begin] + _NO_CHECKSUM + text[end:]
    checksum = xxhash.xxh3_128_hexdigest(hashed_text)
    return checksum if saved[1].decode() == checksum else None


def _info(
    path: Path,
    document: dict[str, Any],
    checksum: str,
) -> CheckpointInfo:
    check_fields("it", document, _DOCUMENT)
    _integers("step and world_size", (document["step"], document["world_size"]))
    # Every other name of a file in the metadata is one of these, see _check_info().
    files: dict[str, FileInfo] = {}
    for name, entry in document["files"].items():
        files[FileName(name)] = _entry(f"the file {name}", FileInfo, entry)
    state_tensors = {}
    if TRAINING_STATE in files:
        state_tensors = read_tensors(path / TRAINING_STATE, files[TRAINING_STATE])
    tables = {}
    for name, entry in document["tables"].items():
        tables[name] = _table(name, entry)
    delta_of = None
    if document["delta_of"] is not None:
        delta_of = _entry("delta_of", DeltaOf, document["delta_of"])
    return CheckpointInfo(
        path=path,
        step=document["step"],
        world_size=document["world_size"],
        tables=tables,
        files=files,
        dense=tuple(document["dense"]),
        delta_of=delta_of,
        training_state=decode(document["training_state"], state_tensors),
        checksum=checksum,
    )


def read_chain(path: str | Path) -> list[CheckpointInfo]:
    """Reads the metadata of a full checkpoint and of its deltas up to ``path``.

    Raises FileNotFoundError if a base is missing, CheckpointError if it was replaced,
    and those of :func:`read_info`.
    """
    info = read_info(path)
    chain = [info]
    while info.delta_of is not None:
        assert info.base is not None
        try:
            base = read_info(info.base)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{info.path} is a delta of {info.base}, which is not there: {error}"
            ) from None
        if base.checksum != info.delta_of.checksum:
            raise CheckpointError(
                f"{info.path} is a delta of another checkpoint than the one that is"
                f" now at {info.base}"
            )
        chain.insert(0, base)
        info = base
    return chain


def _table(name: str, entry: dict[str, Any]) -> TableInfo:
    label = f"table {name!r}"
    check_fields(label, entry, TableInfo)
    options = _of_type(
        TableOptions,
        f"the options of {label}",
        entry["options"],
    )
    if options.cold_store is not None:
        # A table with these options would open files at the path of the cold store, and
        # delete old ones.
        raise ValueError(
            f"the options of {label} name the cold store {options.cold_store!r}, which"
            " checkpoints never have: the file was not written by this package"
        )
    optimizer = _of_type(
        Optimizer,
        f"the optimizer of {label}",
        entry["optimizer"],
    )
    times = None
    if entry["times"] is not None:
        times = _integers(f"the times of {label}", entry["times"])
    values = {
        "optimizer": optimizer,
        "options": options,
        "columns": tuple(_columns(label, columns) for columns in entry["columns"]),
        "parts": tuple(_part(label, part) for part in entry["parts"]),
        "removed": tuple(_part(label, part) for part in entry["removed"]),
        "sightings": tuple(entry["sightings"]),
        "times": times,
    }
    _check_plain(label, TableInfo, entry)
    return TableInfo(**{**entry, **values})


def _of_type(
    kind: type[_Entry],
    label: str,
    encoded: Any,
) -> _Entry:
    """Returns a value that :func:`encode` has converted.

    Raises:
        ValueError: The value is of another type.
    """
    value = decode(encoded, {})
    if not isinstance(value, kind):
        raise ValueError(f"{label} must be of the type {kind.__name__}, got {value!r}")
    return value


def _part(table: str, entry: dict[str, Any]) -> PartInfo:
    columns = _columns(table, entry["columns"])
    return _entry(
        f"a part of {table}",
        PartInfo,
        {**entry, "columns": columns},
    )


def _entry(
    label: str,
    kind: type[_Entry],
    entry: dict[str, Any],
) -> _Entry:
    check_fields(label, entry, kind)
    _check_plain(label, kind, entry)
    return kind(**entry)


def _check_plain(
    label: str,
    kind: Any,
    values: Mapping[str, Any],
) -> None:
    """Checks the values of fields that are annotated as int or str.

    Raises:
        ValueError: A value is of another type.
    """
    for checked_field in fields(kind):
        if checked_field.type not in _PLAIN_TYPES:
            continue
        value = values[checked_field.name]
        if type(value) is not _PLAIN_TYPES[checked_field.type]:
            raise ValueError(
                f"the {checked_field.name!r} of {label} must be of the type"
                f" {checked_field.type}, got {value!r}"
            )


def _integers(label: str, values: Iterable[Any]) -> tuple[int, ...]:
    """Returns a list of numbers as a tuple.

    Raises:
        ValueError: A value is no int.
    """
    numbers = tuple(values)
    for number in numbers:
        if type(number) is not int:
            raise ValueError(f"{label} must be of the type int, got {number!r}")
    return numbers


def _columns(label: str, values: Iterable[Any]) -> tuple[int, int]:
    begin, end = _integers(f"the columns of {label}", values)
    return begin, end


def _check_info(info: CheckpointInfo) -> None:
    """Checks that the metadata of the files, of the tables and of the parts agree."""
    # How often the metadata names each file.
    counts: Counter[str] = Counter()
    if info.dense:
        counts[DENSE] += 1
    if TRAINING_STATE in info.files:
        counts[TRAINING_STATE] += 1
    for table in info.tables.values():
        for part in (*table.parts, *table.removed):
            counts[part.file] += 1
        counts.update(table.sightings)
    for file, count in counts.items():
        if file not in info.files:
            raise CheckpointError(
                f"{info.path} has no checksum of {file}, which belongs to it"
            )
        if count > 1:
            raise CheckpointError(f"{info.path} lists the file {file} {count} times")
    for file in info.files:
        if file not in counts:
            raise CheckpointError(
                f"{info.path} has the file {file}, which belongs to no table: a part is"
                " not listed"
            )
    for name, table in info.tables.items():
        _check_table(f"{info.path}: table {name!r}", info, table)


def _check_table(
    table_name: str,
    info: CheckpointInfo,
    table: TableInfo,
) -> None:
    if table.dtype not in DTYPES:
        raise CheckpointError(
            f"{table_name} has weights of an unknown data type {table.dtype!r}"
        )
    _check_columns(table_name, table)
    first_columns = table.columns[0]
    _check_parts(table_name, table.parts, table.columns, info.world_size)
    _check_parts(
        table_name,
        table.removed,
        [first_columns],
        info.world_size,
    )
    _check_blocks(table_name, table)
    rows = 0
    for part in table.parts:
        if part.columns == first_columns:
            rows += part.rows
    # A delta lacks the rows of its base that have not changed.
    is_complete = rows == table.rows
    if rows > table.rows or (info.delta_of is None and not is_complete):
        raise CheckpointError(
            f"{table_name} has {table.rows} rows, and its parts have {rows}"
        )
    listed = sum(part.rows for part in table.removed)
    if info.delta_of is None and listed:
        raise CheckpointError(
            f"{table_name} lists ids that left, and the checkpoint is no delta"
        )
    if info.delta_of is not None and table.removal == "stay" and listed != table.rows:
        raise CheckpointError(
            f"{table_name} has {table.rows} rows, and its files list {listed} ids that"
            " stay"
        )


def _check_blocks(table_name: str, table: TableInfo) -> None:
    """Refuses a block of rows for which a column shard has no part."""
    # How many parts each column shard has of each block.
    part_counts: Counter[tuple[object, object]] = Counter()
    for part in table.parts:
        part_counts[part.columns, part.block] += 1
    first_columns = table.columns[0]
    for columns in table.columns:
        for part in table.parts:
            count = part_counts[columns, part.block]
            if count != part_counts[first_columns, part.block]:
                raise CheckpointError(
                    f"{table_name} has no part of the columns {columns} for the rows of"
                    f" {part.file}"
                )


def _check_columns(table_name: str, table: TableInfo) -> None:
    """Refuses column shards that do not cover all columns one after the other."""
    next_column = 0
    is_covered = bool(table.columns)
    for begin, end in table.columns:
        is_covered = is_covered and begin == next_column and end > begin
        next_column = end
    if not is_covered or next_column != table.dim:
        raise CheckpointError(
            f"{table_name} has dim {table.dim}, and column shards {list(table.columns)}"
        )


def _check_parts(
    table_name: str,
    parts: Sequence[PartInfo],
    shard_columns: Sequence[tuple[int, int]],
    world_size: int,
) -> None:
    """Refuses parts of unknown shards, and two parts with ids in the same range.

    The two parts are of the same shard.
    """
    for part in parts:
        if part.columns not in shard_columns or not 0 <= part.rank < world_size:
            raise CheckpointError(
                f"{table_name} has no shard of rank {part.rank} and columns"
                f" {part.columns}: {part.file}"
            )
        most_rows = part.last_id - part.first_id + 1
        if not 1 <= part.rows <= most_rows:
            raise CheckpointError(
                f"{table_name}: {part.file} cannot have {part.rows} ids in its range"
            )
    in_order = sorted(parts, key=lambda part: (part.rank, part.columns, part.block))
    for part, following in pairwise(in_order):
        is_same_shard = (
            part.rank == following.rank and part.columns == following.columns
        )
        if is_same_shard and following.first_id <= part.last_id:
            raise CheckpointError(
                f"{table_name}: {part.file} and {following.file} have ids in the same"
                " range"
            )
