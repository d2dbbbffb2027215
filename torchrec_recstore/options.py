"""Options of a table beyond its shape and optimizer.

They are frozen, hashable dataclasses, and need no torch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torchrec_recstore.display import set_fields
from torchrec_recstore.network import check_token, checked_addresses
from torchrec_recstore.utils import ceil_div

__all__ = [
    "LFU",
    "LRU",
    "ConstantInit",
    "Expiry",
    "MinFrequency",
    "NormalInit",
    "RedisStore",
    "RocksDBStore",
    "SSDStore",
    "Scored",
    "ServerStore",
    "Servers",
    "TableOptions",
    "UniformInit",
]

MAX_INIT_ROWS = 2**20
"""The largest ``n`` in the default initializer ``uniform(+-sqrt(1/n))``.

Without a limit, ``num_embeddings=2**40`` would initialize rows to almost zero.
"""
MAX_SCORE = (2 - 2**-23) * 2.0**127
"""The largest finite score: the largest finite float32 number."""
MAX_LEFT_IDS = 2**30
"""The largest number of ids that :class:`TableOptions` allows as ``left_ids``."""
LEFT_ID_BYTES = 24
"""The bytes of each id in a full record of ``left_ids`` (csrc/snapshot/departures.h).
"""
MAX_DEVICE_ROWS = 2**30
"""The largest number of rows that :class:`TableOptions` allows as ``device_rows``."""
NONFINITE = ("pass", "skip", "raise")
"""The values of ``TableOptions.nonfinite``, in the order of csrc/rows/config.h."""


def _check_finite(
    owner: object,
    *names: str,
    least: float = -math.inf,
) -> None:
    for name in names:
        argument = f"{type(owner).__name__}.{name}"
        value = getattr(owner, name)
        if not math.isfinite(value):
            raise ValueError(f"{argument} must be finite, got {value}")
        if value < least:
            raise ValueError(f"{argument} must be at least {least}, got {value}")


def _check_positive(owner: object, *names: str) -> None:
    for name in names:
        argument = f"{type(owner).__name__}.{name}"
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{argument} must be a number, got {type(value).__name__}")
        _check_finite(owner, name)
        if value <= 0:
            raise ValueError(f"{argument} must be positive, got {value}")


def check_int(
    name: str,
    value: object,
    least: int,
    most: int = 2**63 - 1,
) -> int:
    """Returns ``value``, or raises TypeError or ValueError if it is not an int from
    ``least`` to ``most``.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")
    return value


def _check_int(owner: object, least: int, *names: str) -> None:
    for name in names:
        check_int(
            f"{type(owner).__name__}.{name}",
            getattr(owner, name),
            least,
        )


def _check_str(owner: object, *names: str) -> None:
    for name in names:
        argument = f"{type(owner).__name__}.{name}"
        value = getattr(owner, name)
        if not isinstance(value, str):
            raise TypeError(f"{argument} must be a str, got {type(value).__name__}")
        if not value:
            raise ValueError(f"{argument} must not be empty")


def _set_names(owner: object, *names: str) -> list[str]:
    """Returns those of the names whose fields are not None."""
    return [name for name in names if getattr(owner, name) is not None]


def _microseconds(seconds: float) -> int:
    return max(1, round(min(seconds, 2.0**42) * 1e6))


