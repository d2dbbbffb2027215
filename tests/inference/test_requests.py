"""Requests that make no sense are errors of a served file, and read nobody's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchrec_recstore.inference.row_formats import packed
from torchrec_recstore.inference.script import save_script, scripted
from torchrec_recstore.inference.served_tables import ServedTables, served_table


@pytest.fixture(scope="module", params=["float32", "int8"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> torch.jit.ScriptModule:
    rows = packed(torch.rand(3, 4), request.param)
    path: Path = tmp_path_factory.mktemp("served") / "tables.pt"
    tables = [served_table(name, 4, request.param, torch.tensor([-1, 2]), rows) for name in ("a", "b")]
    save_script(scripted(ServedTables(tables)), path)
    return torch.jit.load(path)


@pytest.mark.parametrize(
    ("values", "lengths", "message"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 1, 5, 1]), "lengths must not be negative and add up"),
        (torch.tensor([1, 2, 3]), torch.tensor([4, -3, 1, 1]), "lengths must not be negative and add up"),
        (torch.tensor([1, 2, 3]), torch.tensor([1, 1]), "lengths must not be negative and add up"),
        (torch.tensor([1, 2]), torch.tensor([1, 1, 2**62, 2**62]), "lengths must not be negative and add up"),
        (torch.tensor([1, 2]), torch.tensor([2, 0, 0]), "for each bag of each table"),
        (torch.tensor([1, 2]), torch.tensor([1.0, 1.0]), "lengths must be integers"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1, 1]), "values must be integers"),
        (torch.tensor([[1], [2]]), torch.tensor([1, 1]), "values must be integers of shape"),
    ],
)
def test_bad_requests(served: torch.jit.ScriptModule, values: Tensor, lengths: Tensor, message: str) -> None:
    with pytest.raises(Exception, match=message):
        served(values, lengths)


def test_good_requests(served: torch.jit.ScriptModule) -> None:
    assert served(torch.tensor([-1, 2], dtype=torch.int32), torch.tensor([1, 1], dtype=torch.int32)).shape == (1, 8)
    assert served(torch.empty(0, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)).shape == (3, 8)
    with pytest.raises(Exception, match="values must be integers"):
        served.lookup("a", torch.tensor([1.5]))
