"""Measures pulls and updates of tables on servers, by shared memory and by TCP, and of a table in the process.

    python benchmarks/service.py [--steps 60]

Prints JSON rows. For one server and for two servers, a row for each transport compares a pull and an update of 50,000
ids at dim 64 with the same table in the client's process. All sides are interleaved in one run. The rows also have the
processor time of the client and the servers together. A row for each transport has the latency of a pull of 10 ids.
Two rows compare reads of 10 ids at rest with those beside reads of 1,000,000 ids of the same table, and of another
table, by another thread of the process or another client of the server. Blocks of the three alternate.
One row is for eight clients that use one server at the same time; for this, the RecStore system publishes 1.17M ids/s
(gRPC, one shard, another machine). One row is the share of a pull that a prefetch hides behind the compute of one
thread. The last row compares the DLRM example with its tables on one server with the same example and local tables. Its
data is the Criteo sample if it is beside the checkout, or else generated. The client and the servers share the cores of
this machine.
"""

from __future__ import annotations

import os

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # clients and servers share the cores, so waiting threads must not spin

import argparse
import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from measure import ROOT, clock, emit, interleave, spread

from torchrec_recstore.optim import RowWiseAdagrad
from torchrec_recstore.store import Table
from torchrec_recstore_service import RecStoreClient

ROWS = 1_000_000
IDS = 50_000
DIM = 64
FEW = 10
BLOCK = 100
CLIENTS = 8
SAMPLE = ROOT.parent / "shared" / "criteo" / "criteo_kaggle_sample.tsv.gz"
TRANSPORTS = {"shared memory": True, "TCP": False}
Names = queue.SimpleQueue[str]
OPTIMIZER = RowWiseAdagrad(lr=0.01)


@contextlib.contextmanager
def servers(n: int) -> Iterator[tuple[list[str], list[int]]]:
    """Starts ``n`` servers in separate processes and yields their addresses and process ids."""
    with tempfile.TemporaryDirectory() as data, contextlib.ExitStack() as stack:
        addresses, pids = [], []
        for number in range(n):
            command = [sys.executable, "-m", "torchrec_recstore.cli", "serve", "--listen", "127.0.0.1:0"]
            command += ["--data", f"{data}/{number}"]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None
            addresses.append(process.stdout.readline().removeprefix("serving on ").strip())
            pids.append(process.pid)
        yield addresses, pids


def filled(addresses: Sequence[str]) -> RecStoreClient:
    """Returns a client with a table of ``ROWS`` rows."""
    client = RecStoreClient(addresses)
    client.init_data("t", (ROWS, DIM), optimizer=OPTIMIZER)
    for ids in torch.arange(ROWS).split(100_000):
        client.push("t", ids, torch.randn(len(ids), DIM))
    return client


def million_a_second(seconds: dict[str, float], ids: int = IDS) -> float:
    """Returns the million ids per second for a spread of milliseconds."""
    return round(ids / seconds["median"] / 1e3, 2)


def processor_s(processes: Sequence[int]) -> float:
    """Returns the processor time of processes in seconds. See clock_getcpuclockid(3)."""
    return sum(time.clock_gettime(~process << 3 | 2) for process in processes)


