"""Runs the kernels of rows in the memory of a GPU, on a machine that has one for a few
minutes, with torch alone::

    python -m tests.cuda.lease              # on the machine with the GPU
    python -m tests.cuda.lease --dry-run    # without one: on the host

It prints

- the versions, the bandwidths, and the time of each kernel
- whether the results of each kernel have the bits of the reference kernels, which run
  on the host, and the registers of every kernel
- whether 200 training steps of groups whose rows are on the device, with eviction,
  expiry, admission, cold stores and prefetches, and with sleeps at random moments on
  all streams, have the bits of the host
- the table of ``benchmarks/cuda.py``: the dense part alone, rows on the host, and 1, 10
  and 100 % of the rows on the device

A line that begins with ``DIFFERENT`` is a failure, and the command then exits with 1.

The checkout needs its native library, ``torchrec_recstore/_C.abi3.so``: ``make build``
makes it, and a library that another machine has built serves every torch from 2.11 on.
Neither TorchRec nor FBGEMM is imported.

With ``--dry-run``, the host takes the place of the device. Triton's interpreter runs
the kernels, so that only the registers are missing. The training steps run on the
simulated device of ``tests/device``.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.device import device_rows, simulated, streams, transfers
from tests.kernels.device_cases import OPTIMIZERS, ROW_DTYPES, SPECIAL
from tests.kernels.device_work import Arena, Case, Tables, assert_same_bits, settings_of
from torchrec_recstore.kernels import device_copies

_MOST_SECONDS = 20
"""The comparisons of a dry run stop after this time."""
_BYTES = 1 << 28
_REPEATS = 5
_SEED = 54
_MOST_CYCLES = 1_000_000
"""The longest sleep of a stream, less than a millisecond."""
_BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "cuda.py"
_EVERYTHING = replace(
    device_rows.EVERYTHING,
    steps=200,
    fails=False,
    delays=False,
    graph_every=0,
    on_device=(0.1, 1.0),
)
_PROGRAMS = {
    "bags": _EVERYTHING,
    "sequences": replace(_EVERYTHING, pools=False, weights="none"),
    "bags that all fit": replace(_EVERYTHING, slots=device_rows.MANY_SLOTS),
    "16 bits": device_rows.PROGRAMS["16 bits"],
}
_LARGE = Case(
    [OPTIMIZERS["row_wise_adagrad"]],
    columns=64,
    bags=2048,
    rows=1500,
    longest_bag=6,
    hot_share=0.2,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="run on the host, with Triton's interpreter",
    )
    dry_run = parser.parse_args(arguments).dry_run
    if not dry_run and not torch.cuda.is_available():
        print(
            "error: no CUDA device (--dry-run tries this command without one)",
            file=sys.stderr,
        )
        return 1
    if dry_run:
        # Triton reads it when it is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton
    except ImportError:
        print("error: Triton is not installed: pip install triton", file=sys.stderr)
        return 1
    device = torch.device("cpu" if dry_run else "cuda")
    name = "none: a dry run" if dry_run else torch.cuda.get_device_name()
    print(f"device: {name}")
    print(f"torch {torch.__version__}, Triton {triton.__version__}")
    if not dry_run:
        _print_bandwidths(device)
    _print_times(device)
    different = _compare_all(device, dry_run)
    print(f"kernels: {different} cases are different from the reference")
    different += _compare_steps(device, dry_run)
    return 1 if different or _print_steps(dry_run) else 0


def _print_bandwidths(device: torch.device) -> None:
    pinned = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    first = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    second = torch.empty_like(first)
    copies: dict[str, Callable[[], Tensor]] = {
        "up": lambda: first.copy_(pinned, non_blocking=True),
        "down": lambda: pinned.copy_(first, non_blocking=True),
        "on the device": lambda: second.copy_(first),
    }
    for name, copy in copies.items():
        seconds = _seconds(copy, device)
        print(f"bandwidth {name}: {_BYTES / seconds / 1e9:.1f} GB/s")


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Returns the shortest time of a call on the device."""
    if device.type == "cpu":
        begin_s = time.perf_counter()
        work()
        return time.perf_counter() - begin_s
    work()
    times = []
    for _ in range(_REPEATS):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times)


