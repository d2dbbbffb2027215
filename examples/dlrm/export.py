"""Export a DLRM that was trained by ``train.py`` to a TorchScript file, which runs without this project.

    python examples/dlrm/train.py --data train.txt --checkpoint run
    python examples/dlrm/export.py --checkpoint run --out dlrm.pt                       # int8 rows
    python examples/dlrm/export.py --checkpoint run --out dlrm.pt --check train.txt     # compares the test AUC

The ``forward(dense, ids)`` of the file takes dense features (B, 13) float32 and ids (B, 26) int64, and returns logits
(B,). docs/serving.md describes how to serve the file, in Python with fbgemm_gpu or in C++.
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
        Path, typer.Option(metavar="DIR", help="A checkpoint, or a folder of checkpoints. The newest one is used.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")],
    dtype: Annotated[
        Literal["int8", "int4", "fp16", "float32"], typer.Option(help="Data type of the embedding rows.")
    ] = "int8",
    min_frequency: Annotated[
        int, typer.Option(min=0, help="Omit rows that were looked up in fewer training steps.")
    ] = 0,
    top_rows: Annotated[
        int | None, typer.Option(min=1, help="Export only this many rows of each table, the most frequent ones.")
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Compare the test AUC of the trained and the exported model on the data of the run: "
            "the file, or 'generated'.",
        ),
    ] = None,
    limit_rows: Annotated[int | None, typer.Option(min=1, help="The value of --limit-rows of the run.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the result as JSON.")] = None,
) -> None:
    """Export a trained DLRM from a checkpoint to a TorchScript file, and compare the test AUC."""
    prepare_torch()
    # Imported here, because the import of TorchRec takes seconds and --help does not need it.
    from exporter import Export, export

    with errors_in_one_line():
        export(Export(checkpoint, out, dtype, min_frequency, top_rows, check, limit_rows, json_out))


if __name__ == "__main__":
    run(app)
