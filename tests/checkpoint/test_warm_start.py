"""Warm starts: rows without states, some tables, other names, and rows of another dim."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec.distributed import DistributedModelParallel

from tests.distributed.workers import run_on_ranks
from torchrec_recstore import (
    load_checkpoint,
    load_distributed_checkpoint,
    save_checkpoint,
)
from torchrec_recstore.options import LRU, Expiry, MinFrequency, TableOptions

from . import models
from .test_load import KINDS, Rows, assert_same, build, whole

Load = Callable[..., Any]
ROW_WISE = EmbOptimType.EXACT_ROWWISE_ADAGRAD
OTHERS = {"user": "clients", "item": "goods"}


def tables_of(model: DistributedModelParallel) -> dict[str, list[Any]]:
    """The shards of this rank by table."""
    return {
        name: [shard.table for shard in shards]
        for name, shards in model.module.sparse.recstore_state.shards.items()
    }


def dense(model: DistributedModelParallel) -> Tensor:
    return torch.cat(
        [parameter.detach().flatten() for parameter in model.module.over.parameters()]
    ).clone()


def changed_dense(model: DistributedModelParallel) -> Tensor:
    with torch.no_grad():
        for parameter in model.module.over.parameters():
            parameter.add_(1)
    return dense(model)


def save(model: DistributedModelParallel, path: Path, kind: str) -> Load:
    """Saves the model, and returns the function that loads what was saved."""
    if kind == "dcp":
        dcp.save(
            {
                "model": model.state_dict(),
                "optimizer": model.fused_optimizer.state_dict(),
            },
            checkpoint_id=path,
        )
        return load_distributed_checkpoint
    if kind == "delta":
        models.train(model, steps=3)
        save_checkpoint(model, path.with_name("base"))
        models.train(model, steps=4)
        save_checkpoint(model, path, delta_of=path.with_name("base"))
    else:
        save_checkpoint(model, path)
    return load_checkpoint


@pytest.fixture(params=["full", "delta", "dcp"])
def saved(
    request: pytest.FixtureRequest, one_rank: None, tmp_path: Path
) -> tuple[DistributedModelParallel, Load]:
    """A model that was trained and saved at ``tmp_path / "saved"``, and the function
    that loads it.
    """
    model = models.recstore("table_wise", ROW_WISE)
    models.train(model)
    changed_dense(model)
    return model, save(model, tmp_path / "saved", request.param)


Saved = tuple[DistributedModelParallel, Load]


def assert_without_state(
    model: DistributedModelParallel, before: DistributedModelParallel
) -> None:
    """The rows of ``before``, their stamps and its steps are in ``model``, whose states
    are those of new rows.
    """
    for name, (table,) in tables_of(model).items():
        (expected,) = tables_of(before)[name]
        ids = expected.ids()
        assert torch.equal(table.ids(), ids)
        rows, expected_rows = table.read_rows(ids), expected.read_rows(ids)
        for key in ("weight", "last_step", "frequency"):
            assert torch.equal(rows.pop(key), expected_rows[key]), key
        assert all(not value.any() for value in rows.values())
        assert table.steps == expected.steps > 0
        assert table.optimizer_steps == 0


@pytest.mark.parametrize(
    "optimizer", [EmbOptimType.ADAM, EmbOptimType.EXACT_SGD, ROW_WISE]
)
def test_rows_without_the_state_of_the_optimizer(
    saved: Saved, tmp_path: Path, optimizer: EmbOptimType
) -> None:
    before, load = saved
    model = models.recstore("table_wise", optimizer)
    models.train(model, steps=2, distinct=70)
    if optimizer is EmbOptimType.ADAM:
        with pytest.raises(ValueError, match="optimizer"):
            load(model, tmp_path / "saved")
    load(model, tmp_path / "saved", optimizer=False)
    assert_without_state(model, before)
    assert torch.equal(dense(model), dense(before))
    models.train(model, steps=1)


def test_only_some_tables(saved: Saved, tmp_path: Path) -> None:
    before, load = saved
    model = models.recstore("table_wise", ROW_WISE)
    models.train(model, steps=2, distinct=70)
    dense_before = changed_dense(model)
    item_before = tables_of(model)["item"][0].read_rows(
        tables_of(model)["item"][0].ids()
    )
    load(model, tmp_path / "saved", tables=["user"])
    (user,), (item,) = tables_of(model).values()
    (saved_user,) = tables_of(before)["user"]
    assert torch.equal(user.ids(), saved_user.ids())
    for key, value in saved_user.read_rows(saved_user.ids()).items():
        assert torch.equal(user.read_rows(user.ids())[key], value)
    assert (user.steps, user.optimizer_steps) == (
        saved_user.steps,
        saved_user.optimizer_steps,
    )
    for key, value in item_before.items():
        assert torch.equal(item.read_rows(item.ids())[key], value)
    assert item.steps == 2
    assert torch.equal(dense(model), dense_before)


def test_tables_that_swap_their_names(saved: Saved, tmp_path: Path) -> None:
    before, load = saved
    model = models.recstore("table_wise", ROW_WISE)
    load(model, tmp_path / "saved", rename={"user": "item", "item": "user"})
    for name, other in (("user", "item"), ("item", "user")):
        (table,), (expected,) = tables_of(model)[name], tables_of(before)[other]
        ids = expected.ids()
        assert torch.equal(table.ids(), ids)
        for key, value in expected.read_rows(ids).items():
            assert torch.equal(table.read_rows(ids)[key], value)


def test_one_table_into_another(saved: Saved, tmp_path: Path) -> None:
    before, load = saved
    model = models.recstore("table_wise", ROW_WISE)
    load(
        model,
        tmp_path / "saved",
        tables=["item"],
        rename={"user": "item"},
        optimizer=False,
    )
    assert torch.equal(
        tables_of(model)["item"][0].ids(), tables_of(before)["user"][0].ids()
    )
    assert len(tables_of(model)["user"][0]) == 0


def test_a_table_without_a_source_stays(saved: Saved, tmp_path: Path) -> None:
    before, load = saved
    model = models.recstore("table_wise", ROW_WISE)
    models.train(model, steps=2, distinct=70)
    (user,), (item,) = tables_of(model)["user"], tables_of(model)["item"]
    ids = user.ids()
    rows = user.read_rows(ids)
    load(model, tmp_path / "saved", rename={"user": "item"}, strict=False)
    assert torch.equal(user.ids(), ids)
    for key, value in rows.items():
        assert torch.equal(user.read_rows(ids)[key], value)
    assert torch.equal(item.ids(), tables_of(before)["user"][0].ids())


def halves(weights: Tensor) -> Tensor:
    """Makes four columns of eight."""
    return weights[:, :4] + weights[:, 4:]


def test_rows_of_another_dim(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, load = saved
    monkeypatch.setattr(models, "DIM", 4)
    model = models.recstore("table_wise", EmbOptimType.ADAM)
    with pytest.raises(ValueError, match=r"rows=\{\.\.\.\}, with optimizer=False"):
        load(model, tmp_path / "saved", tables=["user"], optimizer=False)
    calls: list[tuple[int, ...]] = []

    def function(weights: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        assert weights.dtype is torch.float32
        calls.append(tuple(weights.shape))
        made = halves(weights)
        weights.zero_()  # The function may write to its argument.
        return made

    monkeypatch.setattr("torchrec_recstore.checkpoint.warm_start._BATCH_ROWS", 7)
    load(
        model,
        tmp_path / "saved",
        tables=["user"],
        optimizer=False,
        rows={"user": function},
    )
    (table,), (expected,) = tables_of(model)["user"], tables_of(before)["user"]
    ids = expected.ids()
    assert torch.equal(table.ids(), ids)
    assert torch.equal(table.lookup(ids), halves(expected.lookup(ids)))
    assert all(shape[1] == 8 and 0 < shape[0] <= 7 for shape in calls)
    assert len(calls) > 2


def nan(weights: Tensor) -> Tensor:
    return torch.full((len(weights), 8), torch.nan)


BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "tables": (
        {"tables": ["nobody"]},
        ValueError,
        "no RecStore table 'nobody'; it has 'user', 'item'",
    ),
    "one name": (
        {"tables": "user"},
        TypeError,
        "tables must be a list of names, got str",
    ),
    "twice": ({"tables": ["user", "user"]}, ValueError, "'user' is named twice"),
    "source": (
        {"rename": {"nobody": "user"}},
        ValueError,
        "no table 'nobody'; it has 'item', .*'user'",
    ),
    "target": (
        {"rename": {"user": "nobody"}},
        ValueError,
        "no RecStore table 'nobody'; it has 'user', 'item'",
    ),
    "doubled": (
        {"rename": {"user": "item", "item": "item"}},
        ValueError,
        "'user' and 'item' .* into 'item'",
    ),
    "not chosen": (
        {"rename": {"user": "item"}, "tables": ["user"]},
        ValueError,
        "rename has table 'item', which is",
    ),
    "no source": (
        {"rename": {"user": "item"}},
        ValueError,
        "'user' is renamed, so that nothing is loaded into",
    ),
    "no source of chosen": (
        {"rename": {"user": "item"}, "tables": ["user", "item"], "strict": False},
        ValueError,
        "'user' is renamed, so that nothing is loaded into",
    ),
    "no source of rows": (
        {
            "rename": {"user": "item"},
            "rows": {"user": halves},
            "optimizer": False,
            "strict": False,
        },
        ValueError,
        "'user' is renamed, so that nothing is loaded into",
    ),
    "optimizer": ({"optimizer": 1}, TypeError, "optimizer must be a bool, got int"),
    "rename": (
        {"rename": ["user"]},
        TypeError,
        "rename must be a dict by the names of tables, got list",
    ),
    "states": ({"rows": {"user": halves}}, ValueError, "set optimizer=False"),
    "function": (
        {"rows": {"user": 1}, "optimizer": False},
        TypeError,
        r"rows\['user'\] must be a function, got int",
    ),
    "unknown": (
        {"rows": {"nobody": halves}, "optimizer": False},
        ValueError,
        "no RecStore table 'nobody'",
    ),
    "shape": (
        {"rows": {"user": halves}, "optimizer": False},
        ValueError,
        r"of shape \(\d+, 8\).*shape \(\d+, 4\)",
    ),
    "type": (
        {"rows": {"user": lambda w: 1}, "optimizer": False},
        TypeError,
        "must return a float32 tensor .* got int",
    ),
    "dtype": (
        {"rows": {"user": Tensor.double}, "optimizer": False},
        ValueError,
        "got torch.float64 on cpu",
    ),
    "nan": (
        {"rows": {"user": nan}, "optimizer": False},
        ValueError,
        "weights that are NaN or infinite",
    ),
}


@pytest.mark.parametrize(
    "saved",
    ["full", pytest.param("delta", marks=pytest.mark.slow), "dcp"],
    indirect=True,
)
@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_what_is_refused_changes_nothing(
    saved: Saved, tmp_path: Path, case: str
) -> None:
    _, load = saved
    arguments, kind, message = BAD_ARGUMENTS[case]
    model = models.recstore("table_wise", ROW_WISE)
    models.train(model, steps=2, distinct=70)
    before = models.shards(model)
    dense_before = changed_dense(model)
    with pytest.raises(kind, match=message):
        load(model, tmp_path / "saved", **arguments)
    models.assert_holds(model, before)
    assert torch.equal(dense(model), dense_before)


def test_deltas_after_a_warm_start(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore("table_wise", ROW_WISE)
    models.train(model)
    save_checkpoint(model, tmp_path / "1")
    # Each table has been loaded as it is, so that the checkpoint is a base.
    for name in models.TABLES:
        load_checkpoint(model, tmp_path / "1", tables=[name])
    models.train(model, steps=1)
    save_checkpoint(model, tmp_path / "2", delta_of=tmp_path / "1")
    other = models.recstore("table_wise", ROW_WISE)
    load_checkpoint(other, tmp_path / "2")
    models.assert_holds(other, models.shards(model))
    for arguments in (
        {"optimizer": False},
        {"rename": {"user": "item", "item": "user"}},
    ):
        load_checkpoint(model, tmp_path / "1", **arguments)
        with pytest.raises(ValueError, match=r"neither saved nor loaded|mark"):
            save_checkpoint(model, tmp_path / "3", delta_of=tmp_path / "1")
        other = models.recstore("table_wise", ROW_WISE)
        load_checkpoint(other, tmp_path / "1", **arguments)
        with pytest.raises(ValueError, match="neither saved nor loaded"):
            save_checkpoint(other, tmp_path / "3", delta_of=tmp_path / "1")


def test_clocks_and_sightings_are_taken_over(one_rank: None, tmp_path: Path) -> None:
    options = TableOptions(
        admission=MinFrequency(2), expiry=Expiry(steps=100), max_rows=20, eviction=LRU()
    )
    model = models.recstore("table_wise", ROW_WISE, options=options)
    models.train(model)
    save_checkpoint(model, tmp_path / "saved")
    other = models.recstore("table_wise", EmbOptimType.ADAM, options=options)
    load_checkpoint(other, tmp_path / "saved", optimizer=False)
    for name, (table,) in tables_of(model).items():
        state, state_here = table.state(), tables_of(other)[name][0].state()
        assert state.sightings is not None
        assert state_here.sightings is not None
        for one, two in zip(state.sightings, state_here.sightings, strict=True):
            assert torch.equal(one, two)
        assert (state_here.steps, state_here.optimizer_steps) == (state.steps, 0)
    assert_without_state(other, model)


def on_two_ranks(rank: int, world_size: int, *, path: str) -> None:
    expected: Rows = torch.load(f"{path}/expected.pt", weights_only=False)
    by_id = {key: row["weight"] for key, row in expected.items()}
    for kind in KINDS:
        model = build(kind, EmbOptimType.ADAM)
        models.train(model, steps=1, distinct=70)
        for saved, load in (
            ("full", load_checkpoint),
            ("delta", load_checkpoint),
            ("dcp", load_distributed_checkpoint),
        ):
            load(model, f"{path}/{saved}/saved", optimizer=False)
            found = whole(model)
            assert found.keys() == expected.keys()
            for key, row in found.items():
                assert torch.equal(row["weight"], by_id[key])
                assert not row["exp_avg"].any()
                assert not row["exp_avg_sq"].any()
            load(
                model,
                f"{path}/{saved}/saved",
                optimizer=False,
                rows={"item": partial(torch.flip, dims=[1])},
                tables=["item"],
                rename={"user": "item"},
            )
            for (name, identity), row in whole(model).items():
                weight = by_id["user", identity]
                assert torch.equal(
                    row["weight"], weight.flip(0) if name == "item" else weight
                )
            before = whole(model)
            # The function fails on one rank. A table-wise table has all of its rows on
            # a rank.
            fails = (
                nan
                if rank or kind in ("table_wise", "table_column_wise")
                else Tensor.clone
            )
            with pytest.raises(ValueError, match="NaN or infinite"):
                load(
                    model,
                    f"{path}/{saved}/saved",
                    optimizer=False,
                    rows=dict.fromkeys(models.TABLES, fails),
                )
            assert_same(whole(model), before)
    dist.barrier()


@pytest.mark.slow
def test_every_sharding_at_two_ranks(one_rank: None, tmp_path: Path) -> None:
    model = build("column_wise")
    models.train(model)
    for kind in ("full", "dcp", "delta"):
        (tmp_path / kind).mkdir()
    save(model, tmp_path / "delta" / "saved", "delta")
    for kind in ("full", "dcp"):
        save(model, tmp_path / kind / "saved", kind)
    torch.save(whole(model), tmp_path / "expected.pt")
    run_on_ranks(2, partial(on_two_ranks, path=str(tmp_path)))
