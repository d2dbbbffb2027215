"""RecStore tables are saved with torch.distributed.checkpoint and loaded at other world
sizes and shardings.
"""

from __future__ import annotations

import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torchrec.distributed import DistributedModelParallel

from tests.distributed.workers import run_on_ranks
from torchrec_recstore.checkpoint import (
    load_distributed_checkpoint,
    load_distributed_state,
)
from torchrec_recstore.options import LFU, Scored, TableOptions
from torchrec_recstore.sharders import layout, set_scores
from torchrec_recstore.sharders.model_tables import rows_left_out

from . import models

ROW, TABLE, COLUMN, NODE, GRID = (
    "row_wise",
    "table_wise",
    "column_wise",
    "table_row_wise",
    "grid_shard",
)
RW, ELEMENT, NONE = (
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_SGD,
)
USER, ITEM = (f"sparse.embedding_bags.{name}.weight" for name in models.TABLES)
Case = tuple[int, str, EmbOptimType]  # world size, sharding, optimizer
SAVED: list[Case] = [
    (1, TABLE, ELEMENT),
    (1, TABLE, NONE),
    (2, ROW, RW),
    (2, COLUMN, RW),
    (2, NODE, ELEMENT),
]
LOADS: list[tuple[Case, int, str]] = [
    ((1, TABLE, ELEMENT), 2, ROW),
    ((1, TABLE, NONE), 2, COLUMN),
    ((2, ROW, RW), 1, TABLE),
    ((2, ROW, RW), 2, COLUMN),
    ((2, ROW, RW), 3, ROW),
    ((2, COLUMN, RW), 1, ROW),
    ((2, COLUMN, RW), 2, TABLE),
    ((2, COLUMN, RW), 2, COLUMN),
    ((2, NODE, ELEMENT), 1, TABLE),
    ((2, NODE, ELEMENT), 2, GRID),
    ((2, NODE, ELEMENT), 3, GRID),
]


def saves_and_loads(rank: int, world_size: int, *, path: Path) -> None:
    """Runs all saves of this world size, and then all loads."""
    layout.PIECE_ROWS = 7  # A table has several pieces.
    for case in SAVED:
        if case[0] == world_size:
            save(path / "_".join(map(str, case)), *case[1:])
    dist.barrier()
    for case, at, sharding in LOADS:
        if at == world_size:
            load(path / "_".join(map(str, case)), case, sharding)


def save(path: Path, sharding: str, optimizer: EmbOptimType) -> None:
    path.mkdir(exist_ok=True)
    model = models.recstore(sharding, optimizer)
    models.train(model)
    models.write_down(model, path)
    dcp.save(
        {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()},
        checkpoint_id=path / "saved",
    )


def load(path: Path, case: Case, sharding: str) -> None:
    _, saved_as, optimizer = case
    # Only joined column shards average row-wise states.
    exact = saved_as != COLUMN or sharding == COLUMN
    model = models.recstore(sharding, optimizer)
    models.train(model, steps=1, distinct=30)  # The load must remove these rows.
    load_distributed_checkpoint(model, path / "saved")
    expected = models.whole_tables(path)
    held: dict[str, set[int]] = {name: set() for name in expected}
    for name, columns, ids, rows in models.shards(model):
        held[name].update(ids.tolist())
        states = rows.get("sum", torch.zeros(len(ids)))
        for i, identity in enumerate(ids.tolist()):
            row = expected[name][identity]
            cut = slice(columns.start, columns.stop)
            assert torch.equal(rows["weight"][i], row["weight"][cut])
            assert all(
                torch.equal(rows[key][i], row[key])
                for key in ("last_step", "frequency")
            )
            if states.dim() == 2:
                assert torch.equal(states[i], row["state"][cut])
            elif exact:
                assert torch.equal(states[i], row["state"][columns.start])
            else:
                torch.testing.assert_close(
                    states[i], row["state"][cut].double().mean().float()
                )
    counts = {
        (t.steps, t.optimizer_steps) for t in model.module.sparse.recstore_tables()
    }
    assert counts <= {(5, 5)}  # A rank may have no shard.
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, held)
    assert {name: set().union(*(h[name] for h in everywhere)) for name in expected} == {
        name: set(rows) for name, rows in expected.items()
    }


