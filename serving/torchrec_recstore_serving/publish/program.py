"""The compiled program of a published model.

It is compiled once, and gets the rows and dense tensors of each full publication.

Compiling takes place in the thread that calls :meth:`Program.compile`, because
TorchScript's classes and TorchRec's tracer belong to the whole process.
:meth:`Program.load` compiles nothing, and may be called in any thread.

Tests: tests/serving/publish/test_program.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_recstore_serving.export.hashed_tables import HashedTable
from torchrec_recstore_serving.export.row_formats import TYPE_NUMBERS
from torchrec_recstore_serving.export.scriptable_modules import (
    copied_with,
    dense_tensors,
    served_tables,
    tensor_at,
)
from torchrec_recstore_serving.export.sorted_tables import ServedQuantTable, ServedTable
from torchrec_recstore_serving.export.structure import constant_of, structure_of
from torchrec_recstore_serving.export.tables_on_servers import ServerTable
from torchrec_recstore_serving.export.torchscript import compiled, set_version
from torchrec_recstore_serving.export.verification import hexadecimal_checksum

_MANGLED = re.compile(r"___torch_mangle_\d+\.")
"""What TorchScript adds to the names of classes, so that they differ within the
process.
"""

_KINDS = {
    kind.__name__: kind
    for kind in (HashedTable, ServedTable, ServedQuantTable, ServerTable)
}


class Program:
    """A compiled model whose rows and dense tensors can be replaced.

    They are replaced by those of models of the same structure.

    Args:
        index: How the tables search ids, ``"hash"`` or ``"sorted"``.
    """

    def __init__(self, index: str) -> None:
        self._index = index
        self._structure: object = None
        self._read_tensors: frozenset[str] = frozenset()
        """The names of the dense tensors whose values are constants of the compiled
        code.
        """
        self._read_values: object = None
        self._code: object = None
        """What distinguishes the compiled model from others; see :func:`_code_of`."""
        self._script: torch.jit.ScriptModule | None = None
        self.dense: list[str] = []
        """The names of the tensors of the compiled model outside its tables."""

    @property
    def script(self) -> torch.jit.ScriptModule:
        """The compiled model."""
        assert self._script is not None
        return self._script

    def fits(self, served: nn.Module) -> bool:
        """Returns whether the compiled model fits a model.

        Its structure is that of the model, and so are the constants of its code.

        Args:
            served: The result of :func:`torchrec_recstore.inference.scriptable` with
                ``index="sorted"``. Its tables need not have rows.
        """
        if self._script is None:
            return False
        if structure_of(served) != self._structure:
            return False
        return _values_of(served, self._read_tensors) == self._read_values

    def compile(self, served: nn.Module) -> bool:
        """Compiles a model, unless the result would be the same as before.

        The result is the same if only attributes have changed that the compiled code
        does not depend on.

        Args:
            served: See :meth:`fits`.

        Returns:
            Whether the compiled model is another one now.

        Raises:
            ValueError: See :func:`torchrec_recstore_serving.export.torchscript.scripted`. The
                program is as it was.
        """
        # before TorchScript adds attributes to the modules
        structure = structure_of(served)
        source = _without_rows(served) if self._index == "hash" else served
        script, read_tensors = compiled(source)
        dense: list[str] = []
        for name in dense_tensors(served, every_path=True):
            if tensor_at(script, name) is not None:
                dense.append(name)
        read_values = _values_of(served, read_tensors)
        code = _code_of(script, dense)
        self._structure = structure
        self._read_tensors = read_tensors
        self._read_values = read_values
        if code == self._code:
            return False
        self._code = code
        self._script = script
        self.dense = dense
        return True

    def load(self, served: nn.Module) -> torch.jit.ScriptModule:
        """Replaces the rows, the dense tensors and the version of the compiled model.

        Returns the compiled model.

        Args:
            served: A model of the structure that :meth:`compile` has compiled last. The
                compiled model shares its rows if the index is ``"sorted"``.
        """
        script = self.script
        natives: dict[int, Any] = {}
        for path, module in script_tables(script):
            table = served.get_submodule(path)
            if isinstance(table, ServerTable):
                module.native = table.native
                continue
            assert isinstance(table, ServedTable)
            if self._index == "hash" and table.has_ids:
                if id(table) not in natives:
                    natives[id(table)] = _native(table)
                module.native = natives[id(table)]
            else:
                module.ids = table.ids
                module.rows = table.rows
        tensors = dense_tensors(served, every_path=True)
        for name in self.dense:
            dense_tensor(script, name).copy_(tensors[name])
        version = script_version(script, self.dense)
        set_version(script, version, script.recstore_attributes())
        return script

    def mapped_tables(self, rows: str) -> list[Any]:
        """Returns the tables whose rows a process maps from the file of the model.

        Args:
            rows: Where a process has the rows, ``"memory"``, ``"mapped"`` or
                ``"servers"``.
        """
        if rows != "mapped":
            return []
        tables: dict[str, Any] = {}  # by name, because a table may have several paths
        for _, table in script_tables(self.script):
            if hasattr(table, "native"):
                tables[table.name] = table
        return list(tables.values())


def script_tables(script: torch.jit.ScriptModule) -> Iterator[tuple[str, Any]]:
    """Yields each table of a compiled model with its path, for each of its paths."""
    for path, module in script.named_modules(remove_duplicate=False):
        if hasattr(module, "row_format"):
            yield path, module


def dense_tensor(script: torch.jit.ScriptModule, name: str) -> Tensor:
    """Returns the tensor of a compiled model that has this name."""
    tensor = tensor_at(script, name)
    assert tensor is not None
    return tensor


def script_version(script: torch.jit.ScriptModule, dense: Sequence[str]) -> str:
    """Returns the version of a compiled model, as ``verify`` computes it.

    It is that of the present rows and dense tensors.

    Args:
        script: The compiled model.
        dense: The names of all of its tensors outside the tables.
    """
    tensors = {f"dense/{name}": dense_tensor(script, name) for name in dense}
    for _, table in script_tables(script):
        _KINDS[table.original_name].give_tensors(table, tensors)
    return hexadecimal_checksum(tensors)


def _code_of(script: torch.jit.ScriptModule, dense: Sequence[str]) -> object:
    """Returns what :meth:`Program.load` does not replace of a compiled model.

    The result can be compared.
    """
    methods: list[object] = []
    tables: list[object] = []
    for path, module in script.named_modules(remove_duplicate=False):
        if hasattr(module, "row_format"):
            tables.append((path, module.original_name, str(module.name)))
            continue
        for name in module._c._method_names():
            code, constants = module._c._get_method(name).code_with_constants
            values = [constant_of(value) for value in constants.values()]
            methods.append((path, name, _MANGLED.sub("", code), values))
    tensors: list[object] = []
    first_names: dict[int, str] = {}
    for name in dense:
        tensor = dense_tensor(script, name)
        first_name = name
        if tensor.numel():
            first_name = first_names.setdefault(tensor.data_ptr(), name)
        tensors.append((name, first_name, tuple(tensor.shape), tensor.dtype))
    return (
        methods,
        tables,
        tensors,
        script.recstore_attributes(),
        _lists_of_tensors(script, first_names),
    )


def _lists_of_tensors(
    script: torch.jit.ScriptModule,
    names: Mapping[int, str],
) -> object:
    """Describes the lists, tuples and dicts of a compiled model that may have tensors.

    Args:
        script: The compiled model.
        names: The names of the dense tensors by their addresses. A list that has a
            dense tensor, such as the list of weights of a recurrent layer, shares its
            memory.
    """
    described: list[object] = []

    def value_of(value: object) -> object:
        if isinstance(value, Tensor):
            return names.get(value.data_ptr()) or constant_of(value)
        if isinstance(value, list | tuple):
            return [value_of(part) for part in value]
        if isinstance(value, dict):
            return [(repr(key), value_of(part)) for key, part in value.items()]
        return constant_of(value)

    for path, module in script.named_modules(remove_duplicate=False):
        if hasattr(module, "row_format"):
            continue
        for name, (kind, _) in sorted(module._concrete_type.get_attributes().items()):
            value = getattr(module, name, None)
            has_parts = isinstance(value, list | tuple | dict)
            if has_parts and "Tensor" in kind.annotation_str:
                described.append((path, name, value_of(value)))
    return described


def _values_of(served: nn.Module, names: Collection[str]) -> object:
    """Describes the values of the dense tensors of these names."""
    if not names:
        return []
    tensors = dense_tensors(served, every_path=True)
    return [(name, constant_of(tensors[name])) for name in sorted(names)]


def _native(table: ServedTable) -> Any:
    """Returns the native object of a table with a hash index."""
    return torch.classes.recstore.ServedTable(
        TYPE_NUMBERS.get(table.row_format, 0),
        table.dim,
        table.raw_ids().contiguous(),
        table.rows.contiguous(),
    )


def _without_rows(served: nn.Module) -> nn.Module:
    """Copies a model with tables that search by hash and have no rows.

    The dense tensors are shared.
    """
    replaced: dict[int, Any] = {}
    for tensor in [*served.parameters(), *served.buffers()]:
        replaced[id(tensor)] = tensor
    for _, table in served_tables(served):
        if isinstance(table, ServerTable):
            replaced[id(table)] = table
        elif isinstance(table, ServedTable) and table.has_ids:
            replaced[id(table)] = HashedTable(
                name=table.name,
                dim=table.dim,
                row_format=table.row_format,
                ids=torch.empty(0, dtype=torch.int64),
                rows=table.rows[:1],
            )
    return copied_with(served, replaced)
