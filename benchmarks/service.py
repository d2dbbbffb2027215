"""Measures pulls and updates of tables on servers, by shared memory, TCP and gRPC.

    python benchmarks/service.py [--steps 60] [--only latency,saturation]

Prints JSON rows. The clients and the servers share the cores of this machine.

- ``service``: For one server and for two servers, a row for each transport compares a
  pull and an update of 50,000 ids at dim 64 with the same table in the client's
  process, and with a transfer of as many bytes over a bare TCP socket to another
  process that does nothing else. All sides are interleaved in one run. The rows also
  have the processor time of the client and the servers together. The RecStore system
  publishes 1.17M ids/s (gRPC, one shard, another machine).
- ``service_latency``: A pull of 10 ids, by each transport.
- ``service_saturation``: The number of these pulls a second by 1, 2 and 4 clients at
  the same time, with their latency.
- ``service_beside``: Reads of 10 ids at rest, beside reads of 1,000,000 ids of the same
  table, and beside those of another table, by another thread of the process or another
  client of the server. Blocks of the three alternate.
- ``service_replicated``: Updates of one server, and of a pair, in which each write is
  on two servers (``--replicate``). It needs ``redis-server``.
- ``service_clients``: Eight clients that use one server at the same time.
- ``service_prefetch``: The share of a pull that a prefetch hides behind the compute of
  one thread.
- ``service_dlrm``: The DLRM example with its tables on one server, and with local
  tables. Its data is the Criteo sample if it is beside the checkout, or else generated.
"""

from __future__ import annotations

import os

# Clients and servers share the cores, so waiting threads must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import contextlib
import itertools
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
from measure import (
    ROOT,
    Side,
    Timing,
    clock,
    emit,
    interleave,
    redis_server,
    spread,
    step_seconds,
)

from torchrec_recstore.optim import RowWiseAdagrad
from torchrec_recstore.store import Table
from torchrec_recstore_service import RecStoreClient

ROWS = 1_000_000
IDS = 50_000
DIM = 64
FEW_IDS = 10
BLOCK = 100
CLIENTS = 8
COUNTS = (1, 2, 4)  # clients that pull a few ids at the same time
SAMPLE = ROOT.parent / "shared" / "criteo" / "criteo_kaggle_sample.tsv.gz"
TRANSPORTS = ("shared memory", "TCP", "gRPC")
Names = queue.SimpleQueue[str]
OPTIMIZER = RowWiseAdagrad(lr=0.01)


@contextlib.contextmanager
def servers(n: int, *flags: str) -> Iterator[tuple[list[str], list[int]]]:
    """Starts ``n`` servers in separate processes.

    Yields:
        Their addresses and their process ids.
    """
    with tempfile.TemporaryDirectory() as data, contextlib.ExitStack() as stack:
        addresses = []
        pids = []
        for number in range(n):
            command = [sys.executable, "-m", "torchrec_recstore.cli", "serve"]
            command += ["--listen", "127.0.0.1:0"]
            command += ["--data", f"{data}/{number}"]
            command += flags
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            line = process.stdout.readline()
            addresses.append(line.removeprefix("serving on ").strip())
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
    add_table(client, "t")
    return client


def add_table(client: RecStoreClient, name: str) -> None:
    """Creates a table of ``ROWS`` rows on the servers."""
    client.init_data(name, (ROWS, DIM), optimizer=OPTIMIZER)
    all_ids = torch.arange(ROWS)
    for ids in all_ids.split(100_000):
        rows = torch.randn(len(ids), DIM)
        client.push(name, ids, rows)


def local_table(name: str) -> Table:
    """Returns a table of ``ROWS`` rows in this process."""
    table = Table(DIM, optimizer=OPTIMIZER, name=name)
    all_ids = torch.arange(ROWS)
    for ids in all_ids.split(100_000):
        rows = torch.randn(len(ids), DIM)
        table.insert(ids, rows)
    return table


