r"""Trains on more ids than memory has room for, and once more with a kill in between.

    # 50 M samples over 200 M ids, 4 GiB of rows in memory
    make big
    python benchmarks/big.py runs/big --samples 200000 --ids 600000 \
        --memory-mb 12 --every 20480

A model with four tables trains on generated samples. The popularity of the ids is a
power law, and it drifts: in the course of the run, new ids take the places of a fifth
of all ids. The rows that memory has no room for are in RocksDB. A row that is unused
for four intervals of ``--every`` samples expires. After each interval a checkpoint is
written. Each fifth one is full, and takes the place of those before it. The others are
deltas. The run is made twice. The second one is killed in the middle of an interval by
SIGKILL, and resumes from its newest checkpoint. Both must end with the same rows to the
bit.

The folder gets ``big.json`` (all points of both runs) and ``big.png``. It needs room
for the cold rows and the checkpoints of one run, about 40 GB by default; they are
deleted when a run has ended.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import harmonic_mean
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import typer
from tqdm import tqdm

if TYPE_CHECKING:
    from torchrec_recstore import TableStats

BATCH = 4096
DIM = 32
SHARES = {"user": 0.3, "item": 0.3, "ad": 0.1, "query": 0.3}  # of all ids
# ids of a sample; the items are a history
BAGS = {"user": 1, "item": 12, "ad": 1, "query": 2}
# of the rows: all tables fill it at the same time
MEMORY = {
    "user": 0.104,
    "item": 0.632,
    "ad": 0.086,
    "query": 0.178,
}
EXPONENT = 1.05
# the share of the ids, popular or rare, in whose place others have come after the whole
# run
REPLACED = 0.2
EXPIRY = 4  # intervals after which an unused row expires
WARM_UP = 6  # intervals until the first expired rows have been deleted from RocksDB
CHAIN = 5  # checkpoints of a chain: a full one and its deltas
POINTS = 100  # a run has this number of points, at most
# what is printed of a run, by the name in a point: a factor, and the unit after it
PRINTED = {
    "samples_per_second": (1, "samples/s"),
    "generated_per_second": (
        1,
        "samples/s generated before, which is the same work in each step",
    ),
    "rss": (2**-30, "GiB"),
    "hit_rate": (100, "% of the ids found in memory"),
}


class Size(NamedTuple):
    """The size of a run."""

    samples: int  # of the training
    ids: int  # different ids at a time
    max_rows: int  # in memory
    every: int  # samples of an interval


# ---- The samples ----


def _mixed(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Hashes 64-bit values bijectively.

    Source: the finaliser of splitmix64 (Steele et al. 2014).
    """
    x = values.view(np.uint64)
    x = x ^ (x >> np.uint64(30))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x = x ^ (x >> np.uint64(27))
    x = x * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return x.view(np.int64)


def samples_of(
    step: int,
    size: Size,
) -> tuple[dict[str, npt.NDArray[np.int64]], npt.NDArray[np.float32]]:
    """Returns the samples of a step.

    Returns:
        The ids of each table, (4096 * ids of a sample,), and the labels, (4096,).
    """
    random = np.random.default_rng([7, step])
    logits = np.zeros(BATCH, np.float32)
    ids = {}
    for number, (table, share) in enumerate(SHARES.items()):
        population = max(2, int(size.ids * share))
        uniform = random.random(BATCH * BAGS[table])
        ranks = _ranks(uniform, population) + (number << 40)
        ids[table] = _ids_of_ranks(ranks, step, size)

        top_bits = _mixed(ids[table] + 1) >> 40
        effects = top_bits.astype(np.float32) * np.float32(2**-23)
        effects_of_samples = effects.reshape(BATCH, -1)
        logits += effects_of_samples.mean(1) * 2
    probabilities = 1 / (1 + np.exp(-logits))
    labels = random.random(BATCH, np.float32) < probabilities
    return ids, labels.astype(np.float32)


def _ranks(
    uniform: npt.NDArray[np.float64],
    population: int,
) -> npt.NDArray[np.int64]:
    """Returns ranks whose popularity is a bounded power law.

    The inverse of its distribution function is taken at values between 0 and 1. The
    rank 1 is the most popular.
    """
    power = 1 - EXPONENT
    highest = (population + 1.0) ** power - 1
    ranks = (highest * uniform + 1) ** (1 / power)
    return ranks.astype(np.int64)


