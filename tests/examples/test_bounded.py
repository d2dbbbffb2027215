"""Tests of limited tables in the training command: rows, report and refused flags."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from common.command import DataError
from criteo import ID_NAMES
from generator import Generator

from tests.redis_server import free_port, needs_redis, redis_server
from torchrec_recstore.checkpoint.compare import compare_chains
from torchrec_recstore.checkpoint.info import read_chain
from torchrec_recstore.options import LFU, LRU, RedisStore, RocksDBStore, SSDStore

from .commands import run_forked
from .training import settings_of, train_here

TABLES = [f"t_{name}" for name in ID_NAMES]
ROWS, BATCH = 4_000, 128
run = partial(run_forked, "dlrm/train.py")


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.tsv"
    path.write_bytes(b"".join(Generator(ROWS, 1).lines(0, ROWS)))
    return path


def train(
    rows_file: Path, out: Path, *flags: object, ranks: int = 1
) -> tuple[dict[str, Any], str, str]:
    asked = (
        "--data",
        rows_file,
        "--dim",
        8,
        "--batch-size",
        BATCH,
        "--json",
        out,
        *flags,
    )
    done = run(*asked, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout, done.stderr


@pytest.fixture(scope="module")
def unbounded(
    rows_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], str]:
    """Returns the result of a run without limits, and its output."""
    result, report, said = train(
        rows_file, tmp_path_factory.mktemp("unbounded") / "out.json"
    )
    return result, report + said


def of_all(result: dict[str, Any], count: str) -> int:
    return sum(counts[count] for counts in result["counts"].values())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_bounded_run_keeps_its_bound_and_says_what_left(
    rows_file: Path, tmp_path: Path, ranks: int
) -> None:
    flags: tuple[object, ...] = (
        "--max-rows",
        300,
        "--eviction",
        "lfu",
        "--half-life-steps",
        10,
        "--expire-steps",
        12,
    )
    flags += ("--sharding", "row_wise")
    result, report, said = train(rows_file, tmp_path / "out.json", *flags, ranks=ranks)
    assert result["bounds"] == {
        "max_rows": 300,
        "eviction": "lfu",
        "half_life_steps": 10,
        "lfu_count": None,
        "expire_steps": 12,
        "min_frequency": None,
        "cold_store": None,
    }
    assert list(result["counts"]) == TABLES
    assert max(result["rows"].values()) <= 300
    for counts in result["counts"].values():
        assert counts["hits"] + counts["misses"] == counts["lookups"] > 0
        assert (
            counts["inserts"] - counts["evicted"] - counts["expired"] == counts["rows"]
        )
    assert of_all(result, "evicted") > 0
    assert of_all(result, "expired") > 0
    assert result["hit_rate"] == of_all(result, "hits") / of_all(result, "lookups")
    line = (
        rf"epoch 1/1: rows {sum(result['rows'].values()):,}, bytes \S+ \wB, hit rate"
        rf" {result['hit_rate']:.1%}, "
        rf"evicted {of_all(result, 'evicted'):,}, expired {of_all(result, 'expired'):,}"
    )
    assert re.search(f"^{line}$", said, flags=re.MULTILINE)
    for title in ("hit rate", "evicted", "expired"):
        assert title in report
    for title in ("refused", "cold"):
        assert title not in report


@pytest.mark.slow
def test_admission_holds_rare_ids_back(
    rows_file: Path, tmp_path: Path, unbounded: tuple[dict[str, Any], str]
) -> None:
    every, said = unbounded
    twice, counted, _ = train(rows_file, tmp_path / "twice.json", "--min-frequency", 2)
    assert "hit rate" not in said, "nothing is said of bounds where there are none"
    assert "refused" in counted
    assert of_all(twice, "refused") > 0 == of_all(every, "refused")
    steps = steps_that_see(rows_file)
    assert every["rows"] == {name: len(of_table) for name, of_table in steps.items()}
    assert twice["rows"] == {
        name: sum(n > 1 for n in of_table.values()) for name, of_table in steps.items()
    }


def steps_that_see(path: Path) -> dict[str, Counter[str]]:
    """Returns the number of training steps in which each id occurs, by table."""
    lines = [line.split("\t")[14:] for line in path.read_text().splitlines()][
        : ROWS * 8 // 10
    ]
    counts: dict[str, Counter[str]] = {name: Counter() for name in TABLES}
    for begin in range(0, len(lines), BATCH):
        for name, ids in zip(
            TABLES, zip(*lines[begin : begin + BATCH], strict=True), strict=True
        ):
            counts[name].update(set(ids))
    return counts


def test_flags_become_options() -> None:
    assert settings_of(seed=7).options().max_rows is None
    assert settings_of(max_rows=9).options().eviction == LRU()
    assert settings_of(
        max_rows=9, eviction="lfu", half_life_steps=5
    ).options().eviction == LFU(5)
    by_occurrence = settings_of(
        max_rows=9, eviction="lfu", lfu_count="occurrences"
    ).options()
    assert by_occurrence.eviction == LFU(count="occurrences")
    assert settings_of(
        max_rows=9, cold_store="some/where"
    ).options().cold_store == SSDStore("some/where")
    assert settings_of(
        max_rows=9, cold_store="rocksdb://a/b"
    ).options().cold_store == RocksDBStore("a/b")
    url = "redis://user:secret@127.0.0.1:6379/1"
    asked = settings_of(max_rows=9, cold_store=url)
    assert asked.options().cold_store == RedisStore(url)
    assert asked.shown()["bounds"]["cold_store"] == "redis://127.0.0.1:6379/1"


@pytest.mark.parametrize(
    ("changes", "bounds", "message"),
    [
        ({}, {"eviction": "lru"}, "--eviction needs --max-rows"),
        ({}, {"cold_store": "cold"}, "--cold-store needs --max-rows"),
        (
            {},
            {"max_rows": 9, "half_life_steps": 5},
            "--half-life-steps needs --eviction lfu",
        ),
        ({}, {"max_rows": 9, "lfu_count": "steps"}, "--lfu-count needs --eviction lfu"),
        (
            {},
            {"max_rows": 9, "cold_store": "http://127.0.0.1"},
            "RedisStore.url must begin with redis://",
        ),
        (
            {"backend": "fused"},
            {"expire_steps": 9},
            "--expire-steps is for --backend recstore",
        ),
    ],
)
def test_bounds_that_make_no_sense_are_refused(
    rows_file: Path, changes: dict[str, Any], bounds: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        train_here(settings_of(data=rows_file, **bounds, **changes))


def test_a_resumed_run_must_have_the_same_bounds_but_for_the_cold_store() -> None:
    must_match = settings_of(max_rows=400, cold_store="cold").must_match()
    assert must_match["--max-rows"] == 400
    assert must_match["--min-frequency"] is None, (
        "so that one that is gone is noticed too"
    )
    assert "--cold-store" not in must_match


def without_bounds_or_speed(result: dict[str, Any]) -> dict[str, Any]:
    left_out = {
        "bounds",
        "checkpoint",
        "rows",
        "bytes",
        "counts",
        "hit_rate",
        "train_samples_per_second",
    }
    return {key: value for key, value in result.items() if key not in left_out}


def check_tiered(tiered: dict[str, Any], whole: dict[str, Any]) -> None:
    assert without_bounds_or_speed(tiered) == without_bounds_or_speed(whole), (
        "bit for bit, and so all that follows"
    )
    for name in TABLES:
        counts = tiered["counts"][name]
        assert counts["rows"] + counts["cold_rows"] == whole["rows"][name]
    assert 0 < of_all(tiered, "cold_hits") < of_all(tiered, "misses")


@pytest.mark.slow
def test_with_a_cold_store_training_is_that_without_a_bound(
    rows_file: Path, tmp_path: Path, unbounded: tuple[dict[str, Any], str]
) -> None:
    folder = tmp_path / "cold"
    tiered, report, said = train(
        rows_file, tmp_path / "out.json", "--max-rows", 300, "--cold-store", folder
    )
    check_tiered(tiered, unbounded[0])
    assert tiered["bounds"]["cold_store"] == str(folder)
    for text in (report, said):
        assert "cold rows" in text
        assert "cold hits" in text


@needs_redis
# test_with_a_cold_store_training_is_that_without_a_bound is the same with a directory
@pytest.mark.slow
def test_cold_rows_on_a_server_whose_password_is_written_nowhere(
    rows_file: Path, tmp_path: Path, unbounded: tuple[dict[str, Any], str]
) -> None:
    password = "swordfish"
    port = free_port()
    url = f"redis://:{password}@127.0.0.1:{port}"
    with redis_server(
        tmp_path / "redis", "--requirepass", password, port=port, ping=url
    ):  # type: ignore[arg-type]
        asked = (
            "--checkpoint",
            tmp_path / "run",
            "--max-rows",
            300,
            "--cold-store",
            url,
        )
        tiered, report, said = train(rows_file, tmp_path / "out.json", *asked)
    check_tiered(tiered, unbounded[0])
    assert tiered["bounds"]["cold_store"] == f"redis://127.0.0.1:{port}"
    assert password not in report + said
    written = [
        file
        for file in [tmp_path / "out.json", *(tmp_path / "run").rglob("*")]
        if file.is_file()
    ]
    assert len(written) > len(TABLES)
    assert all(password.encode() not in file.read_bytes() for file in written)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(
            2,
            (
                "--max-rows",
                250,
                "--eviction",
                "lfu",
                "--half-life-steps",
                7,
                "--expire-steps",
                8,
                "--min-frequency",
                2,
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            1, ("--max-rows", 250, "--cold-store", "cold"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_that_goes_on_ends_like_one_that_was_never_stopped(
    rows_file: Path,
    tmp_path: Path,
    ranks: int,
    flags: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = (
        *flags,
        "--limit-rows",
        2400,
        "--sharding",
        "row_wise",
        "--checkpoint-every",
        9,
        "--checkpoint",
    )
    undisturbed, _, _ = train(
        rows_file, tmp_path / "one.json", *asked, tmp_path / "run", ranks=ranks
    )
    *_, before, last = sorted((tmp_path / "run").iterdir())
    shutil.copytree(before, tmp_path / "again" / before.name)
    resumed, _, _ = train(
        rows_file,
        tmp_path / "two.json",
        *asked,
        tmp_path / "again",
        "--resume",
        ranks=ranks,
    )
    assert of_all(undisturbed, "evicted") > 0
    assert resumed["resumed"].startswith("resumed at step 9 of 15")
    for key in ("test_auc", "test_logloss", "val_auc", "rows"):
        assert resumed[key] == undisturbed[key] or (
            key == "rows" and "--cold-store" in flags
        ), key
    assert compare_chains(
        read_chain(last), read_chain(tmp_path / "again" / last.name)
    ).equal