def random_ids(count: int, seed: int) -> torch.Tensor:
    """Returns ids that are the same for the same seed, (count,)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, ROWS, (count,), generator=generator)


def million_a_second(milliseconds: dict[str, float], ids: int = IDS) -> float:
    """Returns the million ids per second for a spread of milliseconds."""
    thousand_a_second = ids / milliseconds["median"]
    return round(thousand_a_second / 1e3, 2)


def processor_s(processes: Sequence[int]) -> float:
    """Returns the processor time of processes in seconds.

    See clock_getcpuclockid(3).
    """
    return sum(time.clock_gettime(~process << 3 | 2) for process in processes)


def bare_server(listener: socket.socket) -> None:
    """Answers each request of a connection.

    A request consists of two numbers of bytes, and of as many bytes as the first number
    says. The second number is that of the bytes of the answer.
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
    """Yields a function that sends bytes to a process, and receives bytes from it.

    The process does nothing else.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = multiprocessing.get_context("fork").Process(
            target=bare_server,
            args=(listener,),
            daemon=True,
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


def pull_and_update(
    processes: Sequence[int],
    pull: Callable[[torch.Tensor], object],
    update: Callable[[torch.Tensor], object],
) -> Side:
    """Returns a side that pulls and updates the same ids.

    Its timings are those of the pull, of the processor in the pull, of the update, and
    of the processor in the update.
    """

    def step(i: int) -> Timing:
        ids = random_ids(IDS, seed=i)
        timings = []
        for call in (pull, update):
            processor_begin = processor_s(processes)
            begin = clock()
            call(ids)
            timings.append(clock() - begin)
            timings.append(processor_s(processes) - processor_begin)
        return tuple(timings)

    return step


def throughput(n: int, steps: int) -> None:
    """Compares the transports to ``n`` servers.

    They are also compared with a table in the client's process.
    """
    table = local_table("t")
    grads = torch.randn(IDS, DIM)
    ids_bytes = 8 * IDS
    rows_bytes = 4 * DIM * IDS
    with (
        bare_socket() as transfer,
        servers(n) as (addresses, pids),
        contextlib.ExitStack() as stack,
    ):
        sides = {
            "table": pull_and_update(
                [os.getpid()],
                pull=table.lookup,
                update=lambda ids: table.update(ids, grads),
            ),
            "bare socket": pull_and_update(
                [os.getpid()],
                pull=lambda _: transfer(ids_bytes, rows_bytes),
                update=lambda _: transfer(ids_bytes + rows_bytes, 8),
            ),
        }
        stack.enter_context(filled(addresses))
        for transport in TRANSPORTS:
            client = stack.enter_context(connected(addresses, transport))
            sides[transport] = pull_and_update(
                [os.getpid(), *pids],
                pull=lambda ids, client=client: client.pull("t", ids),
                update=lambda ids, client=client: client.update("t", ids, grads),
            )
        timings = interleave(sides, steps, warm_up=5)
    for transport in TRANSPORTS:
        emit(
            {
                "benchmark": "service",
                "transport": transport,
                "servers": n,
                "ids": IDS,
                "dim": DIM,
                "published_million_ids_per_second": 1.17,
                **throughput_of(timings, transport, "pull", place=0),
                **throughput_of(timings, transport, "update", place=2),
            }
        )


def throughputs(steps: int) -> None:
    """Measures one server, and two servers."""
    throughput(1, steps)
    throughput(2, steps)


def throughput_of(
    timings: dict[str, list[Timing]],
    transport: str,
    request: str,
    place: int,
) -> dict[str, object]:
    """Returns the figures of a request.

    Args:
        timings: The timings of each side.
        transport: The transport.
        request: The name of the request.
        place: The place of the request in a timing of :func:`pull_and_update`.
    """

    def spread_at(side: str, timing_place: int) -> dict[str, float]:
        return spread([timing[timing_place] for timing in timings[side]])

    service = spread_at(transport, place)
    in_process = spread_at("table", place)
    bare_socket = spread_at("bare socket", place)
    processor = spread_at(transport, place + 1)
    over_in_process = service["median"] / in_process["median"]
    return {
        f"{request}_ms": service,
        f"{request}_in_process_ms": in_process,
        f"{request}_bare_socket_ms": bare_socket,
        f"{request}_processor_ms": processor,
        f"million_ids_per_second_{request}": million_a_second(service),
        f"{request}_over_in_process": round(over_in_process, 2),
    }


def latency(steps: int) -> None:
    """Measures the pull of 10 ids by one client."""
    with (
        servers(1) as (addresses, _),
        filled(addresses),
        contextlib.ExitStack() as stack,
    ):
        clients = {}
        timings: dict[str, list[float]] = {}
        for transport in TRANSPORTS:
            client = connected(addresses, transport)
            clients[transport] = stack.enter_context(client)
            timings[transport] = []
        # The sides alternate in blocks, because threads of gRPC still run for a moment
        # after a call.
        for block in range(steps // 3 + 1):
            for transport, client in clients.items():
                for i in range(BLOCK):
                    ids = torch.randint(0, ROWS, (FEW_IDS,))
                    begin = clock()
                    client.pull("t", ids)
                    if block and i >= BLOCK // 10:
                        timings[transport].append(clock() - begin)
    for transport, seconds in timings.items():
        emit(
            {
                "benchmark": "service_latency",
                "transport": transport,
                "ids": FEW_IDS,
                "dim": DIM,
                "pull_ms": spread(seconds),
            }
        )


class LargeReads:
    """Reads tables in a thread, again and again, without end.

    Args:
        read: A function that reads the table of a name.
    """

    def __init__(self, read: Callable[[str], object]) -> None:
        self._read = read
        self._names: Names = queue.SimpleQueue()
        self._started: Names = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def start(self, name: str) -> str:
        """Reads the table of a name from now on, or none if the name is "rest".

        Returns:
            The name, after the first read.
        """
        self._names.put(name)
        return self._started.get()

    def end(self) -> None:
        """Ends the thread."""
        self._names.put("end")
        self._thread.join()

    def _work(self) -> None:
        name = self._names.get()
        while name != "end":
            if name != "rest":
                self._read(name)
            self._started.put(name)
            while name != "rest" and self._names.empty():
                self._read(name)
            name = self._names.get()


def small_beside_large(
    place: str,
    small_read: Callable[[], object],
    start_large_reads: Callable[[str], str],
    blocks: int,
) -> None:
    """Measures small reads at rest, and beside large reads of this or another table.

    Args:
        place: The place of the tables, for the row.
        small_read: The small read, of the table "t".
        start_large_reads: Starts large reads of a table, "t" or "other", or ends them,
            "rest", and returns the name when that has happened.
        blocks: The number of blocks of each kind.
    """
    timings: dict[str, list[float]] = {"rest": [], "t": [], "other": []}
    for block in range(blocks + 1):
        for name, seconds in timings.items():
            assert start_large_reads(name).strip() == name
            for _ in range(BLOCK):
                # as calls come from clients, which the scheduler lets run at once
                time.sleep(0.001)
                begin = clock()
                small_read()
                if block:
                    seconds.append(clock() - begin)
    at_rest = spread(timings["rest"])
    row: dict[str, object] = {
        "benchmark": "service_beside",
        "where": place,
        "ids": FEW_IDS,
        "large_ids": ROWS,
        "dim": DIM,
    }
    keys = {
        "rest": "at_rest",
        "t": "beside_same_table",
        "other": "beside_other_table",
    }
    for name, key in keys.items():
        spread_ms = spread(timings[name])
        row[f"{key}_ms"] = spread_ms
        row[f"{key}_p99_over_rest"] = round(spread_ms["p99"] / at_rest["p99"], 2)
    emit(row)


def beside(steps: int) -> None:
    """Measures reads of 10 ids beside reads of 1,000,000 ids.

    They are measured in this process and by each transport.
    """
    blocks = steps // 10 + 1
    all_ids = torch.randperm(ROWS)
    few_ids = torch.randint(0, ROWS, (FEW_IDS,))
    tables = {"t": local_table("t"), "other": local_table("other")}
    out = torch.empty(ROWS, DIM)
    large_reads = LargeReads(lambda name: tables[name].lookup(all_ids, out=out))
    small_beside_large(
        "table",
        lambda: tables["t"].lookup(few_ids),
        large_reads.start,
        blocks,
    )
    large_reads.end()
    tables.clear()
    with servers(1) as (addresses, _), filled(addresses) as first_client:
        add_table(first_client, "other")
        for transport in TRANSPORTS:
            large_client = client_processes(
                1,
                addresses[0],
                transport,
                reads="large",
            )
            with connected(addresses, transport) as client, large_client as (process,):
                small_beside_large(
                    transport,
                    partial(client.pull, "t", few_ids),
                    partial(ask, process),
                    blocks,
                )


def run_large_client(client: RecStoreClient) -> None:
    """Runs the client of :func:`beside` that makes large reads."""
    all_ids = torch.randperm(ROWS)
    large_reads = LargeReads(lambda name: client.pull(name, all_ids))
    for line in sys.stdin:
        print(large_reads.start(line.strip()), flush=True)
    large_reads.end()


@contextlib.contextmanager
def client_processes(
    n: int,
    address: str,
    transport: str,
    reads: str,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts ``n`` clients in separate processes, which end with their stdin.

    Args:
        n: The number of clients.
        address: The address of their server.
        transport: One of :data:`TRANSPORTS`.
        reads: The number of ids of their pulls, or "large" for
            :func:`run_large_client`.
    """
    command = [sys.executable, __file__, "--client", address]
    command += ["--transport", transport, "--reads", reads]
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in range(n):
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            processes.append(stack.enter_context(process))
        yield processes


