"""Models the cost of a rank's training step from 1 to 1,024 ranks, and checks the model
on simulated hosts.

    python benchmarks/scale.py                   # measures, checks, writes benchmarks/scale.json and docs/scale.png
    python benchmarks/scale.py --only tables     # prints the tables and draws the plot from benchmarks/scale.json

The model is in ``scale_model.py``. Its inputs are measured with one rank of one thread:
lookups and updates of DLRM's 26 tables of dim 128, TorchRec's work around them, the
dense part with the layers of MLPerf's DLRM, copies in memory. The check needs a
checkout, and root on Linux. It trains the tables on 1 to 4 ranks with gloo, on one
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import scale_model as model
from scale_model import Job, Kernels, Network, Sharding

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PLOT = ROOT / "benchmarks" / "scale.json", ROOT / "docs" / "scale.png"
ROWS = 200_000  # of each table when kernels are measured
OVER = (1024, 1024, 512, 256, 1)
"""The layers after the interaction.

Source: MLPerf's DLRM, ``--over_arch_layer_sizes`` of its reference.
"""

CHECK = Job(batch=128, dense_parameters=200_000, ranks_per_host=2)
CHECK_ROWS = 500  # few, so that the first steps have made all rows
CHECK_STEPS = 5
SETTINGS = ((60e6, 0.0), (120e6, 0.005))
"""The rates of the check's wire, in bits a second for both directions together, and the
delays in seconds.
"""

RANKS = tuple(2**power for power in range(11))
WANTED = 5.5e6  # samples a second
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
    work: Callable[[], Any], steps: int, clock: Callable[[], float] = time.process_time
) -> float:
    """Returns the median time of a call in seconds, after two calls that are not
    counted.

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
    """Returns the seconds of an id, and of a bag without an id, for lookup and update
    together.
    """
    import torch

    from torchrec_recstore.kernels import PooledGroup
    from torchrec_recstore.optim import RowWiseAdagrad
    from torchrec_recstore.store import Table

    tables = [
        Table(
            job.dim,
            optimizer=RowWiseAdagrad(0.01),
            name=f"t{i}",
            columns=range(columns),
        )
        for i in range(job.features)
    ]
    for table in tables:
        table.insert(torch.arange(rows), torch.zeros(rows, columns))
    group = PooledGroup(tables, list(range(job.features)), "sum")
    generator = torch.Generator().manual_seed(0)
    count = job.features * job.batch

    def seconds(bags_of_id: int) -> float:
        ends = (
            torch.arange(count * bags_of_id + 1)
            .add(bags_of_id - 1)
            .div(bags_of_id, rounding_mode="floor")
        )
        grads = torch.full((job.batch * bags_of_id, job.features * columns), 1e-3)

        def work() -> None:
            ids = torch.randint(0, rows, (count,), generator=generator)
            group(ids, ends, train=True).backward(grads)

        return median_s(work, steps)

    alone, spread = seconds(1), seconds(8)
    for table in tables:
        table.close()
    return alone / count, max(0.0, spread - alone) / (7 * count)


