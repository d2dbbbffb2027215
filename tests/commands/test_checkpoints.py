"""``recstore inspect``, ``diff`` and ``compact``, on checkpoints of a model at one
rank.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchrec.distributed import DistributedModelParallel
from typer.testing import CliRunner, Result

from tests.checkpoint import models
from torchrec_recstore import Table, save_checkpoint
from torchrec_recstore.checkpoint import fold
from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.checkpoint.info import CheckpointInfo, read_info, write_metadata
from torchrec_recstore.cli import app


def recstore(*arguments: object) -> Result:
    return CliRunner().invoke(
        app, [str(argument) for argument in arguments], catch_exceptions=False
    )


def user_table(model: DistributedModelParallel) -> Table:
    table: Table = model.module.sparse.recstore_state.shards["user"][0].table
    return table


@pytest.fixture
def chain(one_rank: None, tmp_path: Path) -> tuple[DistributedModelParallel, Path]:
    """A model, and the directory of its checkpoints "full" and "delta".

    Three ids of "user" left between them.
    """
    model = models.recstore()
    models.train(model)
    save_checkpoint(
        model,
        tmp_path / "full",
        training_state={"epoch": 1, "optimizer": {0: torch.ones(3)}},
    )
    models.train(model, steps=3, distinct=60)
    user_table(model).remove(user_table(model).ids()[:3])
    save_checkpoint(
        model,
        tmp_path / "delta",
        delta_of=tmp_path / "full",
        training_state={"epoch": 2},
    )
    return model, tmp_path


def test_inspect(chain: tuple[DistributedModelParallel, Path]) -> None:
    model, path = chain
    shown = recstore("inspect", path / "delta")
    assert shown.exit_code == 0
    rows = len(user_table(model))
    for expected in (
        f"delta of        {path}/full",
        "step            8",
        "training state  epoch",
        "10 files good",
    ):
        assert expected in shown.stdout
    assert any(
        line.split()[1:4:2] == ["user", f"{rows}"]
        for line in shown.stdout.splitlines()
        if "user" in line
    )
    told = json.loads(
        recstore("inspect", path / "delta", "--json", "--no-verify").stdout
    )
    assert told["tables"]["user"]["rows"] == rows
    assert 0 < told["tables"]["user"]["rows_here"] < rows
    assert told["chain"] == [f"{path}/full", f"{path}/delta"]
    assert told["dense"] == ["over.bias", "over.weight"]
    assert not told["verified"]
    assert told["nonfinite_rows"] is None
    sizes = [
        file.stat().st_size
        for file in (path / "delta").iterdir()
        if file.name != "metadata.json"
    ]
    assert told["bytes"] == sum(sizes)


def test_inspect_counts_rows_that_are_not_finite(
    one_rank: None, tmp_path: Path
) -> None:
    model = models.recstore()
    models.train(model)
    table = user_table(model)
    ids = table.ids()[:3]
    rows = table.lookup(ids)
    bad = rows.clone()
    bad[0, 1], bad[2, 0] = math.nan, -math.inf
    table.insert(ids, bad)
    save_checkpoint(model, tmp_path / "saved")
    assert (
        "not finite      rows with NaN or infinity: 2 of user\n"
        in recstore("inspect", tmp_path / "saved").stdout
    )
    told = json.loads(recstore("inspect", tmp_path / "saved", "--json").stdout)
    assert {name: count for name, count in told["nonfinite_rows"].items() if count} == {
        "user": 2
    }
    table.insert(ids, rows)
    save_checkpoint(model, tmp_path / "delta", delta_of=tmp_path / "saved")
    assert "not finite" not in recstore("inspect", tmp_path / "delta").stdout


def as_dicts(table: Table) -> dict[int, dict[str, Tensor]]:
    ids = table.ids()
    rows = table.read_rows(ids)
    return {
        one: {key: value[i] for key, value in rows.items()}
        for i, one in enumerate(ids.tolist())
    }


@pytest.mark.parametrize("window", [0, 1 << 20])
def test_diff(
    chain: tuple[DistributedModelParallel, Path],
    window: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compares the output for a delta and a full checkpoint with the rows of the
    tables.
    """
    monkeypatch.setattr(fold, "_WINDOW_BYTES", window)
    monkeypatch.setattr(fold, "_LEAST_ROWS", 3)
    model, path = chain
    before = as_dicts(user_table(model))
    models.train(model, steps=2, distinct=80)
    user_table(model).remove(user_table(model).ids()[-2:])
    save_checkpoint(model, path / "new")
    after = as_dicts(user_table(model))
    shown = recstore("diff", path / "delta", path / "new", "--json")
    assert shown.exit_code == 1
    told = json.loads(shown.stdout)
    both = before.keys() & after.keys()
    assert told["tables"]["user"] == {
        "both": len(both),
        "added": len(after.keys() - before.keys()),
        "gone": len(before.keys() - after.keys()),
        "changed": sum(
            any(not torch.equal(before[i][k], after[i][k]) for k in before[i])
            for i in both
        ),
        "largest": {
            key: max(
                float((before[i][key].double() - after[i][key].double()).abs().max())
                for i in both
            )
            for key in ("weight", "sum")
        },
        "facts": {"steps": [8, 10], "optimizer_steps": [8, 10]},
    }
    assert (
        told["dense"]["both"],
        told["dense"]["changed"],
        told["training_state_differs"],
    ) == (2, 0, True)
    assert (
        "steps 8 -> 10 (all tables)"
        in recstore("diff", path / "delta", path / "new").stdout
    )
    assert recstore("diff", path / "delta", path / "delta").exit_code == 0


