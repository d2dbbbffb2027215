r"""Train TorchRec's DLRM on the Criteo click log or on generated rows.

    # generated rows, RecStore tables
    python examples/dlrm/train.py
    # the click log; train.txt.gz is also possible
    python examples/dlrm/train.py --data train.txt --json result.json
    python examples/dlrm/train.py --data train.txt --epochs 3 --reset-rows-each-epoch
    # stock TorchRec tables, hashed ids
    python examples/dlrm/train.py --data train.txt --backend fused
    # evicted rows go to the folder cold
    python examples/dlrm/train.py --max-rows 20000 --cold-store cold
    torchrun --nproc-per-node 2 examples/dlrm/train.py --sharding row_wise
    # the tables are on parameter servers
    python examples/dlrm/train.py --servers 127.0.0.1:7700,127.0.0.1:7701
    torchrun --nproc-per-node 2 --max-restarts 3 examples/dlrm/train.py \
        --checkpoint run --checkpoint-every 200 --resume

The last command writes checkpoints to the folder run. After a crash of one or all
processes, the run resumes from the newest checkpoint: torchrun restarts it, or you give
the same command again. The number of processes and the sharding may then differ. A run
that has ended goes on with more epochs: --checkpoint run --resume --epochs 2.

During the training, tensorboard --logdir runs shows the curves of the run. They are in
the folder runs/dlrm-<date>-<time>. With --checkpoint run the folder is run/log, and a
resumed run continues the curves. The folder contains report.html after the training.
For a run that was killed, examples/report.py writes the report.

The data is split by time: 80 % for training, 10 % for validation after each epoch, and
10 % for the test at the end.
"""

# Flags are read before the import of TorchRec, which takes seconds: E402.
# A flag is the field of a dataclass: RUF009.
# ruff: noqa: E402, RUF009

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.command import DataError, run
from common.settings import (
    DATA,
    MODEL,
    RUN,
    TableSettings,
    flag,
    settings_of_flags,
)

# ---- Configuration: each field is a flag ----


