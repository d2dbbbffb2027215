"""Modules without sharding whose tables are frozen by their options."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, KeyedTensor

from torchrec_recstore import (
    RecStoreEmbedding,
    RecStoreEmbeddingBag,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    SparseAdamW,
)
from torchrec_recstore.optim import Adam
from torchrec_recstore.options import TableOptions

FROZEN = TableOptions(frozen=True)
IDS = torch.tensor([3, -7, 2**40])
ROWS = torch.arange(12.0).view(3, 4)


def test_it_is_filled_by_a_state() -> None:
    trained = RecStoreEmbedding(100, 4, optimizer=Adam(lr=0.1))
    trained(IDS).sum().backward()
    module = RecStoreEmbedding(100, 4, optimizer=Adam(lr=0.1), options=FROZEN)
    assert not module.weight.requires_grad
    assert not module(IDS).any()
    print(module.load_state_dict(trained.state_dict()))
    assert torch.equal(module(IDS), trained.eval()(IDS))
    assert not module(IDS).requires_grad
    module(IDS + 1)
    assert len(module.table) == 3
    assert module.table.steps == 1  # that of the state
    assert {
        "weight",
        "weight_id",
        "last_step",
        "frequency",
        "steps",
        "optimizer_steps",
    } == module.state_dict().keys()
    copied = copy.deepcopy(module)
    assert torch.equal(copied(IDS), module(IDS))
    assert not copied.weight.requires_grad
    back = RecStoreEmbedding(100, 4, optimizer=Adam(lr=0.1))
    back.load_state_dict(module.state_dict(), strict=False)
    assert torch.equal(back.eval()(IDS), module(IDS))


def test_unfreezing_is_refused() -> None:
    module = RecStoreEmbeddingBag(100, 4, options=FROZEN, mode="sum")
    module.weight.requires_grad_(True)
    with pytest.raises(
        ValueError, match="is frozen by its options, and its weight requires a gradient"
    ):
        module(IDS[None])
    module.eval()
    module(IDS[None])


def test_beside_a_trained_table() -> None:
    configs = [
        EmbeddingBagConfig(
            name=name, embedding_dim=4, num_embeddings=100, feature_names=[name]
        )
        for name in ("a", "b")
    ]
    collection = RecStoreEmbeddingBagCollection(
        configs, options={"a": FROZEN, "b": TableOptions()}
    )
    collection.embedding_bags["a"].table.insert(IDS, ROWS)
    batch = KeyedJaggedTensor(
        ["a", "b"], values=torch.cat([IDS, IDS]), lengths=torch.tensor([3, 3])
    )
    for _ in range(2):
        collection(batch).values().sum().backward()
    assert torch.equal(collection.embedding_bags["a"].table.lookup(IDS), ROWS)
    assert collection.embedding_bags["a"].table.stats().steps == 0
    assert collection.embedding_bags["b"].table.stats().updates == 6


@pytest.mark.parametrize(
    "kind", [RecStoreEmbeddingBagCollection, RecStoreEmbeddingCollection]
)
def test_beside_a_table_whose_weight_is_not_trained(kind: Any) -> None:
    config = (
        EmbeddingBagConfig
        if kind is RecStoreEmbeddingBagCollection
        else EmbeddingConfig
    )
    configs = [
        config(name=name, embedding_dim=4, num_embeddings=100, feature_names=[name])
        for name in ("a", "b")
    ]
    collection = kind(configs, options={"a": FROZEN})
    tables = (
        collection.embedding_bags
        if kind is RecStoreEmbeddingBagCollection
        else collection.embeddings
    )
    for name in ("a", "b"):
        tables[name].table.insert(IDS, ROWS)
    batch = KeyedJaggedTensor(
        ["a", "b"], values=torch.cat([IDS, IDS]), lengths=torch.tensor([1, 1, 1] * 2)
    )

    def rows() -> list[torch.Tensor]:
        out = collection(batch)
        return [
            out[name] if isinstance(out, KeyedTensor) else out[name].values()
            for name in ("a", "b")
        ]

    for trained in (True, False, True):
        tables["b"].weight.requires_grad_(trained)
        for training in (True, False):
            collection.train(training)
            of_tables = rows()
            assert all(torch.equal(of_table, ROWS) for of_table in of_tables)
            if training:
                assert of_tables[1].requires_grad == trained
    collection.train()
    collection.requires_grad_(False)
    assert all(torch.equal(of_table, ROWS) for of_table in rows())


def test_sparse_optimizers_leave_it_alone() -> None:
    module = RecStoreEmbedding(100, 4, fused=False, options=FROZEN)
    other = RecStoreEmbedding(100, 4, fused=False)
    module.table.insert(IDS, ROWS)
    optimizer = SparseAdamW([module, other], lr=0.1)
    (module(IDS).sum() + other(IDS).sum()).backward()
    optimizer.step()
    assert torch.equal(module(IDS), ROWS)
    assert other.table.stats().updates == 3


def test_pickling(tmp_path: Path) -> None:
    module = RecStoreEmbedding(100, 4, options=FROZEN)
    module.table.insert(IDS, ROWS)
    torch.save(module, tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    assert torch.equal(loaded(IDS), ROWS)
    assert not loaded.weight.requires_grad
    module.to("meta")
    module.to_empty(device="cpu")
    assert not module.weight.requires_grad
