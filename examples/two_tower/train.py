"""Train a two-tower retrieval model on MovieLens-100k and report recall@10.

    python examples/two_tower/train.py --data ml-100k                    # RecStore tables, raw ids
    python examples/two_tower/train.py --data ml-100k --backend fused    # stock TorchRec tables, hashed ids
    torchrun --nproc-per-node 2 examples/two_tower/train.py --data ml-100k --sharding row_wise

The folder contains ml-100k.inter, ml-100k.user and ml-100k.item of RecBole, plain or .gz. The last interaction of each
user is used for the test. Curves and report.html are written to runs/two_tower-<date>-<time>.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.command import prepare_torch, run
from common.run_settings import Backend, JsonOut, LogDir, LogEvery, NoLog, Sharding
from two_tower.settings import Settings

from torchrec_recstore.commands.output import errors_in_one_line

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    data: Annotated[Path, typer.Option(help="Folder with ml-100k.inter, .user and .item, plain or .gz.")],
    backend: Annotated[
        Backend, typer.Option(help="recstore: dynamic tables, raw ids. fused: stock TorchRec.")
    ] = "recstore",
    dim: Annotated[int, typer.Option(min=1, help="Width of the embeddings and of the towers' vectors.")] = 32,
    num_embeddings: Annotated[
        int, typer.Option(min=1, help="Rows of each fused table. Ids are taken modulo this number.")
    ] = 10_000,
    batch_size: Annotated[int, typer.Option(min=2, help="Number of interactions of a step, over all ranks.")] = 512,
    epochs: Annotated[int, typer.Option(min=1, help="Number of passes over the training interactions.")] = 10,
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate of the embeddings (row-wise Adagrad).")] = 0.05,
    dense_lr: Annotated[float, typer.Option(min=0.0, help="Learning rate of the towers' layers (Adam).")] = 0.001,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the weights, the tables and the order of interactions.")
    ] = 0,
    sharding: Annotated[Sharding, typer.Option(help="Sharding type of each table.")] = "table_wise",
    log_dir: LogDir = None,
    no_log: NoLog = False,
    log_every: LogEvery = 50,
    json_out: JsonOut = None,
) -> None:
    """Train a two-tower model on MovieLens-100k and report recall@10 over all items."""
    prepare_torch()
    # Imported here, because the import of TorchRec takes seconds and --help does not need it.
    from two_tower.retrieval import train

    with errors_in_one_line():
        train(
            Settings(
                data=data,
                backend=backend,
                dim=dim,
                num_embeddings=num_embeddings,
                batch_size=batch_size,
                epochs=epochs,
                lr=lr,
                dense_lr=dense_lr,
                seed=seed,
                sharding=sharding,
                json_out=json_out,
                log=not no_log,
                log_dir=log_dir,
                log_every=log_every,
            )
        )


if __name__ == "__main__":
    run(app)
