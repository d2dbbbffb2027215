"""Objects that are alive at module level when the interpreter ends print nothing and
lose nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.interpreters import ForkingInterpreter
from torchrec_recstore import CheckpointInfo, SSDStore, read_info
from torchrec_recstore.store import open_cold_store

ROW_BYTES = 8

BEGIN = """
import logging, os, warnings
warnings.simplefilter("ignore")
import torch
from torchrec_recstore import *
"""

# A cold store, as programs open one without a table, and scans that have not ended.
STORES = """
from torchrec_recstore.store import open_cold_store
shared = open_cold_store(SSDStore("cold", shared="job"), name="x", row_bytes=8)
alone = open_cold_store(SSDStore("cold"), name="x", row_bytes=8)
for store in (shared, alone):
    store.put(torch.arange(5), torch.arange(40, dtype=torch.uint8).view(5, 8))
scans = [store.scan() for store in (shared, alone)]
parts = [next(scan) for scan in scans]
"""

TABLES = """
tables, snapshots, parts = [], [], []
for name, store in (("shared", SSDStore("cold", shared="job")), ("alone", SSDStore("cold"))):
    table = Table(4, name=name, options=TableOptions(max_rows=10, eviction=LRU(), cold_store=store))
    for first in range(0, 50, 5):
        table.insert(torch.arange(first, first + 5), torch.ones(5, 4))
    if name == "shared":
        table.flush()
    else:
        snapshots.append(table.snapshot())
    tables.append(table)
memory = Table(4)
memory.insert(torch.arange(5), torch.ones(5, 4))
snapshots.append(memory.snapshot())
in_a_cycle = [memory]
in_a_cycle.append(in_a_cycle)
"""

MODULES = """
bag = RecStoreEmbeddingBag(1000, 4, name="t", mode="sum", lr=0.1)
embedding = RecStoreEmbedding(1000, 4, name="e", lr=0.1)
loss = bag(torch.tensor([[1, 2]])).sum() + embedding(torch.tensor([1])).sum()  # its backward does not run
out = bag(torch.tensor([[3, 4]])).sum()
out.backward()
"""

CLIENT = """
client = RecStoreClient()
client.init_data("user", (10, 4))
handle = client.prefetch("user", torch.arange(10))
own = RecStoreClient()
"""

PIPELINE = """
logging.disable(logging.ERROR)
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        tables = [EmbeddingBagConfig(name="t", num_embeddings=2**40, embedding_dim=4, feature_names=["f"])]
        self.ebc = EmbeddingBagCollection(tables, device=torch.device("meta"))
        self.over = nn.Linear(4, 1)

    def forward(self, batch):
        out = self.over(self.ebc(batch).values()).sum()
        return out, out.detach()

model = DistributedModelParallel(Model(), sharders=get_recstore_sharders(), device=torch.device("cpu"))
pipeline = RecStorePrefetchPipeline(model, torch.optim.SGD(model.module.over.parameters(), 0.1), torch.device("cpu"))
ids = [KeyedJaggedTensor(["f"], torch.arange(n, n + 100), lengths=torch.tensor([100])) for n in range(5)]
batches = iter(ids)
pipeline.progress(batches)
pipeline.progress(batches)
"""

SAVE = (
    PIPELINE
    + """
pipeline.detach()
save = async_save(model, "saved")
"""
)

SERVING = """
logging.disable(logging.ERROR)
from torchrec_recstore.inference import DeltaPublisher, follow

class Clicks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = RecStoreEmbeddingBag(1000, 4, name="t", mode="sum", lr=0.1)
        self.over = torch.nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.over(self.bag(ids))

model = Clicks()
with DeltaPublisher(model, "published", every_s=0.001) as publisher:
    model(torch.arange(100)[:, None]).sum().backward()
    publisher.step()
follower = follow("published", every_s=0.001)
publisher = DeltaPublisher(model, "published", every_s=0.001)
model(torch.arange(100)[:, None]).sum().backward()
publisher.step()
"""

AFTER_THE_MAIN_THREAD = (
    SERVING
    + """
import threading
import time

def serve():
    threading.main_thread().join()
    late = follow("published", every_s=0.001)
    time.sleep(0.2)
    if not late._thread.is_alive():
        print("the follower has been closed")
    late.close()

threading.Thread(target=serve).start()
"""
)

# The other tests of this file run STORES, TABLES and SAVE.
SCRIPTS = {
    "modules": MODULES,
    "client": CLIENT,
    "pipeline": PIPELINE,
    "serving": SERVING,
    "after the main thread": AFTER_THE_MAIN_THREAD,
}


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ForkingInterpreter]:
    interpreter = ForkingInterpreter(BEGIN)
    yield interpreter
    interpreter.close()


def run_script(interpreter: ForkingInterpreter, code: str, directory: Path) -> None:
    """Runs a script whose names are alive until the interpreter has ended.

    Fails if it prints anything.
    """
    ended = interpreter.run(code, directory)
    assert ended.stderr == ""
    assert ended.stdout == ""
    assert ended.returncode == 0


@pytest.mark.parametrize(
    "name",
    [
        "modules",
        "client",
        pytest.param("pipeline", marks=pytest.mark.slow),
        pytest.param("serving", marks=pytest.mark.slow),
        pytest.param("after the main thread", marks=pytest.mark.slow),
    ],
)
def test_an_end_without_close(
    name: str, interpreter: ForkingInterpreter, tmp_path: Path
) -> None:
    run_script(interpreter, SCRIPTS[name], tmp_path)


def test_an_end_by_an_error(interpreter: ForkingInterpreter, tmp_path: Path) -> None:
    ended = interpreter.run(STORES + TABLES + "raise SystemExit(3)\n", tmp_path)
    assert (ended.returncode, ended.stderr) == (3, "")


@pytest.mark.slow
def test_acknowledged_rows_are_there(
    interpreter: ForkingInterpreter, tmp_path: Path
) -> None:
    run_script(interpreter, STORES + TABLES, tmp_path)
    store = open_cold_store(
        SSDStore(str(tmp_path / "cold"), shared="job"), name="x", row_bytes=ROW_BYTES
    )
    found, rows = store.get(torch.arange(5))
    assert found.all()
    assert torch.equal(rows, torch.arange(40, dtype=torch.uint8).view(5, ROW_BYTES))
    store.close()
    run_script(
        interpreter,
        TABLES
        + "assert torch.equal(tables[0].lookup(torch.arange(50)), torch.ones(50, 4))\n",
        tmp_path,
    )


@pytest.mark.slow
def test_a_checkpoint_is_written(
    interpreter: ForkingInterpreter, tmp_path: Path
) -> None:
    run_script(interpreter, SAVE, tmp_path)
    info: CheckpointInfo = read_info(tmp_path / "saved")
    (table,) = info.tables.values() if isinstance(info.tables, dict) else info.tables
    assert table.rows == 102  # those of two batches, and of the prefetched one
