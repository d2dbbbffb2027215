"""TorchRec's delta tracker for RecStore tables: raw ids, and states by id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
)
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.model_tracker.types import TrackingMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_recstore.optim import Optimizer, is_square, state_names
from torchrec_recstore.sharders.fused_params import optimizer_from_fused_params
from torchrec_recstore.sharders.kernel import RecStoreKernel
from torchrec_recstore.store import Table
from torchrec_recstore.store.parts import column_weighted_mean
from torchrec_recstore.torchrec_seams.models import (
    kernels_of,
    optimizer_states,
    tracking_mode,
)

# The tracking modes that compare states of squared gradients.
_OF_SQUARES = (TrackingMode.MOMENTUM_DIFF, TrackingMode.ROWWISE_ADAGRAD)
# It is called with (features, embeddings, kernel) of one group after its lookup.
Record = Callable[..., None]


def tracking(
    record: Record,
    groups: Sequence[GroupedEmbeddingConfig],
    kernels: Sequence[RecStoreKernel],
) -> Record:
    """Returns the function that is called after each kernel instead of ``record``.

    Raises ValueError on every rank if the tracker's mode needs a state that a table's
    optimizer does not have.
    """
    # ModelDeltaTrackerTrec uses ids as positions in FBGEMM's state tensors (torchrec
    # 1.8.0). For RecStore kernels, raw ids are therefore written to the tracker's
    # store, and get_latest, which supports only FBGEMM's, is replaced.
    tracker = getattr(record, "__self__", None)
    if not isinstance(tracker, ModelDeltaTrackerTrec):
        return record
    mode = tracking_mode(tracker)
    for group in groups:
        if group.compute_kernel == EmbeddingComputeKernel.CUSTOMIZED_KERNEL:
            names = group.table_names()
            optimizer = optimizer_from_fused_params(group.fused_params, names)
            _check(mode, optimizer, names)
    if mode in _OF_SQUARES:
        tracker.get_latest = lambda: _latest(tracker)

    def record_group(
        features: KeyedJaggedTensor,
        embeddings: Tensor,
        kernel: nn.Module,
        raw_ids: Tensor | None = None,
    ) -> None:
        if not isinstance(kernel, RecStoreKernel):
            record(features, embeddings, kernel)
            return
        for name, (ids, rows) in _looked_up(kernel, features, embeddings, mode).items():
            # The tracker skips the table, or the batch is empty.
            if name not in tracker.table_to_fqn or not len(ids):
                continue
            states = rows
            squares = mode in _OF_SQUARES
            if squares or mode == TrackingMode.MOMENTUM_LAST:
                states = _states(_shards(kernels, name), ids, squares=squares)
            fqn = tracker.table_to_fqn[name]
            tracker.store.append(
                batch_idx=tracker.curr_batch_idx,
                fqn=fqn,
                ids=ids,
                states=states,
            )

    return record_group


class _SquaresById:
    """The states of squared gradients of a table, indexed by id.

    The tracker indexes FBGEMM's tensor of states in this way.
    """

    def __init__(self, shards: Sequence[Table]) -> None:
        self._shards = shards

    def __getitem__(self, ids: Tensor) -> Tensor:
        return _states(self._shards, ids, squares=True)


def _check(
    mode: TrackingMode,
    optimizer: Optimizer,
    names: Sequence[str],
) -> None:
    needs = None
    if mode == TrackingMode.MOMENTUM_LAST and not state_names(optimizer):
        needs = "a state"
    elif mode in _OF_SQUARES and not _squares_name(optimizer):
        needs = "a state of squared gradients"
    if needs is not None:
        listed = ", ".join(map(repr, names))
        raise ValueError(
            f"RecStore table(s) {listed}: the tracking mode {mode.name} needs an"
            f" optimizer with {needs}, such as RowWiseAdagrad, and {optimizer} has"
            " none: track by ID_ONLY instead"
        )


def _squares_name(optimizer: Optimizer) -> str:
    for name in state_names(optimizer):
        if is_square(name):
            return name
    return ""


def _states(
    shards: Sequence[Table],
    ids: Tensor,
    *,
    squares: bool,
) -> Tensor:
    """Returns a number for each of ``ids``, (N,) float32, or 0 without a row.

    It is the mean of the squared gradients over the columns, or the norm of the first
    state, FBGEMM's momentum.
    """
    first_shard = shards[0]
    kinds = state_names(first_shard.optimizer)
    if squares:
        name = _squares_name(first_shard.optimizer)
    else:
        name = next(iter(kinds))

    distinct_ids, places = torch.unique(ids.cpu(), return_inverse=True)
    has_row = first_shard.contains(distinct_ids)
    ids_with_row = distinct_ids[has_row]
    parts = []
    for shard in shards:
        rows = shard.read_rows(ids_with_row)
        parts.append(rows[name])

    if kinds[name] == "row":
        widths = [len(shard.columns) for shard in shards]
        state = column_weighted_mean(parts, widths)
    elif squares:
        state = torch.cat(parts, dim=1).mean(dim=1)
    else:
        state = torch.cat(parts, dim=1).norm(dim=1)
    states = torch.zeros(len(distinct_ids), dtype=torch.float32)
    states[has_row] = state
    return states[places].to(ids.device)


def _looked_up(
    kernel: RecStoreKernel,
    features: KeyedJaggedTensor,
    embeddings: Tensor,
    mode: TrackingMode,
) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Returns the raw ids (N,) of each table, and their rows in the mode EMBEDDING.

    The rows are (N, columns of all shards).
    """
    configs = kernel.config.embedding_tables
    lengths = features.length_per_key()
    counts = []
    first = 0
    for config in configs:
        end = first + len(config.feature_names)
        counts.append(sum(lengths[first:end]))
        first = end

    local_ids_by_shard = torch.split(features.values(), counts)
    ids: dict[str, Tensor] = {}
    for config, shard, local_ids in zip(
        configs,
        kernel.shards,
        local_ids_by_shard,
        strict=True,
    ):
        if shard.routing is None:
            ids[config.name] = local_ids
        else:
            raw_ids = shard.routing.raw(local_ids.cpu())
            ids[config.name] = raw_ids.to(local_ids.device)
    if mode != TrackingMode.EMBEDDING:
        return {name: (ids_of_table, None) for name, ids_of_table in ids.items()}

    sizes = []
    for count, table in zip(counts, kernel.tables, strict=True):
        sizes.append(count * len(table.columns))
    elements_by_shard = torch.split(embeddings.detach(), sizes)
    columns: dict[str, list[Tensor]] = {name: [] for name in ids}
    for config, table, elements in zip(
        configs,
        kernel.tables,
        elements_by_shard,
        strict=True,
    ):
        table_rows = elements.view(-1, len(table.columns))
        columns[config.name].append(table_rows)

    rows: dict[str, tuple[Tensor, Tensor | None]] = {}
    for name, table_ids in ids.items():
        all_columns = torch.cat(columns[name], dim=1)
        rows[name] = (table_ids, all_columns)
    return rows


