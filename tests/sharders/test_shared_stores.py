"""Sharded models whose tables have a shared cold store: flushing, saving the whole
store, and the errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoint import models
from tests.store.dict_store import DictStore, DictStoreOptions
from tests.store.shared_store import ROWS, SharedDictOptions
from torchrec_recstore import (
    ColdStoreError,
    RecStoreEmbeddingBagCollection,
    RowWiseAdagrad,
    Table,
    TableOptions,
    flush_tables,
    load_checkpoint,
    save_checkpoint,
    table_stats,
)
from torchrec_recstore.checkpoint.compare import compare_chains
from torchrec_recstore.checkpoint.info import read_chain

SHARED = TableOptions(max_rows=24, cold_store=SharedDictOptions())


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    ROWS.clear()
    yield
    DictStore.failing = False


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "column_wise"])
def test_a_checkpoint_has_the_rows_of_the_store_and_those_in_memory(
    tmp_path: Path, sharding_type: str
) -> None:
    model, unbounded = (
        models.recstore(sharding_type, options=options)
        for options in (SHARED, TableOptions())
    )
    for each in (model, unbounded):
        models.train(each, steps=12, distinct=120)
    assert table_stats(model)["user"].evicted > 0
    models.assert_holds(model, models.shards(unbounded))
    for name, each in (("shared", model), ("unbounded", unbounded)):
        save_checkpoint(each, tmp_path / name)
    difference = compare_chains(
        read_chain(tmp_path / "shared"), read_chain(tmp_path / "unbounded")
    )
    assert all(
        set(table.facts) == {"options"} and table.changed == 0
        for table in difference.tables.values()
    )
    other = models.recstore(sharding_type)
    load_checkpoint(other, tmp_path / "shared")
    models.assert_holds(other, models.shards(unbounded))


@pytest.mark.usefixtures("one_rank")
def test_what_a_checkpoint_cannot_do_with_a_shared_store_is_said_at_once(
    tmp_path: Path,
) -> None:
    model = models.recstore(options=SHARED)
    models.train(model, steps=3, distinct=120)
    save_checkpoint(model, tmp_path / "whole")
    held = models.shards(model)
    with pytest.raises(
        ValueError,
        match=r"table 'user'.*SharedDictOptions.* is shared.*save the whole table",
    ):
        save_checkpoint(model, tmp_path / "delta", delta_of=tmp_path / "whole")
    assert not (tmp_path / "delta").exists()
    weight = model.module.over.weight.clone()
    with torch.no_grad():
        model.module.over.weight.zero_()
    with pytest.raises(
        ValueError, match=r"table 'user'.*SharedDictOptions.*shared.*strict=False"
    ):
        load_checkpoint(model, tmp_path / "whole")
    with pytest.raises(
        ValueError, match=r"table 'user'.*is shared: others' rows would be replaced"
    ):
        model.load_state_dict(model.state_dict())
    assert not model.module.over.weight.any()
    models.assert_holds(model, held)
    flush_tables(model)
    again = models.recstore(options=SHARED)
    # The rows are in the store already and are not loaded.
    load_checkpoint(again, tmp_path / "whole", strict=False)
    assert torch.equal(again.module.over.weight, weight)
    models.assert_holds(again, held)


@pytest.mark.usefixtures("one_rank")
def test_modules_without_a_process_group_serve_the_rows() -> None:
    model = models.recstore(options=SHARED)
    models.train(model, steps=12, distinct=120)
    flush_tables(model)
    configs = models.Model().sparse.embedding_bag_configs()
    serving = RecStoreEmbeddingBagCollection(
        configs, optimizer=RowWiseAdagrad(lr=0.1), options=SHARED
    ).eval()
    model.eval()
    for seed in range(12):
        batch = models.batch(seed, distinct=120)
        pooled, expected = serving(batch), model.module.sparse(batch)
        assert torch.equal(pooled.values(), expected.wait().values())


@pytest.mark.usefixtures("one_rank")
def test_a_model_is_flushed() -> None:
    model = models.recstore(options=SHARED)
    models.train(model, steps=12, distinct=120)
    DictStore.failing = True
    with pytest.raises(ColdStoreError):
        flush_tables(model)
    DictStore.failing = False
    flush_tables(model)
    for name, _, ids, rows in models.shards(model):
        reader = Table(models.DIM, options=SHARED, name=name)
        assert torch.equal(reader.ids(), ids)
        assert torch.equal(reader.lookup(ids), rows["weight"])
    for cold_store in (None, DictStoreOptions()):
        options = TableOptions(max_rows=24, cold_store=cold_store)
        with pytest.raises(
            ValueError, match="no RecStore table with a shared cold store"
        ):
            flush_tables(models.recstore(options=options))
