"""Writes and reads deltas: small files with the changes since an export, which a served
model applies while it runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from torchrec_recstore.checkpoint.files import whole_file
from torchrec_recstore.encoding import not_known
from torchrec_recstore.store.arguments import among
from torchrec_recstore_serving.export.changed_rows import ChangedRows
from torchrec_recstore_serving.export.native_library import load_library
from torchrec_recstore_serving.export.row_formats import FORMATS, packed
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
    verify,
)


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


def open_base(
    base: str | Path | torch.jit.ScriptModule, key: Key | None = None
) -> torch.jit.ScriptModule:
    """Checks a served model and returns it.

    A path is loaded first, if it is signed with the key.

    Raises:
        ValueError: The model was not exported by this package, is damaged, or is of
            another format.
        OSError: There is no such file.
    """
    if not isinstance(base, torch.jit.ScriptModule):
        if not Path(base).is_file():
            raise FileNotFoundError(f"there is no exported model at {base}")
        if key is None:
            verify(base)
            return load_export(base)
        with tempfile.TemporaryDirectory(prefix="recstore-base-") as folder:
            return load_export(private_copy(Path(base), Path(folder), str(base), key))
    _check_served(base, "base")
    # A check would read all rows of a model with a hash index. Its version follows from
    # the changed rows of each delta.
    if not is_hashed(base):
        try:
            base.verify()
        except torch.jit.Error as error:
            raise ValueError(
                f"base cannot be used: {str(error).strip().splitlines()[-1]}"
            ) from error
    return base


def private_copy(
    path: Path,
    folder: Path,
    name: str,
    key: Key | None,
    on_block: Callable[[], object] = lambda: None,
) -> Path:
    """Copies a file into a folder of this process, and checks the copy: nobody can
    change it afterwards.

    Returns:
        The path of the copy.

    Raises:
        OSError, ValueError: See :func:`verify`.
    """
    copy = folder / path.name
    with path.open("rb") as source, copy.open("w+b") as file:
        while block := source.read(1 << 24):
            file.write(block)
            on_block()
        file.flush()
        check_file(file, name, key, on_block)
    return copy


def load_libraries() -> None:
    """Loads the libraries that served models may need.

    A thread that loads models is started after this call.
    """
    with suppress(ImportError):  # Models with a sorted index load without the library.
        load_library()
    with suppress(ImportError):  # Models with float32 rows load without FBGEMM.
        import fbgemm_gpu  # noqa: F401  (registers the ops of quantised rows)


def load_export(path: str | Path) -> torch.jit.ScriptModule:
    """Loads a served model from a file that :func:`verify` has passed.

    Raises:
        ValueError: The model was not exported by this package.
    """
    load_libraries()
    try:
        served = torch.jit.load(path)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        cause = str(error).strip().splitlines() or [""]
        raise ValueError(
            f"{path} cannot be loaded as an exported model: {cause[0]}"
        ) from error
    assert isinstance(served, torch.jit.ScriptModule)
    _check_served(served, str(path))
    return served


def _check_served(model: torch.jit.ScriptModule, what: str) -> None:
    if not hasattr(model, "recstore_format"):
        raise ValueError(
            f"{what} is not a model that export_for_inference or export_checkpoint has"
            " written"
        )
    if model.recstore_format() != FORMAT:
        raise ValueError(not_known(f"{what} has the format {model.recstore_format()}"))


def is_hashed(base: torch.jit.ScriptModule) -> bool:
    """Returns whether a served model searches ids with a hash index."""
    return hasattr(base, "recstore_hold")


def dtype_of(base: torch.jit.ScriptModule) -> torch.dtype:
    """Returns the data type in which a served model's rows were exported."""
    name = base.recstore_row_format()
    return next(dtype for dtype, known in FORMATS.items() if known == name)


