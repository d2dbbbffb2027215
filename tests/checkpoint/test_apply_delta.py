"""A delta of another trainer is applied to a model that trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec.distributed import DistributedModelParallel

from tests.distributed.workers import run_on_ranks
from torchrec_recstore import (
    apply_delta,
    load_checkpoint,
    load_stock_state_dict,
    read_info,
    reset_rows,
    reshard,
    save_checkpoint,
    stock_state_dict,
)
from torchrec_recstore.checkpoint import CheckpointError
from torchrec_recstore.checkpoint.apply import moved_last_steps
from torchrec_recstore.options import (
    LRU,
    Expiry,
    MinFrequency,
    Scored,
    SSDStore,
    TableOptions,
)
from torchrec_recstore.store import Table, TableState

from . import models
from .test_load import KINDS, Rows, assert_same, build, whole
from .test_warm_start import changed_dense, dense, tables_of

ROW_WISE = EmbOptimType.EXACT_ROWWISE_ADAGRAD
OWN = torch.tensor([77, -77])  # Ids that only the receiving model has.


def remove(model: DistributedModelParallel, name: str, ids: Tensor) -> None:
    for table in tables_of(model)[name]:
        table.remove(ids)


def insert(
    model: DistributedModelParallel, name: str, ids: Tensor, value: float
) -> None:
    for shard in model.module.sparse.recstore_state.shards[name]:
        mine = ids[shard.owned(ids)]
        shard.table.insert(
            mine, torch.full((len(mine), len(shard.table.columns)), value)
        )


def make_delta(
    path: Path, *, leaving: int, kind: str = "table_wise", **arguments: Any
) -> DistributedModelParallel:
    """Saves a base and a delta of another trainer, from whose table ``user`` some ids
    of the base leave.
    """
    other = models.recstore(kind, **arguments)
    models.train(other)
    save_checkpoint(other, path / "base")
    (table,) = tables_of(other)["user"]
    remove(other, "user", table.ids()[:leaving])
    other(models.batch(50)).sum().backward()
    insert(other, "user", torch.tensor([123]), 5.0)
    save_checkpoint(other, path / "delta", delta_of=path / "base")
    return other


@pytest.mark.parametrize("removal", ["left", "stay"])
@pytest.mark.parametrize("optimizer", [ROW_WISE, EmbOptimType.ADAM])
def test_rows_and_states_of_the_delta(
    one_rank: None, tmp_path: Path, removal: str, optimizer: EmbOptimType
) -> None:
    other = make_delta(
        tmp_path, leaving=3 if removal == "left" else 30, optimizer=optimizer
    )
    assert read_info(tmp_path / "delta").tables["user"].removal == removal
    model = models.recstore("row_wise", optimizer)
    load_checkpoint(model, tmp_path / "base")
    for seed in range(300, 309):
        model(models.batch(seed)).sum().backward()
    insert(model, "user", OWN, 3.0)
    before, dense_before = whole(model), changed_dense(model)
    clocks = {
        name: (table.steps, table.optimizer_steps)
        for name, (table,) in tables_of(model).items()
    }

    info = apply_delta(model, tmp_path / "delta")

    assert info == read_info(tmp_path / "delta")
    after, theirs = whole(model), whole(other)
    base = models.recstore("table_wise", optimizer)
    load_checkpoint(base, tmp_path / "base")
    at_base = whole(base)
    changed = {
        key
        for key, row in theirs.items()
        if key not in at_base or differs(row, at_base[key])
    }
    left = at_base.keys() - theirs.keys()
    assert len(changed) > 5
    assert len(left) >= 2
    assert {("user", 77), ("user", -77)} <= after.keys()
    assert after.keys() == (before.keys() | changed) - left
    for key, row in after.items():
        expected = theirs[key] if key in changed else before[key]
        for name, value in row.items():
            if name == "last_step" and key in changed:
                # The other trainer has made 6 steps, and this model 14.
                assert int(value) == int(expected[name]) + 8
            else:
                assert torch.equal(value, expected[name]), (key, name)
    assert torch.equal(dense(model), dense_before)
    assert {
        name: (table.steps, table.optimizer_steps)
        for name, (table,) in tables_of(model).items()
    } == clocks
    models.train(model, steps=1)


def differs(row: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return any(not torch.equal(row[key], other[key]) for key in row)


def test_a_chain_is_applied_in_its_order(one_rank: None, tmp_path: Path) -> None:
    other = make_delta(tmp_path, leaving=2)
    other(models.batch(51)).sum().backward()
    save_checkpoint(other, tmp_path / "delta2", delta_of=tmp_path / "delta")
    model = models.recstore("table_wise", ROW_WISE)
    load_checkpoint(model, tmp_path / "base")
    before = models.shards(model)
    with pytest.raises(
        ValueError,
        match=r"delta of .*/delta, which table 'user' .* neither saved nor loaded, nor",
    ):
        apply_delta(model, tmp_path / "delta2")
    models.assert_holds(model, before)
    apply_delta(model, tmp_path / "delta")
    apply_delta(model, tmp_path / "delta2")
    apply_delta(model, tmp_path / "delta2")  # It changes nothing.
    weights, expected = whole(model), whole(other)
    assert weights.keys() == expected.keys()
    for key, row in weights.items():
        assert torch.equal(row["weight"], expected[key]["weight"])
    # A model that was loaded from a later delta of the chain.
    late = models.recstore("table_wise", ROW_WISE)
    load_checkpoint(late, tmp_path / "delta2")
    apply_delta(late, tmp_path / "delta2")
    # A model that has loaded nothing.
    fresh = models.recstore("table_wise", ROW_WISE)
    for path in ("delta", "delta2"):
        with pytest.raises(ValueError, match="strict=False writes the rows"):
            apply_delta(fresh, tmp_path / path)
    apply_delta(fresh, tmp_path / "delta2", strict=False)
    assert 0 < len(whole(fresh)) < len(expected)


def test_a_warm_start_is_no_base(one_rank: None, tmp_path: Path) -> None:
    make_delta(tmp_path, leaving=2)
    model = models.recstore("table_wise", ROW_WISE)
    load_checkpoint(model, tmp_path / "base")
    load_checkpoint(model, tmp_path / "base", optimizer=False)
    with pytest.raises(ValueError, match="neither saved nor loaded"):
        apply_delta(model, tmp_path / "delta")


def load_stock(model: DistributedModelParallel) -> None:
    """Replaces all rows of the model by rows of TorchRec's form."""
    load_stock_state_dict(
        model,
        stock_state_dict(
            models.recstore("table_wise", ROW_WISE), {"user": 7, "item": 7}
        ),
    )


