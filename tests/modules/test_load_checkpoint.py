"""Modules without sharding load the checkpoint of a sharded model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from tests.checkpoint import models
from tests.distributed.workers import run_on_ranks
from torchrec_recstore import (
    RecStoreEmbeddingBag,
    RecStoreEmbeddingBagCollection,
    load_checkpoint,
    read_info,
    save_checkpoint,
)
from torchrec_recstore.optim import Adam, Optimizer, RowWiseAdagrad
from torchrec_recstore.options import TableOptions

ADAM = Adam(lr=0.1)


class Eager(nn.Module):
    """The model of tests/checkpoint/models.py in one process."""

    def __init__(
        self, optimizer: Optimizer = ADAM, options: TableOptions | None = None
    ) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=name,
                embedding_dim=models.DIM,
                num_embeddings=100,
                feature_names=features,
            )
            for name, features in models.TABLES.items()
        ]
        self.sparse = RecStoreEmbeddingBagCollection(
            configs, optimizer=optimizer, options=options or TableOptions()
        )
        self.over = nn.Linear(3 * models.DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """(B, 1)."""
        pooled = self.sparse(features)
        out: Tensor = self.over(
            torch.cat([pooled[key] for key in ("u", "i", "j")], dim=1)
        )
        return out

    def table(self, name: str) -> Any:
        return self.sparse.embedding_bags[name].table


def save(rank: int, world_size: int, *, path: str, kind: str) -> None:
    model = models.recstore(kind, EmbOptimType.ADAM)
    models.train(model)
    save_checkpoint(model, f"{path}/base")
    models.train(model, steps=2)
    save_checkpoint(model, f"{path}/saved", delta_of=f"{path}/base")
    models.write_down(model, path)


@pytest.fixture
def saved(one_rank: None, tmp_path: Path) -> Any:
    """A sharded model, which is saved at ``tmp_path / "saved"``."""
    model = models.recstore("column_wise", EmbOptimType.ADAM)
    models.train(model)
    save_checkpoint(model, tmp_path / "saved")
    return model


def test_training_goes_on_as_in_the_sharded_model(saved: Any, tmp_path: Path) -> None:
    model = Eager()
    model(models.batch(7, distinct=70)).sum().backward()  # The load removes these rows.
    info = load_checkpoint(model, tmp_path / "saved")
    assert info.step == 5
    for step in range(3):
        outs = [each(models.batch(50 + step)) for each in (saved, model)]
        assert torch.equal(*outs)
        for out in outs:
            out.sum().backward()
    assert torch.equal(saved.eval()(models.batch(60)), model.eval()(models.batch(60)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["row_wise", "column_wise"])
def test_a_delta_of_two_ranks(tmp_path: Path, kind: str) -> None:
    run_on_ranks(2, partial(save, path=str(tmp_path), kind=kind))
    expected = models.whole_tables(tmp_path)
    model = Eager()
    load_checkpoint(model, tmp_path / "saved")
    for name, rows in expected.items():
        ids = torch.tensor(sorted(rows))
        assert torch.equal(model.table(name).ids(), ids)
        weights = torch.stack([rows[identity]["weight"] for identity in ids.tolist()])
        assert torch.equal(model.table(name).lookup(ids), weights)


def load_on_each_rank(rank: int, world_size: int, *, path: str) -> None:
    model = Eager()
    load_checkpoint(model, path)
    assert len(model.table("user")) == read_info(path).tables["user"].rows > 0


@pytest.mark.slow
def test_each_rank_loads_all_rows(saved: Any, tmp_path: Path) -> None:
    run_on_ranks(2, partial(load_on_each_rank, path=str(tmp_path / "saved")))


def test_warm_starts(saved: Any, tmp_path: Path) -> None:
    model = Eager(RowWiseAdagrad(lr=0.1))
    before = model.over.weight.detach().clone()
    with pytest.raises(ValueError, match="optimizer=False loads the rows without it"):
        load_checkpoint(model, tmp_path / "saved")
    with pytest.raises(
        ValueError, match="no RecStore table 'nobody'; it has 'user', 'item'"
    ):
        load_checkpoint(model, tmp_path / "saved", tables=["nobody"])
    assert len(model.table("user")) == 0
    load_checkpoint(
        model,
        tmp_path / "saved",
        optimizer=False,
        tables=["user"],
        rename={"item": "user"},
    )
    (item,) = [
        shard.table for shard in saved.module.sparse.recstore_state.shards["item"]
    ][:1]
    assert torch.equal(model.table("user").ids(), item.ids())
    assert len(model.table("item")) == 0
    assert torch.equal(model.over.weight, before)
    frozen = Eager(options=TableOptions(frozen=True))
    load_checkpoint(frozen, tmp_path / "saved")
    assert torch.equal(frozen(models.batch(60)), saved.eval()(models.batch(60)))


def test_a_module_beside_others(saved: Any, tmp_path: Path) -> None:
    model = nn.ModuleDict(
        {
            "bag": RecStoreEmbeddingBag(100, models.DIM, mode="sum"),
            "over": nn.Linear(2, 2),
        }
    )
    load_checkpoint(
        model,
        tmp_path / "saved",
        optimizer=False,
        tables=["bag"],
        rename={"user": "bag"},
    )
    ids = model["bag"].table.ids()
    (shards,) = [saved.module.sparse.recstore_state.shards["user"]]
    weights = torch.cat([shard.table.lookup(ids) for shard in shards], dim=1)
    assert torch.equal(model["bag"](ids[:, None]), weights)
    model["meta"] = RecStoreEmbeddingBag(100, models.DIM, mode="sum", device="meta")
    load_checkpoint(
        model,
        tmp_path / "saved",
        optimizer=False,
        tables=["bag"],
        rename={"user": "bag"},
    )
    with pytest.raises(RuntimeError, match="on the meta device and has no rows"):
        load_checkpoint(
            model,
            tmp_path / "saved",
            optimizer=False,
            tables=["meta"],
            rename={"user": "meta"},
        )
    state = model["bag"].state_dict()
    state["weight"].zero_()
    with pytest.raises(RuntimeError, match="state_dict"):
        model["bag"](ids[:, None])


def test_a_save_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="is the table of a module that is not sharded"
    ):
        save_checkpoint(Eager(), tmp_path / "saved")
