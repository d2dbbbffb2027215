"""The change of a sharded collection's plan in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingEnv

from torchrec_recstore.options import is_shared
from torchrec_recstore.sharders.delta_tracker import Record
from torchrec_recstore.sharders.gather import refused_together
from torchrec_recstore.sharders.moving import move_rows
from torchrec_recstore.sharders.plan import RECSTORE_KERNEL, RecStoreParameterSharding
from torchrec_recstore.sharders.state import ModuleState
from torchrec_recstore.store import Table
from torchrec_recstore.store.exchange import check_applied, check_replaceable
from torchrec_recstore.torchrec_seams.models import CollectionSeams, is_in_pipeline, on_meta_device


class ReshardableCollection(CollectionSeams):
    """A mixin for TorchRec's sharded collections, whose plan it can change if all of their tables are in RecStore."""

    recstore_state: ModuleState
    """The rows of this module's RecStore tables, for ``state_dict`` and checkpoints."""
    source: tuple[nn.Module, ModuleSharder[nn.Module]] | None = None
    """The unsharded collection and the sharder that has sharded it."""
    records: tuple[Record, ...] = ()
    """The functions that :meth:`register_post_lookup_tracker_fn` has registered."""

    def recstore_table_names(self) -> list[str]:
        """Returns the names of the RecStore tables of the plan, in the order of the configs, the same on every rank."""
        plan = self.module_sharding_plan
        return [name for name in self.names_of_tables if plan[name].compute_kernel == RECSTORE_KERNEL]

    def recstore_tables(self) -> Iterator[Table]:
        """Yields the shards of the RecStore tables on this rank."""
        raise NotImplementedError

    def change(self, plan: Mapping[str, ParameterSharding], path: str | None = None) -> Change | None:
        """Returns the change to another plan, or None if the plan is the present one.

        Args:
            plan: The new plan of the whole collection, by table name.
            path: The path of the collection in the model.

        Raises:
            ValueError: The plan cannot change so, or not now. See :func:`torchrec_recstore.reshard`.
        """
        self.recstore_state.copies.check_usable()
        old = self.module_sharding_plan
        known = set(self.names_of_tables)
        if plan.keys() != known:
            missing, unknown = sorted(known - plan.keys()), sorted(plan.keys() - known)
            raise ValueError(f"reshard: the plan of {sorted(known)} has no table(s) {missing}, and unknown {unknown}")
        if all(_same(old[name], plan[name]) for name in known):
            return None
        for name in self.names_of_tables:
            for what, entry in (("is", old[name]), ("would be", plan[name])):
                if entry.compute_kernel != RECSTORE_KERNEL:
                    raise ValueError(
                        f"reshard: table {name!r} {what} on TorchRec's kernel {entry.compute_kernel!r}, whose rows "
                        "cannot move in place: place it in a collection of its own, whose plan does not change, or "
                        "load a checkpoint into a model with the new plan"
                    )
        if self.source is None:
            raise ValueError(f"reshard: the collection of {sorted(known)} was not sharded by a RecStore sharder")
        refuse_pipelined(self, known)
        for name, table in self.recstore_state.tables.items():
            if is_shared(table.options.cold_store):
                raise ValueError(
                    f"reshard: the rows of table {name!r} are in {table.options.cold_store!r}, which is shared: call "
                    "flush_tables, and start the model anew with the new plan"
                )
        self.recstore_state.copies.check()
        check_replaceable(self.recstore_tables())
        check_applied(self.recstore_tables())
        return Change(self, dict(plan), path)

    def update_shards(
        self, changed_sharding_params: Mapping[str, ParameterSharding], env: ShardingEnv, device: torch.device | None
    ) -> None:
        """Changes the plan in place. Collective. ``DistributedModelParallel.reshard`` calls this method.

        See :func:`torchrec_recstore.reshard`, which changes the plan of a whole model and raises the same errors.

        Args:
            changed_sharding_params: The new entries of the plan, by table name. Other tables keep theirs.
            env: The environment of the collection, which cannot change.
            device: The device of the collection, which cannot change.

        Raises:
            NotImplementedError: TorchRec's tables of this kind cannot be resharded in place.
        """
        if self.recstore_table_names():
            with refused_together(self.ranks_env):
                change = self.change({**self.module_sharding_plan, **changed_sharding_params})
            reshard_collections([] if change is None else [change])
        elif hasattr(super(), "update_shards"):
            super().update_shards(changed_sharding_params, env, device)
        else:
            raise NotImplementedError(
                f"the tables {self.names_of_tables} are on TorchRec's own kernels, and TorchRec cannot reshard an "
                "EmbeddingCollection in place: load a checkpoint into a model with the new plan"
            )

    def rebuilt(self, change: Change) -> ReshardableCollection:
        """Returns a new sharded module of the same tables with another plan, without rows. Collective.

        The sharder that has sharded this module makes it, as for a new ``DistributedModelParallel``.
        """
        assert self.source is not None
        module, sharder = self.source
        plan: Any = change.plan
        fresh: Any = sharder.shard(on_meta_device(module), plan, self.ranks_env, self.stock_device, change.path)
        fresh.source = self.source
        assert isinstance(fresh, ReshardableCollection)
        return fresh

    def move_rows_to(self, fresh: ReshardableCollection) -> None:
        """Moves the rows of all tables to a module that :meth:`rebuilt` has returned. Collective."""
        for name, table in self.recstore_state.tables.items():
            move_rows(name, table.shards, fresh.recstore_state.tables[name].shards, self.ranks_env)

    def give_up(self, error: BaseException) -> None:
        """Makes every later use of the tables raise an error, because ``error`` has interrupted the move of rows."""
        self.recstore_state.copies.refuse_all(
            f"RecStore tables {self.recstore_table_names()} have lost rows, because a reshard failed with "
            f"{type(error).__name__}: {error}: start the job again from its last checkpoint"
        )

    def become_resharded(self, fresh: ReshardableCollection) -> None:
        """Becomes the module ``fresh``, to which the rows have moved, but stays the same object."""
        records, state = self.records, self.recstore_state
        self.close_tables()
        state.take_over(fresh.recstore_state)
        self.become(fresh)
        self.recstore_state = state
        for record in records:
            self.register_post_lookup_tracker_fn(record)

    def close_tables(self) -> None:
        """Closes the tables of this rank."""
        for table in self.recstore_tables():
            table.close(flush=False)


