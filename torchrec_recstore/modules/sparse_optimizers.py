"""Optimizers of modules made with ``fused=False``: backward collects gradients, ``step`` updates the rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from torchrec_recstore.modules.table_module import TableModule
from torchrec_recstore.optim import SGD, AdamW, Optimizer, RowWiseAdagrad


class _SparseOptimizer:
    """What they have in common.

    Args:
        modules: those whose tables get their state now, so that a ``state_dict`` with it can be loaded; ``step`` and
            ``zero_grad`` without modules mean these.
        optimizer: what a step does to a row.
    """

    def __init__(self, modules: Iterable[nn.Module], optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._modules = _checked(modules)
        _use(_tables(self._modules), optimizer)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self._optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._optimizer = replace(self._optimizer, lr=value)

    def step(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Updates each row that the collected gradients are of, once, on their sum in the order of the passes.

        The gradients are then gone. A table without any is left alone. Where one raises, it and those behind it have
        theirs still.

        Args:
            modules: RecStore's eager modules, or any that contain them; None: those of the constructor.

        Raises:
            ValueError: there is none among ``modules``, one has ``fused=True``, or has been updated by an optimizer of
                another type; nothing has changed then. Or a table cannot hold so many rows at once.
            MemoryError, ColdStoreError: as for :meth:`torchrec_recstore.store.Table.update`.
        """
        tables = _tables(self._modules if modules is None else _checked(modules), required=True)
        _use(tables, self._optimizer)
        for table in tables:
            if (collected := table.collected) is not None:
                table.table.update(*collected, lr=self.lr)
                table.forget_collected()

    def zero_grad(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Forgets the gradients that have been collected; ``zero_grad`` of a module or an optimizer of torch does too.

        Args:
            modules: as for :meth:`step`.
        """
        for table in _tables(self._modules if modules is None else _checked(modules), required=True):
            table.forget_collected()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._optimizer!r})"


class SparseSGD(_SparseOptimizer):
    """:class:`torchrec_recstore.optim.SGD`, applied by ``step``.

    Args:
        modules: as for every sparse optimizer: see :meth:`step`.
        lr, weight_decay, momentum: as there.

    Raises:
        TypeError, ValueError: an argument that makes no sense; the message names it.

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
    """:class:`torchrec_recstore.optim.RowWiseAdagrad`, applied by ``step``.

    Args:
        modules: as for :class:`SparseSGD`.
        lr, eps, weight_decay: as there.

    Raises:
        TypeError, ValueError: an argument that makes no sense; the message names it.
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
    """:class:`torchrec_recstore.optim.AdamW`, applied by ``step``.

    Args:
        modules: as for :class:`SparseSGD`.
        lr, betas, eps, weight_decay: as there.

    Raises:
        TypeError, ValueError: an argument that makes no sense; the message names it.
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
    found = list(modules) if isinstance(modules, Iterable) else [modules]
    if isinstance(modules, nn.Module) or not all(isinstance(module, nn.Module) for module in found):
        raise TypeError(f"modules must be a list of torch modules, got {modules!r}")
    return found


def _tables(modules: Iterable[nn.Module], *, required: bool = False) -> list[TableModule]:
    every = {id(m): m for module in modules for m in module.modules() if isinstance(m, TableModule)}
    for table in every.values():
        if table.fused:
            raise ValueError(f"{table} updates its rows in backward: make it with fused=False for a sparse optimizer")
    if required and not every:
        raise ValueError("there is no eager RecStore module among those given")
    return list(every.values())


def _use(tables: Iterable[TableModule], optimizer: Optimizer) -> None:
    for table in tables:
        table.check_optimizer(optimizer)
    for table in tables:
        table.use_optimizer(optimizer)
