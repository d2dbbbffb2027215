"""RecStore tables in checkpoints of ``torch.distributed.checkpoint`` (DCP, torch 2.13)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore.checkpoint.new_rows import check_replaceable, exchange_all
from torchrec_recstore.checkpoint.saved_rows import SavedTable, SavedTensors
from torchrec_recstore.optim import state_names
from torchrec_recstore.sharders.gather import all_gathered, refused_together, whole_environment
from torchrec_recstore.sharders.model_tables import ModelTable, recstore_tables, rows_left_out
from torchrec_recstore.store import Table


def load_distributed_checkpoint(
    model: DistributedModelParallel,
    checkpoint_id: str | Path,
    *,
    strict: bool = True,
    model_key: str | None = None,
    optimizer_key: str | None = None,
) -> None:
    """Loads what ``dcp.save`` or ``dcp.async_save`` wrote, at any world size and sharding. Collective.

    DCP's own load needs tensors of the right size beforehand, and how many rows a RecStore table has only the
    checkpoint knows. The states of the model and of its fused optimizer are found under any keys, nested ones too::

        dcp.save({"model": model.state_dict(), "opt": model.fused_optimizer.state_dict()}, checkpoint_id=path)

    A table that was saved from TorchRec's own kernels is loaded as well: its row i becomes id i. Its optimizer state is
    not in the form of RecStore's, and so counts as missing; ``load_stock_state_dict`` converts it. Every rank reads
    each RecStore table that it has a shard of, piece by piece as it was saved (RecStore tables in pieces of at most
    2**18 rows), and keeps the rows that belong to it: in new tables, which replace the model's own when all is well.

    Args:
        model: ``DistributedModelParallel``.
        checkpoint_id: the directory.
        strict: Whether the checkpoint must have all tables and other tensors of the model, and the optimizer state of
            every table whose optimizer has some. Otherwise what is missing stays as it is, and the optimizer state of
            a table that is loaded without it starts anew.
        model_key: The key of the model's state in what was saved, with a dot between nested keys, and ``""`` where it
            was saved by itself. None: the key under which most of the model's entries are; of several ``model``, then
            ``""``.
        optimizer_key: The key of the fused optimizer's state. None: likewise; of several ``optimizer``.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: A RecStore table of the model or its optimizer state is not in the checkpoint, or nothing of the
            model is; the table has another dim, its state does not fit its rows or lacks something; several keys have
            the state; or a file is missing or shorter than it was. No table has changed.
    """
    if not (Path(checkpoint_id) / ".metadata").exists():
        raise FileNotFoundError(f"no checkpoint of torch.distributed.checkpoint at {checkpoint_id}")
    tensors = SavedTensors(checkpoint_id)
    tables = recstore_tables(model)
    mine = {table.weight_key for table in tables}
    env = whole_environment()
    with rows_left_out(model):
        weights = {key: value for key, value in model.state_dict().items() if key not in mine}
        optimizer = model.fused_optimizer.state_dict()["state"]
    stock_states = {key: states for key, states in optimizer.items() if key not in mine and states}
    of_stock = {f"{key}.{name}" for key, states in stock_states.items() for name in states}
    of_stock = {key for keys in all_gathered(of_stock, env) for key in keys}  # a rank knows those of its shards alone
    of_tables = {f"{table.weight_key}.rows.id" for table in tables}
    loaded: list[tuple[Table, Table]] = []
    with refused_together(env):
        prefix = _prefix(tensors.saved, {*mine, *weights}, "the model", "model_key", model_key, ("model.", ""))
        if prefix is None:
            raise ValueError(f"the checkpoint has nothing of the model, neither tables nor tensors: {checkpoint_id}")
        states_prefix = _prefix(
            tensors.saved,
            of_tables | of_stock,
            "its fused optimizer",
            "optimizer_key",
            optimizer_key,
            ("optimizer.state.",),
        )
        present = [table for table in tables if strict or prefix + table.weight_key in tensors.saved]
        tensors.check_files()
        rows = [
            SavedTable(tensors, t.state, prefix + t.weight_key, f"{states_prefix}{t.weight_key}.rows.") for t in present
        ]
        for saved in rows:
            saved.check()
        if strict:
            found = [key for key in tensors.saved if states_prefix is not None and key.startswith(states_prefix)]
            _check_states(tables, of_stock, {key.removeprefix(states_prefix or "") for key in found})
        for saved in rows:
            loaded += saved.loaded()
        check_replaceable(old for old, _ in loaded)
    # All but the RecStore tables, by DCP's own load, into the model's own tensors.
    state: dict[str, Any] = {prefix + key: value for key, value in weights.items()}
    if states_prefix is not None:
        state |= {states_prefix + key: states for key, states in stock_states.items()}
    if state:
        load(state, checkpoint_id=checkpoint_id, planner=DefaultLoadPlanner(allow_partial_load=not strict))
    with rows_left_out(model):
        model.load_state_dict({key: state[prefix + key] for key in weights})
        if states_prefix is not None:
            new = {key: state[states_prefix + key] for key in stock_states}
            model.fused_optimizer.load_state_dict({"state": {**optimizer, **new}})
    exchange_all(loaded)
    for table in present:
        table.state.forget_copies()


def _prefix(
    saved: Iterable[str], keys: set[str], what: str, argument: str, given: str | None, preferred: Sequence[str]
) -> str | None:
    """What stands before ``keys`` in the keys of a checkpoint: where most of them are; None where there is none.

    Args:
        saved: the keys in the checkpoint, in which dots join the keys of nested dicts.
        keys: the model's.
        what: names these in errors.
        argument: the argument by which a user says which of several it is.
        given: its value.
        preferred: the prefixes that are taken first of several with equally many keys.

    Raises:
        ValueError: there are several, or ``given`` is none of them.
    """
    times: Counter[str] = Counter()
    for key in saved:
        begin = 0
        while begin <= len(key):
            if key[begin:] in keys:
                times[key[:begin]] += 1
            begin = key.find(".", begin) + 1 or len(key) + 1
    known = [prefix for prefix, count in times.items() if count == max(times.values())]
    if given is not None:
        known = [p for p in times if p == (f"{given}." if given else "") or p == f"{given}.state."]
        if not known:
            raise ValueError(f"{argument}={given!r}: the checkpoint has {what} under {_named(times)}")
    for prefix in preferred:
        if prefix in known:
            return prefix
    if len(known) > 1:
        raise ValueError(f"the checkpoint has {what} under {_named(known)}: give {argument} one of them")
    return known[0] if known else None


def _named(prefixes: Iterable[str]) -> str:
    return ", ".join(sorted(repr(p.removesuffix(".").removesuffix(".state")) for p in prefixes)) or "no key"


def _check_states(tables: Sequence[ModelTable], of_stock: Iterable[str], found: set[str]) -> None:
    """Refuses a checkpoint without the optimizer state of a table that has some.

    Raises:
        ValueError: there is such a table.
    """
    fix = "save model.fused_optimizer.state_dict() with the model, or start it anew with strict=False"
    for table in tables:
        if state_names(table.state.optimizer) and f"{table.weight_key}.rows.id" not in found:
            raise ValueError(f"the checkpoint has no optimizer state of RecStore table {table.name!r}: {fix}")
    for key in sorted(set(of_stock) - found):
        raise ValueError(f"the checkpoint has no optimizer state {key}: {fix}")
