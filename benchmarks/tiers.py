"""What bounds on memory cost: eviction, resident memory, and training with most rows below DRAM.

    python benchmarks/tiers.py [--parts eviction,memory,tiers] [--ids 20000000] [--dim 64] [--batch-size 2048]

A JSON row a part; the sides of each are interleaved in one process.

- eviction: forward and backward of a kernel over one full table of ``--rows`` rows, a tenth of each batch new ids,
  under LRU, under LFU, and without a bound.
- memory: resident memory of a table through which three times ``--rows`` ids have gone, over that of an unbounded table
  of ``--rows`` rows.
- tiers: samples/s of the DLRM of dlrm.py. Each of its 26 features draws its ids by a Zipf law of ``--exponent`` from a
  26th of ``--ids``; tables keep all rows in DRAM, a tenth of them with the others lost, or a tenth with the others in
  RocksDB. Also how fast cold rows are read, by a table and by rocksdict's own batch get from the same database.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dlrm import settings_of
from kernel import zipf
from measure import ROOT, clock, emit, interleave, spread
from memory import resident_bytes

sys.path.insert(0, str(ROOT / "examples"))
sys.path.insert(0, str(ROOT / "examples" / "dlrm"))

from common.run_settings import Bounds
from criteo import NUM_DENSE, NUM_IDS, Rows
from sharded import build
from sources import BatchMaker
from torch import Tensor
from torchrec.datasets.utils import Batch

from torchrec_recstore import ops, table_stats
from torchrec_recstore.kernels import PooledKernel
from torchrec_recstore.optim import RowWiseAdagrad
from torchrec_recstore.options import LFU, LRU, TableOptions
from torchrec_recstore.sharders import RecStorePrefetchPipeline
from torchrec_recstore.store import Table
from torchrec_recstore.store.cold_store import id_bytes, split

NEW = 0.1  # of a batch's ids
BLOCK_STEPS = 10  # rows leave many at a time: the mean over several steps counts
AHEAD = 3  # batches that a pipeline holds
SHARE = 0.1  # of the ids have room in DRAM


def fill(table: Table, ids: Tensor, most: int) -> None:
    """Makes the rows of ids, (N,), at most so many at once."""
    for part in ids.split(most):
        table.lookup(part, train=True)


def ratio_of_means(timings: list[tuple[float, ...]], others: list[tuple[float, ...]]) -> dict[str, float]:
    """Over blocks of neighbouring steps, so that neither the machine's drift nor a single step decides."""
    ratios = []
    for begin in range(0, len(timings) - BLOCK_STEPS + 1, BLOCK_STEPS):
        mine, theirs = (sum(t[0] for t in side[begin : begin + BLOCK_STEPS]) for side in (timings, others))
        ratios.append(mine / theirs)
    return spread(ratios, 1)


