"""The cold store on a Redis or Valkey server or cluster, through ``redis``."""

from __future__ import annotations

import gc
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import redis
import torch
from redis import exceptions as errors
from redis.backoff import NoBackoff
from redis.retry import Retry
from torch import Tensor

from torchrec_recstore.network import Backoff
from torchrec_recstore.options import RedisStore
from torchrec_recstore.store.arguments import check_ids, check_rows
from torchrec_recstore.store.cold_store import (
    ID_BYTES,
    ColdStoreError,
    escaped_name,
    found_rows,
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
_CHECK_SECONDS = 10.0  # the time between two checks of the server's eviction policy
_REFUSED = (errors.AuthenticationError, errors.AuthorizationError)
_UNREACHABLE = (
    errors.ConnectionError,
    errors.TimeoutError,
    errors.RedisClusterException,
)
_MOVED = (errors.MovedError, errors.AskError, errors.TryAgainError)
_PASSING = (
    *_UNREACHABLE,
    *_MOVED,
    errors.ClusterDownError,
    errors.MasterDownError,
    errors.ReadOnlyError,
)
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class _GroupWrite(NamedTuple):
    """Keys of a group that one command writes or deletes."""

    group: int
    keys: list[bytes]
    values: list[bytes] | None
    """The values of the keys. None: the keys are deleted."""


class RedisColdStore:
    """A cold store on a Redis or Valkey server or cluster.

    Keys are ``recstore:<name>:{<run>-<group>}<id>``.

    A group has the keys with the same hash tag. They are on one node, so that one
    ``MGET`` or ``MSET`` may read or write several of them. A server has one group, a
    cluster ``CLUSTER_GROUPS``.

    A server can lose rows: it restarts empty or from an old file, fails over to a
    replica that lags, or evicts keys. Each group therefore has a version, a key that
    every write to the group increments. A put writes it in the same command as the
    rows, and each read also reads it. If it is missing, or lower than at the last
    write, the call raises an error. An id counts as missing only if the version is
    right.

    A version does not show that a single row has been evicted. The store therefore
    checks the server's eviction policy and its number of evicted keys when the store is
    opened, after each failure, and every ``_CHECK_SECONDS`` of use.
    """

    ascending_snapshots = False

    def __init__(
        self,
        options: RedisStore,
        *,
        name: str,
        row_bytes: int,
    ) -> None:
        """Connects to the server, and raises ColdStoreError if it cannot be reached,
        refuses access, or evicts rows.
        """
        self._options = options
        self._cluster = "+cluster" in options.url.partition("://")[0]
        self._row_bytes = row_bytes
        self._client: Any = None
        self._open = True
        # the time of the next check of the eviction policy, by time.monotonic()
        self._next_check_s = 0.0
        # each node's number of evicted keys at the last check, by its run_id
        self._evicted: dict[str, int] = {}

        self._prefix = f"recstore:{escaped_name(name)}:{{{new_run()}-"
        groups = CLUSTER_GROUPS if self._cluster else 1
        self._group_keys: list[bytes] = []
        for group in range(groups):
            key = f"{self._prefix}{group:02x}}}"
            self._group_keys.append(key.encode())
        group_key_bytes = len(self._group_keys[0])
        self._key_bytes = group_key_bytes + ID_BYTES
        self._group_prefixes = join(self._group_keys, group_key_bytes)

        self._acknowledged = [0] * groups
        self._attempted = [0] * groups
        rows_of_command_bytes = _COMMAND_BYTES // row_bytes
        self._rows_a_command = max(1, min(_COMMAND_KEYS, rows_of_command_bytes))
        self._rows_a_pipeline = max(1, _PIPELINE_BYTES // row_bytes)
        self._call(self._set_up)

    def get(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`ColdStore.get`."""
        check_ids(ids)
        self._check_open()
        has_row_parts = []
        row_parts = []
        for part in in_parts(ids, self._rows_a_pipeline):
            has_row, rows = self._get_part(part)
            has_row_parts.append(has_row)
            row_parts.append(rows)
        return torch.cat(has_row_parts), torch.cat(row_parts)

    def put(self, ids: Tensor, rows: Tensor) -> None:
        """See :meth:`ColdStore.put`."""
        check_ids(ids)
        check_rows(
            rows,
            "rows",
            (len(ids), self._row_bytes),
            [torch.uint8],
        )
        self._check_open()
        parts_of_ids = in_parts(ids, self._rows_a_pipeline)
        parts_of_rows = in_parts(rows, self._rows_a_pipeline)
        for part_ids, part_rows in zip(parts_of_ids, parts_of_rows, strict=True):
            batches, order = self._in_groups(part_ids)
            if order is not None:
                part_rows = part_rows[order]
            values = iter(split(part_rows))
            writes = []
            for group, keys in batches:
                values_of_keys = list(islice(values, len(keys)))
                writes.append(_GroupWrite(group, keys, values_of_keys))
            self._call(partial(self._write, writes))

    def delete(self, ids: Tensor) -> None:
        """See :meth:`ColdStore.delete`."""
        check_ids(ids)
        self._check_open()
        for part in in_parts(ids, self._rows_a_pipeline):
            batches, _ = self._in_groups(part)
            writes = [_GroupWrite(group, keys, None) for group, keys in batches]
            self._call(partial(self._write, writes))

    def scan(self) -> Iterator[tuple[Tensor, Tensor]]:
        """See :meth:`ColdStore.scan`.

        It first reads all ids, 8 bytes each, because the server may repeat ids.
        """
        self._check_open()
        ids = self._call(self._scan_ids)
        all_groups = range(len(self._group_keys))
        self._call(partial(self._check_versions, all_groups))
        return self._rows_of(ids)

    def close(self) -> None:
        """See :meth:`ColdStore.close`.

        A server that cannot be reached keeps the keys, and a warning is logged.
        """
        if not self._open:
            return
        self._open = False
        try:
            ids = self._scan_ids()
            for part in in_parts(ids, self._rows_a_pipeline):
                batches, _ = self._in_groups(part)
                self._run([("UNLINK", *keys) for _, keys in batches])
            self._run([("UNLINK", key) for key in self._group_keys])
            self._client.close()
        except (redis.RedisError, OSError) as error:
            _log.warning("%s: keys %s* may be left: %s", self, self._prefix, error)
        self._client = None

    def __str__(self) -> str:
        return f"cold store RedisStore({self._options.public_url!r})"

    def _error(self, fault: str, reason: object) -> ColdStoreError:
        return ColdStoreError(f"{self} {fault}: {reason}")

    def _check_open(self) -> None:
        if not self._open:
            raise self._error("is closed", "only close() may be called")

    def _call(self, action: Callable[[], _Result]) -> _Result:
        """Calls ``action``.

        If it fails for a reason that may pass, repeats it for at most
        ``retry_seconds``.
        """
        backoff = Backoff(self._options.retry_seconds)
        failed = False
        while True:
            try:
                if time.monotonic() >= self._next_check_s:
                    self._check_eviction()
                result = action()
                if failed:
                    # redis-py keeps errors in reference cycles, which keep the frames
                    # of all callers alive, and so the outputs of a training step, whose
                    # rows cannot be evicted.
                    gc.collect()
                return result
            except _REFUSED as error:
                raise self._error("refuses access", error) from error
            except _PASSING as error:
                failed = True
                # a server that has restarted may have other settings
                self._next_check_s = 0.0
                if backoff.left_s <= 0:
                    tried_s = self._options.retry_seconds
                    fault = f"cannot be reached for {tried_s:g} s"
                    raise self._error(fault, error) from error
                backoff.pause()
            except redis.RedisError as error:
                raise self._error("has failed", error) from error

    def _connected(self) -> Any:
        if self._client is None:
            kind: Any = redis.Redis
            url = self._options.url
            if self._cluster:
                kind = redis.RedisCluster
                url = url.replace("+cluster", "", 1)
            try:
                # The client does not retry, because _call does, with a limit. Timeouts
                # in the URL override these.
                self._client = kind.from_url(
                    url,
                    retry=Retry(NoBackoff(), 0),
                    socket_timeout=_TIMEOUT_S,
                    socket_connect_timeout=_TIMEOUT_S,
                )
            except ValueError:
                # The message of the error may contain a part of the password.
                raise ColdStoreError(f"{self}: the url cannot be parsed") from None
        return self._client

    def _run(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Sends commands in one pipeline.

        Raises the first error among the answers. The error does not name a key.
        """
        if not commands:
            return []
        pipeline = self._connected().pipeline(transaction=False)
        for command in commands:
            # A cluster's pipeline.mget refuses commands with several keys, although
            # these keys are on one node.
            pipeline.execute_command(*command)
        answers: list[Any] = pipeline.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _set_up(self) -> None:
        encoder = self._connected().get_encoder()
        if encoder.decode_responses:
            raise self._error("cannot be used", "the url must not set decode_responses")
        self._run([("SET", key, b"0") for key in self._group_keys])

    def _check_eviction(self) -> None:
        """Raises ColdStoreError if the server may evict rows, or may have evicted rows
        since the last check.
        """
        evicted: dict[str, int] = {}
        for node in self._nodes():
            run = str(node.get("run_id", ""))
            policy = str(node.get("maxmemory_policy", ""))
            limit_bytes = int(node.get("maxmemory", 0))
            evicted_keys = int(node.get("evicted_keys", 0))
            evicted_before = self._evicted.get(run, evicted_keys)
            new_evicted = evicted_keys - evicted_before
            evicted[run] = evicted_keys
            # A volatile policy evicts only keys with an expiry time, and the keys of
            # rows have none.
            if new_evicted > 0 and not policy.startswith("volatile-"):
                raise self._error(
                    "has lost its rows",
                    f"it evicted {new_evicted} keys because its maxmemory-policy was not"
                    " noeviction; set maxmemory-policy to noeviction, close the table"
                    " and load the last checkpoint",
                )
            if limit_bytes and policy.startswith("allkeys-"):
                raise self._error(
                    "would lose rows",
                    f"its maxmemory-policy is {policy}; it must be noeviction",
                )
        self._evicted = evicted
        self._next_check_s = time.monotonic() + _CHECK_SECONDS

    def _nodes(self) -> list[dict[str, Any]]:
        """Returns what each node says of itself.

        Empty if the user may not call INFO, or the server does not have it.
        """
        client = self._connected()
        try:
            if not self._cluster:
                return [client.info()]
            answer = client.info(target_nodes=redis.RedisCluster.PRIMARIES)
        except redis.ResponseError:
            return []
        # a cluster of one node answers without a name of it
        if "used_memory" in answer:
            return [answer]
        return list(answer.values())

    def _in_groups(
        self, ids: Tensor
    ) -> tuple[list[tuple[int, list[bytes]]], Tensor | None]:
        """Splits the keys of ids into groups, and each group into commands.

        Returns the group and the keys of each command, and the order of the ids in all
        commands, (N,) int64, or None if it is the order of ``ids``.
        """
        order = None
        groups = torch.zeros_like(ids)
        group_count = len(self._group_keys)
        if group_count > 1:
            # The upper bits of a product depend on all bits of the id. The & removes
            # the sign bits of the shift.
            hashes = ids * -0x61C8864680B583EB
            groups = (hashes >> 40) & (group_count - 1)
            groups, order = groups.sort(stable=True)
            ids = ids[order]

        prefixes = self._group_prefixes[groups]
        encoded_keys = torch.cat([prefixes, id_bytes(ids)], dim=1)
        keys = split(encoded_keys)
        counts = groups.bincount(minlength=group_count).tolist()
        batches = []
        group_begin = 0
        for group, count in enumerate(counts):
            group_end = group_begin + count
            for begin in range(group_begin, group_end, self._rows_a_command):
                end = min(begin + self._rows_a_command, group_end)
                batches.append((group, keys[begin:end]))
            group_begin = group_end
        return batches, order

    def _check_version(self, group: int, answer: bytes | None) -> None:
        if answer is None:
            raise self._error(
                "has lost its rows",
                "it restarted without them, or they were flushed or evicted",
            )
        oldest = self._acknowledged[group]
        newest = self._attempted[group]
        if not oldest <= int(answer) <= newest:
            raise self._error(
                "has lost its last writes",
                "it restarted from older data, or a replica took over that lagged"
                " behind",
            )

    def _check_versions(self, groups: Sequence[int]) -> None:
        commands = [("GET", self._group_keys[group]) for group in groups]
        answers = self._run(commands)
        for group, answer in zip(groups, answers, strict=True):
            self._check_version(group, answer)

    def _write(self, writes: Sequence[_GroupWrite]) -> None:
        """Writes or deletes keys of groups, and their versions."""
        groups = list({write.group for write in writes})
        # before the write, because the new version would hide that rows have been lost
        self._check_versions(groups)
        commands: list[tuple[Any, ...]] = []
        for group, keys, values in writes:
            self._attempted[group] += 1
            version = b"%d" % self._attempted[group]
            version_key = self._group_keys[group]
            if values is None:
                commands.append(("UNLINK", *keys))
                commands.append(("SET", version_key, version))
            else:
                pairs = zip(keys, values, strict=True)
                keys_and_values = itertools.chain(*pairs)
                commands.append(("MSET", *keys_and_values, version_key, version))
        self._run(commands)
        for group in groups:
            self._acknowledged[group] = self._attempted[group]

    def _get_part(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        batches, order = self._in_groups(ids)
        commands: list[tuple[Any, ...]] = []
        for group, keys in batches:
            commands.append(("MGET", self._group_keys[group], *keys))
        answers = self._call(partial(self._run, commands))

        values: list[bytes | None] = []
        for (group, _), answer in zip(batches, answers, strict=True):
            version, *batch_values = answer
            self._check_version(group, version)
            values += batch_values
        has_row, rows = found_rows(values, self._row_bytes)
        if order is None:
            return has_row, rows

        # from the order of the groups to that of the ids
        has_row_in_order = torch.empty_like(has_row)
        has_row_in_order.scatter_(0, order, has_row)
        positions = order[has_row]
        rows_in_order = rows[positions.argsort()]
        return has_row_in_order, rows_in_order

    def _scan_ids(self) -> Tensor:
        """Returns the ids of all rows on the server: (N,) int64, ascending."""
        scan = self._connected().scan_iter(match=f"{self._prefix}*", count=_SCAN_COUNT)
        keys = (key for key in scan if len(key) == self._key_bytes)
        parts = [torch.empty(0, dtype=torch.int64)]
        while True:
            part_keys = list(islice(keys, 2**16))
            if not part_keys:
                break
            encoded_keys = join(part_keys, self._key_bytes)
            parts.append(ids_of(encoded_keys[:, -ID_BYTES:]))
        ids: Tensor = torch.unique(torch.cat(parts))
        return ids

    def _rows_of(self, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for part in in_parts(ids, self._rows_a_pipeline):
            self._check_open()
            has_row, rows = self._get_part(part)
            if not has_row.all():
                missing = int((~has_row).sum())
                raise self._error(
                    "has changed while it was scanned",
                    f"{missing} rows are gone",
                )
            if len(part):
                yield part, rows
