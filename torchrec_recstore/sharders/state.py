"""The RecStore tables of a sharded module, in its ``state_dict`` and in its fused optimizer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer

from torchrec_recstore.given_copies import GivenCopies
from torchrec_recstore.sharders.gather import refused_together
from torchrec_recstore.sharders.kernel import placeholder_parameter
from torchrec_recstore.sharders.local_shard import LocalShard
from torchrec_recstore.sharders.table_state import (
    WEIGHTS,
    TableState,
    checked_weights,
    export_weights,
    replace_rows,
)
from torchrec_recstore.sharders.whole_tensors import Value, gathered_rows


class TableStates(FusedOptimizer):  # type: ignore[misc]
    """The states of a module's RecStore tables; learning rates stay with the kernels' own handles."""

    def step(self, closure: Any = None) -> None:
        """Nothing: backward has updated the rows."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Nothing: there are no gradient tensors."""


class ModuleState:
    """Rows of a sharded module's RecStore tables in its ``state_dict``, and their states in its fused optimizer.

    Args:
        module: the sharded module.
        container: its attribute under which TorchRec names tables: ``embedding_bags`` or ``embeddings``.
        tables: every RecStore table of the plan by its name, on every rank, in the same order.
        env: of the module.
        copies: the tensors that the tables' states have given out.
    """

    def __init__(
        self,
        module: nn.Module,
        container: str,
        tables: Mapping[str, TableState],
        env: ShardingEnv,
        copies: GivenCopies,
    ) -> None:
        self.copies = copies
        self.tables = tables
        self.shards: dict[str, Sequence[LocalShard]] = {name: table.shards for name, table in tables.items()}
        """This rank's shards of each table."""
        self.container = container
        self.env = env
        self.marks: dict[str, dict[str, list[int]]] = {}
        """For each checkpoint that was saved or loaded, by its checksum, and each table: its shards' marks."""
        module._register_state_dict_hook(self._add_rows)  # type: ignore[no-untyped-call]

    @property
    def emits_rows(self) -> bool:
        """Whether ``state_dict`` of the module and its fused optimizer have the rows, and loading it replaces them."""
        return all(table.emits_rows for table in self.tables.values())

    @emits_rows.setter
    def emits_rows(self, emits: bool) -> None:
        for table in self.tables.values():
            table.emits_rows = emits

    def load(self, state_dict: dict[str, Value], prefix: str) -> None:
        """Takes the rows out of ``state_dict`` into the tables, and leaves what TorchRec's loading expects. Collective.

        Raises:
            ValueError: see :func:`checked_weights`; no table of the module has changed.
        """
        keys = {name: f"{prefix}{self.container}.{name}.weight" for name in self.shards}
        if self.emits_rows:
            found = {name: key for name, key in keys.items() if key in state_dict}
            ids = {name: state_dict.pop(f"{key}_id", None) for name, key in found.items()}
            whole_ids = {name: None if i is None else gathered_rows(i, self.env) for name, i in ids.items()}
            with refused_together(self.env):
                sources = {
                    name: checked_weights(name, self.shards[name], state_dict[key], whole_ids[name])
                    for name, key in found.items()
                }
            for name, source in sources.items():
                replace_rows(self.shards[name], source)
                self.copies.forget(name, WEIGHTS)
        for name, key in keys.items():
            if key in state_dict or not self.emits_rows:
                state_dict[key] = placeholder_parameter(name, self.tables[name].dim)

    def optimizer_with_states(self, optimizer: CombinedOptimizer) -> CombinedOptimizer:
        """The fused optimizer, with every table's state on every rank, since saving it is collective.

        Args:
            optimizer: the module's, which knows the tables of this rank.
        """
        # Saving is collective, table by table: each rank must know all of them, in the same order.
        parameters, states = {}, {}
        for name, state in self.tables.items():
            key = f"{self.container}.{name}.weight"
            parameters[key] = placeholder_parameter(name, state.dim)
            for _, handle in optimizer.optimizers:
                if key in handle.params:
                    parameters[key] = handle.params[key]
                    handle.params = {k: p for k, p in handle.params.items() if k != key}
            states[parameters[key]] = {"rows": state}
        return CombinedOptimizer([*optimizer.optimizers, ("", TableStates(parameters, states, []))])

    def _add_rows(self, module: nn.Module, state_dict: dict[str, Value], prefix: str, metadata: object) -> None:
        if not self.emits_rows:
            return
        with refused_together(self.env):
            self.copies.check()
        for name, shards in self.shards.items():
            key = f"{prefix}{self.container}.{name}.weight"
            state_dict[key], state_dict[f"{key}_id"] = export_weights(name, shards, self.env, self.copies)
