"""Measures served models: lookups, deltas, loading, publishing, and the way of a click
to the served model.

    python benchmarks/serving.py [--rows 200000,1000000,2000000,10000000] [--seconds 40]

Prints JSON rows. Both sides of each comparison are measured in this run:

- ``serving_lookup``: a served model and the table that it was exported from look up the
  same ids, with one thread. Rows are float32 or int8 on both sides.
- ``serving_delta``: a delta of 10,000 changed rows is made and applied, and a thread
  reads the model meanwhile.
- ``serving_mapped``: a model whose rows are mapped from its file and one with the rows
  in memory look up the same ids, with one thread. The shares of two processes in the
  pages of the file are added, and the memory of a process with the rows in memory is
  divided by the bytes of the rows and ids.
- ``serving_servers``: a model whose rows stay on a server of this host and one with the
  rows in memory look up the same 50,000 ids, with one thread, by shared memory and by
  TCP.
- ``serving_load``: an export is loaded, and its file is read. Both are in the page
  cache.
- ``serving_publisher``: training steps with a ``DeltaPublisher`` and without it.
- ``serving_http``: predictions by ``recstore follow`` on a kept connection of HTTP, and
  by a bare server of the same library in another process, whose handler calls the same
  model. Each request has one example.
- ``serving_stream``: clicks come in on a Redis stream, are trained on and published. A
  follower in another process looks for the row of each click. It needs
  ``redis-server``.
"""

from __future__ import annotations

import os

# several processes and threads share the cores
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import gc
import http.client
import json
import math
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import anonymous_bytes, clock, emit, interleave, redis_server, spread
from torch import Tensor, nn

from service import servers
from torchrec_recstore import ops
from torchrec_recstore.inference import (
    DeltaPublisher,
    export_delta,
    export_for_inference,
    follow,
    load_library,
)
from torchrec_recstore.modules import RecStoreEmbedding, RecStoreEmbeddingBag
from torchrec_recstore.options import TableOptions, UniformInit
from torchrec_recstore.store import Table
from torchrec_recstore_service import RecStoreClient
from torchrec_recstore_serving.export.delta import read_delta
from torchrec_recstore_serving.export.hashed_tables import HashedTable
from torchrec_recstore_serving.export.sorted_tables import ServedTables
from torchrec_recstore_serving.export.tables_on_servers import (
    ServerTable,
    TableOnServers,
)
from torchrec_recstore_serving.export.torchscript import scripted

DIM = 16
CHANGED = 10_000
BATCH = 100_000
SERVERS_BATCH = 50_000
DELTAS, WARM_UP = 20, 3
EVERY_S = 2.0
RATE = 2000
NEW = 1 << 40  # the id of the row that only click 0 has
OPTIONS = TableOptions(initializer=UniformInit(-0.1, 0.1))
FORMATS = {"float32": torch.float32, "int8": torch.int8}


class Rows(nn.Module):
    """A model of one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RecStoreEmbedding(1, DIM, name="t", lr=0.1, options=OPTIONS)

    def forward(self, ids: Tensor) -> Tensor:
        """(N,) -> (N, DIM)."""
        rows: Tensor = self.table(ids)
        return rows


def ids_of(rows: int) -> Tensor:
    """Returns ids without a pattern, (rows,) int64."""
    return ops.mix_ids(torch.arange(rows), False)


def fill(table: Table, ids: Tensor) -> None:
    """Writes a row for each id."""
    for part in ids.split(200_000):
        table.insert(part, torch.randn(len(part), DIM))


def timed(
    call: Callable[[Any], object], arguments: Sequence[Any]
) -> Callable[[int], tuple[float]]:
    """Returns a side for ``interleave`` that calls a function with one of the arguments
    after the other.
    """

    def side(i: int) -> tuple[float]:
        begin = clock()
        result = call(arguments[i % len(arguments)])
        seconds = clock() - begin
        del result
        return (seconds,)

    return side


def lookups(model: Rows, folder: Path, ids: Tensor, steps: int) -> None:
    """Compares served lookups with lookups in the training table, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    batches = [ids[torch.randint(0, len(ids), (BATCH,))] for _ in range(8)]
    for name, dtype in FORMATS.items():
        table = model.table.table
        if dtype is torch.int8:
            table = Table(DIM, torch.int8)
            fill(table, ids)
        export_for_inference(model, folder / "lookup.pt", dtype=dtype, index="hash")
        served = torch.jit.load(folder / "lookup.pt")

        calls = {
            "served": timed(served, batches),
            "table": timed(table.lookup, batches),
        }
        timings = interleave(calls, steps, warm_up=8)
        over = [
            own[0] / other[0]
            for own, other in zip(timings["table"], timings["served"], strict=True)
        ]
        rates = {
            side: spread([BATCH / t[0] for t in times], scale=1e-6)
            for side, times in timings.items()
        }
        emit(
            {
                "benchmark": "serving_lookup",
                "rows": len(ids),
                "dim": DIM,
                "format": name,
                "million_ids_per_second": {
                    side: rate["median"] for side, rate in rates.items()
                },
                "served_over_table": spread(over, scale=1),
            }
        )
    torch.set_num_threads(threads)


