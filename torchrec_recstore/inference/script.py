"""A served model as one file of TorchScript, with the methods that a delta needs."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from pathlib import Path
from typing import IO

import torch
from torch import nn

from torchrec_recstore.checkpoint.files import sync_directory
from torchrec_recstore.inference.versions import dense_tensors, served_tables, version_of

_METHODS = (
    "recstore_tables",
    "recstore_version",
    "recstore_row_format",
    "recstore_ids",
    "recstore_rows",
    "apply_delta",
)

_LEAVES = ["ServedEmbeddingBagCollection", "ServedEmbeddingCollection", "StaticEmbedding", "StaticEmbeddingBag"]


def check_path(path: Path) -> None:
    """Refuses a path that no file can be written to.

    Raises:
        FileNotFoundError, IsADirectoryError: the message names it.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is no directory")


def save_script(script: torch.jit.ScriptModule, path: Path) -> None:
    """Writes a scripted module beside ``path`` and renames it.

    Raises:
        OSError: it cannot be written; what was there is there still.
    """
    check_path(path)
    name: str | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            _write(script, file)
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # as any other file; that of mkstemp is its owner's alone
        os.replace(name, path)
    except BaseException as error:
        if name is not None:
            os.unlink(name)
        if isinstance(error, OSError):  # without the hidden file's name
            raise OSError(error.errno, f"cannot be written: {error.strerror}", str(path)) from error
        raise
    sync_directory(path.parent)


def _write(script: torch.jit.ScriptModule, file: IO[bytes]) -> None:
    """Through a pipe, without a buffer of all of it.

    ``torch.jit.save`` makes one for an open file; given a name it writes as it goes, and aborts the process on a full
    disk (torch 2.13). So another process writes, and reads on where it no longer can.
    """
    command = ["sh", "-c", "cat || { cat >/dev/null; exit 1; }"]
    pipe, plain = subprocess.PIPE, {**os.environ, "LC_ALL": "C"}
    with subprocess.Popen(command, stdin=pipe, stdout=file, stderr=pipe, env=plain) as writer:
        assert writer.stdin is not None
        script.save(f"/dev/fd/{writer.stdin.fileno()}")
        said = writer.communicate()[1].decode().strip()
    if writer.returncode:
        full = os.strerror(errno.ENOSPC)
        raise OSError(errno.ENOSPC, full) if full in said else OSError(errno.EIO, said)


def scripted(served: nn.Module) -> torch.jit.ScriptModule:
    """A served model as TorchScript, with methods for its tables and deltas.

    Args:
        served: of :func:`torchrec_recstore.inference.scriptable`, or a module of served tables.

    Raises:
        ValueError: neither TorchScript nor TorchRec's tracer takes the model, a table's name is not its own, or the
            model has methods of these names.
    """
    for method in _METHODS:
        if hasattr(served, method):
            raise ValueError(
                f"{type(served).__name__} has an attribute {method!r}: a served model has a method of that name"
            )
    names = [table.name for _, table in served_tables(served)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the model has more than one table {name!r}: in a file names must differ")
    version = version_of(served)
    for _, table in served_tables(served):
        table.version = version
    script, source = _scripted(served)
    # Models whose modules are alike share their TorchScript class, and so these methods, which name no table.
    if not hasattr(script, "apply_delta"):
        script.define(_methods([_expression(path) for path, _ in served_tables(source)], sorted(dense_tensors(source))))
    return script


def _scripted(served: nn.Module) -> tuple[torch.jit.ScriptModule, nn.Module]:
    """The script, and the module that was scripted."""
    try:
        return torch.jit.script(served), served
    except Exception as error:
        directly = error
    try:
        import torchrec.fx  # a module without TorchRec's is scripted above

        tracer = torchrec.fx.Tracer(leaf_modules=_LEAVES)
        traced = torch.fx.GraphModule(served, tracer.trace(served))
        return torch.jit.script(traced), traced
    except Exception as error:
        raise ValueError(
            f"TorchScript cannot take {type(served).__name__}: {directly}\n"
            f"nor what torchrec.fx.Tracer makes of it: {error}"
        ) from directly


def _expression(path: str) -> str:
    """How TorchScript reaches what lies at a path from ``self``."""
    expression = "self"
    for name in path.split(".") if path else ():
        expression = f"{expression}.{name}" if name.isidentifier() else f"getattr({expression}, {name!r})"
    return expression


def _methods(tables: list[str], dense: list[str]) -> str:
    """Source of the methods of a served model.

    Args:
        tables: expressions that reach them.
        dense: names of the other tensors.
    """
    lines = [
        "def recstore_tables(self) -> List[str]:",
        f"    return [{', '.join(f'{table}.name' for table in tables)}]",
        "def recstore_version(self) -> str:",
        f"    return {tables[0]}.version",
        "def recstore_row_format(self) -> str:",
        f"    return {tables[0]}.row_format",
    ]
    for method, value in (("recstore_ids", "raw_ids()"), ("recstore_rows", "rows")):
        lines.append(f"def {method}(self, table: str) -> Tensor:")
        for table in tables:
            lines += [f"    if table == {table}.name:", f"        return {table}.{value}"]
        lines.append('    raise ValueError("there is no table " + table)')
    return "\n".join([*lines, *_apply_delta(tables, dense)]) + "\n"


def _apply_delta(tables: list[str], dense: list[str]) -> list[str]:
    version = f"{tables[0]}.version"
    lines = [
        "def apply_delta(self, delta: Dict[str, Tensor]) -> bool:",
        "    versions: List[str] = []",
        '    for key in ["base", "version"]:',
        "        if key not in delta:",
        '            raise ValueError("this is no delta: it has no " + key)',
        "        codes: List[int] = delta[key].long().tolist()",
        '        versions.append("".join([chr(code) for code in codes]))',
        f"    if {version} == versions[1]:",
        "        return False",
        f"    if {version} != versions[0]:",
        '        raise ValueError("the delta is one of version " + versions[0] + ", and this model is of version " '
        f"+ {version})",
        "    known = 2",
    ]
    # All is checked before anything changes.
    for table in tables:
        ids, rows, removed = (f"delta[{table}.name + '/{kind}']" for kind in ("ids", "rows", "removed"))
        lines += [
            f"    if {table}.name + '/ids' in delta:",
            f"        {table}.check_rows({ids}, {rows}, {removed})",
            "        known += 3",
        ]
    for name in dense:
        key = repr(f"dense/{name}")
        lines += [
            f"    if {key} in delta:",
            f"        if delta[{key}].shape != {_expression(name)}.shape:",
            f"            raise ValueError({name + ' is of another shape in the delta'!r})",
            "        known += 1",
        ]
    lines += ["    if known != len(delta):", '        raise ValueError("the delta is one of another model")']
    for table in tables:
        ids, rows, removed = (f"delta[{table}.name + '/{kind}']" for kind in ("ids", "rows", "removed"))
        lines += [
            f"    if {table}.name + '/ids' in delta:",
            f"        {table}.replace_rows({ids}, {rows}, {removed})",
            f"    {table}.version = versions[1]",
        ]
    for name in dense:
        key = repr(f"dense/{name}")
        lines += [f"    if {key} in delta:", f"        {_expression(name)}.copy_(delta[{key}])"]
    return [*lines, "    return True"]
