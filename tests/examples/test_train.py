"""Tests of the training command with one and two processes: result, report and bad
input.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from common.command import DataError
from common.report import check_file
from criteo import ID_NAMES
from generator import Generator

from .commands import ROOT, run_forked, run_script
from .training import settings_of
from .training import train_here as train_with

SAMPLE = ROOT.parent / "shared" / "criteo" / "criteo_kaggle_sample.tsv.gz"
TABLES = [f"t_{name}" for name in ID_NAMES]


run = partial(run_script, "dlrm/train.py")
forked = partial(run_forked, "dlrm/train.py")


def train(out: Path, *flags: object, ranks: int = 1) -> tuple[dict[str, Any], str]:
    done = forked("--json", out, *flags, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


def train_here(
    out: Path, capsys: pytest.CaptureFixture[str], **changes: Any
) -> tuple[dict[str, Any], str]:
    """See :func:`train`.

    The command runs in this process, because a new process takes seconds to import
    TorchRec.
    """
    torch.set_num_threads(1)
    train_with(settings_of(json_out=out, **{"dim": 8} | changes))
    return json.loads(out.read_text()), capsys.readouterr().out


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.tsv"
    path.write_bytes(b"".join(Generator(12_002, 1).lines(0, 12_002)))
    return path


def distinct_ids(path: Path, num_rows: int) -> dict[str, int]:
    seen: list[set[int]] = [set() for _ in TABLES]
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for _, line in zip(range(num_rows), file, strict=False):
            for ids, field in zip(
                seen, line.rstrip("\n").split("\t")[14:], strict=True
            ):
                ids.add(int(field or "0", 16))
    return {name: len(ids) for name, ids in zip(TABLES, seen, strict=True)}


def check_result(result: dict[str, Any], **expected: object) -> None:
    assert {key: result[key] for key in expected} == expected
    assert result["train_samples_per_second"] > 0
    for key in ("test_auc", "val_auc"):
        assert 0.5 < result[key] < 1
    for key in ("test_logloss", "train_loss"):
        assert 0 < result[key] < math.log(2)
    assert list(result["rows"]) == TABLES
    assert list(result["bytes"]) == TABLES
    assert all(result["bytes"][name] >= 8 * 4 * result["rows"][name] for name in TABLES)


def test_fused(
    rows_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {
        "data": rows_file,
        "backend": "fused",
        "num_embeddings": 1000,
        "batch_size": 256,
    }
    result, report = train_here(tmp_path / "out.json", capsys, **changes)
    check_result(
        result,
        backend="fused",
        world_size=1,
        train_samples=9601,
        skipped_rows=0,
        data=str(rows_file),
    )
    assert result["rows"] == dict.fromkeys(TABLES, 1000)
    assert result["bytes"] == dict.fromkeys(TABLES, 1000 * (8 + 1) * 4)
    for words in ("t_C26", "test AUC", "test logloss", "training samples/s"):
        assert words in report


@pytest.mark.slow
def test_dense_layers_in_bfloat16(
    rows_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step uses the present weights, so the loss falls as in float32, and the
    evaluation is in float32.
    """
    changes = {"data": rows_file, "limit_rows": 4000, "batch_size": 64}
    result, _ = train_here(tmp_path / "amp.json", capsys, **changes, amp=True)
    plain, _ = train_here(tmp_path / "plain.json", capsys, **changes)
    check_result(result, amp=True, train_samples=3200)
    assert result["train_loss"] != plain["train_loss"]
    assert result["train_loss"] == pytest.approx(plain["train_loss"], abs=2e-3)
    assert result["test_auc"] == pytest.approx(plain["test_auc"], abs=0.02)


