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
from string import Template
from typing import Any

import torch
from torch import nn

from torchrec_recstore.checkpoint.files import whole_file
from torchrec_recstore_serving.export.mapped_files import append_records, rows_apart
from torchrec_recstore_serving.export.model_table import NativeTable
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

# The methods of a served model call these.
from torchrec_recstore_serving.export.verification import (  # noqa: F401
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
    "async",
    "await",
    "except",
    "finally",
    "from",
    "lambda",
    "nonlocal",
    "try",
    "yield",
}

# The types of attributes whose value ``str`` prints completely.
_PLAIN = re.compile(r"(int|float|bool|str|List|Dict|Tuple|Optional|NoneType|[\[\], ])+")

_CODE_BYTES = 1 << 22  # An upper bound of a file's size without its tensors.


def save_script(
    script: torch.jit.ScriptModule,
    path: Path,
    key: Key | None = None,
    mapped: Sequence[Any] = (),
) -> None:
    """Writes a scripted module completely or not at all, and may sign it.

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
            error.errno,
            f"cannot be written: {error.strerror}",
            str(path),
        ) from error


def _bytes(script: torch.jit.ScriptModule) -> int:
    """Returns the size of a model's rows and tensors."""
    size = sum(parameter.nbytes for parameter in script.parameters())
    size += sum(buffer.nbytes for buffer in script.buffers())
    if hasattr(script, "recstore_bytes"):
        size += script.recstore_bytes()
    return size


def scripted(served: nn.Module) -> torch.jit.ScriptModule:
    """Compiles a served model with TorchScript.

    The result has further methods, for its tables and deltas.

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
    set_version(
        script,
        version_of(served, script),
        script.recstore_attributes(),
    )
    return script


def set_version(
    script: torch.jit.ScriptModule,
    version: str,
    attributes: str,
) -> None:
    """Sets the version and the checksum of the attributes in each table."""
    for _, module in script.named_modules(remove_duplicate=False):
        if hasattr(module, "row_format"):
            module.version = version
            module.attributes = attributes


def compiled(served: nn.Module) -> tuple[torch.jit.ScriptModule, frozenset[str]]:
    """Compiles a served model as :func:`scripted` does, without its version.

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
    paths = [path for path, _ in served.named_modules()]
    for path in [*paths, *dense_tensors(served)]:
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
    # Models with equal modules share a TorchScript class and its methods.
    if not hasattr(script, "apply_delta"):
        script.define(_methods_of(served, source, script))
        if hasattr(script, "recstore_hold"):
            _hold_in_methods(script)
    return script, read_tensors


def _methods_of(
    served: nn.Module,
    source: nn.Module,
    script: torch.jit.ScriptModule,
) -> str:
    """Returns the source code of the methods of a served model.

    The methods must not contain a table's name, because models with equal modules share
    them. TorchScript copies a module that a model has at several paths, and models of
    one class may differ in the modules that their paths share. So the methods cover
    every path.

    Args:
        served: The served model.
        source: The module that was compiled: the model, or what TorchRec's tracer has
            made of it.
        script: The compiled module.
    """
    tables: list[str] = []
    # The first table whose native class holds a version of the model for calls.
    first_hashed: str | None = None
    for path, table in served_tables(source, every_path=True):
        tables.append(_expression(path))
        if first_hashed is None and isinstance(table, NativeTable):
            first_hashed = _expression(path)
    tensors_of_model = dense_tensors(served, every_path=True)
    dense: list[str] = []
    constants: list[str] = []
    for name in sorted(dense_tensors(source, every_path=True)):
        if tensor_at(script, name) is None:
            continue
        if name in tensors_of_model:
            dense.append(name)
        else:  # TorchRec's tracer has added it
            constants.append(_expression(name))
    attributes = [_expression(name) for name in _attributes(script)]
    return _methods(tables, dense, constants, attributes, first_hashed)