def test_compact(chain: tuple[DistributedModelParallel, Path]) -> None:
    _, path = chain
    assert recstore("compact", path / "delta", path / "one").exit_code == 0
    assert read_info(path / "one").delta_of is None
    shown = recstore("diff", path / "delta", path / "one")
    assert shown.exit_code == 0
    assert shown.stdout.endswith("equal\n")
    again = recstore("compact", path / "delta", path / "one")
    assert (again.exit_code, again.stderr) == (
        2,
        f"error: {path}/one exists already: name a path that does not\n",
    )
    with Destination(path / "two"):
        refused = recstore("compact", path / "delta", path / "two")
    assert refused.exit_code == 2
    assert refused.stderr.startswith(
        f"error: {path}/two cannot be written: process {os.getpid()} on host "
    )
    assert refused.stderr.count("\n") == 1


def test_diff_of_dense_parts_and_training_states(
    chain: tuple[DistributedModelParallel, Path],
) -> None:
    model, path = chain
    with torch.no_grad():
        model.module.over.bias += 0.5
        model.module.over.weight[0, 0] = torch.nan
    save_checkpoint(model, path / "new", training_state={"epoch": 2})
    told = json.loads(recstore("diff", path / "delta", path / "new", "--json").stdout)
    assert told["dense"] == {
        "both": 2,
        "added": 0,
        "gone": 0,
        "changed": 2,
        "largest": {"weight": None},
        "facts": {},
    }
    assert not told["training_state_differs"]
    assert told["tables"]["user"]["changed"] == 0
    assert " nan " in recstore("diff", path / "delta", path / "new").stdout


def changed_metadata(path: Path, change: Callable[[CheckpointInfo], object]) -> None:
    info = read_info(path)
    change(info)
    write_metadata(path, info, info.training_state)


def test_tables_of_one_checkpoint_alone_and_of_another_dim(
    chain: tuple[DistributedModelParallel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = chain
    rows = len(user_table(model))
    save_checkpoint(model, path / "new", training_state={"epoch": 2})

    def without_user(info: CheckpointInfo) -> None:
        table = info.tables.pop("user")  # type: ignore[attr-defined]
        for part in table.parts:
            info.files.pop(part.file)  # type: ignore[attr-defined]

    changed_metadata(path / "new", without_user)
    for order, expected in (
        (("delta", "new"), (0, rows)),
        (("new", "delta"), (rows, 0)),
    ):
        user = json.loads(
            recstore("diff", *(path / name for name in order), "--json").stdout
        )["tables"]["user"]
        assert (user["added"], user["gone"]) == expected
    monkeypatch.setattr(models, "DIM", 4)
    save_checkpoint(models.recstore(), path / "narrow")
    refused = recstore("diff", path / "delta", path / "narrow")
    assert refused.exit_code == 2
    assert (
        refused.stderr
        == f"error: table 'item' is of dim 8 in {path}/delta and of dim 4 in"
        f" {path}/narrow\n"
    )


def test_bad_input_in_one_line(chain: tuple[DistributedModelParallel, Path]) -> None:
    _, path = chain

    def refuses(*arguments: object) -> str:
        result = recstore(*arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")
        assert (result.stdout, result.stderr.count("\n")) == ("", 1)
        return result.stderr

    assert "nowhere: no such directory" in refuses("inspect", path / "nowhere")
    (path / "empty").mkdir()
    assert "it has no metadata.json" in refuses("inspect", path / "empty")
    (part,) = (path / "delta").glob("item-*")
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for command in (
        ["inspect", path / "delta"],
        ["diff", path / "full", path / "delta"],
    ):
        assert f"{part} is damaged: its checksum does not fit" in refuses(*command)
    part.unlink()
    assert f"{part} is missing" in refuses("compact", path / "delta", path / "one")
    assert recstore("inspect", path / "delta", "--no-verify").exit_code == 0
    metadata = path / "full" / "metadata.json"
    text = metadata.read_text()
    metadata.write_text(text.replace('"version": 1', '"version": 2'))
    assert "version 2" in refuses("diff", path / "full", path / "full")
    metadata.write_text(text.replace('"rows": ', '"rows": 1', 1))
    assert f"{metadata} is damaged: its checksum does not fit" in refuses(
        "inspect", path / "full"
    )
    (path / "full").rename(path / "moved")
    for command in (
        ["inspect", path / "delta"],
        ["compact", path / "delta", path / "one"],
    ):
        assert f"{path}/delta is a delta of {path}/full, which is not there" in refuses(
            *command
        )
    assert not (path / "one").exists()


def test_help_imports_neither_torch_nor_torchrec() -> None:
    code = (
        "import sys; from torchrec_recstore.cli import app; app(['--help'],"
        " standalone_mode=False)\nprint([name for name in ('torch', 'torchrec') if name"
        " in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert run.stdout.endswith("[]\n")
    assert all(command in run.stdout for command in ("inspect", "diff", "compact"))


@pytest.mark.slow
def test_commands_do_without_torchrec(
    chain: tuple[DistributedModelParallel, Path],
) -> None:
    code = (
        "import sys; sys.modules['torchrec'] = None\n"
        "from torchrec_recstore.cli import app\n"
        "for command in ('inspect delta', 'diff full delta', 'compact delta one'):\n"
        "    print('status', app(command.split(), standalone_mode=False))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=chain[1],
        capture_output=True,
        text=True,
        check=True,
    )
    statuses = [line for line in run.stdout.splitlines() if line.startswith("status")]
    assert (statuses, run.stderr) == (["status None", "status 1", "status None"], "")
