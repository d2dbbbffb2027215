"""Measures served models: lookups, deltas, loads, publishing, predictions, and streams.

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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import (
    Side,
    Timing,
    anonymous_bytes,
    clock,
    emit,
    interleave,
    rates,
    ratios,
    redis_server,
    spread,
    step_seconds,
)
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
CHANGED = 10_000  # rows of a delta
BATCH = 100_000
SERVERS_BATCH = 50_000
DELTAS = 20
WARM_UP = 3  # deltas before those that are measured
EVERY_S = 2.0  # between publications
RATE = 2000  # clicks a second
FIRST_CLICK_ID = 1 << 40  # Click 0 has this id, and each click has the next one.
OPTIONS = TableOptions(initializer=UniformInit(-0.1, 0.1))
FORMATS = {"float32": torch.float32, "int8": torch.int8}


class Rows(nn.Module):
    """A model of one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RecStoreEmbedding(
            1,
            DIM,
            name="t",
            lr=0.1,
            options=OPTIONS,
        )

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
        rows = torch.randn(len(part), DIM)
        table.insert(part, rows)


def timed(call: Callable[[Any], object], arguments: Sequence[Any]) -> Side:
    """Returns a side that calls a function with one of the arguments after the other."""

    def side(i: int) -> Timing:
        begin = clock()
        result = call(arguments[i % len(arguments)])
        seconds = clock() - begin
        del result
        return (seconds,)

    return side


def random_batches(ids: Tensor, count: int, size: int) -> list[Tensor]:
    """Returns batches of ids that are drawn at random."""
    batches = []
    for _ in range(count):
        places = torch.randint(0, len(ids), (size,))
        batches.append(ids[places])
    return batches


def million_a_second(timings: dict[str, list[Timing]], ids: int) -> dict[str, float]:
    """Returns the median of the million ids a second of each side."""
    medians = {}
    for side, steps in timings.items():
        side_rates = rates(steps, ids)
        medians[side] = spread(side_rates, scale=1e-6)["median"]
    return medians