def write_delta(
    served: nn.Module,
    base: torch.jit.ScriptModule,
    path: Path,
    changes: Sequence[ChangedRows] | None = None,
    key: Key | None = None,
) -> DeltaInfo:
    """Writes the differences between two served models into a file.

    Args:
        served: The model as it is now, in the row format of ``base``.
        base: The earlier export.
        path: The file. It is written completely or not at all.
        changes: The rows that have changed, if ``served`` has one row in each table,
            whose id is the position of the table's changes in this list. Default: None,
            all rows of ``served`` are compared with those of ``base``.
        key: The key with which the file is signed. Default: None, no signature.

    Returns:
        A description of the delta.

    Raises:
        ValueError: The two are exports of different models. The message names the
            difference.
        OSError: The file cannot be written.
    """
    tables = {table.name: table for _, table in served_tables(served)}
    if sorted(tables) != sorted(base.recstore_tables()):
        raise ValueError(
            f"the model has the tables {sorted(tables)}, base has"
            f" {sorted(base.recstore_tables())}"
        )
    check_attributes(served, base)
    there = served_on_servers(served)
    for name in sorted(there.keys() ^ served_on_servers(base).keys()):
        raise ValueError(
            f"table {name!r} is on servers only in"
            f" {'the model' if name in there else 'base'}: export anew"
        )
    tensors: dict[str, Tensor] = {}
    found = {}
    for name, table in tables.items():
        if name in there:  # the servers have the changes
            continue
        if changes is not None and table.has_ids:
            ids, rows, removed = _known_changes(
                table, changes[int(table.raw_ids())], base
            )
        else:
            ids, rows, removed = _changes(
                table, base.recstore_ids(name), base.recstore_rows(name)
            )
        if len(ids) or len(removed):
            tensors |= {
                f"{name}/ids": ids,
                f"{name}/rows": rows,
                f"{name}/removed": removed,
            }
        found[name] = DeltaTable(len(ids), len(removed))
    dense = {}
    for name, tensor in dense_tensors(served, every_path=is_hashed(base)).items():
        before = tensor_at(base, name)
        if before is not None and not _same_bits(tensor, before):
            if (tensor.shape, tensor.dtype) != (before.shape, before.dtype):
                raise ValueError(
                    f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, "
                    f"and {before.dtype} of shape {tuple(before.shape)} in base"
                )
            # safetensors accepts no tensors that share memory, as a tensor with several
            # names does.
            dense[f"dense/{name}"] = tensor.clone(memory_format=torch.contiguous_format)
    after = (
        base.recstore_version_after(tensors | dense)
        if is_hashed(base)
        else version_of(served, base)
    )
    versions = base.recstore_version(), after
    write_tensors(tensors | dense, *versions, path, key)
    names = tuple(name.removeprefix("dense/") for name in dense)
    return DeltaInfo(path, path.stat().st_size, *versions, found, names)


def check_attributes(served: nn.Module, base: torch.jit.ScriptModule) -> None:
    """Refuses attributes that differ from those of ``base``.

    A delta cannot change numbers, strings and lists, and the outputs may depend on
    them.
    """
    modules = dict(base.named_modules())
    for path, module in served.named_modules():
        for name, value in vars(module).items():
            if name in ("training", "version", "attributes") or not isinstance(
                value, int | float | str | list
            ):
                continue
            if isinstance(value, list) and any(
                isinstance(part, Tensor) for part in value
            ):
                # such as the weights of a recurrent layer, which are dense tensors
                continue
            before = getattr(modules.get(path), name, None)
            if isinstance(before, int | float | str | list) and repr(before) != repr(
                value
            ):
                where = f"{path}.{name}" if path else name
                raise ValueError(
                    f"{where} is {value!r}, and {before!r} in base: export the model"
                    " anew, without a delta"
                )


def _changes(
    table: ServedTable, old_ids: Tensor, old_rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the ids of the rows that are new or have changed, these rows, and the ids
    that no longer have a row.
    """
    rows = table.rows
    if rows.shape[1] != old_rows.shape[1] or rows.dtype != old_rows.dtype:
        raise ValueError(f"table {table.name!r} has another dim or data type in base")
    if not table.has_ids:
        if len(old_ids) or rows.shape != old_rows.shape:
            raise ValueError(
                f"table {table.name!r} is one of TorchRec's own tables, and a different"
                " table in base"
            )
        changed = _differ(rows, old_rows).nonzero().squeeze(1)
        return changed, rows[changed], torch.empty(0, dtype=torch.int64)
    ids = table.raw_ids()
    if bool(_differ(rows[:1], old_rows[:1])):
        raise ValueError(
            f"table {table.name!r}: ids without a row read as other values in base"
        )
    known = among(ids, old_ids)
    changed_too = torch.ones_like(known)
    changed_too[known] = _differ(
        rows[1:][known], old_rows[1:][torch.searchsorted(old_ids, ids[known])]
    )
    places = changed_too.nonzero().squeeze(1)
    return ids[places], rows[1:][places], old_ids[~among(old_ids, ids)]


def _known_changes(
    table: ServedTable, changed: ChangedRows, base: torch.jit.ScriptModule
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the result of :func:`_changes` for rows that may have changed.

    It reads no other rows of ``base``.
    """
    found = base.recstore_rows_of(table.name, changed.ids)
    if not found:
        raise ValueError(
            f"table {table.name!r} is a RecStore table, and one of TorchRec's own"
            " tables in base"
        )
    # The same for each path of a table that the model has at several paths.
    rows, known, missing = found[:3]
    now = changed.rows
    if now.dtype == torch.float32:  # The training thread does not wait for this.
        now = packed(table.name, now, base.recstore_row_format())
    if now.shape != rows.shape or now.dtype != rows.dtype:
        raise ValueError(f"table {table.name!r} has another dim or data type in base")
    if bool(_differ(table.rows[:1], missing)):
        raise ValueError(
            f"table {table.name!r}: ids without a row read as other values in base"
        )
    places = (~known | _differ(now, rows)).nonzero().squeeze(1)
    removed = changed.left[base.recstore_rows_of(table.name, changed.left)[1]]
    return changed.ids[places], now[places], removed


def _differ(rows: Tensor, others: Tensor) -> Tensor:
    """Returns whether each row differs in any bit: (N,) bool."""
    if rows.dtype == torch.float32:
        rows, others = (
            rows.contiguous().view(torch.int32),
            others.contiguous().view(torch.int32),
        )
    return (rows != others).any(1)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    pair = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*pair)


