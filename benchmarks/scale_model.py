"""The model of scale: bytes and time of one rank's step, from 1 to 1,024 ranks.

It does not import torch.

The time of a step is the sum of its parts, because nothing overlaps in a step without a
pipeline: the dense part, the lookups and updates of the busiest rank, TorchRec's own
work, and the collectives. A collective takes as long as its slowest resource: the
network interface of the busiest host in its busier direction, or the memory of the
busiest rank. Each round of messages between hosts adds the latency of the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Sharding = Literal["table_wise", "row_wise", "table_row_wise", "grid"]
SHARDINGS: tuple[Sharding, ...] = ("table_wise", "row_wise", "table_row_wise", "grid")
GRID_COLUMNS = 32
"""The columns of a shard of grid sharding: ``min_partition`` in the constraints of the
planner.
"""

ID_BYTES = 8
LENGTH_BYTES = 4
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Job:
    """A model and its batch.

    Attributes:
        features: The number of features. Each has a table of its own, and one id in
            each sample.
        dim: The dim of each table.
        batch: The samples of one rank in a step.
        dense_parameters: The float32 parameters of the dense part, whose gradients are
            all-reduced.
        ranks_per_host: The largest number of ranks on a host.
    """

    features: int = 26
    dim: int = 128
    batch: int = 2048
    dense_parameters: int = 0
    ranks_per_host: int = 8


@dataclass(frozen=True)
class Kernels:
    """The measured times of one rank, in seconds.

    Attributes:
        id_s: By the columns of a shard: the lookup and the update of one id.
        bag_s: By the columns of a shard: the forward and the backward of one bag
            without an id.
        torchrec_s: The work of TorchRec in a step, without the kernels and the
            collectives.
        dense_s: The forward, the backward and the optimizer of the dense part, for one
            sample.
        copy_bytes_per_s: The bytes a second that a rank copies from one place of memory
            to another.
    """

    id_s: dict[int, float]
    bag_s: dict[int, float]
    torchrec_s: float
    dense_s: float
    copy_bytes_per_s: float


@dataclass(frozen=True)
class Network:
    """A network between hosts.

    Attributes:
        name: The name in tables and plots.
        bytes_per_s: The bytes a second of a host's interface, in each direction at the
            same time.
        latency_s: The time of a round of messages, in seconds.
    """

    name: str
    bytes_per_s: float
    latency_s: float


NETWORKS = (
    Network(
        "25 Gbit/s",
        bytes_per_s=25e9 / 8,
        latency_s=25e-6,
    ),
    Network(
        "100 Gbit/s",
        bytes_per_s=100e9 / 8,
        latency_s=5e-6,
    ),
    Network(
        "400 Gbit/s",
        bytes_per_s=400e9 / 8,
        latency_s=5e-6,
    ),
)


@dataclass(frozen=True)
class Library:
    """The algorithms of a library of collectives.

    Attributes:
        reduce_scatter: The bytes of a reduce-scatter over those of a ring, which sends
            each byte once.
        pairwise: Whether an all-to-all meets one other rank in each round, or all of
            them in one.
        latencies: The latencies of the network that a round of messages takes.
    """

    reduce_scatter: int
    pairwise: bool
    latencies: int = 1

    def all_to_all_rounds(self, ranks: int) -> int:
        """Returns the rounds of messages of an all-to-all."""
        if ranks == 1:
            return 0
        return ranks - 1 if self.pairwise else 1


RING = Library(reduce_scatter=1, pairwise=True)
"""Rings, and all-to-alls in pairs, as MPI and NCCL describe them."""

GLOO = Library(reduce_scatter=2, pairwise=False, latencies=2)
"""gloo of torch 2.13.

