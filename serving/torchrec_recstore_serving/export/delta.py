"""Writes and reads deltas of exports.

A delta is a small file with the changes since an export. A served model applies it
while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from torchrec_recstore.checkpoint.files import whole_file
from torchrec_recstore.store.arguments import among
from torchrec_recstore_serving.export.changed_rows import ChangedRows
from torchrec_recstore_serving.export.model_table import ModelTable
from torchrec_recstore_serving.export.opening import is_hashed
from torchrec_recstore_serving.export.row_formats import packed
from torchrec_recstore_serving.export.scriptable_modules import (
    dense_tensors,
    served_tables,
    tensor_at,
    version_of,
)
from torchrec_recstore_serving.export.signing import Key, key_at
from torchrec_recstore_serving.export.sorted_tables import ServedTable
from torchrec_recstore_serving.export.tables_on_servers import served_on_servers
from torchrec_recstore_serving.export.verification import (
    FORMAT,
    check_file,
    checksum_of,
    delta_metadata,
    kind_of,
    scripted_function,
    sign,
)

# Attributes of served modules that each publication has anew.
_OF_PUBLICATIONS = ("training", "version", "attributes")


@dataclass(frozen=True)
class DeltaTable:
    """The changes of one table in a delta.

    Args:
        rows: The number of rows that are new or have changed in the exported data type.
        removed: The number of ids that no longer have a row.
    """

    rows: int
    removed: int


@dataclass(frozen=True)
class DeltaInfo:
    """A description of a delta.

    Args:
        path: The delta's file.
        bytes: The size of the file in bytes.
        base: The version of the served model to which the delta can be applied.
        version: The version of the served model after the delta is applied.
        tables: The changes of the tables by name.
        dense: The names of the other tensors that have changed.
    """

    path: Path
    bytes: int
    base: str
    version: str
    tables: Mapping[str, DeltaTable]
    dense: tuple[str, ...]


def read_delta(path: str | Path, *, key: str | Path | None = None) -> dict[str, Tensor]:
    """Reads the tensors of a delta, the argument of a served model's ``apply_delta``.

    ``safetensors.torch.load_file`` returns the same tensors. ``apply_delta`` checks the
    delta's checksum.

    Args:
        path: The delta's file.
        key: The file of the key with which the delta must have been signed. Default:
            None, the signature is not checked.

    Raises:
        OSError, SafetensorError: The file is missing or damaged, or the key cannot be
            read.
        ValueError: The file is no delta, or it is of another format; or with ``key``,
            see :func:`verify`.
    """
    if key is not None:
        return checked_delta(Path(path), str(path), key_at(key))
    kind_of(path)
    tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    return tensors


def checked_delta(
    path: Path,
    name: str,
    key: Key | None,
    on_block: Callable[[], object] = lambda: None,
) -> dict[str, Tensor]:
    """Reads a delta into memory, checks the bytes, and returns their tensors.

    See check_file for the errors.
    """
    data = path.read_bytes()
    check_file(BytesIO(data), name, key, on_block)
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(data)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        # safetensors 0.8 panics where it has no memory for a copy, and a panic is no
        # Exception.
        raise MemoryError(f"{name}: out of memory for its tensors") from None
    return tensors


def _check_same_on_servers(in_model: Set[str], in_base: Set[str]) -> None:
    """Raises ValueError if a table is on servers in one of two exports only."""
    for name in sorted(in_model ^ in_base):
        raise ValueError(
            f"table {name!r} is on servers only in"
            f" {'the model' if name in in_model else 'base'}: export anew"
        )


def write_delta(
    served: nn.Module,
    base: torch.jit.ScriptModule,
    path: Path,
    changes: Mapping[str, ChangedRows] | None = None,
    key: Key | None = None,
) -> DeltaInfo:
    """Writes the differences between two served models into a file.

    Args:
        served: The model as it is now, in the row format of ``base``.
        base: The earlier export.
        path: The file. It is written completely or not at all.
        changes: The rows that have changed, by the path of the table in ``served``,
            whose RecStore tables are empty. Default: None, all rows of ``served`` are
            compared with those of ``base``.
        key: The key with which the file is signed. Default: None, no signature.

    Returns:
        A description of the delta.

    Raises:
        ValueError: The two are exports of different models. The message names the
            difference.
        OSError: The file cannot be written.
    """
    tables: dict[str, ModelTable] = {}
    paths: dict[str, str] = {}
    for table_path, table in served_tables(served):
        tables[table.name] = table
        paths[table.name] = table_path
    if sorted(tables) != sorted(base.recstore_tables()):
        raise ValueError(
            f"the model has the tables {sorted(tables)}, base has"
            f" {sorted(base.recstore_tables())}"
        )
    check_attributes(served, base)
    on_servers = served_on_servers(served)
    _check_same_on_servers(on_servers.keys(), served_on_servers(base).keys())
    tensors: dict[str, Tensor] = {}
    changed_tables: dict[str, DeltaTable] = {}
    for name, table in tables.items():
        if name in on_servers:  # the servers have the changes
            continue
        assert isinstance(table, ServedTable)
        if changes is not None and table.has_ids:
            change = _known_change(table, changes[paths[name]], base)
        else:
            change = _change(table, base)
        if len(change.ids) or len(change.removed):
            tensors[f"{name}/ids"] = change.ids
            tensors[f"{name}/rows"] = change.rows
            tensors[f"{name}/removed"] = change.removed
        changed_tables[name] = DeltaTable(len(change.ids), len(change.removed))
    dense = _changed_dense_tensors(served, base)
    for name, tensor in dense.items():
        tensors[f"dense/{name}"] = tensor
    base_version = base.recstore_version()
    version = _version_after(tensors, served, base)
    write_tensors(
        tensors,
        base=base_version,
        version=version,
        path=path,
        key=key,
    )
    return DeltaInfo(
        path=path,
        bytes=path.stat().st_size,
        base=base_version,
        version=version,
        tables=changed_tables,
        dense=tuple(dense),
    )


def _version_after(
    delta: dict[str, Tensor],
    served: nn.Module,
    base: torch.jit.ScriptModule,
) -> str:
    """Returns the version of a model after a delta from ``base`` to it.

    A model with a hash index computes it from the changed rows only.
    """
    if is_hashed(base):
        return str(base.recstore_version_after(delta))
    return version_of(served, base)


def _changed_dense_tensors(
    served: nn.Module,
    base: torch.jit.ScriptModule,
) -> dict[str, Tensor]:
    """Returns the tensors outside the tables that differ from ``base``, by name."""
    changed: dict[str, Tensor] = {}
    for name, tensor in dense_tensors(served, every_path=is_hashed(base)).items():
        old = tensor_at(base, name)
        if old is None or _same_bits(tensor, old):
            continue
        if (tensor.shape, tensor.dtype) != (old.shape, old.dtype):
            raise ValueError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, "
                f"and {old.dtype} of shape {tuple(old.shape)} in base"
            )
        # safetensors accepts no tensors that share memory, as a tensor with several
        # names does.
        changed[name] = tensor.clone(memory_format=torch.contiguous_format)
    return changed


def check_attributes(served: nn.Module, base: torch.jit.ScriptModule) -> None:
    """Refuses attributes that differ from those of ``base``.

    A delta cannot change numbers, strings and lists, and the outputs may depend on
    them.
    """
    base_modules = dict(base.named_modules())
    for path, module in served.named_modules():
        for name, value in vars(module).items():
            if name in _OF_PUBLICATIONS or not _is_plain(value):
                continue
            old_value = getattr(base_modules.get(path), name, None)
            is_comparable = isinstance(old_value, int | float | str | list)
            if is_comparable and repr(old_value) != repr(value):
                full_name = f"{path}.{name}" if path else name
                raise ValueError(
                    f"{full_name} is {value!r}, and {old_value!r} in base: export the"
                    " model anew, without a delta"
                )


def _is_plain(value: object) -> bool:
    """Returns whether a value is a number, a string or a list.

    A list of tensors, such as the weights of a recurrent layer, is not: these are dense
    tensors.
    """
    if isinstance(value, list):
        return not any(isinstance(part, Tensor) for part in value)
    return isinstance(value, int | float | str)


@dataclass(frozen=True)
class _Change:
    """The change of one table.

    Args:
        ids: (N,) int64. The ids of the rows that are new or have changed.
        rows: (N, ...). These rows in the row format.
        removed: (M,) int64. The ids that no longer have a row.
    """

    ids: Tensor
    rows: Tensor
    removed: Tensor


def _change(table: ServedTable, base: torch.jit.ScriptModule) -> _Change:
    """Compares all rows of a table with those of ``base``."""
    old_ids: Tensor = base.recstore_ids(table.name)
    old_rows: Tensor = base.recstore_rows(table.name)
    rows = table.rows
    if rows.shape[1] != old_rows.shape[1] or rows.dtype != old_rows.dtype:
        raise ValueError(f"table {table.name!r} has another dim or data type in base")
    if not table.has_ids:
        if len(old_ids) or rows.shape != old_rows.shape:
            raise ValueError(
                f"table {table.name!r} is one of TorchRec's own tables, and a different"
                " table in base"
            )
        differs = _differ(rows, old_rows)
        changed = differs.nonzero().squeeze(1)
        no_ids = torch.empty(0, dtype=torch.int64)
        return _Change(changed, rows[changed], no_ids)

    _check_missing_row(table, old_rows[:1])
    rows = rows[1:]
    old_rows = old_rows[1:]
    ids = table.raw_ids()
    in_base = among(ids, old_ids)
    old_positions = torch.searchsorted(old_ids, ids[in_base])
    is_changed = torch.ones_like(in_base)
    is_changed[in_base] = _differ(rows[in_base], old_rows[old_positions])
    positions = is_changed.nonzero().squeeze(1)
    stays = among(old_ids, ids)
    return _Change(ids[positions], rows[positions], old_ids[~stays])


def _known_change(
    table: ServedTable,
    changed: ChangedRows,
    base: torch.jit.ScriptModule,
) -> _Change:
    """Compares the rows that may have changed with those of ``base``.

    It reads no other rows of ``base``.
    """
    rows_of_ids = base.recstore_rows_of(table.name, changed.ids)
    if not rows_of_ids:
        raise ValueError(
            f"table {table.name!r} is a RecStore table, and one of TorchRec's own"
            " tables in base"
        )
    # The same for each path of a table that the model has at several paths.
    old_rows, in_base, old_missing = rows_of_ids[:3]
    rows = changed.rows
    if rows.dtype == torch.float32:  # The training thread does not wait for this.
        rows = packed(table.name, rows, base.recstore_row_format())
    if rows.shape != old_rows.shape or rows.dtype != old_rows.dtype:
        raise ValueError(f"table {table.name!r} has another dim or data type in base")
    _check_missing_row(table, old_missing)
    is_changed = ~in_base | _differ(rows, old_rows)
    positions = is_changed.nonzero().squeeze(1)
    rows_of_left_ids = base.recstore_rows_of(table.name, changed.left_ids)
    left_in_base = rows_of_left_ids[1]
    return _Change(
        changed.ids[positions],
        rows[positions],
        changed.left_ids[left_in_base],
    )


def _check_missing_row(table: ServedTable, old_missing: Tensor) -> None:
    """Refuses a table that has another row for ids without a row than ``base``.

    A delta cannot change this row.
    """
    if bool(_differ(table.rows[:1], old_missing)):
        raise ValueError(
            f"table {table.name!r}: ids without a row read as other values in base"
        )


def _differ(rows: Tensor, old_rows: Tensor) -> Tensor:
    """Returns whether each row differs in any bit: (N,) bool."""
    if rows.dtype == torch.float32:
        rows = rows.contiguous().view(torch.int32)
        old_rows = old_rows.contiguous().view(torch.int32)
    return (rows != old_rows).any(1)


def _same_bits(tensor: Tensor, other: Tensor) -> bool:
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    return torch.equal(_bytes_of(tensor), _bytes_of(other))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def write_tensors(
    tensors: Mapping[str, Tensor],
    base: str,
    version: str,
    path: Path,
    key: Key | None,
) -> None:
    """Writes the file of a delta, completely or not at all.

    Raises:
        OSError: The file cannot be written.
    """
    tensors = {**tensors, "format": torch.tensor([FORMAT])}
    for name, text in (("base", base), ("version", version)):
        characters = list(text.encode())
        tensors[name] = torch.tensor(characters, dtype=torch.uint8)
    tensors["checksum"] = scripted_function(checksum_of)(tensors)
    try:
        with whole_file(path) as beside:
            safetensors.torch.save_file(tensors, beside, metadata=delta_metadata(key))
            sign(beside, key)
    except (
        OSError,
        SafetensorError,
    ) as error:  # safetensors raises SafetensorError in the place of an OSError.
        raise OSError(
            f"{path} cannot be written: {getattr(error, 'strerror', None) or error}"
        ) from error