@pytest.mark.parametrize("replace_all", [reset_rows, load_stock])
def test_rows_that_were_replaced_are_no_base(
    one_rank: None,
    tmp_path: Path,
    replace_all: Callable[[DistributedModelParallel], None],
) -> None:
    make_delta(tmp_path, leaving=2)
    model = models.recstore("table_wise", ROW_WISE)
    load_checkpoint(model, tmp_path / "base")
    replace_all(model)
    before = whole(model)
    with pytest.raises(ValueError, match="neither saved nor loaded"):
        apply_delta(model, tmp_path / "delta")
    assert_same(whole(model), before)


def test_a_delta_without_its_base_is_no_base(one_rank: None, tmp_path: Path) -> None:
    other = make_delta(tmp_path, leaving=2)
    other(models.batch(51)).sum().backward()
    save_checkpoint(other, tmp_path / "delta2", delta_of=tmp_path / "delta")
    model = models.recstore("table_wise", ROW_WISE)
    apply_delta(model, tmp_path / "delta", strict=False)
    before = whole(model)
    with pytest.raises(ValueError, match="neither saved nor loaded"):
        apply_delta(model, tmp_path / "delta2")
    assert_same(whole(model), before)


def make_chain(path: Path) -> DistributedModelParallel:
    """Saves a base, and the deltas ``delta``, ``delta2`` and ``delta3``, each of the
    one before it.
    """
    other = make_delta(path, leaving=2)
    for number, base in ((2, "delta"), (3, "delta2")):
        other(models.batch(50 + number)).sum().backward()
        save_checkpoint(other, path / f"delta{number}", delta_of=path / base)
    return other


def refuse_older(model: DistributedModelParallel, path: Path) -> None:
    before = whole(model)
    with pytest.raises(
        ValueError,
        match=rf"{path} is older than the rows of table 'user' .* strict=False",
    ):
        apply_delta(model, path)
    assert_same(whole(model), before)


