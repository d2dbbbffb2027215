from __future__ import annotations

import copy
import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.optim import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad
from torchrec_recstore.options import NormalInit, TableOptions
from torchrec_recstore.store import Table, TableStats

from ..instruction_sets import by_instruction_set
from ..processes import run_forked_command

OPTIMIZERS: list[Optimizer] = [
    SGD(0.1, weight_decay=0.01),
    Adagrad(0.1),
    RowWiseAdagrad(0.1, weight_decay=0.01),
]


def test_grows_to_many_rows_and_shrinks_to_none() -> None:
    table = Table(8)
    ids = torch.randperm(300_000) * 7919 - 10**9
    for part in ids.split(20_000):
        table.lookup(part, train=True)
    assert len(table) == 300_000
    assert torch.equal(table.ids(), ids.sort().values)
    full = table.stats().bytes
    assert 300_000 * 36 < full < 300_000 * 36 * 3
    assert table.remove(ids) == 300_000
    assert len(table) == 0
    table.lookup(ids[:10], train=True)
    assert table.stats().rows == 10


def test_rows_and_their_bookkeeping_stay_as_they_are_while_the_table_grows() -> None:
    table, ids = Table(7, optimizer=Adam(0.1)), torch.arange(-500, 500)
    for _ in range(3):
        table.lookup(ids, train=True)
        table.update(ids, torch.randn(1000, 7))
    before = table.read_rows(ids)
    assert before["frequency"].tolist() == [3] * 1000
    for part in torch.arange(1000, 200_000).split(20_000):
        table.lookup(part, train=True)
    after = table.read_rows(ids)
    assert (
        before.keys()
        == after.keys()
        == {"weight", "exp_avg", "exp_avg_sq", "last_step", "frequency"}
    )
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_table_with_reserved_room_does_not_grow_while_rows_arrive() -> None:
    table, ids = Table(8), torch.randperm(100_000)
    few = torch.arange(-10, 0)
    table.lookup(few, train=True)
    before = table.read_rows(few)
    table.reserve(100_010)
    reserved = table.stats().bytes
    for part in ids.split(7000):
        table.lookup(part, train=True)
    bytes_of_rows = 100_000 * table.image_bytes
    grown = table.stats().bytes - reserved
    assert bytes_of_rows <= grown < bytes_of_rows + 20_000, (
        "the index is as large as it was; slots have a bit each"
    )
    after = table.read_rows(few)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    table.reserve(10)  # there is room for more already
    assert table.stats().bytes - reserved == grown


def test_no_more_room_is_reserved_than_a_table_may_have_rows() -> None:
    table = Table(8, options=TableOptions(max_rows=1000))
    table.reserve(10**15)
    assert table.stats().bytes < 100_000


def test_room_that_cannot_be_reserved_is_an_error_and_changes_nothing() -> None:
    table = Table(8)
    table.lookup(torch.arange(10), train=True)
    before = table.stats()
    with pytest.raises(ValueError, match="rows must be at least 0, got -1"):
        table.reserve(-1)
    with pytest.raises(MemoryError):
        table.reserve(2**32)
    with pytest.raises(MemoryError):
        table.reserve(2**32 - 2)
    assert table.stats() == before
    assert len(table.lookup(torch.arange(20), train=True)) == 20


def test_a_row_depends_on_seed_name_id_and_column_alone() -> None:
    ids = torch.tensor([3, -3, 2**63 - 1, -(2**63), 0])
    init = TableOptions(missing="init")
    rows = Table(70, options=init, name="a").lookup(ids)
    shuffled = Table(70, name="a")
    shuffled.lookup(torch.randint(-1000, 1000, (5000,)), train=True)
    assert torch.equal(shuffled.lookup(ids.flip(0), train=True).flip(0), rows)
    for begin, end in [(0, 1), (13, 50), (64, 70)]:
        assert torch.equal(
            Table(70, options=init, name="a", columns=range(begin, end)).lookup(ids),
            rows[:, begin:end],
        )
    assert not torch.equal(Table(70, options=init, name="b").lookup(ids), rows)
    assert not torch.equal(
        Table(70, options=TableOptions(seed=1, missing="init"), name="a").lookup(ids),
        rows,
    )
    # The values are fixed, so that new rows are the same in every version.
    pinned = Table(4, options=init, name="table").lookup(torch.tensor([42]))[0] * 2**10
    torch.testing.assert_close(pinned, torch.tensor(PINNED_ROW_42), rtol=1e-6, atol=0)


