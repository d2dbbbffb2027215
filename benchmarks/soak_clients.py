"""The clients of soak.py, each of which is a process.

    python benchmarks/soak_clients.py rows|again|cold|asks FOLDER

- ``rows``: updates and reads rows of a pair of parameter servers and of a server. Each
  read is compared with an oracle.
- ``again``: compares all rows with those that ``rows`` has left, after the servers were
  stopped and started.
- ``cold``: updates and reads a table whose rows are in a shared SSDStore, and opens it
  again each minute.
- ``asks``: asks the follower of the online example for predictions over gRPC, and reads
  its state over HTTP.

A client works until ``FOLDER/stop`` exists, and then writes ``FOLDER/<name>.json``.
Rows begin at 0, gradients are whole numbers, and the optimizer is SGD with the rate 1,
so that a row is minus the sum of its gradients, exactly. The oracle is this sum, an
array of NumPy.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrec_recstore import (
    SGD,
    ConstantInit,
    RecStoreClient,
    SSDStore,
    Table,
    TableOptions,
)

IDS = 20_000
MAX_ROWS = 2_000
DIM = 16
BATCH = 200
PAUSE_S = 0.15
REOPEN_S = 60.0
PATIENCE_S = 600.0
"""The time for which a call is repeated.

A machine that is overloaded is no reason to end a soak.
"""
SPREAD = 2**40 + 7
"""The distance between two ids, so that they are spread over the numbers of 64 bits."""


class Oracle:
    """The exact value of each row.

    Args:
        seed: The seed of the ids and of the gradients.
    """

    def __init__(self, seed: int) -> None:
        self.rows = np.zeros((IDS, DIM), np.float32)
        self.updates = 0
        self.reads = 0
        self._random = np.random.default_rng(seed)

    def random_places(self) -> Tensor:
        """Returns distinct places of ids, at most ``BATCH``. Few places are frequent."""
        draws = self._random.random(BATCH) ** 3 * IDS
        places = np.unique(draws.astype(np.int64))
        return torch.from_numpy(places)

    def step(
        self,
        update: Callable[[Tensor, Tensor], None],
        read: Callable[[Tensor], Tensor],
    ) -> None:
        """Makes one update and one read.

        Args:
            update: Takes ids, (N,), and gradients, (N, DIM).
            read: Takes ids, (N,), and returns rows, (N, DIM).
        """
        places = self.random_places()
        whole_numbers = self._random.integers(-3, 4, (len(places), DIM))
        grads = whole_numbers.astype(np.float32)
        update(places * SPREAD, torch.from_numpy(grads))
        self.rows[places.numpy()] -= grads
        self.updates += 1
        self.check(read, self.random_places())

    def check(self, read: Callable[[Tensor], Tensor], places: Tensor) -> None:
        """Compares rows with the oracle.

        Raises:
            AssertionError: A row is not exact.
        """
        rows = read(places * SPREAD).numpy()
        expected_rows = self.rows[places.numpy()]
        is_wrong = (rows != expected_rows).any(axis=1)
        self.reads += 1
        if is_wrong.any():
            num_wrong = int(is_wrong.sum())
            first_wrong = int(is_wrong.argmax())
            place = int(places[first_wrong])
            raise AssertionError(
                f"{num_wrong} of {len(places)} rows are not exact,"
                f" first that of place {place}"
            )

    def check_all(self, read: Callable[[Tensor], Tensor]) -> None:
        """Compares all rows."""
        all_places = torch.arange(IDS)
        for places in all_places.split(4 * BATCH):
            self.check(read, places)

    def report(self) -> dict[str, Any]:
        """Returns what was compared."""
        return {
            "updates": self.updates,
            "reads": self.reads,
            "exact": True,
        }


def rows(folder: Path) -> dict[str, Any]:
    """See the module."""
    oracles = []
    with ExitStack() as stack:
        clients = _clients(folder, stack)
        for seed, client in enumerate(clients):
            _open_table(client)
            oracles.append(Oracle(seed))
        while not (folder / "stop").exists():
            for client, oracle in zip(clients, oracles, strict=True):
                oracle.step(
                    update=partial(client.update, "t"),
                    read=partial(client.pull, "t"),
                )
            time.sleep(PAUSE_S)
        for number, oracle in enumerate(oracles):
            client = clients[number]
            oracle.check_all(partial(client.pull, "t"))
            client.save("end")
            np.save(folder / f"rows-{number}.npy", oracle.rows)
        stats = clients[-1].stats("t")
    reports = [oracle.report() for oracle in oracles]
    return {
        "updates": sum(report["updates"] for report in reports),
        "reads": sum(report["reads"] for report in reports),
        "exact": all(report["exact"] for report in reports),
        "rows": stats.rows,
        "cold_rows": stats.cold_rows,
    }


def again(folder: Path) -> dict[str, Any]:
    """See the module."""
    with ExitStack() as stack:
        for number, client in enumerate(_clients(folder, stack)):
            oracle = Oracle(number)
            oracle.rows = np.load(folder / f"rows-{number}.npy")
            oracle.check_all(partial(client.pull, "t"))
    return {"rows": 2 * IDS, "exact": True}


def _clients(folder: Path, stack: ExitStack) -> list[RecStoreClient]:
    """Opens a client of the pair, and one of the server with cold rows."""
    clients = []
    for address in (folder / "servers").read_text().split():
        client = RecStoreClient([address], timeout_s=PATIENCE_S)
        clients.append(stack.enter_context(client))
    return clients


def _open_table(client: RecStoreClient) -> None:
    options = TableOptions(initializer=ConstantInit(0.0))
    client.init_data(
        "t",
        (IDS, DIM),
        torch.float32,
        optimizer=SGD(lr=1.0),
        options=options,
    )


def cold(folder: Path) -> dict[str, Any]:
    """See the module."""
    oracle = Oracle(2)
    opened = 0
    evicted = 0
    while not (folder / "stop").exists():
        with _cold_table(folder) as table:
            opened += 1
            until = time.monotonic() + REOPEN_S
            while time.monotonic() < until and not (folder / "stop").exists():
                oracle.step(table.update, table.lookup)
                time.sleep(PAUSE_S)
            evicted += table.stats().evicted
    with _cold_table(folder) as table:
        oracle.check_all(table.lookup)
    return oracle.report() | {"opened": opened, "evicted": evicted}


def _cold_table(folder: Path) -> Table:
    store = SSDStore(str(folder / "cold"), shared="soak")
    options = TableOptions(
        initializer=ConstantInit(0.0),
        max_rows=MAX_ROWS,
        cold_store=store,
    )
    return Table(
        DIM,
        optimizer=SGD(lr=1.0),
        options=options,
        name="soak",
    )


def asks(folder: Path) -> dict[str, Any]:
    """See the module.

    A follower that was killed does not answer for some seconds, which is counted.
    """
    import grpc

    from torchrec_recstore_serving.predict import predictor_pb2 as messages
    from torchrec_recstore_serving.predict.predictor_pb2_grpc import PredictorStub

    settings = json.loads((folder / "online" / "settings.json").read_text())
    state_url = f"http://{settings['http']}/state"
    ones = np.ones(4, np.int32)
    lengths = messages.Array(
        dtype="int32",
        shape=[4],
        data=ones.tobytes(),
    )
    outcomes = {"answered": 0, "unanswered": 0, "states": 0}
    random = np.random.default_rng(3)
    with grpc.insecure_channel(settings["grpc"]) as channel:
        stub = PredictorStub(channel)
        while not (folder / "stop").exists():
            ids = random.integers(0, 2**40, 4)
            values = messages.Array(
                dtype="int64",
                shape=[4],
                data=ids.tobytes(),
            )
            features = messages.Jagged(
                keys=["user", "item"],
                values=values,
                lengths=lengths,
            )
            argument = messages.Argument(jagged=features)
            request = messages.PredictRequest(arguments={"features": argument})
            try:
                reply = stub.Predict(request, timeout=5.0)
                (output,) = reply.outputs.values()
                logits = np.frombuffer(output.data, np.float32)
                if len(logits) != 2 or not np.isfinite(logits).all():
                    raise AssertionError(f"the follower has answered {logits}")
                outcomes["answered"] += 1
                with urllib.request.urlopen(state_url, timeout=5.0) as response:
                    json.load(response)
                outcomes["states"] += 1
            except (grpc.RpcError, OSError, HTTPException):
                outcomes["unanswered"] += 1
            time.sleep(2 * PAUSE_S)
    return outcomes | {"exact": outcomes["answered"] > 0}


def main() -> None:
    """Runs one client until the end, and writes its report."""
    name = sys.argv[1]
    folder = Path(sys.argv[2])
    torch.set_num_threads(1)
    clients = {
        "rows": rows,
        "again": again,
        "cold": cold,
        "asks": asks,
    }
    report = clients[name](folder)
    (folder / f"{name}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
