"""What a shard gets of its table's bound, and what is refused. Bounds over several ranks: tests/distributed."""

from __future__ import annotations

import pytest

from torchrec_recstore.options import LFU, LRU, ConstantInit, TableOptions, UniformInit, default_initializer
from torchrec_recstore.sharders.shard_tables import shard_options

from .models import bag, collection, sequence, sequences, sharded, tables


@pytest.mark.parametrize(("max_rows", "parts"), [(8, [2, 2, 2, 2]), (10, [3, 3, 2, 2]), (4, [1, 1, 1, 1])])
def test_row_shards_share_the_bound_out(max_rows: int, parts: list[int]) -> None:
    options = TableOptions(max_rows=max_rows, eviction=LFU(half_life_steps=3), initializer=ConstantInit(1.0))
    shards = [shard_options(options, (4, rank), "t") for rank in range(4)]
    assert [shard.max_rows for shard in shards] == parts
    assert {(shard.eviction, shard.initializer) for shard in shards} == {(options.eviction, options.initializer)}


def test_without_a_row_split_or_a_bound_the_options_are_the_tables() -> None:
    bounded, plain = TableOptions(max_rows=8, eviction=LRU()), TableOptions()
    assert shard_options(bounded, None, "t") is bounded
    assert shard_options(plain, (4, 1), "t") is plain


def test_fewer_rows_than_shards_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'t': max_rows=3 is less than the 4 shards"):
        shard_options(TableOptions(max_rows=3), (4, 0), "t")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("config", [bag, sequence])
def test_a_bound_does_not_change_the_initializer_and_the_table_keeps_its_options(config: type) -> None:
    options = TableOptions(max_rows=3, eviction=LRU())
    make = sequences if config is sequence else collection
    model = sharded(make(config(rows=500)), options={"t": options}, sharding_type="row_wise")
    whole = model.module.recstore_state.tables["t"].options
    initializer = default_initializer(TableOptions(), 500)
    assert isinstance(initializer, UniformInit)
    assert whole == tables(model)["t"].options == TableOptions(max_rows=3, eviction=LRU(), initializer=initializer)