@pytest.mark.slow
def test_any_world_size_and_sharding(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "PIECE_ROWS", 7)
    alone = [case for case in SAVED if case[0] == 1]
    for case in alone:
        save(tmp_path / "_".join(map(str, case)), *case[1:])
    run_on_ranks(2, partial(saves_and_loads, path=tmp_path))
    run_on_ranks(3, partial(saves_and_loads, path=tmp_path))
    for case, at, sharding in LOADS:
        if at == 1:
            load(tmp_path / "_".join(map(str, case)), case, sharding)


def test_async_save_and_training_on(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    models.train(model)
    state = {
        "model": model.state_dict(),
        "optimizer": model.fused_optimizer.state_dict(),
    }
    before = models.shards(model)
    # The default stager of torch 2.13 cannot copy a ShardedTensor of any kernel.
    saving = dcp.async_save(
        state, checkpoint_id=tmp_path / "saved", async_stager=BlockingAsyncStager()
    )
    models.train(model)
    saving.result()
    other = models.recstore()
    load_distributed_checkpoint(other, tmp_path / "saved")
    models.assert_holds(other, before)


def test_model_state_alone(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    models.train(model)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "saved")
    other = models.recstore()
    refused(
        other,
        tmp_path / "saved",
        "no optimizer state of RecStore table 'user'.*strict=False",
    )
    load_distributed_checkpoint(other, tmp_path / "saved", strict=False)
    batch = models.batch(3)
    assert torch.equal(model.eval()(batch), other.eval()(batch))


def test_states_are_found_under_any_key(one_rank: None, tmp_path: Path) -> None:
    model, another = models.recstore(), models.recstore()
    models.train(model)
    models.train(another, steps=2, distinct=20)
    weights, states = model.state_dict(), model.fused_optimizer.state_dict()
    other_weights, other_states = (
        another.state_dict(),
        another.fused_optimizer.state_dict(),
    )
    for number, (saved, keys) in enumerate(
        [
            ({"model": weights, "opt": states}, {}),
            (
                {
                    "app": {"net": {"module": weights}, "optim": [{"fused": states}]},
                    "step": 3,
                },
                {},
            ),
            ({**weights, "optimizer": states}, {}),
            (
                {
                    "ema": other_weights,
                    "model": weights,
                    "old": other_states,
                    "optimizer": states,
                },
                {},
            ),
            (
                {"ema": other_weights, "x": {"y": weights}, "opt": states},
                {"model_key": "x.y"},
            ),
            (
                {"model": weights, "opt": states, "old": other_states},
                {"optimizer_key": "opt"},
            ),
            ({**weights, "ema": other_weights, "opt": states}, {"model_key": ""}),
        ]
    ):
        path = tmp_path / str(number)
        dcp.save(saved, checkpoint_id=path)
        loaded = models.recstore()
        load_distributed_checkpoint(loaded, path, **keys)
        models.assert_holds(loaded, models.shards(model))
        assert torch.equal(loaded.module.over.weight, model.module.over.weight)
    for saved, message in [
        (
            {"ema": other_weights, "net": weights, "opt": states},
            "the model under the keys 'ema', 'net': set model_key",
        ),
        (
            {"model": weights, "a": states, "b": other_states},
            "fused optimizer under the keys 'a', 'b': set optimizer_key",
        ),
        ({"else": {"x": torch.zeros(3)}}, "no table and no tensor of the model"),
    ]:
        path = tmp_path / message[-9:]
        dcp.save(saved, checkpoint_id=path)
        refused(model, path, message)
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "keys")
    refused(
        model,
        tmp_path / "keys",
        "model_key='net': the checkpoint has the model under the keys 'model'",
        model_key="net",
    )