def _shards(kernels: Sequence[RecStoreKernel], name: str) -> list[Table]:
    """Returns a table's column shards on this rank.

    All of them belong to one sharding.
    """
    shards = []
    for kernel in kernels:
        configs = kernel.config.embedding_tables
        for config, table in zip(configs, kernel.tables, strict=True):
            if config.name == name:
                shards.append(table)
    return shards


def _latest(tracker: ModelDeltaTrackerTrec) -> dict[str, Any]:
    """Returns the states of each table, indexed by id, by the table's path.

    It replaces the tracker's ``get_latest``.
    """
    latest: dict[str, Any] = {}
    for module in tracker.tracked_modules.values():
        for module_of_kernels in module.sharding_kernels:
            if isinstance(module_of_kernels, DistributedDataParallel):
                continue
            kernels = kernels_of(module_of_kernels)
            ours = [kernel for kernel in kernels if isinstance(kernel, RecStoreKernel)]
            for kernel in kernels:
                is_ours = isinstance(kernel, RecStoreKernel)
                stock_states = None if is_ours else optimizer_states(kernel)
                for place, config in enumerate(kernel.config.embedding_tables):
                    fqn = tracker.table_to_fqn.get(config.name)
                    if fqn is None:
                        continue
                    if stock_states is None:
                        latest[fqn] = _SquaresById(_shards(ours, config.name))
                    else:
                        latest[fqn] = stock_states[place][0]
    return latest
