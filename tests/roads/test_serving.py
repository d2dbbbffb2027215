"""The road to serving: every state of a table is served as the model reads it, by
exports and by deltas of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from torchrec_recstore.inference import (
    export_delta,
    export_for_inference,
    load_library,
    read_delta,
)
from torchrec_recstore.modules import RecStoreEmbeddingBagCollection

from .groups import GROUPS, LEG_STEPS, Group, batch_of, eager, train


class Pooled(nn.Module):
    """A model whose forward is that of its collection, as TorchScript needs it."""

    def __init__(self, collection: nn.Module, group: Group) -> None:
        super().__init__()
        self.collection = collection
        self.keys = [f"f_{name}" for name in group.tables]

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Returns the pooled rows of all tables, (B, sum of dims)."""
        pooled: Tensor = self.collection(features).values()
        return pooled


def features_of(group: Group, step: int) -> KeyedJaggedTensor:
    parts = [batch_of(name, state, step) for name, state in group.tables.items()]
    return KeyedJaggedTensor(
        keys=[f"f_{name}" for name in group.tables],
        values=torch.cat([ids for ids, _ in parts]),
        lengths=torch.cat([lengths for _, lengths in parts]),
    )


@pytest.mark.filterwarnings("ignore:.*have missing='init'")
@pytest.mark.parametrize(
    ("name", "index"),
    [
        pytest.param("options", "sorted", marks=pytest.mark.slow),
        pytest.param("options", "hash", marks=pytest.mark.slow),
        ("half", "sorted"),
        ("half_rows", "hash"),
    ],
)
def test_exports_and_deltas(name: str, index: str, tmp_path: Path) -> None:
    load_library()
    group = GROUPS[name]
    collection = eager(group, str(tmp_path / "cold"))
    model = Pooled(collection, group)
    export_for_inference(model, tmp_path / "base.pt", dtype=torch.float32, index=index)
    served = torch.jit.load(tmp_path / "base.pt")
    for leg in range(3 if name == "options" else 2):
        model.train()
        train(collection, group, range(leg * 2 * LEG_STEPS, (leg + 1) * 2 * LEG_STEPS))
        model.eval()
        export_delta(model, tmp_path / "delta.safetensors", base=served)
        assert served.apply_delta(read_delta(tmp_path / "delta.safetensors"))
        assert_has_rows_of(served, collection)
    export_for_inference(model, tmp_path / "full.pt", dtype=torch.float32, index=index)
    full = torch.jit.load(tmp_path / "full.pt")
    assert served.recstore_version() == full.recstore_version()
    assert_has_rows_of(full, collection)
    some = features_of(group, 7)
    assert torch.equal(served(some), full(some))
    torch.testing.assert_close(full(some), model(some), rtol=0, atol=1e-6)


def assert_has_rows_of(
    served: torch.jit.ScriptModule, collection: RecStoreEmbeddingBagCollection
) -> None:
    for name, module in collection.embedding_bags.items():
        ids = module.table.ids()
        rows = module.table.lookup(ids).float()
        order = served.recstore_ids(name).argsort()
        assert torch.equal(served.recstore_ids(name)[order], ids), name
        assert torch.equal(served.recstore_rows(name)[1:][order], rows), name
