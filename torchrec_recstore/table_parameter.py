"""The tensors that represent a table in a module: its empty parameter, and the copies in ``state_dict``.

Tests: tests/sharders/test_state_writes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

_DATA: Any = Tensor.data
_FIXES = {
    "change": "set initial rows with TableOptions(initializer=...), and write rows with load_state_dict or, if the "
    "model is sharded, with load_dense_weights",
    "read": "read rows in state_dict() or, if the model is sharded, with export_dense_weights",
}


@dataclass(frozen=True)
class _Given:
    """A copy that has been returned to the user."""

    of: tuple[str, str]  # the name of the table, and the method that returned the copy
    version: int  # the number of in-place writes when the copy was returned
    witness: Tensor  # counts in-place writes together with the copy
    storage: StorageWeakRef  # the memory of the copy


class GivenCopies:
    """The copies of rows that ``state_dict`` has returned and that are still in use.

    TorchRec's own tables share memory with the tensors of ``state_dict``, so that a write to these changes the model. A
    write to RecStore's copies would silently change nothing. It cannot raise an error at once, because
    ``torch.distributed.checkpoint.load`` writes the copies and then loads them. So the next use of the table raises an
    error, unless the state has been loaded by then.
    """

    def __init__(self) -> None:
        self._given: list[_Given] = []
        self._refusal = ""

    def refuse_all(self, why: str) -> None:
        """Makes :meth:`check_usable` raise ``RuntimeError`` with the message ``why`` from now on."""
        self._refusal = why

    def check_usable(self) -> None:
        """Raises RuntimeError if :meth:`refuse_all` has been called, because the tables have lost rows."""
        if self._refusal:
            raise RuntimeError(self._refusal)

    def give(self, table: str, method: str, copy: Tensor) -> Tensor:
        """Returns a tensor with the memory of ``copy``, which nothing else uses. :meth:`check` detects writes to it.

        Writes through ``.data`` or numpy are not detected, as autograd does not detect them either. ``method``, which
        returns the copy, is ``state_dict`` or ``fused_optimizer.state_dict``.
        """
        # Torch counts the writes to a tensor and its views together. The witness is a base tensor without memory, of
        # which the returned tensor is a view.
        with torch.inference_mode(False), torch.no_grad():
            witness = torch.empty(0, dtype=copy.dtype)
            given = witness.view(0)
            storage = (copy.clone() if copy.is_inference() else copy).untyped_storage()
            given.set_(storage, copy.storage_offset(), copy.size(), copy.stride())
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._given.append(_Given((table, method), given._version, witness, reference))
        return given

    def forget(self, table: str, method: str) -> None:
        """Forgets the copies that a method has returned of a table, because the table's state has been loaded."""
        self._given = [each for each in self._given if each.of != (table, method)]

    def check(self) -> None:
        """Raises RuntimeError, once, if a copy has been written to and the state has not been loaded afterwards.

        Calls :meth:`check_usable`, too. Does nothing else while torch traces a model.
        """
        self.check_usable()
        if not self._given or torch.compiler.is_compiling():
            return
        written = [each.of for each in self._given if each.witness._version != each.version]
        lasting = [each for each in self._given if not each.storage.expired()]  # type: ignore[no-untyped-call]
        self._given = [each for each in lasting if each.of not in written]
        if written:
            table, method = written[0]
            raise RuntimeError(
                f"table {table!r}: a tensor of {method}() has been written to, which changes no row, because it is a "
                f"copy: load the written state with {method.replace('state_dict', 'load_state_dict')}(...), or the "
                "weights of a sharded model with load_dense_weights; to keep the model unchanged, write to a clone"
            )

    def __reduce__(self) -> tuple[type[GivenCopies], tuple[()]]:
        return GivenCopies, ()


class _Unwritable(Tensor):
    """A tensor without rows. In-place methods and reads raise an error. Other operations return plain tensors."""

    # Without __torch_function__, operations are as fast as those of plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    table: str

    @property
    def data(self) -> Tensor:
        """The tensor without autograd. In-place methods of it raise an error too."""
        return _unwritable(_DATA.__get__(self), self.table)

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.numel():
            _refuse(self, "data")
        _DATA.__set__(self, value.as_subclass(Tensor))  # Module.to() sets data to an empty tensor

    def detach(self) -> Tensor:
        """Returns the tensor without autograd. See :attr:`data`."""
        return _unwritable(super().detach(), self.table)

    def copy_(self, src: Tensor, non_blocking: bool = False) -> Tensor:
        """Raises an error, unless ``src`` has no rows either, as when ``load_state_dict`` has taken its rows."""
        if not isinstance(src, _Unwritable):
            _refuse(self, "copy_")
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return _unwritable(self.as_subclass(Tensor).clone(), self.table)


class TableParameter(_Unwritable, nn.Parameter):
    """The parameter that represents a table in a module. It is always empty: (0, dim).

    A write to it raises ``RuntimeError``, which names the table, because functions that initialize parameters, as in
    ``model.apply(init_weights)``, would silently change nothing. So does a read, which would find no row.
    """

    def __new__(cls, data: Tensor, requires_grad: bool = True, *, table: str) -> TableParameter:
        """Makes the parameter, as ``nn.Parameter.__new__`` does."""
        parameter = Tensor._make_subclass(cls, data.as_subclass(Tensor), requires_grad)
        parameter.table = table
        return parameter

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = partial(TableParameter, table=self.table)
        return made, (self.as_subclass(Tensor).detach(), self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableParameter:
        copied = TableParameter(self.as_subclass(Tensor).detach().clone(), self.requires_grad, table=self.table)
        memo[id(self)] = copied
        return copied


def _unwritable(tensor: Tensor, table: str) -> Tensor:
    found = Tensor._make_subclass(_Unwritable, tensor)
    found.table = table
    return found


def _refuse(tensor: _Unwritable, method: str, effect: str = "change") -> NoReturn:
    raise RuntimeError(
        f"table {tensor.table!r}: {method} would {effect} no row, because its weight is an empty parameter and its "
        f"rows are in RecStore: {_FIXES[effect]}"
    )


def _refusing(method: str, effect: str = "change") -> Callable[..., NoReturn]:
    def refuse(self: _Unwritable, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self, method, effect)

    refuse.__name__ = method
    return refuse


# These methods change no values.
_HARMLESS = {"copy_", "detach_", "requires_grad_", "share_memory_", "is_shared_", "rename_"}
_IN_PLACE = [name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_") and name not in _HARMLESS]
_OPERATORS = [name for name in dir(Tensor) if name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}")]
for _name in (*_IN_PLACE, *_OPERATORS, "__setitem__"):
    setattr(_Unwritable, _name, _refusing(_name))
for _name in ("__getitem__", "__pow__", "abs", "max", "mean", "min", "norm", "numpy", "pow", "square", "sum", "tolist"):
    setattr(_Unwritable, _name, _refusing(_name, "read"))
