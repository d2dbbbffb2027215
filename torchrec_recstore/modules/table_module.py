"""A torch module with one table, which is its own or belongs to a client.

Tests: tests/modules/test_state.py, tests/service/test_remote_modules.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torchrec_recstore.kernels import RemoteTable, RowService
from torchrec_recstore.modules.owned_table import (
    OwnedTable,
    load_table_state,
    state_keys,
    table_state,
)
from torchrec_recstore.optim import Optimizer, RowWiseAdagrad
from torchrec_recstore.quantization import RefusesQuantization
from torchrec_recstore.row_types import value_dtype
from torchrec_recstore.store import ColdStoreError, Table
from torchrec_recstore.store.parts import COUNTS_KEY, SCORES_KEY, frequency_key
from torchrec_recstore.store.table_state import STATE_KEYS
from torchrec_recstore.table_parameter import (
    GivenCopies,
    TableParameter,
    without_rows_to_load,
)
from torchrec_recstore.utils import warn_user

_DEFAULT_LR = 0.01


def optimizer_of(optimizer: Optimizer | None, lr: float) -> Optimizer:
    """Returns ``optimizer``, or ``RowWiseAdagrad(lr)`` if it is None.

    Raises TypeError if it is no optimizer, and ValueError if ``lr`` is neither the
    default nor its learning rate.
    """
    if optimizer is None:
        return RowWiseAdagrad(lr=lr)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "optimizer must be one of torchrec_recstore.optim, got"
            f" {type(optimizer).__name__}"
        )
    if lr not in (_DEFAULT_LR, optimizer.lr):
        raise ValueError(
            f"lr={lr} disagrees with optimizer={optimizer!r}: set the learning rate in"
            " the optimizer only"
        )
    return optimizer


@dataclass
class LearningRate:
    """A learning rate that the tables of a module share.

    Each backward pass reads it.
    """

    value: float

    def __call__(self) -> float:
        """Returns the current learning rate."""
        return self.value


class TableModule(RefusesQuantization, nn.Module):
    """A module with one table.

    Its ``state_dict``, its copies and its pickles contain the rows of the table.

    ``weight`` is an empty parameter, (0, dim), that represents the rows. The rows are
    trained if ``weight`` requires a gradient. They are in host memory, also if the
    module is moved to another device. On the meta device, the module has no rows.

    ``arguments`` are those of the :class:`Table`, by name, and ``learning_rate`` is
    that of the fused optimizer.
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
        self.rate = learning_rate
        """The object from which groups read the learning rate."""
        self.fused = fused
        self.emits_rows = True
        """Whether ``state_dict`` returns the rows."""
        self._collected: list[tuple[Tensor, Tensor]] = []
        self._grad_version = 0
        self._copies = GivenCopies()
        self.weight = self._parameter(device)

    @property
    def table(self) -> Table:
        """The table that holds the rows.

        Raises RuntimeError on the meta device, or if a tensor that ``state_dict``
        returned has been changed.
        """
        if self._owned is None:
            raise RuntimeError(
                f"table {self._arguments['name']!r} is on the meta device and has no"
                " rows: to_empty(device='cpu') makes it an empty table"
            )
        self._copies.check()
        return self._owned.table

    @property
    def learning_rate(self) -> float:
        """The learning rate of the fused optimizer.

        Each backward pass reads it; a new value applies from the next.
        """
        return self.rate.value

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        # Raises an error if the value is not a valid learning rate.
        replace(self._arguments["optimizer"], lr=value)
        self.rate.value = value

    def reset_parameters(self) -> None:
        """Removes all rows. Each id gets a new initial row when it is next trained."""
        if self._owned is not None:
            load_table_state(self._owned.table, None)

    def forget_copies(self) -> None:
        """Ends the check for writes to the tensors that ``state_dict`` returned, after
        all rows were replaced.
        """
        self._copies.forget(self._arguments["name"], "state_dict")

    def collect(self, ids: Tensor, grads: Tensor) -> None:
        """Stores gradients, (N, dim) float32, of ids, (N,) int64, for the next step of
        a sparse optimizer.
        """
        if self.weight.grad is None:
            self._collected.clear()
            # Zeroing gradients sets weight.grad to None, and so removes the collected
            # gradients.
            self.weight.grad = torch.zeros_like(self.weight)
            self._grad_version = self.weight.grad._version
        # The caller may write the next batch into the same tensor.
        self._collected.append((ids.clone(), grads))

    @property
    def collected(self) -> tuple[Tensor, Tensor] | None:
        """The ids (N,) int64 and gradients (N, dim) float32 that have been collected,
        or None if there are none.
        """
        if self.weight.grad is None or not self._collected:
            return None
        if self.weight.grad._version != self._grad_version:
            raise ValueError(
                f"table {self.table.name!r}: weight.grad has been changed in place, as"
                " zero_grad(set_to_none=False), clip_grad_norm_ and GradScaler do:"
                " weight.grad does not hold the collected gradients. Zero them with"
                " zero_grad()"
            )
        ids = torch.cat([ids for ids, _ in self._collected])
        grads = torch.cat([grads for _, grads in self._collected])
        return ids, grads

    def forget_collected(self) -> None:
        """Removes the collected gradients."""
        self._collected = []
        self.weight.grad = None

    def use_optimizer(self, optimizer: Optimizer) -> None:
        """Replaces the table's optimizer.

        If more than the learning rate differs, a new table gets the rows.
        """
        current: Optimizer = self._arguments["optimizer"]
        if self.is_frozen or replace(optimizer, lr=current.lr) == current:
            return
        self.check_optimizer(optimizer)
        arguments = {**self._arguments, "optimizer": optimizer}
        if self._owned is not None:
            self._owned = self._owned.with_optimizer(arguments)
        self._arguments = arguments

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises ValueError if the rows have been updated by an optimizer of another
        type, whose state does not fit.
        """
        current = self._arguments["optimizer"]
        if type(optimizer) is type(current) or self._owned is None:
            return
        if self._owned.table.optimizer_steps:
            raise ValueError(
                f"table {self._arguments['name']!r} has been updated by"
                f" {type(current).__name__}, whose state does not fit"
                f" {type(optimizer).__name__}"
            )

    def share_memory(self) -> TableModule:
        """Raises RuntimeError, because the rows cannot be moved to shared memory."""
        raise RuntimeError(
            f"table {self._arguments['name']!r} cannot be shared by processes: its rows"
            " are in this process's memory"
        )

    def extra_repr(self) -> str:
        """Returns the dim and the optimizer, which the module's repr shows."""
        return f"{self._arguments['dim']}, optimizer={self._arguments['optimizer']!r}"

    @property
    def is_frozen(self) -> bool:
        """Whether the options of the table freeze its rows."""
        return bool(self._arguments["options"].frozen)

    @property
    def has_device_rows(self) -> bool:
        """Whether the options of the table put rows into the memory of a device."""
        return bool(self._arguments["options"].device_rows)

    def _parameter(
        self,
        device: torch.device | str,
        requires_grad: bool = True,
    ) -> TableParameter:
        requires_grad = requires_grad and not self.is_frozen
        no_rows = torch.empty(
            0,
            self._arguments["dim"],
            dtype=value_dtype(self._arguments["dtype"]),
            device=device,
        )
        return TableParameter(
            no_rows,
            requires_grad,
            table=self._arguments["name"],
        )

    def _apply(
        self,
        fn: Callable[[Tensor], Tensor],
        recurse: bool = True,
    ) -> TableModule:
        weight = self.weight
        with torch.no_grad():
            probe = fn(torch.empty(1, device=weight.device))
        if probe.device.type == "cpu" and probe.is_shared():  # type: ignore[no-untyped-call]
            self.share_memory()
        # The key stays, so that the order of the parameters stays the same.
        self._parameters["weight"] = None
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

    def _save_to_state_dict(
        self,
        destination: dict[str, Any],
        prefix: str,
        keep_vars: bool,
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._owned is not None and self.emits_rows:
            for key, value in table_state(self._owned.table).items():
                destination[prefix + key] = self._copies.give(
                    self._arguments["name"],
                    "state_dict",
                    value,
                )

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        assigns = local_metadata.get("assign_to_params_buffers", False)
        if self._owned is None and assigns:
            self._owned = OwnedTable(self._arguments)
            self._parameters["weight"] = self._parameter(
                "cpu",
                self.weight.requires_grad,
            )
        table_state, missing = self._state_of_table(state_dict, prefix)
        # torch loads the empty parameter itself.
        super()._load_from_state_dict(
            self._state_for_torch(state_dict, prefix, table_state),
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        if "weight" not in table_state:
            return
        if self._owned is None:
            warn_user(
                "RecStore tables on the meta device have no rows, and loading them does"
                " nothing: pass assign=True to load_state_dict, or call"
                " to_empty(device='cpu') first"
            )
            return
        # A state with weights only comes from a module of torch, and no other key is
        # missing. Times and sightings are missing if the table neither expired after a
        # time nor counted when the state was made.
        if strict and len(table_state) > 1:
            missing_keys.extend(
                prefix + key for key in missing if key not in STATE_KEYS[2:]
            )
        try:
            load_table_state(self._owned.table, table_state)
            self.forget_copies()
        except (ValueError, MemoryError, ColdStoreError) as error:
            error_msgs.append(f"While loading the rows of {prefix}weight: {error}.")

    def _state_of_table(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
    ) -> tuple[dict[str, Any], list[str]]:
        """Returns the table's entries of ``state_dict``, and the missing names."""
        keys = ["weight"] if self._owned is None else state_keys(self._owned.table)
        entries = {}
        missing = []
        for key in keys:
            if prefix + key in state_dict:
                entries[key] = state_dict[prefix + key]
            else:
                missing.append(key)
        if self._owned is not None:
            frequency = frequency_key(self._owned.table.options)
            # Counts do not become scores, nor scores counts: the rows begin with
            # frequency 0.
            replaced = COUNTS_KEY if frequency == SCORES_KEY else SCORES_KEY
            if frequency in missing and prefix + replaced in state_dict:
                entries[replaced] = state_dict[prefix + replaced]
                missing.remove(frequency)
        return entries, missing

    def _state_for_torch(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        table_state: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Returns ``state_dict`` with the empty parameter in place of the rows."""
        table_keys = {prefix + key for key in table_state}
        entries = {}
        for key, value in state_dict.items():
            # The states of an optimizer, which a frozen table does not keep, are no
            # unexpected keys.
            is_of_frozen = self.is_frozen and key.startswith(prefix)
            if key not in table_keys and not is_of_frozen:
                entries[key] = value
        if "weight" in table_state:
            entries[f"{prefix}weight"] = without_rows_to_load(self.weight.detach())
        return entries


class RemoteTableModule(RefusesQuantization, nn.Module):
    """A module with one table of a client.

    The rows belong to the servers, and ``state_dict`` does not contain them.

    ``weight`` is as in :class:`TableModule`. The learning rate is sent with each
    update.
    """

    fused = True
    """Backward updates the rows."""

    has_device_rows = False
    """The rows of servers are not in the memory of a device."""

    def __init__(
        self,
        table: RemoteTable,
        learning_rate: LearningRate,
        *,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.table = table
        self.is_frozen = frozen
        """Whether the options of the table freeze its rows, so that this model does not
        train them.
        """
        self.client: RowService = table.client
        self.rate = learning_rate
        """The object from which groups read the learning rate."""
        no_rows = torch.empty(0, table.dim, dtype=table.value_dtype)
        self.weight = TableParameter(no_rows, not frozen, table=table.name)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the optimizer.

        Each backward pass sends it; a new value applies from the next one.
        """
        return self.rate.value

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        # raises an error if the value is not a valid learning rate
        replace(self.table.optimizer, lr=value)
        self.rate.value = value

    def reset_parameters(self) -> None:
        """Raises RuntimeError, because other models may use the rows."""
        self._refuse(
            "its rows cannot be reset: delete them with the client, client.delete(name,"
            " ids)"
        )

    def share_memory(self) -> RemoteTableModule:
        """Raises RuntimeError, because a client cannot be used by other processes."""
        self._refuse(
            "the module cannot be shared by processes: make a client and a module in"
            " each process"
        )

    def extra_repr(self) -> str:
        """Returns the dim, the optimizer and the client, which the module's repr shows."""
        return (
            f"{self.table.dim}, optimizer={self.table.optimizer!r},"
            f" client={self.client!r}"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse(
            "the module cannot be copied or pickled: make another module, in each"
            " process with a client"
        )

    def _refuse(self, reason: str) -> NoReturn:
        raise RuntimeError(
            f"table {self.table.name!r} belongs to {self.client!r}: {reason}"
        )

    def _apply(
        self,
        fn: Callable[[Tensor], Tensor],
        recurse: bool = True,
    ) -> RemoteTableModule:
        with torch.no_grad():
            probe = fn(torch.empty(1))
        if probe.is_meta:
            self._refuse("the module cannot be moved to the meta device")
        if probe.device.type == "cpu" and probe.is_shared():  # type: ignore[no-untyped-call]
            self.share_memory()
        # the rows are not in this process, and the empty parameter stays on the CPU
        return self

    def _save_to_state_dict(
        self,
        destination: dict[str, Any],
        prefix: str,
        keep_vars: bool,
    ) -> None:
        warn_of_rows_on_servers()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        *arguments: Any,
    ) -> None:
        if f"{prefix}weight" in state_dict:
            error_msgs: list[str] = arguments[-1]
            error_msgs.append(rows_not_loaded(f"{prefix}weight"))


def warn_of_rows_on_servers() -> None:
    """Warns that a state dict has no rows of tables that belong to servers.

    Python shows the warning once per line.
    """
    warn_user(
        "state_dict does not contain the rows of tables on servers: client.save(name)"
        " saves them on the servers, and client.load(name) loads them"
    )


def rows_not_loaded(key: str) -> str:
    """Returns the message for a state dict with rows of a table on servers."""
    return (
        f"{key} has rows, but the table of the model is on servers, which"
        " load_state_dict does not write to: load them with client.load(name), write"
        " them with client.push(table, ids, rows), or leave the key out"
    )


def rows_device(device: torch.device | str | int | None) -> torch.device:
    """Returns the device of an argument, which must be ``cpu``, ``meta`` or None; see
    :class:`RecStoreEmbedding`.
    """
    if device is None:
        default = torch.get_default_device()
        return default if default.type == "meta" else torch.device("cpu")
    device = torch.device(device)
    if device.type not in ("cpu", "meta"):
        raise ValueError(
            f"device must be cpu or meta, got {device}: rows are in host memory; input"
            " on another device is copied to the CPU, and the output is copied back"
        )
    return device
