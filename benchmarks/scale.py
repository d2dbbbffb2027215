"""Models the cost of a rank's training step from 1 to 1,024 ranks.

    # measures, checks, writes benchmarks/scale.json and docs/scale.png
    python benchmarks/scale.py
    # prints the tables and draws the plot from benchmarks/scale.json
    python benchmarks/scale.py --only tables

The model is in ``scale_model.py``. Its inputs are measured with one rank of one thread:
lookups and updates of DLRM's 26 tables of dim 128, TorchRec's work around them, the
dense part with the layers of MLPerf's DLRM, copies in memory.

The model is checked on simulated hosts. The check needs a checkout, and root on Linux.
It trains the tables on 1 to 4 ranks with gloo, on one
simulated host or on two. A wire between the hosts limits the rate and delays packets
(``tests/examples/network_wire.py``). The bytes and the time of a step are compared with
those of the model, for which the kernels are measured with one rank.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import scale_model as model
from scale_model import Job, Kernels, Network, Sharding

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "scale.json"
PLOT = ROOT / "docs" / "scale.png"
ROWS = 200_000  # of each table when kernels are measured
OVER = (1024, 1024, 512, 256, 1)
"""The layers after the interaction.

Source: MLPerf's DLRM, ``--over_arch_layer_sizes`` of its reference.
"""

CHECK = Job(
    batch=128,
    dense_parameters=200_000,
    ranks_per_host=2,
)
CHECK_ROWS = 500  # few, so that the first steps have made all rows
CHECK_STEPS = 5
SETTINGS = ((60e6, 0.0), (120e6, 0.005))
"""The rates and the delays of the check's wire.

A rate is in bits a second for both directions together, a delay in seconds.
"""

RANKS = tuple(2**power for power in range(11))
TARGET_RATE = 5.5e6  # samples a second
NAMES: dict[Sharding, str] = {
    "table_wise": "table-wise",
    "row_wise": "row-wise",
    "table_row_wise": "table-row-wise",
    "grid": "grid",
}
COLORS = {
    "table_wise": "#b35c00",
    "row_wise": "#8a1c7c",
    "table_row_wise": "#4c7a34",
    "grid": "#0b6e99",
}


# ---- What is measured with one rank ----


def median_s(
    work: Callable[[], Any],
    steps: int,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """Returns the median time of a call in seconds.

    Two calls before are not counted.

    Args:
        work: The call.
        steps: The number of calls.
        clock: The clock in seconds. Default: the processor time of this process, which
            has one thread, so that other programs on its core do not count.
    """
    times = []
    for i in range(steps + 2):
        begin = clock()
        work()
        if i >= 2:
            times.append(clock() - begin)
    return statistics.median(times)


def kernel_times(job: Job, columns: int, rows: int, steps: int) -> tuple[float, float]:
    """Returns the seconds of an id, and of a bag without an id.

    They are those of lookup and update together.
    """
    import torch

    from torchrec_recstore.kernels import PooledGroup
    from torchrec_recstore.optim import RowWiseAdagrad
    from torchrec_recstore.store import Table

    tables = []
    for i in range(job.features):
        table = Table(
            job.dim,
            optimizer=RowWiseAdagrad(0.01),
            name=f"t{i}",
            columns=range(columns),
        )
        table.insert(torch.arange(rows), torch.zeros(rows, columns))
        tables.append(table)
    group = PooledGroup(tables, list(range(job.features)), "sum")
    generator = torch.Generator().manual_seed(0)
    count = job.features * job.batch

    def seconds(bags_of_id: int) -> float:
        bags = torch.arange(count * bags_of_id + 1)
        rounded_up = bags + bags_of_id - 1
        ends = rounded_up.div(bags_of_id, rounding_mode="floor")
        out_shape = (job.batch * bags_of_id, job.features * columns)
        grads = torch.full(out_shape, 1e-3)

        def work() -> None:
            ids = torch.randint(0, rows, (count,), generator=generator)
            out = group(ids, ends, train=True)
            out.backward(grads)

        return median_s(work, steps)

    one_bag_s = seconds(bags_of_id=1)
    eight_bags_s = seconds(bags_of_id=8)
    for table in tables:
        table.close()
    bags_s = max(0.0, eight_bags_s - one_bag_s)
    return one_bag_s / count, bags_s / (7 * count)


def sharded_step(job: Job, sharding: Sharding, rows: int) -> Callable[[], None]:
    """Returns a function that runs a step of sharded tables.

    The step also has an all-reduce of the size of the dense part.
    """
    import torch
    import torch.distributed as dist
    from torchrec import KeyedJaggedTensor

    names = [f"f{i}" for i in range(job.features)]
    model_on_ranks = _sharded_tables(names, job.dim, sharding, rows)
    generator = torch.Generator().manual_seed(dist.get_rank())
    count = job.features * job.batch
    lengths = torch.ones(count, dtype=torch.int32)
    dense = torch.zeros(job.dense_parameters)

    def run() -> None:
        ids = torch.randint(0, rows, (count,), generator=generator)
        features = KeyedJaggedTensor(names, ids, lengths=lengths)
        values = model_on_ranks(features).values()
        values.backward(torch.ones_like(values))
        if len(dense):
            dist.all_reduce(dense)

    return run


def _sharded_tables(
    names: list[str],
    dim: int,
    sharding: Sharding,
    rows: int,
) -> Any:
    """Returns a table of each feature's name, sharded over all ranks."""
    import torch
    import torch.distributed as dist
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import Topology

    from torchrec_recstore import RecStoreConstraints, RecStorePlanner, RecStoreSharder

    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}",
            embedding_dim=dim,
            num_embeddings=rows,
            feature_names=[name],
        )
        for name in names
    ]
    is_grid = sharding == "grid"
    constraint = RecStoreConstraints(
        sharding_types=["grid_shard" if is_grid else sharding],
        min_partition=model.GRID_COLUMNS if is_grid else None,
    )
    topology = Topology(
        world_size=dist.get_world_size(),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        compute_device="cpu",
    )
    planner = RecStorePlanner(
        topology=topology,
        constraints={table.name: constraint for table in tables},
        debug=False,
    )
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    optimizer = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    sharder = RecStoreSharder(
        fused_params={"optimizer": optimizer, "learning_rate": 0.01}
    )
    plan = planner.collective_plan(collection, [sharder], dist.group.WORLD)
    return DistributedModelParallel(
        collection,
        plan=plan,
        sharders=[sharder],
        device=torch.device("cpu"),
    )


