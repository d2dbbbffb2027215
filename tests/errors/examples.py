"""Errors of the example scripts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.errors.situations import situation

EXAMPLES = Path(__file__).parents[2] / "examples"


@situation("DataError", ".../train.txt: No such file or directory")
def no_criteo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.syspath_prepend(str(EXAMPLES / "dlrm"))
    from sources import open_source

    open_source(
        SimpleNamespace(
            data=tmp_path / "train.txt", skip_bad_rows=False, limit_rows=None
        )
    )


@situation(
    "DataError",
    ".../train.txt, line 1, column I1: expected an integer or nothing, found 'x'",
)
def bad_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A line that is not a row of the Criteo log.

    Cause: the log is damaged or has another format. A line has a label, 13 integers and
    26 hexadecimal ids, separated by tabs. The class is `BadRowError`, a subclass of
    `DataError`. If the number of columns is wrong, the message names no column. Fix:
    correct the line, or pass `--skip-bad-rows`, which skips and counts such lines.
    """
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.syspath_prepend(str(EXAMPLES / "dlrm"))
    from criteo import CriteoFile

    (tmp_path / "train.txt").write_bytes(b"0\tx" + b"\t" * 38)
    CriteoFile(tmp_path / "train.txt").scan()


@situation(
    "DataError",
    ".../run/step-000000004 has trained in epoch 2: --epochs must be at least 2",
)
def fewer_epochs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.syspath_prepend(str(EXAMPLES / "dlrm"))
    import train
    from common.processes import process_group

    for epochs in (2, 1):
        with process_group():
            checkpoints = {
                "checkpoint": tmp_path / "run",
                "resume": True,
                "no_log": True,
            }
            train.train(
                train.Settings(
                    limit_rows=200, dim=4, batch_size=80, epochs=epochs, **checkpoints
                )
            )
