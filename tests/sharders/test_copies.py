"""What users do with a sharded model as with any other: to copy it, to pickle it, and
to freeze its parameters.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore.optim import SGD

from .models import bag, batch, collection, sequence, sequences, sharded


def model_of(sequential: bool) -> DistributedModelParallel:
    tables = (
        sequences(sequence("t", ["f"])) if sequential else collection(bag("t", ["f"]))
    )
    return sharded(tables, optimizer=SGD(lr=0.5))


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize(
    "way",
    [copy.copy, copy.deepcopy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())],
)
def test_copies_and_pickles_name_the_checkpoint(
    one_rank: None, sequential: bool, way: Callable[[Any], Any]
) -> None:
    model = model_of(sequential)
    around = [model.module, nn.Sequential(model.module)]
    for whole in around if way is not copy.copy else around[:1]:
        with pytest.raises(
            TypeError,
            match=(
                r"RecStore table 't': a sharded .* save_checkpoint, .* load_checkpoint"
            ),
        ):
            way(whole)
    if way is not copy.copy:
        with pytest.raises(TypeError, match="save_checkpoint"):
            way(model)


@pytest.mark.parametrize("sequential", [False, True])
def test_a_parameter_cannot_be_frozen(one_rank: None, sequential: bool) -> None:
    model = model_of(sequential)
    (parameter,) = model.parameters()

    def assigned() -> None:
        parameter.requires_grad = False

    for freeze in (
        assigned,
        lambda: parameter.requires_grad_(False),
        lambda: model.requires_grad_(False),
    ):
        with pytest.raises(
            RuntimeError,
            match=r"RecStore table 't' is trained, and a sharded table cannot become",
        ):
            freeze()
    assert parameter.requires_grad
    assert parameter.requires_grad_() is parameter
    parameter.requires_grad = True

    def read() -> torch.Tensor:
        out = model(batch(f=[[1]]))
        return out["f"].values() if sequential else out.values()

    read().sum().backward()
    before = read().detach().clone()
    model.eval()
    assert torch.equal(read(), before)


@pytest.mark.parametrize(
    "location",
    ["cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, location: storage],
)
@pytest.mark.parametrize("weights_only", [False, True])
def test_a_state_is_loaded_with_a_map_location(
    one_rank: None, location: Any, weights_only: bool
) -> None:
    model, file = model_of(sequential=False), io.BytesIO()
    model(batch(f=[[1, 2]])).values().sum().backward()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = model_of(sequential=False)
    other.load_state_dict(
        torch.load(file, map_location=location, weights_only=weights_only)
    )
    ours, theirs = (
        next(iter(each.module.recstore_tables())) for each in (model, other)
    )
    ids = torch.tensor([1, 2])
    assert torch.equal(ours.lookup(ids), theirs.lookup(ids))