def test_what_is_missing_stays_where_it_may(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    models.train(model)
    weights, states = model.state_dict(), model.fused_optimizer.state_dict()
    before = models.shards(model)
    some = {
        key: value
        for key, value in weights.items()
        if ITEM not in key and "over" not in key
    }
    dcp.save(
        {"model": some, "opt": {"state": {USER: states["state"][USER]}}},
        checkpoint_id=tmp_path / "some",
    )
    refused(model, tmp_path / "some", "no RecStore table 'item'")
    models.train(model, steps=2, distinct=50)
    item, dense = models.shards(model)[1], model.module.over.weight.clone()
    load_distributed_checkpoint(model, tmp_path / "some", strict=False)
    models.assert_holds(model, [before[0], item])
    assert torch.equal(model.module.over.weight, dense)


def test_stock_tables_come_and_go(one_rank: None, tmp_path: Path) -> None:
    stock = models.stock()
    models.train(stock, low=0, high=100)
    dcp.save({"model": stock.state_dict()}, checkpoint_id=tmp_path / "saved")
    model = models.recstore()
    load_distributed_checkpoint(model, tmp_path / "saved", strict=False)
    batch = models.batch(3, low=0, high=100)
    assert torch.equal(stock.eval()(batch), model.eval()(batch))


def test_pieces_are_of_bounded_size(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "PIECE_ROWS", 16)
    model = models.recstore()
    models.train(model)
    dcp.save(
        {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()},
        checkpoint_id=tmp_path,
    )
    saved = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    states = [
        f"optimizer.state.{USER}.rows.{key}"
        for key in ("id", "sum", "last_step", "frequency")
    ]
    for key in (f"model.{USER}", f"model.{USER}_id", *states):
        assert [chunk.sizes[0] for chunk in saved[key].chunks] == [16, 4]


def test_a_table_whose_optimizer_has_no_state_needs_none(
    one_rank: None, tmp_path: Path
) -> None:
    model, other = models.recstore(optimizer=NONE), models.recstore(optimizer=NONE)
    models.train(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    load_distributed_checkpoint(other, tmp_path)
    for (_, _, ids, rows), (_, _, other_ids, other_rows) in zip(
        models.shards(model), models.shards(other), strict=True
    ):
        assert torch.equal(ids, other_ids)
        assert torch.equal(rows["weight"], other_rows["weight"])
        assert other_rows["last_step"].count_nonzero() == 0


def test_scores_are_not_taken_for_counts_nor_counts_for_scores(
    one_rank: None, tmp_path: Path
) -> None:
    """A state says which of the two its frequencies are.

    In a table with the other kind they begin at 0.
    """
    kinds = {
        "scored": TableOptions(max_rows=1000, eviction=Scored()),
        "counted": TableOptions(max_rows=1000, eviction=LFU()),
    }
    for saved_kind, saved_options in kinds.items():
        model = models.recstore(options=saved_options)
        models.train(model)
        if saved_kind == "scored":
            for name, _, ids, _ in models.shards(model):
                set_scores(model, name, ids, torch.arange(len(ids)).float())
        state = {
            "model": model.state_dict(),
            "optimizer": model.fused_optimizer.state_dict(),
        }
        dcp.save(state, checkpoint_id=tmp_path / saved_kind)
        for kind, options in kinds.items():
            plain = models.recstore(options=options)
            plain.load_state_dict(model.state_dict())
            plain.fused_optimizer.load_state_dict(model.fused_optimizer.state_dict())
            whole = models.recstore(options=options)
            load_distributed_checkpoint(whole, tmp_path / saved_kind)
            rows_only = models.recstore(options=options)
            load_distributed_checkpoint(
                rows_only, tmp_path / saved_kind, optimizer=False
            )
            of_framework = models.recstore(options=options)
            into = {
                "model": of_framework.state_dict(),
                "optimizer": of_framework.fused_optimizer.state_dict(),
            }
            load_distributed_state(into, checkpoint_id=tmp_path / saved_kind)
            of_framework.load_state_dict(into["model"])
            of_framework.fused_optimizer.load_state_dict(into["optimizer"])
            for other in (plain, whole, rows_only, of_framework):
                for (_, _, _, rows), (_, _, _, read) in zip(
                    models.shards(model), models.shards(other), strict=True
                ):
                    expected = (
                        rows["frequency"]
                        if kind == saved_kind
                        else torch.zeros_like(rows["frequency"])
                    )
                    assert torch.equal(read["frequency"], expected), (saved_kind, kind)
                    assert torch.equal(read["last_step"], rows["last_step"])
                    assert bool(rows["frequency"].all())
    # dcp.load itself reads the entries of the model alone. It must not find counts
    # where there are scores.
    twin = models.recstore(options=kinds["counted"])
    models.train(twin)
    with pytest.raises(
        CheckpointException, match=r"Missing key in checkpoint state_dict.*frequency"
    ):
        dcp.load(
            {"optimizer": twin.fused_optimizer.state_dict()},
            checkpoint_id=tmp_path / "scored",
        )


def test_rows_can_be_left_out(one_rank: None) -> None:
    model = models.recstore()
    models.train(model)
    before = models.shards(model)
    with rows_left_out(model):
        state, optimizer = model.state_dict(), model.fused_optimizer.state_dict()
        assert state[USER].numel() == 0
        assert f"{USER}_id" not in state
        assert optimizer["state"][USER] == {"rows": {}}
        model.load_state_dict(
            {key: value for key, value in state.items() if key != USER}
        )
        model.fused_optimizer.load_state_dict(optimizer)
    models.assert_holds(model, before)
    assert len(model.state_dict()[f"{USER}_id"].local_shards()[0].tensor) == len(
        before[0][2]
    )


def refused(
    model: DistributedModelParallel, path: Path, message: str, **keys: str
) -> None:
    before, dense = models.shards(model), model.module.over.weight.clone()
    with pytest.raises(ValueError, match=message):
        load_distributed_checkpoint(model, path, **keys)
    models.assert_holds(model, before)
    assert torch.equal(model.module.over.weight, dense)


def test_what_cannot_be_loaded_changes_nothing(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    models.train(model)
    state = {
        "model": model.state_dict(),
        "optimizer": model.fused_optimizer.state_dict(),
    }
    item = state["optimizer"]["state"][ITEM]["rows"]
    rows = item["id"].size()[0]
    models.train(model, steps=2, distinct=50)
    with torch.no_grad():
        model.module.over.weight.add_(1)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_distributed_checkpoint(model, tmp_path / "nowhere")
    # The last table is damaged. The first table must not have changed either.
    without = {key: value for key, value in state["model"].items() if ITEM not in key}
    dcp.save({**state, "model": without}, checkpoint_id=tmp_path / "without")
    refused(model, tmp_path / "without", "no RecStore table 'item'")
    dcp.save(
        {**state, "model": {**without, ITEM: torch.zeros(3, 16)}},
        checkpoint_id=tmp_path / "wide",
    )
    refused(
        model,
        tmp_path / "wide",
        r"'item' is of shape \(3, 16\) in the checkpoint, its dim in the model is 8",
    )
    for key, value, message in [
        (
            "sum",
            torch.zeros(rows, 3),
            (
                rf"'item': sum is of shape \({rows}, 3\) in the checkpoint, not"
                rf" \({rows}, 1\)"
            ),
        ),
        (
            "id",
            torch.arange(rows),
            "'item': the optimizer state in the checkpoint is of other ids",
        ),
        ("frequency", torch.arange(3), r"'item': frequency is of shape \(3,\)"),
        ("steps", None, "'item': the optimizer state has no steps"),
    ]:
        broken = {
            k: value if k == key else v
            for k, v in item.items()
            if k != key or value is not None
        }
        states = {**state["optimizer"]["state"], ITEM: {"rows": broken}}
        dcp.save(
            {**state, "optimizer": {"state": states}}, checkpoint_id=tmp_path / key
        )
        refused(model, tmp_path / key, message)
    twice = torch.arange(rows).clamp(min=1)
    with_twice = {
        **state["model"],
        ITEM: torch.zeros(rows, models.DIM),
        f"{ITEM}_id": twice,
    }
    states = {**state["optimizer"]["state"], ITEM: {"rows": {**item, "id": twice}}}
    dcp.save(
        {"model": with_twice, "optimizer": {"state": states}},
        checkpoint_id=tmp_path / "twice",
    )
    refused(
        model,
        tmp_path / "twice",
        "table 'item': the checkpoint has an id several times",
    )
    dcp.save(state, checkpoint_id=tmp_path / "lacks")
    metadata = tmp_path / "lacks" / ".metadata"
    contents = pickle.loads(metadata.read_bytes())
    contents.state_dict_metadata[f"model.{ITEM}_id"].chunks.clear()
    metadata.write_bytes(pickle.dumps(contents))
    refused(model, tmp_path / "lacks", f"lacks lacks pieces of model.{ITEM}_id")
    dcp.save(state, checkpoint_id=tmp_path / "cut")
    (file,) = (tmp_path / "cut").glob("*.distcp")
    os.truncate(file, file.stat().st_size - 1)
    refused(
        model, tmp_path / "cut", "distcp has .* bytes, and had .* when it was saved"
    )
    file.unlink()
    refused(model, tmp_path / "cut", "lost a file")
