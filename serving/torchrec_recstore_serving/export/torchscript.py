"""Writes a served model into a TorchScript file, with the methods that apply deltas.

Tests: tests/serving/export/test_from_model.py.
"""

from __future__ import annotations

import inspect
import keyword
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrec_recstore.checkpoint.files import whole_file
from torchrec_recstore_serving.export.hashed_tables import HashedTable
from torchrec_recstore_serving.export.mapped_files import append_records, rows_apart
from torchrec_recstore_serving.export.scriptable_modules import (
    dense_tensors,
    served_tables,
    tensor_at,
    version_of,
)
from torchrec_recstore_serving.export.signing import Key
from torchrec_recstore_serving.export.sorted_tables import (
    check_tensor,  # noqa: F401
    take_tensor,  # noqa: F401
)
from torchrec_recstore_serving.export.tracing import ServedTracer
from torchrec_recstore_serving.export.verification import (  # noqa: F401  (the methods of a served model call these)
    FORMAT,
    check_file_bytes,
    checksum_of,
    checksum_of_strings,
    compiling,
    hexadecimal,
    sign_zip,
)

_METHODS = (
    "recstore_tables",
    "recstore_version",
    "recstore_row_format",
    "recstore_ids",
    "recstore_rows",
    "recstore_format",
    "recstore_bytes",
    "recstore_rows_of",
    "recstore_version_after",
    "recstore_hold",
    "apply_delta",
    "verify",
)

# TorchScript writes these names into the file without escaping, and then cannot load
# the file (torch 2.13).
_RESERVED = frozenset(keyword.kwlist) - {
    "async", "await", "except", "finally", "from", "lambda", "nonlocal", "try", "yield",
}  # fmt: skip

# The types of attributes whose value ``str`` prints completely.
_PLAIN = re.compile(r"(int|float|bool|str|List|Dict|Tuple|Optional|NoneType|[\[\], ])+")

_CODE_BYTES = 1 << 22  # An upper bound of a file's size without its tensors.


def save_script(
    script: torch.jit.ScriptModule,
    path: Path,
    key: Key | None = None,
    mapped: Sequence[Any] = (),
) -> None:
    """Writes a scripted module completely or not at all, and signs it if there is a
    key.

    Args:
        script: The module.
        path: The file.
        key: The key. Default: None, no signature.
        mapped: The tables of the module whose rows a process maps from the file, as
            modules or compiled modules with a native object. Default: (), a process
            reads all rows.

    Raises:
        OSError: The file cannot be written. The file at ``path`` is as it was.
    """
    try:
        with whole_file(path) as beside:
            # With a file object, torch.jit.save makes several copies of the model in
            # memory. With a file name, it writes directly, and aborts the process if
            # the disk is full (torch 2.13). So the space is allocated first.
            with beside.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, _bytes(script) + _CODE_BYTES)
            with rows_apart(mapped) as records:
                script.save(str(beside))
                append_records(beside, records)
            sign_zip(beside, key)
    except OSError as error:
        if error.strerror is None:
            raise
        raise OSError(
            error.errno, f"cannot be written: {error.strerror}", str(path)
        ) from error


def _bytes(script: torch.jit.ScriptModule) -> int:
    tensors = sum(tensor.nbytes for tensor in [*script.parameters(), *script.buffers()])
    return tensors + (
        script.recstore_bytes() if hasattr(script, "recstore_bytes") else 0
    )


def scripted(served: nn.Module) -> torch.jit.ScriptModule:
    """Compiles a served model with TorchScript, and adds the methods for its tables and
    deltas.

    The call must be made in a thread of the user: see :func:`compiled`.

    Args:
        served: The result of :func:`torchrec_recstore.inference.scriptable`, or a
            module of served tables.

    Raises:
        ValueError: Neither TorchScript nor TorchRec's tracer can compile the model, two
            tables have the same name, the model has a method with the name of an added
            method, or a module or tensor has a name that TorchScript reserves.
    """
    script, _ = compiled(served)
    set_version(script, version_of(served, script), script.recstore_attributes())
    return script


def set_version(script: torch.jit.ScriptModule, version: str, attributes: str) -> None:
    """Sets the version and the checksum of the attributes of a compiled model in each
    of its tables.
    """
    for _, module in script.named_modules(remove_duplicate=False):
        if hasattr(module, "row_format"):
            module.version = version
            module.attributes = attributes


def compiled(served: nn.Module) -> tuple[torch.jit.ScriptModule, frozenset[str]]:
    """Compiles a served model as :func:`scripted` does, without its version and the
    checksum of its attributes.

    TorchScript keeps the classes of compiled modules for the whole process, and
    TorchRec's tracer replaces methods of ``nn.Module`` while it works. No thread of
    this package calls this function, therefore. Calls in several threads wait for each
    other, and :class:`ServedTracer` leaves the modules of other threads alone.

    Returns:
        The compiled model, and the names of the dense tensors whose values are
        constants of its code.

    Raises:
        ValueError: See :func:`scripted`.
    """
    with compiling:
        return _compiled(served)


