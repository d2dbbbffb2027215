"""Tests of ``recstore train``, which runs examples/dlrm/train.py with the flags of that
script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages import PYTHON_PATH
from tests.processes import run_forked_command
from torchrec_recstore.commands.scripts import how_to_install

ROOT = Path(__file__).parents[2]
RECSTORE = [sys.executable, "-m", "torchrec_recstore.cli"]


def run(
    command: list[str], folder: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": PYTHON_PATH,
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_help_is_the_script_s(tmp_path: Path) -> None:
    code = (
        "import os, sys; sys.argv = ['recstore', 'train', '--help']; leave ="
        " os._exit\ndef told(status):\n    print([name for name in ('torch',"
        " 'torchrec') if name in sys.modules], flush=True)\n    leave(status)\nos._exit"
        " = told\nfrom torchrec_recstore.cli import main; main()"
    )
    shown = run([sys.executable, "-c", code], tmp_path, COLUMNS="80")
    assert shown.returncode == 0
    assert "Usage: recstore train [OPTIONS]" in shown.stdout
    assert all(
        flag in shown.stdout for flag in ("--data", "--max-rows", "--checkpoint-every")
    )
    lines = [line.strip() for line in shown.stdout.splitlines()]
    assert "recstore train --data train.txt --dim 64 --checkpoint run" in lines
    assert (
        "torchrun --nproc-per-node 2 --no-python recstore train --sharding row_wise"
        in lines
    )
    assert "\\b" not in shown.stdout
    assert "Exit status: 0, or 2 with one line on stderr" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert shown.stdout.endswith("[]\n")


def test_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [
        "--limit-rows",
        "3000",
        "--dim",
        "8",
        "--batch-size",
        "256",
        "--json",
        "result.json",
    ]
    monkeypatch.chdir(tmp_path)
    done = run_forked_command(
        ["-m", "torchrec_recstore.cli", "train", *flags],
        {**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert 0 < result["test_auc"] < 1
    assert "test AUC" in done.stdout


@pytest.mark.slow
def test_bad_flags_and_missing_packages_in_one_line(tmp_path: Path) -> None:
    bad = run([*RECSTORE, "train", "--dim", "0"], tmp_path)
    assert bad.returncode == 2
    assert bad.stderr.startswith("error: Invalid value for '--dim': ")
    assert bad.stderr.endswith(": see recstore train --help\n")
    assert bad.stderr.count("\n") == 1
    code = (
        "import sys; sys.modules['torchrec'] = None\nfrom torchrec_recstore.cli import"
        " main; main()"
    )
    missing = run(
        [sys.executable, "-c", code, "train", "--limit-rows", "3000"], tmp_path
    )
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: torchrec")
    assert missing.stderr.count("\n") == 1
    assert "pip install --no-deps torchrec==1.8.0" in missing.stderr
    assert (
        how_to_install("rocksdict.options")
        == "pip install 'path/to/torchrec_recstore[rocksdb]'"
    )
    assert (
        how_to_install("matplotlib.figure")
        == "pip install 'path/to/torchrec_recstore[examples]'"
    )


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    recstore = Path(sys.executable).with_name("recstore")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--no-python",
    ]
    flags = [
        "--limit-rows",
        "3000",
        "--dim",
        "8",
        "--batch-size",
        "256",
        "--sharding",
        "row_wise",
    ]
    done = run([*torchrun, str(recstore), "train", *flags], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test AUC") == 1