def sharded_step(job: Job, sharding: Sharding, rows: int) -> Callable[[], None]:
    """Returns a function that runs a step of sharded tables, and an all-reduce of the
    size of the dense part.
    """
    import torch
    import torch.distributed as dist
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import Topology

    from torchrec_recstore import RecStoreConstraints, RecStorePlanner, RecStoreSharder

    names = [f"f{i}" for i in range(job.features)]
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}",
            embedding_dim=job.dim,
            num_embeddings=rows,
            feature_names=[name],
        )
        for name in names
    ]
    world = dist.get_world_size()
    constraint = RecStoreConstraints(
        sharding_types=["grid_shard" if sharding == "grid" else sharding],
        min_partition=model.GRID_COLUMNS if sharding == "grid" else None,
    )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    planner = RecStorePlanner(
        topology=Topology(
            world_size=world, local_world_size=local, compute_device="cpu"
        ),
        constraints={table.name: constraint for table in tables},
        debug=False,
    )
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    optimizer = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    sharder = RecStoreSharder(
        fused_params={"optimizer": optimizer, "learning_rate": 0.01}
    )
    plan = planner.collective_plan(collection, [sharder], dist.group.WORLD)
    sharded = DistributedModelParallel(
        collection, plan=plan, sharders=[sharder], device=torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    lengths = torch.ones(job.features * job.batch, dtype=torch.int32)
    dense = torch.zeros(job.dense_parameters)

    def run() -> None:
        ids = torch.randint(0, rows, (job.features * job.batch,), generator=generator)
        values = sharded(KeyedJaggedTensor(names, ids, lengths=lengths)).values()
        values.backward(torch.ones_like(values))
        if len(dense):
            dist.all_reduce(dense)

    return run


def dense_time(job: Job, steps: int) -> tuple[float, int]:
    """Returns the seconds of the dense part for one sample, and the number of its
    parameters.
    """
    import torch
    from torch import nn
    from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch

    bottom = DenseArch(13, [512, 256, job.dim])
    interaction = InteractionArch(job.features)
    over = OverArch(job.dim + job.features * (job.features + 1) // 2, list(OVER))
    parameters = [*bottom.parameters(), *over.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    inputs = torch.randn(job.batch, 13)
    embeddings = torch.randn(job.batch, job.features, job.dim)
    labels = torch.zeros(job.batch)

    def work() -> None:
        optimizer.zero_grad()
        logits = over(
            interaction(bottom(inputs), embeddings.detach().requires_grad_())
        ).squeeze(1)
        nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        optimizer.step()

    return median_s(work, steps) / job.batch, sum(each.numel() for each in parameters)


def measured_kernels(job: Job, rows: int, steps: int) -> tuple[Kernels, int]:
    """Measures the times of one rank, and returns the number of the dense part's
    parameters with them.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    times = {
        columns: kernel_times(job, columns, rows, steps)
        for columns in (job.dim, model.GRID_COLUMNS)
    }
    source, target = torch.ones(2, 2**24)
    copy_s = median_s(lambda: target.copy_(source), steps)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # Few rows, so that the warm-up makes all of them: a step with new rows costs
    # something else than a step without.
    run = sharded_step(Job(job.features, job.dim, job.batch), "table_wise", CHECK_ROWS)
    for _ in range(4 * CHECK_ROWS // job.batch):
        run()
    kernel_s = (
        job.features * job.batch * kernel_times(job, job.dim, CHECK_ROWS, steps)[0]
    )
    torchrec_s = max(0.0, median_s(run, steps) - kernel_s)
    dense_s, parameters = dense_time(job, steps)
    kernels = Kernels(
        id_s={columns: each[0] for columns, each in times.items()},
        bag_s={columns: each[1] for columns, each in times.items()},
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
    counter = Path(
        f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes"
    )
    for sharding in shardings:
        run = sharded_step(CHECK, sharding, CHECK_ROWS)
        dist.barrier()
        sent = int(counter.read_text())
        if dist.get_world_size() > 1:
            steps, clock = CHECK_STEPS, time.perf_counter
        else:  # steps of milliseconds, which wait for no other rank
            steps, clock = 80 * CHECK_STEPS, time.process_time
        seconds = median_s(run, steps, clock)
        sent = (int(counter.read_text()) - sent) // (steps + 2)
        dist.barrier()
        if dist.get_rank() == 0:
            with rows.open("a") as file:
                file.write(
                    json.dumps(
                        {"sharding": sharding, "bytes": sent, "seconds": seconds}
                    )
                    + "\n"
                )
    dist.barrier()
    os._exit(0)  # gloo's teardown sometimes aborts after all work is done.


def measured_steps(
    hosts: int, ranks: int, rate: float, delay_s: float
) -> list[dict[str, Any]]:
    """Runs the ranks on simulated hosts, and returns the row of each sharding."""
    sys.path.insert(0, str(ROOT))
    # a checkout has it, no package
    wired_hosts = importlib.import_module("tests.examples.network_wire").wired_hosts
    shardings = [
        each
        for each in model.SHARDINGS
        if ranks > hosts or each in ("table_wise", "row_wise")
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        wired_hosts(hosts) as (simulated, wire),
    ):
        wire.bytes_per_s, wire.delay_s = rate / 8, delay_s
        log, rows = Path(folder) / "log", Path(folder) / "rows"
        for number, host in enumerate(simulated):
            nodes = [
                "--nnodes",
                str(hosts),
                "--node-rank",
                str(number),
                "--nproc-per-node",
                str(ranks // hosts),
            ]
            main = ["--master-addr", simulated[0].address, "--master-port", "29400"]
            host.torchrun(
                [*nodes, *main, __file__, "--rank", ",".join(shardings), str(rows)], log
            )
        if any(host.wait(580) for host in simulated):
            raise RuntimeError(f"a rank of the check failed:\n{log.read_text()}")
        return [json.loads(line) for line in rows.read_text().splitlines()]


def check() -> tuple[Kernels, list[dict[str, Any]]]:
    """Measures the kernels of one rank, and then steps on simulated hosts."""
    kernels, _ = measured_kernels(CHECK, CHECK_ROWS, steps=400)
    rows: list[dict[str, Any]] = []
    for ranks, hosts in ((1, 1), (2, 2), (4, 2)):
        for rate, delay_s in SETTINGS if hosts > 1 else SETTINGS[:1]:
            for row in measured_steps(hosts, ranks, rate, delay_s):
                rows.append(
                    {
                        "hosts": hosts,
                        "ranks": ranks,
                        "rate": rate,
                        "delay_s": delay_s,
                        **row,
                    }
                )
                print(
                    json.dumps(rows[-1] | expected(rows[-1], kernels)),
                    file=sys.stderr,
                    flush=True,
                )
    return kernels, rows


def expected(row: dict[str, Any], kernels: Kernels) -> dict[str, float]:
    """Returns the model's bytes from a host and seconds of a step of the check."""
    job = Job(**{**asdict(CHECK), "ranks_per_host": row["ranks"] // row["hosts"]})
    # Both directions of the wire have the same load, so that each gets half of its
    # rate.
    network = Network("check", row["rate"] / 8 / 2, row["delay_s"])
    parts = model.step(job, row["sharding"], row["ranks"], network, kernels, model.GLOO)
    del parts["dense"]  # the check has the all-reduce of the dense part alone
    # ranks that share a core take turns
    shared = max(1.0, row["ranks"] / (os.cpu_count() or 1))
    seconds = sum(
        part * (shared if name in ("tables", "torchrec") else 1.0)
        for name, part in parts.items()
    )
    sent = sum(
        each.host_bytes
        for each in model.collectives(job, row["sharding"], row["ranks"], model.GLOO)
    )
    return {"model_bytes": sent, "model_seconds": seconds}


# ---- Tables and the plot ----


def kernels_of(told: dict[str, Any]) -> Kernels:
    """Returns kernels from JSON, whose keys are texts."""
    by_columns = {
        key: {int(columns): s for columns, s in told[key].items()}
        for key in ("id_s", "bag_s")
    }
    return Kernels(**(told | by_columns))


def job_of(results: dict[str, Any]) -> Job:
    """Returns the model of the tables and the plot."""
    return Job(dense_parameters=results["dense_parameters"])


def inputs_lines(results: dict[str, Any]) -> list[str]:
    """Returns a Markdown table of the measured inputs."""
    kernels = kernels_of(results["kernels"])
    dim = max(kernels.id_s)
    measured = {
        f"lookup and update of an id, {dim} columns; {model.GRID_COLUMNS} columns": (
            " ns; ".join(
                f"{kernels.id_s[columns] * 1e9:.0f}"
                for columns in (dim, model.GRID_COLUMNS)
            )
            + " ns"
        ),
        f"forward and backward of a bag without an id, {dim} columns; {model.GRID_COLUMNS} columns": (
            " ns; ".join(
                f"{kernels.bag_s[columns] * 1e9:.0f}"
                for columns in (dim, model.GRID_COLUMNS)
            )
            + " ns"
        ),
        "TorchRec's work in a step on one rank, without the kernels": (
            f"{kernels.torchrec_s * 1e3:.1f} ms"
        ),
        "the dense part with SGD, for each sample": f"{kernels.dense_s * 1e6:.1f} µs",
        "parameters of the dense part": f"{results['dense_parameters']:,}",
        "a copy in memory": f"{kernels.copy_bytes_per_s / 1e9:.1f} GB/s",
    }
    return [
        "| measured | value |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in measured.items()),
    ]


def step_lines(results: dict[str, Any], network: Network) -> list[str]:
    """Returns a Markdown table of the milliseconds of a step at each number of ranks,
    the fastest in bold.
    """
    job, kernels = job_of(results), kernels_of(results["kernels"])
    lines = [
        "| ranks | " + " | ".join(NAMES.values()) + " |",
        "| ---: " * (len(NAMES) + 1) + "|",
    ]
    for ranks in RANKS:
        totals = [
            sum(model.step(job, each, ranks, network, kernels).values()) * 1e3
            for each in NAMES
        ]
        best = min(round(total) for total in totals)
        cells = [
            f"**{total:,.0f}**" if round(total) == best else f"{total:,.0f}"
            for total in totals
        ]
        lines.append(f"| {ranks:,} | " + " | ".join(cells) + " |")
    return lines


def hosts_lines(results: dict[str, Any]) -> list[str]:
    """Returns a Markdown table of the hosts that ``WANTED`` samples a second take."""
    job, kernels = job_of(results), kernels_of(results["kernels"])
    lines = [
        "| network | dense part | " + " | ".join(NAMES.values()) + " |",
        "| --- " * (len(NAMES) + 2) + "|",
    ]
    for network in model.NETWORKS:
        for dense, name in ((True, "on the ranks' cores"), (False, "left out")):
            hosts = [
                model.hosts_for(WANTED, job, each, network, kernels, dense)
                for each in NAMES
            ]
            cells = " | ".join("-" if each is None else f"{each:,}" for each in hosts)
            lines.append(f"| {network.name} | {name} | {cells} |")
    return lines


def parts_lines(results: dict[str, Any], ranks: int, network: Network) -> list[str]:
    """Returns a Markdown table of the parts of a step in milliseconds."""
    job, kernels = job_of(results), kernels_of(results["kernels"])
    lines = [
        "| sharding | dense part | lookups and updates | TorchRec | collectives |",
        "| --- " * 5 + "|",
    ]
    for sharding, name in NAMES.items():
        parts = model.step(job, sharding, ranks, network, kernels)
        own = [parts.pop(key) * 1e3 for key in ("dense", "tables", "torchrec")]
        cells = " | ".join(f"{each:,.1f}" for each in [*own, sum(parts.values()) * 1e3])
        lines.append(f"| {name} | {cells} |")
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
    for row in results["check"]:
        told = expected(row, kernels)
        link = (
            f"{row['rate'] / 1e6:.0f} Mbit/s, {row['delay_s'] * 1e3:.0f} ms"
            if row["hosts"] > 1
            else "-"
        )
        sent = [f"{each / 1e6:.2f}" for each in (told["model_bytes"], row["bytes"])]
        times = [
            f"{each * 1e3:.{0 if each > 0.01 else 1}f}"
            for each in (told["model_seconds"], row["seconds"])
        ]
        over = f"{(told['model_seconds'] / row['seconds'] - 1) * 100:+.0f} %"
        cells = [
            f"{row['hosts']}, {row['ranks']}",
            link,
            NAMES[row["sharding"]],
            *sent,
            *times,
            over,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def plot(results: dict[str, Any], path: Path) -> None:
    """Draws the time of a step and the samples a second against the ranks, for each
    network.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    job, kernels = job_of(results), kernels_of(results["kernels"])
    figure, axes = plt.subplots(
        2, 3, figsize=(10, 5.8), layout="constrained", sharex=True, sharey="row"
    )
    for (upper, lower), network in zip(axes.T, model.NETWORKS, strict=True):
        for sharding, name in NAMES.items():
            steps = [
                sum(model.step(job, sharding, ranks, network, kernels).values())
                for ranks in RANKS
            ]
            rates = [
                ranks * job.batch / step
                for ranks, step in zip(RANKS, steps, strict=True)
            ]
            upper.plot(RANKS, steps, color=COLORS[sharding], label=name)
            lower.plot(RANKS, rates, color=COLORS[sharding])
        upper.axhline(
            job.batch * kernels.dense_s,
            color="#777777",
            linestyle=":",
            label="dense part",
        )
        lower.axhline(
            WANTED, color="#777777", linestyle="--", label="5.5 million samples/s"
        )
        upper.set_title(network.name + " for each host", fontsize=10)
        lower.set_xlabel("ranks, 8 on a host")
        for each in (upper, lower):
            each.set_xscale("log", base=2)
            each.set_yscale("log")
            each.set_xticks(RANKS[::2], [f"{ranks:,}" for ranks in RANKS[::2]])
            each.grid(alpha=0.3)
            each.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("seconds of a step")
    axes[1, 0].set_ylabel("samples/s of all ranks")
    axes[0, 0].legend(frameon=False, fontsize=8)
    axes[1, 0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130, facecolor="white")


def main() -> None:
    """Measures, checks, prints the tables and draws the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        choices=("inputs", "check", "tables"),
        help="Run one part. Default: all parts.",
    )
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(args.rank[0].split(","), Path(args.rank[1]))
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
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
    for lines in (
        inputs_lines(results),
        step_lines(results, network),
        parts_lines(results, 1024, network),
        hosts_lines(results),
    ):
        print("\n".join([*lines, ""]))
    print("\n".join(check_lines(results)))
    plot(results, PLOT)


if __name__ == "__main__":
    main()
