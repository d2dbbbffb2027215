"""Tables that are given to a sharder for RecStore tables, and would be TorchRec's own without a word."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import nn
from torchrec.distributed.planner.types import Enumerator, ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingType

from torchrec_recstore.sharders.parameter_sharding import RECSTORE_KERNEL, RecStoreModulePlan
from torchrec_recstore.sharders.resident import stock_by_default
from torchrec_recstore.warn import warn_user

DATA_PARALLEL = ShardingType.DATA_PARALLEL.value


def asks_for_recstore(constraint: ParameterConstraints | None) -> bool:
    """Whether a table of a sharder for RecStore tables is to be in RecStore, as far as its constraint says."""
    if constraint is None:
        return True
    if constraint.compute_kernels:
        return RECSTORE_KERNEL in constraint.compute_kernels
    return bool(constraint.sharding_types != [DATA_PARALLEL])


def warn_of_stock_tables(sharder: ModuleSharder[nn.Module], plan: Mapping[str, ParameterSharding]) -> None:
    """Warns where a module's plan has no RecStore table, and nobody has asked for that.

    ``RecStorePlanner`` plans tables on TorchRec's kernels where constraints ask for it. Other plans leave RecStore out
    where they are made with other sharders than those that shard the model.

    Args:
        sharder: for RecStore tables; it is given the plan.
        plan: of one module, by table.
    """
    kernels = {name: s.compute_kernel for name, s in plan.items() if s.sharding_type != DATA_PARALLEL}
    if isinstance(plan, RecStoreModulePlan) or RECSTORE_KERNEL in kernels.values():
        return
    tables = [name for name in kernels if name not in stock_by_default]
    stock_by_default.difference_update(kernels)
    if tables:
        ours = type(sharder).__name__
        warn_user(
            f"table(s) {', '.join(map(repr, tables))} are not in RecStore: the plan that {ours} is given has none but "
            f"TorchRec's own kernels: give {ours} to the planner as well, or use TorchRec's sharder"
        )


def warn_if_overridden(sharder: ModuleSharder[nn.Module], kind: type[nn.Module]) -> None:
    """Warns where a planner makes a map of a list in which one of TorchRec's sharders overrides ``sharder``.

    Such a map has the last sharder of each type, and TorchRec reads nothing but ``module_type`` of the others. The
    list, the model and the constraints are therefore taken from the caller, ``EmbeddingEnumerator.enumerate``
    (torchrec 1.8.0); there is no warning where it is another.

    Args:
        sharder: whose property ``module_type`` calls this.
        kind: that ``module_type``.
    """
    frame = sys._getframe(2)
    if frame.f_code.co_name == "<dictcomp>" and frame.f_back is not None:  # up to Python 3.11
        frame = frame.f_back
    planner, module, sharders = (frame.f_locals.get(name) for name in ("self", "module", "sharders"))
    if not isinstance(planner, Enumerator) or not isinstance(module, nn.Module) or not isinstance(sharders, list):
        return
    behind = sharders[[other is sharder for other in sharders].index(True) + 1 :]
    # One that is for RecStore as well is left out: reading its type would bring it here.
    stock = [other for other in behind if not hasattr(other, "with_stock_kernels") and other.module_type is kind]
    if not stock:
        return
    constraints = getattr(planner, "_constraints", None) or {}
    tables = [
        name
        for each in module.modules()
        if type(each) is kind
        for name in sharder.shardable_parameters(each)
        if asks_for_recstore(constraints.get(name))
    ]
    if tables:
        ours, theirs = type(sharder).__name__, type(stock[-1]).__name__
        warn_user(
            f"table(s) {', '.join(map(repr, tables))} are not in RecStore: {theirs}, which comes later in the list of "
            f"sharders, overrides {ours}: put {ours} after it, or leave {theirs} out"
        )
