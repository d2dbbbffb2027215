"""Describes the structure of a served model.

It is everything that the compiled code depends on, without the tensors.

Tests: tests/serving/publish/test_program.py.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_recstore_serving.export.model_table import ModelTable

_PLAIN = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        torch.dtype,
        torch.device,
        torch.layout,
        range,
    }
)
_FUNCTIONS = (
    type,
    types.BuiltinFunctionType,
    types.ModuleType,
    torch.jit.ScriptFunction,
)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_OF_PUBLICATIONS = ("version", "attributes", "native")


def structure_of(model: nn.Module) -> object:
    """Returns a description of a served model.

    Programs of models with equal descriptions are equal.

    The description has the modules with their paths and types, which of them are the
    same object, the shapes and data types of the dense tensors, and the values of all
    other attributes. The rows, the ids and the values of dense tensors are not in it,
    because a publication replaces them.

    An object is described by its ``__dict__`` and by what ``copy.deepcopy`` and
    ``pickle`` read of it. The description of an object that cannot be read in this way
    is equal to no other description.

    Args:
        model: The model, in the form of :func:`torchrec_recstore.inference.scriptable`
            with ``index="sorted"``.
    """
    return _Description(model).of_model()


class _Description:
    """A description of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._first_paths: dict[int, str] = {}
        """The first path of each module and each dense tensor, by its ``id``."""
        self._open: list[int] = []
        """The ids of the objects that are being described, in which a cycle may return.
        """

    def of_model(self) -> object:
        """Returns the description of the model."""
        for path, module in self._model.named_modules():
            self._first_paths[id(module)] = path
            if not isinstance(module, ModelTable):
                for name, tensor in tensors_of(module):
                    self._first_paths.setdefault(id(tensor), f"{path}.{name}")
        parts: list[object] = []
        for path, module in self._model.named_modules(remove_duplicate=False):
            first = self._first_paths[id(module)]
            if first != path:
                parts.append((path, first))
                continue
            parts.append(
                (
                    path,
                    type(module),
                    self._tensors(module),
                    self._attributes(module),
                )
            )
        return parts

    def _tensors(self, module: nn.Module) -> object:
        """Describes the parameters, buffers and tensor attributes of a module."""
        if isinstance(module, ModelTable):
            return ()
        described: list[object] = []
        for name, tensor in tensors_of(module):
            described.append(
                (
                    name,
                    type(tensor),
                    self._first_paths[id(tensor)],
                    tuple(tensor.shape),
                    tensor.dtype,
                )
            )
        empty = [
            name
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]
            if tensor is None
        ]
        return (described, empty)

    def _attributes(self, module: nn.Module) -> object:
        """Describes the attributes of a module that are neither tensors nor modules."""
        described: list[object] = []
        for name, value in sorted(vars(module).items()):
            if name in _OF_MODULES or isinstance(value, Tensor):
                continue
            if isinstance(module, ModelTable) and name in _OF_PUBLICATIONS:
                continue
            described.append((name, self._value(value)))
        return described

    def _value(self, value: object) -> object:
        if type(value) in _PLAIN:
            return (type(value), repr(value))
        if isinstance(value, bytes):
            return (
                type(value),
                len(value),
                hashlib.blake2b(value, digest_size=16).hexdigest(),
            )
        if isinstance(value, _FUNCTIONS):
            return value
        if isinstance(value, Tensor | nn.Module) and id(value) in self._first_paths:
            return self._first_paths[id(value)]
        if isinstance(value, Tensor):
            return _constant_or_unknown(value)
        if id(value) in self._open:
            return (type(value), "a cycle")
        self._open.append(id(value))
        try:
            return self._composed(value)
        finally:
            self._open.pop()

    def _composed(self, value: Any) -> object:
        """Describes an object that consists of other objects."""
        kind = type(value)
        if kind is dict:
            items = [
                (self._value(key), self._value(content))
                for key, content in value.items()
            ]
            return (kind, items)
        if kind in (list, tuple):
            return (kind, [self._value(content) for content in value])
        if kind in (set, frozenset):
            return (kind, sorted(repr(self._value(content)) for content in value))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return (
                kind,
                self._value(value.__func__),
                self._value(value.__self__),
            )
        if isinstance(value, functools.partial):
            return (
                kind,
                self._value(value.func),
                self._value(value.args),
                self._value(value.keywords),
            )
        if isinstance(value, weakref.ref):
            return (kind, self._value(value()))
        if isinstance(value, _LOCKS):
            return kind
        if isinstance(value, nn.Module):
            return (kind, self._value(vars(value)))
        return self._object(value)

    def _function(self, function: types.FunctionType) -> object:
        """Describes a function with its defaults and the variables of the function
        around it.
        """
        variables: list[object] = []
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # The variable has no value yet.
                content = _FUNCTIONS
            variables.append(self._value(content))
        defaults = self._value(function.__defaults__)
        keyword_defaults = self._value(function.__kwdefaults__)
        return (
            function,
            function.__code__,
            defaults,
            keyword_defaults,
            variables,
            self._value(vars(function)),
        )

    def _object(self, value: Any) -> object:
        """Describes an object of any other class."""
        attributes = getattr(value, "__dict__", None)
        described = None if attributes is None else self._value(attributes)
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:
            return (type(value), described, object())  # equal to nothing
        if isinstance(reduced, str):
            return (type(value), described, reduced)
        parts: list[object] = []
        for part in reduced:
            parts.append(
                self._value(list(part) if isinstance(part, Iterator) else part)
            )
        return (type(value), described, parts)


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters, buffers and tensor attributes of a module by name."""
    for name, value in {
        **vars(module),
        **module._parameters,
        **module._buffers,
    }.items():
        if isinstance(value, Tensor):
            yield name, value


def _constant_or_unknown(tensor: Tensor) -> object:
    """Describes a tensor by its contents.

    A tensor that cannot be read, such as a sparse one, is equal to no other.
    """
    try:
        return constant_of(tensor)
    except Exception:
        return object()


def constant_of(value: object) -> object:
    """Describes a value that is written into compiled code.

    A tensor is described by its contents, another value by its ``repr``.
    """
    if not isinstance(value, Tensor):
        return (type(value), repr(value))
    values = value.detach().cpu().contiguous().reshape(-1)
    data = values.view(torch.uint8).numpy().tobytes()
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return (tuple(value.shape), value.dtype, digest)
