"""Optimizers of modules with ``fused=False``: ``step`` updates the rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from torchrec_recstore.modules.table_module import TableModule
from torchrec_recstore.optim import SGD, AdamW, Optimizer, RowWiseAdagrad


class _SparseOptimizer:
    """The base class: the tables of ``modules`` get the optimizer's state at once, so
    that a state can be loaded.
    """

    def __init__(self, modules: Iterable[nn.Module], optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._modules = _checked(modules)
        self._use_for(_tables(self._modules))

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self._optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._optimizer = replace(self._optimizer, lr=value)

    def step(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Updates each row that has collected gradients once, with the sum of its
        gradients, and removes the gradients.

        The gradients of a row are summed in the order of the backward passes. Tables
        without gradients do not change. If the update of a table raises an error, this
        table and the tables after it keep their gradients.

        Args:
            modules: RecStore's eager modules, or modules that contain them. Default:
                None, the modules of the constructor.

        Raises:
            ValueError: ``modules`` contain no eager RecStore module, a module has
                ``fused=True``, or a table has been updated by an optimizer of another
                type; no table has changed. Or a table cannot hold all rows of the
                update at once.
            MemoryError, ColdStoreError: See
                :meth:`torchrec_recstore.store.Table.update`.
        """
        tables = self._tables_of(modules)
        self._use_for(tables)
        for table in tables:
            if (collected := table.collected) is not None:
                table.table.update(*collected, lr=self.lr)
                table.forget_collected()

    def zero_grad(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Removes the collected gradients of ``modules``, as in :meth:`step`. torch's
        ``zero_grad`` does so, too.
        """
        for table in self._tables_of(modules):
            table.forget_collected()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._optimizer!r})"

    def _tables_of(self, modules: Iterable[nn.Module] | None) -> list[TableModule]:
        tables = _tables(self._modules if modules is None else _checked(modules))
        if not tables:
            raise ValueError(
                "modules must contain at least one eager RecStore module, got none"
            )
        return tables

    def _use_for(self, tables: Iterable[TableModule]) -> None:
        for table in tables:
            table.check_optimizer(self._optimizer)
        for table in tables:
            table.use_optimizer(self._optimizer)


class SparseSGD(_SparseOptimizer):
    """A sparse optimizer that applies :class:`torchrec_recstore.optim.SGD` in ``step``.

    Args:
        modules: The modules that ``step`` and ``zero_grad`` apply to by default.
            Default: none; pass them to ``step``.
        lr, weight_decay, momentum: See :class:`torchrec_recstore.optim.SGD`.

    Raises:
        TypeError, ValueError: An argument has an unsupported type or value; the message
            names the argument.

    Example::

        emb = RecStoreEmbedding(1000, 16, fused=False)
        optimizer = SparseSGD(lr=0.1)
        emb(torch.tensor([7, -1])).sum().backward()
        optimizer.step([emb])
    """

    def __init__(
        self,
        modules: Iterable[nn.Module] = (),
        lr: float = 0.01,
        *,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
    ) -> None:
        super().__init__(modules, SGD(lr, weight_decay, momentum))


class SparseRowWiseAdagrad(_SparseOptimizer):
    """A sparse optimizer that applies :class:`torchrec_recstore.optim.RowWiseAdagrad`
    in ``step``.

    Args:
        modules: See :class:`SparseSGD`.
        lr, eps, weight_decay: See :class:`torchrec_recstore.optim.RowWiseAdagrad`.

    Raises:
        TypeError, ValueError: See :class:`SparseSGD`.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module] = (),
        lr: float = 0.01,
        *,
        eps: float = 1.0e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(modules, RowWiseAdagrad(lr, eps, weight_decay))


class SparseAdamW(_SparseOptimizer):
    """A sparse optimizer that applies :class:`torchrec_recstore.optim.AdamW` in
    ``step``.

    Args:
        modules: See :class:`SparseSGD`.
        lr, betas, eps, weight_decay: See :class:`torchrec_recstore.optim.AdamW`.

    Raises:
        TypeError, ValueError: See :class:`SparseSGD`.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module] = (),
        lr: float = 0.001,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1.0e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(modules, AdamW(lr, betas, eps, weight_decay))


def _checked(modules: Iterable[nn.Module]) -> list[nn.Module]:
    # A module such as nn.Sequential is iterable itself.
    is_list = isinstance(modules, Iterable) and not isinstance(modules, nn.Module)
    checked = list(modules) if is_list else []
    are_modules = all(isinstance(module, nn.Module) for module in checked)
    if not is_list or not are_modules:
        raise TypeError(f"modules must be a list of torch modules, got {modules!r}")
    return checked


def _tables(modules: Iterable[nn.Module]) -> list[TableModule]:
    tables: dict[int, TableModule] = {}
    for module in modules:
        for part in module.modules():
            if isinstance(part, TableModule):
                tables[id(part)] = part
    for table in tables.values():
        if table.fused:
            raise ValueError(
                f"{table} updates its rows in backward: make it with fused=False for a"
                " sparse optimizer"
            )
    return list(tables.values())
