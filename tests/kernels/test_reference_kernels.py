"""The reference kernels check every argument, and change nothing after an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.kernels.device_interface import NUMBERS, ArenaLayout
from torchrec_recstore.kernels.reference_kernels import ReferenceKernels
from torchrec_recstore.optim import RowWiseAdagrad

LAYOUT = ArenaLayout(
    columns=4,
    row_type=0,
    optimizer=RowWiseAdagrad.kind,
    element_states=0,
    has_row_state=True,
)


def pool_arguments() -> dict[str, Any]:
    return {
        "layout": LAYOUT,
        "arena": torch.ones(2, 8),
        "base": 5,
        "staging": None,
        "slots": torch.tensor([6, 5, -1], dtype=torch.int32),
        "offsets": torch.tensor([0, 1, 3]),
        "weights": None,
        "segments": torch.tensor([[0, 2, 0, 4, 0]]),
        "most_bags": 2,
        "mean": False,
        "out": torch.zeros(8),
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("arena", torch.ones(2, 7), "of arena must have the size 8"),
        ("arena", torch.ones(2, 8).double(), "arena must be of dtype float32"),
        ("staging", torch.ones(1, 7), "of staging must have the size 8"),
        ("slots", torch.tensor([7, 5, 5], dtype=torch.int32), "slots must be those"),
        ("slots", torch.tensor([4, 5, 5], dtype=torch.int32), "slots must be those"),
        ("slots", torch.tensor([-2, 5, 5], dtype=torch.int32), "slots must be those"),
        ("offsets", torch.tensor([0, 2, 1]), "offsets must ascend"),
        ("offsets", torch.tensor([0, 1, 4]), "offsets must ascend"),
        ("weights", torch.ones(2), "of weights must have the size 3"),
        ("segments", torch.tensor([[0, 3, 0, 4, 0]]), "bags of the batch"),
        ("segments", torch.tensor([[0, 2, 1, 4, 0]]), "elements of the output"),
        ("segments", torch.tensor([[0, 2, -1, 4, 0]]), "elements of the output"),
        ("segments", torch.tensor([[0, 2, 0, 4, -1]]), "tables of the group"),
        ("segments", torch.tensor([[0, 2, 0, 4]]), "must have the size 5"),
    ],
)
def test_wrong_arguments_of_pool(name: str, value: Tensor, message: str) -> None:
    arguments = pool_arguments()
    arguments[name] = value
    with pytest.raises(ValueError, match=message):
        ReferenceKernels().pool(**arguments)
    assert not arguments["out"].any()


def test_settings_are_known_by_name() -> None:
    unknown = [*NUMBERS[1:], "speed"]
    numbers = torch.zeros(1, len(unknown))
    with (
        pytest.raises(ValueError, match="the field learning_rate is missing"),
        ops.native_errors("rows"),
    ):
        ops.device_weight_gradients(
            ["columns", "row_type", "optimizer", "element_states", "has_row_state"],
            [4, 0, 2, 0, 1],
            torch.ones(2, 8),
            0,
            None,
            torch.zeros(1, dtype=torch.int32),
            None,
            torch.tensor([[0, 1, 0, 4, 0]]),
            False,
            torch.ones(4),
            unknown,
            numbers,
            torch.zeros(1),
        )
