"""What commands say of input that they cannot use: one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer

from torchrec_recstore import RecStoreClient, RocksDBStore, TableOptions
from torchrec_recstore.commands.output import errors_in_one_line
from torchrec_recstore.store import Table


def a_cold_store_in_a_file(folder: Path) -> None:
    (folder / "file").touch()
    Table(4, options=TableOptions(max_rows=10, cold_store=RocksDBStore(f"{folder}/file/cold")))


def no_server(folder: Path) -> None:
    RecStoreClient(["127.0.0.1:1"], timeout_s=0.1).init_data("t", (9, 4), torch.float32)


def too_much_memory(folder: Path) -> None:
    bytearray(2**60)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (a_cold_store_in_a_file, "error: cold store RocksDBStore('"),
        (no_server, "error: table 't' on server 127.0.0.1:1 cannot be reached"),
        (too_much_memory, "error: out of memory\n"),
    ],
)
def test_errors_that_are_no_values(
    body: Callable[[Path], None], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as end, errors_in_one_line():
        body(tmp_path)
    said = capsys.readouterr().err
    assert (end.value.exit_code, said.count("\n")) == (2, 1)
    assert said.startswith(says)
