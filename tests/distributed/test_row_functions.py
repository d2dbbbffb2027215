"""Scores and the ids that leave, of models on several ranks: every sharding,
checkpoints, resharding and resets.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed import DistributedModelParallel

from tests.checkpoint import models
from torchrec_recstore import (
    LFU,
    LRU,
    Expiry,
    Scored,
    SSDStore,
    TableOptions,
    compact_checkpoint,
    left_ids,
    load_checkpoint,
    reset_rows,
    reshard,
    save_checkpoint,
    set_scores,
    table_stats,
)
from torchrec_recstore.sharders.model_tables import recstore_tables
from torchrec_recstore.table_fields import encoded_score

from .test_reshard import build
from .workers import run_on_ranks

KINDS = ("row_wise", "column_wise", "hash", "grid_shard", "table_wise")
FEATURES = {"user": ["u"], "item": ["i", "j"]}
MANY = 10_000


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def ids_now(model: DistributedModelParallel, name: str) -> set[int]:
    """Returns the ids of a table on all ranks."""
    (table,) = [table for table in recstore_tables(model) if table.name == name]
    mine = {id_ for shard in table.shards for id_ in shard.table.ids().tolist()}
    return set().union(*gathered(mine))


def frequencies(model: DistributedModelParallel, name: str) -> dict[int, int]:
    """Returns the frequency of each id of a table on all ranks, which is the same in
    all column shards.
    """
    (table,) = [table for table in recstore_tables(model) if table.name == name]
    frequency_of: dict[int, int] = {}
    mine = [
        item
        for shard in table.shards
        for rows in [shard.table.read_rows(shard.table.ids())]
        for item in zip(
            shard.table.ids().tolist(), rows["frequency"].tolist(), strict=True
        )
    ]
    for of_rank in gathered(mine):
        for id_, frequency in of_rank:
            assert frequency_of.setdefault(id_, frequency) == frequency
    return frequency_of


def trained_ids(name: str, steps: range, distinct: int = 60) -> list[int]:
    """Returns the ids, with all occurrences, that a table gets in some steps on all
    ranks.
    """
    ids: list[int] = []
    for rank in range(dist.get_world_size()):
        for step in steps:
            batch = models.batch(100 * rank + step, distinct=distinct)
            for feature in FEATURES[name]:
                ids += batch[feature].values().tolist()
    return ids


def train(model: DistributedModelParallel, steps: range, distinct: int = 60) -> None:
    for step in steps:
        model(
            models.batch(100 * dist.get_rank() + step, distinct=distinct)
        ).sum().backward()


def assert_left(model: DistributedModelParallel, with_row: set[int]) -> None:
    left = left_ids(model, "item")
    assert left.complete
    assert left.ids.tolist() == sorted(with_row - ids_now(model, "item"))
    assert len(left.ids) > 0, "the test is of ids that leave"
    assert all(torch.equal(left.ids, other) for other in gathered(left.ids))
    assert left_ids(model, "item").ids.tolist() == []


def ids_leave(rank: int, world_size: int, *, path: str, kinds: tuple[str, ...]) -> None:
    distinct = 60 * world_size
    # Each shard has room for a step.
    options = TableOptions(
        max_rows=40 * world_size, eviction=LRU(), expiry=Expiry(steps=4), left_ids=MANY
    )
    at = 0

    def trained(model: DistributedModelParallel) -> set[int]:
        """Trains some steps. Returns the ids that had a row before or in them."""
        nonlocal at
        with_row = ids_now(model, "item")
        steps = range(at, at + 6)
        at += 6
        train(model, steps, distinct)
        return with_row | set(trained_ids("item", steps, distinct))

    for number, kind in enumerate(kinds):
        model = build(kind, options=options)
        for _ in range(2):
            assert_left(model, trained(model))
        # A load replaces the rows.
        save_checkpoint(model, f"{path}/{kind}")
        with_row = trained(model)
        load_checkpoint(model, f"{path}/{kind}")
        assert_left(model, with_row)
        # Nothing is lost on the way to other shards, which may have no room for some of
        # the rows.
        with_row = trained(model)
        reshard(model, build(kinds[(number + 1) % len(kinds)], options=options).plan)
        assert_left(model, with_row)
        with_row = ids_now(model, "item")
        reset_rows(model)
        assert_left(model, with_row)
        assert left_ids(model, "user").complete


def a_full_record(rank: int, world_size: int) -> None:
    options = TableOptions(max_rows=100, eviction=LRU(), left_ids=5)
    model = build("row_wise", options=options)
    train(model, range(20), distinct=400)
    left = left_ids(model, "item")
    assert (left.ids.tolist(), left.complete) == ([], False)
    train(model, range(20, 40), distinct=400)
    reshard(model, build("column_wise", options=options).plan)
    assert not left_ids(model, "item").complete
    assert left_ids(model, "item").complete
    for name, options, error in (
        ("user", None, "does not record which ids leave"),
        ("nope", None, "no RecStore table"),
    ):
        plain = build("row_wise", options=options)
        with pytest.raises(ValueError, match=error):
            left_ids(plain, name)


def scores_of_rank(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Returns ids, some of which have no row and some of which other ranks score too,
    and their scores.
    """
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.tensor(sorted(set(trained_ids("item", range(3)))))
    chosen = ids[torch.randint(0, len(ids), (20,), generator=generator)]
    chosen = torch.cat([chosen, torch.tensor([7, 8])])
    return chosen, torch.randn(22, generator=generator)


