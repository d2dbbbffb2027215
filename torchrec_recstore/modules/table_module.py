"""One RecStore table as a torch module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_recstore.modules.owned_table import OwnedTable, forget_rows, load_table_state, state_keys, table_state
from torchrec_recstore.optim import Optimizer, RowWiseAdagrad
from torchrec_recstore.quantization import RefusesQuantization
from torchrec_recstore.store import ColdStoreError, Table
from torchrec_recstore.table_parameter import GivenCopies, TableParameter
from torchrec_recstore.utils import warn_user

_DEFAULT_LR = 0.01


def optimizer_of(optimizer: Optimizer | None, lr: float) -> Optimizer:
    """The optimizer that is meant: the default one with ``lr``, or the one given.

    Raises:
        TypeError: something that is none of ``torchrec_recstore.optim``.
        ValueError: both have a learning rate, and they differ; or one that makes no sense.
    """
    if optimizer is None:
        return RowWiseAdagrad(lr=lr)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be one of torchrec_recstore.optim, got {type(optimizer).__name__}")
    if lr not in (_DEFAULT_LR, optimizer.lr):
        raise ValueError(f"lr={lr} disagrees with optimizer={optimizer!r}: give the learning rate there alone")
    return optimizer


@dataclass
class LearningRate:
    """A learning rate that the tables of a module share, read in each backward."""

    value: float

    def __call__(self) -> float:
        """The present one."""
        return self.value


class TableModule(RefusesQuantization, nn.Module):
    """A table whose rows are in the module's ``state_dict``, its copies and its pickles, as those of a parameter are.

    ``weight`` is the empty parameter, (0, dim), that stands for the rows: ``requires_grad`` of it says whether they are
    trained, its device whether there are any. Rows live in host memory wherever the module is moved; on the meta device
    there are none.

    Args:
        arguments: of the :class:`torchrec_recstore.store.Table`, by name.
        learning_rate: of the fused optimizer.
        fused: whether backward updates the rows; otherwise it collects gradients for ``SparseSGD`` and the like.
        device: ``cpu`` or ``meta``; None: meta where that is torch's default device, else cpu.

    Raises:
        TypeError, ValueError, ColdStoreError, ImportError: as for :class:`torchrec_recstore.store.Table`; a device that
            rows cannot live on.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        learning_rate: LearningRate,
        *,
        fused: bool = True,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(fused, bool):
            raise TypeError(f"fused must be a bool, got {type(fused).__name__}")
        device = rows_device(device)
        self._arguments = dict(arguments)
        self._owned = None if device.type == "meta" else OwnedTable(self._arguments)
        self._learning_rate = learning_rate
        self.fused = fused
        self._collected: list[tuple[Tensor, Tensor]] = []
        self._grad_version = 0
        self._copies = GivenCopies()
        self.weight = self._parameter(device)

    @property
    def table(self) -> Table:
        """The rows.

        Raises:
            RuntimeError: the module is on the meta device, or a tensor that ``state_dict`` gave was written to, which
                changes no row.
        """
        if self._owned is None:
            raise RuntimeError(
                f"table {self._arguments['name']!r} is on the meta device and has no rows: "
                "to_empty(device='cpu') makes it an empty table"
            )
        self._copies.check()
        return self._owned.table

    @property
    def learning_rate(self) -> float:
        """Of the fused optimizer, read in each backward; setting it changes the next one's."""
        return self._learning_rate.value

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        replace(self._arguments["optimizer"], lr=value)  # refuses what is no learning rate
        self._learning_rate.value = value

    @property
    def rate(self) -> LearningRate:
        """What kernels read the learning rate from."""
        return self._learning_rate

    def reset_parameters(self) -> None:
        """Forgets all rows: each starts anew when it is next looked up."""
        if self._owned is not None:
            forget_rows(self._owned.table)

    def collect(self, ids: Tensor, grads: Tensor) -> None:
        """Keeps gradients for the step of a sparse optimizer.

        Args:
            ids: (N,) int64, in the order of the batch.
            grads: (N, dim) float32, of each.
        """
        if self.weight.grad is None:
            self._collected.clear()
            # It is set to None by whatever zeroes gradients, of this module alone or of the whole model.
            self.weight.grad = torch.zeros_like(self.weight)
            self._grad_version = self.weight.grad._version
        self._collected.append((ids.clone(), grads))  # the caller may fill its tensor with the next batch

    @property
    def collected(self) -> tuple[Tensor, Tensor] | None:
        """The gradients since they were zeroed or stepped: ids (N,) int64, grads (N, dim); None: there are none.

        Raises:
            ValueError: ``weight.grad`` was changed in place.
        """
        if self._collected and self.weight.grad is not None and self.weight.grad._version != self._grad_version:
            raise ValueError(
                f"table {self.table.name!r}: weight.grad has been changed in place, as zero_grad(set_to_none=False), "
                "clip_grad_norm_ and GradScaler do: the collected gradients are not in it. Zero them with zero_grad()"
            )
        if self.weight.grad is None or not self._collected:
            return None
        ids, grads = zip(*self._collected, strict=True)
        return torch.cat(ids), torch.cat(grads)

    def forget_collected(self) -> None:
        """Zeroes the gradients."""
        self._collected = []
        self.weight.grad = None

    def use_optimizer(self, optimizer: Optimizer) -> None:
        """Makes ``optimizer`` the table's. Its rows move to a new table where more than the learning rate differs.

        Raises:
            ValueError: rows have been updated by one of another type, whose state does not fit.
        """
        present: Optimizer = self._arguments["optimizer"]
        if replace(optimizer, lr=present.lr) == present:
            return
        self.check_optimizer(optimizer)
        arguments = {**self._arguments, "optimizer": optimizer}
        if self._owned is not None:
            self._owned = self._owned.with_optimizer(arguments)
        self._arguments = arguments

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises what :meth:`use_optimizer` would; changes nothing."""
        present = self._arguments["optimizer"]
        if type(optimizer) is not type(present) and self._owned is not None and self._owned.table.optimizer_steps:
            raise ValueError(
                f"table {self._arguments['name']!r} has been updated by {type(present).__name__}, whose state does not "
                f"fit {type(optimizer).__name__}"
            )

    def share_memory(self) -> TableModule:
        """Not possible.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"table {self._arguments['name']!r} cannot be shared by processes: its rows are in this one's memory"
        )

    def extra_repr(self) -> str:
        """Dim and optimizer."""
        return f"{self._arguments['dim']}, optimizer={self._arguments['optimizer']!r}"

    def _parameter(self, device: torch.device | str, requires_grad: bool = True) -> TableParameter:
        nothing = torch.empty(0, self._arguments["dim"], dtype=self._arguments["dtype"], device=device)
        return TableParameter(nothing, requires_grad, table=self._arguments["name"])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableModule:
        weight = self.weight
        with torch.no_grad():
            probe = fn(torch.empty(1, device=weight.device))
        if probe.device.type == "cpu" and probe.is_shared():  # type: ignore[no-untyped-call]
            self.share_memory()
        self._parameters["weight"] = None  # in its place, so that the order of parameters stays
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._parameters["weight"] = weight
        device = "meta" if probe.is_meta else "cpu"
        if device != weight.device.type:
            self._owned = None if probe.is_meta else OwnedTable(self._arguments)
            self._collected = []
            self._parameters["weight"] = self._parameter(device, weight.requires_grad)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._owned is not None:
            for key, value in table_state(self._owned.table).items():
                destination[prefix + key] = self._copies.give(self._arguments["name"], "state_dict", value)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if self._owned is None and local_metadata.get("assign_to_params_buffers", False):
            self._owned = OwnedTable(self._arguments)
            self._parameters["weight"] = self._parameter("cpu", self.weight.requires_grad)
        keys = ["weight"] if self._owned is None else state_keys(self._owned.table)
        own = {key: state_dict[prefix + key] for key in keys if prefix + key in state_dict}
        # What torch's loading is given fits the empty parameter.
        rest = dict(state_dict)
        for key in own:
            del rest[prefix + key]
        if "weight" in own:
            rest[f"{prefix}weight"] = self.weight.detach()
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if "weight" not in own:
            return
        if self._owned is None:
            warn_user(
                "RecStore tables on the meta device have no rows, and loading them does nothing: pass assign=True to "
                "load_state_dict, or call to_empty(device='cpu') first"
            )
            return
        # The weights alone are a stock module's: row i is id i, and there is no more to it.
        if strict and len(own) > 1:
            missing_keys.extend(prefix + key for key in keys if key not in own)
        try:
            load_table_state(self._owned.table, own)
            self._copies.forget(self._arguments["name"], "state_dict")
        except (ValueError, MemoryError, ColdStoreError) as error:
            error_msgs.append(f"While loading the rows of {prefix}weight: {error}.")


def rows_device(device: torch.device | str | int | None) -> torch.device:
    """The device that is meant.

    Raises:
        ValueError: rows cannot live there.
    """
    if device is None:
        default = torch.get_default_device()
        return default if default.type == "meta" else torch.device("cpu")
    device = torch.device(device)
    if device.type not in ("cpu", "meta"):
        raise ValueError(
            f"device must be cpu or meta, got {device}: rows live in host memory; input on another device is copied "
            "there, and the output back"
        )
    return device