def ask(process: subprocess.Popen[str], line: str) -> str:
    """Writes a line to a client process, and returns its answer."""
    requests = process.stdin
    replies = process.stdout
    requests.write(f"{line}\n")
    return replies.readline()


def pulls_together(
    processes: Sequence[subprocess.Popen[str]],
    seconds: float,
) -> tuple[list[float], float]:
    """Lets clients pull at the same time.

    Returns:
        The times of all pulls in seconds, and the number of pulls a second.
    """
    for process in processes:
        process.stdin.write(f"{seconds}\n")
    timings = []
    rate = 0.0
    for process in processes:
        line = process.stdout.readline()
        client_timings = json.loads(line)
        timings += client_timings
        rate += len(client_timings) / sum(client_timings)
    return timings, rate


def run_pulling_client(client: RecStoreClient, n: int) -> None:
    """Runs a client that pulls ``n`` ids again and again.

    It does so for each line of stdin, as many seconds as the line says.
    """
    batches = [torch.randint(0, ROWS, (n,)) for _ in range(4)]
    for batch in batches:
        client.pull("t", batch)
    for line in sys.stdin:
        timings: list[float] = []
        end = clock() + float(line)
        begin = clock()
        while begin < end:
            number = len(timings) % len(batches)
            client.pull("t", batches[number])
            timings.append(clock() - begin)
            begin = clock()
        print(json.dumps(timings), flush=True)


