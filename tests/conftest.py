from __future__ import annotations

import gc
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

# An idle OpenMP thread spins for milliseconds, which takes time from the other
# processes of the tests. OpenMP reads this variable when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
import torch.distributed as dist

# with xdist too
from .upstream.summary import pytest_terminal_summary as pytest_terminal_summary


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--third",
        type=int,
        choices=(1, 2, 3),
        help="run a third of the tests: all cases of a function are in the same third",
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Keeps the tests of the third that ``--third`` asks for, and begins with the modules
    that have long tests, which would otherwise run at the end while the other workers
    wait.
    """
    third = config.getoption("--third")
    if third is not None:
        keep_third(third, config, items)
    longest: dict[str, float] = {}
    for item in items:
        limit = item.get_closest_marker("timeout")
        seconds = 0 if limit is None else limit.args[0]
        module = module_of(item)
        longest[module] = max(seconds, longest.get(module, 0))
    items.sort(key=lambda item: -longest[module_of(item)])


def module_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def keep_third(third: int, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests of the other two thirds. The name of a function says in which
    it is, so that a new test moves no other one.
    """
    in_third: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        function = item.nodeid.partition("[")[0]
        in_third[zlib.crc32(function.encode()) % 3 + 1 == third].append(item)
    config.hook.pytest_deselected(items=in_third[False])
    items[:] = in_third[True]


def pytest_collection_finish() -> None:
    """Leaves the modules and the tests, a million objects, out of garbage collections,
    which take half a second with them.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed_and_threads() -> Iterator[None]:
    """Sets the same seed before each test, and restores the number of threads after it."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _client_of_the_process() -> Iterator[None]:
    """Closes the client that all calls of ``RecStoreClient()`` return, so that each
    test begins without its tables.
    """
    yield
    # without an import of it
    module = sys.modules.get("torchrec_recstore_service.recstore_compat")
    if module is not None:
        module.RecStoreClient().close()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A default process group, gloo, with this process as its only rank."""
    # not at the top of the file: tests of the store run without TorchRec
    from torchrec.distributed import comm

    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()
    # torchrec 1.8.0 keeps the node groups of the destroyed group
    comm._INTRA_PG = comm._CROSS_PG = None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 600 KB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)],
        capture_output=True,
    ).returncode:
        pytest.skip("a small tmpfs cannot be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)