PINNED_ROW_42 = [
    -0.09452497959136963,
    -0.42271721363067627,
    0.8934996128082275,
    0.6135528087615967,
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "dim",
    [
        1,
        pytest.param(16, marks=pytest.mark.slow),
        33,
        pytest.param(64, marks=pytest.mark.slow),
        pytest.param(200, marks=pytest.mark.slow),
    ],
)
def test_bits_do_not_depend_on_the_number_of_threads(
    optimizer: Optimizer, dim: int
) -> None:
    outs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(5)
        table = Table(dim, optimizer=optimizer)
        for _ in range(3):
            ids = torch.randint(-3000, 3000, (40_000,), generator=generator) // 7
            table.lookup(ids, train=True)
            table.update(ids, torch.randn(len(ids), dim, generator=generator))
        outs.append(table.lookup(table.ids()))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def _digest() -> list[str]:
    torch.manual_seed(0)
    digest = hashlib.sha256()
    for optimizer in (
        SGD(0.1, weight_decay=0.1),
        Adagrad(0.1, weight_decay=0.1),
        RowWiseAdagrad(0.1, weight_decay=0.1),
    ):
        tables = [Table(d, optimizer=optimizer, name=str(d)) for d in (8, 37, 64, 130)]
        tables.append(
            Table(
                20, optimizer=optimizer, options=TableOptions(NormalInit(0.0, 1.0, 2.0))
            )
        )
        for pooling in ("sum", "mean"):
            group = PooledGroup(tables, range(5), pooling)
            for _ in range(3):
                lengths = torch.randint(0, 5, (5 * 200,))
                offsets = torch.cat(
                    [torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]
                )
                ids = torch.randint(-500, 500, (int(offsets[-1]),))
                weights = torch.rand(len(ids), requires_grad=True)
                out = group(ids, offsets, weights, train=True)
                out.backward(torch.randn_like(out))
                assert weights.grad is not None
                for tensor in (
                    out.detach(),
                    weights.grad,
                    *(t.lookup(t.ids()) for t in tables),
                ):
                    digest.update(tensor.numpy().tobytes())
    return [digest.hexdigest()]


def test_bits_do_not_depend_on_the_instruction_set() -> None:
    digests = by_instruction_set(_digest)
    assert len({digest for [digest] in digests.values()}) == 1, digests


def test_an_unknown_instruction_set_is_an_error() -> None:
    code = "from torchrec_recstore.store import Table; Table(4)"
    run = run_forked_command(["-c", code], {**os.environ, "RECSTORE_ISA": "mmx"})
    assert (
        "RECSTORE_ISA must be baseline, neon, avx2 or avx512, got 'mmx'" in run.stderr
    )


def test_stats_count_distinct_ids() -> None:
    table = Table(4)
    hundred = torch.arange(100).repeat(3)
    table.lookup(hundred, train=True)
    table.lookup(hundred, train=True)
    table.lookup(torch.arange(500))
    table.update(torch.tensor([1, 1, 200]), torch.ones(3, 4))
    table.insert(torch.tensor([200, 201]), torch.ones(2, 4))
    stats = table.stats()
    assert stats == TableStats(
        rows=102,
        bytes=stats.bytes,
        lookups=200,
        hits=100,
        misses=100,
        inserts=102,
        updates=2,
        steps=2,
    )


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        ({"dim": 0}, ValueError, "dim"),
        ({"dim": 4.0}, TypeError, "dim"),
        ({"dim": 2**24 + 1}, ValueError, r"dim must be at most 16777216, got 16777217"),
        ({"dim": 10**20}, ValueError, r"dim must be at most 16777216, got 1"),
        ({"dim": 4, "dtype": torch.float64}, ValueError, "dtype"),
        ({"dim": 4, "optimizer": "sgd"}, TypeError, "optimizer"),
        ({"dim": 4, "options": {}}, TypeError, "options"),
        ({"dim": 4, "name": 3}, TypeError, "name"),
        ({"dim": 4, "columns": (0, 4)}, TypeError, "columns"),
        ({"dim": 4, "columns": range(2, 5)}, ValueError, "columns"),
        ({"dim": 4, "columns": range(0)}, ValueError, "columns"),
        ({"dim": 4, "columns": range(0, 4, 2)}, ValueError, "columns"),
    ],
)
def test_bad_arguments_of_a_table(
    arguments: dict[str, object], error: type[Exception], names: str
) -> None:
    with pytest.raises(error, match=names):
        Table(**arguments)  # type: ignore[arg-type]