@dataclass(frozen=True, kw_only=True)
class Settings(TableSettings):
    """Train TorchRec's DLRM on a Criteo click log that is split by time, and report
    test AUC, logloss and speed.

    \b
    Examples (the last one needs a checkout):
    recstore train --data train.txt --dim 64 --checkpoint run
    torchrun --nproc-per-node 2 --no-python recstore train --sharding row_wise
    python examples/dlrm/train.py --data train.txt

    Exit status: 0, or 2 with one line on stderr for invalid input.
    """  # noqa: D301  (typer keeps the lines after a backspace)

    data: Path | None = flag(
        None, DATA, "Criteo TSV file, plain or gzip. Default: generated rows."
    )
    limit_rows: int | None = flag(
        None,
        DATA,
        "Number of rows to read or to generate.",
        min=1,
    )
    skip_bad_rows: bool = flag(
        False, DATA, "Skip bad lines and count them.", "--skip-bad-rows"
    )
    dtype: Literal["fp32", "fp16", "bf16", "int8"] = flag(
        "fp32", MODEL, "Data type of the rows of RecStore tables."
    )
    optimizer: Literal["sgd", "adagrad", "rowwise_adagrad"] = flag(
        "rowwise_adagrad", MODEL, "Optimizer of the embeddings."
    )
    lr: float = flag(
        0.01,
        MODEL,
        "Learning rate of the embeddings.",
        min=0.0,
    )
    dense_lr: float = flag(
        0.001,
        MODEL,
        "Learning rate of the dense layers (Adam).",
        min=0.0,
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = flag(
        "constant", MODEL, "Schedule of both learning rates after the warm-up."
    )
    warmup_steps: int = flag(
        0,
        MODEL,
        "Number of steps in which both learning rates rise.",
        min=0,
    )
    epochs: int = flag(
        1,
        RUN,
        "Number of passes over the training part.",
        min=1,
    )
    reset_rows_each_epoch: bool = flag(
        False,
        RUN,
        "Begin each epoch with new rows, and keep the dense layers. Without it, several"
        " epochs overfit the rows.",
        "--reset-rows-each-epoch",
    )
    amp: bool = flag(
        False,
        RUN,
        "Train the dense layers in bfloat16, by torch.autocast. Faster with AMX or"
        " AVX512-BF16 alone.",
        "--amp",
    )
    read_only: bool = flag(
        False,
        RUN,
        "Only read the data, and print the rate of the reader.",
        "--read-only",
    )

    # The data is compared by its content. The cold store may change, because a
    # checkpoint contains the cold rows.
    MAY_CHANGE: ClassVar[tuple[str, ...]] = (
        *TableSettings.MAY_CHANGE,
        "data",
        "limit_rows",
        "skip_bad_rows",
        "read_only",
        "backend",
        "num_embeddings",
        "sharding",
        "servers",
        "staleness",
        "token_file",
        "tls_ca",
        "tls_cert",
        "tls_key",
        "cold_store",
    )

    def check_group(self, world_size: int) -> None:
        """Checks all settings.

        Raises:
            DataError: A setting contradicts another setting, or does not fit the number
                of ranks.
        """
        self.check_tables(world_size)
        if self.backend == "fused":
            if self.dtype != "fp32":
                raise DataError("--dtype is for --backend recstore")
            if self.reset_rows_each_epoch:
                raise DataError("--reset-rows-each-epoch is for --backend recstore")
            if self.checkpoint:
                raise DataError(
                    "--checkpoint is for --backend recstore: save stock tables with"
                    " torch.distributed.checkpoint"
                )
        if self.servers is not None:
            if self.reset_rows_each_epoch:
                raise DataError(
                    "--reset-rows-each-epoch cannot be used with --servers, which own"
                    " the rows"
                )
            if self.checkpoint:
                raise DataError(
                    "--checkpoint cannot be used with --servers, which own the tables:"
                    " RecStoreClient.save saves them"
                )


settings = settings_of_flags(Settings) if __name__ == "__main__" else None

import torch
import torch.distributed as dist
from common.processes import process_group, progress_bar
from common.report import in_words, since
from common.run import Run, say
from common.schedule import lr_scheduler
from criteo import ID_NAMES, NUM_DENSE
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sources import (
    RowSource,
    batches_of,
    behind,
    open_on_all_ranks,
    read_only,
    splits,
    steps_in_epoch,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_recstore import (
    RecStoreConstraints,
    RecStorePlanner,
    RecStorePrefetchPipeline,
    RecStoreSharder,
    TableStats,
    reset_rows,
    table_stats,
)

CPU = torch.device("cpu")
EVALUATION_ROWS = 4096
LOSS_EVERY_STEPS = 20

# ---- Model and sharding ----


def _planner(settings: Settings, tables: list[str]) -> EmbeddingShardingPlanner:
    """Returns the planner of the tables, for the backend of the settings."""
    world_size = dist.get_world_size()
    topology = Topology(world_size=world_size, compute_device="cpu")
    rank_batch_size = settings.batch_size // world_size
    if settings.backend == "recstore":
        constraint = RecStoreConstraints(
            sharding_types=[settings.sharding],
            options=settings.options(),
        )
        return RecStorePlanner(
            topology,
            batch_size=rank_batch_size,
            constraints=dict.fromkeys(tables, constraint),
        )
    constraint = ParameterConstraints(
        sharding_types=[settings.sharding],
        compute_kernels=["fused"],
    )
    return EmbeddingShardingPlanner(
        topology,
        batch_size=rank_batch_size,
        constraints=dict.fromkeys(tables, constraint),
    )


def build(settings: Settings) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Builds a DLRM and shards its tables.

    Collective; the process group must be initialized.

    Returns:
        The sharded model, which takes a ``Batch`` and returns (loss, (loss, logits,
        labels)), and the optimizer of its tables and of its dense part. The embeddings
        are updated in the backward pass.
    """
    torch.manual_seed(settings.seed)
    tables = [
        EmbeddingBagConfig(
            name=f"t_{feature}",
            embedding_dim=settings.dim,
            num_embeddings=settings.declared_rows,
            feature_names=[feature],
            data_type=DataType[settings.dtype.upper()],
        )
        for feature in ID_NAMES
    ]
    dlrm = DLRM(
        embedding_bag_collection=EmbeddingBagCollection(
            tables=tables,
            device=torch.device("meta"),
        ),
        dense_in_features=NUM_DENSE,
        dense_arch_layer_sizes=[512, 256, settings.dim],
        over_arch_layer_sizes=[512, 512, 256, 1],
    )
    model = DLRMTrain(dlrm)
    optimizer = EmbOptimType[f"EXACT_{settings.optimizer.upper()}"]
    fused_params = {
        "optimizer": optimizer,
        "learning_rate": settings.lr,
        "eps": 1e-8,
    }
    if settings.backend == "recstore":
        sharders = [RecStoreSharder(fused_params=fused_params)]
    else:
        sharders = [EmbeddingBagCollectionSharder(fused_params=fused_params)]
    planner = _planner(settings, [table.name for table in tables])
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    # By default, DDP rearranges its buckets after the first step. This changes the
    # order in which the gradients of three or more ranks are summed, so a resumed run
    # would differ in the last bits.
    same_buckets = DefaultDataParallelWrapper(
        static_graph=False,
        find_unused_parameters=True,
    )
    sharded = DistributedModelParallel(
        model,
        plan=plan,
        sharders=sharders,
        device=CPU,
        data_parallel_wrapper=same_buckets,
    )
    # With Adagrad for the dense layers, DLRM loses up to 0.04 of its AUC for some
    # seeds, because the first steps make units of the dense layers inactive.
    dense_parameters = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    dense = KeyedOptimizerWrapper(
        dense_parameters, lambda params: torch.optim.Adam(params, lr=settings.dense_lr)
    )
    optimizers = [("tables", sharded.fused_optimizer), ("dense", dense)]
    return sharded, CombinedOptimizer(optimizers)


def stats_of(settings: Settings, model: nn.Module) -> Mapping[str, TableStats]:
    """Returns the statistics of each table over all ranks.

    Stock tables have only rows and bytes. Collective.
    """
    if settings.backend == "recstore":
        return table_stats(model)
    # FBGEMM on CPU stores float32 weights and, depending on the optimizer, a state of
    # the same shape, of one number for each row, or none.
    state_widths = {"sgd": 0, "adagrad": settings.dim, "rowwise_adagrad": 1}
    row_bytes = 4 * (settings.dim + state_widths[settings.optimizer])
    rows = settings.num_embeddings
    stats = TableStats(rows=rows, bytes=rows * row_bytes)
    return {f"t_{name}": stats for name in ID_NAMES}


# ---- Training steps and evaluation ----


@dataclass
class Progress:
    """The place of a run, and the loss of its epoch.

    All numbers but the loss are the same on every rank.
    """

    step: int = 0
    samples: int = 0  # over all ranks, as all numbers of samples
    epoch: int = 0  # counted from 0
    epoch_steps: int = 0  # also the place in the data
    epoch_samples: int = 0
    # the sum over this rank's samples
    loss_sum: Tensor = field(
        default_factory=lambda: torch.zeros((), dtype=torch.float64)
    )

    def count(self, loss: Tensor, samples: int) -> None:
        """Adds a step with the mean loss of this rank, () float32."""
        self.loss_sum += loss.detach() * samples
        self.step += 1
        self.samples += samples
        self.epoch_steps += 1
        self.epoch_samples += samples

    def next_epoch(self) -> Progress:
        """Returns the place at the beginning of the next epoch."""
        return Progress(self.step, self.samples, self.epoch + 1)

    def mean_loss(self) -> float:
        """Returns the mean loss of the epoch's samples over all ranks.

        It is NaN if there are no samples. Collective.
        """
        total = self.loss_sum.clone()
        dist.all_reduce(total)
        if not self.epoch_samples:
            return float("nan")
        return float(total) / (self.epoch_samples * dist.get_world_size())

    def state(self) -> dict[str, Any]:
        """Returns the place for a checkpoint, which is the same on every rank.

        Collective.
        """
        loss_sums = [
            torch.empty_like(self.loss_sum) for _ in range(dist.get_world_size())
        ]
        dist.all_gather(loss_sums, self.loss_sum)
        return vars(self) | {"loss_sum": torch.stack(loss_sums)}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Progress:
        """Returns the place of a checkpoint.

        If the number of ranks has changed, each rank takes the mean loss sum.
        """
        if not state:
            return cls()
        loss_sums: Tensor = state["loss_sum"]
        same_ranks = len(loss_sums) == dist.get_world_size()
        loss_sum = loss_sums[dist.get_rank()] if same_ranks else loss_sums.mean()
        return cls(**{**state, "loss_sum": loss_sum.clone()})


Trained = tuple[Tensor, Tensor, Tensor]
"""The loss, the logits and the labels of a step on this rank."""


def plain_steps(
    model: nn.Module,
    optimizer: CombinedOptimizer,
    batches: Iterator[Batch],
) -> Iterator[Trained]:
    """Trains on each batch. Collective."""
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        loss, (_, logits, labels) = model(batch)
        loss.backward()
        optimizer.step()
        yield loss, logits, labels


def prefetched_steps(
    model: nn.Module,
    optimizer: CombinedOptimizer,
    batches: Iterator[Batch],
) -> Iterator[Trained]:
    """Trains on each batch, while the rows of the next batch are read. Collective."""
    pipeline = RecStorePrefetchPipeline(model, optimizer, CPU)
    try:
        while True:
            try:
                trained = pipeline.progress(batches)
            except StopIteration:
                return
            yield trained
    finally:
        pipeline.detach()  # the evaluation calls the model itself


@torch.no_grad()
def evaluate(
    settings: Settings,
    source: RowSource,
    part: range,
    model: nn.Module,
    label: str,
) -> tuple[float | None, float | None]:
    """Returns the AUC and the logloss of a part of the data over all ranks. Collective.

    The AUC is None if only one label occurs. Both are None if there are no samples.
    """
    model.eval()
    auc = BinaryAUROC()
    logloss = MeanMetric()
    positives = MeanMetric()
    batch_rows = max(settings.batch_size, EVALUATION_ROWS)
    batches = batches_of(settings, source, part, batch_rows)
    bar = progress_bar(desc=label, unit=" samples", total=len(part), leave=False)
    with bar, closing(batches):
        for batch in batches:
            _, (loss, logits, labels) = model(batch)
            # In float64, because the float32 sigmoid of large logits is exactly 1,
            # which would make ties.
            auc.update(torch.sigmoid(logits.double()), labels)
            logloss.update(loss.double(), len(labels))
            positives.update(labels.double())
            bar.update(len(labels) * dist.get_world_size())
    if not positives.update_count:
        return None, None
    has_one_label = float(positives.compute()) in (0.0, 1.0)
    area = float(auc.compute())
    return None if has_one_label else area, float(logloss.compute())


# ---- The run ----


def train(settings: Settings) -> dict[str, Any]:
    """Trains, evaluates and reports. Collective; the process group must be initialized.

    Returns:
        The settings and the result of the run.

    Raises:
        DataError: The data or the checkpoints cannot be used, or the settings do not
            fit the group. It is raised on every rank.
    """
    settings.check_group(dist.get_world_size())
    with Run("dlrm", settings) as run:
        # The data, split by time.
        source = open_on_all_ranks(settings)
        training, validation, test = splits(source)
        total_steps = steps_in_epoch(settings, source, training) * settings.epochs
        if settings.warmup_steps > total_steps:
            raise DataError(
                f"--warmup-steps {settings.warmup_steps} is more than the run's"
                f" {total_steps:,} steps"
            )

        # The model, and the place in the run: the beginning, or that of the newest
        # checkpoint.
        model, optimizer = build(settings)
        progress = resume(run, settings, source, model, optimizer)
        resumed = None
        if run.resumed_from:
            resumed = (
                f"resumed at step {progress.step:,} of {total_steps:,} from"
                f" {run.resumed_from}"
            )
            say(resumed)
        scheduler = lr_scheduler(
            optimizer,
            settings.lr_schedule,
            settings.warmup_steps,
            total_steps,
            first_step=progress.step,
        )
        run.watch(
            model,
            {
                "embeddings": optimizer_of(optimizer, "tables"),
                "dense": optimizer_of(optimizer, "dense"),
            },
            total_steps=total_steps,
            step=progress.step,
            samples=progress.samples,
            about={"data": source.path},
            stats=lambda: stats_of(settings, model),
        )

        # The epochs. A checkpoint may lie at any step.
        first_samples = progress.samples
        seconds = 0.0
        stats = stats_of(settings, model)
        while True:
            label = f"epoch {progress.epoch + 1}/{settings.epochs}"
            part_label = f"{label}, resumed" if progress.epoch_steps else label
            begin = time.perf_counter()
            is_later_epoch = progress.epoch > 0 and progress.epoch_steps == 0
            if settings.reset_rows_each_epoch and is_later_epoch:
                reset_rows(model)
            train_epoch(
                run,
                settings,
                source,
                training,
                model,
                optimizer,
                scheduler,
                progress,
                label=part_label,
            )
            train_loss = progress.mean_loss()
            seconds += time.perf_counter() - begin

            val_auc, val_logloss = evaluate(
                settings, source, validation, model, "validation"
            )
            run.log({"AUC/validation": val_auc, "loss/validation": val_logloss})
            say(
                f"{label}: training loss {train_loss:.4f}, validation AUC"
                f" {number(val_auc)}"
            )
            if settings.limit_flags:
                earlier_stats = stats
                stats = stats_of(settings, model)
                epoch_stats = since(earlier_stats, stats)
                say(f"{part_label}: {in_words(epoch_stats, settings.limits)}")
            if progress.epoch + 1 == settings.epochs:
                break
            progress = progress.next_epoch()

        # The test, once.
        test_auc, test_logloss = evaluate(settings, source, test, model, "test")
        run.log({"AUC/test": test_auc, "loss/test": test_logloss})
        rate = (progress.samples - first_samples) / seconds
        result = {
            "resumed": resumed,
            "train_steps": progress.step,
            "train_samples": progress.samples,
            "skipped_rows": source.bad_rows,
            "train_samples_per_second": rate,
            "train_loss": train_loss,
            "val_auc": val_auc,
            "test_auc": test_auc,
            "test_logloss": test_logloss,
        }
        lines = {}
        if resumed:
            lines[resumed] = ""
        if settings.skip_bad_rows:
            lines["bad rows skipped"] = f"{source.bad_rows:,}"
        lines["training samples"] = f"{progress.samples:,}"
        lines["training samples/s"] = f"{rate:,.0f}"
        lines["test AUC"] = number(test_auc)
        lines["test logloss"] = number(test_logloss)
        return run.finish(result, lines)


def resume(
    run: Run,
    settings: Settings,
    source: RowSource,
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
) -> Progress:
    """Loads the newest checkpoint, if there is one, and returns its place.

    Collective.

    Raises:
        DataError: The checkpoint cannot be used, or the run has ended.
    """
    must_match = {"--data": source.fingerprint}
    # A schedule depends on the number of all steps, so that only a constant rate goes
    # on in more epochs.
    if settings.lr_schedule != "constant":
        must_match["--epochs"] = settings.epochs
    dense = optimizer_of(optimizer, "dense")
    progress = Progress.of(run.resume(model, dense, must_match))
    epoch = progress.epoch + 1
    if epoch > settings.epochs:
        raise DataError(
            f"{run.resumed_from} has trained in epoch {epoch}: --epochs must be at least"
            f" {epoch}"
        )
    return progress


def train_epoch(
    run: Run,
    settings: Settings,
    source: RowSource,
    training: range,
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    scheduler: LRScheduler,
    progress: Progress,
    label: str,
) -> None:
    """Trains from the place in the epoch to its end, and saves the checkpoints.

    Collective. The place is moved.
    """
    model.train()
    dense = optimizer_of(optimizer, "dense")
    trained_rows = progress.epoch_steps * settings.batch_size
    part = behind(source.bad_lines, training, trained_rows)
    batches = batches_of(settings, source, part, settings.batch_size, even=True)
    steps = prefetched_steps if settings.servers else plain_steps
    bar = progress_bar(
        desc=label,
        unit=" samples",
        total=len(training),
        initial=progress.epoch_samples,
    )
    # The cache would keep the weights of the first step. The evaluation is in float32,
    # because many logits are equal in bfloat16.
    amp = torch.autocast(
        "cpu", torch.bfloat16, enabled=settings.amp, cache_enabled=False
    )
    with amp, bar, closing(batches):
        for loss, logits, labels in steps(model, optimizer, run.timed(batches)):
            scheduler.step()
            samples = len(labels) * dist.get_world_size()
            progress.count(loss, samples)
            run.step(samples, loss, logits, labels)
            if progress.epoch_steps % LOSS_EVERY_STEPS == 1:
                bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
            bar.update(samples)
            every = settings.checkpoint_every
            if every is not None and progress.step % every == 0:
                run.save(model, dense, progress.step, progress.state())
        run.save(model, dense, progress.step, progress.state())


def optimizer_of(optimizer: CombinedOptimizer, part: str) -> Optimizer:
    """Returns the optimizer of a part of the model, "tables" or "dense"."""
    return dict(optimizer.optimizers)[part]


def number(value: float | None) -> str:
    """Formats a metric."""
    return "-" if value is None else f"{value:.4f}"


def main(settings: Settings) -> None:
    """Creates the process group and trains, or only reads the data."""
    if settings.read_only:
        read_only(settings)
        return
    with process_group():
        train(settings)


if __name__ == "__main__":
    run(lambda: main(settings))
