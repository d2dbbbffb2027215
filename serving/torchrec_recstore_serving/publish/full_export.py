"""Writes and reads published full exports.

A full export is a program without rows, and a file of safetensors with its rows and
dense tensors.

The second file is a delta that leads from the program to the model. So the program
alone is unpickled.

Tests: tests/serving/publish/test_publisher.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from torchrec_recstore_serving.export.delta import write_tensors
from torchrec_recstore_serving.export.opening import load_export
from torchrec_recstore_serving.export.row_formats import TYPE_NUMBERS
from torchrec_recstore_serving.export.signing import Key
from torchrec_recstore_serving.export.tables_on_servers import served_on_servers
from torchrec_recstore_serving.export.torchscript import save_script
from torchrec_recstore_serving.publish.program import (
    dense_tensor,
    script_tables,
    script_version,
)


def write_full(
    script: torch.jit.ScriptModule,
    dense: Sequence[str],
    program: Path,
    full: Path,
    key: Key | None,
    mapped: Sequence[Any],
) -> None:
    """Writes a full export, each file completely or not at all.

    Args:
        script: The served model.
        dense: The names of all of its tensors outside the tables.
        program: The file of the program, a served model without rows, whose dense
            tensors are zeros.
        full: The file of the rows and the dense tensors.
        key: The key with which both files are signed. None: no signature.
        mapped: The tables whose rows a process maps. They are in the file of the
            program, beside its code.

    Raises:
        OSError: A file cannot be written.
    """
    names_with_rows = {table.name for table in mapped} | set(served_on_servers(script))
    empty = copy.deepcopy(script)
    empty_tables = dict(script_tables(empty))
    tensors: dict[str, Tensor] = {}
    for path, table in script_tables(script):
        empty_table = empty_tables[path]
        if table.name in names_with_rows:
            if hasattr(table, "native"):  # The rows are written apart from this object.
                empty_table.native = table.native
            continue
        # the model may have a table at several paths
        if f"{table.name}/ids" not in tensors:
            ids, rows = _stored(table)
            tensors[f"{table.name}/ids"] = ids
            tensors[f"{table.name}/rows"] = rows
            tensors[f"{table.name}/removed"] = ids[:0]
        _empty(empty_table)
    for name in dense:
        tensors[f"dense/{name}"] = dense_tensor(script, name).clone(
            memory_format=torch.contiguous_format
        )
        dense_tensor(empty, name).zero_()
    version = script_version(empty, dense)
    for table in empty_tables.values():
        table.version = version
    save_script(empty, program, key, mapped)
    write_tensors(
        tensors,
        base=version,
        version=script.recstore_version(),
        path=full,
        key=key,
    )


def load_full(program: Path, full: Path) -> torch.jit.ScriptModule:
    """Loads a full export from two files whose bytes have been checked.

    Raises:
        ValueError, torch.jit.Error: The two do not belong together, or the program is
            no served model.
    """
    model = load_export(program)
    model.apply_delta(safetensors.torch.load_file(full))
    return model


def _stored(table: Any) -> tuple[Tensor, Tensor]:
    """Returns the ids of a table and their rows in the row format.

    In a table of TorchRec, row i is id i.
    """
    if hasattr(table, "native"):
        ids = table.native.ids()
        return ids, table.native.stored(ids)
    rows = table.stored_rows()
    if table.has_ids:
        return table.raw_ids(), rows[1:]
    return torch.arange(len(rows)), rows


def _empty(table: Any) -> None:
    """Removes the rows of a table.

    A table of TorchRec keeps their number, and has zeros that take no space.
    """
    if hasattr(table, "native"):
        table.native = torch.classes.recstore.ServedTable(
            TYPE_NUMBERS.get(table.row_format, 0),
            table.dim,
            torch.empty(0, dtype=torch.int64),
            table.row_like(),
        )
    elif table.has_ids:
        table.ids = table.ids[-1:].clone()
        table.rows = table.rows[:1].clone()
    else:
        zeros = torch.zeros_like(table.rows[:1])
        table.rows = zeros.expand(table.rows.shape)