@dataclass(frozen=True)
class Change:
    """A change of a collection's plan, which has been checked.

    Args:
        collection: The collection.
        plan: The new plan of the whole collection, by table name.
        path: The path of the collection in the model.
    """

    collection: ReshardableCollection
    plan: dict[str, ParameterSharding]
    path: str | None


def refuse_pipelined(module: nn.Module, tables: Iterable[str]) -> None:
    """Raises an error if a train pipeline uses a sharded module.

    Raises:
        ValueError: A train pipeline has begun batches for the module's ``tables``.
    """
    if is_in_pipeline(module):
        raise ValueError(
            f"reshard: a train pipeline has begun batches for the tables {sorted(tables)} with the old plan: call "
            "pipeline.detach() first; its next progress() takes these batches up again"
        )


def reshard_collections(changes: Sequence[Change]) -> None:
    """Changes the plans of collections in place: of all of them, or of none. Collective.

    Args:
        changes: The changes, the same on every rank.

    Raises:
        Exception: See :func:`torchrec_recstore.reshard`.
    """
    rebuilt: list[tuple[ReshardableCollection, ReshardableCollection]] = []
    try:
        for change in changes:
            rebuilt.append((change.collection, change.collection.rebuilt(change)))
    except BaseException:
        for _, fresh in rebuilt:
            fresh.close_tables()
        raise
    try:
        for collection, fresh in rebuilt:
            collection.move_rows_to(fresh)
    except BaseException as error:
        for collection, fresh in rebuilt:
            collection.give_up(error)
            fresh.close_tables()
        raise
    for collection, fresh in rebuilt:
        collection.become_resharded(fresh)


def _same(old: ParameterSharding, new: ParameterSharding) -> bool:
    """Returns whether two entries of plans give a table the same shards and options."""
    names = [each.name for each in fields(ParameterSharding)]
    if any(getattr(old, name) != getattr(new, name) for name in names):
        return False
    # The sharder adds its own arguments to the entries, so the other fields of RecStore's entries are not compared.
    return bool(_options(old) == _options(new))


def _options(entry: ParameterSharding) -> Any:
    return entry.options if isinstance(entry, RecStoreParameterSharding) else None