def _compiled(served: nn.Module) -> tuple[torch.jit.ScriptModule, frozenset[str]]:
    for method in _METHODS:
        if hasattr(served, method):
            raise ValueError(
                f"{type(served).__name__} has an attribute {method!r}: a served model"
                " has a method of that name"
            )
    for path in [*(path for path, _ in served.named_modules()), *dense_tensors(served)]:
        if _RESERVED.intersection(path.split(".")):
            raise ValueError(
                f"the model has {path!r}, a name that TorchScript's files cannot have:"
                " rename it"
            )
    names = [table.name for _, table in served_tables(served)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"the model has more than one table {name!r}: in a file names must"
                " differ"
            )
    script, source, read_tensors = _scripted(served)
    # Models with equal modules share a TorchScript class and its methods, so the
    # methods must not contain a table's name. TorchScript copies a module that a model
    # has at several paths, and models of one class may differ in the modules that their
    # paths share. So the methods cover every path.
    tables = [path for path, _ in served_tables(source, every_path=True)]
    if not hasattr(script, "apply_delta"):
        own = dense_tensors(served, every_path=True)
        there = [
            name
            for name in sorted(dense_tensors(source, every_path=True))
            if tensor_at(script, name) is not None
        ]
        script.define(
            _methods(
                [_expression(path) for path in tables],
                [name for name in there if name in own],
                # added by TorchRec's tracer
                [_expression(name) for name in there if name not in own],
                [_expression(name) for name in _attributes(script)],
                next(
                    (
                        _expression(path)
                        for path, table in served_tables(source)
                        if isinstance(table, HashedTable)
                    ),
                    None,
                ),
            )
        )
        if hasattr(script, "recstore_hold"):
            _hold_in_methods(script)
    return script, read_tensors


def _hold_in_methods(script: torch.jit.ScriptModule) -> None:
    """Makes each method of a model hold the version of the model from its first to its
    last step.
    """
    for name in script._c._method_names():
        if name in ("recstore_hold", "apply_delta"):
            continue
        graph = script._c._get_method(name).graph
        (held,) = script._c._get_method("recstore_hold").graph.outputs()
        begin = graph.create("prim::CallMethod", [next(graph.inputs())], 1)
        begin.s_("name", "recstore_hold")
        begin.output().setType(held.type())
        # Otherwise TorchScript writes the call where its result is used.
        begin.output().setDebugName("held")
        begin.insertBefore(next(graph.nodes(), graph.return_node()))
        end = graph.create("prim::CallMethod", [begin.output()], 1)
        end.s_("name", "release")
        end.output().setType(torch._C.NoneType.get())
        end.insertBefore(graph.return_node())


def _attributes(script: torch.jit.ScriptModule) -> list[str]:
    """Returns the names of a model's attributes that are numbers, strings, or lists and
    dicts of these.
    """
    return [
        f"{path}.{name}" if path else name
        for path, module in script.named_modules(remove_duplicate=False)
        for name, (kind, _) in sorted(module._concrete_type.get_attributes().items())
        if name not in ("training", "version", "attributes")
        and _PLAIN.fullmatch(kind.annotation_str)
    ]


def _scripted(
    served: nn.Module,
) -> tuple[torch.jit.ScriptModule, nn.Module, frozenset[str]]:
    """Compiles a model, directly or after TorchRec's tracer.

    Returns:
        The script, the module that was compiled, and the names of the dense tensors
        whose values are constants of the code.
    """
    try:
        return torch.jit.script(served), served, frozenset()
    except Exception as error:
        directly = error
    try:
        return _traced(served, records=True)
    except Exception:
        # TorchScript may refuse a recorded computation. Its result as a constant always
        # compiles.
        pass
    try:
        return _traced(served, records=False)
    except Exception as error:
        raise ValueError(
            f"{_unannotated(served, str(directly))}TorchScript cannot compile"
            f" {type(served).__name__}: {directly}\nIt cannot compile the result of"
            f" torchrec.fx.Tracer either: {error}"
        ) from directly


def _traced(
    served: nn.Module, *, records: bool
) -> tuple[torch.jit.ScriptModule, nn.Module, frozenset[str]]:
    """Compiles a model after TorchRec's tracer; see :func:`_scripted` and
    :class:`ServedTracer`.
    """
    tracer = ServedTracer(records=records)
    names = set(vars(served))
    try:
        traced = torch.fx.GraphModule(served, tracer.trace(served))
    finally:
        # The tracer adds constants to the model, which are no dense tensors of it.
        for name in set(vars(served)) - names:
            delattr(served, name)
    used = {id(table) for _, table in served_tables(traced)}
    for path, table in served_tables(served):
        # TorchScript keeps unused tables too when it compiles the model directly.
        if id(table) not in used:
            traced.add_submodule(path, table)
    return torch.jit.script(traced), traced, frozenset(tracer.read_tensors)


