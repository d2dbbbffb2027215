"""Measures checkpoints of a large table, and training steps during a save.

    python benchmarks/checkpoint.py [--rows 15000000] [--folder .]

The model is a DLRM with one table of dim 64 for 26 features, trained with row-wise
Adagrad. Prints JSON rows:

- ``checkpoint``: The bytes per second of a save and a load, divided by those of plain
  files of the same sizes. Plain files are written and synced, or read from a cold
  cache. The runs alternate, and medians are reported. ``load_into_touched_memory`` is a
  load into a table whose memory was used before. The memory besides the tables is the
  peak of this process's anonymous memory.
- ``delta``: The time and the size of a delta after a part of the rows has changed,
  divided by those of a full save.
- ``async_save``: The time of a training step during a save, divided by the time of a
  step without a save.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from measure import anonymous_bytes, clock, emit, forget
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.models.dlrm import DLRM

from torchrec_recstore import (
    CheckpointInfo,
    RecStoreSharder,
    Table,
    async_save,
    load_checkpoint,
    save_checkpoint,
)

DIM = 64
FEATURES = 26
BATCH = 2048
BLOCK = 16 << 20
ROUNDS = 3
NAMES = [f"f{i}" for i in range(FEATURES)]
TIMED = (
    "save",
    "write",
    "load",
    "read",
    "load_touched",
    "touch",
)


def build() -> DistributedModelParallel:
    """Builds a DLRM with one RecStore table."""
    torch.manual_seed(0)
    config = EmbeddingBagConfig(
        name="t",
        embedding_dim=DIM,
        num_embeddings=2**40,
        feature_names=NAMES,
    )
    dlrm = DLRM(
        embedding_bag_collection=EmbeddingBagCollection(
            tables=[config],
            device=torch.device("meta"),
        ),
        dense_in_features=13,
        dense_arch_layer_sizes=[512, 256, DIM],
        over_arch_layer_sizes=[512, 512, 256, 1],
    )
    sharder = RecStoreSharder(
        fused_params={
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": 0.01,
        }
    )
    return DistributedModelParallel(
        dlrm,
        sharders=[sharder],
        device=torch.device("cpu"),
    )


def table_of(model: DistributedModelParallel) -> Table:
    """Returns the only table of a model."""
    collection = model.module.sparse_arch.embedding_bag_collection
    (table,) = collection.recstore_tables()
    return table


def id_of(numbers: torch.Tensor) -> torch.Tensor:
    """Returns distinct ids without a pattern.

    They are the numbers times an odd multiplier, modulo 2**64.
    """
    return numbers * -7046029254386353131


def fill(table: Table, rows: int) -> None:
    """Fills a table with rows whose weights differ from their initial values."""
    part_rows = 1 << 18
    for begin in range(0, rows, part_rows):
        end = min(begin + part_rows, rows)
        ids = id_of(torch.arange(begin, end))
        table.update(ids, torch.randn(len(ids), DIM))


@contextmanager
def peak_memory(interval: float = 0.002) -> Iterator[list[int]]:
    """Measures the peak of the anonymous memory in the body.

    The memory at its beginning is subtracted.

    Args:
        interval: The time between samples in seconds. Each sample slows the measured
            work down. Default: 0.002.

    Yields:
        A list. Its only entry is the peak in bytes.
    """
    first_bytes = anonymous_bytes()
    peak = [0]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(interval):
            peak[0] = max(peak[0], anonymous_bytes() - first_bytes)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def timed(work: Callable[[], Any]) -> float:
    """Returns the time of ``work`` in seconds."""
    begin = clock()
    work()
    return clock() - begin


def write_plain(folder: Path, sizes: list[int]) -> None:
    """Writes and syncs files of the given sizes, one after another."""
    block = os.urandom(BLOCK)
    folder.mkdir()
    for number, size in enumerate(sizes):
        path = folder / str(number)
        with path.open("wb", buffering=0) as file:
            for begin in range(0, size, BLOCK):
                part_bytes = min(BLOCK, size - begin)
                file.write(block[:part_bytes])
            os.fsync(file.fileno())


def read_plain(folder: Path) -> None:
    """Reads all files of a folder into the same memory, one after another."""
    block = bytearray(BLOCK)
    for file in sorted(folder.iterdir()):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(block):
                pass


def full(model: DistributedModelParallel, folder: Path) -> CheckpointInfo:
    """Alternately saves and loads the model and plain files of the same sizes.

    Leaves a checkpoint at ``full``.
    """
    seconds: dict[str, list[float]] = {name: [] for name in TIMED}
    memory: dict[str, list[int]] = {"save": [], "load": []}
    checkpoint = folder / "full"
    plain = folder / "plain"
    info: CheckpointInfo | None = None
    for _ in range(ROUNDS):
        shutil.rmtree(checkpoint, ignore_errors=True)
        shutil.rmtree(plain, ignore_errors=True)

        with peak_memory() as peak:
            begin = clock()
            info = save_checkpoint(model, checkpoint)
            seconds["save"].append(clock() - begin)
        memory["save"].append(peak[0])

        sizes = [file.bytes for file in info.files.values()]
        begin = clock()
        write_plain(plain, sizes)
        seconds["write"].append(clock() - begin)

        forget(plain)
        read_s = timed(lambda: read_plain(plain))
        seconds["read"].append(read_s)

        touched_bytes = info.bytes * 3 // 2
        load(
            checkpoint,
            touched_bytes,
            seconds,
            memory["load"],
        )
    assert info is not None
    emit(
        {
            "benchmark": "checkpoint",
            "rows": len(table_of(model)),
            "bytes": info.bytes,
            **figures_of(info.bytes, seconds, memory),
        }
    )
    return info


def figures_of(
    checkpoint_bytes: int,
    seconds: dict[str, list[float]],
    memory: dict[str, list[int]],
) -> dict[str, Any]:
    """Returns the speeds of all parts, their ratios, and the memory."""
    figures: dict[str, Any] = {}
    rates = {}
    for key in ("save", "write", "load", "read", "load_touched"):
        median_s = statistics.median(seconds[key])
        rates[key] = checkpoint_bytes / median_s / 1e9
        figures[f"{key}_gb_per_second"] = round(rates[key], 3)

    touch_rates = []
    for touch_s in seconds["touch"]:
        rate = checkpoint_bytes * 1.5 / touch_s / 1e9
        touch_rates.append(round(rate, 2))
    figures["first_touch_gb_per_second"] = touch_rates

    save_over_disk = rates["save"] / rates["write"]
    load_over_disk = rates["load"] / rates["read"]
    touched_over_disk = rates["load_touched"] / rates["read"]
    figures["save_over_disk"] = round(save_over_disk, 3)
    figures["load_over_disk"] = round(load_over_disk, 3)
    figures["load_into_touched_memory_over_disk"] = round(touched_over_disk, 3)
    for key in ("save", "load"):
        peak_mb = max(memory[key]) / 1e6
        figures[f"{key}_mb_beside_table"] = round(peak_mb)
    return figures


def touch(size: int) -> None:
    """Touches memory and frees it.

    The host of a virtual machine has then allocated it.
    """
    torch.empty(size, dtype=torch.uint8).fill_(1)


def load(
    path: Path,
    size: int,
    seconds: dict[str, list[float]],
    memory: list[int],
) -> None:
    """Loads into new models.

    One load is into fresh memory, and one into memory that was touched before.
    """
    for key in ("load", "load_touched"):
        if key == "load_touched":
            touch_s = timed(lambda: touch(size))
            seconds["touch"].append(touch_s)
        forget(path)
        model = build()
        with peak_memory() as peak:
            load_s = timed(lambda: load_checkpoint(model, path))  # noqa: B023
        seconds[key].append(load_s)
        table = table_of(model)
        memory.append(peak[0] - table.stats().bytes)
        table.close()  # reference cycles keep the model itself alive


def deltas(
    model: DistributedModelParallel,
    folder: Path,
    base: CheckpointInfo,
) -> None:
    """Measures deltas after a growing part of the rows has changed."""
    table = table_of(model)
    rows = len(table)
    full_seconds = timed(lambda: save_checkpoint(model, folder / "again"))
    shutil.rmtree(folder / "again")
    for share in (0.0001, 0.001, 0.01, 0.1):
        changed_rows = int(rows * share)
        numbers = torch.randperm(rows)[:changed_rows]
        ids = id_of(numbers)
        table.update(ids, torch.randn(len(ids), DIM))
        table.remove(ids[: len(ids) // 100])

        begin = clock()
        info = save_checkpoint(
            model,
            folder / "delta",
            delta_of=base.path,
        )
        seconds = clock() - begin

        delta_rows = 0
        for table_info in info.tables.values():
            delta_rows += sum(part.rows for part in table_info.parts)
            delta_rows += sum(part.rows for part in table_info.removed)
        emit(
            {
                "benchmark": "delta",
                "rows": rows,
                "rows_changed_and_left": delta_rows,
                "bytes_over_full": round(info.bytes / base.bytes, 5),
                "seconds": round(seconds, 3),
                "seconds_over_full": round(seconds / full_seconds, 5),
            }
        )
        shutil.rmtree(folder / "delta")


def timed_step(model: DistributedModelParallel, rows: int) -> Callable[[], float]:
    """Returns a function that makes a training step and returns its seconds."""
    parameters = []
    for name, parameter in model.named_parameters():
        if "embedding" not in name:
            parameters.append(parameter)
    optimizer = torch.optim.Adam(parameters, lr=0.001)
    dense = torch.randn(BATCH, 13)
    ones = torch.ones(FEATURES * BATCH, dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)

    def step() -> float:
        # Log-uniform over the rows, which is Zipf's law with exponent 1. The ids of
        # click logs follow it.
        uniform = torch.rand(
            FEATURES * BATCH,
            generator=generator,
            dtype=torch.float64,
        )
        numbers = torch.exp(uniform * torch.tensor(rows).log())
        features = KeyedJaggedTensor(
            keys=NAMES,
            values=id_of(numbers.long() - 1),
            lengths=ones,
        )
        begin = clock()
        optimizer.zero_grad()
        model(dense, features).sum().backward()
        optimizer.step()
        return clock() - begin

    return step


def steps_during_a_save(model: DistributedModelParallel, folder: Path) -> None:
    """Measures training steps alternately without a save and during a save."""
    rows = len(table_of(model))
    step = timed_step(model, rows)
    alone: list[float] = []
    during: list[float] = []
    saves = []
    memory = []
    for _ in range(50):
        step()
    for _ in range(2):
        alone += [step() for _ in range(200)]
        with peak_memory(0.5) as peak:
            begin = clock()
            saving = async_save(
                model,
                folder / "beside",
                overwrite=True,
            )
            snapshot = clock() - begin
            while not saving.done():
                during.append(step())
            saving.wait()
        saves.append(clock() - begin)
        memory.append(peak[0])
        alone += [step() for _ in range(200)]
    alone_s = statistics.mean(alone)
    during_s = statistics.mean(during)
    median_over_alone = statistics.median(during) / statistics.median(alone)
    emit(
        {
            "benchmark": "async_save",
            "rows": rows,
            "batch_size": BATCH,
            "step_ms": round(alone_s * 1e3, 2),
            "step_ms_during_a_save": round(during_s * 1e3, 2),
            "steps_during_a_save": len(during) // 2,
            "mean_step_over_alone": round(during_s / alone_s, 3),
            "median_step_over_alone": round(median_over_alone, 3),
            "p99_step_ms": p99_ms(alone),
            "p99_step_ms_during_a_save": p99_ms(during),
            "call_ms": round(snapshot * 1e3, 2),
            "save_seconds": round(statistics.mean(saves), 2),
            "mb_beside_table": round(max(memory) / 1e6),
        }
    )


def p99_ms(seconds: list[float]) -> float:
    """Returns the 99th percentile in milliseconds."""
    place = len(seconds) * 99 // 100
    percentile_s = sorted(seconds)[place]
    return round(percentile_s * 1e3, 2)


def main() -> None:
    """Runs the measurements and prints the JSON rows."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=15_000_000,
        help="number of rows of the table; a row has 284 bytes",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path.cwd(),
        help="folder on the disk to measure",
    )
    parser.add_argument("--only", default="full,deltas,steps", help="parts to measure")
    arguments = parser.parse_args()
    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
    )
    model = build()
    fill(table_of(model), arguments.rows)
    only = arguments.only.split(",")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as directory:
        folder = Path(directory)
        path = folder / "full"
        if "full" in only:
            base = full(model, folder)
        else:
            base = save_checkpoint(model, path)
        if "deltas" in only:
            deltas(model, folder, base)
        if "steps" in only:
            steps_during_a_save(model, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
