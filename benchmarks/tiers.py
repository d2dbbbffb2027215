r"""Measures the cost of limited memory.

    python benchmarks/tiers.py [--parts eviction,pauses,memory,writes,tiers] \
        [--ids 20000000] [--dim 64]

Prints a JSON row for each part. The sides of a part are interleaved in one process.

- eviction: Forward and backward of a group over one full table of ``--rows`` rows,
  with one tenth of new ids in each batch, with LRU, with LFU, and without a limit.
- pauses: The steps of a full table of 0.5, 2 and 8 million rows with 20,000 ids, of
  which 2,000 are new: the longest step and the steps that evict rows over the median
  step. Each step is the median of three runs of the same steps.
- memory: The resident memory of a table that has seen three times ``--rows`` ids,
  divided by the memory of an unbounded table of ``--rows`` rows.
- tiers: The samples per second of the DLRM of dlrm.py. Each of its 26 features draws
  its ids by a Zipf law of ``--exponent`` from a 26th of ``--ids``. The tables keep all
  rows in DRAM, or one tenth of the rows with the rest lost, or one tenth of the rows
  with the rest on an SSD, in an SSDStore or in RocksDB. Also measures the reads of cold
  rows, by a table, by its store, and by rocksdict's batch get from the database of
  RocksDB: once with all files in the page cache, and once from the disk.
- writes: Batches of random rows are written again and again to a cold store of
  ``--rows`` rows: rows per second, and the bytes of all writes over the bytes of the
  rows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dlrm import settings_of
from kernel import zipf
from measure import (
    ROOT,
    Side,
    Timing,
    clock,
    emit,
    forget,
    interleave,
    rates,
    ratios,
    spread,
    step_seconds,
)
from memory import resident_bytes

sys.path.insert(0, str(ROOT / "examples"))
sys.path.insert(0, str(ROOT / "examples" / "dlrm"))

from criteo import NUM_DENSE, NUM_IDS, Rows
from sources import batches_of_rank
from torch import Tensor
from torchrec.datasets.utils import Batch
from train import build

from torchrec_recstore import ops, table_stats
from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.optim import RowWiseAdagrad
from torchrec_recstore.options import LFU, LRU, RocksDBStore, SSDStore, TableOptions
from torchrec_recstore.sharders import RecStorePrefetchPipeline
from torchrec_recstore.store import Table, open_cold_store
from torchrec_recstore.store.cold_store import id_bytes, split

NEW = 0.1  # the fraction of new ids in a batch
BLOCK_STEPS = 10  # single steps differ, so means over several steps are compared
AHEAD = 3  # the number of batches in a pipeline
PAUSES_DIM = 16
PAUSES_RUNS = 3
SHARE = 0.1  # the fraction of the ids that have room in DRAM


def fill(table: Table, ids: Tensor, batch: int) -> None:
    """Creates the rows of ids, (N,), ``batch`` rows at a time."""
    for part in ids.split(batch):
        table.lookup(part, train=True)


def ratio_of_means(
    numerators: list[Timing],
    denominators: list[Timing],
) -> dict[str, float]:
    """Returns the ratios of the means over blocks of consecutive steps.

    Neither a drift of the machine's speed nor a single step changes these ratios much.
    """
    numerator_s = step_seconds(numerators)
    denominator_s = step_seconds(denominators)
    block_ratios = []
    for number in range(len(numerators) // BLOCK_STEPS):
        begin = number * BLOCK_STEPS
        end = begin + BLOCK_STEPS
        numerator = sum(numerator_s[begin:end])
        denominator = sum(denominator_s[begin:end])
        block_ratios.append(numerator / denominator)
    return spread(block_ratios, 1)


def batch_of(
    step: int,
    hot: Tensor,
    batch: int,
    new: int,
    generator: torch.Generator,
) -> Tensor:
    """Returns the ids of a step, (batch,): ids of ``hot``, and then new ones."""
    places = torch.randint(0, len(hot), (batch - new,), generator=generator)
    hot_ids = hot[places]
    first_new = step * new
    new_ids = 2**40 + torch.arange(first_new, first_new + new)
    return torch.cat([hot_ids, new_ids])


def group_steps(
    table: Table,
    ids_of: Callable[[int], Tensor],
    offsets: Tensor,
    grad: Tensor,
) -> Side:
    """Returns a side that runs forward and backward of a group over one table."""
    group = PooledGroup([table], [0], "sum")

    def step(i: int) -> Timing:
        ids = ids_of(i)
        begin = clock()
        group(ids, offsets, train=True).backward(grad)
        return (clock() - begin,)

    return step


def eviction_tables(rows: int, dim: int) -> dict[str, Table]:
    """Returns a table for each side of :func:`eviction`."""
    options = {
        "lru": TableOptions(max_rows=rows, eviction=LRU()),
        "lfu": TableOptions(max_rows=rows, eviction=LFU(half_life_steps=100)),
        "unbounded": TableOptions(),
    }
    tables = {}
    for name, table_options in options.items():
        tables[name] = Table(
            dim,
            optimizer=RowWiseAdagrad(),
            options=table_options,
        )
    return tables


def eviction(arguments: argparse.Namespace) -> None:
    """Measures the steps of a group and prints the JSON row."""
    rows = arguments.rows
    batch = rows // 10
    dim = arguments.dim
    new = int(NEW * batch)
    steps = arguments.steps // BLOCK_STEPS * BLOCK_STEPS
    warm_up = rows // new  # all rows must come from steps like the measured ones
    generator = torch.Generator().manual_seed(0)
    # ids that recur soon enough to stay
    hot = torch.randperm(rows // 2, generator=generator)
    tables = eviction_tables(rows, dim)
    offsets = torch.arange(batch + 1)
    grad = torch.randn(batch, dim, generator=generator) * 0.01
    batches: dict[int, Tensor] = {}

    def ids_of(step: int) -> Tensor:
        if step not in batches:
            batches.clear()
            ids = batch_of(step, hot, batch, new, generator)
            order = torch.randperm(batch, generator=generator)
            batches[step] = ids[order]
        return batches[step]

    # The memory of the unbounded table has been touched too, so that the first touch of
    # memory is not compared.
    unbounded = tables["unbounded"]
    most_rows = rows + (warm_up + steps) * new
    fill(unbounded, torch.arange(-most_rows, 0), batch)
    unbounded.remove(unbounded.ids()[1:])

    misses_before = {}
    sides = {}
    for name, table in tables.items():
        fill(table, hot, batch)
        misses_before[name] = table.stats().misses
        sides[name] = group_steps(table, ids_of, offsets, grad)
    timings = interleave(sides, steps, warm_up)
    step_ms = {}
    mean_step_ms = {}
    misses_a_step = {}
    resident = {}
    for name, table in tables.items():
        seconds = step_seconds(timings[name])
        stats = table.stats()
        misses = stats.misses - misses_before[name]
        step_ms[name] = spread(seconds)
        mean_step_ms[name] = round(statistics.mean(seconds) * 1e3, 3)
        misses_a_step[name] = misses / (warm_up + steps)
        resident[name] = stats.rows
    emit(
        {
            "benchmark": "eviction",
            "rows": rows,
            "dim": dim,
            "batch": batch,
            "new_ids": new,
            "step_ms": step_ms,
            "mean_step_ms": mean_step_ms,
            "lru_over_unbounded": ratio_of_means(timings["lru"], timings["unbounded"]),
            "lfu_over_unbounded": ratio_of_means(timings["lfu"], timings["unbounded"]),
            "misses_a_step": misses_a_step,
            "resident": resident,
        }
    )


def timed_steps(
    rows: int,
    policy: LRU | LFU,
    batch: int,
    new: int,
) -> Iterator[tuple[bool, float]]:
    """Runs the steps of a full table.

    Yields:
        For each step from the 10th on, whether it evicts rows, and its time in seconds.
    """
    generator = torch.Generator().manual_seed(0)
    table = Table(
        PAUSES_DIM,
        optimizer=RowWiseAdagrad(),
        options=TableOptions(max_rows=rows, eviction=policy),
    )
    hot = torch.randperm(rows // 2, generator=generator)
    fill(table, torch.arange(-rows, 0), 100_000)
    fill(table, hot, 100_000)
    offsets = torch.arange(batch + 1)
    grad = torch.randn(batch, PAUSES_DIM, generator=generator) * 0.01
    run_step = group_steps(
        table,
        lambda step: batch_of(step, hot, batch, new, generator),
        offsets,
        grad,
    )
    steps = 3 * rows // 32 // new + 20
    evicted = table.stats().evicted
    for step in range(steps):
        (seconds,) = run_step(step)
        evicted_before = evicted
        evicted = table.stats().evicted
        if step >= 10:
            yield evicted > evicted_before, seconds
    table.close()


def pauses(arguments: argparse.Namespace) -> None:
    """Measures how long the steps are that evict rows.

    Prints a JSON row for each size of the table. Each table makes the same steps
    several times, and the time of a step is the median of them. The work of the table
    takes as long each time. The time that other processes take from a step is in
    another step each time.
    """
    batch = 20_000
    new = 2000
    for rows in (500_000, 2_000_000, 8_000_000):
        row: dict[str, Any] = {
            "benchmark": "pauses",
            "rows": rows,
            "dim": PAUSES_DIM,
            "batch": batch,
            "new_ids": new,
        }
        policies = {"lru": LRU(), "lfu": LFU(half_life_steps=100)}
        for name, policy in policies.items():
            runs = []
            for _ in range(PAUSES_RUNS):
                steps = timed_steps(rows, policy, batch, new)
                runs.append(list(steps))

            all_steps = []
            evicting_steps = []
            for same_step in zip(*runs, strict=True):
                evicts, _ = same_step[0]
                seconds = statistics.median(seconds for _, seconds in same_step)
                all_steps.append(seconds)
                if evicts:
                    evicting_steps.append(seconds)

            max_over_median = max(all_steps) / statistics.median(all_steps)
            row[f"{name}_step_ms"] = spread(all_steps)
            row[f"{name}_evicting_step_ms"] = spread(evicting_steps)
            row[f"{name}_evicting_steps"] = len(evicting_steps)
            row[f"{name}_max_over_median"] = round(max_over_median, 1)
        emit(row)


def memory(arguments: argparse.Namespace) -> None:
    """Measures the resident memory and prints the JSON row."""
    rows = arguments.rows
    bounded = TableOptions(max_rows=rows, eviction=LRU())
    bounded_bytes = bytes_of_table(
        bounded,
        ids=3 * rows,
        dim=arguments.dim,
    )
    unbounded_bytes = bytes_of_table(
        TableOptions(),
        ids=rows,
        dim=arguments.dim,
    )
    emit(
        {
            "benchmark": "bounded_memory",
            "rows": rows,
            "dim": arguments.dim,
            "resident_bytes_per_row": {
                "bounded": round(bounded_bytes / rows, 1),
                "unbounded": round(unbounded_bytes / rows, 1),
            },
            "bounded_over_unbounded": round(bounded_bytes / unbounded_bytes, 3),
        }
    )


def bytes_of_table(options: TableOptions, ids: int, dim: int) -> int:
    """Returns the resident memory of a new table that has seen ``ids`` ids."""
    step = 20_000
    table = Table(
        dim,
        optimizer=RowWiseAdagrad(),
        options=options,
    )
    batch = torch.empty(step, dtype=torch.int64)
    # allocates the buffers of a step, which then count before and after
    for _ in range(100):
        batch.fill_(0)
        table.lookup(batch, train=True)
    bytes_before = resident_bytes()
    for begin in range(1, ids, step):
        torch.arange(begin, begin + step, out=batch)
        table.lookup(batch, train=True)
    table_bytes = resident_bytes() - bytes_before
    table.close()
    return table_bytes


def id_at(rank: Tensor, feature: int) -> Tensor:
    """Returns the ids at the given popularity ranks of a feature, (N,), counted from 0.

    Ids cover all of int64.
    """
    return ops.mix_ids(rank + (feature << 40), False)


def make_batches(arguments: argparse.Namespace, count: int) -> list[Batch]:
    """Returns batches for DLRM with ids that follow a Zipf law."""
    generator = torch.Generator().manual_seed(0)
    size = arguments.batch_size
    population = arguments.ids // NUM_IDS
    rows = []
    for _ in range(count):
        columns = []
        for feature in range(NUM_IDS):
            ranks = zipf(size, generator, arguments.exponent, population) - 1
            columns.append(id_at(ranks, feature))
        dense = torch.randn(size, NUM_DENSE, generator=generator)
        labels = torch.randint(
            0,
            2,
            (size,),
            generator=generator,
            dtype=torch.int32,
        )
        ids = torch.stack(columns, 1)
        rows.append(Rows(labels.numpy(), dense.numpy(), ids.numpy()))
    return list(batches_of_rank(rows))


class LimitedModel:
    """A DLRM with limited tables, which are filled as after a long training.

    Args:
        arguments: The arguments of the command.
        bounds: The limits of each table.
        batches: The batches to train on, in order.
        filled: The number of ids of each feature to fill in. The most frequent ids are
            filled in last.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        bounds: dict[str, Any],
        batches: list[Batch],
        filled: int,
    ) -> None:
        settings = settings_of(
            "recstore",
            arguments.dim,
            arguments.batch_size,
            **bounds,
        )
        self.model, optimizer = build(settings)
        self.model.train()
        self.tables: list[Table] = []
        for module in self.model.modules():
            if hasattr(module, "recstore_tables"):
                self.tables += module.recstore_tables()

        begin = clock()
        max_rows = bounds.get("max_rows", filled)
        batch = min(50_000, max_rows // 2)
        for feature, table in enumerate(self.tables):
            ranks = torch.arange(filled - 1, -1, -1)
            fill(table, id_at(ranks, feature), batch)
        seconds = clock() - begin
        print(f"{bounds}: filled in {seconds:.1f} s", file=sys.stderr)

        self._pipeline = RecStorePrefetchPipeline(
            self.model,
            optimizer,
            torch.device("cpu"),
        )
        self._batches: Iterator[Batch] = iter(batches)
        self._first_stats: dict[str, Any] = {}

    def round(self, steps: int) -> float:
        """Runs ``steps`` steps and returns the time in seconds.

        It includes their background work.
        """
        begin = clock()
        for _ in range(steps):
            self._pipeline.progress(self._batches)
        self._pipeline.finish_prefetch()
        return clock() - begin

    def start_counting(self) -> None:
        """Resets the counts of :meth:`rates`."""
        self._first_stats = table_stats(self.model)

    def rates(self) -> dict[str, float]:
        """Returns the fractions of ids that had a row in DRAM, and in the cold store.

        They are fractions of the distinct ids of each step.
        """
        lookups = 0
        hits = 0
        cold_hits = 0
        for name, stats in table_stats(self.model).items():
            first_stats = self._first_stats[name]
            lookups += stats.lookups - first_stats.lookups
            hits += stats.hits - first_stats.hits
            cold_hits += stats.cold_hits - first_stats.cold_hits
        return {
            "hit_rate": round(hits / lookups, 4),
            "cold_hit_rate": round(cold_hits / lookups, 4),
        }


def cache(folder: Path) -> None:
    """Reads all files of a folder, so that the kernel has them in its page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(2**24):
                    pass


def cold_reads(
    tables: dict[str, list[Table]],
    arguments: argparse.Namespace,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Measures cold reads in rows per second.

    They are reads of tables, of their stores, and of rocksdict on RocksDB's database.

    Args:
        tables: The tables of each kind of cold store.
        arguments: The arguments of the command.
        folder: The folder of the files, which are dropped from the page cache before
            each read. Default: None, they stay there.
    """
    generator = torch.Generator().manual_seed(1)
    names = []
    for kind in tables:
        names += [f"{kind}_lookup", f"{kind}_store"]
    names.append("rocksdict")

    rates: dict[str, list[float]] = {name: [] for name in names}
    rounds = 2 * NUM_IDS if folder is None else NUM_IDS
    for i in range(rounds):
        feature = i % NUM_IDS
        tables_of_feature = {kind: tables[kind][feature] for kind in tables}
        parts = cold_parts(
            tables_of_feature,
            feature,
            len(names),
            arguments,
            generator,
        )
        # The order of the sides rotates, because the first side loads the table's
        # filters.
        first = i % len(names)
        rotated_names = names[first:] + names[:first]
        for part, name in zip(parts, rotated_names, strict=True):
            kind, _, way = name.partition("_")
            if name == "rocksdict":
                kind = "rocksdb"
            if folder is not None:
                forget(folder)
            seconds = cold_read(tables_of_feature[kind], part, way)
            rates[name].append(len(part) / seconds)

    return {"reads": arguments.reads, **cold_figures(rates)}


def cold_figures(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Returns the rows per second of each side, and over those of rocksdict."""
    figures: dict[str, Any] = {
        "rows_per_second": {name: spread(rates[name], 1) for name in rates},
    }
    for name, side_rates in rates.items():
        if name != "rocksdict":
            pairs = zip(side_rates, rates["rocksdict"], strict=True)
            speedups = [rate / rocksdict for rate, rocksdict in pairs]
            median = spread(speedups, 1)["median"]
            figures[f"{name}_over_rocksdict"] = round(median, 3)
    return figures


def cold_parts(
    tables: dict[str, Table],
    feature: int,
    sides: int,
    arguments: argparse.Namespace,
    generator: torch.Generator,
) -> Sequence[Tensor]:
    """Returns random ids that are cold in all tables, a part for each side."""
    population = arguments.ids // NUM_IDS
    order = torch.randperm(population, generator=generator)
    ranks = order[: (sides + 2) * arguments.reads]
    cold_ids = id_at(ranks, feature)
    for table in tables.values():
        cold_ids = ops.table_absent(table.handle, cold_ids)
    part_size = min(len(cold_ids) // sides, arguments.reads)
    return cold_ids[: part_size * sides].split(part_size)


def cold_read(table: Table, ids: Tensor, way: str) -> float:
    """Reads cold rows, and returns the time in seconds.

    Args:
        table: The table.
        ids: (N,) int64. The ids of the rows.
        way: "lookup": by the table. "store": by its store. "": by rocksdict.
    """
    assert table.tier is not None
    store: Any = table.tier.store
    keys: Any = None
    if not way:
        keys = split(id_bytes(ids))
    begin = clock()
    if way == "lookup":
        table.lookup(ids)
    elif way == "store":
        store.get(ids)
    else:
        store._database().get(keys)  # the same files and caches
    return clock() - begin


def written_bytes() -> int:
    """Returns the bytes that this process has written."""
    counts = Path("/proc/self/io").read_text()
    _, _, value = counts.partition("wchar: ")
    return int(value.split()[0])


def writes(arguments: argparse.Namespace) -> None:
    """Measures puts of rows that the cold stores have already.

    Prints the JSON row.
    """
    rows = arguments.rows
    batch = 20_000
    row_bytes = 4 * arguments.dim + 28
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(rows, generator=generator) * 7919
    images = torch.randint(
        0,
        256,
        (batch, row_bytes),
        dtype=torch.uint8,
        generator=generator,
    )
    result: dict[str, Any] = {
        "benchmark": "cold_writes",
        "rows": rows,
        "row_bytes": row_bytes,
        "batch": batch,
    }
    puts = 6 * rows // batch  # each row is written again six times

    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        stores = {"ssd": SSDStore(folder), "rocksdb": RocksDBStore(folder)}
        for kind, options in stores.items():
            store = open_cold_store(options, name=kind, row_bytes=row_bytes)
            for part in ids.split(batch):
                store.put(part, images[: len(part)])

            # the first half makes the garbage that a long run has
            put_random_rows(store, ids, images, puts // 2, generator)
            first_bytes = written_bytes()
            measured_puts = puts - puts // 2
            put_rates = put_random_rows(store, ids, images, measured_puts, generator)

            all_bytes = written_bytes() - first_bytes
            changed_bytes = measured_puts * batch * row_bytes
            written_over_changed = all_bytes / changed_bytes
            result[f"{kind}_rows_per_second"] = spread(put_rates, 1)
            result[f"{kind}_written_over_changed"] = round(written_over_changed, 3)
            store.close()
    emit(result)


def put_random_rows(
    store: Any,
    ids: Tensor,
    images: Tensor,
    puts: int,
    generator: torch.Generator,
) -> list[float]:
    """Writes batches of random rows, and returns the rows per second of each."""
    batch = len(images)
    put_rates = []
    for _ in range(puts):
        places = torch.randperm(len(ids), generator=generator)[:batch]
        batch_ids = ids[places]
        begin = clock()
        store.put(batch_ids, images)
        put_rates.append(batch / (clock() - begin))
    return put_rates


def tiers(arguments: argparse.Namespace) -> None:
    """Measures the samples per second of DLRM and prints the JSON row."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path(folder) / 'group'}",
            rank=0,
            world_size=1,
        )
        population = arguments.ids // NUM_IDS
        max_rows = int(SHARE * population)
        steps = arguments.steps // arguments.rounds
        count = arguments.warm_up + arguments.rounds * steps + AHEAD
        batches = make_batches(arguments, count)
        lru = {"max_rows": max_rows, "eviction": "lru"}
        bounds_of_sides: dict[str, dict[str, Any]] = {
            "dram": {},
            "lost": lru,
            "ssd": {**lru, "cold_store": f"{folder}/cold"},
            "rocksdb": {**lru, "cold_store": f"rocksdb://{folder}/cold"},
        }
        sides = {}
        for name, bounds in bounds_of_sides.items():
            filled = max_rows if name == "lost" else population
            sides[name] = LimitedModel(arguments, bounds, batches, filled)
        timings: dict[str, list[Timing]] = {name: [] for name in sides}
        # What lies in the page cache must not depend on which side was filled last.
        cache(Path(folder))
        for side in sides.values():
            side.round(arguments.warm_up)
            side.start_counting()
        for _ in range(arguments.rounds):
            for name, side in sides.items():
                timings[name].append((side.round(steps),))

        speeds = speed_figures(timings, steps * arguments.batch_size)
        hit_rates = {name: side.rates() for name, side in sides.items()}
        cold_tables = {name: sides[name].tables for name in ("ssd", "rocksdb")}
        cold_rows = sum(table.stats().cold_rows for table in cold_tables["ssd"])
        cache(Path(folder))
        cached_reads = cold_reads(cold_tables, arguments)
        disk_reads = cold_reads(cold_tables, arguments, Path(folder))
        emit(
            {
                "benchmark": "tiers",
                "ids": population * NUM_IDS,
                "exponent": arguments.exponent,
                "dim": arguments.dim,
                "batch_size": arguments.batch_size,
                "rows_in_dram": max_rows * NUM_IDS,
                **speeds,
                "rates": hit_rates,
                "cold_rows": cold_rows,
                "cold_reads": cached_reads,
                "cold_reads_from_disk": disk_reads,
            }
        )
        for side in sides.values():
            for table in side.tables:
                table.close()


def speed_figures(
    timings: dict[str, list[Timing]],
    samples: int,
) -> dict[str, Any]:
    """Returns the samples per second of each side, and over those without limits."""
    samples_per_second = {}
    for name, side_timings in timings.items():
        samples_per_second[name] = spread(rates(side_timings, samples), 1)
    figures: dict[str, Any] = {"samples_per_second": samples_per_second}
    for name in ("lost", "ssd", "rocksdb"):
        speedups = ratios(timings["dram"], timings[name])
        figures[f"{name}_over_dram"] = spread(speedups, 1)
    return figures


PARTS = {
    "eviction": eviction,
    "pauses": pauses,
    "memory": memory,
    "writes": writes,
    "tiers": tiers,
}


def parsed_arguments() -> argparse.Namespace:
    """Returns the arguments of the command."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument(
        "--steps",
        type=int,
        default=120,
        help="measured steps of each side",
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=1_000_000,
        help="rows of the tables of eviction and memory",
    )
    parser.add_argument(
        "--ids",
        type=int,
        default=20_000_000,
        help="number of ids of all 26 features together",
    )
    parser.add_argument("--exponent", type=float, default=1.05)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument(
        "--warm-up",
        type=int,
        default=40,
        help="warm-up steps of tiers, which are not measured",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=8,
        help="number of rounds in which the sides of tiers alternate",
    )
    parser.add_argument(
        "--reads",
        type=int,
        default=10_000,
        help="number of cold rows of a batch get",
    )
    parser.add_argument(
        "--folder",
        help="folder for the cold rows; default: the folder for temporary files",
    )
    return parser.parse_args()


def main() -> None:
    """Measures the requested parts."""
    arguments = parsed_arguments()
    for part in arguments.parts.split(","):
        PARTS[part](arguments)
    sys.stdout.flush()
    os._exit(0)  # the shutdown of gloo sometimes aborts (torch 2.13)


if __name__ == "__main__":
    main()