def _unannotated(served: nn.Module, said: str) -> str:
    """Returns a line for each ``forward`` that TorchScript took for one of tensors,
    because it says no types.
    """
    if "not annotated with an explicit type" not in said:
        return ""
    lines = []
    for kind in dict.fromkeys(type(module) for module in served.modules()):
        code = getattr(kind.forward, "__code__", None)
        if code is None or kind.__module__.partition(".")[0] in (
            "torch",
            "torchrec",
            "torchrec_recstore",
        ):
            continue
        _, *arguments = inspect.signature(kind.forward).parameters.values()
        if names := [
            argument.name
            for argument in arguments
            if argument.annotation is argument.empty
        ]:
            lines.append(
                f"{kind.__name__}.forward ({code.co_filename}:{code.co_firstlineno})"
                f" has no type for {', '.join(names)}, and TorchScript takes arguments"
                f" without a type for tensors: annotate them, for example {names[0]}:"
                " KeyedJaggedTensor\n"
            )
    return "".join(lines)


def _expression(path: str) -> str:
    """Returns a TorchScript expression for the module or tensor at a path of ``self``."""
    expression = "self"
    for name in path.split(".") if path else ():
        expression = (
            f"{expression}.{name}"
            if name.isidentifier()
            else f"getattr({expression}, {name!r})"
        )
    return expression


def _methods(
    tables: list[str],
    dense: list[str],
    constants: list[str],
    attributes: list[str],
    hashed: str | None,
) -> str:
    """Returns the source code of the methods of a served model.

    Args:
        tables: The expressions of the tables. Several of them may refer to one table or
            to copies of it.
        dense: The names of the other tensors.
        constants: The expressions of tensors that TorchRec's tracer has added.
        attributes: The expressions of the attributes that are numbers, strings, lists
            and dicts.
        hashed: The expression of the first table that searches ids by hash. None: all
            of them are sorted.
    """
    lines = [
        "def recstore_tables(self) -> List[str]:",
        "    names: List[str] = []",
        f"    for name in [{', '.join(f'{table}.name' for table in tables)}]:",
        "        if name not in names:",
        "            names.append(name)",
        "    return names",
        "def recstore_version(self) -> str:",
        f"    return {tables[0]}.version",
        "def recstore_row_format(self) -> str:",
        f"    return {tables[0]}.row_format",
        "def recstore_format(self) -> int:",
        f"    return {FORMAT}",
    ]
    if hashed is not None:
        lines += ["def recstore_hold(self):", f"    return {hashed}.native.hold()"]
    for method, kind in (("recstore_ids", "ids"), ("recstore_rows", "rows")):
        lines += [
            f"def {method}(self, table: str) -> Tensor:",
            "    found: List[Tensor] = []",
        ]
        lines += [f"    {table}.give_{kind}(table, found)" for table in tables]
        lines += [
            "    if len(found) == 0:",
            '        raise ValueError("there is no table " + table)',
            "    return found[0]",
        ]
    keys = [(repr(f"dense/{name}"), _expression(name)) for name in dense]
    lines += _verify(tables, keys, constants, attributes, hashed is not None)
    if hashed is not None:
        lines += _of_changes(tables, keys)
    lines += _apply_delta(tables, keys, hashed)
    return "\n".join(lines) + "\n"


def _of_changes(tables: list[str], keys: list[tuple[str, str]]) -> list[str]:
    """Returns the source code of the methods that take time for the given or changed
    rows only.
    """
    return [
        "def recstore_bytes(self) -> int:",
        "    size = 0",
        *(f"    size += {table}.size_bytes()" for table in tables),
        "    return size",
        "def recstore_rows_of(self, table: str, values: Tensor) -> List[Tensor]:",
        "    found: List[Tensor] = []",
        *(f"    {table}.give_rows_of(table, values, found)" for table in tables),
        "    return found",
        "def recstore_version_after(self, delta: Dict[str, Tensor]) -> str:",
        "    tensors: Dict[str, Tensor] = {}",
        *(f"    {table}.give_tensors_after(delta, tensors)" for table in tables),
        *(f"    tensors[{key}] = delta.get({key}, {tensor})" for key, tensor in keys),
        f"    return {_version_of('tensors', hashed=True)}",
    ]


# TorchScript compiles each method in its first two calls, for tens of milliseconds if
# the method computes a checksum. The ops of the native library spare a model with a
# hash index this time.
def _version_of(tensors: str, hashed: bool) -> str:
    """Returns an expression for the version of a model with these tensors."""
    return (
        f"torch.ops.recstore.version_of({tensors})"
        if hashed
        else f"hexadecimal(checksum_of({tensors}))"
    )


