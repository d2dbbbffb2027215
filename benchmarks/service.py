"""Measures pulls and updates of tables on servers, by shared memory, TCP and gRPC, and
of a table in the process.

    python benchmarks/service.py [--steps 60] [--only latency,saturation]

Prints JSON rows. For one server and for two servers, a row for each transport compares
a pull and an update of 50,000 ids at dim 64 with the same table in the client's
process, and with a transfer of as many bytes over a bare TCP socket to another process
that does nothing else. All sides are interleaved in one run. The rows also have the
processor time of the client and the servers together. A row for each transport has the
latency of a pull of 10 ids, and another one the number of these pulls a second by 1, 2
and 4 clients at the same time, with their latency. Four rows compare reads of 10 ids at
rest with those beside reads of 1,000,000 ids of the same table, and of another table,
by another thread of the process or another client of the server. Blocks of the three
alternate. Four rows compare updates of one server with those of a pair, in which each
write is on two servers (``--replicate``). They need ``redis-server``. One row is for
eight clients that use one server at the same time; for this, the RecStore system
publishes 1.17M ids/s (gRPC, one shard, another machine). One row is the share of a pull
that a prefetch hides behind the compute of one thread. The last row compares the DLRM
example with its tables on one server with the same example and local tables. Its data
is the Criteo sample if it is beside the checkout, or else generated. The clients and
the servers share the cores of this machine.
"""

from __future__ import annotations

import os

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # clients and servers share the cores, so waiting threads must not spin

import argparse
import contextlib
import json
import multiprocessing
import queue
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from measure import ROOT, clock, emit, interleave, redis_server, spread

from torchrec_recstore.optim import RowWiseAdagrad
from torchrec_recstore.store import Table
from torchrec_recstore_service import RecStoreClient

ROWS = 1_000_000
IDS = 50_000
DIM = 64
FEW = 10
BLOCK = 100
CLIENTS = 8
COUNTS = (1, 2, 4)  # clients that pull a few ids at the same time
SAMPLE = ROOT.parent / "shared" / "criteo" / "criteo_kaggle_sample.tsv.gz"
TRANSPORTS = ("shared memory", "TCP", "gRPC")
Names = queue.SimpleQueue[str]
OPTIMIZER = RowWiseAdagrad(lr=0.01)