class Reader(threading.Thread):
    """Reads a served model again and again, and keeps the seconds that each read takes."""

    def __init__(self, served: Callable[[Tensor], object], ids: Tensor) -> None:
        super().__init__(daemon=True)
        self._served = served
        self._batches = [ids[torch.randint(0, len(ids), (1000,))] for _ in range(64)]
        self._ends = threading.Event()
        self.seconds: list[float] = []
        self.start()

    def run(self) -> None:
        """Reads until :meth:`end`."""
        torch.set_num_threads(1)
        while not self._ends.is_set():
            begin = clock()
            self._served(self._batches[len(self.seconds) % 64])
            self.seconds.append(clock() - begin)

    def end(self) -> dict[str, float]:
        """Stops, and returns the spread in milliseconds, without the first read of each
        batch.
        """
        self._ends.set()
        self.join()
        return spread(self.seconds[len(self._batches) :])


def deltas(model: Rows, folder: Path, ids: Tensor) -> None:
    """Makes deltas of 10,000 changed rows and applies them while a thread reads: at
    once, and then one each second.
    """
    export_for_inference(model, folder / "base.pt", dtype=torch.int8, index="hash")
    base, replica = (
        torch.jit.load(folder / "base.pt"),
        torch.jit.load(folder / "base.pt"),
    )
    made, applied = [], []
    for number in range(WARM_UP + 2 * DELTAS):
        changed = ids[torch.randperm(len(ids))[:CHANGED]]
        model.train()(changed).sum().backward()
        begin = clock()
        info = export_delta(model, folder / f"{number}.delta", base=base)
        made.append(clock() - begin)
        # an update may round to the same int8 row
        assert info.tables["t"].rows > 0.99 * CHANGED
        base.apply_delta(read_delta(info.path))
    for number in range(WARM_UP):
        replica.apply_delta(read_delta(folder / f"{number}.delta"))
    reader = Reader(replica, ids)
    time.sleep(2.0)
    at_rest = reader.end()
    tensors = [
        read_delta(folder / f"{number}.delta")
        for number in range(WARM_UP, WARM_UP + 2 * DELTAS)
    ]
    meanwhile = {}
    for pause_s in (0.0, 1.0):
        reader = Reader(replica, ids)
        for _ in range(DELTAS):
            begin = clock()
            replica.apply_delta(tensors.pop(0))
            applied.append(clock() - begin)
            time.sleep(max(0.0, begin + pause_s - clock()))
        meanwhile[pause_s] = reader.end()
    assert replica.recstore_version() == base.recstore_version()
    emit(
        {
            "benchmark": "serving_delta",
            "rows": len(ids),
            "dim": DIM,
            "changed": CHANGED,
            "make_ms": spread(made[WARM_UP:]),
            "apply_ms": spread(applied),
            "read_at_rest_ms": at_rest,
            "read_meanwhile_ms": meanwhile[0.0],
            "p99_meanwhile_over_at_rest": round(
                meanwhile[0.0]["p99"] / at_rest["p99"], 2
            ),
            "p99_delta_each_second_over_at_rest": round(
                meanwhile[1.0]["p99"] / at_rest["p99"], 2
            ),
        }
    )