def _hold_in_methods(script: torch.jit.ScriptModule) -> None:
    """Makes each method of a model hold the version of the model while it runs."""
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
    """Returns the names of a model's plain attributes.

    They are numbers, strings, or lists and dicts of these.
    """
    names: list[str] = []
    for path, module in script.named_modules(remove_duplicate=False):
        types = module._concrete_type.get_attributes()
        for name, (attribute_type, _) in sorted(types.items()):
            if name in ("training", "version", "attributes"):
                continue
            if _PLAIN.fullmatch(attribute_type.annotation_str):
                names.append(f"{path}.{name}" if path else name)
    return names


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
    served: nn.Module,
    *,
    records: bool,
) -> tuple[torch.jit.ScriptModule, nn.Module, frozenset[str]]:
    """Compiles a model after TorchRec's tracer.

    See :func:`_scripted` and :class:`ServedTracer`.
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


def _unannotated(served: nn.Module, message: str) -> str:
    """Returns a line for each ``forward`` that says no types.

    TorchScript takes its arguments for tensors.
    """
    if "not annotated with an explicit type" not in message:
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
        names = [
            argument.name
            for argument in arguments
            if argument.annotation is argument.empty
        ]
        if names:
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
        attribute = f"{expression}.{name}"
        any_attribute = f"getattr({expression}, {name!r})"
        expression = attribute if name.isidentifier() else any_attribute
    return expression


_DESCRIPTION = """
def recstore_tables(self) -> List[str]:
    names: List[str] = []
    for name in [$names]:
        if name not in names:
            names.append(name)
    return names
def recstore_version(self) -> str:
    return $first.version
def recstore_row_format(self) -> str:
    return $first.row_format
def recstore_format(self) -> int:
    return $format
def recstore_ids(self, table: str) -> Tensor:
    found: List[Tensor] = []
    $table.give_ids(table, found)
    if len(found) == 0:
        raise ValueError("there is no table " + table)
    return found[0]
def recstore_rows(self, table: str) -> Tensor:
    found: List[Tensor] = []
    $table.give_rows(table, found)
    if len(found) == 0:
        raise ValueError("there is no table " + table)
    return found[0]
"""

_VERIFICATION = """
def recstore_attributes(self) -> str:
    values: List[str] = []
    values.append(str($attribute))
    values.append(hexadecimal(checksum_of({"": $constant})))
    return checksum_of_strings(values)
def verify(self, file: Optional[Tensor]=None) -> None:
    if file is not None:
        check_file_bytes(file)
    tensors: Dict[str, Tensor] = {}
    $table.give_tensors(tensors)
    tensors[$key] = $tensor
    if $version_of_tensors != $first.version:
        raise ValueError(
            "the model is damaged: its tensors are not of version " + $first.version
        )
    if self.recstore_attributes() != $first.attributes:
        raise ValueError(
            "the model is damaged: its attributes are not those that were exported"
        )
"""

# They take time for the given or changed rows only.
_OF_HASHED_MODELS = """
def recstore_hold(self):
    return $hashed.native.hold()
def recstore_bytes(self) -> int:
    size = 0
    size += $table.size_bytes()
    return size
def recstore_rows_of(self, table: str, values: Tensor) -> List[Tensor]:
    found: List[Tensor] = []
    $table.give_rows_of(table, values, found)
    return found
def recstore_version_after(self, delta: Dict[str, Tensor]) -> str:
    tensors: Dict[str, Tensor] = {}
    $table.give_tensors_after(delta, tensors)
    tensors[$key] = delta.get($key, $tensor)
    return $version_of_tensors
"""

_BEGIN_DELTA = """
def apply_delta(self, delta: Dict[str, Tensor]) -> bool:
"""

# A model that searches by hash may answer meanwhile.
_BEGIN_CHANGE = """
    change = $hashed.native.change()
"""

_CHECK_VERSION = """
    known: List[str] = ["base", "version", "checksum", "format"]
    for key in known[:3]:
        if key not in delta:
            raise ValueError("this is no delta: it has no " + key)
    if "format" not in delta or int(delta["format"].item()) != $format:
        raise ValueError(
            "the model takes deltas of format $format, and this is another one"
        )
    if not torch.equal(delta["checksum"], $checksum_of(delta)):
        raise ValueError("the delta is damaged: its checksum is another one")
    versions: List[str] = []
    for key in known[:2]:
        codes: List[int] = delta[key].long().tolist()
        versions.append("".join([chr(code) for code in codes]))
    if $first.version == versions[1]:
        return False
    if $first.version != versions[0]:
        raise ValueError(
            "the delta is one of version " + versions[0]
            + ", and this model is of version " + $first.version
        )