def lookups(
    model: Rows,
    folder: Path,
    ids: Tensor,
    steps: int,
) -> None:
    """Compares served lookups with lookups in the training table, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    batches = random_batches(ids, count=8, size=BATCH)
    for name, dtype in FORMATS.items():
        table = model.table.table
        if dtype is torch.int8:
            table = Table(DIM, torch.int8)
            fill(table, ids)
        export_for_inference(
            model,
            folder / "lookup.pt",
            dtype=dtype,
            index="hash",
        )
        served = torch.jit.load(folder / "lookup.pt")

        calls = {
            "served": timed(served, batches),
            "table": timed(table.lookup, batches),
        }
        timings = interleave(calls, steps, warm_up=8)
        speedups = ratios(timings["table"], timings["served"])
        emit(
            {
                "benchmark": "serving_lookup",
                "rows": len(ids),
                "dim": DIM,
                "format": name,
                "million_ids_per_second": million_a_second(timings, BATCH),
                "served_over_table": spread(speedups, scale=1),
            }
        )
    torch.set_num_threads(threads)


class Reader(threading.Thread):
    """Reads a served model again and again, and measures each read."""

    def __init__(self, served: Callable[[Tensor], object], ids: Tensor) -> None:
        super().__init__(daemon=True)
        self._served = served
        self._batches = random_batches(ids, count=64, size=1000)
        self._ends = threading.Event()
        self.seconds: list[float] = []
        self.start()

    def run(self) -> None:
        """Reads until :meth:`end`."""
        torch.set_num_threads(1)
        while not self._ends.is_set():
            number = len(self.seconds) % len(self._batches)
            begin = clock()
            self._served(self._batches[number])
            self.seconds.append(clock() - begin)

    def end(self) -> dict[str, float]:
        """Stops, and returns the spread of the reads in milliseconds.

        The first read of each batch is left out.
        """
        self._ends.set()
        self.join()
        warm_up = len(self._batches)
        return spread(self.seconds[warm_up:])


def deltas(model: Rows, folder: Path, ids: Tensor) -> None:
    """Makes deltas of 10,000 changed rows, and applies them while a thread reads.

    They are applied one after the other, and then one each second.
    """
    export_for_inference(
        model,
        folder / "base.pt",
        dtype=torch.int8,
        index="hash",
    )
    base = torch.jit.load(folder / "base.pt")
    replica = torch.jit.load(folder / "base.pt")
    paths = [folder / f"{number}.delta" for number in range(WARM_UP + 2 * DELTAS)]
    make_seconds = [make_delta(model, base, ids, path) for path in paths]

    for path in paths[:WARM_UP]:
        replica.apply_delta(read_delta(path))
    reader = Reader(replica, ids)
    time.sleep(2.0)
    at_rest = reader.end()

    pending = [read_delta(path) for path in paths[WARM_UP:]]
    apply_seconds = []
    meanwhile = {}
    for pause_s in (0.0, 1.0):
        reader = Reader(replica, ids)
        for _ in range(DELTAS):
            begin = clock()
            replica.apply_delta(pending.pop(0))
            apply_seconds.append(clock() - begin)
            time.sleep(max(0.0, begin + pause_s - clock()))
        meanwhile[pause_s] = reader.end()
    assert replica.recstore_version() == base.recstore_version()

    always_over_rest = meanwhile[0.0]["p99"] / at_rest["p99"]
    each_second_over_rest = meanwhile[1.0]["p99"] / at_rest["p99"]
    emit(
        {
            "benchmark": "serving_delta",
            "rows": len(ids),
            "dim": DIM,
            "changed": CHANGED,
            "make_ms": spread(make_seconds[WARM_UP:]),
            "apply_ms": spread(apply_seconds),
            "read_at_rest_ms": at_rest,
            "read_meanwhile_ms": meanwhile[0.0],
            "p99_meanwhile_over_at_rest": round(always_over_rest, 2),
            "p99_delta_each_second_over_at_rest": round(each_second_over_rest, 2),
        }
    )


def make_delta(
    model: Rows,
    base: Any,
    ids: Tensor,
    path: Path,
) -> float:
    """Changes rows, writes their delta, and applies it to the base.

    Returns:
        The seconds of making the delta.
    """
    changed_places = torch.randperm(len(ids))[:CHANGED]
    rows = model.train()(ids[changed_places])
    rows.sum().backward()

    begin = clock()
    info = export_delta(model, path, base=base)
    seconds = clock() - begin
    # an update may round to the same int8 row
    assert info.tables["t"].rows > 0.99 * CHANGED
    base.apply_delta(read_delta(info.path))
    return seconds


def mapped(
    model: Rows,
    folder: Path,
    ids: Tensor,
    steps: int,
) -> None:
    """Compares a model whose rows are mapped with one whose rows are in memory.

    The lookups with one thread and the memory are compared.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    batches = random_batches(ids, count=8, size=BATCH)
    mapped_path = folder / "mapped.pt"
    memory_path = folder / "memory.pt"
    paths = {"mapped": mapped_path, "memory": memory_path}
    for name, dtype in FORMATS.items():
        sides = {}
        for rows, path in paths.items():
            export_for_inference(
                model,
                path,
                dtype=dtype,
                index="hash",
                rows=rows,
            )
            sides[rows] = timed(torch.jit.load(path), batches)
        timings = interleave(sides, steps, warm_up=40)
        speedups = ratios(timings["memory"], timings["mapped"])
        sides.clear()  # closes the models
        gc.collect()
        row_bytes = DIM * 4 if name == "float32" else DIM + 4
        rows_and_ids = len(ids) * (8 + row_bytes)
        memory = loaded_bytes(memory_path, processes=1)["anonymous"]
        mapped_memory = 2 * loaded_bytes(mapped_path, processes=2)["pss"]
        mapped_over_file = mapped_memory / mapped_path.stat().st_size
        emit(
            {
                "benchmark": "serving_mapped",
                "rows": len(ids),
                "dim": DIM,
                "format": name,
                "million_ids_per_second": million_a_second(timings, BATCH),
                "mapped_over_memory": spread(speedups, scale=1),
                "memory_over_rows_and_ids": round(memory / rows_and_ids, 3),
                "two_processes_over_file": round(mapped_over_file, 3),
            }
        )
    torch.set_num_threads(threads)


