"""Exports the tables of a checkpoint to a TorchScript file.

It needs neither a model nor a table in memory.

Tests: tests/serving/export/test_delta.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchrec_recstore.checkpoint.files import check_path
from torchrec_recstore.checkpoint.fold import FoldedTable, check_files
from torchrec_recstore.checkpoint.info import CheckpointInfo, TableInfo, read_chain
from torchrec_recstore.options import default_initializer
from torchrec_recstore.store import Part, Parts
from torchrec_recstore_serving.export.delta import DeltaInfo, write_delta
from torchrec_recstore_serving.export.hashed_tables import (
    check_index,
    hashed,
    mapped_tables,
)
from torchrec_recstore_serving.export.model_table import ModelTable
from torchrec_recstore_serving.export.opening import dtype_of, open_base
from torchrec_recstore_serving.export.row_formats import check_dim, check_dtype, packed
from torchrec_recstore_serving.export.selection import (
    Selection,
    aged,
    is_untrained,
    missing_row,
    warn_if_untrained,
    warn_of_initial_rows,
    warn_unless_finite,
)
from torchrec_recstore_serving.export.signing import key_at
from torchrec_recstore_serving.export.sorted_tables import (
    ServedTable,
    ServedTables,
    served_table,
)
from torchrec_recstore_serving.export.torchscript import save_script, scripted


@dataclass(frozen=True)
class ExportedTable:
    """A description of a table in an exported file.

    Args:
        rows: The number of exported rows.
        rows_left_out: The number of the checkpoint's rows that are not exported.
        dim: The number of columns.
        dtype: The data type of the exported rows.
        bytes: The size of the ids and rows in bytes.
    """

    rows: int
    rows_left_out: int
    dim: int
    dtype: torch.dtype
    bytes: int


@dataclass(frozen=True)
class ExportInfo:
    """A description of an exported file.

    Args:
        path: The file.
        bytes: The size of the file in bytes.
        tables: The tables by name, in the order of the module's input and output.
        version: The version of the module, which its method ``recstore_version``
            returns.
    """

    path: Path
    bytes: int
    tables: Mapping[str, ExportedTable]
    version: str


def export_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    *,
    tables: Sequence[str] | None = None,
    dtype: torch.dtype = torch.int8,
    min_frequency: int = 0,
    top_rows: int | None = None,
    index: str = "sorted",
    rows: str = "memory",
    key: str | Path | None = None,
    advance: Callable[[int], object] = lambda rows: None,
) -> ExportInfo:
    """Writes the tables of a checkpoint into a file as one scripted module.

    The module's ``forward(values, lengths)`` returns sums over bags of raw ids, and
    ``lookup(table, values)`` returns rows, with plain tensors as arguments and results;
    see :class:`torchrec_recstore_serving.export.sorted_tables.ServedTables`. The module needs
    neither this package nor TorchRec. With float32 rows it needs only torch, and with
    other rows also ``fbgemm_gpu``.

    Args:
        checkpoint: The directory of a full checkpoint or of a delta. The chain of a
            delta is folded.
        output: The file. An existing file is replaced when the new file is complete.
        tables: The names of the tables to export, in the order of the module's input
            and output. Default: None, all tables in the order of their names.
        dtype: The data type of the exported rows; see
            :func:`torchrec_recstore.inference.export_for_inference`. Default:
            ``torch.int8``.
        min_frequency: The minimum frequency of an exported row; see
            :func:`torchrec_recstore.inference.export_for_inference`. Default: 0, all
            rows.
        top_rows: The maximum number of exported rows of each table; see
            :func:`torchrec_recstore.inference.export_for_inference`. Default: None, no
            limit.
        index: How the module searches ids; see
            :func:`torchrec_recstore.inference.export_for_inference`. With ``"hash"``,
            the module needs the native library and no FBGEMM. Default: ``"sorted"``.
        rows: Where a process has the rows that it serves, ``"memory"`` or ``"mapped"``;
            see :func:`torchrec_recstore.inference.export_for_inference`. Default:
            ``"memory"``.
        key: The file of the secret key with which the file is signed. Default: None, no
            signature.
        advance: A callback that is called with the number of rows read since the last
            call. With ``min_frequency`` or ``top_rows``, all rows are read twice.

    Returns:
        A description of the file.

    Raises:
        FileNotFoundError, CheckpointError: A checkpoint of the chain is missing or
            damaged.
        TypeError, ValueError: An argument is invalid, or the checkpoint does not have
            one of ``tables``.
        OSError: The file cannot be written.

    Warns:
        RecStoreWarning: See :func:`torchrec_recstore.inference.export_for_inference`.
    """
    output = Path(output)
    check_path(output)
    check_index(index, rows)
    if rows == "servers":
        raise ValueError(
            'rows="servers" is for a model whose tables are on servers, and a'
            " checkpoint has its own rows"
        )
    signing = key_at(key)
    served, left_out = _served(
        checkpoint,
        tables,
        dtype,
        min_frequency,
        top_rows,
        advance,
    )
    if index == "hash":
        hashed(served)
    script = scripted(served)
    save_script(script, output, signing, mapped_tables(served, rows))
    infos: dict[str, ExportedTable] = {}
    for table in served.tables:
        assert isinstance(table, ModelTable)
        infos[table.name] = ExportedTable(
            rows=table.row_count(),
            rows_left_out=left_out[table.name],
            dim=table.dim,
            dtype=dtype,
            bytes=table.size_bytes(),
        )
    return ExportInfo(
        path=output,
        bytes=output.stat().st_size,
        tables=infos,
        version=script.recstore_version(),
    )


def export_checkpoint_delta(
    checkpoint: str | Path,
    output: str | Path,
    *,
    base: str | Path | torch.jit.ScriptModule,
    min_frequency: int = 0,
    top_rows: int | None = None,
    key: str | Path | None = None,
    advance: Callable[[int], object] = lambda rows: None,
) -> DeltaInfo:
    """Writes a delta from an earlier export to a checkpoint's tables into a file.

    The exported module's method ``apply_delta`` applies the delta.

    Args:
        checkpoint: The checkpoint's directory; see :func:`export_checkpoint`.
        output: The delta's file, in the format of safetensors.
        base: The file that :func:`export_checkpoint` has written, or the module that
            ``torch.jit.load`` has loaded from it.
        min_frequency: The value with which ``base`` was exported. Default: 0.
        top_rows: The value with which ``base`` was exported. Default: None.
        key: The file of the secret key; see
            :func:`torchrec_recstore.inference.export_delta`. Default: None.
        advance: A callback that is called with the number of rows read since the last
            call.

    Returns:
        A description of the delta.

    Raises:
        FileNotFoundError, CheckpointError, TypeError, ValueError, OSError: See
            :func:`export_checkpoint`; or ``base`` has other tables.
    """
    signing = key_at(key)
    base = open_base(base, signing)
    output = Path(output)
    check_path(output)
    names = base.recstore_tables()
    served, _ = _served(
        checkpoint,
        names,
        dtype_of(base),
        min_frequency,
        top_rows,
        advance,
    )
    return write_delta(served, base, output, key=signing)


def _served(
    checkpoint: str | Path,
    tables: Sequence[str] | None,
    dtype: torch.dtype,
    min_frequency: int,
    top_rows: int | None,
    advance: Callable[[int], object],
) -> tuple[ServedTables, dict[str, int]]:
    """Returns the served tables of a checkpoint.

    Also returns the number of rows of each table that are left out.
    """
    row_format = check_dtype(dtype)
    selection = Selection(min_frequency, top_rows)
    chain = read_chain(checkpoint)
    infos = chain[-1].tables
    names = sorted(infos) if tables is None else list(tables)
    _check_names(names, chain[-1])
    for name in names:
        info = infos[name]
        check_dim(name, info.dim, row_format)
        selection.check_counts(name, info.options)
        selection.check_counted(name, info.rows, info.steps)
    check_files(chain)

    served: list[ServedTable] = []
    left_out: dict[str, int] = {}
    with_initial_rows: list[str] = []
    untrained: dict[str, bool] = {}
    for name in names:
        info = infos[name]
        missing, exact = missing_row(
            initializer=default_initializer(info.options),
            options=info.options,
            dim=info.dim,
            dtype=getattr(torch, info.dtype),
        )
        if not exact:
            with_initial_rows.append(name)
        untrained[name] = is_untrained(info.rows, info.steps, info.optimizer_steps)
        ids, rows = _rows(chain, name, missing, row_format, selection, advance)
        served.append(served_table(name, info.dim, row_format, ids, rows))
        left_out[name] = info.rows - len(ids)

    warn_of_initial_rows(with_initial_rows)
    warn_if_untrained(untrained)
    module = ServedTables(served)
    warn_unless_finite(module)
    return module, left_out


def _check_names(names: Sequence[str], info: CheckpointInfo) -> None:
    """Raises ValueError unless the names are those of different tables of a
    checkpoint.
    """
    unknown = [name for name in names if name not in info.tables]
    if unknown or not names or len(set(names)) != len(names):
        known_tables = ", ".join(map(repr, sorted(info.tables)))
        given_tables = ", ".join(map(repr, names))
        raise ValueError(
            f"tables must be different tables of {info.path}, which has"
            f" {known_tables or 'none'}, got {given_tables or 'none'}"
        )


def _rows(
    chain: Sequence[CheckpointInfo],
    name: str,
    missing: Tensor,
    row_format: str,
    selection: Selection,
    advance: Callable[[int], object],
) -> tuple[Tensor, Tensor]:
    """Returns a table's ids, and its rows in the row format.

    The rows begin with a row for ids without a row.

    A selection by frequency reads the rows twice: first the frequencies, then the
    selected rows.
    """
    info = chain[-1].tables[name]
    is_selected: Tensor | None = None
    count = info.rows
    if not selection.is_everything:
        frequencies = [torch.empty(0, dtype=torch.int64)]
        for part in _parts(chain, name, advance):
            frequencies.append(_frequency(part, info))
        frequency = torch.cat(frequencies)
        positions = selection.positions(frequency)
        is_selected = torch.zeros(len(frequency), dtype=torch.bool)
        is_selected[positions] = True
        count = len(positions)

    ids = torch.empty(count, dtype=torch.int64)
    first = packed(name, missing[None], row_format)
    rows = first.new_empty(count + 1, first.shape[1])
    rows[:1] = first
    rows_of_ids = rows[1:]

    read_begin = 0
    begin = 0
    for part in _parts(chain, name, advance):
        if is_selected is not None:
            read_end = read_begin + len(part)
            is_selected_in_part = is_selected[read_begin:read_end]
            read_begin = read_end
            part = part.take(is_selected_in_part)
        end = begin + len(part)
        ids[begin:end] = part.ids
        rows_of_ids[begin:end] = packed(name, part.weights, row_format)
        begin = end
    return ids, rows


def _parts(
    chain: Sequence[CheckpointInfo],
    name: str,
    advance: Callable[[int], object],
) -> Parts:
    """Yields the rows of a table part by part, each with all columns."""
    columns = range(chain[-1].tables[name].dim)
    for shards in FoldedTable(chain, name):
        if shards and len(shards[0]):
            yield Part.joined(shards, columns)
            advance(len(shards[0]))


def _frequency(part: Part, info: TableInfo) -> Tensor:
    return aged(
        frequency=part.rows["frequency"],
        last_step=part.rows["last_step"],
        steps=info.steps,
        options=info.options,
    )