def scores_move(
    rank: int, world_size: int, *, path: str, kinds: tuple[str, ...]
) -> None:
    options = TableOptions(max_rows=MANY, eviction=Scored(), cold_store=None)
    models_of_kinds = {kind: build(kind, options=options) for kind in kinds}
    for number, (kind, model) in enumerate(models_of_kinds.items()):
        train(model, range(3))
        expected = dict.fromkeys(trained_ids("item", range(3)), 0)
        for step in range(2):
            ids, scores = scores_of_rank(step, rank)
            scored = set_scores(
                model,
                "item",
                ids if rank or step else ids[:0],
                scores if rank or step else scores[:0],
            )
            new = {}
            for other in range(world_size):
                if other or step:
                    ids, scores = scores_of_rank(step, other)
                    new |= {
                        i: encoded_score(s)
                        for i, s in zip(ids.tolist(), scores.tolist(), strict=True)
                    }
            new = {id_: code for id_, code in new.items() if id_ in expected}
            assert scored == len(new)
            expected |= new
            assert frequencies(model, "item") == expected
            if step == 0:
                save_checkpoint(model, f"{path}/{kind}-base")
        # A delta has the new scores, and so has its compaction; each loads into other
        # shards.
        save_checkpoint(model, f"{path}/{kind}", delta_of=f"{path}/{kind}-base")
        if rank == 0:
            compact_checkpoint(f"{path}/{kind}", f"{path}/{kind}-compact")
        dist.barrier()
        other = build(kinds[(number + 1) % len(kinds)], options=options)
        for saved in (f"{path}/{kind}", f"{path}/{kind}-compact"):
            load_checkpoint(other, saved)
            assert frequencies(other, "item") == expected
        reshard(model, other.plan)
        assert frequencies(model, "item") == expected
        # In a table that counts, a row has no score, and the other way round.
        counting = build(kind, options=TableOptions(max_rows=MANY, eviction=LFU()))
        load_checkpoint(counting, f"{path}/{kind}")
        assert set(frequencies(counting, "item").values()) == {0}
        train(counting, range(3))
        assert max(frequencies(counting, "item").values()) > 1
        reshard(counting, other.plan)
        assert set(frequencies(counting, "item").values()) == {0}