def on_servers(ids: Tensor, steps: int) -> None:
    """Compares rows on a server of this host with rows in memory, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ids = ids[:1_000_000]
    with servers(1) as (addresses, _), RecStoreClient(addresses) as client:
        rows_addresses = ",".join(client.rows_addresses())
        for dim in (16, 64):
            name = f"t{dim}"
            rows = torch.randn(len(ids) + 1, dim)
            pushed_rows = rows[1:]
            client.init_data(name, (len(ids), dim))
            for part in torch.arange(len(ids)).split(100_000):
                client.push(name, ids[part], pushed_rows[part])
            tables = TableOnServers(
                name, dim, torch.float32, rows_addresses, False, True
            )
            server_table = ServerTable(name, "float32", tables)
            remote = scripted(ServedTables([server_table]))
            local_table = HashedTable(name, dim, "float32", ids, rows)
            local = scripted(ServedTables([local_table]))
            sides = {
                "memory": served_lookup(local, name, ids, "memory"),
                "shared memory": served_lookup(remote, name, ids, "shared memory"),
                "TCP": served_lookup(remote, name, ids, "TCP"),
            }
            timings = interleave(sides, steps, warm_up=8)
            speedups = {}
            for transport in ("shared memory", "TCP"):
                over_memory = ratios(timings["memory"], timings[transport])
                speedups[transport] = spread(over_memory, 1)
            emit(
                {
                    "benchmark": "serving_servers",
                    "rows": len(ids),
                    "dim": dim,
                    "ids": SERVERS_BATCH,
                    "million_ids_per_second": million_a_second(timings, SERVERS_BATCH),
                    "servers_over_memory": speedups,
                }
            )
    torch.set_num_threads(threads)


def served_lookup(
    served: Any,
    name: str,
    ids: Tensor,
    transport: str,
) -> Side:
    """Returns a side that looks up random ids by a transport."""

    def side(_: int) -> Timing:
        os.environ["RECSTORE_SHARED_MEMORY"] = "0" if transport == "TCP" else "1"
        # the other sides have not read these rows
        places = torch.randint(0, len(ids), (SERVERS_BATCH,))
        batch = ids[places]
        begin = clock()
        rows = served.lookup(name, batch)
        seconds = clock() - begin
        del rows
        return (seconds,)

    return side


def loaded_bytes(path: Path, processes: int) -> dict[str, int]:
    """Loads a model in several processes at the same time.

    Returns:
        ``anonymous``, the memory of one of them without the file, and ``pss``, its
        share of the file, in bytes.
    """
    command = [sys.executable, __file__]
    command += ["--folder", str(path)]
    command += ["--part", "loaded"]
    parts = []
    for _ in range(processes):
        part = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        parts.append(part)
    for part in parts:
        assert part.stdout is not None
        part.stdout.readline()  # The model is loaded.
    replies = []
    for part in parts:
        reply, _ = part.communicate("go\n")
        replies.append(reply)
    memory: dict[str, int] = json.loads(replies[0])
    return memory


def print_loaded(path: Path) -> None:
    """Loads a model, reads all of its rows, and prints the memory that it takes.

    The memory is measured when a line arrives, so that other processes have the model
    too.
    """
    load_library()
    bytes_before = anonymous_bytes()
    served = torch.jit.load(path)
    served.verify()
    time.sleep(5)  # A thread moves the rows to huge pages.
    model_bytes = anonymous_bytes() - bytes_before
    print("loaded", flush=True)
    sys.stdin.readline()
    shared_bytes = 0
    smaps = Path("/proc/self/smaps").read_text().splitlines()
    for number, line in enumerate(smaps):
        if line.endswith(str(path)):
            following = smaps[number : number + 8]  # the lines of the mapping
            for entry in following:
                if entry.startswith("Pss:"):
                    kib = int(entry.split()[1])
                    shared_bytes += kib << 10
    memory = {"anonymous": model_bytes, "pss": shared_bytes}
    print(json.dumps(memory), flush=True)


def load(
    model: Rows,
    folder: Path,
    rows: int,
    steps: int,
) -> None:
    """Compares the load of an export with reading its file."""
    for name, dtype in FORMATS.items():
        path = folder / "load.pt"
        export_for_inference(
            model,
            path,
            dtype=dtype,
            index="hash",
        )

        sides = {
            "load": timed(torch.jit.load, [path]),
            "read": timed(Path.read_bytes, [path]),
        }
        timings = interleave(sides, steps, warm_up=1)
        load_over_read = ratios(timings["load"], timings["read"])
        emit(
            {
                "benchmark": "serving_load",
                "rows": rows,
                "format": name,
                "bytes": path.stat().st_size,
                "load_ms": spread(step_seconds(timings["load"])),
                "read_ms": spread(step_seconds(timings["read"])),
                "load_over_read": spread(load_over_read, scale=1),
            }
        )


class Clicks(nn.Module):
    """A table of the features of clicks, and dense layers."""

    def __init__(self, name: str = "t", bags: int = 8) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            RecStoreEmbeddingBag(
                1,
                DIM,
                name=f"{name}{number}",
                mode="sum",
                lr=0.05,
                options=OPTIONS,
            )
            for number in range(bags)
        )
        self.over = nn.Sequential(
            nn.Linear(DIM * bags, 256),
            nn.ReLU(),
            nn.Linear(256, 1),
        )

    def forward(self, ids: Tensor) -> Tensor:
        """(B, bags, L) -> (B, 1): the log odds."""
        pooled = []
        for number, bag in enumerate(self.bags):
            pooled.append(bag(ids[:, number]))
        logits: Tensor = self.over(torch.cat(pooled, dim=1))
        return logits


def train_step(
    model: Clicks,
    dense: torch.optim.Optimizer,
    ids: Tensor,
) -> None:
    """Trains on a batch, (B, bags, L), whose labels follow from the ids."""
    label_ids = ids[:, 0, 1:2]
    labels = (label_ids % 3 == 0).float()
    logits = model.train()(ids)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
    loss.backward()
    dense.step()
    dense.zero_grad()


def popular_ids(*shape: int) -> Tensor:
    """Returns ids, of which the smallest are the most frequent."""
    return (torch.rand(*shape) ** 4 * 200_000).long()


def publisher(folder: Path, seconds: float) -> None:
    """Compares training steps with a publisher and without it.

    The sides alternate. Each begins and ends without a pending write.
    """
    torch.manual_seed(0)
    model = Clicks()
    dense = torch.optim.SGD(model.over.parameters(), lr=0.01)
    batches = [popular_ids(1024, 8, 2) for _ in range(64)]

    def train(steps: int, step: Callable[[], object]) -> float:
        begin = clock()
        for number in range(steps):
            train_step(model, dense, batches[number % 64])
            step()
        return clock() - begin

    train(64, lambda: None)
    step_s = train(64, lambda: None) / 64
    steps = max(10, math.ceil(seconds / 6 / step_s))
    alone: list[Timing] = []
    publishing: list[Timing] = []
    published = folder / "published"
    with DeltaPublisher(model, published, every_s=EVERY_S) as delta_publisher:
        delta_publisher.step()
        delta_publisher._writer.wait()  # type: ignore[union-attr]
        for _ in range(3):
            alone_s = train(steps, lambda: None)
            alone.append((alone_s / steps,))

            begin = clock()
            train(steps, delta_publisher.step)
            delta_publisher._writer.wait()  # type: ignore[union-attr]
            publishing_s = clock() - begin
            publishing.append((publishing_s / steps,))
        publications = delta_publisher._writer._number  # type: ignore[union-attr]
    alone_median_s = statistics.median(step_seconds(alone))
    publishing_median_s = statistics.median(step_seconds(publishing))
    emit(
        {
            "benchmark": "serving_publisher",
            "every_s": EVERY_S,
            "batch": 1024,
            "steps": steps,
            "publications": publications,
            "alone_ms": round(alone_median_s * 1e3, 3),
            "with_ms": round(publishing_median_s * 1e3, 3),
            "with_over_alone": spread(ratios(publishing, alone), scale=1),
        }
    )


def bare_server(folder: Path) -> None:
    """Serves the published model by the library of ``recstore follow`` alone.

    It serves until the process is ended.
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
                arguments = json.loads(self.request.body)["arguments"]
                with torch.inference_mode():
                    output = model(torch.tensor(arguments["ids"]))
                self.finish({"outputs": {"output": output.tolist()}})

        async def serve() -> None:
            application = Application(
                [("/predict", Predict)],
                log_function=lambda handler: None,
            )
            sockets = bind_sockets(0, "127.0.0.1")
            HTTPServer(application).add_sockets(sockets)
            _, port = sockets[0].getsockname()
            print(f"127.0.0.1:{port}", flush=True)
            await asyncio.Event().wait()

        asyncio.run(serve())


