"""A served file raises errors for invalid requests, and does not read memory out of
bounds.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingBagConfig

from torchrec_recstore.inference import export_for_inference
from torchrec_recstore.modules import RecStoreEmbedding, RecStoreEmbeddingBagCollection
from torchrec_recstore_serving.export.row_formats import packed
from torchrec_recstore_serving.export.sorted_tables import ServedTables, served_table
from torchrec_recstore_serving.export.torchscript import save_script, scripted


@pytest.fixture(scope="module", params=["float32", "int8"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> torch.jit.ScriptModule:
    rows = packed("a", torch.rand(3, 4), request.param)
    path: Path = tmp_path_factory.mktemp("served") / "tables.pt"
    tables = [
        served_table(name, 4, request.param, torch.tensor([-1, 2]), rows)
        for name in ("a", "b")
    ]
    save_script(scripted(ServedTables(tables)), path)
    return torch.jit.load(path)


@pytest.mark.parametrize(
    ("values", "lengths", "message"),
    [
        (
            torch.tensor([1, 2]),
            torch.tensor([1, 1, 5, 1]),
            "lengths must not be negative and add up",
        ),
        (
            torch.tensor([1, 2, 3]),
            torch.tensor([4, -3, 1, 1]),
            "lengths must not be negative and add up",
        ),
        (
            torch.tensor([1, 2, 3]),
            torch.tensor([1, 1]),
            "lengths must not be negative and add up",
        ),
        (
            torch.tensor([1, 2]),
            torch.tensor([1, 1, 2**62, 2**62]),
            "lengths must not be negative and add up",
        ),
        (torch.tensor([1, 2]), torch.tensor([2, 0, 0]), "for each bag of each table"),
        (torch.tensor([1, 2]), torch.tensor([1.0, 1.0]), "lengths must be integers"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1, 1]), "values must be integers"),
        (
            torch.tensor([[1], [2]]),
            torch.tensor([1, 1]),
            "values must be integers of shape",
        ),
    ],
)
def test_bad_requests(
    served: torch.jit.ScriptModule, values: Tensor, lengths: Tensor, message: str
) -> None:
    with pytest.raises(Exception, match=message):
        served(values, lengths)


def test_good_requests(served: torch.jit.ScriptModule) -> None:
    assert served(
        torch.tensor([-1, 2], dtype=torch.int32),
        torch.tensor([1, 1], dtype=torch.int32),
    ).shape == (1, 8)
    assert served(
        torch.empty(0, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
    ).shape == (3, 8)
    with pytest.raises(Exception, match="values must be integers"):
        served.lookup("a", torch.tensor([1.5]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.quint4x2], ids=str)
@pytest.mark.parametrize("weight", [1e5, float("nan"), -float("inf")])
def test_weights_that_a_format_cannot_hold(
    dtype: torch.dtype, weight: float, tmp_path: Path
) -> None:
    single = RecStoreEmbedding(5, 4, name="t")
    single.table.insert(torch.tensor([1]), torch.full((1, 4), weight))
    config = EmbeddingBagConfig(
        name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"]
    )
    bags = RecStoreEmbeddingBagCollection([config])
    bags.embedding_bags["t"].table.insert(torch.tensor([1]), torch.full((1, 4), weight))
    for model in (single, bags):
        with pytest.raises(
            ValueError,
            match=r"table 't' has weights from .*rows hold finite weights up to 65504",
        ):
            export_for_inference(model, tmp_path / "m.pt", dtype=dtype)
    assert not (tmp_path / "m.pt").exists()
    export_for_inference(single, tmp_path / "m.pt", dtype=torch.float32)
