"""Export the DLRM that ``train.py`` has trained: one file of TorchScript that needs nothing of this project to run.

    python examples/dlrm/train.py --data train.txt --checkpoint run
    python examples/dlrm/export.py --checkpoint run --out dlrm.pt                       # int8 rows
    python examples/dlrm/export.py --checkpoint run --out dlrm.pt --check train.txt     # and the test AUC of both

The file's ``forward(dense, ids)`` takes dense features (B, 13) float32 and ids (B, 26) int64, and gives logits (B,). It
is served as docs/serving.md says, in Python with fbgemm_gpu or in C++.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.command import prepare_torch, run

from torchrec_recstore.commands.output import errors_in_one_line

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    checkpoint: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of a run's checkpoints, of which the newest is taken, or one.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The exported model.")],
    dtype: Annotated[
        Literal["int8", "int4", "fp16", "float32"], typer.Option(help="Data type of the embedding rows.")
    ] = "int8",
    min_frequency: Annotated[
        int, typer.Option(min=0, help="Leave out rows that fewer training steps have looked up.")
    ] = 0,
    top_rows: Annotated[
        int | None, typer.Option(min=1, help="Keep this many rows of each table, the most frequent ones.")
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Test AUC of the trained and the exported model on the run's data: its file, or 'generated'.",
        ),
    ] = None,
    limit_rows: Annotated[
        int | None, typer.Option(min=1, help="As the run had it: only the first N rows of the data.")
    ] = None,
    json_out: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the result as JSON.")] = None,
) -> None:
    """Export a trained DLRM from its checkpoint to one scripted file, and compare its test AUC."""
    prepare_torch()
    # Here and not above: TorchRec takes seconds to import, which --help need not wait for.
    from exporter import Export, export

    with errors_in_one_line():
        export(Export(checkpoint, out, dtype, min_frequency, top_rows, check, limit_rows, json_out))


if __name__ == "__main__":
    run(app)