def mapped(model: Rows, folder: Path, ids: Tensor, steps: int) -> None:
    """Compares a model whose rows are mapped with one whose rows are in memory: lookups
    with one thread, and memory.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    batches = [ids[torch.randint(0, len(ids), (BATCH,))] for _ in range(8)]
    for name, dtype in FORMATS.items():
        paths = {rows: folder / f"{rows}.pt" for rows in ("mapped", "memory")}
        for rows, path in paths.items():
            export_for_inference(model, path, dtype=dtype, index="hash", rows=rows)
        served = {rows: torch.jit.load(path) for rows, path in paths.items()}
        timings = interleave(
            {rows: timed(each, batches) for rows, each in served.items()},
            steps,
            warm_up=40,
        )
        over = [
            memory[0] / own[0]
            for memory, own in zip(timings["memory"], timings["mapped"], strict=True)
        ]
        del served
        gc.collect()
        bytes_of_rows = len(ids) * (8 + DIM * 4 if name == "float32" else 8 + DIM + 4)
        emit(
            {
                "benchmark": "serving_mapped",
                "rows": len(ids),
                "dim": DIM,
                "format": name,
                "million_ids_per_second": {
                    rows: spread([BATCH / t[0] for t in times], scale=1e-6)["median"]
                    for rows, times in timings.items()
                },
                "mapped_over_memory": spread(over, scale=1),
                "memory_over_rows_and_ids": round(
                    loaded_bytes(paths["memory"], 1)["anonymous"] / bytes_of_rows, 3
                ),
                "two_processes_over_file": round(
                    2
                    * loaded_bytes(paths["mapped"], 2)["pss"]
                    / paths["mapped"].stat().st_size,
                    3,
                ),
            }
        )
    torch.set_num_threads(threads)


def on_servers(ids: Tensor, steps: int) -> None:
    """Compares a model whose rows are on a server of this host with one whose rows are
    in memory, with one thread.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ids = ids[:1_000_000]
    with servers(1) as (addresses, _), RecStoreClient(addresses) as client:
        place = ",".join(client.rows_addresses())
        for dim in (16, 64):
            name = f"t{dim}"
            client.init_data(name, (len(ids), dim))
            rows = torch.randn(len(ids) + 1, dim)
            for some, values in zip(
                ids.split(100_000), rows[1:].split(100_000), strict=True
            ):
                client.push(name, some, values)
            there = ServerTable(
                name,
                "float32",
                TableOnServers(name, dim, torch.float32, place, False, True),
            )
            here = scripted(
                ServedTables([HashedTable(name, dim, "float32", ids, rows)])
            )
            remote = scripted(ServedTables([there]))

            def lookup(
                transport: str, name: str, served: Any
            ) -> Callable[[int], tuple[float]]:
                def side(_: int) -> tuple[float]:
                    os.environ["RECSTORE_SHARED_MEMORY"] = (
                        "0" if transport == "TCP" else "1"
                    )
                    # the other side has not read these rows
                    some = ids[torch.randint(0, len(ids), (SERVERS_BATCH,))]
                    begin = clock()
                    found = served.lookup(name, some)
                    seconds = clock() - begin
                    del found
                    return (seconds,)

                return side

            sides = {"memory": here, "shared memory": remote, "TCP": remote}
            timings = interleave(
                {
                    transport: lookup(transport, name, each)
                    for transport, each in sides.items()
                },
                steps,
                warm_up=8,
            )
            emit(
                {
                    "benchmark": "serving_servers",
                    "rows": len(ids),
                    "dim": dim,
                    "ids": SERVERS_BATCH,
                    "million_ids_per_second": {
                        transport: spread(
                            [SERVERS_BATCH / t[0] for t in times], scale=1e-6
                        )["median"]
                        for transport, times in timings.items()
                    },
                    "servers_over_memory": {
                        transport: spread(
                            [
                                a[0] / b[0]
                                for a, b in zip(
                                    timings["memory"], timings[transport], strict=True
                                )
                            ],
                            1,
                        )
                        for transport in ("shared memory", "TCP")
                    },
                }
            )
    torch.set_num_threads(threads)