It all-reduces in place of a reduce-scatter, and posts all messages of an all-to-all at
once. A message waits for word from its receiver, so that it takes two latencies. All
three were measured.
"""


class Collective(NamedTuple):
    """One collective of a step."""

    name: str
    host_bytes: float  # in the busier direction of the busiest host's interface
    rank_bytes: float  # that the busiest rank sends or receives, within its host or not
    rounds: int  # of messages

    def seconds(
        self,
        network: Network,
        kernels: Kernels,
        latencies: int,
    ) -> float:
        """Returns the time of the collective.

        Each round takes ``latencies`` latencies of the network.
        """
        wait_s = self.rounds * latencies * network.latency_s
        host_s = self.host_bytes / network.bytes_per_s
        rank_s = self.rank_bytes / kernels.copy_bytes_per_s
        return wait_s + max(host_s, rank_s)


class Load(NamedTuple):
    """The work of the busiest rank in a step, in shards of ``columns`` columns."""

    columns: int
    ids: float
    bags: float


def hosts_of(job: Job, ranks: int) -> int:
    """Returns the number of hosts.

    Raises:
        ValueError: The last host would have fewer ranks than the others.
    """
    on_host = min(ranks, job.ranks_per_host)
    if ranks < 1 or ranks % on_host:
        raise ValueError(
            "ranks must be at least 1, and a multiple of ranks_per_host beyond it, got"
            f" {ranks}"
        )
    return ranks // on_host


def load(job: Job, sharding: Sharding, ranks: int) -> Load:
    """Returns the work of the busiest rank.

    Tables and shards are spread as evenly as their number allows.
    """
    samples = ranks * job.batch
    if sharding == "table_wise":
        tables = _ceil(job.features, ranks)
        return Load(
            job.dim,
            ids=tables * samples,
            bags=tables * samples,
        )
    if sharding == "row_wise":
        return Load(
            job.dim,
            ids=job.features * job.batch,
            bags=job.features * samples,
        )
    columns, shards = _shards(job, sharding)
    hosts = hosts_of(job, ranks)
    host_shards = _ceil(shards, hosts)
    return Load(
        columns,
        ids=host_shards * samples * hosts / ranks,
        bags=host_shards * samples,
    )


def collectives(
    job: Job,
    sharding: Sharding,
    ranks: int,
    library: Library = RING,
) -> list[Collective]:
    """Returns the collectives of a step.

    Source: ``torchrec/distributed/sharding`` of TorchRec 1.8.0.

    The bytes are those of the busiest host: sent, or received where that is more.
    """
    if sharding == "row_wise":
        result = _row_wise(job, ranks, library)
    elif sharding == "table_wise":
        result = _table_wise(job, ranks, library)
    else:
        result = _within_hosts(job, sharding, ranks, library)

    dense_bytes = job.dense_parameters * FLOAT_BYTES
    edge = 2 * (ranks - 1) / ranks * dense_bytes
    all_reduce = Collective(
        "all-reduce",
        host_bytes=edge if hosts_of(job, ranks) > 1 else 0,
        rank_bytes=edge,
        rounds=2 * (ranks - 1),
    )
    return [*result, all_reduce]


def _row_wise(job: Job, ranks: int, library: Library) -> list[Collective]:
    """Returns the collectives of tables whose rows are spread over all ranks."""
    hosts = hosts_of(job, ranks)
    on_host = ranks // hosts
    away = ranks - on_host  # the ranks on other hosts
    ids = job.features * job.batch
    pooled_bytes = ids * job.dim * FLOAT_BYTES

    # to each rank: its share of the ids, all lengths
    sent = ids * ID_BYTES / ranks + ids * LENGTH_BYTES
    ids_sent = Collective(
        "ids",
        host_bytes=on_host * away * sent,
        rank_bytes=(ranks - 1) * sent,
        rounds=3 * library.all_to_all_rounds(ranks),
    )
    rings = _ring(
        library,
        "pooled",
        "gradients",
        ranks * pooled_bytes,
        ranks,
        crosses=hosts > 1,
    )
    return [ids_sent, *rings]


def _table_wise(job: Job, ranks: int, library: Library) -> list[Collective]:
    """Returns the collectives of whole tables on single ranks."""
    hosts = hosts_of(job, ranks)
    on_host = ranks // hosts
    away = ranks - on_host  # the ranks on other hosts
    rank_tables = _ceil(job.features, ranks)
    host_tables = _ceil(job.features, hosts)
    tables_away = job.features - job.features // hosts

    # Bags of other ranks' samples go out, or bags of a rank's own samples come in.
    rank_bags = max(rank_tables * (ranks - 1), job.features - rank_tables)
    host_bags = max(host_tables * away, on_host * tables_away)
    rank_bags *= job.batch
    host_bags *= job.batch

    rounds = library.all_to_all_rounds(ranks)
    row_bytes = job.dim * FLOAT_BYTES
    exchanges = (
        ("ids", ID_BYTES + LENGTH_BYTES, 3 * rounds),
        ("pooled", row_bytes, rounds),
        ("gradients", row_bytes, rounds),
    )
    result = []
    for name, bag_bytes, exchange_rounds in exchanges:
        collective = Collective(
            name,
            host_bytes=host_bags * bag_bytes,
            rank_bytes=rank_bags * bag_bytes,
            rounds=exchange_rounds,
        )
        result.append(collective)
    return result


def _within_hosts(
    job: Job,
    sharding: Sharding,
    ranks: int,
    library: Library,
) -> list[Collective]:
    """Returns the collectives of shards whose rows are spread over a host's ranks."""
    hosts = hosts_of(job, ranks)
    on_host = ranks // hosts
    away = ranks - on_host  # the ranks on other hosts
    columns, shards = _shards(job, sharding)
    host_shards = _ceil(shards, hosts)
    shards_away = shards - shards // hosts
    host_bags = max(host_shards * away, on_host * shards_away) * job.batch
    rank_bags = 0
    if ranks > 1:
        rank_bags = max(host_shards * (ranks - 1), shards) * job.batch

    # a rank of the host gets its ids; each of them gets the lengths
    bag_bytes = ID_BYTES + LENGTH_BYTES * on_host
    ids_sent = Collective(
        "ids",
        host_bytes=host_bags * bag_bytes,
        rank_bytes=rank_bags * bag_bytes / on_host,
        rounds=3 * library.all_to_all_rounds(ranks),
    )
    rings = _ring(
        library,
        "pooled",
        "gradients",
        host_shards * ranks * job.batch * columns * FLOAT_BYTES,
        on_host,
        crosses=False,
    )
    across = host_bags * columns * FLOAT_BYTES
    result = [ids_sent]
    for ring in rings:
        inside = ring._replace(name=f"{ring.name} in the host", rounds=0)
        between = Collective(
            f"{ring.name} between hosts",
            host_bytes=across,
            rank_bytes=across / on_host,
            rounds=library.all_to_all_rounds(hosts),
        )
        result += [inside, between]
    return result


