"""Options of a table beyond its shape and optimizer: plain frozen, hashable dataclasses without torch code."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Literal

from torchrec_recstore.network import check_token, checked_addresses

MAX_INIT_ROWS = 2**20
"""Ceiling of ``n`` in the default ``uniform(+-sqrt(1/n))``: a hint of 2**40 must not mean rows of zeros."""


def _check_finite(owner: object, **values: float) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            raise ValueError(f"{type(owner).__name__}.{name} must be finite, got {value}")


@dataclass(frozen=True)
class UniformInit:
    """New weights uniform in [low, high).

    Raises:
        ValueError: a bound is not finite, or ``low > high``.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_finite(self, low=self.low, high=self.high)
        if self.low > self.high:
            raise ValueError(f"UniformInit.low must not exceed high, got low={self.low}, high={self.high}")


@dataclass(frozen=True)
class NormalInit:
    """New weights normal with ``mean`` and ``std``; with ``truncate_std=t`` limited to ``mean +- t * std``.

    Raises:
        ValueError: a value is not finite, ``std`` is negative or ``truncate_std`` is not positive.
    """

    mean: float = 0.0
    std: float = 1.0
    truncate_std: float | None = None

    def __post_init__(self) -> None:
        _check_finite(self, mean=self.mean, std=self.std)
        if self.std < 0:
            raise ValueError(f"NormalInit.std must not be negative, got {self.std}")
        if self.truncate_std is not None and not self.truncate_std > 0:
            raise ValueError(f"NormalInit.truncate_std must be positive, got {self.truncate_std}")


@dataclass(frozen=True)
class ConstantInit:
    """New weights all equal to ``value``.

    Raises:
        ValueError: ``value`` is not finite.
    """

    value: float = 0.0

    def __post_init__(self) -> None:
        _check_finite(self, value=self.value)


Initializer = UniformInit | NormalInit | ConstantInit


