"""Exports a trained model as a static model that runs without this package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.checkpoint.files import check_path
from torchrec_recstore.sharders.collection import RecStoreCollection
from torchrec_recstore.sharders.gather import (
    all_gathered,
    refused_together,
    whole_environment,
)
from torchrec_recstore.store import Table
from torchrec_recstore_serving.export.changed_rows import (
    ChangedRows,
    changed_since,
    remember,
)
from torchrec_recstore_serving.export.conversion import (
    Conversion,
    dims_of,
    replaced_modules,
)
from torchrec_recstore_serving.export.delta import DeltaInfo, write_delta
from torchrec_recstore_serving.export.hashed_tables import check_index, mapped_tables
from torchrec_recstore_serving.export.opening import dtype_of, is_hashed, open_base
from torchrec_recstore_serving.export.row_formats import (
    FORMATS,
    check_dim,
    check_dtype,
)
from torchrec_recstore_serving.export.scriptable_modules import scriptable
from torchrec_recstore_serving.export.selection import (
    Selection,
    warn_if_untrained,
    warn_of_initial_rows,
    warn_unless_finite,
)
from torchrec_recstore_serving.export.signing import Key, key_at
from torchrec_recstore_serving.export.tables_on_servers import (
    served_on_servers,
    tables_on_servers,
)
from torchrec_recstore_serving.export.torchscript import save_script, scripted


def export_for_inference(
    model: nn.Module,
    path: str | Path | None = None,
    *,
    dtype: torch.dtype = torch.int8,
    min_frequency: int = 0,
    top_rows: int | None = None,
    index: str = "sorted",
    rows: str = "memory",
    key: str | Path | None = None,
) -> nn.Module:
    """Makes a model for inference from a trained model.

    The result runs without this package.

    The result has the same module tree, where each collection of tables is replaced by
    a static one: raw ids are searched in a sorted tensor of ids, and TorchRec's own
    module of that kind looks up the rows. An id without a row reads as zeros.
    TorchRec's own tables, sharded or not, are exported too, with their row numbers as
    ids. The given model does not change and can be trained further. The call is
    collective if the model is sharded.

    With float32 rows the outputs are bit-equal to those of the given model in
    evaluation mode. If the rows of a table are sharded over several ranks, the order of
    the sums may differ, and TorchRec's own tables may round differently.
    docs/serving.md gives the errors of the other data types.

    Args:
        model: ``DistributedModelParallel``, or any module that contains sharded modules
            or modules of :mod:`torchrec_recstore.modules`.
        path: The file for the scripted model, which ``torch.jit.load`` loads without
            this package. Rank 0 writes it completely or not at all. docs/serving.md
            describes how to serve and update it. Default: None, no file.
        dtype: The data type of the exported rows: ``torch.int8``, ``torch.quint4x2``
            (TorchRec's int4), ``torch.float16`` or ``torch.float32``. Default:
            ``torch.int8``.
        min_frequency: The minimum frequency of an exported row of a RecStore table. The
            frequency is the number of training steps that have looked up the row since
            its id was admitted, or of the occurrences of the id, as LFU eviction counts
            it: it is halved if the eviction policy has a half-life. Rows that were
            inserted and never trained have frequency 0. Tables with ``Scored()`` do not
            count, and are refused. Default: 0, all rows.
        top_rows: The maximum number of exported rows of each RecStore table. The rows
            of the highest frequency are exported, and among equal frequencies the
            smallest ids. Default: None, no limit.
        index: How the scripted model searches ids. ``"sorted"`` needs no library
            besides torch and FBGEMM. ``"hash"`` needs the library of
            :func:`torchrec_recstore.inference.load_library`; it searches many times as
            fast, a copy of the model shares the rows, and deltas take time for the
            changed rows only. docs/serving.md says when to take which. Default:
            ``"sorted"``.
        rows: Where a process has the rows of the RecStore tables that it serves.
            ``"memory"``: it reads them into its memory. ``"mapped"``, which needs
            ``index="hash"``: it maps them from the file, so that all processes of a
            host share them, and the model may be larger than the memory;
            docs/serving.md has the conditions. Default: ``"memory"``.
        key: The file of a secret key of at least 32 characters, with which the file at
            ``path`` is signed; docs/publishing.md says why. Default: None, no
            signature.

    Returns:
        The model in evaluation mode, on the CPU, on every rank.

    Raises:
        TypeError, ValueError: An argument is invalid; ``dtype`` does not support a
            table's dim, or with ``rows="servers"`` is not that of the rows; a table is
            on the meta device; a table is on servers, or with ``rows="servers"`` none
            is; ``min_frequency`` or ``top_rows`` is given and a table was never
            trained; a sharded module cannot be exported; the model has no tables; or
            with ``path``, TorchScript cannot compile a module. The message names the
            argument, the table or the module.
        ImportError: ``index`` is ``"hash"``, and the native library was built with a
            different version of torch.
        OSError: The file cannot be written.
        ColdStoreError: A cold store fails.
        ServiceError: With ``rows="servers"``, a server cannot be reached. All of these
            errors are raised on every rank.

    Warns:
        RecStoreWarning: A table reads ids without a row as random initial rows
        (``TableOptions.missing="init"``). The
            exported table reads them as zeros. Or float32 rows or dense tensors have
            NaN or infinity. Or no RecStore table was trained.
    """
    env = whole_environment()
    signing: Key | None = None
    with refused_together(env):
        check_index(index, rows)
        if rows == "mapped" and path is None:
            raise ValueError('rows="mapped" is about the file: pass path, too')
        if key is not None and path is None:
            raise ValueError("key signs a file: pass path, too")
        signing = key_at(key) if env.rank == 0 else None
    marks: dict[Table, int] = {}
    exported = read_model(model, dtype, min_frequency, top_rows, env, marks, path, rows)
    if path is None:
        return exported
    version = ""
    with refused_together(env):
        if env.rank == 0:
            served = scriptable(exported, index=index)
            script = scripted(served)
            save_script(script, Path(path), signing, mapped_tables(served, rows))
            version = script.recstore_version()
    if index == "hash" and not min_frequency and top_rows is None:
        remember(marks, all_gathered(version, env)[0])
    return exported


def read_model(
    model: nn.Module,
    dtype: torch.dtype,
    min_frequency: int,
    top_rows: int | None,
    env: ShardingEnv,
    marks: dict[Table, int],
    path: str | Path | None = None,
    rows: str = "memory",
) -> nn.Module:
    """Returns the static model, and adds the change mark of each shard to ``marks``.

    See export_for_inference.
    """
    with refused_together(env):
        row_format = check_dtype(dtype)
        selection = Selection(min_frequency, top_rows)
        if rows == "servers" and not selection.is_everything:
            raise ValueError(
                'min_frequency and top_rows select exported rows, and rows="servers"'
                " exports none"
            )
        if path is not None and env.rank == 0:
            check_path(Path(path))
        replaced = replaced_modules(model, rows)
        _check_copies(model)
        for name, dim in dims_of(replaced):
            check_dim(name, dim, row_format)
    on_servers = tables_on_servers(replaced, dtype, env) if rows == "servers" else {}
    conversion = Conversion(dtype, selection, marks, on_servers)
    exported = conversion.model(model, replaced, env)
    warn_of_initial_rows(conversion.initial_rows)
    warn_if_untrained(conversion.untrained)
    warn_unless_finite(exported)
    return exported


def _check_copies(model: nn.Module) -> None:
    """Checks that the tables of a model have not been copied with it."""
    for module in model.modules():
        if isinstance(module, RecStoreCollection):
            module.recstore_state.copies.check()


def export_delta(
    model: nn.Module,
    path: str | Path,
    *,
    base: str | Path | torch.jit.ScriptModule,
    min_frequency: int = 0,
    top_rows: int | None = None,
    key: str | Path | None = None,
) -> DeltaInfo:
    """Writes the differences between a model and an earlier export into a file.

    Collective if the model is sharded.

    The served model's method ``apply_delta`` applies the delta. Rows are compared in
    their exported form, so the delta is exact after training, after loading a
    checkpoint, and if ``top_rows`` selects other rows. The file contains only the
    differences.

    The call takes as long as an export and more memory. It reads only the rows that
    have changed if ``base`` is a model with ``index="hash"`` whose version this process
    has exported or made by a delta, if no rows are selected by frequency, and if the
    tables have not been loaded since and are not sharded by column.

    Args:
        model: The model; see :func:`export_for_inference`.
        path: The delta's file, in the format of safetensors. Rank 0 writes it
            completely or not at all.
        base: The file of the earlier export, which rank 0 reads, or the model that
            ``torch.jit.load`` has loaded from it. Deltas may have been applied to the
            loaded model.
        min_frequency: The value with which ``base`` was exported. Default: 0.
        top_rows: The value with which ``base`` was exported. Default: None.
        key: The file of the secret key with which the delta is signed. If ``base`` is a
            file, it must have been signed with the same key. Default: None, no
            signature.

    Returns:
        A description of the delta, on every rank.

    Raises:
        TypeError, ValueError, OSError, ColdStoreError: See
            :func:`export_for_inference`; or ``base`` is an export of a different model.
            All of these errors are raised on every rank.
    """
    env = whole_environment()
    signing: Key | None = None
    base_model: torch.jit.ScriptModule | None = None
    base_facts: _BaseFacts | None = None
    with refused_together(env):
        if env.rank == 0:
            check_path(Path(path))
            signing = key_at(key)
            base_model = open_base(base, signing)
            base_facts = _facts_of(base_model)
    base_facts = all_gathered(base_facts, env)[0]
    assert base_facts is not None
    dtype = base_facts.dtype
    rows = base_facts.rows
    chained = base_facts.hashed and not min_frequency and top_rows is None
    marks: dict[Table, int] = {}
    changes: Mapping[str, ChangedRows] | None = None
    if chained:
        version = base_facts.version
        exported, changes = read_changes(model, dtype, version, env, marks, rows)
    if changes is None:
        marks = {}
        exported = read_model(
            model,
            dtype,
            min_frequency,
            top_rows,
            env,
            marks,
            rows=rows,
        )
    info: DeltaInfo | None = None
    with refused_together(env):
        if base_model is not None:
            served = scriptable(exported)
            info = write_delta(served, base_model, Path(path), changes, signing)
    info = all_gathered(info, env)[0]
    assert info is not None
    if chained:
        remember(marks, info.version)
    return info


@dataclass(frozen=True)
class _BaseFacts:
    """What all ranks know of the earlier export, which rank 0 has opened.

    Args:
        dtype: The data type of the exported rows.
        hashed: Whether the model searches ids with a hash index.
        version: The version of the model.
        rows: ``"servers"`` if a table is on servers, otherwise ``"memory"``.
    """

    dtype: torch.dtype
    hashed: bool
    version: str
    rows: str


def _facts_of(base: torch.jit.ScriptModule) -> _BaseFacts:
    return _BaseFacts(
        dtype=dtype_of(base),
        hashed=is_hashed(base),
        version=base.recstore_version(),
        rows="servers" if served_on_servers(base) else "memory",
    )


def read_changes(
    model: nn.Module,
    dtype: torch.dtype,
    version: str,
    env: ShardingEnv,
    marks: dict[Table, int],
    rows: str = "memory",
) -> tuple[nn.Module, dict[str, ChangedRows] | None]:
    """Reads the rows of RecStore tables that have changed since a version.

    Returns:
        The model, in which these tables are empty, and the changes of each of them by
        its path in the scriptable form of the model. The changes are None, on every
        rank, if it is not known which rows have changed.
    """
    with refused_together(env):
        replaced = replaced_modules(model, rows)
        _check_copies(model)
    on_servers = tables_on_servers(replaced, dtype, env) if rows == "servers" else {}
    conversion = Conversion(
        dtype,
        Selection(),
        marks,
        on_servers,
        reads_rows=False,
    )
    exported = conversion.model(model, replaced, env)
    changes: dict[str, ChangedRows] = {}
    float32_rows: dict[str, Tensor] = {}
    for path, table in conversion.unread_by_path(exported).items():
        changed = changed_since(
            name=table.name,
            shards=table.shards,
            version=version,
            row_format=FORMATS[dtype],
            env=table.env,
            marks=marks,
        )
        if changed is None:
            return exported, None
        changes[path] = changed
        if dtype == torch.float32:
            float32_rows[table.name] = changed.rows
    warn_unless_finite(exported, float32_rows)
    return exported, changes
