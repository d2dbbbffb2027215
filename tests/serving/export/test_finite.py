"""An export and a publisher warn about NaN and infinity, and name the table or the
parameter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig

from torchrec_recstore import RecStoreEmbeddingBagCollection, save_checkpoint
from torchrec_recstore.inference import (
    DeltaPublisher,
    export_checkpoint,
    export_for_inference,
)
from torchrec_recstore.modules import RecStoreEmbedding
from torchrec_recstore.sharders.collection import RecStoreCollection
from torchrec_recstore.utils import RecStoreWarning

from ...checkpoint.models import DIM, batch, recstore


class Model(nn.Module):
    """A table of each kind, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name="bags", embedding_dim=4, num_embeddings=9, feature_names=["f"]
        )
        self.bags = RecStoreEmbeddingBagCollection([config])
        self.rows = RecStoreEmbedding(10, 4, name="rows", lr=0.1)
        self.over = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.over(self.rows(ids))
        return out


def warned(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    ours = [each for each in caught if each.category is RecStoreWarning]
    assert {each.filename for each in ours} <= {__file__}
    return [str(each.message) for each in ours]


def insert(model: Model, table: str, value: float) -> None:
    tables = {"rows": model.rows.table, "bags": model.bags.embedding_bags["bags"].table}
    tables[table].insert(
        torch.tensor([1, 2]), torch.tensor([[1.0], [value]]).expand(2, 4).contiguous()
    )


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("rows", float("nan")),
        ("bags", float("inf")),
        ("over.weight", -float("inf")),
        ("over.bias", float("nan")),
    ],
)
def test_exports_and_publications(part: str, value: float, tmp_path: Path) -> None:
    name = f"table {part!r}" if part in ("rows", "bags") else part
    message = (
        f"the exported model has NaN or infinity in {name}, and so have its predictions"
    )
    model = Model()
    for table in ("rows", "bags"):
        insert(model, table, 1.0)

    def spoil() -> None:
        if part in ("rows", "bags"):
            insert(model, part, value)
        else:
            with torch.no_grad():
                model.get_parameter(part).view(-1)[0] = value

    assert warned(lambda: export_for_inference(model, dtype=torch.float32)) == []
    with DeltaPublisher(
        model, tmp_path / "published", every_s=0, dtype=torch.float32
    ) as publisher:

        def publish() -> None:
            publisher.step()
            publisher._writer.wait()  # type: ignore[union-attr]

        assert warned(publish) == []
        assert warned(publish) == []
        spoil()
        found = warned(publish)
        assert len(found) == 1, "the delta"
        assert found[0].startswith(message)
        assert len(warned(publisher.close)) <= 1
    found = warned(lambda: export_for_inference(model, dtype=torch.float32))
    assert len(found) == 1
    assert found[0].startswith(message)


@pytest.mark.usefixtures("one_rank")
def test_exports_of_checkpoints(tmp_path: Path) -> None:
    model = recstore()
    model(batch(0)).sum().backward()
    save_checkpoint(model, tmp_path / "good")
    spoiled = next(
        table
        for module in model.modules()
        if isinstance(module, RecStoreCollection)
        for table in module.recstore_tables()
        if table.name == "item"
    )
    spoiled.insert(torch.tensor([1]), torch.full((1, DIM), float("nan")))
    save_checkpoint(model, tmp_path / "bad")
    for name in ("good", "bad"):
        path = tmp_path / f"{name}.pt"
        found = warned(
            lambda name=name, path=path: export_checkpoint(
                tmp_path / name, path, dtype=torch.float32
            )
        )  # type: ignore[misc]
        assert [each.partition(",")[0] for each in found] == (
            []
            if name == "good"
            else ["the exported model has NaN or infinity in table 'item'"]
        )


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float64,
    ],
)
def test_dense_tensors_of_any_type(dtype: torch.dtype) -> None:
    model = Model()
    insert(model, "rows", 1.0)
    model.register_buffer("odd", torch.ones(3).to(dtype))
    assert warned(lambda: export_for_inference(model, dtype=torch.float32)) == []
    model.register_buffer("odd", torch.tensor([0.0, float("nan"), 1.0]).to(dtype))
    assert (
        warned(lambda: export_for_inference(model, dtype=torch.float32))[0]
        .partition(",")[0]
        .endswith("in odd")
    )
