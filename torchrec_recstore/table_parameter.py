"""The empty parameter of a table, and the copies of its rows in ``state_dict``.

Tests: tests/sharders/test_state_writes.py, tests/sharders/test_table_parameter.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

_DATA: Any = Tensor.data
_GRAD_FN: Any = Tensor.grad_fn
_FIXES = {
    "change": (
        "set initial rows with TableOptions(initializer=...), and write rows with"
        " load_state_dict or, if the model is sharded, with load_dense_weights; a loop"
        " over parameters, such as an average of weights, leaves tables out with `if"
        " parameter.numel()`"
    ),
    "read": (
        "read rows in state_dict() or, if the model is sharded, with"
        " export_dense_weights; a loop over parameters, such as a norm of weights,"
        " leaves tables out with `if parameter.numel()`"
    ),
}


@dataclass(frozen=True)
class _GivenCopy:
    """A copy that has been returned to the user."""

    table: str
    method: str  # the method that returned the copy
    version: int  # the number of in-place writes when the copy was returned
    witness: Tensor  # counts in-place writes together with the copy
    storage: StorageWeakRef  # the memory of the copy


class GivenCopies:
    """The copies of rows that ``state_dict`` has returned and that are still in use.

    TorchRec's own tables share memory with the tensors of ``state_dict``, so that a
    write to these changes the model. A write to RecStore's copies would silently change
    nothing. It cannot raise an error at once, because
    ``torch.distributed.checkpoint.load`` writes the copies and then loads them. So the
    next use of the table raises an error, unless the state has been loaded by then.
    """

    def __init__(self) -> None:
        self._copies: list[_GivenCopy] = []
        self._refusal = ""

    def refuse_all(self, why: str) -> None:
        """Makes :meth:`check_usable` raise ``RuntimeError`` with the message ``why``
        from now on.
        """
        self._refusal = why

    def check_usable(self) -> None:
        """Raises RuntimeError if :meth:`refuse_all` has been called, because the tables
        have lost rows.
        """
        if self._refusal:
            raise RuntimeError(self._refusal)

    def give(
        self,
        table: str,
        method: str,
        copy: Tensor,
    ) -> Tensor:
        """Returns a tensor with the memory of ``copy``, which nothing else uses.
        :meth:`check` detects writes to it.

        Writes through ``.data`` or numpy are not detected, as autograd does not detect
        them either. ``method``, which returns the copy, is ``state_dict`` or
        ``fused_optimizer.state_dict``.
        """
        # Torch counts the writes to a tensor and its views together. The witness is a
        # base tensor without memory, of which the returned tensor is a view.
        with torch.inference_mode(False), torch.no_grad():
            witness = torch.empty(0, dtype=copy.dtype)
            view = witness.view(0)
            storage = (copy.clone() if copy.is_inference() else copy).untyped_storage()
            view.set_(
                storage,
                copy.storage_offset(),
                copy.size(),
                copy.stride(),
            )
        given_copy = _GivenCopy(
            table=table,
            method=method,
            version=view._version,
            witness=witness,
            storage=StorageWeakRef(storage),  # type: ignore[no-untyped-call]
        )
        self._copies.append(given_copy)
        return view

    def forget(self, table: str, method: str) -> None:
        """Forgets the copies that a method has returned of a table, because the table's
        state has been loaded.
        """
        self._copies = [
            copy
            for copy in self._copies
            if (copy.table, copy.method) != (table, method)
        ]

    def check(self) -> None:
        """Raises RuntimeError, once, if a copy has been written to and the state has
        not been loaded afterwards.

        Calls :meth:`check_usable`, too. Does nothing else while torch traces a model.
        """
        self.check_usable()
        if not self._copies or torch.compiler.is_compiling():
            return
        written = [
            copy for copy in self._copies if copy.witness._version != copy.version
        ]
        self._copies = [
            copy
            for copy in self._copies
            if not copy.storage.expired()  # type: ignore[no-untyped-call]
        ]
        for copy in written:
            self.forget(copy.table, copy.method)
        if written:
            table = written[0].table
            method = written[0].method
            load_method = method.replace("state_dict", "load_state_dict")
            raise RuntimeError(
                f"table {table!r}: a tensor of {method}() has been written to, which"
                " changes no row, because it is a copy: load the written state with"
                f" {load_method}(...), or the weights of a sharded model with"
                " load_dense_weights; to keep the model unchanged, write to a clone"
            )

    def __reduce__(self) -> tuple[type[GivenCopies], tuple[()]]:
        return GivenCopies, ()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _needs_no_rows(func: Any) -> bool:
    # torch.compile (2.13) cannot look up a function in a set itself.
    return func in _WITHOUT_ROWS


class _Unwritable(Tensor):
    """A tensor without rows.

    Torch functions that would read or write its rows raise an error.

    All torch functions reach :meth:`__torch_function__`, also those that take the
    tensor in a list, by keyword or as ``out``. Only the functions of ``_WITHOUT_ROWS``
    and ``_ALIASES`` are called.
    """

    table: str
    _node_below_alias: Any = None

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls a function that needs no rows.

        Raises:
            RuntimeError: The function would read or change rows. The message names the
                table.
        """
        if _needs_no_rows(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _alias(func, args, kwargs or {})

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """The node of autograd that made the rows.

        It is not the node of :meth:`torch.Tensor.as_subclass`, which follows it:
        callers of ``view_as`` look for the parameter behind the first node.
        """
        with torch._C.DisableTorchFunctionSubclass():
            node = _GRAD_FN.__get__(self)
        if node is None or self._node_below_alias is None:
            return node
        return self._node_below_alias

    @property
    def data(self) -> Tensor:
        """The tensor without autograd. It raises the same errors."""
        with torch._C.DisableTorchFunctionSubclass():
            alias: Tensor = _guarded(_DATA.__get__(self), self.table)
            return alias

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.numel():
            _refuse(self, "data")
        with torch._C.DisableTorchFunctionSubclass():
            # Module.to() sets data to an empty tensor
            _DATA.__set__(self, value.as_subclass(Tensor))

    def copy_(self, src: Tensor, non_blocking: bool = False) -> Tensor:
        """Raises an error, unless ``src`` is marked by :func:`without_rows_to_load`."""
        if not getattr(src, "_has_no_rows_to_load", False):
            _refuse(self, "copy_")
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = _guarded(_plain(self).clone(), self.table)
        return copied


class TableParameter(_Unwritable, nn.Parameter):
    """The parameter that represents a table in a module. It is always empty: (0, dim).

    A write to it raises ``RuntimeError``, which names the table, because functions that
    initialize parameters, as in ``model.apply(init_weights)``, would silently change
    nothing. So does a read, which would find no row.
    """

    def __new__(
        cls,
        data: Tensor,
        requires_grad: bool = True,
        *,
        table: str,
    ) -> TableParameter:
        """Makes the parameter, as ``nn.Parameter.__new__`` does."""
        parameter = Tensor._make_subclass(cls, _plain(data), requires_grad)
        parameter.table = table
        return parameter

    def __reduce_ex__(self, protocol: Any) -> Any:
        make = partial(TableParameter, table=self.table)
        return make, (_plain(self).detach(), self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableParameter:
        copied = TableParameter(
            _plain(self).detach().clone(),
            self.requires_grad,
            table=self.table,
        )
        memo[id(self)] = copied
        return copied


def are_trained(parameters: Iterable[Tensor]) -> list[bool]:
    """Returns ``requires_grad`` of parameters, without calls of ``__torch_function__``."""
    with torch._C.DisableTorchFunctionSubclass():
        return [parameter.requires_grad for parameter in parameters]


def without_rows_to_load(tensor: Tensor) -> Tensor:
    """Marks the tensor of a table in a state dict, whose rows are loaded otherwise, and
    returns it.

    ``nn.Module.load_state_dict`` may then copy it to the parameter of the table.
    """
    tensor._has_no_rows_to_load = True  # type: ignore[attr-defined]
    return tensor


def _plain(tensor: Tensor) -> Tensor:
    """Returns an alias of a tensor that is not guarded."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def _guarded(result: Any, table: str) -> Any:
    """Makes a tensor that torch has just returned an alias of a table's parameter.

    Returns other results unchanged.
    """
    if type(result) is not Tensor:
        return result
    if result.requires_grad:
        alias = result.as_subclass(_Unwritable)
        alias._node_below_alias = result.grad_fn
    else:
        # as_subclass would make a view, which cannot be detached in place.
        alias = Tensor._make_subclass(_Unwritable, result)
    alias.table = table
    return alias


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _alias(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a function of ``_ALIASES``, and raises RuntimeError for any other function."""
    if func not in _ALIASES:
        guarded = next(_guarded_within([args, kwargs]))
        effect = "change" if _writes(func, args, kwargs) else "read"
        _refuse(guarded, _name_of(func), effect)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    # The result has the rows of the first argument. The other arguments lend only their
    # dtype, device or shape, as in `tensor.to(parameter)`, which returns the tensor
    # itself if nothing is to be converted.
    source = args[0] if args else kwargs.get("input")
    if isinstance(source, _Unwritable):
        return _guarded(result, source.table)
    return result


def _refuse(
    tensor: _Unwritable,
    method: str,
    effect: str = "change",
) -> NoReturn:
    raise RuntimeError(
        f"table {tensor.table!r}: {method} would {effect} no row, because its weight is"
        f" an empty parameter and its rows are in RecStore: {_FIXES[effect]}"
    )


def _guarded_within(value: Any) -> Iterator[_Unwritable]:
    """Yields the guarded tensors in an argument of a torch function."""
    if isinstance(value, _Unwritable):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _guarded_within(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _guarded_within(item)


def _writes(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> bool:
    """Returns whether a torch function would change the rows of a guarded tensor."""
    if list(_guarded_within(kwargs.get("out"))):
        return True
    name = _name_of(func)
    is_in_place = name.endswith("_") and not name.endswith("__")
    is_operator = name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}")
    is_assignment = name == "__setitem__" or func.__name__ == "__set__"
    if not (is_in_place or is_operator or is_assignment):
        return False
    target = args[0] if args else next(iter(kwargs.values()))
    return bool(list(_guarded_within(target)))


def _name_of(func: Any) -> str:
    """Returns the name of a torch function for an error message."""
    if func.__name__ in ("__get__", "__set__"):
        attribute = func.__self__
        return str(getattr(attribute, "fget", attribute).__name__)
    operator, _, _overload = func.__name__.partition(".")
    return str(operator)


def _functions_named(names: str) -> Iterator[Any]:
    """Yields torch's functions, and tensors' methods and properties, of these names.

    Releases of torch differ in which of them exist.
    """
    for name in names.split():
        function = getattr(torch, name, None)
        if callable(function) and not isinstance(function, type):
            yield function
        method = getattr(Tensor, name, None)
        if callable(method):
            yield method
        elif method is not None:
            yield method.__get__
            yield method.__set__


# Each of these functions tells the same of a tensor without rows as of the table, or
# does nothing to rows. Optimizers, DistributedDataParallel, torch.save,
# torch.distributed.checkpoint, torch.compile, Lightning and Accelerate call them.
_METADATA = """
    device dtype layout shape size stride ndim dim ndimension numel nelement nbytes itemsize
    element_size storage_offset __len__ is_contiguous dim_order names has_names get_device
    result_type is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested
    is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu is_complex is_floating_point
    is_signed is_inference is_conj is_neg is_pinned is_shared is_same_size is_set_to
    __hash__ __repr__ __format__ __dir__ name _has_compatible_shallow_copy_type
    _version _base _is_view _cdata data_ptr storage untyped_storage storage_type _typed_storage
    __dlpack_device__
"""
_OF_AUTOGRAD = """
    requires_grad requires_grad_ is_leaf grad _grad grad_fn _grad_fn grad_dtype output_nr
    retains_grad retain_grad volatile register_hook register_post_accumulate_grad_hook
    _backward_hooks _post_accumulate_grad_hooks detach_ rename_ share_memory_
"""
_NEW_TENSORS = """
    new new_tensor new_empty new_empty_strided new_full new_ones new_zeros
    empty_like full_like ones_like rand_like randint_like randn_like zeros_like
"""
_WITHOUT_ROWS = frozenset(
    [*_functions_named(_METADATA + _OF_AUTOGRAD + _NEW_TENSORS), torch.autograd.grad]
)

# These functions return tensors with the rows of their first argument. They are guarded
# if this argument is.
_ALIASES = frozenset(
    _functions_named("""
        detach clone view view_as expand_as reshape flatten contiguous pin_memory
        to type type_as cpu cuda xpu double float half bfloat16
        """)
)