def eviction(arguments: argparse.Namespace) -> None:
    """Measures a kernel's steps and prints the row."""
    rows, batch, dim = arguments.rows, arguments.rows // 10, arguments.dim
    new = int(NEW * batch)
    steps = arguments.steps // BLOCK_STEPS * BLOCK_STEPS
    warm_up = rows // new  # until every row has been let in by a step like those that are measured
    generator = torch.Generator().manual_seed(0)
    hot = torch.randperm(rows // 2, generator=generator)  # who comes again soon enough to stay under either policy
    options = {
        "lru": TableOptions(max_rows=rows, eviction=LRU()),
        "lfu": TableOptions(max_rows=rows, eviction=LFU(half_life_steps=100)),
        "unbounded": TableOptions(),
    }
    tables = {name: Table(dim, optimizer=RowWiseAdagrad(), options=each) for name, each in options.items()}
    offsets = torch.arange(batch + 1)
    grad = torch.randn(batch, dim, generator=generator) * 0.01
    batches: dict[int, Tensor] = {}

    def ids_of(step: int) -> Tensor:
        if step not in batches:
            batches.clear()
            known = hot[torch.randint(0, len(hot), (batch - new,), generator=generator)]
            ids = torch.cat([known, 2**40 + torch.arange(step * new, (step + 1) * new)])
            batches[step] = ids[torch.randperm(batch, generator=generator)]
        return batches[step]

    def side(table: Table) -> Callable[[int], tuple[float]]:
        kernel = PooledKernel([table], [0], "sum")

        def step(i: int) -> tuple[float]:
            ids = ids_of(i)
            begin = clock()
            kernel(ids, offsets, train=True).backward(grad)
            return (clock() - begin,)

        return step

    # The unbounded table's memory has been touched before, too: the machine's first touch is not what is compared.
    fill(tables["unbounded"], torch.arange(-rows - (warm_up + steps) * new, 0), batch)
    tables["unbounded"].remove(tables["unbounded"].ids()[1:])
    for table in tables.values():
        fill(table, hot, batch)
    before = {name: table.stats() for name, table in tables.items()}
    timings = interleave({name: side(table) for name, table in tables.items()}, steps, warm_up)
    after = {name: table.stats() for name, table in tables.items()}
    emit(
        {
            "benchmark": "eviction",
            "rows": rows,
            "dim": dim,
            "batch": batch,
            "new_ids": new,
            "step_ms": {name: spread([t[0] for t in values]) for name, values in timings.items()},
            "mean_step_ms": {
                name: round(statistics.mean(t[0] for t in values) * 1e3, 3) for name, values in timings.items()
            },
            "lru_over_unbounded": ratio_of_means(timings["lru"], timings["unbounded"]),
            "lfu_over_unbounded": ratio_of_means(timings["lfu"], timings["unbounded"]),
            "misses_a_step": {
                name: (each.misses - before[name].misses) / (warm_up + steps) for name, each in after.items()
            },
            "resident": {name: each.rows for name, each in after.items()},
        }
    )


def memory(arguments: argparse.Namespace) -> None:
    """Measures resident memory and prints the row."""
    rows, step = arguments.rows, 20_000
    taken = {}
    for name, options, many in (
        ("bounded", TableOptions(max_rows=rows, eviction=LRU()), 3 * rows),
        ("unbounded", TableOptions(), rows),
    ):
        table = Table(arguments.dim, optimizer=RowWiseAdagrad(), options=options)
        ids = torch.empty(step, dtype=torch.int64)
        for _ in range(100):  # the buffers of a step are there before and after
            table.lookup(ids.fill_(0), train=True)
        before = resident_bytes()
        for begin in range(1, many, step):
            table.lookup(torch.arange(begin, begin + step, out=ids), train=True)
        taken[name] = resident_bytes() - before
        table.close()
    emit(
        {
            "benchmark": "bounded_memory",
            "rows": rows,
            "dim": arguments.dim,
            "resident_bytes_per_row": {name: round(size / rows, 1) for name, size in taken.items()},
            "bounded_over_unbounded": round(taken["bounded"] / taken["unbounded"], 3),
        }
    )


def id_at(rank: Tensor, feature: int) -> Tensor:
    """The ids at ranks, (N,) from 0, of a feature: spread over all of int64, as hashed values are."""
    return ops.mix_ids(rank + (feature << 40), False)


def make_batches(arguments: argparse.Namespace, count: int) -> list[Batch]:
    """Batches of DLRM, their ids by the Zipf law."""
    generator = torch.Generator().manual_seed(0)
    size, each = arguments.batch_size, arguments.ids // NUM_IDS
    rows = []
    for _ in range(count):
        columns = [id_at(zipf(size, generator, arguments.exponent, each) - 1, f) for f in range(NUM_IDS)]
        dense = torch.randn(size, NUM_DENSE, generator=generator)
        labels = torch.randint(0, 2, (size,), generator=generator, dtype=torch.int32)
        rows.append(Rows(labels.numpy(), dense.numpy(), torch.stack(columns, 1).numpy()))
    return [step.batch for step in BatchMaker().steps(rows)]


class Side:
    """DLRM with tables of some bounds, filled as if it had trained for long.

    Args:
        arguments: of the command.
        bounds: of each table.
        batches: which it trains on, in order.
        filled: how many ids of each feature, the frequent ones last.
    """

    def __init__(self, arguments: argparse.Namespace, bounds: Bounds, batches: list[Batch], filled: int) -> None:
        settings = replace(settings_of("recstore", arguments.dim, arguments.batch_size), bounds=bounds)
        self.model, optimizer = build(settings)
        self.model.train()
        (sparse,) = (module for module in self.model.modules() if hasattr(module, "recstore_tables"))
        self.tables: list[Table] = list(sparse.recstore_tables())
        begin = clock()
        for feature, table in enumerate(self.tables):
            fill(table, id_at(torch.arange(filled - 1, -1, -1), feature), min(50_000, (bounds.max_rows or filled) // 2))
        print(f"{bounds}: filled in {clock() - begin:.1f} s", file=sys.stderr)
        self._pipeline = RecStorePrefetchPipeline(self.model, optimizer, torch.device("cpu"))
        self._batches: Iterator[Batch] = iter(batches)
        self.before: dict[str, Any] = {}

    def round(self, steps: int) -> float:
        """Seconds of so many steps, to the end of what they do beside them."""
        begin = clock()
        for _ in range(steps):
            self._pipeline.progress(self._batches)
        self._pipeline._finish_prefetch()
        return clock() - begin

    def start_counting(self) -> None:
        """Hit rates are of what follows."""
        self.before = table_stats(self.model)

    def rates(self) -> dict[str, float]:
        """Of the distinct ids of a step and table: who had a row in DRAM, and who in the cold store."""
        after = table_stats(self.model)
        lookups, hits, cold_hits = (
            sum(getattr(after[name], field) - getattr(self.before[name], field) for name in after)
            for field in ("lookups", "hits", "cold_hits")
        )
        return {"hit_rate": round(hits / lookups, 4), "cold_hit_rate": round(cold_hits / lookups, 4)}


def cold_reads(tables: list[Table], arguments: argparse.Namespace) -> dict[str, Any]:
    """Rows a second: of a table's cold reads, of its store, and of rocksdict's own batch get from the same database."""
    each, reads = arguments.ids // NUM_IDS, arguments.reads
    generator = torch.Generator().manual_seed(1)
    rates: dict[str, list[float]] = {"lookup": [], "store": [], "rocksdict": []}
    for i in range(2 * len(tables)):
        number = i % len(tables)
        table = tables[number]
        assert table.tier is not None
        store: Any = table.tier.store
        database = store._database()  # the same data, files and caches
        ids = id_at(torch.randperm(each, generator=generator)[: 4 * reads], number)
        cold = ops.table_absent(table.handle, ids)[: 3 * reads]
        names = list(rates)[i % 3 :] + list(rates)[: i % 3]  # the first has to fetch the table's filters
        for part, name in zip(cold[: len(cold) // 3 * 3].split(len(cold) // 3), names, strict=True):
            keys: Any = split(id_bytes(part))
            begin = clock()
            if name == "lookup":
                table.lookup(part)
            elif name == "store":
                store.get(part)
            else:
                database.get(keys)
            rates[name].append(len(part) / (clock() - begin))
    over = {
        name: spread([a / b for a, b in zip(rates[name], rates["rocksdict"], strict=True)], 1)["median"]
        for name in ("lookup", "store")
    }
    return {
        "reads": reads,
        "rows_per_second": {name: spread(values, 1) for name, values in rates.items()},
        "lookup_over_rocksdict": round(over["lookup"], 3),
        "store_over_rocksdict": round(over["store"], 3),
    }


def tiers(arguments: argparse.Namespace) -> None:
    """Measures DLRM's samples a second and prints the row."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'group'}", rank=0, world_size=1)
        each = arguments.ids // NUM_IDS
        max_rows = int(SHARE * each)
        steps = arguments.steps // arguments.rounds
        batches = make_batches(arguments, arguments.warm_up + arguments.rounds * steps + AHEAD)
        bounds = {
            "dram": (Bounds(), each),
            "lost": (Bounds(max_rows=max_rows, eviction="lru"), max_rows),
            "rocksdb": (Bounds(max_rows=max_rows, eviction="lru", cold_store=str(Path(folder) / "cold")), each),
        }
        sides = {name: Side(arguments, b, batches, filled) for name, (b, filled) in bounds.items()}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for side in sides.values():
            side.round(arguments.warm_up)
            side.start_counting()
        for _ in range(arguments.rounds):
            for name, side in sides.items():
                seconds[name].append(side.round(steps))
        samples = steps * arguments.batch_size
        over = {
            name: spread([a / b for a, b in zip(seconds["dram"], seconds[name], strict=True)], 1)
            for name in ("lost", "rocksdb")
        }
        emit(
            {
                "benchmark": "tiers",
                "ids": each * NUM_IDS,
                "exponent": arguments.exponent,
                "dim": arguments.dim,
                "batch_size": arguments.batch_size,
                "rows_in_dram": max_rows * NUM_IDS,
                "samples_per_second": {n: spread([samples / t for t in values], 1) for n, values in seconds.items()},
                "lost_over_dram": over["lost"],
                "rocksdb_over_dram": over["rocksdb"],
                "rates": {name: side.rates() for name, side in sides.items()},
                "cold_rows": sum(table.stats().cold_rows for table in sides["rocksdb"].tables),
                "cold_reads": cold_reads(sides["rocksdb"].tables, arguments),
            }
        )
        for side in sides.values():
            for table in side.tables:
                table.close()


def main() -> None:
    """Measures the parts asked for."""
    parts = {"eviction": eviction, "memory": memory, "tiers": tiers}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(parts))
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=120, help="of each side that are measured")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the tables of eviction and memory")
    parser.add_argument("--ids", type=int, default=20_000_000, help="of all 26 features together")
    parser.add_argument("--exponent", type=float, default=1.05)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--warm-up", type=int, default=40, help="steps of tiers that are not measured")
    parser.add_argument("--rounds", type=int, default=8, help="in which the sides of tiers take turns")
    parser.add_argument("--reads", type=int, default=10_000, help="cold rows of a batch get")
    parser.add_argument("--folder", help="where the cold rows lie; by default the folder for temporary files")
    arguments = parser.parse_args()
    for part in arguments.parts.split(","):
        parts[part](arguments)
    sys.stdout.flush()
    os._exit(0)  # gloo's teardown aborts now and then (torch 2.13)


if __name__ == "__main__":
    main()