def predictions(folder: Path, steps: int) -> None:
    """Compares a kept connection to ``recstore follow`` with one to a bare server.

    Both servers have the same library.
    """
    folder = folder / "http"
    published = folder / "published"
    publish_clicks(published)
    follow_command = [sys.executable, "-m", "torchrec_recstore.cli", "follow"]
    follow_command.append(str(published))
    follow_command += ["--listen", "127.0.0.1:0"]
    follow_command += ["--http", "127.0.0.1:0"]
    follow_command.append("--json")
    bare_command = [sys.executable, __file__]
    bare_command += ["--folder", str(folder)]
    bare_command += ["--part", "bare"]

    bodies = prediction_bodies()
    following = subprocess.Popen(follow_command, stdout=subprocess.PIPE, text=True)
    bare = subprocess.Popen(bare_command, stdout=subprocess.PIPE, text=True)
    try:
        assert following.stdout is not None
        assert bare.stdout is not None
        follow_address = json.loads(following.stdout.readline())["http"]
        bare_address = bare.stdout.readline().strip()
        follow_connection = http.client.HTTPConnection(follow_address)
        bare_connection = http.client.HTTPConnection(bare_address)
        while predict(follow_connection, bodies[0]) != 200:
            time.sleep(0.1)
        sides = {
            "follow": timed(partial(predict, follow_connection), bodies),
            "bare": timed(partial(predict, bare_connection), bodies),
        }
        timings = interleave(sides, steps, warm_up=500)
    finally:
        for server in (following, bare):
            server.terminate()
            server.wait()
    follow_s = step_seconds(timings["follow"])
    bare_s = step_seconds(timings["bare"])
    p50_over_bare = statistics.median(follow_s) / statistics.median(bare_s)
    emit(
        {
            "benchmark": "serving_http",
            "requests": steps,
            "follow_ms": spread(follow_s),
            "bare_ms": spread(bare_s),
            "p50_over_bare": round(p50_over_bare, 3),
        }
    )


