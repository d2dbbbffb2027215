"""Programs whose rows are on the device, compared with the same programs on the CPU.

The tests of the programs are in test_device_rows.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from tests.device import streams
from torchrec_recstore import LFU, LRU, Expiry, MinFrequency, SSDStore, TableOptions
from torchrec_recstore.kernels import PooledGroup, SequenceGroup
from torchrec_recstore.kernels.device_copies import CopyTarget
from torchrec_recstore.optim import SGD, Adam, Optimizer, RowWiseAdagrad
from torchrec_recstore.store import Table, TableStats

Found = dict[str, Any]
Group = PooledGroup | SequenceGroup
BAGS = 6
IDS = 120
DIMS = (5, 16, 5)
FEATURES = (0, 1, 2, 0)
FEW_SLOTS = (24, 12, 14)
"""Device slots for most batches, but not for all."""
MANY_SLOTS = (90, 60, 60)
"""Device slots for each batch and the two before it."""


@dataclass(frozen=True)
class Program:
    """Training steps, and what the tables are used for between them."""

    options: Sequence[TableOptions] = (TableOptions(),)
    """The options of the tables; those of table 1 are ``options[1 % n]``."""
    optimizers: Sequence[Optimizer] = (RowWiseAdagrad(lr=0.1),)
    dtypes: Sequence[torch.dtype] = (torch.float32,)
    stochastic: bool = False
    pools: bool = True
    pooling: Literal["sum", "mean"] = "sum"
    weights: Literal["none", "constant", "trained"] = "none"
    accumulation_steps: int = 1
    slots: Sequence[int] = FEW_SLOTS
    steps: int = 60
    evaluates: bool = False
    """Whether there is an evaluation after each step, and not after every seventh."""
    nonfinite_every: int = 0
    """In which steps gradients are NaN or infinite; 0: in none."""
    fails: bool = False
    """Whether a copy fails in each call of the group."""
    output: torch.dtype = torch.float32
    on_device: tuple[float, float] = (0.3, 0.99)
    """The least and the largest share of training lookups that are done on the device."""


@dataclass
class Batch:
    """A batch: ``offsets`` are those of bags, and ``counts`` those of tables."""

    ids: Tensor
    offsets: Tensor
    counts: list[int]
    weights: Tensor | None


@dataclass
class Step:
    """A forward whose backward has not run."""

    out: Tensor
    grad: Tensor
    weights: Tensor | None
    is_on_device: bool


def bits(tensor: Tensor) -> Tensor:
    """Returns a tensor on the host, and the bits of its numbers if it has floats."""
    on_host = tensor.detach().to("cpu").contiguous()
    return on_host.view(torch.uint8) if on_host.is_floating_point() else on_host


@dataclass
class Run:
    """A run of a program on one device."""

    program: Program
    device: torch.device
    random: torch.Generator = field(
        default_factory=lambda: torch.Generator().manual_seed(5)
    )
    found: list[Any] = field(default_factory=list)
    pending: list[Step] = field(default_factory=list)
    failures: int = 0
    lookups: int = 0

    def __post_init__(self) -> None:
        self.group = self._make_group()
        self.to: CopyTarget | None = None
        if self.device.type != "cpu":
            self.group.put_on_device(self.device, self.program.slots)
            self.to = CopyTarget(self.device, self.program.output)

    def _make_group(self) -> Group:
        program = self.program
        tables = []
        for number, dim in enumerate(DIMS):
            options = program.options[number % len(program.options)]
            if options.cold_store is not None:
                store = SSDStore(tempfile.mkdtemp())
                options = replace(options, cold_store=store)
            tables.append(
                Table(
                    dim,
                    dtype=program.dtypes[number % len(program.dtypes)],
                    optimizer=program.optimizers[number % len(program.optimizers)],
                    options=options,
                    name=f"t{number}",
                    stochastic_rounding=program.stochastic,
                )
            )
        steps = program.accumulation_steps
        if not program.pools:
            return SequenceGroup(tables, accumulation_steps=steps)
        return PooledGroup(tables, FEATURES, program.pooling, accumulation_steps=steps)

    def batch(self) -> Batch:
        """Returns the next batch."""
        random = self.random
        lengths = torch.randint(0, 4, (len(FEATURES) * BAGS,), generator=random)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        count = int(offsets[-1])
        ids = (torch.rand(count, generator=random) ** 3 * IDS).long()
        weights = torch.rand(count, generator=random)
        ends = [count // 2, count // 2 + count // 5, count]
        counts = [ends[0], ends[1] - ends[0], ends[2] - ends[1]]
        if self.program.weights == "none":
            return Batch(ids, offsets, counts, None)
        weights.requires_grad_(self.program.weights == "trained")
        return Batch(ids, offsets, counts, weights)

    def look_up(self, batch: Batch, *, train: bool) -> Tensor:
        """Looks up a batch in the group."""
        group = self.group
        with self.failing():
            if isinstance(group, SequenceGroup):
                out = group.forward(batch.ids, batch.counts, train=train, to=self.to)
            else:
                out = group.forward(
                    batch.ids, batch.offsets, batch.weights, train=train, to=self.to
                )
        return out.to(self.program.output)

    @property
    def passes(self) -> int:
        """The number of training lookups on the device so far."""
        on_device = self.group.device_rows
        return 0 if on_device is None else on_device.passes

    @contextmanager
    def failing(self, is_possible: bool = True) -> Iterator[None]:
        """Lets a copy of the program's calls fail, another one in each call.

        The only copy of a backward on the host is that of the gradient, without which
        nothing can be done.
        """
        if not self.program.fails or not is_possible:
            yield
            return
        with streams.failing(self.lookups % 19) as failure:
            yield
        self.failures += failure.has_happened

    def train(self) -> Found:
        """Runs the program, and returns everything that can be seen of it.

        Up to two forwards are pending.
        """
        for step in range(self.program.steps):
            batch = self.batch()
            self.lookups += 1
            before = self.passes
            out = self.look_up(batch, train=True)
            self.found.append(bits(out))
            grad = self.gradient(out, step)
            is_on_device = self.passes > before
            self.pending.append(Step(out, grad, batch.weights, is_on_device))
            if step % 5 != 1:
                self.run_backwards()
            self.use_tables(step)
        if self.group.device_rows is not None:
            least, most = self.program.on_device
            share = self.passes / self.program.steps
            assert least <= share <= most, share
            assert not self.program.fails or self.failures > self.program.steps / 10
        rows = [part(table) for table in self.group.tables]
        return {"found": self.found, "rows": rows}

    def gradient(self, out: Tensor, step: int) -> Tensor:
        """Returns the gradient of an output."""
        grad = torch.randn(out.shape, generator=self.random)
        every = self.program.nonfinite_every
        if every and step % every == 0 and grad.numel():
            grad.view(-1)[step % grad.numel()] = torch.inf if step % 2 else torch.nan
        return grad.to(out.device, out.dtype)

    def run_backwards(self) -> None:
        """Runs the backwards that are pending, in a random order."""
        order = torch.randperm(len(self.pending), generator=self.random)
        for place in order.tolist():
            step = self.pending[place]
            try:
                with self.failing(step.is_on_device):
                    torch.autograd.backward(step.out, step.grad)
            except ValueError as error:
                self.found.append(str(error))
            if step.weights is not None and step.weights.grad is not None:
                self.found.append(bits(step.weights.grad))
        self.pending.clear()

    def use_tables(self, step: int) -> None:
        """Uses the tables between two steps."""
        ids = torch.randint(0, IDS, (4,), generator=self.random)
        table = self.group.tables[step % len(DIMS)]
        dim = DIMS[step % len(DIMS)]
        if step % 7 == 2:
            table.insert(ids, torch.randn(4, dim, generator=self.random))
        if step % 7 == 3:
            self.found.append(bits(table.lookup(ids)))
        if step % 7 == 4:
            self.found.append(table.remove(ids))
        if step % 7 == 5:
            table.update(ids, torch.randn(4, dim, generator=self.random))
        if step % 7 == 6 or self.program.evaluates:
            self.evaluate()
        if step % 11 == 3:
            self.found.append(part(table))

    def evaluate(self) -> None:
        """Looks up a batch for evaluation."""
        batch = self.batch()
        differentiates = batch.weights is not None and batch.weights.requires_grad
        with nullcontext() if differentiates else torch.no_grad():
            out = self.look_up(batch, train=False)
        self.found.append(bits(out))
        if differentiates:
            assert batch.weights is not None
            grad = torch.ones(out.shape).to(out.device, out.dtype)
            torch.autograd.backward(out, grad)
            assert batch.weights.grad is not None
            self.found.append(bits(batch.weights.grad))


def part(table: Table) -> list[Any]:
    """Everything of a table."""
    ids = table.ids()
    rows = table.read_rows(ids)
    return [
        ids,
        *(bits(rows[name]) for name in sorted(rows)),
        as_on_cpu(table.stats()),
    ]


def as_on_cpu(stats: TableStats) -> TableStats:
    """The statistics without those of the device, and without its memory."""
    return replace(
        stats,
        bytes=0,
        device_rows=0,
        device_hits=0,
        device_arrivals=0,
        device_written_back=0,
    )


LIMITS = TableOptions(max_rows=70, eviction=LRU(), expiry=Expiry(steps=20))
ALL = (1.0, 1.0)
NONE = (0.0, 0.0)
RAISES = TableOptions(nonfinite="raise")
SKIPS = TableOptions(nonfinite="skip")
COLD = TableOptions(
    max_rows=50, cold_store=SSDStore("made later"), expiry=Expiry(steps=20)
)
READS_INITIAL = TableOptions(missing="init", max_rows=50, cold_store=COLD.cold_store)
PROGRAMS: dict[str, Program] = {
    "unlimited": Program(),
    "bounded": Program(options=[LIMITS], optimizers=[Adam(lr=0.1)], pooling="mean"),
    "weighted": Program(
        options=[TableOptions(max_rows=70, eviction=LFU(half_life_steps=10))],
        optimizers=[SGD(lr=0.1, momentum=0.9)],
        weights="constant",
    ),
    "a copy of each call fails": Program(
        options=[LIMITS], slots=MANY_SLOTS, fails=True, on_device=(0.1, 0.9)
    ),
    "accumulated": Program(accumulation_steps=3, on_device=NONE),
    "sequences": Program(pools=False, optimizers=[Adam(lr=0.1)]),
    "sequences, a copy of each call fails": Program(
        options=[LIMITS],
        pools=False,
        slots=MANY_SLOTS,
        fails=True,
        on_device=(0.1, 0.9),
    ),
    "accumulated sequences": Program(pools=False, accumulation_steps=2, on_device=NONE),
    "admission": Program(
        options=[TableOptions(admission=MinFrequency(3))],
        weights="trained",
        slots=MANY_SLOTS,
        on_device=ALL,
    ),
    "evaluation": Program(
        options=[LIMITS, TableOptions(missing="init")],
        evaluates=True,
        slots=MANY_SLOTS,
        on_device=ALL,
    ),
    "evaluation of sequences": Program(
        options=[LIMITS, TableOptions(missing="init")], pools=False, evaluates=True
    ),
    "trained weights": Program(
        options=[LIMITS],
        optimizers=[Adam(lr=0.1, max_gradient=0.5)],
        pooling="mean",
        weights="trained",
    ),
    "nonfinite": Program(
        options=[TableOptions(), SKIPS, RAISES],
        weights="trained",
        nonfinite_every=2,
        slots=MANY_SLOTS,
        on_device=ALL,
    ),
    "nonfinite sequences": Program(
        options=[SKIPS, RAISES, TableOptions()], pools=False, nonfinite_every=2
    ),
    "cold": Program(options=[COLD, TableOptions(), READS_INITIAL], evaluates=True),
    "cold sequences": Program(
        options=[COLD, TableOptions(), READS_INITIAL], evaluates=True, pools=False
    ),
    "16 bits": Program(
        dtypes=[torch.bfloat16, torch.float16],
        stochastic=True,
        output=torch.bfloat16,
        slots=MANY_SLOTS,
        on_device=ALL,
    ),
}


def scenario(program: Program) -> Callable[[torch.device], Found]:
    """Returns a program as a function of the device."""
    return lambda device: Run(program, device).train()


SCENARIOS: dict[str, Callable[[torch.device], Found]] = {
    name: scenario(program) for name, program in PROGRAMS.items()
}