@contextlib.contextmanager
def servers(n: int, *flags: str) -> Iterator[tuple[list[str], list[int]]]:
    """Starts ``n`` servers in separate processes and yields their addresses and process
    ids.
    """
    with tempfile.TemporaryDirectory() as data, contextlib.ExitStack() as stack:
        addresses, pids = [], []
        for number in range(n):
            command = [
                sys.executable,
                "-m",
                "torchrec_recstore.cli",
                "serve",
                "--listen",
                "127.0.0.1:0",
            ]
            command += ["--data", f"{data}/{number}", *flags]
            process = stack.enter_context(
                subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            addresses.append(
                process.stdout.readline().removeprefix("serving on ").strip()
            )
            pids.append(process.pid)
        yield addresses, pids


def connected(addresses: Sequence[str], transport: str) -> RecStoreClient:
    """Returns a client whose rows travel by one of :data:`TRANSPORTS`."""
    client = RecStoreClient(addresses, shared_memory=transport == "shared memory")
    if transport == "gRPC":
        for connection in client._tables._connections:
            # as for a client that cannot connect to the port for rows
            connection._side.transports = []
    return client


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
    """Returns the processor time of processes in seconds.

    See clock_getcpuclockid(3).
    """
    return sum(time.clock_gettime(~process << 3 | 2) for process in processes)


def bare_server(listener: socket.socket) -> None:
    """Answers each request of a connection: two numbers of bytes, and as many bytes as
    the first number says.
    """
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    content = memoryview(bytearray(IDS * (8 + 4 * DIM)))
    while header := connection.recv(16, socket.MSG_WAITALL):
        received, sent = struct.unpack("=qq", header)
        connection.recv_into(content[:received], received, socket.MSG_WAITALL)
        connection.sendall(content[:sent])


@contextlib.contextmanager
def bare_socket() -> Iterator[Callable[[int, int], object]]:
    """Yields a function that sends and receives bytes, to and from a process that does
    nothing else.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = multiprocessing.get_context("fork").Process(
            target=bare_server, args=(listener,), daemon=True
        )
        process.start()
        with socket.create_connection(listener.getsockname()) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            content = memoryview(bytearray(IDS * (8 + 4 * DIM)))

            def transfer(sent: int, received: int) -> None:
                connection.sendall(struct.pack("=qq", sent, received))
                connection.sendall(content[:sent])
                connection.recv_into(content[:received], received, socket.MSG_WAITALL)

            yield transfer
        process.join()


def throughput(n: int, steps: int) -> None:
    """Compares the transports to ``n`` servers with each other and with a table in the
    client's process.
    """
    table = Table(DIM, optimizer=OPTIMIZER)
    for ids in torch.arange(ROWS).split(100_000):
        table.insert(ids, torch.randn(len(ids), DIM))
    grads = torch.randn(IDS, DIM)

    def timed(
        processes: Sequence[int],
        pull: Callable[[torch.Tensor], object],
        update: Callable[[torch.Tensor], object],
    ) -> Callable[..., tuple[float, ...]]:
        def step(i: int) -> tuple[float, ...]:
            ids = torch.randint(
                0, ROWS, (IDS,), generator=torch.Generator().manual_seed(i)
            )
            timings = []
            for call in (pull, update):
                processor, begin = processor_s(processes), clock()
                call(ids)
                end = clock()
                timings += [end - begin, processor_s(processes) - processor]
            return tuple(timings)

        return step

    with (
        bare_socket() as transfer,
        servers(n) as (addresses, pids),
        contextlib.ExitStack() as stack,
    ):
        sides = {
            "table": timed(
                [os.getpid()], table.lookup, lambda ids: table.update(ids, grads)
            )
        }
        row_bytes = 4 * DIM * IDS
        sides["bare socket"] = timed(
            [os.getpid()],
            lambda _: transfer(8 * IDS, row_bytes),
            lambda _: transfer(8 * IDS + row_bytes, 8),
        )
        stack.enter_context(filled(addresses))
        for transport in TRANSPORTS:
            client = stack.enter_context(connected(addresses, transport))
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
            service, here, bare = (
                spread([timing[2 * number] for timing in timings[side]])
                for side in (transport, "table", "bare socket")
            )
            (
                row[f"{what}_ms"],
                row[f"{what}_in_process_ms"],
                row[f"{what}_bare_socket_ms"],
            ) = (service, here, bare)
            row[f"{what}_processor_ms"] = spread(
                [timing[2 * number + 1] for timing in timings[transport]]
            )
            row[f"million_ids_per_second_{what}"] = million_a_second(service)
            row[f"{what}_over_in_process"] = round(
                service["median"] / here["median"], 2
            )
        emit(row)


def latency(steps: int) -> None:
    """Measures the pull of 10 ids by one client."""
    with (
        servers(1) as (addresses, _),
        filled(addresses),
        contextlib.ExitStack() as stack,
    ):
        clients = {
            transport: stack.enter_context(connected(addresses, transport))
            for transport in TRANSPORTS
        }
        timings: dict[str, list[float]] = {transport: [] for transport in TRANSPORTS}
        # The sides alternate in blocks, because threads of gRPC still run for a moment
        # after a call.
        for block in range(steps // 3 + 1):
            for transport, client in clients.items():
                for i in range(BLOCK):
                    ids = torch.randint(0, ROWS, (FEW,))
                    begin = clock()
                    client.pull("t", ids)
                    if block and i >= BLOCK // 10:
                        timings[transport].append(clock() - begin)
    for transport, values in timings.items():
        row = {
            "benchmark": "service_latency",
            "transport": transport,
            "ids": FEW,
            "dim": DIM,
        }
        emit({**row, "pull_ms": spread(values)})


def reads_until_told(read: Callable[[str], object], told: Names, began: Names) -> None:
    """Reads the table that ``told`` has named last, again and again, and tells
    ``began`` after its first read.
    """
    name = told.get()
    while name != "end":
        if name != "rest":
            read(name)
        began.put(name)
        while name != "rest" and told.empty():
            read(name)
        name = told.get()


def small_beside_large(
    where: str, small: Callable[[], object], tell: Callable[[str], str], steps: int
) -> None:
    """Measures small reads while large reads of the same table, of another one, or
    none, are under way.

    Args:
        where: The place of the tables, for the row.
        small: The small read.
        tell: Starts large reads of a table, "t" or "other", or ends them, "rest", and
            returns the name when that has happened.
        steps: The number of blocks of each kind.
    """
    timings: dict[str, list[float]] = {"rest": [], "t": [], "other": []}
    for block in range(steps + 1):
        for name, values in timings.items():
            assert tell(name).strip() == name
            for _ in range(BLOCK):
                # as calls come from clients, which the scheduler lets run at once
                time.sleep(0.001)
                begin = clock()
                small()
                if block:
                    values.append(clock() - begin)
    spreads = {name: spread(values) for name, values in timings.items()}
    row: dict[str, object] = {
        "benchmark": "service_beside",
        "where": where,
        "ids": FEW,
        "large_ids": ROWS,
        "dim": DIM,
    }
    for name, key in (
        ("rest", "at_rest"),
        ("t", "beside_same_table"),
        ("other", "beside_other_table"),
    ):
        row[f"{key}_ms"] = spreads[name]
        row[f"{key}_p99_over_rest"] = round(
            spreads[name]["p99"] / spreads["rest"]["p99"], 2
        )
    emit(row)


def beside(steps: int) -> None:
    """Measures reads of 10 ids beside reads of 1,000,000 ids, in this process and by
    each transport.
    """
    everything = torch.randperm(ROWS)
    tables = {
        name: Table(DIM, optimizer=OPTIMIZER, name=name) for name in ("t", "other")
    }
    for table in tables.values():
        for ids in torch.arange(ROWS).split(100_000):
            table.insert(ids, torch.randn(len(ids), DIM))
    few = torch.randint(0, ROWS, (FEW,))
    queues: tuple[Names, Names] = queue.SimpleQueue(), queue.SimpleQueue()
    out = torch.empty(ROWS, DIM)
    large = lambda name: tables[name].lookup(everything, out=out)  # noqa: E731
    thread = threading.Thread(target=reads_until_told, args=(large, *queues))
    thread.start()

    def tell(name: str) -> str:
        queues[0].put(name)
        return queues[1].get()

    small_beside_large("table", lambda: tables["t"].lookup(few), tell, steps)
    queues[0].put("end")
    thread.join()
    tables.clear()
    with servers(1) as (addresses, _), filled(addresses) as both:
        both.init_data("other", (ROWS, DIM), optimizer=OPTIMIZER)
        for ids in torch.arange(ROWS).split(100_000):
            both.push("other", ids, torch.randn(len(ids), DIM))
        for transport in TRANSPORTS:
            large = client_processes(1, addresses[0], transport, "large")
            with connected(addresses, transport) as client, large as (process,):
                small_beside_large(
                    transport,
                    partial(client.pull, "t", few),
                    partial(told, process),
                    steps,
                )


def large_client(client: RecStoreClient) -> None:
    """Runs the client of :func:`beside` that makes large reads."""
    everything = torch.randperm(ROWS)
    tables: Names = queue.SimpleQueue()
    began: Names = queue.SimpleQueue()
    work = threading.Thread(
        target=reads_until_told,
        args=(lambda name: client.pull(name, everything), tables, began),
    )
    work.start()
    for line in sys.stdin:
        tables.put(line.strip())
        print(began.get(), flush=True)
    tables.put("end")
    work.join()


@contextlib.contextmanager
def client_processes(
    n: int, address: str, transport: str, reads: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts ``n`` clients in separate processes, which end with their stdin.

    Args:
        n: The number of clients.
        address: The address of their server.
        transport: One of :data:`TRANSPORTS`.
        reads: The number of ids of their pulls, or "large" for :func:`large_client`.
    """
    with contextlib.ExitStack() as stack:
        command = [
            sys.executable,
            __file__,
            "--client",
            address,
            "--transport",
            transport,
            "--reads",
            reads,
        ]
        start = partial(
            subprocess.Popen,
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        yield [stack.enter_context(start()) for _ in range(n)]


def told(process: subprocess.Popen[str], line: str) -> str:
    """Writes a line to a client process, and returns its answer."""
    process.stdin.write(f"{line}\n")
    return process.stdout.readline()


def pulls_together(
    processes: Sequence[subprocess.Popen[str]], seconds: float
) -> tuple[list[float], float]:
    """Lets clients pull at the same time.

    Returns:
        The times of all pulls in seconds, and the number of pulls a second.
    """
    for process in processes:
        process.stdin.write(f"{seconds}\n")
    timings = [json.loads(process.stdout.readline()) for process in processes]
    return [second for each in timings for second in each], sum(
        len(each) / sum(each) for each in timings
    )


def pulling_client(client: RecStoreClient, n: int) -> None:
    """Runs a client that pulls ``n`` ids again and again, for each line of stdin as
    many seconds as the line says.
    """
    batches = [torch.randint(0, ROWS, (n,)) for _ in range(4)]
    for batch in batches:
        client.pull("t", batch)
    for line in sys.stdin:
        timings: list[float] = []
        end = clock() + float(line)
        begin = clock()
        while begin < end:
            client.pull("t", batches[len(timings) % len(batches)])
            timings.append(clock() - begin)
            begin = clock()
        print(json.dumps(timings), flush=True)


def saturation(steps: int) -> None:
    """Measures 1, 2 and 4 clients that pull 10 ids at the same time, by each transport,
    in alternating blocks.
    """
    timings: dict[tuple[str, int], list[float]] = {
        (each, count): [] for each in TRANSPORTS for count in COUNTS
    }
    rates: dict[tuple[str, int], list[float]] = {each: [] for each in timings}
    with (
        servers(1) as (addresses, _),
        filled(addresses),
        contextlib.ExitStack() as stack,
    ):
        processes = {
            transport: stack.enter_context(
                client_processes(max(COUNTS), addresses[0], transport, str(FEW))
            )
            for transport in TRANSPORTS
        }
        for block in range(steps // 10 + 2):
            for transport, count in timings:
                seconds, rate = pulls_together(
                    processes[transport][:count], min(1.0, steps / 50)
                )
                if block:
                    timings[transport, count] += seconds
                    rates[transport, count].append(rate)
    best = {
        each: max(statistics.median(rates[each, count]) for count in COUNTS)
        for each in TRANSPORTS
    }
    for transport in TRANSPORTS:
        row: dict[str, object] = {
            "benchmark": "service_saturation",
            "transport": transport,
            "ids": FEW,
            "dim": DIM,
        }
        for count in COUNTS:
            row[f"pulls_per_second_{count}"] = round(
                statistics.median(rates[transport, count])
            )
            row[f"pull_ms_{count}"] = spread(timings[transport, count])
            p999 = sorted(timings[transport, count])[
                round(0.999 * (len(timings[transport, count]) - 1))
            ]
            row[f"p999_over_median_{count}"] = round(
                p999 / statistics.median(timings[transport, count]), 1
            )
        emit(
            {
                **row,
                "most_pulls_per_second_over_grpc": round(
                    best[transport] / best["gRPC"], 1
                ),
            }
        )


def replicated(steps: int) -> None:
    """Compares updates of one server with those of a pair of servers, of which each one
    has all rows.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        redis_server(Path(folder)) as url,
        contextlib.ExitStack() as stack,
    ):
        if url is None:
            print("service_replicated needs redis-server", file=sys.stderr)
            return
        one, _ = stack.enter_context(servers(1))
        pair, _ = stack.enter_context(servers(2, "--replicate", "pair", "--lease", url))
        addresses = {"one": one, "pair": ["/".join(pair)]}
        for each in addresses.values():
            client = stack.enter_context(filled(each))
        while not client._tables.describe_reachable()[0].backup:
            time.sleep(0.1)

        def updates(client: RecStoreClient, n: int) -> Callable[[int], tuple[float]]:
            grads = torch.randn(n, DIM)

            def step(i: int) -> tuple[float]:
                ids = torch.randint(
                    0, ROWS, (n,), generator=torch.Generator().manual_seed(i)
                )
                begin = clock()
                client.update("t", ids, grads)
                return (clock() - begin,)

            return step

        for transport in TRANSPORTS[:2]:
            clients = {
                name: stack.enter_context(connected(each, transport))
                for name, each in addresses.items()
            }
            for n in (FEW, IDS):
                sides = {name: updates(client, n) for name, client in clients.items()}
                timings = interleave(
                    sides, steps if n == IDS else 10 * steps, warm_up=5
                )
                spreads = {
                    name: spread([timing for (timing,) in values])
                    for name, values in timings.items()
                }
                emit(
                    {
                        "benchmark": "service_replicated",
                        "transport": transport,
                        "ids": n,
                        "dim": DIM,
                        **{
                            f"update_{name}_ms": value
                            for name, value in spreads.items()
                        },
                        "pair_over_one": round(
                            spreads["pair"]["median"] / spreads["one"]["median"], 2
                        ),
                    }
                )


def eight_clients(steps: int) -> None:
    """Measures eight client processes that use one server at the same time."""
    with (
        servers(1) as (addresses, _),
        filled(addresses),
        client_processes(CLIENTS, addresses[0], "shared memory", str(IDS)) as processes,
    ):
        pulls_together(processes, 0.1)
        rate = round(pulls_together(processes, steps / 30)[1] * IDS / 1e6, 2)
    emit(
        {
            "benchmark": "service_clients",
            "clients": CLIENTS,
            "ids": IDS,
            "dim": DIM,
            "million_ids_per_second": rate,
        }
    )


def overlap(steps: int) -> None:
    """Compares a pull before the compute with a prefetch during the compute of the
    previous step.
    """
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

        # The sides are not interleaved, because a prefetch of one side would run during
        # the next side.
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
    """Compares training with the tables on one server with training with local tables,
    in alternating runs.
    """
    rounds, whole = max(1, steps // 20), SAMPLE.exists() and steps >= 20
    flags = ["--data", str(SAMPLE)] if whole else ["--limit-rows", str(2000 * steps)]
    results: dict[str, list[dict[str, float]]] = {"local": [], "servers": []}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        for _ in range(rounds):
            for side, runs in results.items():
                with servers(1) as (addresses, _):  # each run begins with empty tables
                    command = [
                        sys.executable,
                        str(ROOT / "examples/dlrm/train.py"),
                        *flags,
                        "--no-log",
                    ]
                    command += ["--servers", addresses[0]] if side == "servers" else []
                    environment = {
                        name: value
                        for name, value in os.environ.items()
                        if name != "OMP_WAIT_POLICY"
                    }
                    run = [*command, "--json", str(result)]
                    subprocess.run(
                        run,
                        check=True,
                        env=environment,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                runs.append(json.loads(result.read_text()))
    rates = {
        side: spread([run["train_samples_per_second"] for run in runs], 1)
        for side, runs in results.items()
    }
    emit(
        {
            "benchmark": "service_dlrm",
            "data": "the Criteo sample" if whole else "generated rows",
            "samples_per_second": rates,
            "servers_over_local": round(
                rates["servers"]["median"] / rates["local"]["median"], 3
            ),
            "test_auc": {side: runs[0]["test_auc"] for side, runs in results.items()},
        }
    )


def main() -> None:
    """Runs the measurements and prints the JSON rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parts: dict[str, Callable[[int], object]] = {
        "throughput": lambda steps: [throughput(n, steps) for n in (1, 2)],
        "latency": latency,
        "saturation": saturation,
        "beside": lambda steps: beside(steps // 10 + 1),
        "replicated": replicated,
        "clients": eight_clients,
        "prefetch": overlap,
        "dlrm": dlrm,
    }
    parser.add_argument("--only", default=",".join(parts), help="parts to measure")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--transport", help=argparse.SUPPRESS)
    parser.add_argument("--reads", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        with connected([arguments.client], arguments.transport) as client:
            (
                large_client(client)
                if arguments.reads == "large"
                else pulling_client(client, int(arguments.reads))
            )
        return
    for name in arguments.only.split(","):
        parts[name](arguments.steps)


if __name__ == "__main__":
    main()