def prediction_bodies() -> list[str]:
    """Returns the JSON of 64 requests."""
    bodies = []
    for _ in range(64):
        ids = (torch.rand(1, 8, 2) * 10_000).long()
        arguments = {"ids": ids.tolist()}
        bodies.append(json.dumps({"arguments": arguments}))
    return bodies


def publish_clicks(published: Path) -> None:
    """Publishes a model that has made a step."""
    torch.manual_seed(0)
    model = Clicks()
    ids = (torch.rand(1024, 8, 2) * 10_000).long()
    model(ids).sum().backward()
    with DeltaPublisher(model.eval(), published, every_s=0) as delta_publisher:
        delta_publisher.step()


def predict(connection: http.client.HTTPConnection, body: str) -> int:
    """Asks for a prediction, and returns the status."""
    connection.request("POST", "/predict", body)
    response = connection.getresponse()
    response.read()
    return response.status


def generate(url: str, seconds: float) -> None:
    """Writes clicks to the stream.

    Each has eight ids, of which one is its own. Redis notes the time.
    """
    import redis

    client = redis.Redis.from_url(url)
    written = 0
    begin = clock()
    seconds_passed = 0.0
    while seconds_passed < seconds:
        due = int(seconds_passed * RATE)
        clicks = max(0, due - written)
        ids = popular_ids(clicks, 8)
        ids[:, 0] = torch.arange(written, due) + FIRST_CLICK_ID
        with client.pipeline(transaction=False) as pipe:
            for click in ids:
                content = click.numpy().tobytes()
                pipe.xadd("clicks", {"ids": content})
            pipe.execute()
        written = due
        time.sleep(0.02)
        seconds_passed = clock() - begin