def saturation(steps: int) -> None:
    """Measures 1, 2 and 4 clients that pull 10 ids at the same time, by each transport.

    Blocks of them alternate.
    """
    cases = list(itertools.product(TRANSPORTS, COUNTS))
    timings: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    block_rates: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    block_s = min(1.0, steps / 50)
    with (
        servers(1) as (addresses, _),
        filled(addresses),
        contextlib.ExitStack() as stack,
    ):
        processes = {}
        for transport in TRANSPORTS:
            clients = client_processes(
                max(COUNTS),
                addresses[0],
                transport,
                str(FEW_IDS),
            )
            processes[transport] = stack.enter_context(clients)
        for block in range(steps // 10 + 2):
            for case in cases:
                transport, count = case
                clients_of_case = processes[transport][:count]
                seconds, rate = pulls_together(clients_of_case, block_s)
                if block:
                    timings[case] += seconds
                    block_rates[case].append(rate)
    emit_saturation(timings, block_rates)


def emit_saturation(
    timings: dict[tuple[str, int], list[float]],
    block_rates: dict[tuple[str, int], list[float]],
) -> None:
    """Prints a JSON row for each transport.

    Args:
        timings: The seconds of each pull, by transport and number of clients.
        block_rates: The pulls a second in each block, by the same.
    """
    rates = {}
    for case, rates_of_case in block_rates.items():
        rates[case] = statistics.median(rates_of_case)
    best_rates = {}
    for transport in TRANSPORTS:
        best_rates[transport] = max(rates[transport, count] for count in COUNTS)

    for transport in TRANSPORTS:
        row: dict[str, object] = {
            "benchmark": "service_saturation",
            "transport": transport,
            "ids": FEW_IDS,
            "dim": DIM,
        }
        for count in COUNTS:
            seconds = sorted(timings[transport, count])
            place = round(0.999 * (len(seconds) - 1))
            p999_over_median = seconds[place] / statistics.median(seconds)
            row[f"pulls_per_second_{count}"] = round(rates[transport, count])
            row[f"pull_ms_{count}"] = spread(seconds)
            row[f"p999_over_median_{count}"] = round(p999_over_median, 1)
        over_grpc = best_rates[transport] / best_rates["gRPC"]
        row["most_pulls_per_second_over_grpc"] = round(over_grpc, 1)
        emit(row)


def updates(client: RecStoreClient, n: int) -> Side:
    """Returns a side that updates ``n`` ids."""
    grads = torch.randn(n, DIM)

    def step(i: int) -> Timing:
        ids = random_ids(n, seed=i)
        begin = clock()
        client.update("t", ids, grads)
        return (clock() - begin,)

    return step


def replicated(steps: int) -> None:
    """Compares updates of one server with those of a pair of servers.

    Each server of the pair has all rows.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        redis_server(Path(folder)) as url,
        contextlib.ExitStack() as stack,
    ):
        if url is None:
            print("service_replicated needs redis-server", file=sys.stderr)
            return
        one_address, _ = stack.enter_context(servers(1))
        pair, _ = stack.enter_context(servers(2, "--replicate", "pair", "--lease", url))
        pair_address = ["/".join(pair)]
        stack.enter_context(filled(one_address))
        pair_client = stack.enter_context(filled(pair_address))
        while not pair_client._tables.describe_reachable()[0].backup:
            time.sleep(0.1)
        for transport in ("shared memory", "TCP"):
            one_client = stack.enter_context(connected(one_address, transport))
            pair_client = stack.enter_context(connected(pair_address, transport))
            for n in (FEW_IDS, IDS):
                sides = {
                    "one": updates(one_client, n),
                    "pair": updates(pair_client, n),
                }
                side_steps = steps if n == IDS else 10 * steps
                timings = interleave(sides, side_steps, warm_up=5)
                one_ms = spread(step_seconds(timings["one"]))
                pair_ms = spread(step_seconds(timings["pair"]))
                pair_over_one = pair_ms["median"] / one_ms["median"]
                emit(
                    {
                        "benchmark": "service_replicated",
                        "transport": transport,
                        "ids": n,
                        "dim": DIM,
                        "update_one_ms": one_ms,
                        "update_pair_ms": pair_ms,
                        "pair_over_one": round(pair_over_one, 2),
                    }
                )


def eight_clients(steps: int) -> None:
    """Measures eight client processes that use one server at the same time."""
    with (
        servers(1) as (addresses, _),
        filled(addresses),
        client_processes(
            CLIENTS,
            addresses[0],
            "shared memory",
            str(IDS),
        ) as processes,
    ):
        pulls_together(processes, 0.1)
        _, pulls_a_second = pulls_together(processes, steps / 30)
    emit(
        {
            "benchmark": "service_clients",
            "clients": CLIENTS,
            "ids": IDS,
            "dim": DIM,
            "million_ids_per_second": round(pulls_a_second * IDS / 1e6, 2),
        }
    )


def overlap(steps: int) -> None:
    """Compares a pull before the compute with a prefetch during the compute.

    The prefetch for a step runs during the compute of the previous step.
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
            if not handles:
                handles.append(client.prefetch("t", batches[i % 8]))
            handle = handles.pop()
            next_batch = batches[(i + 1) % 8]
            begin = clock()
            client.wait_for_prefetch(handle)
            handles.append(client.prefetch("t", next_batch))
            compute()
            return (clock() - begin,)

        # The sides are not interleaved, because a prefetch of one side would run during
        # the next side.
        sides: dict[str, Side] = {
            "compute": alone,
            "pull_then_compute": one_after_the_other,
            "prefetch": prefetched,
        }
        timings: dict[str, list[Timing]] = {name: [] for name in sides}
        for _ in range(3):
            for name, side in sides.items():
                side_timings = [side(i) for i in range(steps // 3 + 2)]
                timings[name] += side_timings[2:]
                while handles:
                    client.wait_for_prefetch(handles.pop())
    emit_overlap(timings)


def emit_overlap(timings: dict[str, list[Timing]]) -> None:
    """Prints the JSON row of :func:`overlap`."""
    compute_ms = spread(step_seconds(timings["compute"]))
    pull_ms = spread(step_seconds(timings["pull_then_compute"]))
    prefetch_ms = spread(step_seconds(timings["prefetch"]))
    pull_alone_ms = pull_ms["median"] - compute_ms["median"]
    wait_ms = prefetch_ms["median"] - compute_ms["median"]
    hidden_share = 1 - wait_ms / pull_alone_ms
    emit(
        {
            "benchmark": "service_prefetch",
            "ids": IDS,
            "dim": DIM,
            "compute_ms": compute_ms,
            "pull_then_compute_ms": pull_ms,
            "prefetch_ms": prefetch_ms,
            "share_of_the_pull_hidden": round(hidden_share, 2),
        }
    )


def dlrm(steps: int) -> None:
    """Compares training with the tables on one server with training with local tables.

    Runs of both alternate.
    """
    has_sample = SAMPLE.exists() and steps >= 20
    flags = ["--limit-rows", str(2000 * steps)]
    if has_sample:
        flags = ["--data", str(SAMPLE)]
    results: dict[str, list[dict[str, float]]] = {"local": [], "servers": []}
    for _ in range(max(1, steps // 20)):
        for side, runs in results.items():
            with servers(1) as (addresses, _):  # each run begins with empty tables
                flags_of_side = list(flags)
                if side == "servers":
                    flags_of_side += ["--servers", addresses[0]]
                runs.append(train_dlrm(flags_of_side))

    rates = {}
    test_auc = {}
    for side, runs in results.items():
        run_rates = [run["train_samples_per_second"] for run in runs]
        rates[side] = spread(run_rates, 1)
        test_auc[side] = runs[0]["test_auc"]
    servers_over_local = rates["servers"]["median"] / rates["local"]["median"]
    emit(
        {
            "benchmark": "service_dlrm",
            "data": "the Criteo sample" if has_sample else "generated rows",
            "samples_per_second": rates,
            "servers_over_local": round(servers_over_local, 3),
            "test_auc": test_auc,
        }
    )


def train_dlrm(flags: Sequence[str]) -> dict[str, float]:
    """Runs the DLRM example, and returns its result."""
    environment = dict(os.environ)
    environment.pop("OMP_WAIT_POLICY", None)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(ROOT / "examples/dlrm/train.py")]
        command += flags
        command += ["--no-log", "--json", str(result)]
        subprocess.run(
            command,
            check=True,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        figures: dict[str, float] = json.loads(result.read_text())
    return figures


def main() -> None:
    """Runs the measurements and prints the JSON rows."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=60)
    parts: dict[str, Callable[[int], None]] = {
        "throughput": throughputs,
        "latency": latency,
        "saturation": saturation,
        "beside": beside,
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
            if arguments.reads == "large":
                run_large_client(client)
            else:
                run_pulling_client(client, int(arguments.reads))
        return
    for name in arguments.only.split(","):
        parts[name](arguments.steps)


if __name__ == "__main__":
    main()
