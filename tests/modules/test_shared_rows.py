"""Modules with rows in a shared cold store: copies have the same rows and write no rows
back.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from tests.store import shared_store
from torchrec_recstore.modules import RecStoreEmbedding, SparseSGD
from torchrec_recstore.optim import RowWiseAdagrad
from torchrec_recstore.options import TableOptions


def _module(name: str, **arguments: object) -> RecStoreEmbedding:
    options = TableOptions(
        max_rows=100, cold_store=shared_store.SharedDictOptions(name)
    )
    return RecStoreEmbedding(
        10, 4, name="t", options=options, optimizer=RowWiseAdagrad(lr=0.1), **arguments
    )


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_a_copy_has_the_rows_of_the_store(copied) -> None:
    module, ids = _module(f"copied {copied}"), torch.arange(300)
    for part in ids.split(50):
        module(part).sum().backward()
    rows = module.eval()(ids)
    other = copied(module)
    assert torch.equal(other(ids), rows)
    assert other.table.steps == module.table.steps == 6
    module.train()(ids[:50]).sum().backward()
    module.table.flush()
    shared_store.WRITTEN.clear()
    old = copied(module)
    assert shared_store.WRITTEN == []
    assert torch.equal(old.eval()(ids), module.eval()(ids))


def test_an_old_pickle_rolls_nothing_back() -> None:
    module, ids = _module("old pickle"), torch.arange(50)
    module(ids).sum().backward()
    pickled = pickle.dumps(module)
    module(ids).sum().backward()
    module.table.flush()
    rows = module.eval()(ids)
    assert torch.equal(pickle.loads(pickled).eval()(ids), rows)


def test_another_optimizer_is_refused_with_nothing_changed() -> None:
    module = _module("another optimizer", fused=False)
    module(torch.arange(5)).sum().backward()
    with pytest.raises(ValueError, match="its rows are shared"):
        SparseSGD([module], lr=0.1).step()
    assert module.table.optimizer == RowWiseAdagrad(lr=0.1)