def _ids_of_ranks(
    ranks: npt.NDArray[np.int64],
    step: int,
    size: Size,
) -> npt.NDArray[np.int64]:
    """Returns the ids that the ranks have in a step.

    The id of a rank is replaced by a new one in a moment of the run that its hash
    tells, or after the run.
    """
    hashes = _mixed(ranks).view(np.uint64)
    moments = (hashes >> np.uint64(11)) * 2.0**-53
    is_replaced = moments < REPLACED * step * BATCH / size.samples
    generations = is_replaced.astype(np.int64) << 60
    return _mixed(ranks + generations)


# ---- The process that trains ----


def clicks_module(num_embeddings: int) -> Any:
    """Returns the model before it is sharded: a table for each feature, and an MLP."""
    import torch
    from torch import nn
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    class Clicks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            tables = [
                EmbeddingBagConfig(
                    name=name,
                    embedding_dim=DIM,
                    num_embeddings=num_embeddings,
                    feature_names=[name],
                )
                for name in SHARES
            ]
            self.tables = EmbeddingBagCollection(
                tables=tables,
                device=torch.device("meta"),
            )
            self.dense = nn.Sequential(
                nn.Linear(DIM * len(SHARES), 64),
                nn.ReLU(),
                nn.Linear(64, 1),
            )

        def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
            pooled = self.tables(features).values()
            logits: torch.Tensor = self.dense(pooled)
            return logits.squeeze(1)

    return Clicks()


def sharded(folder: Path, size: Size) -> tuple[Any, Any]:
    """Returns the sharded model, and the optimizer of its dense part.

    The cold rows of the tables are below ``folder``.
    """
    import torch
    import torch.distributed as dist
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import Topology
    from torchrec.optim.keyed import KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    from torchrec_recstore import (
        Expiry,
        RecStoreConstraints,
        RecStorePlanner,
        RecStoreSharder,
        RocksDBStore,
        TableOptions,
    )

    constraints = {}
    for name, share in MEMORY.items():
        options = TableOptions(
            max_rows=int(size.max_rows * share),
            expiry=Expiry(EXPIRY * steps_of_interval(size)),
            cold_store=RocksDBStore(str(folder / name)),
        )
        constraints[name] = RecStoreConstraints(options=options)
    module = clicks_module(size.ids)
    sharder = RecStoreSharder(fused_params={"learning_rate": 0.05})
    planner = RecStorePlanner(
        topology=Topology(world_size=1, compute_device="cpu"),
        constraints=constraints,
    )
    plan = planner.collective_plan(module, [sharder], dist.group.WORLD)
    model = DistributedModelParallel(
        module,
        plan=plan,
        sharders=[sharder],
        device=torch.device("cpu"),
    )
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    adam = KeyedOptimizerWrapper(
        parameters, lambda params: torch.optim.Adam(params, lr=0.001)
    )
    return model, adam