def step(
    job: Job,
    sharding: Sharding,
    ranks: int,
    network: Network,
    kernels: Kernels,
    library: Library = RING,
    dense: bool = True,
) -> dict[str, float]:
    """Returns the parts of a step in seconds.

    They are ``dense``, ``tables``, ``torchrec``, and each collective by its name.

    Args:
        job: The model.
        sharding: The sharding of all tables.
        ranks: The number of ranks.
        network: The network between hosts.
        kernels: The times of one rank.
        library: The algorithms of the collectives. Default: rings, and all-to-alls in
            pairs.
        dense: Whether the step has a dense part. Default: True.

    Raises:
        ValueError: The number of ranks does not fill the hosts, or no time was measured
            for this number of columns.
    """
    work = load(job, sharding, ranks)
    if work.columns not in kernels.id_s:
        raise ValueError(
            f"no kernel was measured with {work.columns} columns, only with"
            f" {sorted(kernels.id_s)}"
        )
    bags_s = max(0.0, work.bags - work.ids) * kernels.bag_s[work.columns]
    parts = {
        "dense": job.batch * kernels.dense_s if dense else 0.0,
        "tables": work.ids * kernels.id_s[work.columns] + bags_s,
        "torchrec": kernels.torchrec_s,
    }
    latencies = library.latencies if hosts_of(job, ranks) > 1 else 0
    for collective in collectives(job, sharding, ranks, library):
        if collective.name != "all-reduce" or dense:
            parts[collective.name] = collective.seconds(network, kernels, latencies)
    return parts


def samples_per_s(job: Job, ranks: int, parts: dict[str, float]) -> float:
    """Returns the samples that all ranks train in a second."""
    return ranks * job.batch / sum(parts.values())


def hosts_for(
    target_rate: float,
    job: Job,
    sharding: Sharding,
    network: Network,
    kernels: Kernels,
    dense: bool = True,
) -> int | None:
    """Returns the fewest hosts that train ``target_rate`` samples a second.

    None: 1,024 hosts do not.
    """
    for hosts in range(1, 1025):
        ranks = hosts * job.ranks_per_host
        parts = step(
            job,
            sharding,
            ranks,
            network,
            kernels,
            dense=dense,
        )
        if samples_per_s(job, ranks, parts) >= target_rate:
            return hosts
    return None


def _ceil(items: int, places: int) -> int:
    return -(-items // places)


def _shards(job: Job, sharding: Sharding) -> tuple[int, int]:
    """Returns the columns of a shard, and the number of shards of all tables.

    They are those of ``table_row_wise`` and ``grid``.
    """
    columns = job.dim
    if sharding == "grid":
        columns = min(job.dim, GRID_COLUMNS)
    shards = job.features * job.dim // columns
    return columns, shards


def _ring(
    library: Library,
    forward: str,
    backward: str,
    total_bytes: float,
    ranks: int,
    crosses: bool,
) -> tuple[Collective, Collective]:
    """Returns a reduce-scatter of ``total_bytes`` bytes and its all-gather.

    One edge of the ring leaves each host if the ring crosses hosts.
    """
    edge = (ranks - 1) / ranks * total_bytes
    sent = library.reduce_scatter * edge
    scatter = Collective(
        forward,
        host_bytes=sent if crosses else 0.0,
        rank_bytes=sent,
        rounds=library.reduce_scatter * (ranks - 1),
    )
    gather = Collective(
        backward,
        host_bytes=edge if crosses else 0.0,
        rank_bytes=edge,
        rounds=ranks - 1,
    )
    return scatter, gather