@pytest.mark.slow
def test_recstore_holds_the_ids_it_was_trained_on_and_learns_the_same_on_two_ranks(
    rows_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, _ = train_here(tmp_path / "one.json", capsys, data=rows_file, batch_size=256)
    check_result(
        one, backend="recstore", world_size=1, train_samples=9601, skipped_rows=0
    )
    assert one["rows"] == distinct_ids(rows_file, 9601)
    # The last training sample cannot be split over two ranks. The 1201 test samples are
    # split unevenly.
    flags = (
        "--data",
        rows_file,
        "--dim",
        8,
        "--batch-size",
        256,
        "--sharding",
        "row_wise",
    )
    two, _ = train(tmp_path / "two.json", *flags, ranks=2)
    check_result(
        two,
        world_size=2,
        train_samples=9600,
        sharding="row_wise",
        rows=distinct_ids(rows_file, 9600),
    )
    for key in ("train_loss", "test_logloss", "test_auc", "val_auc"):
        assert two[key] == pytest.approx(one[key], abs=2e-3)


@pytest.mark.slow
@pytest.mark.skipif(
    not SAMPLE.exists(), reason="the Criteo sample is not on this machine"
)
def test_criteo_sample(tmp_path: Path) -> None:
    result, _ = train(tmp_path / "out.json", "--data", SAMPLE, "--limit-rows", 20_000)
    check_result(result, backend="recstore", train_samples=16_000, skipped_rows=0)
    assert result["rows"] == distinct_ids(SAMPLE, 16_000)
    assert result["test_auc"] > 0.65


@pytest.mark.slow
def test_each_epoch_begins_with_new_rows(rows_file: Path, tmp_path: Path) -> None:
    """In the last epoch the rows are those of one epoch: each was updated once for each
    of its samples.
    """
    changes = {
        "data": rows_file,
        "limit_rows": 1000,
        "batch_size": 100,
        "dim": 4,
        "min_frequency": 2,
        "epochs": 3,
    }
    plain = train_with(settings_of(**changes))
    reset = train_with(settings_of(**changes, reset_rows_each_epoch=True))
    once = train_with(settings_of(**changes | {"epochs": 1}))
    assert reset["rows"] == once["rows"]
    assert sum(plain["rows"].values()) > sum(reset["rows"].values())
    assert plain["train_loss"] < reset["train_loss"] < once["train_loss"]


@pytest.mark.slow
@pytest.mark.skipif(
    not SAMPLE.exists(), reason="the Criteo sample is not on this machine"
)
def test_new_rows_in_each_epoch_are_the_remedy_for_overfitting() -> None:
    aucs = {
        (epochs, reset): train_with(
            settings_of(data=SAMPLE, epochs=epochs, reset_rows_each_epoch=reset)
        )["test_auc"]
        for epochs, reset in ((1, False), (2, False), (2, True))
    }
    assert aucs[2, False] < aucs[1, False] - 0.01
    assert aucs[2, True] > aucs[1, False]


@pytest.mark.slow
@pytest.mark.parametrize("start", [forked, run], ids=["forked", "new"])
def test_generated_rows_and_reader_alone(
    tmp_path: Path, start: Callable[..., CompletedProcess[str]]
) -> None:
    out = tmp_path / "out.json"
    done = start("--json", out, "--read-only", "--limit-rows", 20_000)
    assert done.returncode == 0, done.stderr
    result, report = json.loads(out.read_text()), done.stdout
    assert result["samples"] == 20_000
    assert result["reader_samples_per_second"] > 0
    assert "reader samples/s" in report


def bad_copy(rows_file: Path, tmp_path: Path) -> Path:
    lines = rows_file.read_bytes().splitlines()[:2000]
    lines[1000] = lines[1000].replace(b"\t", b"\tzzz", 14)
    path = tmp_path / "bad.tsv"
    path.write_bytes(b"\n".join(lines))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_bad_row_stops_the_run_before_training(
    rows_file: Path, tmp_path: Path, ranks: int
) -> None:
    path = bad_copy(rows_file, tmp_path)
    done = forked(
        "--data",
        path,
        "--backend",
        "fused",
        "--json",
        tmp_path / "out.json",
        ranks=ranks,
    )
    assert done.returncode != 0
    assert (
        done.stderr.count(f"error: {path}, line 1001, column I1: expected an integer")
        == 1
    )
    assert "epoch" not in done.stderr
    assert not (tmp_path / "out.json").exists()
    if ranks == 1:
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1, "one line, no traceback"


# test_bad_row_stops_the_run_before_training has an error of two ranks that is not slow.
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--max-rows", 500, "--cold-store", f"{__file__}/x"), "cold store SSDStore("),
        (("--max-rows", 5), "table 't_C"),
    ],
)
def test_what_tables_refuse_is_one_line(
    flags: tuple[object, ...], message: str, ranks: int
) -> None:
    done = forked("--limit-rows", 2000, *flags, ranks=ranks)
    assert done.returncode == 2 or (ranks > 1 and done.returncode)
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1, done.stderr


