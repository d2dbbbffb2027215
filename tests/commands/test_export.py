"""Tests of ``recstore export`` of a checkpoint and of a delta."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torchrec.distributed import DistributedModelParallel
from typer.testing import CliRunner, Result

from tests.packages import PYTHON_PATH
from tests.secrets import write_secret
from torchrec_recstore import Table, TableOptions, UniformInit, save_checkpoint
from torchrec_recstore.cli import app
from torchrec_recstore.inference import read_delta, verify

from ..checkpoint import models
from ..terminal import run_in_terminal
from .test_progress import ESCAPES


def export(*arguments: object) -> Result:
    return CliRunner().invoke(
        app, ["export", *map(str, arguments)], catch_exceptions=False
    )


@pytest.fixture
def trained(one_rank: None, tmp_path: Path) -> DistributedModelParallel:
    """Returns a model with a checkpoint at "full"."""
    model = models.recstore()
    models.train(model)
    save_checkpoint(model, tmp_path / "full")
    return model


def user_table(model: DistributedModelParallel) -> Table:
    table: Table = model.module.sparse.recstore_state.shards["user"][0].table
    return table


def test_rows_in_the_file(trained: DistributedModelParallel, tmp_path: Path) -> None:
    given = (
        tmp_path / "full",
        tmp_path / "out.pt",
        "--dtype",
        "float32",
        "--rows",
        "mapped",
    )
    refused = export(*given)
    assert (refused.exit_code, (tmp_path / "out.pt").exists()) == (2, False)
    assert 'rows="mapped" needs index="hash"' in refused.stderr
    assert export(*given, "--index", "hash").exit_code == 0
    table = user_table(trained)
    served = torch.jit.load(tmp_path / "out.pt")
    assert torch.equal(served.lookup("user", table.ids()), table.lookup(table.ids()))
    assert str(tmp_path / "out.pt") in Path("/proc/self/maps").read_text()
    changed = export(
        tmp_path / "full",
        tmp_path / "delta",
        "--delta-of",
        tmp_path / "out.pt",
        "--index",
        "hash",
    )
    assert "leave out --table, --dtype, --index and --rows" in changed.stderr


def test_a_file_that_torch_alone_reads(
    trained: DistributedModelParallel, tmp_path: Path
) -> None:
    done = export(
        tmp_path / "full",
        tmp_path / "out.pt",
        "--dtype",
        "float32",
        "--table",
        "user",
        "--json",
    )
    assert (done.exit_code, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    table = user_table(trained)
    assert told["path"] == str(tmp_path / "out.pt")
    assert told["bytes"] == (tmp_path / "out.pt").stat().st_size
    assert list(told["tables"]) == ["user"]
    assert told["tables"]["user"]["rows"] == len(table) > 0
    assert told["tables"]["user"]["dtype"] == "float32"
    served = torch.jit.load(tmp_path / "out.pt")
    assert torch.equal(served.lookup("user", table.ids()), table.lookup(table.ids()))

    shown = export(
        tmp_path / "full", tmp_path / "out.pt", "--dtype", "fp16", "--overwrite"
    )
    assert shown.exit_code == 0
    assert [
        line
        for line in shown.stdout.splitlines()
        if "user" in line and "float16" in line
    ]
    assert "rows left out" in shown.stdout


@pytest.mark.slow
def test_the_closing_line_loads_the_file(
    trained: DistributedModelParallel, tmp_path: Path
) -> None:
    closing_lines = {}
    for dtype, index in (
        ("int8", "sorted"),
        ("float32", "sorted"),
        ("int8", "hash"),
    ):
        path = tmp_path / f"{dtype}-{index}.pt"
        shown = export(tmp_path / "full", path, "--dtype", dtype, "--index", index)
        start, _, code = shown.stdout.splitlines()[-1].partition(": ")
        assert start == "to load it"
        closing_lines[dtype, index] = code
    assert closing_lines["float32", "sorted"].startswith(
        "import torch; torch.jit.load("
    )
    assert "load_library()" in closing_lines["int8", "hash"]
    # a process of its own, because this one has imported fbgemm_gpu
    code = closing_lines["int8", "sorted"]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    without_ops = code.replace(", fbgemm_gpu", "")
    done = subprocess.run([sys.executable, "-c", without_ops], capture_output=True)
    assert done.returncode == 1


def test_a_delta(trained: DistributedModelParallel, tmp_path: Path) -> None:
    export(tmp_path / "full", tmp_path / "out.pt", "--dtype", "float32")
    table = user_table(trained)
    models.train(trained, steps=2, distinct=80)
    gone = table.ids()[:2]
    table.remove(gone)
    save_checkpoint(trained, tmp_path / "later")
    done = export(
        tmp_path / "later",
        tmp_path / "delta",
        "--delta-of",
        tmp_path / "out.pt",
        "--json",
    )
    assert (done.exit_code, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["tables"]["user"]["removed"] == 2
    served = torch.jit.load(tmp_path / "out.pt")
    served.apply_delta(load_file(tmp_path / "delta"))
    assert served.recstore_version() == told["version"]
    assert torch.equal(served.lookup("user", table.ids()), table.lookup(table.ids()))
    assert (
        "removed"
        in export(
            tmp_path / "later", tmp_path / "two", "--delta-of", tmp_path / "out.pt"
        ).stdout
    )
    refused = export(
        tmp_path / "later",
        tmp_path / "three",
        "--delta-of",
        tmp_path / "out.pt",
        "--dtype",
        "int8",
    )
    assert refused.exit_code == 2
    assert refused.stderr.startswith(
        "error: --delta-of takes these from the export: leave out --table, --dtype"
    )


def test_a_signed_file(trained: DistributedModelParallel, tmp_path: Path) -> None:
    key = write_secret(tmp_path / "key", "0123456789abcdef" * 2)
    other = write_secret(tmp_path / "other", "fedcba9876543210" * 2)
    assert export(tmp_path / "full", tmp_path / "out.pt", "--key", key).exit_code == 0
    models.train(trained)
    save_checkpoint(trained, tmp_path / "later")
    made = export(
        tmp_path / "later",
        tmp_path / "delta",
        "--delta-of",
        tmp_path / "out.pt",
        "--key",
        key,
    )
    assert (made.exit_code, made.stderr) == (0, "")
    for file in (tmp_path / "out.pt", tmp_path / "delta"):
        verify(file, key=key)
    served = torch.jit.load(tmp_path / "out.pt")
    assert served.apply_delta(read_delta(tmp_path / "delta", key=key))
    refused = export(
        tmp_path / "later",
        tmp_path / "two",
        "--delta-of",
        tmp_path / "out.pt",
        "--key",
        other,
    )
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (2, 1)
    assert f"{tmp_path / 'out.pt'} is not signed with the key {other}" in refused.stderr
    assert not (tmp_path / "two").exists()


def test_bad_input_in_one_line(
    trained: DistributedModelParallel, tmp_path: Path
) -> None:
    for arguments, says in [
        ([tmp_path / "nowhere", tmp_path / "out.pt"], "nowhere: no such directory"),
        ([tmp_path / "full", tmp_path / "out.pt", "--table", "users"], "'users'"),
        (
            [
                tmp_path / "full",
                tmp_path / "out.pt",
                "--table",
                "user",
                "--table",
                "user",
            ],
            "--table user is named twice",
        ),
        ([tmp_path / "full", tmp_path / "no/out.pt"], "no is no directory"),
    ]:
        refused = export(*arguments)
        assert refused.exit_code == 2
        assert refused.stderr.startswith("error: ")
        assert refused.stderr.count("\n") == 1
        assert says in refused.stderr
    assert not (tmp_path / "out.pt").exists()


def test_what_is_lost_is_said_in_one_line(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore(
        options=TableOptions(missing="init", initializer=UniformInit(-0.1, 0.1))
    )
    models.train(model)
    save_checkpoint(model, tmp_path / "full")
    done = export(tmp_path / "full", tmp_path / "out.pt")
    assert done.exit_code == 0
    assert done.stderr.startswith("warning: table(s) ")
    assert done.stderr.count("\n") == 1


# tests/commands/test_progress.py has bars of the commands that start faster
@pytest.mark.slow
def test_progress(
    trained: DistributedModelParallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    # A new process has imported nothing before. fp16 rows need fbgemm's ops too.
    command = [
        sys.executable,
        "-m",
        "torchrec_recstore.cli",
        "export",
        "--dtype",
        "fp16",
    ]
    command += [str(tmp_path / "full"), str(tmp_path / "out.pt")]
    status, out, seen = run_in_terminal(command)
    assert status == 0
    assert "out.pt: " in out
    tables = json.loads(
        export(tmp_path / "full", tmp_path / "again.pt", "--json").stdout
    )["tables"]
    rows = sum(tables[name]["rows"] for name in ("item", "user"))
    assert f"{rows}/{rows} " in ESCAPES.sub("", seen)
    assert " rows/s " in ESCAPES.sub("", seen)
