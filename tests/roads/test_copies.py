"""Copies of eager modules go on, to the bit, as tables that never moved: each state
through each pair of copies.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path

import pytest
import torch

from torchrec_recstore.modules import RecStoreEmbeddingBagCollection

from .groups import GROUPS, LEG_STEPS, eager, train
from .journeys import compare

Module = RecStoreEmbeddingBagCollection


def _saved(module: Module, fresh: Module) -> Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def _loaded(module: Module, fresh: Module) -> Module:
    fresh.load_state_dict(module.state_dict())
    return fresh


COPIES: dict[str, Callable[[Module, Module], Module]] = {
    "deepcopy": lambda module, fresh: copy.deepcopy(module),
    "pickle": lambda module, fresh: pickle.loads(pickle.dumps(module)),
    "torch.save": _saved,
    "state_dict": _loaded,
}


def _pairs() -> list[object]:
    """Returns each pair of copies. Those of two neighbours in the list are not slow, so
    that ``make test`` has each copy as the first and as the second one.
    """
    names = list(COPIES)
    quick = set(zip(names, names[1:] + names[:1], strict=True))
    return [
        pytest.param(pair, marks=[] if pair in quick else pytest.mark.slow)
        for pair in product(names, names)
    ]


@pytest.mark.parametrize("pair", _pairs(), ids="-".join)
def test_options(pair: tuple[str, str], tmp_path: Path) -> None:
    travel("options", pair, tmp_path)


OPTIMIZERS = [name for name in GROUPS if name != "options"]


@pytest.mark.parametrize(("name", "road"), zip(OPTIMIZERS, cycle(COPIES), strict=False))
def test_optimizers(name: str, road: str, tmp_path: Path) -> None:
    travel(name, (road,), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("road", COPIES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_with_each_copy(name: str, road: str, tmp_path: Path) -> None:
    travel(name, (road,), tmp_path)


def travel(name: str, roads: tuple[str, ...], path: Path) -> None:
    group = GROUPS[name]
    module = eager(group, str(path))
    for place, road in enumerate(roads):
        train(module, group, range(place * LEG_STEPS, (place + 1) * LEG_STEPS))
        fresh = eager(group, str(path))
        train(fresh, group, range(900, 903))
        module = COPIES[road](module, fresh)
    compare(module, group, len(roads) * LEG_STEPS)
