"""The bytes that ranks exchange in a step, by collective, and their time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Collective = Literal[
    "splits", "lengths", "ids", "weights", "pooled", "partial sums", "gradients"
]
"""``"splits"`` are the numbers of ids, which the ranks exchange first.

``"partial sums"`` are those of the bags of row-wise tables, and ``"pooled"`` the pooled
rows of other tables. ``"gradients"`` are those of both.
"""

COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
OUTPUTS: tuple[Collective, ...] = ("pooled", "partial sums")
"""The collectives in which the ranks with shards send to the ranks with samples."""

SHARDING_TYPES = ("table_wise", "column_wise", "row_wise")
"""The sharding types whose bytes are known."""

STEP_COLLECTIVES = 5
"""The collectives of a step that a sharding type of a collection without weights runs:
one for each of ``"splits"``, ``"lengths"``, ``"ids"``, one of ``OUTPUTS``, and
``"gradients"``.
"""

_ID_BYTES = _SPLIT_BYTES = 8
_WEIGHT_BYTES = _LENGTH_BYTES = 4


@dataclass(frozen=True)
class PlacedTable:
    """A table of an ``EmbeddingBagCollection`` and the ranks of its shards.

    A rank that has two shards of columns is listed twice in ``ranks``, and receives the
    ids twice; ``row_wise`` has all ranks in ascending order. ``ids_per_sample`` is the
    mean over all features together. ``element_bytes`` are those of a number of the
    pooled rows and of their gradients. ``row_shares``, the share of the ids whose rows
    are on each rank with ``row_wise``, are equal if None.

    Raises ValueError, which names the argument, if the arguments do not fit each other.
    """

    sharding_type: str
    ranks: tuple[int, ...]
    dim: int
    features: int
    ids_per_sample: float
    weighted: bool = False
    element_bytes: float = 4
    row_shares: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.sharding_type not in SHARDING_TYPES:
            raise ValueError(
                f"sharding_type must be one of {', '.join(SHARDING_TYPES)}, got"
                f" {self.sharding_type!r}"
            )
        is_table_wise = self.sharding_type == "table_wise"
        if not self.ranks or (is_table_wise and len(self.ranks) != 1):
            raise ValueError(
                f"ranks must be the rank of each shard, got {self.ranks} for"
                f" {self.sharding_type}"
            )
        if self.sharding_type == "column_wise" and self.dim % len(self.ranks):
            raise ValueError(
                f"dim must be a multiple of the {len(self.ranks)} shards of columns,"
                f" got {self.dim}"
            )
        if self.row_shares is not None and len(self.row_shares) != len(self.ranks):
            raise ValueError(
                f"row_shares must have one share for each of {len(self.ranks)} ranks:"
                f" {self.row_shares}"
            )

    def message_bytes(
        self,
        collective: Collective,
        source: int,
        target: int,
        batch_size: int,
    ) -> float:
        """Returns the bytes of this table from one rank to another in a collective.

        ``"splits"`` are not the table's, and have 0 bytes. ``batch_size`` is the number
        of samples of one rank.
        """
        # Inputs go to the ranks with shards, and their results come back; gradients go
        # the way of the inputs.
        owner = source if collective in OUTPUTS else target
        shards = self.ranks.count(owner)
        bags = batch_size * self.features
        if collective == "lengths":
            return shards * bags * _LENGTH_BYTES
        if collective in OUTPUTS:
            is_row_wise = self.sharding_type == "row_wise"
            output = "partial sums" if is_row_wise else "pooled"
            if collective != output:
                return 0.0
        if collective in (*OUTPUTS, "gradients"):
            columns: float = self.dim
            if self.sharding_type == "column_wise":
                columns = self.dim / len(self.ranks)
            return shards * bags * columns * self.element_bytes
        if collective == "splits" or (collective == "weights" and not self.weighted):
            return 0.0
        element_bytes = _ID_BYTES if collective == "ids" else _WEIGHT_BYTES
        share = self._row_share(owner)
        return shards * batch_size * self.ids_per_sample * share * element_bytes

    def _row_share(self, rank: int) -> float:
        """Returns the share of the ids whose rows are on a rank with a shard."""
        if self.sharding_type != "row_wise":
            return 1.0
        if self.row_shares is None:
            return 1 / len(self.ranks)
        return self.row_shares[self.ranks.index(rank)]


@dataclass(frozen=True)
class RankTraffic:
    """The bytes that one rank exchanges with others in a collective of a step.

    They are the payload, see :func:`library_factor`. The bytes between hosts are parts
    of the other two numbers.
    """

    collective: Collective
    sent: float
    received: float
    sent_between_hosts: float
    received_between_hosts: float


def library_factor(collective: Collective, compute_device: str) -> int:
    """Returns the bytes that a library sends for each byte of a collective.

    A ring sends as much as :class:`RankTraffic` states. The library of CPUs, gloo,
    makes a reduce-scatter of an all-reduce, which sends twice as much (torch 2.13;
    ``benchmarks/scale.py`` compares it with a host's interface).
    """
    return 2 if collective == "partial sums" and compute_device == "cpu" else 1


def milliseconds(
    traffic: RankTraffic,
    within_host: float,
    between_hosts: float,
    compute_device: str,
) -> float:
    """Returns the time of a collective.

    It is that of the bytes sent, or of those received if it is longer.

    ``within_host`` and ``between_hosts`` are bytes per millisecond.
    """
    sent_within = traffic.sent - traffic.sent_between_hosts
    sent_ms = sent_within / within_host + traffic.sent_between_hosts / between_hosts
    received_within = traffic.received - traffic.received_between_hosts
    received_ms = (
        received_within / within_host + traffic.received_between_hosts / between_hosts
    )
    factor = library_factor(traffic.collective, compute_device)
    return factor * max(sent_ms, received_ms)


def _check_placed(
    table: PlacedTable,
    rank: int,
    ranks: int,
) -> None:
    """Raises ValueError if a table, or ``rank``, is not on the first ``ranks`` ranks."""
    for number in (rank, *table.ranks):
        if not 0 <= number < ranks:
            raise ValueError(
                f"ranks must be from 0 to {ranks - 1}, got rank {rank} and shards on"
                f" {table.ranks}"
            )
    if table.sharding_type == "row_wise" and table.ranks != tuple(range(ranks)):
        raise ValueError(
            f"a row_wise table must be on all {ranks} ranks in their order, got"
            f" {table.ranks}"
        )


def rank_traffic(
    tables: Sequence[PlacedTable],
    rank: int,
    ranks: int,
    batch_size: int,
    ranks_per_host: int | None = None,
) -> list[RankTraffic]:
    """Returns the bytes that a rank exchanges in a step, for each of ``COLLECTIVES``.

    The tables are those of one ``EmbeddingBagCollection`` with int64 ids. Table-wise
    and column-wise tables exchange pooled rows and their gradients with all-to-alls;
    row-wise tables reduce-scatter partial sums and all-gather their gradients. Each
    rank has ``batch_size`` samples. Ranks are numbered host by host; None as
    ``ranks_per_host``: all are on one host. Source:
    ``torchrec/distributed/dist_data.py`` and ``sharding/`` of TorchRec 1.8.0;
    ``tests/planner/test_traffic.py`` compares the bytes with those of real collectives.

    Raises ValueError if a rank is not below ``ranks``, or a row-wise table is not on
    all ranks.
    """
    for table in tables:
        _check_placed(table, rank, ranks)
    if ranks_per_host is None:
        ranks_per_host = ranks
    # A collection exchanges, for each sharding type, the size of each of its inputs and
    # the batch size.
    inputs = 4 if any(table.weighted for table in tables) else 3
    sharding_types = {table.sharding_type for table in tables}
    splits_bytes = float(len(sharding_types) * inputs * _SPLIT_BYTES)
    traffic = []
    for name in COLLECTIVES:
        sent = 0.0
        received = 0.0
        sent_between_hosts = 0.0
        received_between_hosts = 0.0
        for peer in range(ranks):
            if peer == rank:
                continue
            sent_to_peer = splits_bytes if name == "splits" else 0.0
            received_from_peer = sent_to_peer
            for table in tables:
                sent_to_peer += table.message_bytes(name, rank, peer, batch_size)
                received_from_peer += table.message_bytes(name, peer, rank, batch_size)
            sent += sent_to_peer
            received += received_from_peer
            if peer // ranks_per_host != rank // ranks_per_host:
                sent_between_hosts += sent_to_peer
                received_between_hosts += received_from_peer
        traffic.append(
            RankTraffic(
                collective=name,
                sent=sent,
                received=received,
                sent_between_hosts=sent_between_hosts,
                received_between_hosts=received_between_hosts,
            )
        )
    return traffic
