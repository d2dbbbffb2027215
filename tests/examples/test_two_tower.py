"""Tests of the two-tower example: the format of its files, its batches, its loss and its command."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
import torch
from common.command import DataError
from common.run_log import read_curves
from two_tower import retrieval
from two_tower.batches import FeatureStore, shuffled
from two_tower.movielens import Features, leave_last_out, load, token_id
from two_tower.settings import Settings
from two_tower.towers import TEMPERATURE, in_batch_softmax

from .commands import ROOT, run_forked, run_script

MOVIELENS = ROOT.parent / "shared" / "movielens"
TABLES = [f"t_{name}" for name in ("user_id", "age", "gender", "occupation", "zip", "item_id", "year", "genres")]

NUM_USERS, NUM_ITEMS, NUM_GROUPS = 200, 100, 5
RATED = 13
RAW = 2**55 + 7

USERS = "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
ITEMS = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
INTERACTIONS = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"

run = partial(run_script, "two_tower/train.py")
forked = partial(run_forked, "two_tower/train.py")


def write(folder: Path, users: str, items: str, interactions: str) -> Path:
    (folder / "ml-100k.user").write_text(USERS + users)
    (folder / "ml-100k.item").write_text(ITEMS + items)
    with gzip.open(folder / "ml-100k.inter.gz", "wt") as file:
        file.write(INTERACTIONS + interactions)
    return folder


@pytest.fixture(scope="module")
def tastes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes users of five kinds. Each user rates 13 of the 20 items of the kind. Ids are large and of either sign."""
    rng = random.Random(0)
    users = "".join(
        f"{-RAW * user - 1}\t{rng.randint(15, 70)}\t{rng.choice('MF')}\tother\tZ{rng.randint(0, 50)}\n"
        for user in range(NUM_USERS)
    )
    items = "".join(
        f"{RAW + item}\tTitle\t{rng.randint(1950, 1998)}\t{rng.choice(['', 'Drama', 'War Comedy'])}\n"
        for item in range(NUM_ITEMS)
    )
    interactions = [
        f"{-RAW * user - 1}\t{RAW + item}\t3\t{rng.randint(0, 10**9)}\n"
        for user in range(NUM_USERS)
        for item in rng.sample(range(user % NUM_GROUPS, NUM_ITEMS, NUM_GROUPS), RATED)
    ]
    rng.shuffle(interactions)
    return write(tmp_path_factory.mktemp("tastes"), users, items, "".join(interactions))


def train(
    out: Path, *flags: object, ranks: int = 1, start: Callable[..., CompletedProcess[str]] = forked
) -> tuple[dict[str, Any], str]:
    done = start("--json", out, *flags, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(1, ("--backend", "fused"), marks=pytest.mark.slow),
        (1, ("--backend", "recstore")),
        pytest.param(2, ("--backend", "recstore", "--sharding", "row_wise"), marks=pytest.mark.slow),
    ],
)
def test_learns_whose_items_are_whose(tastes: Path, tmp_path: Path, ranks: int, flags: tuple[str, ...]) -> None:
    common = ("--data", tastes, "--batch-size", 60, "--epochs", 4, "--dim", 16, "--lr", 0.2, "--dense-lr", 0.01)
    start = run if "fused" in flags else forked  # the script also runs as a user starts it
    log = () if "fused" in flags else ("--log-dir", tmp_path / "log", "--log-every", 10)
    result, report = train(tmp_path / "out.json", *common, *flags, *log, ranks=ranks, start=start)
    assert (result["test_users"], result["items"], result["world_size"]) == (NUM_USERS, NUM_ITEMS, ranks)
    assert result["train_samples"] == 4 * NUM_USERS * (RATED - 1)
    # A random choice is 10 of the 88 items that a user was not trained on. 8 of these items are of the user's kind.
    assert result["recall_at_10"] > 0.7
    assert f"recall@10          {result['recall_at_10']:.4f}" in report
    assert list(result["rows"]) == TABLES
    if "fused" in flags:
        assert result["rows"] == dict.fromkeys(TABLES, 10_000)
    else:
        assert result["rows"]["t_user_id"] == NUM_USERS
        assert result["rows"]["t_item_id"] == NUM_ITEMS
        assert result["rows"]["t_genres"] == 3
        curves = read_curves(tmp_path / "log")
        # There is a point every ten steps, and an epoch has 40 steps.
        assert curves["loss/training"].samples == list(range(600, 9601, 600))
        assert curves["recall/test"].values == pytest.approx([result["recall_at_10"]])
        assert {name: curves[f"rows/{name}"].values[-1] for name in TABLES} == result["rows"]
        # There are two collections, each with its own input dist, lookup and update.
        assert all(min(curves[f"step_ms/{part}"].values) > 0 for part in ("input_dist", "lookup", "update"))
        assert f"{result['recall_at_10']:.4f}" in (tmp_path / "log" / "report.html").read_text()