def test_an_older_delta_is_refused(one_rank: None, tmp_path: Path) -> None:
    make_chain(tmp_path)
    model = models.recstore("table_wise", ROW_WISE)
    load_checkpoint(model, tmp_path / "base")
    for path in ("delta", "delta", "delta2"):
        apply_delta(model, tmp_path / path)
    refuse_older(model, tmp_path / "delta")
    apply_delta(model, tmp_path / "delta2")
    apply_delta(model, tmp_path / "delta3")
    for path in ("delta", "delta2"):
        refuse_older(model, tmp_path / path)
    reshard(model, models.recstore("column_wise", ROW_WISE).plan)
    refuse_older(model, tmp_path / "delta2")
    # A load is a way back.
    load_checkpoint(model, tmp_path / "base")
    apply_delta(model, tmp_path / "delta")


def test_a_loaded_or_saved_delta_makes_its_bases_older(
    one_rank: None, tmp_path: Path
) -> None:
    other = make_chain(tmp_path)
    loaded = models.recstore("table_wise", ROW_WISE)
    load_checkpoint(loaded, tmp_path / "delta3")
    for model in (other, loaded):
        for path in ("delta", "delta2"):
            refuse_older(model, tmp_path / path)
        apply_delta(model, tmp_path / "delta3")