class _OnDevice:
    """Kernels of a device that take and change tensors of the host."""

    def __init__(self, kernels: Any, device: torch.device) -> None:
        self._kernels = kernels
        self._device = device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            copies = [_moved(argument, self._device) for argument in arguments]
            result = self._called(name, copies)
            for argument, copy in zip(arguments, copies, strict=True):
                if isinstance(argument, Tensor):
                    argument.copy_(copy)
            if isinstance(result, tuple):
                return tuple(tensor.cpu() for tensor in result)
            return result

        return call

    def _called(self, name: str, arguments: list[Any]) -> Any:
        """Calls a kernel on tensors of the device, and returns its result."""
        return getattr(self._kernels, name)(*arguments)


class _TimedKernels(_OnDevice):
    """Kernels whose calls are repeated and timed."""

    def __init__(self, kernels: Any, device: torch.device) -> None:
        super().__init__(kernels, device)
        self.seconds: dict[str, float] = {}

    def _called(self, name: str, arguments: list[Any]) -> Any:
        method = getattr(self._kernels, name)
        self.seconds[name] = _seconds(lambda: method(*arguments), self._device)
        return method(*arguments)


def _moved(argument: Any, device: torch.device) -> Any:
    return argument.to(device) if isinstance(argument, Tensor) else argument


def _print_times(device: torch.device) -> None:
    """Prints the time of each kernel of a step of 26 tables of dim 64."""
    from torchrec_recstore.kernels.device_kernels import TritonKernels

    is_small = device.type == "cpu"
    case = Case(
        [OPTIMIZERS["row_wise_adagrad"]] * (2 if is_small else 26),
        columns=64,
        bags=4 if is_small else 8192,
        rows=5 if is_small else 20_000,
        longest_bag=2,
        hot_share=0.05,
    )
    tables = Tables(case)
    timed = _TimedKernels(TritonKernels(), device)
    arena = Arena(tables, timed)  # type: ignore[arg-type]
    batch = tables.batch(0)
    arena.step(batch, settings=settings_of(tables))
    for name, seconds in timed.seconds.items():
        print(f"{name}: {seconds * 1e3:.3f} ms for {len(batch.ids)} ids of 64 columns")


def _cases(dry_run: bool) -> dict[str, Case]:
    cases = dict(SPECIAL)
    for name, optimizer in OPTIMIZERS.items():
        for columns in (3, 64, 192):
            for dtype in ROW_DTYPES:
                cases[f"{name}, {columns} columns, {dtype}"] = Case(
                    [optimizer],
                    columns=columns,
                    dtype=dtype,
                    stochastic=dtype is not torch.float32,
                    weighted=columns == 3,
                    pooling="mean" if columns == 64 else "sum",
                    bags=6 if dry_run else 60,
                )
    if not dry_run:
        cases["1024 columns"] = Case([OPTIMIZERS["lamb"]], columns=1024)
        cases["large"] = _LARGE
    return cases


def _compare_all(device: torch.device, dry_run: bool) -> int:
    """Compares the kernels of the device with the reference. Returns the number of
    cases that differ.
    """
    from torchrec_recstore.kernels.device_kernels import TritonKernels

    kernels: Any = TritonKernels()
    recorded: list[str] = []
    if not dry_run:
        kernels = _reporting(TritonKernels, recorded)
    begin = time.monotonic()
    different = 0
    compared = 0
    cases = _cases(dry_run)
    for name, case in cases.items():
        if dry_run and time.monotonic() - begin > _MOST_SECONDS:
            break
        compared += 1
        try:
            _compare(case, kernels, device)
        except AssertionError as error:
            different += 1
            print(f"DIFFERENT {name}: {error}")
    for line in recorded:
        print(line)
    print(f"kernels: {compared} of {len(cases)} cases are compared")
    return different


