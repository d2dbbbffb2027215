"""Train TorchRec's DLRM on the Criteo click log or on generated rows.

    python examples/dlrm/train.py                                        # generated rows, RecStore tables
    python examples/dlrm/train.py --data train.txt --json result.json    # or train.txt.gz
    python examples/dlrm/train.py --data train.txt --backend fused       # stock TorchRec tables, hashed ids
    python examples/dlrm/train.py --max-rows 20000 --cold-store cold     # evicted rows go to the folder cold
    torchrun --nproc-per-node 2 examples/dlrm/train.py --sharding row_wise
    python examples/dlrm/train.py --servers 127.0.0.1:7700,127.0.0.1:7701     # the tables are on parameter servers
    torchrun --nproc-per-node 2 --max-restarts 3 examples/dlrm/train.py --checkpoint run --checkpoint-every 200 --resume

The last command writes checkpoints to the folder run. After a crash of one or all processes, the run resumes from the
newest checkpoint: torchrun restarts it, or you give the same command again. The number of processes and the sharding
may then differ.

During the training, tensorboard --logdir runs shows the curves of the run. They are in the folder
runs/dlrm-<date>-<time>. With --checkpoint run the folder is run/log, and a resumed run continues the curves. The folder
contains report.html after the training. For a run that was killed, examples/report.py writes the report.

The data is split by time: 80 % for training, 10 % for validation after each epoch, and 10 % for the test at the end.
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
from settings import Dtype, Settings

from torchrec_recstore.commands.output import errors_in_one_line

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

DATA, MODEL, BOUNDS, RUN, CHECKPOINTS = "Data", "Model", "Limits of each table", "Run", "Checkpoints"


@app.command()
def main(
    data: Annotated[
        Path | None,
        typer.Option(help="Criteo TSV file, plain or gzip. Default: generated rows.", rich_help_panel=DATA),
    ] = None,
    limit_rows: Annotated[
        int | None,
        typer.Option(min=1, help="Number of rows to read or to generate.", rich_help_panel=DATA),
    ] = None,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Skip bad lines and count them.", rich_help_panel=DATA)
    ] = False,
    backend: Annotated[
        Backend, typer.Option(help="recstore: dynamic tables. fused: stock TorchRec.", rich_help_panel=MODEL)
    ] = "recstore",
    dim: Annotated[int, typer.Option(min=1, help="Width of the embeddings.", rich_help_panel=MODEL)] = 16,
    dtype: Annotated[
        Dtype, typer.Option(help="Data type of the rows of RecStore tables.", rich_help_panel=MODEL)
    ] = "fp32",
    num_embeddings: Annotated[
        int,
        typer.Option(min=1, help="Rows of each fused table. Ids are taken modulo this number.", rich_help_panel=MODEL),
    ] = 100_000,
    optimizer: Annotated[
        Optimizer, typer.Option(help="Optimizer of the embeddings.", rich_help_panel=MODEL)
    ] = "rowwise_adagrad",
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate of the embeddings.", rich_help_panel=MODEL)] = 0.01,
    dense_lr: Annotated[
        float, typer.Option(min=0.0, help="Learning rate of the dense layers (Adam).", rich_help_panel=MODEL)
    ] = 0.001,
    lr_schedule: Annotated[
        LrSchedule, typer.Option(help="Schedule of both learning rates after the warm-up.", rich_help_panel=MODEL)
    ] = "constant",
    warmup_steps: Annotated[
        int, typer.Option(min=0, help="Number of steps in which both learning rates rise.", rich_help_panel=MODEL)
    ] = 0,
    max_rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of rows of each table in memory, over all ranks. It must be at least the number of "
            "distinct ids in a step.",
            rich_help_panel=BOUNDS,
        ),
    ] = None,
    eviction: Annotated[
        Eviction | None,
        typer.Option(
            help="Rows to evict when a table is full: the least recently used (lru, the default) or the least "
            "frequently used (lfu).",
            rich_help_panel=BOUNDS,
        ),
    ] = None,
    half_life_steps: Annotated[
        int | None, typer.Option(min=1, help="Half-life of the frequencies of lfu, in steps.", rich_help_panel=BOUNDS)
    ] = None,
    expire_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Delete rows that were not looked up for this many steps.", rich_help_panel=BOUNDS),
    ] = None,
    min_frequency: Annotated[
        int | None,
        typer.Option(min=1, max=255, help="Number of steps with an id before it gets a row.", rich_help_panel=BOUNDS),
    ] = None,
    cold_store: Annotated[
        str | None,
        typer.Option(
            metavar="URL-OR-PATH",
            help="Cold store for evicted rows: redis://..., or a folder for RocksDB.",
            rich_help_panel=BOUNDS,
        ),
    ] = None,
    servers: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,...",
            help="Parameter servers (recstore serve) that own the tables. Rows are read a batch ahead.",
            rich_help_panel=RUN,
        ),
    ] = None,
    staleness: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of updates that may be in progress while rows are read from servers.",
            rich_help_panel=RUN,
        ),
    ] = 1,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Number of samples of a step, over all ranks.", rich_help_panel=RUN)
    ] = 512,
    epochs: Annotated[
        int, typer.Option(min=1, help="Number of passes over the training part.", rich_help_panel=RUN)
    ] = 1,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the weights, the tables and the generated rows.", rich_help_panel=RUN)
    ] = 0,
    sharding: Annotated[
        Sharding, typer.Option(help="Sharding type of each table.", rich_help_panel=RUN)
    ] = "table_wise",
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write a checkpoint after each epoch, to DIR/step-000000123.",
            rich_help_panel=CHECKPOINTS,
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Also write a checkpoint every N steps.", rich_help_panel=CHECKPOINTS),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Resume from the newest checkpoint, if there is one.", rich_help_panel=CHECKPOINTS
        ),
    ] = False,
    keep: Annotated[
        int, typer.Option(min=1, metavar="N", help="Keep the newest N checkpoints.", rich_help_panel=CHECKPOINTS)
    ] = 3,
    log_dir: LogDir = None,
    no_log: NoLog = False,
    log_every: LogEvery = 50,
    json_out: JsonOut = None,
    read_only: Annotated[
        bool,
        typer.Option("--read-only", help="Only read the data, and print the rate of the reader.", rich_help_panel=RUN),
    ] = False,
) -> None:
    """Train TorchRec's DLRM on a Criteo click log that is split by time, and report test AUC, logloss and speed.

    \b
    Examples (the last one needs a checkout):
    recstore train --data train.txt --dim 64 --checkpoint run
    torchrun --nproc-per-node 2 --no-python recstore train --sharding row_wise
    python examples/dlrm/train.py --data train.txt

    Exit status: 0, or 2 with one line on stderr for invalid input.
    """  # noqa: D301  (typer keeps the lines after a backspace)
    settings = Settings(
        data=data,
        limit_rows=limit_rows,
        skip_bad_rows=skip_bad_rows,
        backend=backend,
        dim=dim,
        dtype=dtype,
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
        servers=servers,
        staleness=staleness,
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
    # Imported here, because the import of TorchRec takes seconds and --help does not need it.
    from trainer import read, train

    with errors_in_one_line():
        read(settings) if read_only else train(settings)


if __name__ == "__main__":
    run(app)