def test_deltas_of_the_same_base_have_no_order(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore("table_wise", ROW_WISE)
    make_chain(tmp_path)
    load_checkpoint(model, tmp_path / "base")
    third = models.recstore("table_wise", ROW_WISE)
    load_checkpoint(third, tmp_path / "base")
    insert(third, "user", OWN, 3.0)
    save_checkpoint(third, tmp_path / "sibling", delta_of=tmp_path / "base")
    for path in ("delta", "sibling", "delta2", "sibling"):
        apply_delta(model, tmp_path / path)


def test_rows_can_go_back_without_strict(one_rank: None, tmp_path: Path) -> None:
    other = make_chain(tmp_path)
    model = models.recstore("table_wise", ROW_WISE)
    load_checkpoint(model, tmp_path / "delta3")
    apply_delta(model, tmp_path / "delta", strict=False)
    # The rows that later deltas have changed are gone, so that these must be applied
    # again.
    with pytest.raises(ValueError, match="neither saved nor loaded"):
        apply_delta(model, tmp_path / "delta3")
    apply_delta(model, tmp_path / "delta2")
    apply_delta(model, tmp_path / "delta3")
    weights, expected = whole(model), whole(other)
    assert weights.keys() == expected.keys()
    for key, row in weights.items():
        assert torch.equal(row["weight"], expected[key]["weight"])


def test_a_delta_is_older_than_one_that_left_it_out(
    one_rank: None, tmp_path: Path
) -> None:
    make_chain(tmp_path)
    model = models.recstore("table_wise", ROW_WISE)
    load_checkpoint(model, tmp_path / "delta")
    apply_delta(model, tmp_path / "delta3", strict=False)
    refuse_older(model, tmp_path / "delta2")


def test_a_reshard_keeps_the_base(one_rank: None, tmp_path: Path) -> None:
    make_delta(tmp_path, leaving=2)
    model = models.recstore("table_wise", ROW_WISE)
    load_checkpoint(model, tmp_path / "base")
    reshard(model, models.recstore("column_wise", ROW_WISE).plan)
    apply_delta(model, tmp_path / "delta")


def test_own_deltas_contain_the_rows(one_rank: None, tmp_path: Path) -> None:
    make_delta(tmp_path, leaving=3)
    model = models.recstore("table_wise", ROW_WISE)
    load_checkpoint(model, tmp_path / "base")
    insert(model, "user", OWN, 3.0)
    apply_delta(model, tmp_path / "delta")
    save_checkpoint(model, tmp_path / "own", delta_of=tmp_path / "base")
    loaded = models.recstore("table_wise", ROW_WISE)
    load_checkpoint(loaded, tmp_path / "own")
    models.assert_holds(loaded, models.shards(model))
    with pytest.raises(ValueError, match="neither saved nor loaded"):
        save_checkpoint(model, tmp_path / "another", delta_of=tmp_path / "delta")


def test_what_is_refused_changes_nothing(one_rank: None, tmp_path: Path) -> None:
    make_delta(tmp_path, leaving=3)
    model = models.recstore("table_wise", ROW_WISE)
    load_checkpoint(model, tmp_path / "base")
    before = models.shards(model)
    with pytest.raises(
        ValueError, match="base is a whole checkpoint: load it with load_checkpoint"
    ):
        apply_delta(model, tmp_path / "base")
    with pytest.raises(FileNotFoundError):
        apply_delta(model, tmp_path / "nothing")
    adam = models.recstore("table_wise", EmbOptimType.ADAM)
    with pytest.raises(ValueError, match=r"state does not fit the model's Adam\(.*\)$"):
        apply_delta(adam, tmp_path / "delta", strict=False)
    assert not whole(adam)
    part, *_ = (tmp_path / "delta").glob("user-*-00000.safetensors")
    content = bytearray(part.read_bytes())
    content[-3] ^= 1
    part.write_bytes(content)
    with pytest.raises(CheckpointError, match="user"):
        apply_delta(model, tmp_path / "delta")
    models.assert_holds(model, before)


def test_tables_with_bounds(one_rank: None, tmp_path: Path) -> None:
    other = make_delta(tmp_path, leaving=3)
    rows = {name: len(table) for name, (table,) in tables_of(other).items()}
    (changed,) = {
        part.rows for part in read_info(tmp_path / "delta").tables["user"].parts
    }
    full = models.recstore(
        "table_wise", ROW_WISE, options=TableOptions(max_rows=max(rows.values()))
    )
    load_checkpoint(full, tmp_path / "base", strict=False)
    apply_delta(full, tmp_path / "delta")
    bounded = models.recstore(
        "table_wise",
        ROW_WISE,
        options=TableOptions(max_rows=changed + 2, eviction=LRU()),
    )
    load_checkpoint(bounded, tmp_path / "base")
    apply_delta(bounded, tmp_path / "delta")
    (table,) = tables_of(bounded)["user"]
    assert 0 < len(table) <= changed + 2
    assert table.contains(torch.tensor([123])).all()
    insert(
        full,
        "user",
        torch.arange(max(rows.values()) - len(tables_of(full)["user"][0])),
        1.0,
    )
    models.train(other, steps=1)
    insert(other, "user", torch.tensor([321]), 1.0)
    save_checkpoint(other, tmp_path / "more", delta_of=tmp_path / "delta")
    before = models.shards(full)
    with pytest.raises(
        ValueError, match=r"would have \d+ rows .* set eviction or a cold_store"
    ):
        apply_delta(full, tmp_path / "more")
    models.assert_holds(full, before)


def test_frequencies_do_not_become_scores(one_rank: None, tmp_path: Path) -> None:
    """With Scored(), the field of the frequency encodes a score; a delta of another
    policy has none.
    """
    make_delta(tmp_path, leaving=3)
    model = models.recstore(
        "table_wise", ROW_WISE, options=TableOptions(max_rows=1000, eviction=Scored())
    )
    load_checkpoint(model, tmp_path / "base")
    apply_delta(model, tmp_path / "delta")
    for name, _, _, rows in models.shards(model):
        assert not rows["frequency"].any(), name


def test_cold_rows_and_admission(one_rank: None, tmp_path: Path) -> None:
    other = make_delta(tmp_path, leaving=3)
    options = TableOptions(
        max_rows=8,
        cold_store=SSDStore(str(tmp_path / "cold")),
        admission=MinFrequency(5),
    )
    model = models.recstore("table_wise", ROW_WISE, options=options)
    load_checkpoint(model, tmp_path / "base")
    apply_delta(model, tmp_path / "delta")
    for (name, _, ids, rows), (_, _, their_ids, their_rows) in zip(
        models.shards(model), models.shards(other), strict=True
    ):
        assert torch.equal(ids, their_ids), name
        assert torch.equal(rows["weight"], their_rows["weight"])
        assert torch.equal(rows["sum"], their_rows["sum"])


@pytest.mark.parametrize("fails_too", [False, True])
def test_a_failure_is_taken_back(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_too: bool
) -> None:
    make_delta(tmp_path, leaving=3)
    model = models.recstore("table_wise", ROW_WISE)
    load_checkpoint(model, tmp_path / "base")
    insert(model, "user", OWN, 3.0)
    before = whole(model)
    write, calls = Table.write, []

    def failing(table: Table, part: Any) -> None:
        calls.append(table.name)
        if len(calls) == 2 or (fails_too and len(calls) > 2):
            raise MemoryError("no memory")
        write(table, part)

    monkeypatch.setattr(Table, "write", failing)
    if fails_too:
        with pytest.raises(
            RuntimeError, match="has only some of the rows of the delta: apply it again"
        ):
            apply_delta(model, tmp_path / "delta")
        monkeypatch.undo()
        apply_delta(model, tmp_path / "delta")
        return
    with pytest.raises(MemoryError, match="no memory"):
        apply_delta(model, tmp_path / "delta")
    assert calls[:2] == ["user", "item"]
    assert_same(whole(model), before)


def test_between_a_forward_and_its_backward(one_rank: None, tmp_path: Path) -> None:
    make_delta(tmp_path, leaving=3)
    model = models.recstore("table_wise", ROW_WISE)
    load_checkpoint(model, tmp_path / "base")
    out = model(models.batch(300))
    apply_delta(model, tmp_path / "delta")
    out.sum().backward()
    assert all(row["weight"].isfinite().all() for row in whole(model).values())


def test_last_steps_by_another_clock() -> None:
    steps = torch.tensor([0, 90, 100])
    assert moved_last_steps(steps, TableState(100), TableState(300)).tolist() == [
        200,
        290,
        300,
    ]
    assert moved_last_steps(steps, TableState(100), TableState(30)).tolist() == [
        0,
        20,
        30,
    ]
    header = (0, 1000, 0, 0, 0, 0, 0)
    # There, the steps before 50 were made before 500, and those before 95 before 900.
    # The save was at 1000.
    saved = TableState(100, times=(*header, 50, 500, 95, 900))
    # Here, ten times as many steps are made in the same time.
    own = TableState(1000, times=(0, 1200, 0, 0, 0, 0, 0, 400, 400, 850, 850, 950, 950))
    # By steps alone, the rows would be of the steps 900, 990 and 1000, all of which are
    # later.
    assert moved_last_steps(steps, saved, own).tolist() == [900, 990, 1000]
    # Here, a tenth of the steps are made: the steps from 8 on were made at 450 or
    # later, from 10 on at 880 or later.
    slow = TableState(11, times=(0, 1200, 0, 0, 0, 0, 0, 8, 450, 10, 880))
    assert moved_last_steps(steps, saved, slow).tolist() == [8, 10, 11]
    assert moved_last_steps(steps, saved, replace(slow, times=None)).tolist() == [
        0,
        1,
        11,
    ]


def test_rows_that_expire_after_a_time(one_rank: None, tmp_path: Path) -> None:
    options = TableOptions(expiry=Expiry(seconds=3600))
    other = make_delta(tmp_path, leaving=3, options=options)
    model = models.recstore("table_wise", ROW_WISE, options=options)
    load_checkpoint(model, tmp_path / "base")
    apply_delta(model, tmp_path / "delta")
    assert whole(model).keys() == whole(other).keys()
    models.train(model, steps=2)
    assert tables_of(model)["user"][0].stats().expired == 0


def on_two_ranks(rank: int, world_size: int, *, path: str) -> None:
    theirs: Rows = torch.load(f"{path}/theirs.pt", weights_only=False)
    for kind in KINDS:
        model = build(kind)
        load_checkpoint(model, f"{path}/base")
        models.train(model, steps=2)
        insert(model, "user", OWN, 3.0)
        before = whole(model)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                fails = FailsOnce(Table.write)
                patch.setattr(
                    Table,
                    "write",
                    lambda table, part, fails=fails: fails.write(table, part),
                )
            with pytest.raises(MemoryError, match="no memory"):
                apply_delta(model, f"{path}/delta")
        assert_same(whole(model), before)
        apply_delta(model, f"{path}/delta")
        after = whole(model)
        assert ("user", 77) in after
        assert ("user", 123) in after
        assert torch.equal(after["user", 123]["weight"], theirs["user", 123]["weight"])
        written = 0
        for key, row in after.items():
            if key in before and not differs(row, before[key]):
                continue
            written += 1
            for name in ("weight", "sum", "frequency"):
                assert torch.equal(row[name], theirs[key][name]), (kind, key, name)
        assert written > 5
        assert not {key for key in before if key not in after} & theirs.keys()
        assert before.keys() - after.keys()


class FailsOnce:
    """A method of a table whose first call fails."""

    def __init__(self, method: Callable[[Table, Any], None]) -> None:
        self._method, self._calls = method, 0

    def write(self, table: Table, part: Any) -> None:
        self._calls += 1
        if self._calls == 1:
            raise MemoryError("no memory")
        self._method(table, part)


@pytest.mark.slow
def test_every_sharding_at_two_ranks(one_rank: None, tmp_path: Path) -> None:
    other = make_delta(tmp_path, leaving=3, optimizer=EmbOptimType.EXACT_ADAGRAD)
    torch.save(whole(other), tmp_path / "theirs.pt")
    run_on_ranks(2, partial(on_two_ranks, path=str(tmp_path)))