def write_tensors(
    tensors: Mapping[str, Tensor], base: str, version: str, path: Path, key: Key | None
) -> None:
    """Writes the file of a delta from one version of a model to another, completely or
    not at all.

    Raises:
        OSError: The file cannot be written.
    """
    tensors = {**tensors, "format": torch.tensor([FORMAT])}
    for name, text in (("base", base), ("version", version)):
        tensors[name] = torch.tensor(list(text.encode()), dtype=torch.uint8)
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


def described(path: Path) -> dict[str, Any]:
    """Describes an exported model, a package or a delta, in values that ``json`` can
    write.

    The file is not verified: see :func:`torchrec_recstore.inference.verify`.

    Args:
        path: The file.

    Returns:
        For both kinds: ``path``, ``kind`` (``"export"`` or ``"delta"``), ``format``,
        ``version``, ``tables`` by name, ``dense`` (the names of the other parameters
        and buffers) and ``bytes``. For an exported model also ``index`` (``"sorted"``
        or ``"hash"``) and ``dtype``, the data type of the rows. For a delta also
        ``base``, the version to which it can be applied. For a package with a checksum
        only ``path``, ``kind`` (``"package"``), ``format`` and ``bytes``.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is neither an exported model nor a delta, or it is damaged.
    """
    kind = kind_of(path)
    if kind == "package":
        return {
            "path": str(path),
            "kind": kind,
            "format": FORMAT,
            "bytes": path.stat().st_size,
        }
    return _delta(path) if kind == "delta" else _export(path)


def _export(path: Path) -> dict[str, Any]:
    served = load_export(path)
    modules = {
        path: module
        for path, module in served.named_modules()
        if hasattr(module, "has_ids")
    }
    of_tables = {
        f"{path}.{kind}".lstrip(".") for path in modules for kind in ("ids", "rows")
    }
    tables = {
        table.name: {
            "rows": table.row_count(),
            "dim": table.dim,
            "bytes": table.size_bytes(),
        }
        for table in modules.values()
    }
    return {
        "path": str(path),
        "kind": "export",
        "format": FORMAT,
        "version": served.recstore_version(),
        "index": "hash" if is_hashed(served) else "sorted",
        "dtype": served.recstore_row_format(),
        "tables": tables,
        "dense": sorted(served.state_dict().keys() - of_tables),
        "bytes": path.stat().st_size,
    }


def _delta(path: Path) -> dict[str, Any]:
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
        base, version = (
            bytes(tensors[key].tolist()).decode() for key in ("base", "version")
        )
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} is not a delta, or it is damaged: {error}") from error
    names = sorted(
        key.removesuffix("/removed") for key in tensors if key.endswith("/removed")
    )
    return {
        "path": str(path),
        "kind": "delta",
        "format": FORMAT,
        "version": version,
        "base": base,
        "tables": {
            name: {
                "rows": len(tensors[f"{name}/ids"]),
                "removed": len(tensors[f"{name}/removed"]),
            }
            for name in names
        },
        "dense": sorted(
            key.removeprefix("dense/") for key in tensors if key.startswith("dense/")
        ),
        "bytes": path.stat().st_size,
    }