@pytest.mark.skipif(not MOVIELENS.exists(), reason="MovieLens is not on this machine")
def test_movielens(tmp_path: Path) -> None:
    result, _ = train(tmp_path / "out.json", "--data", MOVIELENS, "--epochs", 1)
    assert (result["test_users"], result["items"]) == (943, 1682)
    assert result["rows"]["t_user_id"] == 943
    assert result["rows"]["t_genres"] == 19
    assert result["recall_at_10"] > 0.06  # ten times chance


def test_features_and_split(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        "5\t24\tM\twriter\tV1A\n-9\t\tF\tother\t85711\n",
        "70\tA\t1995\tDrama War\n80\tB\tunknown\t\n",
        "5\t80\t3\t20\n-9\t70\t1\t5\n5\t70\t4\t10\n",
    )
    data = load(folder)
    assert data.users.names[0] == "user_id"
    assert data.users.lists[0] == [[5], [-9]]
    assert data.users.lists[1] == [[4], []]
    assert data.users.lists[4] == [[token_id("V1A")], [85711]]
    assert data.items.lists[1] == [[1995], [token_id("unknown")]]
    assert data.items.lists[2] == [[token_id("Drama"), token_id("War")], []]
    # User -9 has only one interaction, which is a training interaction.
    assert data.train.tolist() == [[1, 0], [0, 0]]
    assert data.test.tolist() == [[0, 1]]


def test_token_ids_never_change() -> None:
    assert token_id("1995") == 1995
    assert token_id("Drama") == token_id("Drama") != token_id("drama")
    assert token_id("Drama") == -3_780_808_780_974_187_119
    assert abs(token_id("9" * 30)) < 2**63


def test_last_of_the_same_second_is_the_later_line() -> None:
    train_rows, test_rows = leave_last_out(np.array([[3, 1], [4, 2], [3, 5], [3, 2]]))
    assert train_rows.tolist() == [[3, 1], [4, 2], [3, 5]]
    assert test_rows.tolist() == [[3, 2]]


def test_picked_features() -> None:
    store = FeatureStore(Features(("a", "b"), ([[1], [-1], [3]], [[], [2**62, 5], [6]])))
    picked = store.pick(torch.tensor([1, 0, 1])).to_dict()
    assert [ids.tolist() for ids in picked["a"].to_dense()] == [[-1], [1], [-1]]
    assert [ids.tolist() for ids in picked["b"].to_dense()] == [[2**62, 5], [], [2**62, 5]]
    small = FeatureStore(Features(("a",), ([[12], [-1]],)), modulo=10)
    assert small.pick(torch.arange(2)).values().tolist() == [2, 9]


def test_ranks_share_each_batch() -> None:
    interactions = torch.arange(22).view(11, 2)
    ranks = [list(shuffled(interactions, 4, 7, rank, 2)) for rank in range(2)]
    assert [[len(part) for part in parts] for parts in ranks] == [[2, 2], [2, 2]]
    whole = list(shuffled(interactions, 4, 7, 0, 1))
    assert all(torch.equal(torch.cat(parts), batch) for *parts, batch in zip(*ranks, whole, strict=True))