def _verify(
    tables: list[str],
    keys: list[tuple[str, str]],
    constants: list[str],
    attributes: list[str],
    hashed: bool,
) -> list[str]:
    return [
        "def recstore_attributes(self) -> str:",
        "    values: List[str] = []",
        *(f"    values.append(str({attribute}))" for attribute in attributes),
        *(
            f'    values.append(hexadecimal(checksum_of({{"": {constant}}})))'
            for constant in constants
        ),
        "    return checksum_of_strings(values)",
        "def verify(self, file: Optional[Tensor]=None) -> None:",
        "    if file is not None:",
        "        check_file_bytes(file)",
        "    tensors: Dict[str, Tensor] = {}",
        *(f"    {table}.give_tensors(tensors)" for table in tables),
        *(f"    tensors[{key}] = {tensor}" for key, tensor in keys),
        f"    if {_version_of('tensors', hashed)} != {tables[0]}.version:",
        (
            '        raise ValueError("the model is damaged: its tensors are not of'
            f' version " + {tables[0]}.version)'
        ),
        f"    if self.recstore_attributes() != {tables[0]}.attributes:",
        (
            '        raise ValueError("the model is damaged: its attributes are not'
            ' those that were exported")'
        ),
    ]


def _apply_delta(
    tables: list[str], keys: list[tuple[str, str]], hashed: str | None
) -> list[str]:
    """Returns the source code of ``apply_delta``.

    A model that searches by hash may answer meanwhile. The methods wait only while the
    prepared change is made.

    The code has one line for each table and tensor, without conditions: torch needs
    quadratic time to load a long sequence of conditions.
    """
    version = f"{tables[0]}.version"
    checksum = "checksum_of" if hashed is None else "torch.ops.recstore.checksum_of"
    # A model that searches by hash does not read all of its rows. It computes its next
    # version from the changed rows, and the version must be that of the delta before
    # anything changes.
    leads = [
        "    tensors: Dict[str, Tensor] = {}",
        *(f"    {table}.prepare_delta(delta, tensors)" for table in tables),
        *(f"    tensors[{key}] = delta.get({key}, {tensor})" for key, tensor in keys),
        f"    if {_version_of('tensors', hashed=True)} != versions[1]:",
        (
            '        raise ValueError("the delta does not lead from this model to'
            ' version " + versions[1] + ": the model or the delta is damaged")'
        ),
    ]
    return [
        "def apply_delta(self, delta: Dict[str, Tensor]) -> bool:",
        *([] if hashed is None else [f"    change = {hashed}.native.change()"]),
        '    known: List[str] = ["base", "version", "checksum", "format"]',
        "    for key in known[:3]:",
        "        if key not in delta:",
        '            raise ValueError("this is no delta: it has no " + key)',
        f'    if "format" not in delta or int(delta["format"].item()) != {FORMAT}:',
        (
            f'        raise ValueError("the model takes deltas of format {FORMAT}, and'
            ' this is another one")'
        ),
        f'    if not torch.equal(delta["checksum"], {checksum}(delta)):',
        '        raise ValueError("the delta is damaged: its checksum is another one")',
        "    versions: List[str] = []",
        "    for key in known[:2]:",
        "        codes: List[int] = delta[key].long().tolist()",
        '        versions.append("".join([chr(code) for code in codes]))',
        f"    if {version} == versions[1]:",
        "        return False",
        f"    if {version} != versions[0]:",
        (
            '        raise ValueError("the delta is one of version " + versions[0] +'
            f' ", and this model is of version " + {version})'
        ),
        *(["    self.verify()"] if hashed is None else []),
        # All tables and tensors are checked before the first one changes.
        *(f"    {table}.check_delta(delta, known)" for table in tables),
        *(f"    check_tensor(delta, {key}, {tensor}, known)" for key, tensor in keys),
        "    for key in delta.keys():",
        "        if key not in known:",
        (
            '            raise ValueError("the delta is one of another model: it has "'
            " + key)"
        ),
        *([] if hashed is None else [*leads, "    change.commit()"]),
        "    ids: Dict[str, Tensor] = {}",
        "    rows: Dict[str, Tensor] = {}",
        *(f"    {table}.take_delta(delta, ids, rows)" for table in tables),
        *(f"    take_tensor(delta, {key}, {tensor})" for key, tensor in keys),
        *(f"    {table}.version = versions[1]" for table in tables),
        # Calls need not wait for this.
        *(
            []
            if hashed is None
            else [
                "    change.release()",
                *(f"    {table}.end_delta()" for table in tables),
            ]
        ),
        "    return True",
    ]