def _reporting(base: Any, recorded: list[str]) -> Any:
    """Returns kernels that note the registers of each kernel that is compiled."""

    class ReportingKernels(base):  # type: ignore[misc]
        def launch(
            self,
            kernel: Any,
            grid: tuple[int, ...],
            arguments: Sequence[Any],
            *,
            warps: int,
            compile_only: bool = False,
            **constants: int,
        ) -> None:
            if compile_only:
                super().launch(
                    kernel,
                    grid,
                    arguments,
                    warps=warps,
                    compile_only=True,
                    **constants,
                )
                return
            compiled = kernel[grid](
                *arguments, num_warps=warps, enable_fp_fusion=False, **constants
            )
            columns = constants.get("COLUMNS", "any")
            line = (
                f"{kernel.__name__}: {columns} columns,"
                f" {compiled.n_regs} registers, {compiled.n_spills} spills"
            )
            if line not in recorded:
                recorded.append(line)

    return ReportingKernels()


def _compare(case: Case, kernels: Any, device: torch.device) -> None:
    """Raises AssertionError unless two training steps have the bits of the
    reference.
    """
    from torchrec_recstore.kernels.reference_kernels import ReferenceKernels

    tables = Tables(case)
    reference = Arena(tables, ReferenceKernels())
    compared = Arena(tables, _OnDevice(kernels, device))  # type: ignore[arg-type]
    for seed in range(2):
        batch = tables.batch(seed)
        settings = settings_of(tables)
        wanted = reference.step(batch, settings=settings)
        actual = compared.step(batch, settings=settings)
        assert_same_bits(actual.out, wanted.out, None)
        if wanted.weight_grad is not None and actual.weight_grad is not None:
            assert_same_bits(actual.weight_grad, wanted.weight_grad, None)
        assert_same_bits(actual.arena, wanted.arena, tables.layout)
        assert torch.equal(compared.skipped, reference.skipped)
        assert torch.equal(compared.failed, reference.failed)


def _compare_steps(device: torch.device, dry_run: bool) -> int:
    """Compares groups whose rows are on the device with those of the host. Returns the
    number of programs that differ.
    """
    if dry_run:
        device = simulated.register()
    different = 0
    for name, on_host, on_device in _results(device):
        is_same = streams.same(on_host, on_device)
        different += not is_same
        print(f"{'equal' if is_same else 'DIFFERENT'}: {name}")
    return different


def _results(device: torch.device) -> Iterator[tuple[str, Any, Any]]:
    """Yields the name of each program, and its results on the host and on the device."""
    host = torch.device("cpu")
    for name, program in _PROGRAMS.items():
        with _random_moments(device):
            on_device = device_rows.Run(program, device).train()
        on_host = device_rows.Run(program, host).train()
        yield f"{program.steps} steps, {name}", on_host, on_device
    with _random_moments(device):
        on_device = transfers.prefetched(device, transfers.BOUNDED, None, steps=200)
    on_host = transfers.prefetched(host, transfers.BOUNDED, None, steps=200)
    for results in (on_device, on_host):
        del results["counted"]
    yield "200 steps, prefetched", on_host, on_device


@contextmanager
def _random_moments(device: torch.device) -> Iterator[None]:
    """Lets copies and kernels of all streams run at random moments."""
    if device.type != "cuda":
        with streams.delays(_SEED):
            yield
        return
    device_copies.streams_by_type["cuda"] = _SleepingStreams
    device_copies.streams_of.cache_clear()
    try:
        yield
    finally:
        del device_copies.streams_by_type["cuda"]
        device_copies.streams_of.cache_clear()


class _SleepingStreams(device_copies.DeviceStreams):
    """Streams that sleep before events, three times in ten."""

    def event(self) -> Any:
        """Returns an event."""
        every = (self.current(), self.up_stream, self.down_stream, self.side_stream)
        for stream in every:
            if random.random() < 0.3:
                with self.entered(stream):
                    torch.cuda._sleep(random.randrange(_MOST_CYCLES))
        return super().event()


def _print_steps(dry_run: bool) -> int:
    """Prints the time of steps with different parts of the rows on the device. Returns
    the exit status of the benchmark.
    """
    sides = "--sides=kernel,device_1,device_10,device_100"
    command = [sys.executable, str(_BENCHMARK), sides, "--zipf"]
    if dry_run:
        command += ["--device=cpu", "--tables=2", "--batch-size=64", "--dim=16"]
        command += ["--rows=1000", "--steps=2", "--rounds=2"]
    else:
        command += ["--rows=300000", "--rounds=6"]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