def throughput(n: int, steps: int) -> None:
    """Compares the transports to ``n`` servers with each other and with a table in the client's process."""
    table = Table(DIM, optimizer=OPTIMIZER)
    for ids in torch.arange(ROWS).split(100_000):
        table.insert(ids, torch.randn(len(ids), DIM))
    grads = torch.randn(IDS, DIM)

    def timed(
        processes: Sequence[int], pull: Callable[[torch.Tensor], object], update: Callable[[torch.Tensor], object]
    ) -> Callable[..., tuple[float, ...]]:
        def step(i: int) -> tuple[float, ...]:
            ids = torch.randint(0, ROWS, (IDS,), generator=torch.Generator().manual_seed(i))
            timings = []
            for call in (pull, update):
                processor, begin = processor_s(processes), clock()
                call(ids)
                end = clock()
                timings += [end - begin, processor_s(processes) - processor]
            return tuple(timings)

        return step

    with servers(n) as (addresses, pids), contextlib.ExitStack() as stack:
        sides = {"table": timed([os.getpid()], table.lookup, lambda ids: table.update(ids, grads))}
        stack.enter_context(filled(addresses))
        for transport, by_memory in TRANSPORTS.items():
            client = stack.enter_context(RecStoreClient(addresses, shared_memory=by_memory))
            sides[transport] = timed(
                [os.getpid(), *pids],
                lambda ids, client=client: client.pull("t", ids),
                lambda ids, client=client: client.update("t", ids, grads),
            )
        timings = interleave(sides, steps, warm_up=5)
    for transport in TRANSPORTS:
        row: dict[str, object] = {
            "benchmark": "service",
            "transport": transport,
            "servers": n,
            "ids": IDS,
            "dim": DIM,
            "published_million_ids_per_second": 1.17,
        }
        for number, what in enumerate(("pull", "update")):
            service, here = (spread([timing[2 * number] for timing in timings[side]]) for side in (transport, "table"))
            row[f"{what}_ms"], row[f"{what}_in_process_ms"] = service, here
            row[f"{what}_processor_ms"] = spread([timing[2 * number + 1] for timing in timings[transport]])
            row[f"million_ids_per_second_{what}"] = million_a_second(service)
            row[f"{what}_over_in_process"] = round(service["median"] / here["median"], 2)
        emit(row)