def _check_int(owner: str, field: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{owner}.{field} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{owner}.{field} must be at least {least}, got {value}")


@dataclass(frozen=True)
class LRU:
    """Evicts the rows whose last training step is longest ago."""


@dataclass(frozen=True)
class LFU:
    """Evicts the rows that the fewest training steps have looked up; of equals, the least recent.

    Args:
        half_life_steps: every so many steps all frequencies are halved, rounded down. ``None``: never.

    Raises:
        TypeError, ValueError: ``half_life_steps`` is no int, or less than 1.
    """

    half_life_steps: int | None = None

    def __post_init__(self) -> None:
        if self.half_life_steps is not None:
            _check_int("LFU", "half_life_steps", self.half_life_steps, 1)


@dataclass(frozen=True)
class Expiry:
    """Rows that no training step has looked up for more than ``steps`` steps leave, within half as many steps more.

    Raises:
        TypeError, ValueError: ``steps`` is no int, or less than 1.
    """

    steps: int

    def __post_init__(self) -> None:
        _check_int("Expiry", "steps", self.steps, 1)


@dataclass(frozen=True)
class MinFrequency:
    """An id gets its row in the ``count``-th training step that looks it up.

    With a ``count`` above 1 an update makes no row: it drops the gradients of ids that have none.

    Args:
        count: steps, at most 255.
        counter_bytes: memory of each shard's counter of sightings; a power of two. Its error is described in
            docs/memory.md.

    Raises:
        TypeError, ValueError: an argument is no int, or out of range.
    """

    count: int
    counter_bytes: int = 2**23

    def __post_init__(self) -> None:
        _check_int("MinFrequency", "count", self.count, 1)
        _check_int("MinFrequency", "counter_bytes", self.counter_bytes, 2**10)
        if self.count > 255:
            raise ValueError(f"MinFrequency.count must be at most 255, got {self.count}")
        if self.counter_bytes & (self.counter_bytes - 1) or self.counter_bytes > 2**34:
            raise ValueError(
                f"MinFrequency.counter_bytes must be a power of two, at most 2**34, got {self.counter_bytes}"
            )


@dataclass(frozen=True)
class RocksDBStore:
    """Evicted rows on a local SSD, through ``rocksdict``.

    Args:
        path: a directory, made where it is missing. Each shard of a table has one of its own in it.

    Raises:
        TypeError, ValueError: ``path`` is no str, or empty.
    """

    path: str

    def __post_init__(self) -> None:
        if not isinstance(self.path, str):
            raise TypeError(f"RocksDBStore.path must be a str, got {type(self.path).__name__}")
        if not self.path:
            raise ValueError("RocksDBStore.path must not be empty")


@dataclass(frozen=True)
class RedisStore:
    """Evicted rows on a Redis or Valkey server or cluster, through ``redis`` and ``hiredis``.

    Args:
        url: ``redis://``, ``rediss://`` (TLS) or ``unix://`` as ``redis.from_url`` takes it, with credentials and
            database; with ``redis+cluster://`` or ``rediss+cluster://`` a node of a cluster.
        retry_seconds: how long a call that fails is tried again, with growing pauses, before it is an error.

    Raises:
        TypeError, ValueError: ``url`` is no str or of another scheme, ``retry_seconds`` is negative.
    """

    url: str
    retry_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not isinstance(self.url, str):
            raise TypeError(f"RedisStore.url must be a str, got {type(self.url).__name__}")
        scheme = self.url.partition("://")[0]
        if scheme not in ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster"):
            raise ValueError(
                "RedisStore.url must begin with redis://, rediss://, unix://, redis+cluster:// or rediss+cluster://, "
                f"got {self.public_url!r}"
            )
        _check_finite(self, retry_seconds=self.retry_seconds)
        if self.retry_seconds < 0:
            raise ValueError(f"RedisStore.retry_seconds must not be negative, got {self.retry_seconds}")

    @property
    def public_url(self) -> str:
        """The URL without its credentials, for messages."""
        scheme, separator, rest = self.url.partition("://")
        plain, _, query = rest.partition("?")
        # A password with a raw @ or / may lie anywhere; one that has a raw ? leaves nothing to go by.
        return scheme + separator + ("..." if "@" in query else plain.rpartition("@")[2])

    def __repr__(self) -> str:
        return f"RedisStore(url={self.public_url!r}, retry_seconds={self.retry_seconds})"


@dataclass(frozen=True)
class ServerStore:
    """Evicted rows on RecStore's parameter servers (``recstore serve``), through ``grpcio``.

    Args:
        servers: ``"host:port,host:port"``; their order decides which ids lie where.
        shared: None: the rows are this table's alone and forgotten with it. A name: they are those of this name on the
            servers, which other tables of the same name, columns, data type and optimizer read and write too, in this
            job or others, and which stay when the table is closed. docs/cold_stores.md says what that means.
        token: that the servers want, if any.
        tls_ca: file of the certificates that theirs are signed by, PEM; with it connections are encrypted.
        timeout_s: how long a call may take with all of its repetitions.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, or makes no sense; the message names it.
    """

    servers: str
    shared: str | None = None
    token: str | None = field(default=None, repr=False)
    tls_ca: str | None = None
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("servers", "shared", "token", "tls_ca"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name == "servers"):
                raise TypeError(f"ServerStore.{name} must be a str, got {type(value).__name__}")
            if value == "":
                raise ValueError(f"ServerStore.{name} must not be empty")
        checked_addresses(self.addresses, "ServerStore.servers")
        check_token(self.token, "ServerStore.token")
        if isinstance(self.timeout_s, bool) or not isinstance(self.timeout_s, int | float):
            raise TypeError(f"ServerStore.timeout_s must be a number, got {type(self.timeout_s).__name__}")
        _check_finite(self, timeout_s=self.timeout_s)
        if self.timeout_s <= 0:
            raise ValueError(f"ServerStore.timeout_s must be positive, got {self.timeout_s}")

    @property
    def addresses(self) -> tuple[str, ...]:
        """``host:port`` of each server."""
        return tuple(address.strip() for address in self.servers.split(","))


def is_shared(cold_store: Hashable | None) -> bool:
    """Whether rows of a cold store are also those of other tables: where its options have a ``shared`` that is set."""
    return bool(getattr(cold_store, "shared", None))


@dataclass(frozen=True)
class TableOptions:
    """How one table makes and reads rows.

    Without any of the bounds a table keeps every row that it has made.

    Args:
        initializer: weights of a new row. ``None``: the config's ``weight_init_min/max`` where the user set
            them, else uniform in ``+-sqrt(1/n)`` (see :func:`default_initializer`).
        seed: with the table's name, the id and the global column it decides a new row's weights, nothing else does.
        expected_rows: the planner's estimate of resident rows over all ranks.
        max_rows: bound on the rows in memory, over all ranks; a table that is sharded by rows gives each shard its
            even part. With neither ``eviction`` nor ``cold_store`` the table refuses to grow past it.
        eviction: which rows leave when there are too many; needs ``max_rows``. With ``cold_store`` alone it is
            :class:`LRU`.
        expiry: rows that are no longer looked up leave.
        admission: whether an id that has no row gets one.
        cold_store: where evicted rows go, to come back with the next lookup: :class:`RocksDBStore`,
            :class:`RedisStore`, :class:`ServerStore`, or what has been registered with
            ``torchrec_recstore.store.open_cold_store``. Needs ``max_rows``.
        routing: how sharding by rows spreads ids over ranks: ``"block"`` is TorchRec's own split by ranges of
            ``num_embeddings``, ``"hash"`` spreads any pattern of ids evenly. Without effect on other sharding types.
        missing: what an evaluation lookup reads for an id without a row: ``"zeros"`` or its initial row, ``"init"``.

    Raises:
        ValueError: a value makes no sense; the message names the field.
        TypeError: a field is of the wrong type; the message names the field.
    """

    initializer: Initializer | None = None
    seed: int = 0
    expected_rows: int | None = None
    max_rows: int | None = None
    eviction: LRU | LFU | None = None
    expiry: Expiry | None = None
    admission: MinFrequency | None = None
    cold_store: Hashable | None = None
    routing: Literal["block", "hash"] = "block"
    missing: Literal["zeros", "init"] = "zeros"

    def __post_init__(self) -> None:
        if self.initializer is not None and not isinstance(self.initializer, UniformInit | NormalInit | ConstantInit):
            raise TypeError(
                "TableOptions.initializer must be UniformInit, NormalInit or ConstantInit, "
                f"got {type(self.initializer).__name__}"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"TableOptions.seed must be an int, got {type(self.seed).__name__}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"TableOptions.seed must fit 64 bits, got {self.seed}")
        for name in ("expected_rows", "max_rows"):
            if getattr(self, name) is not None:
                _check_int("TableOptions", name, getattr(self, name), 1)
        for name, kinds in (("eviction", (LRU, LFU)), ("expiry", (Expiry,)), ("admission", (MinFrequency,))):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                names = " or ".join(kind.__name__ for kind in kinds)
                raise TypeError(f"TableOptions.{name} must be {names}, got {type(value).__name__}")
        for name in ("eviction", "cold_store"):
            if getattr(self, name) is not None and self.max_rows is None:
                raise ValueError(f"TableOptions.{name} needs max_rows: an unbounded table evicts nothing")
        if self.expiry is not None and is_shared(self.cold_store):
            raise ValueError(
                "TableOptions.expiry cannot be used with a shared cold store: rows of other jobs go by other clocks"
            )
        if not isinstance(self.cold_store, Hashable):
            raise TypeError(f"TableOptions.cold_store must be hashable, got {type(self.cold_store).__name__}")
        if self.routing not in ("block", "hash"):
            raise ValueError(f"TableOptions.routing must be 'block' or 'hash', got {self.routing!r}")
        if self.missing not in ("zeros", "init"):
            raise ValueError(f"TableOptions.missing must be 'zeros' or 'init', got {self.missing!r}")


def shard_options(options: TableOptions, split: tuple[int, int] | None, table_name: str) -> TableOptions:
    """The options of one shard: its even part of ``max_rows``, of which the first shards have one more.

    Column shards hold the same rows, so each has its row shard's part in full.

    Args:
        options: of the whole table.
        split: (ranks, this rank) among which the table's rows are split; None where they are not.
        table_name: the table's.

    Raises:
        ValueError: there are fewer rows than shards; the message names the table.
    """
    if split is None or options.max_rows is None:
        return options
    ranks, rank = split
    rows, rest = divmod(options.max_rows, ranks)
    if rows == 0:
        raise ValueError(
            f"RecStore table {table_name!r}: max_rows={options.max_rows} is less than the {ranks} shards that its rows "
            "are split into: each needs a row"
        )
    return replace(options, max_rows=rows + (rank < rest))


def resident_rows(options: TableOptions, num_embeddings: int | None) -> int:
    """Rows that a table is expected to hold in memory over all ranks.

    ``expected_rows``, else the hint; at most ``max_rows``. Without that a hint counts as 2**20 at most.
    """
    if options.max_rows is None:
        return _expected_ids(options, num_embeddings)
    wanted = options.expected_rows or num_embeddings
    return options.max_rows if wanted is None else min(wanted, options.max_rows)


def _expected_ids(options: TableOptions, num_embeddings: int | None) -> int:
    if options.expected_rows is not None:
        return options.expected_rows
    return MAX_INIT_ROWS if num_embeddings is None else min(num_embeddings, MAX_INIT_ROWS)


def default_initializer(options: TableOptions, num_embeddings: int | None = None) -> Initializer:
    """The table's initializer, or uniform in ``+-sqrt(1/n)``, ``n`` being ``expected_rows``, else the hint.

    ``n`` is never above 2**20, and ``max_rows`` has no say: a bound on memory must not change what is learned.

    Source: ``EmbeddingBagConfig.get_weight_init_max`` (torchrec 1.8.0), with n bounded.
    """
    if options.initializer is not None:
        return options.initializer
    bound = math.sqrt(1.0 / min(_expected_ids(options, num_embeddings), MAX_INIT_ROWS))
    return UniformInit(-bound, bound)


def options_of_flags(
    *,
    max_rows: int | None,
    eviction: Literal["lru", "lfu"] | None,
    half_life_steps: int | None,
    expire_steps: int | None,
    min_frequency: int | None,
    cold_store: str | None,
    seed: int = 0,
) -> TableOptions:
    """The options that ``--max-rows``, ``--eviction`` and so on stand for.

    Raises:
        ValueError: flags that do not fit each other, or a value that makes no sense.
    """
    for flag, number in (
        ("--max-rows", max_rows),
        ("--half-life-steps", half_life_steps),
        ("--expire-steps", expire_steps),
        ("--min-frequency", min_frequency),
    ):
        if number is not None and number < 1:
            raise ValueError(f"{flag} must be at least 1, got {number}")
    for flag, value in (("--eviction", eviction), ("--cold-store", cold_store)):
        if value is not None and max_rows is None:
            raise ValueError(f"{flag} needs --max-rows: a table without a bound evicts nothing")
    if half_life_steps is not None and eviction != "lfu":
        raise ValueError("--half-life-steps needs --eviction lfu")
    policy: LRU | LFU | None = None
    if max_rows is not None:
        policy = LFU(half_life_steps) if eviction == "lfu" else LRU()
    return TableOptions(
        seed=seed,
        max_rows=max_rows,
        eviction=policy,
        expiry=None if expire_steps is None else Expiry(expire_steps),
        admission=None if min_frequency is None else MinFrequency(min_frequency),
        cold_store=None if cold_store is None else cold_store_of_flag(cold_store),
    )


def cold_store_of_flag(url_or_path: str) -> RedisStore | RocksDBStore:
    """The cold store that ``--cold-store`` stands for."""
    return RedisStore(url_or_path) if "://" in url_or_path else RocksDBStore(url_or_path)
