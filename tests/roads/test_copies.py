"""Copies of eager modules go on, to the bit, as tables that never moved: each state
through each pair of copies.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrec_recstore.modules import RecStoreEmbeddingBagCollection

from .groups import GROUPS, LEG_STEPS, eager, train
from .journeys import compare, compare_now

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


NAMES = list(COPIES)
WAYS = [
    tuple(NAMES[(first + step) % len(NAMES)] for step in (0, 0, 1, 3, 2))
    for first in range(len(NAMES))
]
"""The copies that the options take one after the other."""


FAST = ("half", "own", "rowwise", "partial_adam", "lamb")
"""Groups of rows of 16 bits, of an optimizer of the user's, and of one with a state of
a row, of a state of a row and one of each weight, and of a norm.
"""


def test_the_ways_have_each_pair() -> None:
    pairs = {pair for way in WAYS for pair in pairwise(way)}
    assert pairs == set(product(COPIES, COPIES))


@pytest.mark.parametrize(
    "way",
    [WAYS[0], *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:])],
    ids="-".join,
)
def test_options(way: tuple[str, ...], tmp_path: Path) -> None:
    travel("options", way, tmp_path)


def groups() -> list[Any]:
    """The groups of one optimizer as parameters of a test; some are slow."""
    return [
        pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow])
        for name in GROUPS
        if name != "options"
    ]


@pytest.mark.parametrize("name", groups())
def test_optimizers(name: str, tmp_path: Path) -> None:
    travel(name, tuple(COPIES), tmp_path)


def travel(name: str, roads: tuple[str, ...], path: Path) -> None:
    group = GROUPS[name]
    module = eager(group, str(path))
    for place, road in enumerate(roads):
        train(module, group, range(place * LEG_STEPS, (place + 1) * LEG_STEPS))
        fresh = eager(group, str(path))
        train(fresh, group, range(900, 903))
        module = COPIES[road](module, fresh)
        compare_now(module, group, (place + 1) * LEG_STEPS)
    compare(module, group, len(roads) * LEG_STEPS)