def latency(steps: int) -> None:
    """Measures the pull of 10 ids by one client."""
    with servers(1) as (addresses, _), filled(addresses), contextlib.ExitStack() as stack:
        clients = {
            transport: stack.enter_context(RecStoreClient(addresses, shared_memory=by_memory))
            for transport, by_memory in TRANSPORTS.items()
        }
        timings: dict[str, list[float]] = {transport: [] for transport in TRANSPORTS}
        # The sides alternate in blocks, because threads of gRPC still run for a moment after a call.
        for block in range(steps // 3 + 1):
            for transport, client in clients.items():
                for i in range(BLOCK):
                    ids = torch.randint(0, ROWS, (FEW,))
                    begin = clock()
                    client.pull("t", ids)
                    if block and i >= BLOCK // 10:
                        timings[transport].append(clock() - begin)
    for transport, values in timings.items():
        row = {"benchmark": "service_latency", "transport": transport, "ids": FEW, "dim": DIM}
        emit({**row, "pull_ms": spread(values)})


def reads_until_told(read: Callable[[str], object], told: Names, began: Names) -> None:
    """Reads the table that ``told`` has named last, again and again, and tells ``began`` after its first read."""
    name = told.get()
    while name != "end":
        if name != "rest":
            read(name)
        began.put(name)
        while name != "rest" and told.empty():
            read(name)
        name = told.get()


def small_beside_large(where: str, small: Callable[[], object], told: Callable[[str], object], steps: int) -> None:
    """Measures small reads while large reads of the same table, of another one, or none, are under way.

    Args:
        where: The place of the tables, for the row.
        small: The small read.
        told: Starts large reads of a table, "t" or "other", or ends them, "rest", and returns when that has happened.
        steps: The number of blocks of each kind.
    """
    timings: dict[str, list[float]] = {"rest": [], "t": [], "other": []}
    for block in range(steps + 1):
        for name, values in timings.items():
            told(name)
            for _ in range(BLOCK):
                time.sleep(0.001)  # as calls come from clients, which the scheduler lets run at once
                begin = clock()
                small()
                if block:
                    values.append(clock() - begin)
    spreads = {name: spread(values) for name, values in timings.items()}
    row: dict[str, object] = {"benchmark": "service_beside", "where": where, "ids": FEW, "large_ids": ROWS, "dim": DIM}
    for name, key in (("rest", "at_rest"), ("t", "beside_same_table"), ("other", "beside_other_table")):
        row[f"{key}_ms"] = spreads[name]
        row[f"{key}_p99_over_rest"] = round(spreads[name]["p99"] / spreads["rest"]["p99"], 2)
    emit(row)


def beside(steps: int) -> None:
    """Measures reads of 10 ids beside reads of 1,000,000 ids, in this process and by shared memory."""
    everything = torch.randperm(ROWS)
    tables = {name: Table(DIM, optimizer=OPTIMIZER, name=name) for name in ("t", "other")}
    for table in tables.values():
        for ids in torch.arange(ROWS).split(100_000):
            table.insert(ids, torch.randn(len(ids), DIM))
    few = torch.randint(0, ROWS, (FEW,))
    queues: tuple[Names, Names] = queue.SimpleQueue(), queue.SimpleQueue()
    out = torch.empty(ROWS, DIM)
    large = lambda name: tables[name].lookup(everything, out=out)  # noqa: E731
    thread = threading.Thread(target=reads_until_told, args=(large, *queues))
    thread.start()

    def tell(name: str) -> None:
        queues[0].put(name)
        assert queues[1].get() == name

    small_beside_large("table", lambda: tables["t"].lookup(few), tell, steps)
    queues[0].put("end")
    thread.join()
    tables.clear()
    with servers(1) as (addresses, _), filled(addresses) as client:
        client.init_data("other", (ROWS, DIM), optimizer=OPTIMIZER)
        for ids in torch.arange(ROWS).split(100_000):
            client.push("other", ids, torch.randn(len(ids), DIM))
        command = [sys.executable, __file__, "--large", addresses[0]]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

        def tell_client(name: str) -> None:
            process.stdin.write(f"{name}\n")
            assert process.stdout.readline().strip() == name

        small_beside_large("shared memory", lambda: client.pull("t", few), tell_client, steps)
        process.communicate("end\n")


def large_client(address: str) -> None:
    """Runs the client of :func:`beside` that makes large reads."""
    client = RecStoreClient([address])
    everything = torch.randperm(ROWS)
    told: Names = queue.SimpleQueue()
    began: Names = queue.SimpleQueue()
    work = threading.Thread(target=reads_until_told, args=(lambda name: client.pull(name, everything), told, began))
    work.start()
    for line in sys.stdin:
        told.put(line.strip())
        if line.strip() == "end":
            break
        print(began.get(), flush=True)
    work.join()


def eight_clients(steps: int) -> None:
    """Measures eight client processes that use one server at the same time."""
    with servers(1) as (addresses, _), filled(addresses):
        command = [sys.executable, __file__, "--client", addresses[0], "--steps", str(steps)]
        begin_together = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(CLIENTS)
        ]
        for process in begin_together:
            process.stdout.readline()  # the client is ready
        begin = clock()
        for process in begin_together:
            process.stdin.write("\n")
            process.stdin.flush()
        for process in begin_together:
            process.stdout.readline()  # the client has finished
        seconds = clock() - begin
        for process in begin_together:
            process.communicate()
    rate = round(CLIENTS * steps * IDS / seconds / 1e6, 2)
    emit({"benchmark": "service_clients", "clients": CLIENTS, "ids": IDS, "dim": DIM, "million_ids_per_second": rate})


def one_client(address: str, steps: int) -> None:
    """Runs one of the eight clients."""
    client = RecStoreClient([address])
    batches = [torch.randint(0, ROWS, (IDS,)) for _ in range(4)]
    client.pull("t", batches[0])
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(steps):
        client.pull("t", batches[i % 4])
    print("done", flush=True)


