"""What the commands on checkpoints share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchrec_recstore.commands.progress import progress

# torch takes seconds to import, which --help need not wait for: commands import what they need.
if TYPE_CHECKING:
    from torchrec_recstore.checkpoint.info import CheckpointInfo

Checkpoint = Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint's directory.", show_default=False)]


def verify_files(checkpoints: Sequence[CheckpointInfo]) -> None:
    """Reads every file and compares its checksum.

    Raises:
        CheckpointError: one is missing or damaged.
    """
    from torchrec_recstore.checkpoint.fold import check_files

    with progress("verifying", sum(info.bytes for info in checkpoints), "bytes") as advance:
        check_files(checkpoints, advance)


def rows_of(checkpoints: Sequence[CheckpointInfo]) -> int:
    """Rows of all tables of all of them."""
    return sum(table.rows for info in checkpoints for table in info.tables.values())
