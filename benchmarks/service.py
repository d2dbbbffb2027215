"""Measures pull and update of 50,000 ids at dim 64 over loopback, with one server, two servers and no server.

    python benchmarks/service.py [--steps 60]

Prints JSON rows. A row for each number of servers compares the servers with the same table in the client's process; the
sides are interleaved. One row is for eight clients that use one server at the same time; for this, the RecStore system
publishes 1.17M ids/s (gRPC, one shard, another machine). One row is the share of a pull that a prefetch hides behind
the compute of one thread. The client and the servers share the cores of this machine.
"""

from __future__ import annotations

import os

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # clients and servers share the cores, so waiting threads must not spin

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

import torch
from measure import clock, emit, interleave, spread

from torchrec_recstore.optim import RowWiseAdagrad
from torchrec_recstore.service import RecStoreClient
from torchrec_recstore.store import Table

ROWS = 1_000_000
IDS = 50_000
DIM = 64
CLIENTS = 8
OPTIMIZER = RowWiseAdagrad(lr=0.01)


@contextlib.contextmanager
def servers(n: int) -> Iterator[list[str]]:
    """Starts ``n`` servers in separate processes and yields their addresses."""
    with tempfile.TemporaryDirectory() as data, contextlib.ExitStack() as stack:
        addresses = []
        for number in range(n):
            command = [sys.executable, "-m", "torchrec_recstore.cli", "serve", "--listen", "127.0.0.1:0"]
            command += ["--data", f"{data}/{number}"]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None
            addresses.append(process.stdout.readline().removeprefix("serving on ").strip())
        yield addresses


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


def throughput(n: int, steps: int) -> None:
    """Compares ``n`` servers with a table in the client's process, with one client."""
    table = Table(DIM, optimizer=OPTIMIZER)
    for ids in torch.arange(ROWS).split(100_000):
        table.insert(ids, torch.randn(len(ids), DIM))
    grads = torch.randn(IDS, DIM)

    def timed(pull: Callable[[torch.Tensor], object], update: Callable[[torch.Tensor], object]) -> Callable[..., tuple]:
        def step(i: int) -> tuple[float, float]:
            ids = torch.randint(0, ROWS, (IDS,), generator=torch.Generator().manual_seed(i))
            begin = clock()
            pull(ids)
            middle = clock()
            update(ids)
            return middle - begin, clock() - middle

        return step

    with servers(n) as addresses, filled(addresses) as client:
        sides = {
            "service": timed(lambda ids: client.pull("t", ids), lambda ids: client.update("t", ids, grads)),
            "table": timed(table.lookup, lambda ids: table.update(ids, grads)),
        }
        timings = interleave(sides, steps, warm_up=5)
    row: dict[str, object] = {"benchmark": "service", "servers": n, "ids": IDS, "dim": DIM}
    for number, what in enumerate(("pull", "update")):
        service, here = (spread([timing[number] for timing in timings[side]]) for side in ("service", "table"))
        row[f"{what}_ms"], row[f"{what}_in_process_ms"] = service, here
        row[f"million_ids_per_second_{what}"] = million_a_second(service)
        row[f"{what}_over_in_process"] = round(service["median"] / here["median"], 2)
    row["published_million_ids_per_second"] = 1.17
    emit(row)


def eight_clients(steps: int) -> None:
    """Measures eight client processes that use one server at the same time."""
    with servers(1) as addresses, filled(addresses):
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

    with servers(1) as addresses, filled(addresses) as client:
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


def main() -> None:
    """Runs the measurements and prints the JSON rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        one_client(arguments.client, arguments.steps)
        return
    for n in (1, 2):
        throughput(n, arguments.steps)
    eight_clients(arguments.steps // 2)
    overlap(arguments.steps)


if __name__ == "__main__":
    main()
