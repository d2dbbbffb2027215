"""Tensors that ``state_dict`` gives as copies of rows, and whether they have been written to since."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
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
