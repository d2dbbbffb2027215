"""A torch module for one table whose rows a client reads and updates, usually on parameter servers.

Tests: tests/service/test_remote_modules.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torchrec_recstore.kernels import RemoteTable, RowService
from torchrec_recstore.modules.table_module import LearningRate
from torchrec_recstore.quantization import RefusesQuantization
from torchrec_recstore.table_parameter import TableParameter
from torchrec_recstore.utils import warn_user


class RemoteTableModule(RefusesQuantization, nn.Module):
    """A module with one table of a client. The rows belong to the servers, and ``state_dict`` does not contain them.

    ``weight`` is an empty parameter, (0, dim), that represents the rows. The rows are trained if ``weight`` requires a
    gradient.

    Args:
        table: The table.
        learning_rate: The learning rate of the optimizer. It is sent with each update.
    """

    fused = True
    """Backward updates the rows."""

    def __init__(self, table: RemoteTable, learning_rate: LearningRate) -> None:
        super().__init__()
        self._table = table
        self._learning_rate = learning_rate
        self.weight = TableParameter(torch.empty(0, table.dim, dtype=table.value_dtype), table=table.name)

    @property
    def table(self) -> RemoteTable:
        """The table."""
        return self._table

    @property
    def client(self) -> RowService:
        """The client of the table."""
        return self._table.client

    @property
    def rate(self) -> LearningRate:
        """The object from which kernels read the learning rate."""
        return self._learning_rate

    @property
    def learning_rate(self) -> float:
        """The learning rate of the optimizer. Each backward pass sends it; a new value applies from the next one."""
        return self._learning_rate.value

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        replace(self._table.optimizer, lr=value)  # raises an error if the value is not a valid learning rate
        self._learning_rate.value = value

    def reset_parameters(self) -> None:
        """Raises an error, because other models may use the rows.

        Raises:
            RuntimeError: Always.
        """
        self._refuse("its rows cannot be reset: delete them with the client, client.delete(name, ids)")

    def share_memory(self) -> RemoteTableModule:
        """Raises an error, because a client cannot be used by other processes.

        Raises:
            RuntimeError: Always.
        """
        self._refuse("the module cannot be shared by processes: make a client and a module in each process")

    def extra_repr(self) -> str:
        """Returns the dim, the optimizer and the client, which the module's repr shows."""
        return f"{self._table.dim}, optimizer={self._table.optimizer!r}, client={self._table.client!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse("the module cannot be copied: make another module with the client")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("the module cannot be pickled: make a client and a module in each process")

    def _refuse(self, reason: str) -> NoReturn:
        raise RuntimeError(f"table {self._table.name!r} belongs to {self._table.client!r}: {reason}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RemoteTableModule:
        with torch.no_grad():
            probe = fn(torch.empty(1))
        if probe.is_meta:
            self._refuse("the module cannot be moved to the meta device")
        if probe.device.type == "cpu" and probe.is_shared():  # type: ignore[no-untyped-call]
            self.share_memory()
        return self  # the rows are not in this process, and the empty parameter stays on the CPU

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        warn_of_rows_on_servers()

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
        if f"{prefix}weight" in state_dict:
            error_msgs.append(rows_not_loaded(f"{prefix}weight"))


def warn_of_rows_on_servers() -> None:
    """Warns that a state dict has no rows of tables that belong to servers. Python shows the warning once per line."""
    warn_user(
        "state_dict does not contain the rows of tables on servers: client.save(name) saves them on the servers, and "
        "client.load(name) loads them"
    )


def rows_not_loaded(key: str) -> str:
    """Returns the message for a state dict with rows of a table that belongs to servers."""
    return (
        f"{key} has rows, but the table of the model is on servers, which load_state_dict does not write to: load them "
        "with client.load(name), write them with client.push(table, ids, rows), or leave the key out"
    )