def dense_time(job: Job, steps: int) -> tuple[float, int]:
    """Returns the seconds of the dense part for a sample, and its parameters' number."""
    import torch
    from torch import nn
    from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch

    bottom = DenseArch(13, [512, 256, job.dim])
    interaction = InteractionArch(job.features)
    products = job.features * (job.features + 1) // 2
    over = OverArch(job.dim + products, list(OVER))
    parameters = [*bottom.parameters(), *over.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    inputs = torch.randn(job.batch, 13)
    embeddings = torch.randn(job.batch, job.features, job.dim)
    labels = torch.zeros(job.batch)

    def work() -> None:
        optimizer.zero_grad()
        pooled = embeddings.detach().requires_grad_()
        interactions = interaction(bottom(inputs), pooled)
        logits = over(interactions).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        optimizer.step()

    step_s = median_s(work, steps)
    num_parameters = sum(parameter.numel() for parameter in parameters)
    return step_s / job.batch, num_parameters


def measured_kernels(job: Job, rows: int, steps: int) -> tuple[Kernels, int]:
    """Measures the times of one rank.

    Returns:
        The times, and the number of the dense part's parameters.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    id_s = {}
    bag_s = {}
    for columns in (job.dim, model.GRID_COLUMNS):
        id_s[columns], bag_s[columns] = kernel_times(job, columns, rows, steps)
    source, target = torch.ones(2, 2**24)
    copy_s = median_s(lambda: target.copy_(source), steps)
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
        )
    # Few rows, so that the warm-up makes all of them: a step with new rows costs
    # something else than a step without.
    small_job = Job(job.features, job.dim, job.batch)
    run = sharded_step(small_job, "table_wise", CHECK_ROWS)
    for _ in range(4 * CHECK_ROWS // job.batch):
        run()
    small_id_s, _ = kernel_times(job, job.dim, CHECK_ROWS, steps)
    kernel_s = job.features * job.batch * small_id_s
    torchrec_s = max(0.0, median_s(run, steps) - kernel_s)
    dense_s, parameters = dense_time(job, steps)
    kernels = Kernels(
        id_s=id_s,
        bag_s=bag_s,
        torchrec_s=torchrec_s,
        dense_s=dense_s,
        copy_bytes_per_s=source.nbytes / copy_s,
    )
    return kernels, parameters


# ---- The check ----


def run_rank(shardings: list[Sharding], rows: Path) -> None:
    """Runs one rank of the check under torchrun.

    Rank 0 appends a JSON row for each sharding to a file.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    steps = CHECK_STEPS
    clock = time.perf_counter
    if dist.get_world_size() == 1:  # steps of milliseconds, which wait for no rank
        steps = 80 * CHECK_STEPS
        clock = time.process_time
    for sharding in shardings:
        run = sharded_step(CHECK, sharding, CHECK_ROWS)
        dist.barrier()
        sent_before = int(counter.read_text())
        seconds = median_s(run, steps, clock)
        sent = int(counter.read_text()) - sent_before
        dist.barrier()
        if dist.get_rank() == 0:
            row = {
                "sharding": sharding,
                "bytes": sent // (steps + 2),
                "seconds": seconds,
            }
            with rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
    dist.barrier()
    os._exit(0)  # gloo's teardown sometimes aborts after all work is done.


def measured_steps(
    hosts: int,
    ranks: int,
    rate: float,
    delay_s: float,
) -> list[dict[str, Any]]:
    """Runs the ranks on simulated hosts, and returns the row of each sharding."""
    sys.path.insert(0, str(ROOT))
    # a checkout has it, no package
    wired_hosts = importlib.import_module("tests.examples.network_wire").wired_hosts
    shardings: list[Sharding] = ["table_wise", "row_wise"]
    if ranks > hosts:
        shardings = list(model.SHARDINGS)
    with (
        tempfile.TemporaryDirectory() as folder,
        wired_hosts(hosts) as (simulated, wire),
    ):
        wire.bytes_per_s = rate / 8
        wire.delay_s = delay_s
        log = Path(folder) / "log"
        rows = Path(folder) / "rows"
        for number, host in enumerate(simulated):
            arguments = ["--nnodes", str(hosts)]
            arguments += ["--node-rank", str(number)]
            arguments += ["--nproc-per-node", str(ranks // hosts)]
            arguments += ["--master-addr", simulated[0].address]
            arguments += ["--master-port", "29400"]
            arguments.append(__file__)
            arguments += ["--rank", ",".join(shardings), str(rows)]
            host.torchrun(arguments, log)
        if any(host.wait(580) for host in simulated):
            raise RuntimeError(f"a rank of the check failed:\n{log.read_text()}")
        return [json.loads(line) for line in rows.read_text().splitlines()]


def check() -> tuple[Kernels, list[dict[str, Any]]]:
    """Measures the kernels of one rank, and then steps on simulated hosts."""
    kernels, _ = measured_kernels(CHECK, CHECK_ROWS, steps=400)
    rows: list[dict[str, Any]] = []
    for ranks, hosts in ((1, 1), (2, 2), (4, 2)):
        settings = SETTINGS if hosts > 1 else SETTINGS[:1]
        for rate, delay_s in settings:
            conditions = {
                "hosts": hosts,
                "ranks": ranks,
                "rate": rate,
                "delay_s": delay_s,
            }
            for measured in measured_steps(hosts, ranks, rate, delay_s):
                row = {**conditions, **measured}
                rows.append(row)
                line = json.dumps(row | expected(row, kernels))
                print(line, file=sys.stderr, flush=True)
    return kernels, rows


def expected(row: dict[str, Any], kernels: Kernels) -> dict[str, float]:
    """Returns the model's bytes from a host and seconds of a step of the check."""
    sharding = row["sharding"]
    ranks = row["ranks"]
    job = replace(CHECK, ranks_per_host=ranks // row["hosts"])
    network = Network(
        name="check",
        # Both directions of the wire have the same load, so that each gets half of its
        # rate, which is in bits.
        bytes_per_s=row["rate"] / 8 / 2,
        latency_s=row["delay_s"],
    )
    parts = model.step(job, sharding, ranks, network, kernels, model.GLOO)
    del parts["dense"]  # the check has the all-reduce of the dense part alone
    # ranks that share a core take turns
    ranks_of_core = max(1.0, ranks / (os.cpu_count() or 1))
    for name in ("tables", "torchrec"):
        parts[name] *= ranks_of_core
    collectives = model.collectives(job, sharding, ranks, model.GLOO)
    host_bytes = sum(collective.host_bytes for collective in collectives)
    return {
        "model_bytes": host_bytes,
        "model_seconds": sum(parts.values()),
    }


# ---- Tables and the plot ----


def kernels_of(document: dict[str, Any]) -> Kernels:
    """Returns kernels from JSON, whose keys are texts."""
    values = dict(document)
    for key in ("id_s", "bag_s"):
        seconds_of_columns = {}
        for columns, seconds in document[key].items():
            seconds_of_columns[int(columns)] = seconds
        values[key] = seconds_of_columns
    return Kernels(**values)


def job_of(results: dict[str, Any]) -> Job:
    """Returns the model of the tables and the plot."""
    return Job(dense_parameters=results["dense_parameters"])


def inputs_lines(results: dict[str, Any]) -> list[str]:
    """Returns a Markdown table of the measured inputs."""
    kernels = kernels_of(results["kernels"])
    dim = max(kernels.id_s)

    def nanoseconds(seconds: dict[int, float]) -> str:
        wide_ns = seconds[dim] * 1e9
        narrow_ns = seconds[model.GRID_COLUMNS] * 1e9
        return f"{wide_ns:.0f} ns; {narrow_ns:.0f} ns"

    columns = f"{dim} columns; {model.GRID_COLUMNS} columns"
    torchrec_ms = kernels.torchrec_s * 1e3
    dense_us = kernels.dense_s * 1e6
    copy_gb_per_s = kernels.copy_bytes_per_s / 1e9
    measured = {
        f"lookup and update of an id, {columns}": nanoseconds(kernels.id_s),
        f"forward and backward of a bag without an id, {columns}": (
            nanoseconds(kernels.bag_s)
        ),
        "TorchRec's work in a step on one rank, without the kernels": (
            f"{torchrec_ms:.1f} ms"
        ),
        "the dense part with SGD, for each sample": f"{dense_us:.1f} µs",
        "parameters of the dense part": f"{results['dense_parameters']:,}",
        "a copy in memory": f"{copy_gb_per_s:.1f} GB/s",
    }
    lines = [
        "| measured | value |",
        "| --- | --- |",
    ]
    for name, value in measured.items():
        lines.append(f"| {name} | {value} |")
    return lines


def step_lines(results: dict[str, Any], network: Network) -> list[str]:
    """Returns a Markdown table of the milliseconds of a step at each number of ranks.

    The fastest step is bold.
    """
    job = job_of(results)
    kernels = kernels_of(results["kernels"])
    names = " | ".join(NAMES.values())
    lines = [
        f"| ranks | {names} |",
        "| ---: " * (len(NAMES) + 1) + "|",
    ]
    for ranks in RANKS:
        totals_ms = []
        for sharding in NAMES:
            parts = model.step(job, sharding, ranks, network, kernels)
            total_s = sum(parts.values())
            totals_ms.append(total_s * 1e3)
        fastest_ms = min(round(total_ms) for total_ms in totals_ms)
        cells = [f"{ranks:,}"]
        for total_ms in totals_ms:
            cell = f"{total_ms:,.0f}"
            if round(total_ms) == fastest_ms:
                cell = f"**{cell}**"
            cells.append(cell)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def hosts_lines(results: dict[str, Any]) -> list[str]:
    """Returns a Markdown table of the hosts that ``TARGET_RATE`` samples a second take."""
    job = job_of(results)
    kernels = kernels_of(results["kernels"])
    names = " | ".join(NAMES.values())
    lines = [
        f"| network | dense part | {names} |",
        "| --- " * (len(NAMES) + 2) + "|",
    ]
    dense_parts = {True: "on the ranks' cores", False: "left out"}
    for network in model.NETWORKS:
        for dense, name in dense_parts.items():
            cells = [network.name, name]
            for sharding in NAMES:
                hosts = model.hosts_for(
                    TARGET_RATE,
                    job,
                    sharding,
                    network,
                    kernels,
                    dense,
                )
                cells.append("-" if hosts is None else f"{hosts:,}")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def parts_lines(
    results: dict[str, Any],
    ranks: int,
    network: Network,
) -> list[str]:
    """Returns a Markdown table of the parts of a step in milliseconds."""
    job = job_of(results)
    kernels = kernels_of(results["kernels"])
    lines = [
        "| sharding | dense part | lookups and updates | TorchRec | collectives |",
        "| --- " * 5 + "|",
    ]
    for sharding, name in NAMES.items():
        parts = model.step(job, sharding, ranks, network, kernels)
        milliseconds = []
        for key in ("dense", "tables", "torchrec"):
            milliseconds.append(parts.pop(key) * 1e3)
        collectives_s = sum(parts.values())
        milliseconds.append(collectives_s * 1e3)

        cells = [name]
        for part_ms in milliseconds:
            cells.append(f"{part_ms:,.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def check_lines(results: dict[str, Any]) -> list[str]:
    """Returns a Markdown table of the check."""
    kernels = kernels_of(results["check_kernels"])
    lines = [
        (
            "| hosts, ranks | rate, delay | sharding | MB, model | MB, measured | ms,"
            " model | ms, measured | difference |"
        ),
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]

    def milliseconds(seconds: float) -> str:
        digits = 0 if seconds > 0.01 else 1
        return f"{seconds * 1e3:.{digits}f}"

    for row in results["check"]:
        modelled = expected(row, kernels)
        wire = "-"
        if row["hosts"] > 1:
            rate_mbit = row["rate"] / 1e6
            delay_ms = row["delay_s"] * 1e3
            wire = f"{rate_mbit:.0f} Mbit/s, {delay_ms:.0f} ms"
        difference = modelled["model_seconds"] / row["seconds"] - 1
        cells = [
            f"{row['hosts']}, {row['ranks']}",
            wire,
            NAMES[row["sharding"]],
            f"{modelled['model_bytes'] / 1e6:.2f}",
            f"{row['bytes'] / 1e6:.2f}",
            milliseconds(modelled["model_seconds"]),
            milliseconds(row["seconds"]),
            f"{difference * 100:+.0f} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def plot(results: dict[str, Any], path: Path) -> None:
    """Draws the time of a step and the samples a second for each network."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    job = job_of(results)
    kernels = kernels_of(results["kernels"])
    figure, axes = plt.subplots(
        nrows=2,
        ncols=3,
        figsize=(10, 5.8),
        layout="constrained",
        sharex=True,
        sharey="row",
    )
    for (upper, lower), network in zip(axes.T, model.NETWORKS, strict=True):
        _draw_shardings(upper, lower, job, network, kernels)
        upper.axhline(
            job.batch * kernels.dense_s,
            color="#777777",
            linestyle=":",
            label="dense part",
        )
        lower.axhline(
            TARGET_RATE,
            color="#777777",
            linestyle="--",
            label="5.5 million samples/s",
        )
        upper.set_title(network.name + " for each host", fontsize=10)
        lower.set_xlabel("ranks, 8 on a host")
        for axis in (upper, lower):
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            ticks = RANKS[::2]
            axis.set_xticks(ticks, [f"{ranks:,}" for ranks in ticks])
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("seconds of a step")
    axes[1, 0].set_ylabel("samples/s of all ranks")
    axes[0, 0].legend(frameon=False, fontsize=8)
    axes[1, 0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130, facecolor="white")


def _draw_shardings(
    upper: Any,
    lower: Any,
    job: Job,
    network: Network,
    kernels: Kernels,
) -> None:
    """Draws the seconds of a step above, and the samples a second below."""
    for sharding, name in NAMES.items():
        seconds = []
        rates = []
        for ranks in RANKS:
            parts = model.step(job, sharding, ranks, network, kernels)
            step_s = sum(parts.values())
            seconds.append(step_s)
            rates.append(ranks * job.batch / step_s)
        color = COLORS[sharding]
        upper.plot(RANKS, seconds, color=color, label=name)
        lower.plot(RANKS, rates, color=color)


def main() -> None:
    """Measures, checks, prints the tables and draws the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        choices=("inputs", "check", "tables"),
        help="Run one part. Default: all parts.",
    )
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        shardings, rows_file = args.rank
        run_rank(shardings.split(","), Path(rows_file))
    results = {}
    if RESULTS.exists():
        results = json.loads(RESULTS.read_text())
    if args.only in (None, "inputs"):
        from measure import conditions

        kernels, parameters = measured_kernels(Job(), ROWS, steps=20)
        results |= {
            "conditions": conditions(),
            "kernels": asdict(kernels),
            "dense_parameters": parameters,
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    if args.only in (None, "check"):
        kernels, rows = check()
        results |= {"check_kernels": asdict(kernels), "check": rows}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    network = model.NETWORKS[1]
    tables = (
        inputs_lines(results),
        step_lines(results, network),
        parts_lines(results, 1024, network),
        hosts_lines(results),
    )
    for lines in tables:
        print("\n".join(lines))
        print()
    print("\n".join(check_lines(results)))
    plot(results, PLOT)


if __name__ == "__main__":
    main()
