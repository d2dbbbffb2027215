"""An export of a model that was never trained warns."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from torchrec_recstore import save_checkpoint
from torchrec_recstore.inference import export_checkpoint, export_for_inference
from torchrec_recstore.modules import RecStoreEmbedding
from torchrec_recstore.utils import RecStoreWarning

from ...checkpoint.models import batch, recstore

MESSAGE = (
    "the exported model was never trained: no update has changed a row of table(s) {}."
    " Train the model or load a checkpoint before the export"
)


class Model(nn.Module):
    """Two tables and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.user = RecStoreEmbedding(10, 4, name="user", lr=0.1)
        self.item = RecStoreEmbedding(10, 4, name="item", lr=0.1)
        self.over = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.over(self.user(ids) + self.item(ids))
        return out


IDS = torch.tensor([1, 2])


def warned(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [
        str(warning.message)
        for warning in caught
        if warning.category is RecStoreWarning
    ]


def test_a_model_without_rows() -> None:
    model = Model()
    assert warned(lambda: export_for_inference(model)) == [
        MESSAGE.format("'item', 'user'")
    ]


def test_a_model_without_updates() -> None:
    model = Model()
    model(IDS)
    assert warned(lambda: export_for_inference(model)) == [
        MESSAGE.format("'item', 'user'")
    ]
    model(IDS).sum().backward()
    assert warned(lambda: export_for_inference(model)) == []


def test_rows_that_were_inserted() -> None:
    model = Model()
    model.user.table.insert(IDS, torch.ones(2, 4))
    assert warned(lambda: export_for_inference(model)) == []


@pytest.mark.usefixtures("one_rank")
def test_checkpoints(tmp_path: Path) -> None:
    model = recstore()
    save_checkpoint(model, tmp_path / "untrained")
    model(batch(0)).sum().backward()
    save_checkpoint(model, tmp_path / "trained")

    def export(name: str) -> list[str]:
        path = tmp_path / f"{name}.pt"
        return warned(lambda: export_checkpoint(tmp_path / name, path))

    assert export("untrained") == [MESSAGE.format("'item', 'user'")]
    assert export("trained") == []