def test_same_item_twice_is_no_wrong_answer() -> None:
    users, items = torch.randn(3, 4), torch.randn(3, 4)
    loss = in_batch_softmax(users, items, torch.tensor([8, 9, 8]), torch.zeros(3))
    scores = users @ items.T / TEMPERATURE
    scores[0, 2] = scores[2, 0] = -torch.inf
    assert torch.equal(loss, torch.nn.functional.cross_entropy(scores, torch.arange(3)))


def test_popular_items_lose_the_log_of_their_share() -> None:
    users, items, shares = torch.randn(3, 4), torch.randn(3, 4), torch.tensor([0.5, 0.3, 0.2])
    loss = in_batch_softmax(users, items, torch.arange(3), shares.log())
    weighted = torch.exp(users @ items.T / TEMPERATURE) / shares
    torch.testing.assert_close(loss, -(weighted.diagonal() / weighted.sum(dim=1)).log().mean())


GOOD = ("1\t20\tM\tx\tz\n", "1\tA\t1990\tB\n2\tA\t1990\tB\n", "1\t1\t3\t1\n1\t2\t3\t2\n")


@pytest.mark.parametrize(
    ("place", "text", "message"),
    [
        (0, "1\t20\tM\tx\n", r"ml-100k\.user, line 2: expected 5 columns, found 4"),
        (0, "one\t20\tM\tx\tz\n", r"ml-100k\.user, line 2, column user_id: 'one' is not a 64-bit number"),
        (0, f"{2**63}\t20\tM\tx\tz\n", r"column user_id: '9223372036854775808' is not a 64-bit number"),
        (0, "1\t20\tM\tx\tz\n1\t20\tM\tx\tz\n", r"ml-100k\.user, line 3: id 1 occurs for the second time"),
        (1, "", r"ml-100k\.item: there is no row below the header"),
        (2, "1\t1\t3\tnan\n", r"line 2, column timestamp: 'nan' is not a 64-bit number"),
        (2, "1\t1\t3\tnoon\n", r"ml-100k\.inter\.gz, line 2, column timestamp: 'noon' is not a 64-bit number"),
        (2, "1\t1\t3\t1\n1\t3\t3\t1\n", r"ml-100k\.inter\.gz, line 3, column item_id: id 3 is not in the file"),
        (2, "1\t1\t3\t1\n", r"no user has two interactions"),
    ],
)
def test_bad_lines(tmp_path: Path, place: int, text: str, message: str) -> None:
    parts = list(GOOD)
    parts[place] = text
    with pytest.raises(DataError, match=message):
        load(write(tmp_path, *parts))


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"there is neither ml-100k\.user nor ml-100k\.user\.gz"):
        load(tmp_path)
    folder = write(tmp_path, *GOOD)
    packed = (folder / "ml-100k.inter.gz").read_bytes()
    for damaged in (packed[:-12], b"no gzip"):
        (folder / "ml-100k.inter.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"ml-100k\.inter\.gz: "):
            load(folder)
    (folder / "ml-100k.user").write_text("user_id:token\tage:token\n1\t2\n")
    with pytest.raises(DataError, match=r"ml-100k\.user, line 1: no column 'gender'"):
        load(folder)
    (folder / "ml-100k.user").write_bytes(USERS.encode() + b"\xff")
    with pytest.raises(DataError, match="not UTF-8"):
        load(folder)


def test_unusable_input_is_one_line(tmp_path: Path) -> None:
    done = forked("--data", tmp_path / "nowhere")
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path / 'nowhere'}: no such folder\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 2}, "--batch-size 2 is more than the 1 training interactions"),
        ({"backend": "fused", "sharding": "row_wise"}, "no row_wise sharding on CPU"),
        ({"backend": "fused", "dim": 6}, "multiple of 4"),
        ({"json_out": Path("/nowhere/out.json")}, "/nowhere/out.json: no such folder"),
    ],
)
def test_unusable_settings(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    plain: dict[str, Any] = {"data": write(tmp_path, *GOOD), "backend": "recstore", "sharding": "table_wise", "dim": 8}
    plain |= {"num_embeddings": 100, "batch_size": 1, "epochs": 1, "seed": 0, "lr": 0.1, "dense_lr": 0.1}
    with pytest.raises(DataError, match=message):
        retrieval.train(Settings(**{"json_out": None} | plain | changes))
