"""Pull and update of 50,000 ids at dim 64 over loopback: one server, two, and the same table in the process.

    python benchmarks/service.py [--steps 60]

One JSON row a number of servers, the sides taking turns; one of eight clients at once against one server, which the
RecStore system publishes 1.17M ids/s for (gRPC, one shard, another machine); and one of how much of a pull a prefetch
hides behind compute of one thread. Client and servers share this machine's cores.
"""

from __future__ import annotations

import os

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # clients share the cores with servers: waiting threads must not spin

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
    """Addresses of servers in processes of their own."""
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
    """A client with a table of ``ROWS`` rows."""
    client = RecStoreClient(addresses)
    client.init_data("t", (ROWS, DIM), optimizer=OPTIMIZER)
    for ids in torch.arange(ROWS).split(100_000):
        client.push("t", ids, torch.randn(len(ids), DIM))
    return client


def million_a_second(seconds: dict[str, float], ids: int = IDS) -> float:
    """Ids a second, in millions, of a spread of milliseconds."""
    return round(ids / seconds["median"] / 1e3, 2)


def throughput(n: int, steps: int) -> None:
    """One client and ``n`` servers, beside the table in the process."""
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
    """As many client processes, all at once, one server."""
    with servers(1) as addresses, filled(addresses):
        command = [sys.executable, __file__, "--client", addresses[0], "--steps", str(steps)]
        begin_together = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(CLIENTS)
        ]
        for process in begin_together:
            process.stdout.readline()  # it is ready
        begin = clock()
        for process in begin_together:
            process.stdin.write("\n")
            process.stdin.flush()
        for process in begin_together:
            process.stdout.readline()  # it is done
        seconds = clock() - begin
        for process in begin_together:
            process.communicate()
    rate = round(CLIENTS * steps * IDS / seconds / 1e6, 2)
    emit({"benchmark": "service_clients", "clients": CLIENTS, "ids": IDS, "dim": DIM, "million_ids_per_second": rate})


def one_client(address: str, steps: int) -> None:
    """One of the eight."""
    client = RecStoreClient([address])
    batches = [torch.randint(0, ROWS, (IDS,)) for _ in range(4)]
    client.pull("t", batches[0])
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(steps):
        client.pull("t", batches[i % 4])
    print("done", flush=True)


def overlap(steps: int) -> None:
    """A pull before compute, and one that is prefetched during the compute of the step before."""
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

        # Each side by itself: a prefetch of one would run beside the next.
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
    """Measures and prints the rows."""
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
