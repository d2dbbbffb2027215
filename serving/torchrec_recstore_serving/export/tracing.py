"""Traces a model for TorchScript.

It notes which values of the model are written into the program.

Tests: tests/serving/export/test_tracing.py.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torchrec.fx
from torch import Tensor, nn
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from torchrec_recstore_serving.export.model_table import ModelTable
from torchrec_recstore_serving.export.structure import tensors_of

_LEAVES = [
    "ServedEmbeddingBagCollection",
    "ServedEmbeddingCollection",
    "StaticEmbedding",
    "StaticEmbeddingBag",
]

_OF_FORM = frozenset(
    {
        "__hash__",
        "__len__",
        "dim",
        "element_size",
        "is_complex",
        "is_floating_point",
        "is_signed",
        "ndimension",
        "nelement",
        "numel",
        "size",
    }
)
"""Functions and methods that read the shape and the data type of a tensor, and no
values.
"""

_PROPERTIES_OF_FORM = frozenset(
    {
        "device",
        "dtype",
        "is_cpu",
        "is_cuda",
        "is_leaf",
        "is_meta",
        "is_nested",
        "is_quantized",
        "is_sparse",
        "itemsize",
        "layout",
        "nbytes",
        "ndim",
        "requires_grad",
        "shape",
    }
)

_REFLECTED: dict[str, Callable[..., Any]] = {
    "__rdiv__": operator.truediv,
    "__rfloordiv__": operator.floordiv,
    "__rmatmul__": operator.matmul,
    "__rmod__": operator.mod,
    "__rpow__": operator.pow,
    "__rsub__": operator.sub,
    "__rtruediv__": operator.truediv,
}
"""The operators whose second operand is the tensor of the method."""


class ServedTracer(torchrec.fx.Tracer):  # type: ignore[misc]
    """TorchRec's tracer, which records one thread, and computations with tensors.

    A tracer replaces ``nn.Module.__call__`` and ``nn.Module.__getattr__`` for all
    threads of the process (torch 2.13). Calls of other threads, such as a server of
    predictions, are therefore passed on as they are.

    TorchRec's tracer records what a model computes with its arguments and parameters. A
    result that depends on buffers and attributes only, such as ``self.std + 1e-6``,
    would be a constant of the program, with the values of the trace. This tracer
    records the computation instead. If the model reads a value as a number, as in
    ``float(self.scale)``, the number is a constant, and :attr:`read_tensors` has the
    name of the tensor.

    Args:
        records: Whether computations with buffers and attributes are recorded. False:
            their results are constants, and :attr:`read_tensors` has the names of the
            tensors.
    """

    def __init__(self, *, records: bool) -> None:
        super().__init__(leaf_modules=_LEAVES)
        self._thread = threading.get_ident()
        self._records = records
        self._names: dict[int, frozenset[str]] = {}
        """The names of the model's tensors that a tensor was computed from, by the
        ``id`` of the tensor.
        """
        self._replaceable: set[str] = set()
        """The names of all buffers and attributes of the model."""
        self._tensors: list[Tensor] = []
        """The tensors of ``_names``, which must not be freed, because an ``id`` would
        be used again.
        """
        self._nodes: dict[int, torch.fx.Node] = {}
        """The recorded computation of a tensor, by the ``id`` of the tensor."""
        self._recorded: list[torch.fx.Node] = []
        self.read_tensors: set[str] = set()
        """The names of the model's tensors whose values are constants of the program.
        """

    def trace(
        self,
        root: Any,
        concrete_args: dict[str, Any] | None = None,
    ) -> torch.fx.Graph:
        """Records the computation of a model. See ``torch.fx.Tracer``."""
        for path, module in root.named_modules(remove_duplicate=False):
            if isinstance(module, ModelTable):
                continue
            for name, tensor in tensors_of(module):
                full_name = f"{path}.{name}" if path else name
                self._follow(
                    tensor,
                    self._names.get(id(tensor), frozenset()) | {full_name},
                )
                if not isinstance(tensor, nn.Parameter):
                    self._replaceable.add(full_name)
        with _Computations(self):
            graph: torch.fx.Graph = super().trace(root, concrete_args)
        for node in reversed(self._recorded):
            if not node.users:
                graph.erase_node(node)
        return graph

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Records the call of a module. See ``torch.fx.Tracer``."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(
        self,
        attr: str,
        attr_val: Any,
        parameter_proxy_cache: dict[str, Any],
    ) -> Any:
        """Records the use of an attribute of a module. See ``torch.fx.Tracer``."""
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_arg(self, a: Any) -> Any:
        """Converts an argument of a recorded call. See ``torch.fx.Tracer``."""
        if isinstance(a, Tensor):
            if id(a) in self._nodes:
                return self._nodes[id(a)]
            self._check_origin(a)
        return super().create_arg(a)

    def note_computation(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        result: Any,
    ) -> None:
        """Records a call of a function of torch.

        Its arguments must be tensors of the model, or computed from these only.

        Args:
            function: The function of torch.
            args: Its arguments.
            kwargs: Its arguments by name.
            result: Its result.
        """
        arguments = _leaves((args, kwargs))
        if _reads_form(function) or any(
            isinstance(argument, torch.fx.Proxy) for argument in arguments
        ):
            return
        names: set[str] = set()
        for argument in arguments:
            if isinstance(argument, Tensor):
                self._check_origin(argument)
                names |= self._names[id(argument)]
        if _changes_arguments(function, kwargs):
            # A recorded computation of a tensor, or of a view of it, does not have this
            # change.
            for changed in self._nodes:
                names |= self._names[changed]
            self._nodes.clear()
            self.read_tensors |= names
            return
        results = list(result) if isinstance(result, list | tuple) else [result]
        if not results or not all(isinstance(part, Tensor) for part in results):
            self.read_tensors |= names
            return
        if any(part is argument for part in results for argument in arguments):
            return
        for part in results:
            self._follow(part, frozenset(names))
        if not names:
            return
        call = _call_of(function, args, kwargs) if self._records else None
        if call is None:
            self.read_tensors |= names
            return
        kind, target, positional = call
        node = self._record(
            kind,
            target,
            self.create_arg(positional),
            self.create_arg(kwargs),
        )
        if isinstance(result, Tensor):
            self._nodes[id(result)] = node
            return
        for number, part in enumerate(results):
            self._nodes[id(part)] = self._record(
                "call_function",
                operator.getitem,
                (node, number),
                {},
            )

    def _check_origin(self, tensor: Tensor) -> None:
        """Notes that a tensor of unknown origin may depend on all tensors of the model.

        It is the result of a scripted function, for example.
        """
        if id(tensor) not in self._names:
            self.read_tensors |= self._replaceable
            self._follow(tensor, frozenset(self._replaceable))

    def _follow(self, tensor: Tensor, names: frozenset[str]) -> None:
        """Notes that a tensor depends on the model's tensors of these names."""
        self._names[id(tensor)] = names
        self._tensors.append(tensor)

    def _record(self, kind: str, target: Any, args: Any, kwargs: Any) -> torch.fx.Node:
        node: torch.fx.Node = self.create_node(kind, target, args, kwargs)
        self._recorded.append(node)
        return node