ROWS = torch.ones(2, 4)
IDS = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("call", "error", "names"),
    [
        (lambda t: t.lookup([1, 2]), TypeError, "ids"),
        (
            lambda t: t.lookup(IDS.int()),
            TypeError,
            "ids must be an int64 tensor, got torch.int32",
        ),
        (lambda t: t.lookup(IDS.float()), TypeError, "ids"),
        (lambda t: t.lookup(IDS[None]), ValueError, "ids"),
        (lambda t: t.lookup(IDS.to("meta")), ValueError, "ids"),
        (lambda t: t.contains(IDS.int()), TypeError, "ids"),
        (lambda t: t.remove(IDS[0]), ValueError, "ids"),
        (lambda t: t.update(IDS, ROWS.double()), TypeError, "grads"),
        (lambda t: t.update(IDS, ROWS[:1]), ValueError, "grads"),
        (
            lambda t: t.update(IDS, ROWS[:, :3]),
            ValueError,
            r"grads must have the shape \(2, 4\), got \(2, 3\)",
        ),
        (lambda t: t.update(IDS, None), TypeError, "grads"),
        (lambda t: t.insert(IDS, ROWS.half()), TypeError, "weights"),
        (lambda t: t.insert(IDS, ROWS.flatten()), ValueError, "weights"),
        (lambda t: t.insert(IDS.int(), ROWS), TypeError, "ids"),
    ],
)
def test_bad_arguments_of_a_call_change_nothing(
    call: object, error: type[Exception], names: str
) -> None:
    table = Table(4)
    table.insert(torch.tensor([1]), ROWS[:1])
    before = table.stats()
    with pytest.raises(error, match=names):
        call(table)  # type: ignore[operator]
    assert table.stats() == before


def test_any_strides() -> None:
    table = Table(4)
    ids = torch.arange(20)[::3]
    weights = torch.randn(4, 14).t()[::2]
    table.insert(ids, weights)
    assert torch.equal(table.lookup(ids), weights)
    table.lookup(torch.tensor(5).expand(7), train=True)
    assert table.contains(torch.tensor([5])).all()


def test_empty_calls() -> None:
    table = Table(4)
    none = torch.empty(0, dtype=torch.int64)
    assert table.lookup(none, train=True).shape == (0, 4)
    table.update(none, torch.empty(0, 4))
    table.insert(none, torch.empty(0, 4))
    assert table.remove(none) == 0
    assert table.contains(none).shape == (0,)
    assert table.ids().shape == (0,)
    assert len(table) == 0


def test_closed_table() -> None:
    with Table(4, name="gone") as table:
        table.lookup(IDS, train=True)
    for call in (
        lambda: table.lookup(IDS),
        lambda: table.update(IDS, ROWS),
        table.ids,
        table.stats,
    ):
        with pytest.raises(ValueError, match="gone"):
            call()
    table.close()


def test_calls_from_several_threads() -> None:
    table = Table(4, optimizer=SGD(1.0))
    table.insert(torch.arange(1000), torch.zeros(1000, 4))

    def work() -> None:
        for _ in range(50):
            table.update(torch.arange(1000), torch.full((1000, 4), -1.0))
            table.lookup(torch.arange(500, 1500), train=True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(table.lookup(torch.arange(1000)), torch.full((1000, 4), 200.0))
    assert len(table) == 1500


_OUT_OF_MEMORY = """
import dataclasses, resource, torch
from torchrec_recstore.store import Table
table = Table(1024, name="big")
table.lookup(torch.arange(1000), train=True)
before, rows = table.stats(), table.lookup(torch.arange(1000))
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, resource.RLIM_INFINITY))
try:
    for first in range(1000, 2**20, 50000):
        before = table.stats()
        table.lookup(torch.arange(first, first + 50000), train=True)
except MemoryError as error:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    # Only the capacity of the index may have grown.
    assert dataclasses.replace(table.stats(), bytes=0) == dataclasses.replace(before, bytes=0)
    assert torch.equal(table.lookup(torch.arange(1000)), rows)
    print(error)
"""


def test_out_of_memory_is_an_error_and_changes_nothing() -> None:
    run = run_forked_command(["-c", _OUT_OF_MEMORY])
    assert run.returncode == 0, run.stderr
    assert "table 'big': out of memory" in run.stdout


def test_an_output_that_no_machine_can_hold_is_an_error() -> None:
    with pytest.raises(MemoryError, match="wide"):
        Table(2**24, name="wide").lookup(
            torch.zeros(1, dtype=torch.int64).expand(2**22)
        )


def test_a_table_is_not_copied_by_accident() -> None:
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(Table(4))


@pytest.mark.slow
def test_memory_grows_where_mremap_moves_one_mapping_at_a_time(tmp_path: Path) -> None:
    shim = tmp_path / "shim.so"
    source = Path(__file__).with_name("single_mapping_mremap.c")
    subprocess.run(
        [
            "g++",
            "-x",
            "c",
            "-shared",
            "-fPIC",
            "-O1",
            str(source),
            "-o",
            str(shim),
            "-ldl",
        ],
        check=True,
    )
    code = (
        "import torch; from torchrec_recstore.store import Table; table ="
        " Table(64)\nfirst = table.lookup(torch.arange(1000), train=True)\nfor i in"
        " range(1, 150): table.lookup(torch.arange(1000) + 1000 * i,"
        " train=True)\nassert torch.equal(table.lookup(torch.arange(1000)), first) and"
        " len(table) == 150_000\n"
    )
    environment = {**os.environ, "LD_PRELOAD": str(shim)}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_store_imports_without_torchrec() -> None:
    code = (
        "import sys, torchrec_recstore.kernels\n"
        "assert not any(m.startswith(('torchrec.', 'fbgemm')) for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