@dataclass(frozen=True)
class UniformInit:
    """Initializes the weights of new rows from the uniform distribution over [low,
    high).

    Raises:
        ValueError: A bound is not finite, or ``low > high``.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_finite(self, "low", "high")
        if self.low > self.high:
            raise ValueError(
                f"UniformInit.low must not exceed high, got low={self.low},"
                f" high={self.high}"
            )


@dataclass(frozen=True)
class NormalInit:
    """Initializes the weights of new rows from a normal distribution.

    Args:
        mean, std: The mean and the standard deviation. Default: 0 and 1.
        truncate_std: Every weight lies within ``mean +- truncate_std * std``. Default:
            None, which means no limit.

    Raises:
        ValueError: A value is not finite, ``std`` is negative, or ``truncate_std`` is
            not positive.
    """

    mean: float = 0.0
    std: float = 1.0
    truncate_std: float | None = None

    def __post_init__(self) -> None:
        _check_finite(self, "mean")
        _check_finite(self, "std", least=0)
        if self.truncate_std is not None and not self.truncate_std > 0:
            raise ValueError(
                f"NormalInit.truncate_std must be positive, got {self.truncate_std}"
            )


@dataclass(frozen=True)
class ConstantInit:
    """Initializes all weights of new rows to ``value``.

    Raises:
        ValueError: ``value`` is not finite.
    """

    value: float = 0.0

    def __post_init__(self) -> None:
        _check_finite(self, "value")


Initializer = UniformInit | NormalInit | ConstantInit


@dataclass(frozen=True)
class LRU:
    """Evicts the least recently used rows: the rows that no training step has looked up
    for the longest time.
    """


@dataclass(frozen=True)
class LFU:
    """Evicts the least frequently used rows.

    Among rows of the same frequency, the least recently used row is evicted first.

    Args:
        half_life_steps: The number of steps after which all frequencies are halved and
            rounded down, again and again. Default: None, which means that frequencies
            are never halved.
        count: What the frequency of a row counts. ``"steps"`` counts the training steps
            that look the row up. ``"occurrences"`` counts the occurrences of its id in
            the batches of these steps, over all features of the table. A bag that
            samples share through ``inverse_indices`` occurs once. A frequency stops at
            2**32 - 1. Default: ``"steps"``.

    Raises:
        TypeError, ValueError: ``half_life_steps`` is not an int, or is less than 1. Or
            ``count`` is another value.
    """

    half_life_steps: int | None = None
    count: Literal["steps", "occurrences"] = field(
        default="steps",
        metadata={"since": "0.3.0"},
    )

    __repr__ = set_fields

    def __post_init__(self) -> None:
        _check_int(self, 1, *_set_names(self, "half_life_steps"))
        if self.count not in ("steps", "occurrences"):
            raise ValueError(
                f"LFU.count must be 'steps' or 'occurrences', got {self.count!r}"
            )


@dataclass(frozen=True)
class Scored:
    """Evicts the rows with the lowest scores, which :meth:`Table.set_scores` or
    ``set_scores`` of a model sets.

    Among rows of the same score, the least recently used row is evicted first. A new
    row has no score. A row keeps its score in checkpoints, deltas, cold stores, and
    when it moves to another shard.

    Args:
        default: The score that a row without a score counts as: a finite number, or
            infinity. Default: infinity, so that a new row is not evicted before it has
            a score, unless no row with a score can be evicted. Rows that never get a
            score are then evicted last, and among themselves in the order of their last
            use. Give every row a score, or a finite default.

    Raises:
        TypeError, ValueError: ``default`` is not a number, is NaN or is minus infinity.
    """

    default: float = math.inf

    __repr__ = set_fields

    def __post_init__(self) -> None:
        if isinstance(self.default, bool) or not isinstance(self.default, int | float):
            raise TypeError(
                f"Scored.default must be a number, got {type(self.default).__name__}"
            )
        is_float32 = -MAX_SCORE <= self.default <= MAX_SCORE
        if not is_float32 and self.default != math.inf:
            raise ValueError(
                "Scored.default must be a float32 number or infinity, got"
                f" {self.default}"
            )


@dataclass(frozen=True)
class Expiry:
    """Removes the rows that no training step has looked up for more than ``steps``
    steps, or ``seconds`` seconds.

    Exactly one of the two is given. Seconds are those of the system's clock, or of the
    events that the table is trained on if ``torchrec_recstore.set_time`` sets their
    time.

    Args:
        steps: The number of training steps after which an unused row expires. The row
            is removed at most ``steps / 2`` steps later.
        seconds: The time in seconds after which an unused row expires. A training step
            removes the row at most ``seconds / 2`` later, if steps are made at least
            every ``seconds / 16``.
        max_jump_s: The longest time in seconds, forward or backward, between the time
            of the events and the next time that ``set_time`` accepts at once. A time
            that is further away is refused, unless ten calls in a row agree. A wrong
            time that is accepted lets rows expire too early by this time at most.
            Default: None, which means half of ``seconds``.

    Raises:
        TypeError: ``steps`` is not an int, or ``seconds`` or ``max_jump_s`` is not a
            number.
        ValueError: ``steps`` is less than 1, or ``seconds`` or ``max_jump_s`` is not
            positive and finite. Or both ``steps`` and ``seconds`` are given, or
            neither. Or ``max_jump_s`` is given without ``seconds``.
    """

    steps: int | None = None
    seconds: float | None = None
    max_jump_s: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise ValueError(
                f"Expiry needs either steps or seconds, got steps={self.steps},"
                f" seconds={self.seconds}"
            )
        if self.seconds is None:
            _check_int(self, 1, "steps")
            if self.max_jump_s is not None:
                raise ValueError(
                    "Expiry.max_jump_s needs seconds: steps are counted, and have no"
                    " time that can jump"
                )
        _check_positive(self, *_set_names(self, "seconds", "max_jump_s"))

    __repr__ = set_fields

    @property
    def microseconds(self) -> int:
        """``seconds`` in microseconds, at least 1; 0 without ``seconds``."""
        return 0 if self.seconds is None else _microseconds(self.seconds)

    @property
    def max_jump_microseconds(self) -> int:
        """``max_jump_s`` or its default in microseconds, at least 1; 0 without
        ``seconds``.
        """
        if self.max_jump_s is not None:
            return _microseconds(self.max_jump_s)
        return 0 if self.seconds is None else _microseconds(self.seconds / 2)


@dataclass(frozen=True)
class MinFrequency:
    """Admits an id, that is, creates its row, in the ``count``-th training step that
    looks the id up.

    If ``count`` is above 1, an update never creates a row. It drops the gradients of
    ids that have no row.

    Args:
        count: The number of training steps, from 1 to 255.
        counter_bytes: The memory, in bytes, in which each shard counts how often it has
            seen an id: a power of two from 2**10 to 2**34. It remembers the last 3 / 64
            ids for each byte, and up to twice as many. Default: 2**23 (8 MiB).

    Raises:
        TypeError, ValueError: An argument is not an int, or is out of range.
    """

    count: int
    counter_bytes: int = 2**23

    def __post_init__(self) -> None:
        check_int("MinFrequency.count", self.count, 1, 255)
        _check_int(self, 2**10, "counter_bytes")
        is_power_of_two = self.counter_bytes & (self.counter_bytes - 1) == 0
        if not is_power_of_two or self.counter_bytes > 2**34:
            raise ValueError(
                "MinFrequency.counter_bytes must be a power of two, at most 2**34, got"
                f" {self.counter_bytes}"
            )


@dataclass(frozen=True)
class SSDStore:
    """A cold store on a local SSD: evicted rows are stored in a file, and the place of
    each row in memory.

    Args:
        path: The path of a directory, which is created if it does not exist. Each shard
            of a table has its own subdirectory there.
        shared: The name of rows that stay there when the table is closed or its process
            is killed. The next table with the same table name, columns, data type and
            optimizer continues with them. They can be open in one process at a time.
            See docs/cold_stores.md. Default: None, which means that the rows are
            deleted when the table is closed.

    Raises:
        TypeError, ValueError: An argument is not a str, or is empty.
    """

    path: str
    shared: str | None = None

    def __post_init__(self) -> None:
        _check_str(self, "path", *_set_names(self, "shared"))


@dataclass(frozen=True)
class RocksDBStore:
    """A cold store on a local SSD: evicted rows are stored in RocksDB, through the
    package ``rocksdict``.

    Args:
        path: The path of a directory, which is created if it does not exist. Each shard
            of a table has its own subdirectory there.

    Raises:
        TypeError, ValueError: ``path`` is not a str, or is empty.
    """

    path: str

    def __post_init__(self) -> None:
        _check_str(self, "path")


@dataclass(frozen=True)
class RedisStore:
    """A cold store on a Redis or Valkey server or cluster, through the packages
    ``redis`` and ``hiredis``.

    Args:
        url: The URL of the server, with credentials and database, in the form that
            ``redis.from_url`` accepts: ``redis://``, ``rediss://`` (with TLS) or
            ``unix://``. For a cluster, the URL of one of its nodes, with the scheme
            ``redis+cluster://`` or ``rediss+cluster://``.
        retry_seconds: The time in seconds for which a failed call is repeated, with
            growing pauses, before it raises an error. Default: 30.

    Raises:
        TypeError: ``url`` is not a str.
        ValueError: ``url`` has an unknown scheme, or ``retry_seconds`` is negative or
            not finite.
    """

    url: str
    retry_seconds: float = 30.0

    def __post_init__(self) -> None:
        _check_str(self, "url")
        scheme = self.url.partition("://")[0]
        if scheme not in ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster"):
            raise ValueError(
                "RedisStore.url must begin with redis://, rediss://, unix://,"
                f" redis+cluster:// or rediss+cluster://, got {self.public_url!r}"
            )
        _check_finite(self, "retry_seconds", least=0)

    @property
    def public_url(self) -> str:
        """The URL without credentials, for messages."""
        scheme, separator, location = self.url.partition("://")
        plain, _, query = location.partition("?")
        # A password may contain an unescaped "@" or "/", so everything up to the last
        # "@" is left out. If it contains an unescaped "?", no part of the URL is known
        # to be free of it.
        address = "..." if "@" in query else plain.rpartition("@")[2]
        return f"{scheme}{separator}{address}"

    def __repr__(self) -> str:
        return (
            f"RedisStore(url={self.public_url!r}, retry_seconds={self.retry_seconds})"
        )


@dataclass(frozen=True)
class ServerStore:
    """A cold store on RecStore's parameter servers (``recstore serve``), through the
    package ``grpcio``.

    Args:
        servers: The addresses of the servers, separated by commas:
            ``"host:port,host:port"``. Their order decides which server stores an id.
        shared: The name of the shared rows. Other tables with the same table name,
            columns, data type and optimizer read and write these rows too, in this job
            or in others. The rows stay on the servers when the table is closed. See
            docs/cold_stores.md. Default: None, which means that the rows belong to this
            table alone and are deleted when it is closed.
        token, tls_ca, timeout_s: See :class:`Servers`.

    Raises:
        TypeError, ValueError: An argument is invalid. The message names the argument.
    """

    servers: str
    shared: str | None = None
    token: str | None = field(default=None, repr=False)
    tls_ca: str | None = None
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        _check_str(
            self,
            "servers",
            *_set_names(self, "shared", "token", "tls_ca"),
        )
        checked_addresses(self.addresses, "ServerStore.servers")
        check_token(self.token, "ServerStore.token")
        _check_positive(self, "timeout_s")

    @property
    def addresses(self) -> tuple[str, ...]:
        """The address of each server, as ``host:port``."""
        return tuple(address.strip() for address in self.servers.split(","))


@dataclass(frozen=True)
class Servers:
    """The parameter servers (``recstore serve``) that own the rows of a table, through
    the package ``grpcio``.

    Args:
        addresses: The address of each server, as ``"host:port"``. All models and
            clients name all servers of the set, in any order.
        staleness: The number of updates that may be in progress while rows are read.
            With 0, each backward waits for its update. Default: 0.
        token: The token that the servers require. Default: None, for servers without a
            token.
        tls_ca: The path of a PEM file with the certificates of the authority that
            signed the servers' certificates. Connections are then encrypted. Default:
            None, which means no encryption.
        tls_cert: The path of a PEM file with the client's certificate, if the servers
            require one. Default: None.
        tls_key: The path of a PEM file with the private key of ``tls_cert``. Default:
            None.
        timeout_s: The longest time in seconds that a call may take, with all of its
            repetitions. Default: 30.

    Raises:
        TypeError, ValueError: An argument is invalid. The message names the argument.
    """

    addresses: Sequence[str]
    staleness: int = 0
    token: str | None = field(default=None, repr=False)
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    timeout_s: float = 30.0

    __repr__ = set_fields

    def __post_init__(self) -> None:
        addresses = checked_addresses(self.addresses, "Servers.addresses")
        # A tuple, so that the options can be compared and hashed.
        object.__setattr__(self, "addresses", addresses)
        _check_int(self, 0, "staleness")
        check_token(self.token, "Servers.token")
        _check_str(self, *_set_names(self, "tls_ca", "tls_cert", "tls_key"))
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError(
                "Servers.tls_cert and Servers.tls_key must be set together"
            )
        if self.tls_cert is not None and self.tls_ca is None:
            raise ValueError("Servers.tls_cert needs tls_ca")
        _check_positive(self, "timeout_s")


def is_shared(cold_store: Hashable | None) -> bool:
    """Returns whether other tables use the rows of a cold store too: its options have a
    ``shared`` that is set.
    """
    return bool(getattr(cold_store, "shared", None))


@dataclass(frozen=True)
class TableOptions:
    """Options of one table: how it creates, reads, evicts and stores rows.

    By default a table has no limit, and keeps every row that it has created.

    Args:
        initializer: The distribution of the weights of new rows. Default: None, which
            means the config's ``weight_init_min`` and ``weight_init_max`` if the user
            set them, otherwise uniform in ``+-sqrt(1/n)`` (see
            :func:`default_initializer`).
        seed: The seed of new rows, a signed integer of 64 bits. The weights of a new
            row depend on the seed, the table's name, the id and the global column, and
            on nothing else. Default: 0.
        expected_rows: The number of rows that the planner expects in memory, over all
            ranks. Default: None, which means ``num_embeddings``.
        max_rows: The largest number of rows in memory, over all ranks. If the table is
            sharded by rows, each shard may hold an equal part. A table with neither
            ``eviction`` nor ``cold_store`` raises an error when it needs more rows.
            Default: None, which means no limit.
        eviction: The policy that selects the rows to evict when the table is full:
            :class:`LRU`, :class:`LFU` or :class:`Scored`. It needs ``max_rows``.
            Default: None, which means :class:`LRU` if there is a ``cold_store``,
            otherwise no eviction.
        expiry: The rule by which unused rows are removed. Default: None, which means
            that rows do not expire.
        admission: The rule by which an id without a row gets one. Default: None, which
            means that the first training step that looks an id up creates its row.
        cold_store: The store to which evicted rows are moved, and from which the next
            lookup brings them back: :class:`SSDStore`, :class:`RocksDBStore`,
            :class:`RedisStore`, :class:`ServerStore`, or options of a type that has
            been registered with ``torchrec_recstore.store.open_cold_store``. It needs
            ``max_rows``. Default: None, which means that evicted rows are lost.
        routing: The way in which row-wise sharding spreads ids over ranks. ``"block"``
            splits the range of ``num_embeddings`` into blocks, as TorchRec does.
            ``"hash"`` spreads any pattern of ids evenly. Other sharding types ignore
            it. Default: ``"block"``.
        missing: The row that an evaluation lookup returns for an id without a row:
            ``"zeros"``, or the id's initial row (``"init"``). Default: ``"zeros"``.
        nonfinite: What an update does with gradients that are NaN or infinite.
            ``"pass"`` applies them, as TorchRec does: the row is NaN from then on.
            ``"skip"`` leaves each row as it is whose summed gradient is not finite, and
            counts it in ``TableStats.nonfinite``; a shard by columns decides by its
            columns. ``"raise"`` raises ValueError before a row of the table (on
            servers: of the server) changes, and skips rows whose sum overflows.
            Default: ``"pass"``.
        frozen: Whether the rows are only read. A lookup then never makes or updates a
            row, also in training, changes neither clocks nor stamps, and reads an id
            without a row as ``missing`` says. Rows are loaded, inserted and removed as
            in any table. A frozen table keeps no optimizer state. Default: False.
        servers: The :class:`Servers` that own the rows of the table, for tables of a
            ``RecStoreSharder``. The servers apply the other options, and select the
            cold store themselves. Default: None, which means that the rows are on the
            ranks.
        left_ids: The number of ids that each shard can record of rows that leave the
            table, for ``left_ids``. The record takes up to 24 bytes for each of these
            ids. Default: None, which means that nothing is recorded.
        device_rows: The number of rows, over all ranks, that are also in the memory of
            the accelerator that the model is on, where they are looked up and updated.
            A module without sharding uses the accelerator of its batches. Frequent rows
            stay there. If the table is sharded by rows, each shard has an equal part.
            The host has all rows, as without this option, and the results are the same,
            to the bit. A model on the CPU ignores the option, and checkpoints do not
            contain it. Default: None, which means the number that ``RecStorePlanner``
            has chosen, and 0 without its choice.

    Raises:
        TypeError, ValueError: A field is invalid. The message names the field.
    """

    initializer: Initializer | None = None
    seed: int = 0
    expected_rows: int | None = None
    max_rows: int | None = None
    eviction: LRU | LFU | Scored | None = None
    expiry: Expiry | None = None
    admission: MinFrequency | None = None
    cold_store: Hashable | None = None
    routing: Literal["block", "hash"] = "block"
    missing: Literal["zeros", "init"] = "zeros"
    nonfinite: Literal["pass", "skip", "raise"] = field(
        default="pass",
        metadata={"since": "0.2.0"},
    )
    servers: Servers | None = None
    frozen: bool = field(default=False, metadata={"since": "0.2.0"})
    left_ids: int | None = field(default=None, metadata={"since": "0.3.0"})
    device_rows: int | None = field(default=None, metadata={"since": "0.3.0"})

    __repr__ = set_fields

    def __post_init__(self) -> None:
        _check_int(self, -(2**63), "seed")
        if not isinstance(self.frozen, bool):
            raise TypeError(
                f"TableOptions.frozen must be a bool, got {type(self.frozen).__name__}"
            )
        _check_int(self, 1, *_set_names(self, "expected_rows", "max_rows"))
        self._check_types()
        for name in _set_names(self, "eviction", "cold_store"):
            if self.max_rows is None:
                raise ValueError(
                    f"TableOptions.{name} needs max_rows: an unbounded table evicts"
                    " nothing"
                )
        if self.expiry is not None and is_shared(self.cold_store):
            raise ValueError(
                "TableOptions.expiry cannot be used with a shared cold store: other"
                " jobs count other steps. Leave expiry out"
            )
        if self.left_ids is not None:
            check_int(
                "TableOptions.left_ids",
                self.left_ids,
                1,
                MAX_LEFT_IDS,
            )
        if self.device_rows is not None:
            check_int(
                "TableOptions.device_rows",
                self.device_rows,
                0,
                MAX_DEVICE_ROWS,
            )
        check_shared_rows(self)
        if not isinstance(self.cold_store, Hashable):
            raise TypeError(
                "TableOptions.cold_store must be hashable, got"
                f" {type(self.cold_store).__name__}"
            )
        self._check_choices()
        if self.servers is None:
            return
        if self.cold_store is not None:
            raise ValueError(
                "TableOptions.cold_store cannot be used with servers: each server"
                " chooses it, with recstore serve --cold-store"
            )
        reason = not_on_servers(self)
        if reason is not None:
            raise ValueError(f"TableOptions.{reason}")

    def _check_types(self) -> None:
        types: dict[str, tuple[type, ...]] = {
            "initializer": (UniformInit, NormalInit, ConstantInit),
            "expiry": (Expiry,),
            "admission": (MinFrequency,),
            "servers": (Servers,),
            "eviction": (LRU, LFU, Scored),
        }
        for name in _set_names(self, *types):
            value = getattr(self, name)
            if not isinstance(value, types[name]):
                type_names = " or ".join(kind.__name__ for kind in types[name])
                raise TypeError(
                    f"TableOptions.{name} must be {type_names},"
                    f" got {type(value).__name__}"
                )

    def _check_choices(self) -> None:
        choices = {
            "routing": ("block", "hash"),
            "missing": ("zeros", "init"),
            "nonfinite": NONFINITE,
        }
        for name, values in choices.items():
            value = getattr(self, name)
            if value not in values:
                allowed = " or ".join(map(repr, values))
                raise ValueError(
                    f"TableOptions.{name} must be {allowed}, got {value!r}"
                )


def check_shared_rows(options: TableOptions) -> None:
    """Raises ValueError if an option cannot be used with a cold store that other jobs
    use.
    """
    if not is_shared(options.cold_store):
        return
    if isinstance(options.eviction, Scored):
        raise ValueError(
            "TableOptions.eviction=Scored() cannot be used with a shared cold store:"
            " other jobs give its rows other scores. Use LRU or LFU"
        )
    if options.left_ids is not None:
        raise ValueError(
            "TableOptions.left_ids cannot be used with a shared cold store: other jobs"
            " remove its rows, too. Leave left_ids out"
        )


def not_on_servers(options: TableOptions) -> str | None:
    """Returns why ``options`` cannot be those of a table on servers, beginning with the
    option; None if they can.
    """
    if isinstance(options.eviction, Scored):
        return (
            "eviction=Scored() cannot be used on servers, which have no call that sets"
            " scores: use LRU or LFU"
        )
    if isinstance(options.eviction, LFU) and options.eviction.count == "occurrences":
        return (
            'eviction=LFU(count="occurrences") cannot be used on servers, because'
            ' clients send each id of a batch once: use count="steps"'
        )
    if options.left_ids is not None:
        return (
            "left_ids cannot be used on servers, which keep no record of the rows that"
            " leave: leave it out"
        )
    if options.device_rows:
        return (
            "device_rows cannot be used on servers, whose rows are in the memory of"
            " their hosts: use device_rows=0"
        )
    return None


def shard_options(
    options: TableOptions,
    split: tuple[int, int] | None,
    table_name: str,
) -> TableOptions:
    """Returns the options of one shard, with its part of ``max_rows`` and
    ``device_rows``.

    ``split`` is the number of ranks among which the table's rows are split, and the
    index of this rank among them; None if they are not split. All parts are equal, but
    the first shards have one row more if ``max_rows`` cannot be divided evenly. Column
    shards of one row shard hold the same rows, so each has the row shard's whole part.
    The parts of ``device_rows`` are rounded up, and at most ``max_rows``.

    Raises ValueError, which names the table, if ``max_rows`` is less than the number of
    shards.
    """
    if split is None:
        return _with_fewer_device_rows(options)
    ranks, rank = split
    if options.device_rows is not None:
        options = replace(options, device_rows=ceil_div(options.device_rows, ranks))
    if options.max_rows is None:
        return options
    rows, shards_with_one_more = divmod(options.max_rows, ranks)
    if rows == 0:
        raise ValueError(
            f"RecStore table {table_name!r}: max_rows={options.max_rows} is less than"
            f" the {ranks} shards that its rows are split into: set max_rows to {ranks}"
            " or more"
        )
    if rank < shards_with_one_more:
        rows += 1
    return _with_fewer_device_rows(replace(options, max_rows=rows))


def _with_fewer_device_rows(options: TableOptions) -> TableOptions:
    """Returns the options with at most ``max_rows`` device rows."""
    if options.device_rows is None:
        return options
    return replace(options, device_rows=device_rows_of(options))


def device_rows_of(options: TableOptions) -> int:
    """Returns the ``device_rows`` of a table, which are at most its ``max_rows``."""
    rows = options.device_rows or 0
    return rows if options.max_rows is None else min(rows, options.max_rows)


def resident_rows(options: TableOptions, num_embeddings: int | None) -> int:
    """Returns the number of rows that a table is expected to hold in memory, over all
    ranks.

    The number is ``expected_rows`` if it is set, otherwise ``num_embeddings``, which is
    None if there is no config. It is at most ``max_rows``. If ``max_rows`` is not set,
    ``num_embeddings`` counts as 2**20 at most.
    """
    if options.max_rows is None:
        return _expected_ids(options, num_embeddings)
    expected_rows = options.expected_rows or num_embeddings
    if expected_rows is None:
        return options.max_rows
    return min(expected_rows, options.max_rows)


def _expected_ids(options: TableOptions, num_embeddings: int | None) -> int:
    if options.expected_rows is not None:
        return options.expected_rows
    if num_embeddings is None:
        return MAX_INIT_ROWS
    return min(num_embeddings, MAX_INIT_ROWS)


def default_initializer(
    options: TableOptions,
    num_embeddings: int | None = None,
) -> Initializer:
    """Returns the table's initializer, or the default: uniform in ``+-sqrt(1/n)``.

    ``n`` is ``expected_rows`` if it is set, otherwise the config's ``num_embeddings``,
    and is never above 2**20, which None counts as. ``max_rows`` does not change ``n``,
    because a limit on memory must not change the model. Source:
    ``EmbeddingBagConfig.get_weight_init_max`` (torchrec 1.8.0), where ``n`` has no
    limit.
    """
    if options.initializer is not None:
        return options.initializer
    rows = min(_expected_ids(options, num_embeddings), MAX_INIT_ROWS)
    bound = math.sqrt(1.0 / rows)
    return UniformInit(-bound, bound)