def overlap(steps: int) -> None:
    """Compares a pull before the compute with a prefetch during the compute of the previous step."""
    torch.set_num_threads(1)
    matrix = torch.randn(1024, 1024)

    def compute() -> None:
        for _ in range(2):
            matrix @ matrix

    with servers(1) as (addresses, _), filled(addresses) as client:
        batches = [torch.randint(0, ROWS, (IDS,)) for _ in range(8)]

        def alone(i: int) -> tuple[float]:
            begin = clock()
            compute()
            return (clock() - begin,)

        def one_after_the_other(i: int) -> tuple[float]:
            begin = clock()
            client.pull("t", batches[i % 8])
            compute()
            return (clock() - begin,)

        handles: list[int] = []

        def prefetched(i: int) -> tuple[float]:
            handle = handles.pop() if handles else client.prefetch("t", batches[i % 8])
            begin = clock()
            client.wait_for_prefetch(handle)
            handles.append(client.prefetch("t", batches[(i + 1) % 8]))
            compute()
            return (clock() - begin,)

        # The sides are not interleaved, because a prefetch of one side would run during the next side.
        timings = {name: [] for name in ("compute", "pull_then_compute", "prefetch")}  # type: dict[str, list[float]]
        for name, side in (
            ("compute", alone),
            ("pull_then_compute", one_after_the_other),
            ("prefetch", prefetched),
        ) * 3:
            timings[name] += [side(i)[0] for i in range(steps // 3 + 2)][2:]
            while handles:
                client.wait_for_prefetch(handles.pop())
    spreads = {name: spread(values) for name, values in timings.items()}
    pull = spreads["pull_then_compute"]["median"] - spreads["compute"]["median"]
    waited = spreads["prefetch"]["median"] - spreads["compute"]["median"]
    emit(
        {
            "benchmark": "service_prefetch",
            "ids": IDS,
            "dim": DIM,
            **{f"{name}_ms": value for name, value in spreads.items()},
            "share_of_the_pull_hidden": round(1 - waited / pull, 2),
        }
    )


def dlrm(steps: int) -> None:
    """Compares training with the tables on one server with training with local tables, in alternating runs."""
    rounds, whole = max(1, steps // 20), SAMPLE.exists() and steps >= 20
    flags = ["--data", str(SAMPLE)] if whole else ["--limit-rows", str(2000 * steps)]
    results: dict[str, list[dict[str, float]]] = {"local": [], "servers": []}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        for _ in range(rounds):
            for side, runs in results.items():
                with servers(1) as (addresses, _):  # each run begins with empty tables
                    command = [sys.executable, str(ROOT / "examples/dlrm/train.py"), *flags, "--no-log"]
                    command += ["--servers", addresses[0]] if side == "servers" else []
                    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
                    run = [*command, "--json", str(result)]
                    subprocess.run(
                        run, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                    )
                runs.append(json.loads(result.read_text()))
    rates = {side: spread([run["train_samples_per_second"] for run in runs], 1) for side, runs in results.items()}
    emit(
        {
            "benchmark": "service_dlrm",
            "data": "the Criteo sample" if whole else "generated rows",
            "samples_per_second": rates,
            "servers_over_local": round(rates["servers"]["median"] / rates["local"]["median"], 3),
            "test_auc": {side: runs[0]["test_auc"] for side, runs in results.items()},
        }
    )


def main() -> None:
    """Runs the measurements and prints the JSON rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only-beside", action="store_true", help="measure small reads beside large reads alone")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--large", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        one_client(arguments.client, arguments.steps)
        return
    if arguments.large:
        large_client(arguments.large)
        return
    if arguments.only_beside:
        beside(arguments.steps // 10 + 1)
        return
    for n in (1, 2):
        throughput(n, arguments.steps)
    latency(arguments.steps)
    beside(arguments.steps // 10 + 1)
    eight_clients(arguments.steps // 2)
    overlap(arguments.steps)
    dlrm(arguments.steps)


if __name__ == "__main__":
    main()