class _Computations(TorchFunctionMode):
    """Passes the calls of torch's functions in this thread to a tracer."""

    def __init__(self, tracer: ServedTracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        self._tracer.note_computation(func, args, named, result)
        return result


def _leaves(arguments: Any) -> list[Any]:
    """Returns the values in nested tuples, lists, dicts and slices."""
    values: list[Any] = []
    map_aggregate(arguments, values.append)
    return values


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", ""))


def _reads_form(function: Any) -> bool:
    """Returns whether a function reads only the shape or the data type of a tensor."""
    name = _name_of(function)
    if name == "__get__":
        return _name_of(function.__self__) in _PROPERTIES_OF_FORM
    return name in _OF_FORM


def _changes_arguments(function: Any, kwargs: dict[str, Any]) -> bool:
    """Returns whether a function changes one of its arguments."""
    name = _name_of(function)
    in_place = name.endswith("_") and not name.endswith("__")
    of_operator = name.startswith("__i") and name != "__invert__"
    return in_place or of_operator or "out" in kwargs


def _call_of(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[str, Any, tuple[Any, ...]] | None:
    """Returns the kind, the target and the arguments of the node for a call.

    None: no node can express the call.
    """
    name = _name_of(function)
    if _changes_arguments(function, kwargs):
        return None
    if name in _REFLECTED:
        tensor, operand = args
        return ("call_function", _REFLECTED[name], (operand, tensor))
    if name.startswith("__"):
        target = getattr(operator, name, None)
        return None if target is None else ("call_function", target, args)
    if getattr(Tensor, name, None) == function:
        return ("call_method", name, args)
    for module in (torch, F):
        if getattr(module, name, None) is function:
            return ("call_function", function, args)
    return None
