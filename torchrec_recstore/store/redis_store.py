from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import redis
import torch
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    TryAgainError,
)
from redis.retry import Retry
from torch import Tensor

from torchrec_recstore.network import Backoff
from torchrec_recstore.options import RedisStore
from torchrec_recstore.store.cold_store import (
    ID_BYTES,
    ColdStoreError,
    check_ids,
    check_rows,
    escaped_name,
    filled,
    id_bytes,
    ids_of,
    in_parts,
    join,
    new_run,
    split,
)

CLUSTER_GROUPS = 128
_COMMAND_KEYS = 1024
_COMMAND_BYTES = 2**20
_PIPELINE_BYTES = 2**24
_SCAN_COUNT = 4096
_TIMEOUT_S = 5.0
_CHECK_SECONDS = 10.0  # between questions for the server's eviction policy
_REFUSED = (AuthenticationError, AuthorizationError)
_PASSING = (
    redis.ConnectionError,
    redis.TimeoutError,
    AskError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    ReadOnlyError,
    RedisClusterException,
    TryAgainError,
)
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class RedisColdStore:
    """Rows as keys ``recstore:<name>:{<run>-<group>}<id>`` of a Redis or Valkey server or cluster.

    A group is the keys of one hash tag: they lie on one node, so that one ``MGET`` or ``MSET`` may name them together.
    A server has one group, a cluster ``CLUSTER_GROUPS``.

    Servers forget: they restart empty or from an old file, hand over to a replica that lags, evict. So each group has a
    version, a key that every write to the group raises, together with its rows where it puts some. Each read asks for
    it too. A version that is missing or lower than that of the last write means that rows have been lost, and
    that is an error; an id counts as missing where the version is right alone.

    No version tells that a single row has been evicted. So the server is asked for its eviction policy, and how many
    keys it has evicted, when the store is opened, after each failure and every ``_CHECK_SECONDS`` of use.
    """

    ascending_snapshots = False

    def __init__(self, options: RedisStore, *, name: str, row_bytes: int) -> None:
        """Asks the server whether it will keep the rows. Raises ColdStoreError."""
        self._options = options
        self._cluster = "+cluster" in options.url.partition("://")[0]
        self._row_bytes = row_bytes
        self._client: Any = None
        self._open = True
        self._next_check_s = 0.0  # of the policy; on time.monotonic()'s clock
        self._evicted: dict[str, int] = {}  # keys that each node had evicted at the last check, by the node's run
        self._prefix = f"recstore:{escaped_name(name)}:{{{new_run()}-"
        groups = CLUSTER_GROUPS if self._cluster else 1
        self._group_keys = [f"{self._prefix}{group:02x}}}".encode() for group in range(groups)]
        self._key_bytes = len(self._group_keys[0]) + ID_BYTES
        self._group_prefixes = join(self._group_keys, len(self._group_keys[0]))
        self._acknowledged = [0] * groups
        self._attempted = [0] * groups
        self._rows_a_command = max(1, min(_COMMAND_KEYS, _COMMAND_BYTES // row_bytes))
        self._rows_a_pipeline = max(1, _PIPELINE_BYTES // row_bytes)
        self._call(self._set_up)

    def get(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`ColdStore.get`."""
        check_ids(ids)
        self._check_open()
        parts = [self._get_part(part) for part in in_parts(ids, self._rows_a_pipeline)]
        found, rows = zip(*parts, strict=True)
        return torch.cat(found), torch.cat(rows)

    def put(self, ids: Tensor, rows: Tensor) -> None:
        """As :meth:`ColdStore.put`."""
        check_rows(ids, rows, self._row_bytes)
        self._check_open()
        for some_ids, some_rows in zip(
            in_parts(ids, self._rows_a_pipeline), in_parts(rows, self._rows_a_pipeline), strict=True
        ):
            batches, order = self._in_groups(some_ids)
            values = iter(split(some_rows if order is None else some_rows[order]))
            self._call(
                partial(self._write, [(group, keys, list(islice(values, len(keys)))) for group, keys in batches])
            )

    def delete(self, ids: Tensor) -> None:
        """As :meth:`ColdStore.delete`."""
        check_ids(ids)
        self._check_open()
        for part in in_parts(ids, self._rows_a_pipeline):
            self._call(partial(self._write, [(group, keys, None) for group, keys in self._in_groups(part)[0]]))

    def scan(self) -> Iterator[tuple[Tensor, Tensor]]:
        """As :meth:`ColdStore.scan`: first all ids, 8 bytes each, since the server's own scan may repeat some."""
        self._check_open()
        ids = self._call(self._scan_ids)
        self._call(partial(self._check_versions, range(len(self._group_keys))))
        return self._rows_of(ids)

    def close(self) -> None:
        """As :meth:`ColdStore.close`. A server that cannot be reached keeps the keys; this is logged."""
        if not self._open:
            return
        self._open = False
        try:
            for part in in_parts(self._scan_ids(), self._rows_a_pipeline):
                self._run([("UNLINK", *keys) for _, keys in self._in_groups(part)[0]])
            self._run([("UNLINK", key) for key in self._group_keys])
            self._client.close()
        except (RedisError, OSError) as error:
            _log.warning("%s: keys %s* may be left: %s", self, self._prefix, error)
        self._client = None

    def __str__(self) -> str:
        return f"cold store RedisStore({self._options.public_url!r})"

    def _error(self, what: str, reason: object) -> ColdStoreError:
        return ColdStoreError(f"{self} {what}: {reason}")

    def _check_open(self) -> None:
        if not self._open:
            raise self._error("is closed", "no call but close is allowed")

    # Talking to the server.

    def _call(self, action: Callable[[], _Result]) -> _Result:
        """Repeats what fails for a reason that may pass."""
        backoff = Backoff(self._options.retry_seconds)
        while True:
            try:
                if time.monotonic() >= self._next_check_s:
                    self._check_eviction()
                return action()
            except _REFUSED as error:
                raise self._error("refuses access", error) from error
            except _PASSING as error:
                self._next_check_s = 0.0  # a server that comes back may have other settings
                if backoff.left_s <= 0:
                    raise self._error(f"cannot be reached for {self._options.retry_seconds:g} s", error) from error
                backoff.pause()
            except RedisError as error:
                raise self._error("has failed", error) from error

    def _connected(self) -> Any:
        if self._client is None:
            self._client = _connect(self._options, self._cluster)
        return self._client

    def _run(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Sends commands together. Raises the first error among the answers, which names no key."""
        if not commands:
            return []
        pipeline = self._connected().pipeline(transaction=False)
        for command in commands:
            # Not pipeline.mget: that of a cluster's refuses what it cannot split, and these need no splitting.
            pipeline.execute_command(*command)
        answers: list[Any] = pipeline.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _set_up(self) -> None:
        if self._connected().get_encoder().decode_responses:
            raise self._error("cannot be used", "the url must not ask for decode_responses")
        self._run([("SET", key, b"0") for key in self._group_keys])

    def _check_eviction(self) -> None:
        """Raises ColdStoreError where the server may evict rows, or may have evicted some since the last check."""
        client = self._connected()
        try:
            if self._cluster:
                answer = client.info(target_nodes=redis.RedisCluster.PRIMARIES)
                nodes = [answer] if "used_memory" in answer else list(answer.values())
            else:
                nodes = [client.info()]
        except redis.ResponseError:  # not allowed, or not known
            nodes = []
        evicted: dict[str, int] = {}
        for node in nodes:
            run, policy = str(node.get("run_id", "")), str(node.get("maxmemory_policy", ""))
            evicted[run] = int(node.get("evicted_keys", 0))
            gone = evicted[run] - self._evicted.get(run, evicted[run])
            if gone > 0 and not policy.startswith("volatile-"):  # that policy takes keys with a time to live: no rows
                raise self._error(
                    "has lost its rows",
                    f"it evicted {gone} keys under another maxmemory-policy than noeviction; set that, close the table "
                    "and load the last checkpoint",
                )
            if int(node.get("maxmemory", 0)) and policy.startswith("allkeys-"):
                raise self._error("would lose rows", f"its maxmemory-policy is {policy}; it must be noeviction")
        self._evicted = evicted
        self._next_check_s = time.monotonic() + _CHECK_SECONDS

    # Keys and versions.

    def _in_groups(self, ids: Tensor) -> tuple[list[tuple[int, list[bytes]]], Tensor | None]:
        """The keys of ids, command by command, each with its group, and the order that they are in, None for as is."""
        order = None
        groups = torch.zeros_like(ids)
        if len(self._group_keys) > 1:
            # The upper bits of a multiplication depend on all bits of the id; & makes the shift one without a sign.
            groups = ((ids * -0x61C8864680B583EB) >> 40) & (len(self._group_keys) - 1)
            groups, order = groups.sort(stable=True)
            ids = ids[order]
        keys = split(torch.cat([self._group_prefixes[groups], id_bytes(ids)], dim=1))
        batches = []
        begin = 0
        for group, count in enumerate(groups.bincount(minlength=len(self._group_keys)).tolist()):
            end = begin + count
            for at in range(begin, end, self._rows_a_command):
                batches.append((group, keys[at : min(at + self._rows_a_command, end)]))
            begin = end
        return batches, order

    def _check_version(self, group: int, answer: bytes | None) -> None:
        if answer is None:
            raise self._error("has lost its rows", "restarted without them, or they were flushed or evicted")
        if not self._acknowledged[group] <= int(answer) <= self._attempted[group]:
            raise self._error(
                "has lost its last writes", "restarted from older data, or a replica took over that lagged behind"
            )

    def _check_versions(self, groups: Iterable[int]) -> None:
        numbers = list(groups)
        for group, answer in zip(numbers, self._run([("GET", self._group_keys[g]) for g in numbers]), strict=True):
            self._check_version(group, answer)

    def _next_version(self, group: int) -> bytes:
        self._attempted[group] += 1
        return b"%d" % self._attempted[group]

    # Rows.

    def _write(self, writes: Sequence[tuple[int, list[bytes], list[bytes] | None]]) -> None:
        """Puts values at keys, or deletes the keys where there are none."""
        groups = {group for group, _, _ in writes}
        self._check_versions(groups)  # before: the write's own version would hide that the server has lost rows
        commands: list[tuple[Any, ...]] = []
        for group, keys, values in writes:
            version = (self._group_keys[group], self._next_version(group))
            if values is None:
                commands += [("UNLINK", *keys), ("SET", *version)]
            else:
                commands.append(("MSET", *(x for pair in zip(keys, values, strict=True) for x in pair), *version))
        self._run(commands)
        for group in groups:
            self._acknowledged[group] = self._attempted[group]

    def _get_part(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        batches, order = self._in_groups(ids)
        commands: list[tuple[Any, ...]] = [("MGET", self._group_keys[group], *keys) for group, keys in batches]
        values: list[bytes | None] = []
        for (group, _), (version, *some) in zip(batches, self._call(partial(self._run, commands)), strict=True):
            self._check_version(group, version)
            values += some
        found = filled(values)
        rows = join(filter(None, values), self._row_bytes)
        if order is None:
            return found, rows
        back = order[found].argsort()
        return torch.empty_like(found).scatter_(0, order, found), rows[back]

    def _scan_ids(self) -> Tensor:
        """Ascending, each once."""
        keys: list[bytes] = []
        parts = [torch.empty(0, dtype=torch.int64)]
        for key in self._connected().scan_iter(match=f"{self._prefix}*", count=_SCAN_COUNT):
            if len(key) == self._key_bytes:
                keys.append(key)
            if len(keys) == 2**16:
                parts.append(ids_of(join(keys, self._key_bytes)[:, -ID_BYTES:]))
                keys.clear()
        parts.append(ids_of(join(keys, self._key_bytes)[:, -ID_BYTES:]))
        ids: Tensor = torch.unique(torch.cat(parts))
        return ids

    def _rows_of(self, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for part in in_parts(ids, self._rows_a_pipeline):
            self._check_open()
            found, rows = self._get_part(part)
            if not found.all():
                raise self._error("has changed while it was scanned", f"{int((~found).sum())} rows are gone")
            if len(part):
                yield part, rows


def _connect(options: RedisStore, cluster: bool) -> Any:
    # No retries of its own: the store's _call does that, with an end. What the URL says of timeouts goes first.
    arguments: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": _TIMEOUT_S,
        "socket_connect_timeout": _TIMEOUT_S,
    }
    try:
        if cluster:
            return redis.RedisCluster.from_url(options.url.replace("+cluster", "", 1), **arguments)
        return redis.Redis.from_url(options.url, **arguments)
    except ValueError:  # its message may hold a piece of the password
        raise ColdStoreError(f"cold store RedisStore({options.public_url!r}): the url cannot be read") from None
