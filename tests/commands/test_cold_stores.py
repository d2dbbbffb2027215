"""``recstore inspect`` and ``recstore doctor`` on the directories of cold stores, and
an example that leaves none.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner

from torchrec_recstore.checkpoint import save_checkpoint
from torchrec_recstore.cli import app
from torchrec_recstore.doctor.machine import cold_stores
from torchrec_recstore.options import RocksDBStore
from torchrec_recstore.store import ColdStore, open_cold_store

from ..processes import ForkedCommand, run_forked_command


def with_dead(root: Path) -> ColdStore:
    """Returns an open store, beside the directory of a killed process."""
    mine = open_cold_store(RocksDBStore(str(root)), name="mine", row_bytes=8)
    command = ForkedCommand(["-m", "tests.store.dying_store", "written", str(root)])
    assert command.wait(60) == -signal.SIGKILL, command.stderr
    return mine


def inspect(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    return result.exit_code, result.stdout


def test_inspect_lists_the_directories_and_a_command_that_removes_the_dead(
    tmp_path: Path,
) -> None:
    root = tmp_path / "cold rows"
    mine = with_dead(root)
    for path in (root, tmp_path):
        status, out = inspect(path, "--json")
        dead, alive = sorted(
            json.loads(out)["cold_stores"], key=lambda each: each["alive"]
        )
        assert (status, json.loads(out)["checkpoints"]) == (0, [])
        assert (dead["shard"], dead["pid"], alive["shard"], alive["pid"]) == (
            "written/0",
            None,
            "mine",
            os.getpid(),
        )
        assert min(dead["bytes"], alive["bytes"]) > 0
    status, out = inspect(root)
    assert status == 0
    assert f"process {os.getpid()} on host" in out
    command = out[out.index("rm -r ") :]
    assert shlex.split(command) == ["rm", "-r", dead["path"]]
    subprocess.run(shlex.split(command), check=True)
    assert [
        each["shard"] for each in json.loads(inspect(root, "--json")[1])["cold_stores"]
    ] == ["mine"]
    assert "rm -r" not in inspect(root)[1]
    mine.close()
    assert inspect(root)[0] == 2


def test_inspect_lists_the_cold_stores_in_the_folder_of_a_run(tmp_path: Path) -> None:
    save_checkpoint(nn.Linear(2, 2), tmp_path / "step-1")
    mine = open_cold_store(
        RocksDBStore(str(tmp_path / "cold")), name="mine", row_bytes=8
    )
    told = json.loads(inspect(tmp_path, "--json")[1])
    assert [each["path"] for each in told["checkpoints"]] == [str(tmp_path / "step-1")]
    assert [each["shard"] for each in told["cold_stores"]] == ["mine"]
    out = inspect(tmp_path)[1]
    assert "step-1" in out
    assert "mine" in out
    mine.close()


def test_doctor_names_the_directories_of_killed_processes(tmp_path: Path) -> None:
    assert (cold_stores(tmp_path).status, cold_stores(tmp_path).fix) == ("ok", "")
    mine = with_dead(tmp_path)
    finding = cold_stores(tmp_path)
    assert finding.status == "warning"
    assert f"{tmp_path}: 1 directories in use (" in finding.found
    assert f"by process {os.getpid()} on host " in finding.found
    assert "and 1 of processes that have ended (" in finding.found
    subprocess.run(shlex.split(finding.fix), check=True)
    assert cold_stores(tmp_path).status == "ok"
    mine.close()
    assert "0 directories in use" in cold_stores(tmp_path).found
    missing = cold_stores(tmp_path / "missing")
    assert (missing.status, missing.found) == (
        "problem",
        f"{tmp_path / 'missing'}: No such file or directory",
    )


def test_the_flag_of_the_doctor(tmp_path: Path) -> None:
    mine = with_dead(tmp_path)
    run = run_forked_command(
        [
            "-m",
            "torchrec_recstore.cli",
            "doctor",
            "--json",
            "--cold-store",
            str(tmp_path),
        ]
    )
    (told,) = (
        each
        for each in json.loads(run.stdout)["findings"]
        if each["name"] == "cold store"
    )
    assert (told["section"], told["status"]) == ("files", "warning")
    assert told["fix"].startswith(f"rm -r {tmp_path}/written")
    mine.close()


@pytest.mark.slow
def test_an_example_leaves_no_cold_rows(tmp_path: Path) -> None:
    flags = (
        "--max-rows",
        200,
        "--cold-store",
        tmp_path / "cold",
        "--dim",
        4,
        "--limit-rows",
        2000,
        "--batch-size",
        50,
    )
    run = run_forked_command(
        ["-m", "torchrec_recstore.cli", "train", "--no-log", *map(str, flags)]
    )
    assert run.returncode == 0, run.stderr
    assert os.listdir(tmp_path / "cold") == ["lock"]