def scores_evict(rank: int, world_size: int, *, path: str) -> None:
    """The rows with the lowest scores leave, wherever they are, and cold rows keep
    their scores.
    """
    options = TableOptions(max_rows=20 * world_size, eviction=Scored(), left_ids=MANY)
    model = build("column_wise", options=options)
    train(model, range(1), distinct=400)
    ids = sorted(ids_now(model, "item"))
    half = torch.tensor(ids[rank::world_size])
    assert set_scores(
        model, "item", half, half.sign().float() * (half.abs() % 1009)
    ) == len(ids)
    score = {id_: (1 if id_ > 0 else -1) * (abs(id_) % 1009) for id_ in ids}
    train(model, range(1, 2), distinct=400)
    after = ids_now(model, "item")
    used = set(trained_ids("item", range(1, 2), distinct=400))
    gone = set(ids) - after
    assert gone
    assert max(score[id_] for id_ in gone) <= min(
        score[id_] for id_ in (set(ids) & after) - used
    )
    assert left_ids(model, "item").ids.tolist() == sorted(gone)
    kind, max_rows = ("row_wise", 48) if world_size == 2 else ("table_wise", 40)
    options = TableOptions(
        max_rows=max_rows, eviction=Scored(), cold_store=SSDStore(f"{path}/cold")
    )
    cold = build(kind, options=options)
    train(cold, range(8))
    assert table_stats(cold)["item"].cold_rows > 0
    ids = sorted(ids_now(cold, "item"))
    assert set_scores(
        cold, "item", torch.tensor(ids), torch.arange(len(ids)).float()
    ) == len(ids)
    assert frequencies(cold, "item") == {
        id_: encoded_score(float(i)) for i, id_ in enumerate(ids)
    }


def occurrences(rank: int, world_size: int, *, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        model = build(
            kind, options=TableOptions(max_rows=MANY, eviction=LFU(count="occurrences"))
        )
        train(model, range(6), distinct=8)
        for name in FEATURES:
            counts = Counter(trained_ids(name, range(6), distinct=8))
            assert max(counts.values()) > 6, "more than the steps"
            assert frequencies(model, name) == counts
        model.eval()
        train(model, range(6), distinct=8)
        assert frequencies(model, "item") == Counter(
            trained_ids("item", range(6), distinct=8)
        )


def refusals(rank: int, world_size: int) -> None:
    model = build("row_wise", options=TableOptions(max_rows=MANY, eviction=Scored()))
    train(model, range(2))
    before = frequencies(model, "item")
    ids = torch.arange(3)
    last = 3.0 if rank < world_size - 1 else float("nan")
    for name, scores, error in (
        (
            "item",
            torch.ones(3) if rank else torch.ones(2),
            "set_scores: scores must have the shape of ids",
        ),
        (
            "item",
            torch.tensor([1.0, 2.0, last]),
            "set_scores: scores must be finite",
        ),
        ("nope", torch.ones(3), "no RecStore table 'nope'"),
    ):
        with pytest.raises(ValueError, match=error):
            set_scores(model, name, ids, scores)
    with pytest.raises(ValueError, match="does not evict by scores"):
        set_scores(build("row_wise"), "item", ids, torch.ones(3))
    assert frequencies(model, "item") == before


def everything(
    rank: int, world_size: int, *, path: str, kinds: tuple[str, ...]
) -> None:
    ids_leave(rank, world_size, path=f"{path}/left", kinds=kinds)
    a_full_record(rank, world_size)
    scores_move(rank, world_size, path=f"{path}/scores", kinds=kinds)
    scores_evict(rank, world_size, path=path)
    occurrences(rank, world_size, kinds=kinds)
    refusals(rank, world_size)


@pytest.mark.parametrize(
    ("world_size", "kinds"),
    [
        (2, ("row_wise", "column_wise")),
        *[pytest.param(n, KINDS, marks=pytest.mark.slow) for n in (1, 2, 4)],
    ],
)
def test_scores_and_ids_that_leave(
    tmp_path: Path, world_size: int, kinds: tuple[str, ...]
) -> None:
    run_on_ranks(world_size, partial(everything, path=str(tmp_path), kinds=kinds))