ONE_RANK_FAILS = """
import sys
sys.path.insert(0, {examples!r})
from common.command import run
def main():
    import torch.distributed as dist
    from common.processes import process_group
    from torchrec_recstore import ColdStoreError
    with process_group():
        dist.barrier()
        if dist.get_rank() == 1:
            raise {error}
        dist.barrier()
run(main)
"""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("ColdStoreError('no')", "error: no"),
        ("MemoryError()", "error: out of memory"),
        ("KeyError(7)", "KeyError: 7"),
    ],
)
def test_a_rank_that_fails_alone_says_so_and_ends_all(
    tmp_path: Path, error: str, line: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        ONE_RANK_FAILS.format(examples=str(ROOT / "examples"), error=error)
    )
    # a rank that does not end is killed, and its status is negative
    done = run_forked(str(script), ranks=2)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == line
    # A defect prints a traceback on its rank only.
    assert done.stderr.count("Traceback") == (1 if "KeyError" in error else 0)
    assert done.stderr.count("error: ") == (0 if "KeyError" in error else 1)


def test_bad_rows_are_skipped_and_reported(
    rows_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {
        "data": bad_copy(rows_file, tmp_path),
        "backend": "fused",
        "skip_bad_rows": True,
    }
    result, report = train_here(tmp_path / "out.json", capsys, **changes)
    assert (result["train_samples"], result["skipped_rows"]) == (1599, 1)
    assert "bad rows skipped   1" in report


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        (None, {}, r"rows\.tsv: No such file or directory"),
        (b"", {}, r"rows\.tsv: the file is empty"),
        (
            b"0\t1\n",
            {},
            r"rows\.tsv, line 1: expected 40 tab-separated columns, found 2",
        ),
        (b"".join(Generator(5, 0).lines(0, 5)), {}, r"rows\.tsv: 5 rows are too few"),
        (
            b"",
            {"backend": "fused", "sharding": "row_wise"},
            "no row_wise sharding on CPU",
        ),
        (b"", {"backend": "fused", "dim": 6}, "multiple of 4"),
        (
            b"",
            {"backend": "fused", "reset_rows_each_epoch": True},
            "--reset-rows-each-epoch is for --backend recstore",
        ),
        (
            b"",
            {"json_out": Path("/nowhere/out.json")},
            "^/nowhere/out.json: no such folder",
        ),
        (b"", {"json_out": Path("/tmp")}, "^/tmp: this is a folder, not a file"),
        (
            b"",
            {"json_out": Path("/proc/out.json")},
            "^/proc/out.json: No such file or directory",
        ),
        (b"", {"json_out": Path("/proc/version")}, r"^/proc/version: [A-Z]"),
    ],
)
def test_unusable_input(
    tmp_path: Path, content: bytes | None, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "rows.tsv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        train_with(settings_of(data=path, **changes))


def test_the_place_of_the_json_is_only_looked_at(tmp_path: Path) -> None:
    pipe, there, link = (
        tmp_path / "pipe",
        tmp_path / "there.json",
        tmp_path / "link.json",
    )
    os.mkfifo(pipe)
    there.write_text("before")
    link.symlink_to("new.json")
    for path in (pipe, there, link, Path("-"), tmp_path / "new.json"):
        check_file(path)
    assert there.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "link.json",
        "pipe",
        "there.json",
    ]


def test_a_full_disk_is_said_with_the_file_and_after_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match=r"^/dev/full: No space left on device$"):
        train_with(
            settings_of(
                limit_rows=600,
                no_log=False,
                log_dir=tmp_path / "log",
                json_out=Path("/dev/full"),
            )
        )
    assert capsys.readouterr().err.endswith(f"report: {tmp_path}/log/report.html\n")
