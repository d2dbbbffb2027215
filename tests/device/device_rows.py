"""Programs whose rows are on the device, compared with the same programs on the CPU.

The tests of the programs are in test_device_rows.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from tests.device import streams
from torchrec_recstore import LFU, LRU, Expiry, MinFrequency, SSDStore, TableOptions
from torchrec_recstore.kernels import PooledGroup, SequenceGroup
from torchrec_recstore.kernels.device_copies import CopyTarget
from torchrec_recstore.optim import (
    LAMB,
    LARSSGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Optimizer,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RMSprop,
    RowWiseAdagrad,
)
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
    """Whether copies fail: one of the first copies of each call."""
    delays: bool = False
    """Whether copies run at random moments, and not as late as possible."""
    graph_every: int = 0
    """In which steps the forward runs in a graph; 0: in none."""
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

    number: int
    out: Tensor
    grad: Tensor
    weights: Tensor | None


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
    lost_calls: set[str] = field(default_factory=set)
    """The calls that have raised an error after they had begun, because a copy failed. A
    run on the CPU gets those of the device, and drops their results.
    """
    failures: int = 0
    calls: int = 0

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
        if isinstance(group, SequenceGroup):
            out = group.forward(batch.ids, batch.counts, train=train, to=self.to)
        else:
            out = group.forward(
                batch.ids, batch.offsets, batch.weights, train=train, to=self.to
            )
        return out.to(self.program.output)

    def look_up_in_graph(self, batch: Batch) -> Tensor:
        """Looks up a batch for training by the operator that a graph has for it."""
        pools = self.program.pools
        out: Tensor = torch.ops.recstore_ops.graph_lookup(
            self.group._graph_handle,
            self.group._anchor,
            batch.ids,
            batch.offsets if pools else None,
            [] if pools else batch.counts,
            batch.weights if pools else None,
        )[0]
        return out

    @property
    def passes(self) -> int:
        """The number of training lookups on the device so far."""
        on_device = self.group.device_rows
        return 0 if on_device is None else on_device.passes

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        """Calls a function, and lets one of its copies fail if the program says so.

        A call that has raised MemoryError before anything has changed is repeated. If a
        step has been counted already, or if it is a backward, it is lost.
        """
        if name in self.lost_calls:
            if not name.startswith("backward"):
                function()
            return None
        if not self.program.fails or self.to is None:
            return function()
        self.calls += 1
        steps = [table.steps for table in self.group.tables]
        try:
            with streams.failing(self.calls % 5) as failure:
                return function()
        except MemoryError:
            is_same_step = steps == [table.steps for table in self.group.tables]
            if is_same_step and not name.startswith("backward"):
                return function()
            self.lost_calls.add(name)
            return None
        finally:
            self.failures += failure.has_happened

    def train(self) -> Found:
        """Runs the program, and returns everything that can be seen of it.

        Up to two forwards are pending.
        """
        for step in range(self.program.steps):
            self.forward(step)
            if step % 5 != 1:
                self.run_backwards()
            self.use_tables(step)
        if self.to is not None:
            least, most = self.program.on_device
            share = self.passes / self.program.steps
            assert least <= share <= most, share
            assert not self.program.fails or self.failures > self.program.steps / 4
        rows = [part(table) for table in self.group.tables]
        return {"found": self.found, "rows": rows}

    def forward(self, step: int) -> None:
        """Runs a forward, whose backward is pending then."""
        every = self.program.graph_every
        batch = self.batch()
        look_up: Callable[[Batch], Tensor] = partial(self.look_up, train=True)
        if every and step % every == 0:
            look_up = self.look_up_in_graph
        out = self.call(f"forward {step}", partial(look_up, batch))
        if out is None:
            return
        self.found.append(bits(out))
        self.pending.append(Step(step, out, self.gradient(out, step), batch.weights))

    def gradient(self, out: Tensor, step: int) -> Tensor:
        """Returns the gradient of an output."""
        grad = torch.randn(out.shape, generator=self.random)
        every = self.program.nonfinite_every
        if every and step % every == 0 and grad.numel():
            grad.view(-1)[step % grad.numel()] = torch.inf if step % 2 else torch.nan
        return grad.to(out.device, out.dtype)

    def run_backwards(self) -> None:
        """Runs the backwards that are pending, in a random order."""
        failures = self.failures
        random = torch.Generator().manual_seed(len(self.found))
        order = torch.randperm(len(self.pending), generator=random)
        for place in order.tolist():
            step = self.pending[place]
            backward = partial(torch.autograd.backward, step.out, step.grad)
            try:
                self.call(f"backward {step.number}", backward)
            except ValueError as error:
                self.found.append(str(error))
            if step.weights is not None and step.weights.grad is not None:
                self.found.append(bits(step.weights.grad))
        self.pending.clear()
        if self.failures > failures:
            self._let_go()

    def _let_go(self) -> None:
        """Waits until autograd's thread for the device has let go of an error.

        The frames of the error keep a pass pending, whose rows cannot be evicted. The
        thread does so a moment after the backward has raised the error, and before it
        runs another one.
        """
        tensor = torch.zeros(1, device=self.device, requires_grad=True)
        tensor.to("cpu").backward()

    def use_tables(self, step: int) -> None:
        """Uses the tables between two steps."""
        ids = torch.randint(0, IDS, (4,), generator=self.random)
        table = self.group.tables[step % len(DIMS)]
        dim = DIMS[step % len(DIMS)]
        rows = torch.randn(4, dim, generator=self.random)
        if step % 7 == 2:
            self.call("insert", lambda: table.insert(ids, rows))
        if step % 7 == 3:
            self.found.append(bits(self.call("lookup", lambda: table.lookup(ids))))
        if step % 7 == 4:
            self.found.append(self.call("remove", lambda: table.remove(ids)))
        if step % 7 == 5:
            self.call("update", lambda: table.update(ids, rows))
        if step % 7 == 6 or self.program.evaluates:
            self.evaluate()
        if step % 11 == 3:
            self.found.append(self.call("part", lambda: part(table)))

    def evaluate(self) -> None:
        """Looks up a batch for evaluation."""
        batch = self.batch()
        differentiates = batch.weights is not None and batch.weights.requires_grad
        with nullcontext() if differentiates else torch.no_grad():
            out = self.call("evaluation", lambda: self.look_up(batch, train=False))
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
SEED = 54
ALL = (1.0, 1.0)
NONE = (0.0, 0.0)
RAISES = TableOptions(nonfinite="raise")
SKIPS = TableOptions(nonfinite="skip")
COLD = TableOptions(
    max_rows=50, cold_store=SSDStore("made later"), expiry=Expiry(steps=20)
)
READS_INITIAL = TableOptions(missing="init", max_rows=50, cold_store=COLD.cold_store)
EVERYTHING = Program(
    options=[
        replace(COLD, admission=MinFrequency(2)),
        TableOptions(
            max_rows=60,
            eviction=LFU(half_life_steps=50),
            expiry=Expiry(steps=30),
            admission=MinFrequency(2),
        ),
        replace(LIMITS, nonfinite="skip"),
    ],
    optimizers=[Adam(lr=0.01), RowWiseAdagrad(lr=0.1)],
    weights="trained",
    nonfinite_every=50,
    steps=1000,
    graph_every=40,
    fails=True,
    delays=True,
    on_device=(0.1, 0.9),
)
"""All that the other programs have, together."""
PROGRAMS: dict[str, Program] = {
    "everything": EVERYTHING,
    "everything of sequences": replace(
        EVERYTHING, pools=False, weights="none", steps=300
    ),
    "unlimited": Program(),
    "bounded": Program(options=[LIMITS], optimizers=[Adam(lr=0.1)], pooling="mean"),
    "weighted": Program(
        options=[TableOptions(max_rows=70, eviction=LFU(half_life_steps=10))],
        optimizers=[SGD(lr=0.1, momentum=0.9)],
        weights="constant",
    ),
    "failing copies": Program(options=[LIMITS], fails=True, on_device=(0.1, 0.9)),
    "at random moments": Program(options=[LIMITS], delays=True, weights="trained"),
    "sequences at random moments": Program(options=[LIMITS], delays=True, pools=False),
    "in a graph": Program(
        options=[LIMITS],
        weights="trained",
        graph_every=3,
        slots=MANY_SLOTS,
        on_device=(0.5, 0.7),
    ),
    "sequences in a graph": Program(pools=False, graph_every=3),
    "accumulated": Program(accumulation_steps=3, on_device=NONE),
    "sequences": Program(pools=False, optimizers=[Adam(lr=0.1)]),
    "sequences, failing copies": Program(
        options=[LIMITS],
        pools=False,
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
    "cold, failing copies": Program(
        options=[COLD, TableOptions(), READS_INITIAL],
        fails=True,
        delays=True,
        on_device=(0.1, 0.9),
    ),
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


OPTIMIZERS: list[Optimizer] = [
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    Adagrad(lr=0.1, max_gradient_norm=0.5),
    RowWiseAdagrad(lr=0.1, max_norm=0.7, weight_decay=0.01),
    Adam(lr=0.1, max_gradient=0.4),
    AdamW(lr=0.1, weight_decay=0.1),
    PartialRowWiseAdam(lr=0.1),
    LAMB(lr=0.1),
    PartialRowWiseLAMB(lr=0.1),
    LARSSGD(lr=0.1),
    RMSprop(lr=0.1),
    Adadelta(lr=0.1),
    Ftrl(lr=0.1),
]
for number in range(0, len(OPTIMIZERS), 2):
    pair = OPTIMIZERS[number : number + 2]
    PROGRAMS[" and ".join(type(optimizer).__name__ for optimizer in pair)] = Program(
        options=[LIMITS],
        optimizers=pair,
        dtypes=[torch.float32, torch.bfloat16, torch.float16],
        stochastic=number % 4 == 0,
        pools=number % 6 != 0,
        slots=MANY_SLOTS,
        steps=20,
        on_device=ALL,
    )


def run(program: Program, device: torch.device) -> tuple[Found, Found]:
    """Returns the results of a program on the CPU and on the device."""
    random_moments = streams.delays(SEED) if program.delays else nullcontext()
    on_device = Run(program, device)
    with random_moments:
        result = on_device.train()
    on_cpu = Run(program, torch.device("cpu"), lost_calls=on_device.lost_calls)
    return on_cpu.train(), result