def train_on_stream(url: str, folder: Path) -> None:
    """Trains on the clicks of the stream in their order, and publishes.

    It trains until the process is ended.
    """
    import redis

    torch.set_num_threads(1)
    model = Clicks(bags=1)
    dense = torch.optim.SGD(model.over.parameters(), lr=0.01)
    client = redis.Redis.from_url(url)
    last = b"0"
    with DeltaPublisher(
        model,
        folder / "published",
        every_s=EVERY_S,
    ) as delta_publisher:
        while True:
            delta_publisher.step()
            streams = client.xread({"clicks": last}, count=256, block=100)
            if streams:
                _, entries = streams[0]
                last, _ = entries[-1]
                content = bytearray()
                for _, fields in entries:
                    content += fields[b"ids"]
                ids = torch.frombuffer(content, dtype=torch.int64)
                train_step(model, dense, ids.view(-1, 1, 8))


def follow_stream(url: str, folder: Path, seconds: float) -> None:
    """Follows the model, and prints how long it takes until the clicks are served.

    Each number is that of the seconds until the row of a click is served.
    """
    import redis

    client = redis.Redis.from_url(url)
    last = b"0"
    written_ms: list[int] = []  # the time of each click in milliseconds since 1970
    ages: list[float] = []  # of the clicks whose row is served, in their order
    version: str | None = None
    with follow(folder / "published", every_s=0.1) as follower:
        print("ready", flush=True)
        begin = clock()
        while clock() - begin < seconds:
            served = follower.model
            now_ms = time.time() * 1e3
            streams = client.xread({"clicks": last}, count=100_000)
            if streams:
                _, entries = streams[0]
                last, _ = entries[-1]
                for entry_id, _ in entries:
                    milliseconds, _, _ = entry_id.partition(b"-")
                    written_ms.append(int(milliseconds))
            if served.recstore_version() != version:
                version = served.recstore_version()
                numbers = torch.arange(len(ages), len(written_ms))
                rows_of_ids = served.recstore_rows_of("t0", numbers + FIRST_CLICK_ID)
                has_row = rows_of_ids[1]
                first = len(ages)
                end = first + int(has_row.sum())
                for click_ms in written_ms[first:end]:
                    ages.append((now_ms - click_ms) / 1e3)
            time.sleep(0.01)
    result = {"ages": ages, "clicks": len(written_ms)}
    print(json.dumps(result), flush=True)


def stream(folder: Path, seconds: float) -> None:
    """Measures the time from a click to its row in the served model.

    It begins with the click's entry on a Redis stream, and ends when a follower serves
    the row of the click.
    """
    parts: list[subprocess.Popen[str]] = []
    with redis_server(folder) as url:
        if url is None:
            print("serving_stream needs redis-server", file=sys.stderr)
            return
        command = [sys.executable, __file__]
        command += ["--url", url]
        command += ["--folder", str(folder)]
        command += ["--seconds", str(seconds)]
        command.append("--part")
        try:
            trainer = subprocess.Popen(
                [*command, "trainer"],
                stdout=subprocess.PIPE,
                text=True,
            )
            parts.append(trainer)
            follower = subprocess.Popen(
                [*command, "follower"],
                stdout=subprocess.PIPE,
                text=True,
            )
            parts.append(follower)
            assert follower.stdout is not None
            if follower.stdout.readline() != "ready\n":
                raise RuntimeError("serving_stream: the follower has found no model")
            parts.append(subprocess.Popen([*command, "generator"]))
            line = follower.stdout.readline()
        finally:
            for part in parts:
                part.terminate()
                part.wait()
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


def run_part(
    part: str,
    url: str,
    folder: Path,
    seconds: float,
) -> None:
    """Runs a part in this process, which a measurement has started."""
    if part == "generator":
        generate(url, seconds)
    elif part == "trainer":
        train_on_stream(url, folder)
    elif part == "follower":
        follow_stream(url, folder, seconds + 5 * EVERY_S)
    elif part == "loaded":
        print_loaded(folder)
    elif part == "bare":
        bare_server(folder)


def main() -> None:
    """Runs the measurements and prints the JSON rows."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rows",
        default="200000,1000000,2000000,10000000",
        help="numbers of rows",
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
        folder = Path(arguments.folder)
        run_part(arguments.part, arguments.url, folder, arguments.seconds)
        return
    load_library()
    sizes = [int(rows) for rows in arguments.rows.split(",")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rows in sizes:
            model = Rows()
            ids = ids_of(rows)
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
