"""Which tables do not fit into the memory of a topology, and into which memory."""

from __future__ import annotations

from dataclasses import dataclass

from torchrec.distributed.planner.types import ShardingOption, Topology

_MOST_NAMED = 5


@dataclass(frozen=True)
class _Need:
    """The bytes that a table needs at least, over its options: on the rank with its largest shard, and in all."""

    table: str
    on_a_rank: int
    in_all: int


def shortages(options: list[ShardingOption], topology: Topology) -> list[str]:
    """Returns lines of text that name the tables that do not fit, and the memory that is too small for them.

    The host memory (DDR) and, under an accelerator, its memory (HBM) are compared apart.

    Args:
        options: All options of all tables, with their estimated storage. No plan was found for them.
        topology: The memory of each rank that tables may use.
    """
    kinds = {"ddr": "host memory (DDR)"}
    if topology.compute_device != "cpu":
        kinds["hbm"] = f"memory of {topology.compute_device} (HBM)"
    lines, fullest = [], (0.0, "")
    for kind, memory in kinds.items():
        sizes = [getattr(device.storage, kind) for device in topology.devices]
        needs = sorted(_needs(options, kind), key=lambda need: -need.on_a_rank)
        alone = [need for need in needs if need.on_a_rank > max(sizes)]
        needed = sum(need.in_all for need in needs)
        lines += [
            f"table {need.table!r} needs at least {_gib(need.on_a_rank)} of {memory} on a rank, and a rank has "
            f"{_gib(max(sizes))}"
            for need in alone[:_MOST_NAMED]
        ]
        if len(alone) > _MOST_NAMED:
            lines.append(f"{len(alone) - _MOST_NAMED} more tables need more {memory} than a rank has")
        shards = ", ".join(f"{need.table!r} {_gib(need.on_a_rank)}" for need in needs[:_MOST_NAMED])
        if not alone and needed > sum(sizes):
            lines.append(
                f"the tables need at least {_gib(needed)} of {memory}, and all {len(sizes)} rank(s) together have "
                f"{_gib(sum(sizes))}; largest shards: {shards}"
            )
        fullest = max(
            fullest,
            (
                needed / max(sum(sizes), 1),
                f"each table fits, but the shards do not fit next to each other into the {memory} of "
                f"{len(sizes)} rank(s) with {_gib(max(sizes))} each; largest shards: {shards}",
            ),
        )
    return lines or [fullest[1]]


def _needs(options: list[ShardingOption], kind: str) -> list[_Need]:
    by_table: dict[str, list[ShardingOption]] = {}
    for option in options:
        by_table.setdefault(option.fqn.lstrip("."), []).append(option)
    return [
        _Need(
            table=table,
            on_a_rank=min(max(getattr(shard.storage, kind) for shard in option.shards) for option in each),
            in_all=min(getattr(option.total_storage, kind) for option in each),
        )
        for table, each in by_table.items()
    ]


def _gib(size: int) -> str:
    return f"{size / 2**30:,.3f} GiB"
