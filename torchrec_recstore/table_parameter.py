"""The tensors that represent a table in a module: its empty parameter, and the copies in ``state_dict``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True)
class _Given:
    of: tuple[str, str]
    version: int
    witness: Tensor
    storage: StorageWeakRef


class GivenCopies:
    """The copies that were given out and are still in use.

    TorchRec's own tables share their memory with the tensors of ``state_dict``, so that writing these changes the
    model. RecStore's rows come and go, and are copied: a write would change nothing, without a word. A copy may be
    written on its way back, as ``torch.distributed.checkpoint.load`` does, so that no write is refused at once: the
    next use of the table raises, unless the state has been loaded by then.
    """

    def __init__(self) -> None:
        self._given: list[_Given] = []

    def give(self, table: str, what: str, copy: Tensor) -> Tensor:
        """The same tensor, whose writes are noticed by :meth:`check`.

        Writes through ``.data`` or numpy are not noticed, as autograd does not notice them.

        Args:
            table: The name of the table.
            what: ``state_dict`` or ``fused_optimizer.state_dict``.
            copy: a tensor that nothing else uses.
        """
        # Views count their writes together. The witness is what the copy is a view of, with no memory of its own.
        with torch.inference_mode(False), torch.no_grad():
            witness = torch.empty(0, dtype=copy.dtype)
            given = witness.view(0)
            storage = (copy.clone() if copy.is_inference() else copy).untyped_storage()
            given.set_(storage, copy.storage_offset(), copy.size(), copy.stride())
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._given.append(_Given((table, what), given._version, witness, reference))
        return given

    def forget(self, table: str, what: str) -> None:
        """Ends the watch over the copies of a table: its state has been loaded."""
        self._given = [each for each in self._given if each.of != (table, what)]

    def check(self) -> None:
        """Raises for copies that have been written to, once. Does nothing while torch traces a model.

        Raises:
            RuntimeError: one was, and its state was not loaded afterwards.
        """
        if not self._given or torch.compiler.is_compiling():
            return
        written = [each.of for each in self._given if each.witness._version != each.version]
        self._given = [each for each in self._given if each.of not in written and not _is_gone(each)]
        if written:
            table, what = written[0]
            raise RuntimeError(
                f"table {table!r}: a tensor of {what}() has been written to, which changes no row, since it is a copy: "
                f"load the written state with {what.replace('state_dict', 'load_state_dict')}(...), or weights of a "
                "sharded model with load_dense_weights; clone the tensor where the model is not to change"
            )

    def __reduce__(self) -> tuple[type[GivenCopies], tuple[()]]:
        return GivenCopies, ()


def _is_gone(given: _Given) -> bool:
    gone: bool = given.storage.expired()  # type: ignore[no-untyped-call]
    return gone


_DATA: Any = Tensor.data
_FIX = (
    "initial rows are set by TableOptions(initializer=...), given ones by load_state_dict or, where the model is "
    "sharded, load_dense_weights"
)


class _Unwritable(Tensor):
    """A tensor without rows. In-place methods raise; other operations give plain tensors."""

    # Attributes and operations are those of plain tensors, at their speed.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    table: str

    @property
    def data(self) -> Tensor:
        """The tensor without autograd, which refuses to be written as well."""
        return _unwritable(_DATA.__get__(self), self.table)

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.numel():
            _refuse(self, "data")
        _DATA.__set__(self, value.as_subclass(Tensor))  # Module.to() and the like

    def detach(self) -> Tensor:
        """As :attr:`data`."""
        return _unwritable(super().detach(), self.table)

    def copy_(self, src: Tensor, non_blocking: bool = False) -> Tensor:
        """Refused, unless ``src`` stands for rows, too: loading a state has taken them out of it."""
        if not isinstance(src, _Unwritable):
            _refuse(self, "copy_")
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return _unwritable(self.as_subclass(Tensor).clone(), self.table)


class TableParameter(_Unwritable, nn.Parameter):
    """The parameter that represents a table's rows: (0, dim), and empty for good.

    Functions that initialise parameters, as in ``model.apply(init_weights)``, would change nothing, so writing it
    raises ``RuntimeError``.

    Args:
        data: (0, dim).
        requires_grad: as for ``nn.Parameter``.
        table: The name of the table, for errors.
    """

    def __new__(cls, data: Tensor, requires_grad: bool = True, *, table: str) -> TableParameter:
        """As ``nn.Parameter``."""
        parameter = Tensor._make_subclass(cls, data.as_subclass(Tensor), requires_grad)
        parameter.table = table
        return parameter

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.as_subclass(Tensor).detach(), self.requires_grad, self.table)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableParameter:
        copied = TableParameter(self.as_subclass(Tensor).detach().clone(), self.requires_grad, table=self.table)
        memo[id(self)] = copied
        return copied


def _rebuilt(data: Tensor, requires_grad: bool, table: str) -> TableParameter:
    return TableParameter(data, requires_grad, table=table)


def _unwritable(tensor: Tensor, table: str) -> Tensor:
    found = Tensor._make_subclass(_Unwritable, tensor)
    found.table = table
    return found


def _refuse(tensor: _Unwritable, method: str) -> NoReturn:
    raise RuntimeError(
        f"table {tensor.table!r}: {method} would change no row, since its weight is an empty parameter and its rows "
        f"are in RecStore: {_FIX}"
    )


def _refusing(method: str) -> Callable[..., NoReturn]:
    def refuse(self: _Unwritable, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self, method)

    refuse.__name__ = method
    return refuse


# Those change no value.
_HARMLESS = {"copy_", "detach_", "requires_grad_", "share_memory_", "is_shared_", "rename_"}
_IN_PLACE = [name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_") and name not in _HARMLESS]
_OPERATORS = [name for name in dir(Tensor) if name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}")]
for _name in (*_IN_PLACE, *_OPERATORS, "__setitem__"):
    setattr(_Unwritable, _name, _refusing(_name))
