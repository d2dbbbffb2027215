"""Train TorchRec's DLRM on the Criteo click log, or on synthetic rows like it.

    python examples/dlrm/train.py                                        # synthetic rows, RecStore tables
    python examples/dlrm/train.py --data train.txt --json result.json    # or train.txt.gz
    python examples/dlrm/train.py --data train.txt --backend fused       # stock TorchRec tables, hashed ids
    python examples/dlrm/train.py --max-rows 20000 --cold-store cold     # a table's other rows lie in the folder cold
    torchrun --nproc-per-node 2 examples/dlrm/train.py --sharding row_wise
    torchrun --nproc-per-node 2 --max-restarts 3 examples/dlrm/train.py --checkpoint run --checkpoint-every 200 --resume

The last one writes checkpoints to the folder run. After a crash, of one process or of all, it goes on from the newest:
by torchrun's restart, or by the same command given again, also with another number of processes or another sharding.

While it trains, tensorboard --logdir runs shows its curves, of the folder runs/dlrm-<date>-<time>. With --checkpoint
run it is run/log, where a restart goes on with them. At the end it has report.html as well; of a run that was killed,
examples/report.py makes that.

The log is split by time: 80 % to train on, 10 % to validate after each epoch, 10 % to test at the end.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.command import prepare_torch, run
from common.run_settings import (
    Backend,
    Bounds,
    Eviction,
    JsonOut,
    LogDir,
    LogEvery,
    LrSchedule,
    NoLog,
    Optimizer,
    Sharding,
)
from settings import Settings

from torchrec_recstore.commands.output import errors_in_one_line

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

DATA, MODEL, BOUNDS, RUN, CHECKPOINTS = "Data", "Model", "Bounds of every table", "Run", "Checkpoints"


@app.command()
def main(
    data: Annotated[
        Path | None,
        typer.Option(help="Criteo TSV, plain or gzip. Without it: generated rows.", rich_help_panel=DATA),
    ] = None,
    limit_rows: Annotated[
        int | None,
        typer.Option(min=1, help="Only the first N rows (also of generated ones).", rich_help_panel=DATA),
    ] = None,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Leave out bad lines and count them.", rich_help_panel=DATA)
    ] = False,
    backend: Annotated[
        Backend, typer.Option(help="recstore: dynamic tables. fused: stock TorchRec.", rich_help_panel=MODEL)
    ] = "recstore",
    dim: Annotated[int, typer.Option(min=1, help="Width of the embeddings.", rich_help_panel=MODEL)] = 16,
    num_embeddings: Annotated[
        int, typer.Option(min=1, help="Rows of every fused table; ids are taken modulo it.", rich_help_panel=MODEL)
    ] = 100_000,
    optimizer: Annotated[
        Optimizer, typer.Option(help="Optimizer of the embeddings.", rich_help_panel=MODEL)
    ] = "rowwise_adagrad",
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate of the embeddings.", rich_help_panel=MODEL)] = 0.01,
    dense_lr: Annotated[
        float, typer.Option(min=0.0, help="Learning rate of the dense layers (Adam).", rich_help_panel=MODEL)
    ] = 0.001,
    lr_schedule: Annotated[
        LrSchedule, typer.Option(help="Both learning rates after the warm-up.", rich_help_panel=MODEL)
    ] = "constant",
    warmup_steps: Annotated[
        int, typer.Option(min=0, help="Steps in which both learning rates rise.", rich_help_panel=MODEL)
    ] = 0,
    max_rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rows that each table keeps in memory, over all ranks; at least the distinct ids of a step.",
            rich_help_panel=BOUNDS,
        ),
    ] = None,
    eviction: Annotated[
        Eviction | None,
        typer.Option(
            help="Which rows leave when there are more: least recently (lru, the default) or least frequently used.",
            rich_help_panel=BOUNDS,
        ),
    ] = None,
    half_life_steps: Annotated[
        int | None, typer.Option(min=1, help="lfu halves all frequencies so often.", rich_help_panel=BOUNDS)
    ] = None,
    expire_steps: Annotated[
        int | None, typer.Option(min=1, help="Rows not looked up for so long leave.", rich_help_panel=BOUNDS)
    ] = None,
    min_frequency: Annotated[
        int | None,
        typer.Option(min=1, max=255, help="Steps that look an id up before it gets its row.", rich_help_panel=BOUNDS),
    ] = None,
    cold_store: Annotated[
        str | None,
        typer.Option(
            metavar="URL-OR-PATH",
            help="Where evicted rows go, to come back: redis://..., or a folder for RocksDB.",
            rich_help_panel=BOUNDS,
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Samples of a step, over all ranks.", rich_help_panel=RUN)
    ] = 512,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training part.", rich_help_panel=RUN)] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Fixes weights, tables and generator.", rich_help_panel=RUN)] = 0,
    sharding: Annotated[
        Sharding, typer.Option(help="How every table lies on the ranks.", rich_help_panel=RUN)
    ] = "table_wise",
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write a checkpoint at the end of each epoch, to DIR/step-000000123.",
            rich_help_panel=CHECKPOINTS,
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Also every N steps.", rich_help_panel=CHECKPOINTS)
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from the newest checkpoint, if any.", rich_help_panel=CHECKPOINTS),
    ] = False,
    keep: Annotated[
        int, typer.Option(min=1, metavar="N", help="The newest N checkpoints stay.", rich_help_panel=CHECKPOINTS)
    ] = 3,
    log_dir: LogDir = None,
    no_log: NoLog = False,
    log_every: LogEvery = 50,
    json_out: JsonOut = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Run the reader alone and print its rate.", rich_help_panel=RUN)
    ] = False,
) -> None:
    """Train TorchRec's DLRM on a Criteo click log, split by time, and report test AUC, logloss and speed.

    \b
    Examples, the last one in a checkout:
    recstore train --data train.txt --dim 64 --checkpoint run
    torchrun --nproc-per-node 2 --no-python recstore train --sharding row_wise
    python examples/dlrm/train.py --data train.txt

    Exit status: 0, or 2 with one line on stderr for what cannot be used.
    """  # noqa: D301  (typer keeps the lines after a backspace)
    settings = Settings(
        data=data,
        limit_rows=limit_rows,
        skip_bad_rows=skip_bad_rows,
        backend=backend,
        dim=dim,
        num_embeddings=num_embeddings,
        optimizer=optimizer,
        lr=lr,
        dense_lr=dense_lr,
        batch_size=batch_size,
        epochs=epochs,
        seed=seed,
        sharding=sharding,
        bounds=Bounds(
            max_rows=max_rows,
            eviction=eviction,
            half_life_steps=half_life_steps,
            expire_steps=expire_steps,
            min_frequency=min_frequency,
            cold_store=cold_store,
        ),
        lr_schedule=lr_schedule,
        warmup_steps=warmup_steps,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        resume=resume,
        keep=keep,
        json_out=json_out,
        log=not no_log,
        log_dir=log_dir,
        log_every=log_every,
    )
    prepare_torch()
    # Here and not above: TorchRec takes seconds to import, which --help need not wait for.
    from trainer import read, train

    with errors_in_one_line():
        read(settings) if read_only else train(settings)


if __name__ == "__main__":
    run(app)
