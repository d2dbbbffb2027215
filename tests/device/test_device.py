"""Host tables below a device: results equal to the bit to those on the CPU, and as few
copies as the rows need.

The device is :mod:`tests.device.simulated`. It belongs to a process, so that each test
runs in a process of its own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.backend_registration

from tests.device import checks, row_kernels, scenarios, simulated, steps, streams
from tests.device.results import results_of
from tests.device.streams import same

pytestmark = pytest.mark.skipif(
    not hasattr(
        torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"
    ),
    reason="this torch has no devices in Python",
)

RECORDED = [
    "copies_of_a_step",
    "order_of_a_step",
    "rows_before_backward",
    *checks.CHECKS,
    *row_kernels.CHECKS,
]
SCENARIOS = {**steps.SCENARIOS, **checks.CHECKS, **row_kernels.CHECKS}
DELAYED = ["weighted", "sequences", "pipelines", "schedules", "bounds"]
"""The scenarios that also run with copies at random moments."""
SEED = 54
SHORT = [name for name in SCENARIOS if name not in ("long_bounds", *RECORDED)]


def run(names: list[str], path: str) -> None:
    """Runs scenarios on the CPU and on the device, and saves what they have found."""
    device = simulated.register()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {}
    for name in names:
        scenario = SCENARIOS[name]
        on_cpu = None if name in RECORDED else scenario(torch.device("cpu"))
        simulated.copies.clear()
        found[name] = (on_cpu, scenario(device), len(simulated.copies))
        if name in DELAYED:
            simulated.copies.clear()
            with streams.delays(SEED):
                at_random = scenario(device)
            found[f"{name}, delayed"] = (on_cpu, at_random, len(simulated.copies))
    torch.save(found, path)


def found_by(names: list[str], folder: Path) -> dict[str, tuple[Any, Any, int]]:
    found: dict[str, tuple[Any, Any, int]] = results_of(run, folder / "found", names)
    return found


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any, int]]:
    return found_by([*SHORT, *RECORDED], tmp_path_factory.mktemp("device"))


@pytest.mark.parametrize("name", [*SHORT, *(f"{name}, delayed" for name in DELAYED)])
def test_results_are_those_of_the_cpu(
    name: str, short: dict[str, tuple[Any, Any, int]]
) -> None:
    on_cpu, on_device, copies = short[name]
    assert on_cpu
    assert same(on_cpu, on_device)
    assert copies


def test_a_step_copies_ids_rows_and_gradients_once(
    short: dict[str, tuple[Any, Any, int]],
) -> None:
    found = dict(short["copies_of_a_step"][1])
    weighted = found.pop("weighted step")
    for name in ("eager bags step", "eager sequences step"):
        copies, sizes = found.pop(name)
        assert [(each.way, each.bytes, each.stream) for each in copies] == [
            ("down", sizes["ids"], "default"),
            ("up", sizes["rows"], "default"),
            ("down", sizes["rows"], "aside"),
        ]
        assert all(each.pinned and not each.blocking for each in copies), name
    assert set(found) == {
        f"{name} {step}" for name in ("fp32", "fp16") for step in ("step", "prefetched")
    }
    assert [each.way for each in weighted[0]] == ["down", "up", "down"]
    assert weighted[0][0].bytes == weighted[1]["ids"]  # with the weights
    for step, (copies, sizes) in found.items():
        # the prefetch has copied the ids
        down = [] if step.endswith("prefetched") else [("down", sizes["ids"])]
        assert [(each.way, each.bytes) for each in copies] == [
            *down,
            ("up", sizes["rows"]),
            ("down", sizes["rows"]),
        ]
        assert all(each.pinned and not each.blocking for each in copies), step
        assert [each.stream for each in copies] == ["default"] * (len(copies) - 1) + [
            "aside"
        ], step
    # 16 bits cross the bus
    assert found["fp16 step"][1]["rows"] * 2 == found["fp32 step"][1]["rows"]


def test_lookups_write_into_pinned_memory_and_updates_read_it(
    short: dict[str, tuple[Any, Any, int]],
) -> None:
    """The host copies rows and gradients only where it changes their data type."""
    copies_of = short["host_copies"][1]
    for kind in ("bags", "accumulated bags", "sequences"):
        assert copies_of[f"fp32 {kind}"] == (0, ["up", "down"])
        assert copies_of[f"fp32 {kind}, evaluation"] == (0, ["up"])
        assert copies_of[f"fp16 {kind}"] == (2, ["up", "down"])
        assert copies_of[f"fp16 {kind}, evaluation"] == (1, ["up"])


def test_the_next_batch_is_ready_before_backward_and_gradients_go_down_beside_the_dense_optimizer(
    short: dict[str, tuple[Any, Any, int]],
) -> None:
    order = short["order_of_a_step"][1]["order"]
    ends = [
        place for place, entry in enumerate(order) if entry == ("mark", "end of step")
    ]
    first, second = order[: ends[0]], order[ends[0] : ends[1]]
    backward, dense = (
        first.index(("mark", "backward")),
        first.index(("mark", "dense optimizer")),
    )

    def large(entries: list[Any], way: str) -> list[int]:
        return [
            n
            for n, each in enumerate(entries)
            if each[0] == "copy" and each[1].way == way and each[1].pinned
        ]

    rows, down = large(first, "up"), large(first, "down")
    ids, gradients = (
        [n for n in down if n < backward],
        [n for n in down if n > backward],
    )
    assert len(rows) == len(ids) == len(gradients) == 2  # two groups
    assert max(rows) < min(ids)  # the rows of this batch, then the ids of the next one
    for place in ids:
        assert first[place + 1][0] == "record"
        assert first[place + 2] == ("host waits", first[place + 1][1])
    for place in gradients:
        assert first[place][1].stream == "aside"
        # for what the layers have computed, and for nothing after it
        assert first[place - 1][0] == "wait"
        assert first[place + 1][::2] == ("record", "aside")
        # Nobody waits for the gradients before the dense optimizer has run, and the
        # next rows go up after them.
        event = ("host waits", first[place + 1][1])
        assert place < dense
        assert event not in first
        assert second.index(event) < min(large(second, "up"))
    # The host waits for whole streams only in small copies of TorchRec's.
    blocking = [each[1] for each in order if each[0] == "copy" and each[1].blocking]
    assert blocking
    assert all(each.bytes <= scenarios.SMALL for each in blocking)
    assert len([each for each in order if each[0] == "synchronize"]) == len(blocking)


def test_rows_of_the_next_batch_are_made_and_cold_rows_are_read_before_backward(
    short: dict[str, tuple[Any, Any, int]],
) -> None:
    found = short["rows_before_backward"][1]
    assert found["ready"] == [True] * steps.STEPS
    # Cold rows are read between a forward and its backward: for the next batch.
    of_steps = ", ".join(found["order"]).split(", end of step")[:-1]
    assert len(of_steps) == 30
    wrong = [
        step
        for step in of_steps
        if not re.fullmatch(
            "(, )?forward(, cold read)*, backward, dense optimizer", step
        )
    ]
    assert not wrong
    assert sum("cold read" in step for step in of_steps) > 20


def test_the_device_runs_copies_late_or_at_random_moments(
    short: dict[str, tuple[Any, Any, int]],
) -> None:
    assert short["late_copies"][1] == [
        "the host sees nonsense before it waits, and 5.0 afterwards",
        "at random, an event has happened: [False, True]",
    ]


def test_the_device_refuses_two_uses_of_memory_without_an_event(
    short: dict[str, tuple[Any, Any, int]],
) -> None:
    messages_of = short["mistakes"][1]
    wrong = {name: texts[0] for name, texts in messages_of.items()}
    assert wrong == {
        "read after write": race("aside", "reads", "default", "writes"),
        "read after a copy up": race("default", "reads", "aside", "writes"),
        "write after read": race("default", "writes", "aside", "reads"),
        "copy up after read": race("aside", "writes", "default", "reads"),
        "write after write": race("default", "writes", "aside", "writes"),
        "freed while it is read": FREED,
        "freed while it is written": FREED,
        "read_aside, and the host changes the buffer": changed_buffer("to"),
        "write_aside, and the host changes the buffer": changed_buffer("from"),
    }
    for name, texts in messages_of.items():
        after_events = texts[1:]
        if name.endswith("the buffer"):
            # An event of two streams does not make the host wait.
            assert after_events.pop(0) == wrong[name]
        assert set(after_events) == {"nothing"}, name


FREED = "memory of stream default is freed while stream aside uses it"


def race(now: str, use: str, before: str, use_before: str) -> str:
    return (
        f"stream {now} {use} memory that stream {before} {use_before}, and waits for no"
        " event of it"
    )


def changed_buffer(way: str) -> str:
    return f"the host has changed a buffer before a copy {way} it has ended"


def test_each_copy_of_a_step_can_fail_and_the_next_step_trains(
    short: dict[str, tuple[Any, Any, int]],
) -> None:
    message = "the device has no memory for a copy"
    assert short["failures"][1] == [
        (message, 0, True),
        (message, 1, True),
        ("none", 2, True),
    ]


def test_the_device_counts_bytes_copies_and_kernels(
    short: dict[str, tuple[Any, Any, int]],
) -> None:
    assert short["counts"][1] == {
        "up": [20],
        "down": [8],
        "kernels": ["aten.mul.out"],
    }


def test_kernels_of_rows_have_the_bits_of_the_core(
    short: dict[str, tuple[Any, Any, int]],
) -> None:
    assert short["bits"][1] == ["two_tables", "bfloat16_stochastic", "hot"]


@pytest.mark.parametrize("order", row_kernels.ORDERS)
def test_kernels_of_two_streams_need_an_event(
    order: str, short: dict[str, tuple[Any, Any, int]]
) -> None:
    without, with_event = short["orders"][1][order]
    assert without.endswith("and waits for no event of it")
    assert with_event == "nothing"


def test_kernels_take_tensors_of_the_device_alone_and_are_counted(
    short: dict[str, tuple[Any, Any, int]],
) -> None:
    message, *kernels = short["refused_by_kernels"][1]
    assert message == "gather got slots on the host"
    assert kernels == [
        "rows.pool",
        "rows.locate",
        "rows.sort",
        "rows.update",
        "rows.update",
    ]


def test_the_package_uses_the_streams_of_torch_as_torch_declares_them(
    short: dict[str, tuple[Any, Any, int]],
) -> None:
    assert short["streams_of_torch"][1] == ["True"]


def test_errors_of_late_updates_are_raised_once_and_lose_no_other_update(
    short: dict[str, tuple[Any, Any, int]],
) -> None:
    assert short["failing_updates"][1] == [
        "t_user: the update failed",
        "the other table was updated: True",
        "closed after the update: True",
    ]


def test_a_gradient_that_is_changed_while_it_is_copied_is_refused(
    short: dict[str, tuple[Any, Any, int]],
) -> None:
    before, refused, changed = short["changed_gradients"][1]
    assert before == "2 updates"
    assert refused == "the device refuses the change"
    assert changed.startswith(
        "the gradient of RecStore rows was changed in place after backward"
    )


@pytest.mark.slow
def test_a_thousand_steps_with_eviction_expiry_and_a_cold_store(tmp_path: Path) -> None:
    on_cpu, on_device, _ = found_by(["long_bounds"], tmp_path)["long_bounds"]
    assert (
        on_cpu["cold_stats"]["t_item"].cold_hits > 0 < on_cpu["stats"]["t_item"].expired
    )
    assert same(on_cpu, on_device)


def test_the_device_refuses_whoever_reads_its_memory(
    short: dict[str, tuple[Any, Any, int]],
) -> None:
    native, table = short["misuse"][1]
    assert "got a tensor on the device" in native
    assert "ids must be on the CPU, got sim:0" in table
