"""A float id is refused, because float32 does not hold every integer and another id's
row would be the answer.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

from torchrec_recstore import (
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
)
from torchrec_recstore.inference import export_for_inference
from torchrec_recstore.modules import RecStoreEmbedding, RecStoreEmbeddingBag
from torchrec_recstore_serving.export.hashed_tables import HashedTable
from torchrec_recstore_serving.export.row_formats import packed
from torchrec_recstore_serving.export.sorted_tables import (
    ServedTable,
    ServedTables,
    served_table,
)

IDS = torch.tensor([20_000_000, 20_000_001])  # the same float32
NO_INTEGERS = [torch.float32, torch.float64, torch.float16, torch.bool, torch.complex64]
MESSAGE = "must be integers"
# of the lengths of a KeyedJaggedTensor
OF_TORCHREC = "must be of integer type|must match for tolist"


class Single(nn.Module):
    """The three modules of plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = RecStoreEmbedding(10, 4, name="rows", lr=0.1)
        self.padded = RecStoreEmbedding(10, 4, name="padded", lr=0.1, padding_idx=0)
        self.bags = RecStoreEmbeddingBag(10, 4, name="bags", lr=0.1, mode="sum")

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        out: Tensor = self.rows(ids) + self.padded(ids) + self.bags(ids, offsets)
        return out


class Collections(nn.Module):
    """The two collections."""

    def __init__(self) -> None:
        super().__init__()
        bag = EmbeddingBagConfig(
            name="bags", embedding_dim=4, num_embeddings=10, feature_names=["f"]
        )
        row = EmbeddingConfig(
            name="rows", embedding_dim=4, num_embeddings=10, feature_names=["f"]
        )
        self.bags = RecStoreEmbeddingBagCollection([bag])
        self.rows = RecStoreEmbeddingCollection([row])

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        features = KeyedJaggedTensor(keys=["f"], values=values, lengths=lengths)
        out: Tensor = self.bags(features).values() + self.rows(features)["f"].values()
        return out


def exports(model: nn.Module, folder: Path) -> list[Any]:
    """A model in eager Python, scripted with sorted ids, and scripted with the native
    op.
    """
    made: list[Any] = []
    for index in ("sorted", "hash"):
        eager = export_for_inference(
            model, folder / f"{index}.pt", dtype=torch.float32, index=index
        )
        made.append(torch.jit.load(folder / f"{index}.pt"))
    return [eager, *made]


@pytest.mark.parametrize("kind", [Single, Collections])
def test_served_models_refuse_what_is_no_integer(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    model = kind()
    second = torch.tensor([0, 1]) if kind is Single else torch.tensor([1, 1])
    model(IDS, second).sum().backward()
    wanted = model.eval()(IDS, second)
    assert not torch.equal(*wanted)
    for served in exports(model, tmp_path):
        assert torch.equal(served(IDS.to(torch.int32), second.to(torch.int32)), wanted)
        for dtype in NO_INTEGERS:
            with pytest.raises(Exception, match=MESSAGE):
                served(IDS.to(dtype), second)
            with pytest.raises(Exception, match=f"{MESSAGE}|{OF_TORCHREC}"):
                served(IDS, second.to(dtype))


@pytest.mark.parametrize("row_format", ["float32", "int8"])
def test_served_tables_refuse_what_is_no_integer(row_format: str) -> None:
    rows = packed("t", torch.rand(3, 4), row_format)
    native = HashedTable("t", 4, row_format, IDS, rows)
    by_number = ServedTable("t", 4, "float32", None, torch.rand(3, 4))
    lengths = torch.ones(2, dtype=torch.int64)
    for table in (served_table("t", 4, row_format, IDS, rows), native, by_number):
        script = torch.jit.script(ServedTables([table]))
        assert script(IDS, lengths).shape == script.lookup("t", IDS).shape == (2, 4)
        for dtype in NO_INTEGERS:
            values = IDS.to(dtype)
            for call in (
                partial(table.lookup, values),
                partial(table.has_rows, values),
                partial(table.pooled, values, lengths, None, False),
                partial(table.pooled, IDS, lengths.to(dtype), None, False),
                partial(script.lookup, "t", values),
                partial(script, values, lengths),
                partial(script, IDS, lengths.to(dtype)),
            ):
                with pytest.raises(Exception, match=MESSAGE):
                    call()