def steps_of_interval(size: Size) -> int:
    """Returns the number of steps between two checkpoints."""
    return max(1, size.every // BATCH)


class Recorder:
    """Writes the points of a run, each about the steps since the point before."""

    def __init__(self, model: Any, points: Path) -> None:
        self._model = model
        self._points = points
        self._begin_point(self._stats())

    def _stats(self) -> TableStats:
        from torchrec_recstore import table_stats
        from torchrec_recstore.store.table_state import combined

        return combined(table_stats(self._model).values())

    def _begin_point(self, stats: TableStats) -> None:
        self._earlier = stats
        self.losses: list[float] = []
        self.generating_s = 0.0
        self.paused_s = 0.0
        self._begin = time.perf_counter()

    def write(self, step: int) -> None:
        """Appends the point after ``step``."""
        from measure import anonymous_bytes

        seconds = time.perf_counter() - self._begin - self.paused_s
        samples = len(self.losses) * BATCH
        stats = self._stats()
        lookups = stats.lookups - self._earlier.lookups
        hits = stats.hits - self._earlier.hits
        cold_hits = stats.cold_hits - self._earlier.cold_hits
        point = {
            "samples": step * BATCH,
            "samples_per_second": samples / seconds,
            "generated_per_second": samples / self.generating_s,
            "rss": anonymous_bytes(),
            "hit_rate": hits / lookups,
            "cold_rate": cold_hits / lookups,
            "rows": stats.rows,
            "cold_rows": stats.cold_rows,
            "bytes": stats.bytes,
            "loss": sum(self.losses) / len(self.losses),
        }
        with self._points.open("a") as file:
            file.write(json.dumps(point) + "\n")
        self._begin_point(stats)


def train(folder: Path, size: Size) -> None:
    """Trains, from the newest checkpoint if there is one.

    Appends the points of the run to ``points.jsonl``.
    """
    from torchrec_recstore import load_checkpoint, save_checkpoint, table_stats

    _prepare_process()
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    (folder / "cold").mkdir(exist_ok=True)
    model, adam = sharded(folder / "cold", size)

    saved = sorted(checkpoints.glob("step-*"))
    newest = saved[-1] if saved else None
    step = 0
    points = folder / "points.jsonl"
    if newest is not None:
        adam.init_state()
        state = load_checkpoint(model, newest).training_state or {}
        adam.load_state_dict(state["dense"])
        step = state["step"]
        _drop_points(points, after=step * BATCH)

    recorder = Recorder(model, points)
    steps = size.samples // BATCH
    steps_of_point = max(1, steps // POINTS)
    while step < steps:
        _train_step(model, adam, step, size, recorder)
        step += 1
        if step % steps_of_point == 0:
            recorder.write(step)
        if step % steps_of_interval(size) == 0:
            pause_begin = time.perf_counter()
            newest = _saved(model, adam, step, size, checkpoints, newest)
            # checkpoints are measured by themselves
            recorder.paused_s += time.perf_counter() - pause_begin

    final = save_checkpoint(
        model,
        folder / "final",
        training_state={"dense": adam.state_dict()},
    )
    rows = {}
    for name, stats in table_stats(model).items():
        rows[name] = stats.rows + stats.cold_rows
    end = {"rows": rows, "bytes": final.bytes}
    (folder / "end.json").write_text(json.dumps(end))


def _prepare_process() -> None:
    """Makes the process one quiet rank with a seed."""
    import logging
    import warnings

    import torch
    import torch.distributed as dist

    # docs/errors.md explains what TorchRec and torch warn of
    warnings.simplefilter("ignore")
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
    )


def _train_step(
    model: Any,
    adam: Any,
    step: int,
    size: Size,
    recorder: Recorder,
) -> None:
    import torch
    from torch.nn import functional
    from torchrec import KeyedJaggedTensor

    begin = time.perf_counter()
    ids, labels = samples_of(step, size)
    recorder.generating_s += time.perf_counter() - begin

    values = []
    lengths = []
    for name in SHARES:
        values.append(torch.from_numpy(ids[name]))
        lengths.append(torch.full((BATCH,), BAGS[name]))
    features = KeyedJaggedTensor(
        list(SHARES),
        torch.cat(values),
        lengths=torch.cat(lengths),
    )
    logits = model(features)
    targets = torch.from_numpy(labels)
    loss = functional.binary_cross_entropy_with_logits(logits, targets)
    adam.zero_grad()
    loss.backward()
    adam.step()
    recorder.losses.append(loss.item())


def _saved(
    model: Any,
    adam: Any,
    step: int,
    size: Size,
    checkpoints: Path,
    newest: Path | None,
) -> Path:
    """Saves a checkpoint, a delta of the newest one or a full one.

    A full one replaces all others.
    """
    from torchrec_recstore import save_checkpoint

    path = checkpoints / f"step-{step:08}"
    is_full = (step // steps_of_interval(size) - 1) % CHAIN == 0
    save_checkpoint(
        model,
        path,
        training_state={"step": step, "dense": adam.state_dict()},
        delta_of=None if is_full else newest,
    )
    if is_full:
        for checkpoint in checkpoints.iterdir():
            if checkpoint != path:
                shutil.rmtree(checkpoint)
    return path


def _drop_points(points: Path, after: int) -> None:
    """Removes the points after a number of samples, which a killed run has written."""
    lines = []
    for line in points.read_text().splitlines():
        point = json.loads(line)
        if point["samples"] <= after:
            lines.append(f"{line}\n")
    points.write_text("".join(lines))


# ---- The two runs ----


def run(folder: Path, size: Size, kill_at: int | None) -> dict[str, Any]:
    """Makes one run in a separate process.

    Args:
        folder: The folder of the run.
        size: The size of the run.
        kill_at: The number of samples after which the process is killed. None: it is
            not killed.

    Returns:
        The points of the run, its end, and the checksums of its files.
    """
    folder.mkdir(parents=True)
    begin = time.perf_counter()
    kills = _run_process(folder, size, kill_at)
    seconds = time.perf_counter() - begin

    end = json.loads((folder / "end.json").read_text())
    metadata = json.loads((folder / "final" / "metadata.json").read_text())
    lines = (folder / "points.jsonl").read_text().splitlines()
    sizes = []
    for checkpoint in sorted((folder / "checkpoints").iterdir()):
        file_sizes = [file.stat().st_size for file in checkpoint.iterdir()]
        sizes.append(sum(file_sizes))

    shutil.rmtree(folder / "cold")
    shutil.rmtree(folder / "checkpoints")
    shutil.rmtree(folder / "final")
    return {
        **end,
        "seconds": seconds,
        "kills": kills,
        "checkpoint_bytes": sizes,
        "files": metadata["files"],
        "points": [json.loads(line) for line in lines],
    }


def _run_process(folder: Path, size: Size, kill_at: int | None) -> int:
    """Runs the process of a run to its end, and returns the number of its kills."""
    numbers = [str(number) for number in size]
    command = [
        sys.executable,
        __file__,
        "--train",
        str(folder),
        *numbers,
    ]
    kills = 0
    process = subprocess.Popen(command)
    bar = tqdm(
        desc=folder.name,
        total=size.samples,
        unit=" samples",
        unit_scale=True,
    )
    with bar:
        while process.poll() is None:
            time.sleep(0.05)
            samples = _last(folder / "points.jsonl")
            bar.update(samples - bar.n)
            if kill_at is not None and kills == 0 and bar.n >= kill_at:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
                process = subprocess.Popen(command)
    status = process.returncode
    if status:
        raise SystemExit(f"the process of {folder} has ended with the status {status}")
    return kills


def _last(points: Path) -> int:
    """Returns the number of samples of the last complete point."""
    if not points.exists():
        return 0
    complete_lines = points.read_text().split("\n")[:-1]
    if not complete_lines:
        return 0
    return int(json.loads(complete_lines[-1])["samples"])


def warm(points: list[dict[str, Any]], every: int) -> list[dict[str, Any]]:
    """Returns the points after the warm-up of a run.

    Its intervals have ``every`` samples.
    """
    return [point for point in points if point["samples"] > WARM_UP * every]


def spread_of(
    points: list[dict[str, Any]],
    name: str,
    every: int,
) -> float:
    """Returns the largest distance of a value from its median after the warm-up.

    It is a share of the median. The value of an interval of ``every`` samples, the time
    between two checkpoints, is the mean of its points. The speed of an interval is the
    harmonic mean, which is its samples over its time, because points have as many
    samples. The generation of the samples is the same work in each step: its speed
    tells how steady the machine is.
    """
    intervals: dict[int, list[float]] = {}
    for point in warm(points, every):
        number = (point["samples"] - 1) // every
        interval = intervals.setdefault(number, [])
        interval.append(point[name])

    mean = harmonic_mean if name.endswith("_per_second") else np.mean
    values = []
    for interval in intervals.values():
        values.append(float(mean(interval)))
    median = float(np.median(values))
    distances = [abs(value - median) for value in values]
    return max(distances) / median


def plot(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Draws speed, memory and hit rate over the samples of both runs."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shown = {
        "samples_per_second": ("samples a second, thousands", 1e-3),
        "rss": ("resident memory, GiB", 2**-30),
        "hit_rate": ("ids found in memory, percent", 100.0),
    }
    figure, axes = pyplot.subplots(
        nrows=len(shown),
        figsize=(8, 7),
        sharex=True,
        layout="constrained",
    )
    for axis, (name, (label, scale)) in zip(axes, shown.items(), strict=True):
        for run_name, result in runs.items():
            points = result["points"]
            x = [point["samples"] / 1e6 for point in points]
            y = [point[name] * scale for point in points]
            axis.plot(x, y, label=run_name)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend()
    axes[-1].set_xlabel("training samples, millions")
    figure.savefig(path, dpi=110)


def main(
    folder: Annotated[Path, typer.Argument(help="New folder for the runs.")],
    samples: Annotated[
        int, typer.Option(help="Training samples.", min=2 * BATCH)
    ] = 50_000_000,
    ids: Annotated[
        int, typer.Option(help="Different ids at a time.", min=100)
    ] = 200_000_000,
    memory_mb: Annotated[
        int, typer.Option(help="Memory for rows in MiB.", min=1)
    ] = 4096,
    every: Annotated[
        int, typer.Option(help="Samples between two checkpoints.", min=BATCH)
    ] = 5_000_000,
) -> None:
    """Train on more ids than memory has room for, undisturbed and with a kill, and
    compare the ends.
    """
    from measure import conditions

    if folder.exists():
        raise SystemExit(f"{folder} exists: name a new folder")
    if samples // every <= WARM_UP:
        raise SystemExit(
            f"--samples {samples} is too little: the first {WARM_UP} intervals are the"
            " warm-up"
        )
    size = Size(samples, ids, _max_rows(memory_mb), every)
    middle = samples // 2 + every // 2  # between two checkpoints
    runs = {
        "undisturbed": run(folder / "undisturbed", size, kill_at=None),
        "killed": run(folder / "killed", size, kill_at=middle),
    }
    document = {
        "size": size._asdict(),
        "conditions": conditions(),
        "runs": runs,
    }
    (folder / "big.json").write_text(json.dumps(document, indent=1) + "\n")
    plot(runs, folder / "big.png")
    for line in _lines(runs, every):
        print(line)
    has_same_files = runs["killed"]["files"] == runs["undisturbed"]["files"]
    if runs["killed"]["kills"] != 1 or not has_same_files:
        raise SystemExit("the killed run has not ended as the undisturbed one")


def _lines(runs: dict[str, dict[str, Any]], every: int) -> Iterator[str]:
    """Yields the lines that are printed of both runs."""
    for name, result in runs.items():
        points = warm(result["points"], every)
        rows = sum(result["rows"].values())
        seconds = result["seconds"]
        yield f"{name}: {seconds:,.0f} s, {rows:,} rows; after the warm-up:"
        for key, (scale, unit) in PRINTED.items():
            values = [point[key] for point in points]
            median = float(np.median(values)) * scale
            spread = spread_of(result["points"], key, every)
            yield f"  {median:,.2f} {unit}, between two checkpoints within {spread:.0%}"
    has_same_files = runs["killed"]["files"] == runs["undisturbed"]["files"]
    verdict = "equal to the bit" if has_same_files else "DIFFERENT"
    yield f"rows, states and dense part of the killed run are {verdict}"


def _max_rows(memory_mb: int) -> int:
    """Returns the number of rows that memory has room for.

    Raises:
        SystemExit: A table has no room for the ids of a step.
    """
    max_rows = memory_mb * 2**20 // _row_bytes()
    for name, share in MEMORY.items():
        if max_rows * share < BATCH * BAGS[name]:
            raise SystemExit(
                f"--memory-mb {memory_mb} is too little: each table must have room for"
                " the ids of a step"
            )
    return max_rows


def _row_bytes() -> int:
    """Returns the memory of a row of this benchmark, measured."""
    import torch

    from torchrec_recstore import Table
    from torchrec_recstore.optim import RowWiseAdagrad

    rows = 2**18
    table = Table(DIM, optimizer=RowWiseAdagrad(0.05))
    table.insert(torch.arange(rows), torch.zeros(rows, DIM))
    stats = table.stats()
    return -(-stats.bytes // stats.rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        train(Path(sys.argv[2]), Size(*map(int, sys.argv[3:])))
    else:
        typer.run(main)