"""

_VERIFY = """
    self.verify()
"""

# All tables and tensors are checked before the first one changes.
_CHECK_DELTA = """
    $table.check_delta(delta, known)
    check_tensor(delta, $key, $tensor, known)
    for key in delta.keys():
        if key not in known:
            raise ValueError("the delta is one of another model: it has " + key)
"""

# A model that searches by hash does not read all of its rows. It computes its next
# version from the changed rows, and the version must be that of the delta before
# anything changes. Calls wait only from the commit to the release.
_COMMIT_CHANGE = """
    tensors: Dict[str, Tensor] = {}
    $table.prepare_delta(delta, tensors)
    tensors[$key] = delta.get($key, $tensor)
    if $version_of_tensors != versions[1]:
        raise ValueError(
            "the delta does not lead from this model to version " + versions[1]
            + ": the model or the delta is damaged"
        )
    change.commit()
"""

_TAKE_DELTA = """
    ids: Dict[str, Tensor] = {}
    rows: Dict[str, Tensor] = {}
    $table.take_delta(delta, ids, rows)
    take_tensor(delta, $key, $tensor)
    $table.version = versions[1]
"""

_END_CHANGE = """
    change.release()
    $table.end_delta()
"""

_END_DELTA = """
    return True
"""


def _methods(
    tables: list[str],
    dense: list[str],
    constants: list[str],
    attributes: list[str],
    hashed: str | None,
) -> str:
    """Returns the source code of the methods of a served model.

    The code has one line for each table and tensor, without conditions: torch needs
    quadratic time to load a long sequence of conditions.

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
    if hashed is None:
        templates = [
            _DESCRIPTION,
            _VERIFICATION,
            _BEGIN_DELTA,
            _CHECK_VERSION,
            _VERIFY,
            _CHECK_DELTA,
            _TAKE_DELTA,
            _END_DELTA,
        ]
        checksum_of = "checksum_of"
        version = "hexadecimal(checksum_of(tensors))"
    else:
        templates = [
            _DESCRIPTION,
            _VERIFICATION,
            _OF_HASHED_MODELS,
            _BEGIN_DELTA,
            _BEGIN_CHANGE,
            _CHECK_VERSION,
            _CHECK_DELTA,
            _COMMIT_CHANGE,
            _TAKE_DELTA,
            _END_CHANGE,
            _END_DELTA,
        ]
        # TorchScript compiles each method in its first two calls, for tens of
        # milliseconds if the method computes a checksum. The ops of the native library
        # spare a model this time.
        checksum_of = "torch.ops.recstore.checksum_of"
        version = "torch.ops.recstore.version_of(tensors)"
    names = {
        "names": ", ".join(f"{table}.name" for table in tables),
        "first": tables[0],
        "hashed": hashed or "",
        "format": str(FORMAT),
        "checksum_of": checksum_of,
        "version_of_tensors": version,
    }
    repeated: dict[str, list[dict[str, str]]] = {
        "$table": [{"table": table} for table in tables],
        "$key": [
            {"key": repr(f"dense/{name}"), "tensor": _expression(name)}
            for name in dense
        ],
        "$constant": [{"constant": constant} for constant in constants],
        "$attribute": [{"attribute": attribute} for attribute in attributes],
    }
    lines: list[str] = []
    for template in templates:
        for line in template.strip("\n").split("\n"):
            lines += _expanded(line, names, repeated)
    return "\n".join(lines) + "\n"


def _expanded(
    line: str,
    names: dict[str, str],
    repeated: dict[str, list[dict[str, str]]],
) -> list[str]:
    """Returns the lines for a line of a template.

    Args:
        line: The line.
        names: What replaces a name such as ``$first``.
        repeated: What replaces further names, by the name in lines that are repeated:
            once for each entry.
    """
    template = Template(line)
    for marker, entries in repeated.items():
        if marker in line:
            return [template.substitute(names | entry) for entry in entries]
    return [template.substitute(names)]