def loaded_bytes(path: Path, processes: int) -> dict[str, int]:
    """Loads a model in processes at the same time; returns the own memory of one of
    them, and its share of the file.
    """
    command = [sys.executable, __file__, "--folder", str(path), "--part", "loaded"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    parts = [subprocess.Popen(command, **pipes) for _ in range(processes)]
    lines = [part.stdout.readline() for part in parts if part.stdout is not None]
    answer = parts[0].communicate("go\n")[0] if len(lines) == processes else ""
    for part in parts[1:]:
        part.communicate("go\n")
    found: dict[str, int] = json.loads(answer)
    return found


def print_loaded(path: Path) -> None:
    """Loads a model and reads all of its rows, waits for a line, and prints the memory
    that the model takes.
    """
    load_library()
    before = anonymous_bytes()
    served = torch.jit.load(path)
    served.verify()
    time.sleep(5)  # A thread moves the rows to huge pages.
    own = anonymous_bytes() - before
    print("loaded", flush=True)
    sys.stdin.readline()
    smaps = Path("/proc/self/smaps").read_text().splitlines()
    starts = [number for number, line in enumerate(smaps) if line.endswith(str(path))]
    pss = sum(
        int(line.split()[1]) << 10
        for n in starts
        for line in smaps[n : n + 8]
        if line.startswith("Pss:")
    )
    print(json.dumps({"anonymous": own, "pss": pss}), flush=True)


def load(model: Rows, folder: Path, rows: int, steps: int) -> None:
    """Compares the load of an export with reading its file."""
    for name, dtype in FORMATS.items():
        path = folder / "load.pt"
        export_for_inference(model, path, dtype=dtype, index="hash")

        sides = {
            "load": timed(torch.jit.load, [path]),
            "read": timed(Path.read_bytes, [path]),
        }
        timings = interleave(sides, steps, warm_up=1)
        over = [
            one[0] / other[0]
            for one, other in zip(timings["load"], timings["read"], strict=True)
        ]
        emit(
            {
                "benchmark": "serving_load",
                "rows": rows,
                "format": name,
                "bytes": path.stat().st_size,
                **{
                    f"{side}_ms": spread([t[0] for t in times])
                    for side, times in timings.items()
                },
                "load_over_read": spread(over, scale=1),
            }
        )


class Clicks(nn.Module):
    """A table of the features of clicks, and dense layers."""

    def __init__(self, name: str = "t", bags: int = 8) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            RecStoreEmbeddingBag(
                1, DIM, name=f"{name}{number}", mode="sum", lr=0.05, options=OPTIONS
            )
            for number in range(bags)
        )
        self.over = nn.Sequential(
            nn.Linear(DIM * bags, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, ids: Tensor) -> Tensor:
        """(B, bags, L) -> (B, 1): the log odds."""
        out: Tensor = self.over(
            torch.cat(
                [bag(ids[:, number]) for number, bag in enumerate(self.bags)], dim=1
            )
        )
        return out


def train_step(model: Clicks, dense: torch.optim.Optimizer, ids: Tensor) -> None:
    """Trains on a batch, (B, bags, L), whose labels follow from the ids."""
    labels = (ids[:, 0, 1:2] % 3 == 0).float()
    nn.functional.binary_cross_entropy_with_logits(
        model.train()(ids), labels
    ).backward()
    dense.step()
    dense.zero_grad()


def publisher(folder: Path, seconds: float) -> None:
    """Compares training steps with a publisher and without it, in turns that begin and
    end without a pending write.
    """
    torch.manual_seed(0)
    model = Clicks()
    dense = torch.optim.SGD(model.over.parameters(), lr=0.01)
    batches = [(torch.rand(1024, 8, 2) ** 4 * 200_000).long() for _ in range(64)]

    def train(steps: int, step: Callable[[], object]) -> float:
        begin = clock()
        for number in range(steps):
            train_step(model, dense, batches[number % 64])
            step()
        return clock() - begin

    train(64, lambda: None)
    pace = train(64, lambda: None) / 64
    steps = max(10, math.ceil(seconds / 6 / pace))
    timings: dict[str, list[float]] = {"alone": [], "with": []}
    with DeltaPublisher(model, folder / "published", every_s=EVERY_S) as publishing:
        publishing.step()
        publishing._writer.wait()  # type: ignore[union-attr]
        for _ in range(3):
            timings["alone"].append(train(steps, lambda: None) / steps)
            begin = clock()
            train(steps, publishing.step)
            publishing._writer.wait()  # type: ignore[union-attr]
            timings["with"].append((clock() - begin) / steps)
        number = publishing._writer._number  # type: ignore[union-attr]
    over = [
        one / other
        for one, other in zip(timings["with"], timings["alone"], strict=True)
    ]
    emit(
        {
            "benchmark": "serving_publisher",
            "every_s": EVERY_S,
            "batch": 1024,
            "steps": steps,
            "publications": number,
            **{
                f"{side}_ms": round(statistics.median(times) * 1e3, 3)
                for side, times in timings.items()
            },
            "with_over_alone": spread(over, scale=1),
        }
    )


def bare_server(folder: Path) -> None:
    """Serves the published model by the library of ``recstore follow``, until the
    process is ended.
    """
    import asyncio

    from tornado.httpserver import HTTPServer
    from tornado.netutil import bind_sockets
    from tornado.web import Application, RequestHandler

    with follow(folder / "published") as follower:
        model = follower.model

        class Predict(RequestHandler):
            def post(self) -> None:
                """See tornado."""
                ids = torch.tensor(json.loads(self.request.body)["arguments"]["ids"])
                with torch.inference_mode():
                    self.finish({"outputs": {"output": model(ids).tolist()}})

        async def serve() -> None:
            application = Application(
                [("/predict", Predict)], log_function=lambda handler: None
            )
            sockets = bind_sockets(0, "127.0.0.1")
            HTTPServer(application).add_sockets(sockets)
            print(f"127.0.0.1:{sockets[0].getsockname()[1]}", flush=True)
            await asyncio.Event().wait()

        asyncio.run(serve())


def predictions(folder: Path, steps: int) -> None:
    """Compares a kept connection to ``recstore follow`` with one to a bare server of
    the same library.
    """
    torch.manual_seed(0)
    model, folder = Clicks(), folder / "http"
    model((torch.rand(1024, 8, 2) * 10_000).long()).sum().backward()
    with DeltaPublisher(model.eval(), folder / "published", every_s=0) as publishing:
        publishing.step()
    arguments = [
        "follow",
        str(folder / "published"),
        "--listen",
        "127.0.0.1:0",
        "--http",
        "127.0.0.1:0",
        "--json",
    ]
    commands = {
        "follow": [sys.executable, "-m", "torchrec_recstore.cli", *arguments],
        "bare": [sys.executable, __file__, "--folder", str(folder), "--part", "bare"],
    }
    parts = {
        name: subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for name, command in commands.items()
    }
    bodies = [
        json.dumps(
            {"arguments": {"ids": (torch.rand(1, 8, 2) * 10_000).long().tolist()}}
        )
        for _ in range(64)
    ]
    try:
        lines = {
            name: part.stdout.readline()
            for name, part in parts.items()
            if part.stdout is not None
        }
        addresses = {
            "follow": json.loads(lines["follow"])["http"],
            "bare": lines["bare"].strip(),
        }
        connections = {
            name: http.client.HTTPConnection(address)
            for name, address in addresses.items()
        }

        def asked(connection: http.client.HTTPConnection, body: str) -> int:
            connection.request("POST", "/predict", body)
            reply = connection.getresponse()
            reply.read()
            return reply.status

        while asked(connections["follow"], bodies[0]) != 200:
            time.sleep(0.1)
        sides = {
            name: timed(
                lambda body, connection=connection: asked(connection, body), bodies
            )  # type: ignore[misc]
            for name, connection in connections.items()
        }
        timings = {
            name: [t[0] for t in times]
            for name, times in interleave(sides, steps, warm_up=500).items()
        }
    finally:
        for part in parts.values():
            part.terminate()
            part.wait()
    emit(
        {
            "benchmark": "serving_http",
            "requests": steps,
            **{f"{name}_ms": spread(times) for name, times in timings.items()},
            "p50_over_bare": round(
                statistics.median(timings["follow"])
                / statistics.median(timings["bare"]),
                3,
            ),
        }
    )


def generate(url: str, seconds: float) -> None:
    """Writes clicks to the stream.

    Each has eight ids, of which one is its own. Redis notes the time.
    """
    import redis

    client = redis.Redis.from_url(url)
    begin, number = clock(), 0
    while (now := clock() - begin) < seconds:
        due = int(now * RATE)
        ids = (torch.rand(max(0, due - number), 8) ** 4 * 200_000).long()
        ids[:, 0] = torch.arange(number, due) + NEW
        with client.pipeline(transaction=False) as pipe:
            for click in ids:
                pipe.xadd("clicks", {"ids": click.numpy().tobytes()})
            pipe.execute()
        number = due
        time.sleep(0.02)


def train_on_stream(url: str, folder: Path) -> None:
    """Trains on the clicks of the stream in their order, and publishes, until the
    process is ended.
    """
    import redis

    torch.set_num_threads(1)
    model = Clicks(bags=1)
    dense = torch.optim.SGD(model.over.parameters(), lr=0.01)
    client, last = redis.Redis.from_url(url), b"0"
    with DeltaPublisher(model, folder / "published", every_s=EVERY_S) as publishing:
        while True:
            publishing.step()
            found = client.xread({"clicks": last}, count=256, block=100)
            if found:
                entries = found[0][1]
                last = entries[-1][0]
                ids = torch.frombuffer(
                    bytearray(b"".join(of[b"ids"] for _, of in entries)),
                    dtype=torch.int64,
                )
                train_step(model, dense, ids.view(-1, 1, 8))


def follow_stream(url: str, folder: Path, seconds: float) -> None:
    """Follows the model, and prints for each click after how many seconds its row was
    served.
    """
    import redis

    client, last = redis.Redis.from_url(url), b"0"
    written: list[int] = []  # the time of each click in milliseconds since 1970
    ages: list[float] = []  # of the clicks whose row is served, in their order
    version: str | None = None
    with follow(folder / "published", every_s=0.1) as follower:
        print("ready", flush=True)
        begin = clock()
        while clock() - begin < seconds:
            served = follower.model
            now = time.time() * 1e3
            found = client.xread({"clicks": last}, count=100_000)
            if found:
                entries = found[0][1]
                last = entries[-1][0]
                written += [int(key.partition(b"-")[0]) for key, _ in entries]
            if served.recstore_version() != version:
                version = served.recstore_version()
                waiting = torch.arange(len(ages), len(written)) + NEW
                known = int(served.recstore_rows_of("t0", waiting)[1].sum())
                ages += [
                    (now - written[number]) / 1e3
                    for number in range(len(ages), len(ages) + known)
                ]
            time.sleep(0.01)
    print(json.dumps({"ages": ages, "clicks": len(written)}), flush=True)


def stream(folder: Path, seconds: float) -> None:
    """Measures the time from a click's entry on a Redis stream until a follower serves
    the row of the click.
    """
    parts: list[subprocess.Popen[str]] = []
    with redis_server(folder) as url:
        if url is None:
            print("serving_stream needs redis-server", file=sys.stderr)
            return
        try:
            arguments = [
                sys.executable,
                __file__,
                "--url",
                url,
                "--folder",
                str(folder),
            ]
            arguments += ["--seconds", str(seconds), "--part"]
            for part in ("trainer", "follower"):
                parts.append(
                    subprocess.Popen(
                        [*arguments, part], stdout=subprocess.PIPE, text=True
                    )
                )
            follower = parts[-1]
            assert follower.stdout is not None
            if follower.stdout.readline() != "ready\n":
                raise RuntimeError("serving_stream: the follower has found no model")
            parts.append(subprocess.Popen([*arguments, "generator"]))
            line = follower.stdout.readline()
        finally:
            for process in parts:
                process.terminate()
                process.wait()
    result = json.loads(line)
    emit(
        {
            "benchmark": "serving_stream",
            "clicks_per_second": RATE,
            "every_s": EVERY_S,
            "clicks_served": len(result["ages"]),
            "clicks": result["clicks"],
            "click_to_served_s": spread(result["ages"], scale=1),
        }
    )


PARTS = {"generator": lambda a: generate(a.url, a.seconds)}
PARTS["loaded"] = lambda a: print_loaded(Path(a.folder))
PARTS["bare"] = lambda a: bare_server(Path(a.folder))
PARTS["trainer"] = lambda a: train_on_stream(a.url, Path(a.folder))
PARTS["follower"] = lambda a: follow_stream(
    a.url, Path(a.folder), a.seconds + 5 * EVERY_S
)


def main() -> None:
    """Runs the measurements and prints the JSON rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", default="200000,1000000,2000000,10000000", help="numbers of rows"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=40.0,
        help="seconds of training with a publisher",
    )
    parser.add_argument("--steps", type=int, default=40, help="batches of lookups")
    for hidden in ("--part", "--url", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments: Any = parser.parse_args()
    if arguments.part:
        PARTS[arguments.part](arguments)
        return
    load_library()
    sizes = [int(rows) for rows in arguments.rows.split(",")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rows in sizes:
            model, ids = Rows(), ids_of(rows)
            fill(model.table.table, ids)
            if rows != 1_000_000 or len(sizes) == 1:
                lookups(model, folder, ids, arguments.steps)
            if rows in (1_000_000, max(sizes)):
                deltas(model, folder, ids)
            if rows == max(sizes):
                mapped(model, folder, ids, arguments.steps)
                on_servers(ids, arguments.steps)
                load(model, folder, rows, 3)
            del model
            gc.collect()
        predictions(folder, 50 * arguments.steps)
        publisher(folder, arguments.seconds)
        stream(folder, arguments.seconds)


if __name__ == "__main__":
    main()
