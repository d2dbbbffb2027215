"""A follower of a publisher has the rows of a full export of the same moment, to the
bit.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    KeyedTensor,
)

from torchrec_recstore.checkpoint import async_save
from torchrec_recstore.inference import (
    DeltaPublisher,
    Follower,
    export_for_inference,
    follow,
)
from torchrec_recstore.modules import (
    RecStoreEmbeddingBag,
    RecStoreEmbeddingBagCollection,
)
from torchrec_recstore.options import LRU, TableOptions
from torchrec_recstore.sharders.gather import all_gathered
from torchrec_recstore.utils import RecStoreWarning
from torchrec_recstore_serving.export.opening import is_hashed
from torchrec_recstore_serving.publish import publisher as publisher_module
from torchrec_recstore_serving.publish.destinations import publications_at
from torchrec_recstore_serving.publish.publications import FULL

from ...checkpoint.models import batch as sharded_batch
from ...checkpoint.models import recstore
from ...distributed.workers import run_on_ranks
from ...redis_server import RedisServer, needs_redis


class Clicks(nn.Module):
    """A table with a bound, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = RecStoreEmbeddingBag(
            100,
            8,
            name="t",
            lr=0.3,
            mode="sum",
            options=TableOptions(max_rows=60, eviction=LRU()),
        )
        self.over = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, L) -> (B, 1)."""
        out: Tensor = self.over(self.bag(ids))
        return out


def assert_follows(follower: Follower, model: nn.Module, folder: Path) -> None:
    """The follower's model is equal to a full export of the model."""
    export_for_inference(model, folder / "full.pt", index="hash")
    one, other = follower.model, torch.jit.load(folder / "full.pt")
    assert follower.version == one.recstore_version() == other.recstore_version()
    assert torch.equal(one.recstore_ids("t"), other.recstore_ids("t"))
    assert torch.equal(one.recstore_rows("t"), other.recstore_rows("t"))
    some = torch.randint(-50, 300, (6, 4))
    assert torch.equal(one(some), other(some))


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def publish(publisher: DeltaPublisher) -> None:
    """Publishes the model as it is, and waits until the publication is complete."""
    publisher.step()
    writer = publisher._writer
    assert writer is not None
    writer.wait()
    writer.raise_error()


def change(model: nn.Module, step: int) -> None:
    """Updates rows, makes new rows for which other rows are evicted, and changes a
    dense parameter.
    """
    model.train()
    model(torch.arange(-10, 10).view(5, 4)).sum().backward()
    model(torch.arange(100, 140).view(10, 4) + 50 * step).sum().backward()
    with torch.no_grad():
        model.eval().over.weight += 1


def trained() -> nn.Module:
    model = Clicks()
    change(model, -1)
    return model


@pytest.mark.slow
def test_followers_that_begin_at_any_time(place: str, tmp_path: Path) -> None:
    model = trained()
    with (
        DeltaPublisher(model, place, every_s=0, full_every_s=1e6) as publisher,
        Follower(place) as early,
    ):
        assert not early.poll()
        with pytest.raises(RuntimeError, match="no full export has been loaded yet"):
            early.model  # noqa: B018
        assert early.seconds_behind == float("inf")
        for step in range(3):
            publish(publisher)
            change(model, step)
            before = early.version
            assert early.poll()
            assert early.version != before
        assert early.versions_behind == 0
        publish(publisher)
        assert early.versions_behind == 0, "it has not looked yet"
        with Follower(place) as late:
            assert late.poll()
            assert early.poll()
            for follower in (early, late):
                assert_follows(follower, model, tmp_path)
                state = follower.state
                assert (
                    state.number,
                    state.newest,
                    state.fulls_loaded,
                    state.deltas_applied,
                ) == (4, 4, 1, 3)
                assert (state.versions_behind, state.problem) == (0, None)
                assert not follower.poll()
            change(model, 9)
    # The end of the block has published the last change.
    with follow(place) as last:
        assert_follows(last, model, tmp_path)
        assert last.state.number == 5
        assert 0 <= last.seconds_behind < 3600


def test_a_model_that_does_not_change(place: str) -> None:
    """Only the moment is published, so that the follower knows that its rows are not
    old.
    """
    model = trained()
    with (
        DeltaPublisher(model, place, every_s=0, full_every_s=1e6) as publisher,
        Follower(place) as follower,
    ):
        publish(publisher)
        follower.poll()
        time.sleep(0.2)
        assert follower.seconds_behind >= 0.2
        begin = time.time()
        publish(publisher)
        assert not follower.poll()
        assert follower.seconds_behind <= time.time() - begin
        assert follower.state.newest == 1


def test_only_what_followers_need_is_kept(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = trained()
    with Follower(place) as slow:
        with DeltaPublisher(model, place, every_s=0, full_every_s=0) as publisher:
            for step in range(3):
                publish(publisher)
                if step == 0:
                    slow.poll()
                change(model, step)
        # 1 to 4 were published, each with a full export. The last two exports and the
        # delta between them are kept.
        if "://" not in place:
            names = sorted(
                path.name
                for path in Path(place).iterdir()
                if not path.name.startswith(".")
            )
            numbers = ["000000000003", "000000000004"]
            kept = [
                f"{number}{suffix}"
                for number in numbers
                for suffix in (".json", ".pt", ".safetensors")
            ]
            assert names == sorted([*kept, "000000000004.delta", "latest.json"])
        else:
            with request.getfixturevalue("server").client() as client:
                assert [entry[0] for entry in client.xrange("clicks")] == [
                    b"3-0",
                    b"4-0",
                ]
                parts = {
                    key
                    for key in client.scan_iter("clicks:*")
                    if key.split(b":")[1].isdigit()
                }
                # The small delta is in its entry.
                assert parts == {
                    f"clicks:{number}:{kind}:0".encode()
                    for number in (3, 4)
                    for kind in FULL
                }
                assert {client.ttl(key) for key in client.scan_iter("*")} == {-1}
        # The delta that the slow follower needs has been deleted.
        with pytest.warns(
            RecStoreWarning, match=r"publication 2 cannot be applied: .*2"
        ):
            assert slow.poll()
        assert slow.state.fulls_loaded == 2
        assert_follows(slow, model, tmp_path)


@pytest.mark.parametrize("place", ["redis"], indirect=True)
@needs_redis
def test_files_of_several_parts(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "torchrec_recstore_serving.publish.redis_publications._PART_BYTES", 1000
    )
    monkeypatch.setattr(
        "torchrec_recstore_serving.publish.redis_publications._INLINE_BYTES", 0
    )
    model = trained()
    with (
        DeltaPublisher(model, place, every_s=0, full_every_s=0) as publisher,
        Follower(place) as follower,
    ):
        for step in range(2):
            publish(publisher)
            follower.poll()
            change(model, step)
    follower = follow(place)
    assert_follows(follower, model, tmp_path)
    follower.close()


@pytest.mark.parametrize(
    "place", ["directory", pytest.param("redis", marks=needs_redis)], indirect=True
)
def test_a_publisher_that_starts_again(place: str, tmp_path: Path) -> None:
    model = trained()
    with Follower(place) as follower:
        for run in range(2):
            with DeltaPublisher(model, place, every_s=0, full_every_s=1e6) as publisher:
                for step in range(2):
                    publish(publisher)
                    if (run, step) == (1, 0):
                        with pytest.warns(
                            RecStoreWarning,
                            match="publication 4 .* because the publisher began anew",
                        ):
                            assert not follower.poll(), (
                                "a full export of the same version"
                            )
                    else:
                        assert follower.poll()
                    change(model, step + 2 * run)
            assert follower.poll()
            assert_follows(follower, model, tmp_path)
        assert (
            follower.state.number,
            follower.state.fulls_loaded,
            follower.state.deltas_applied,
        ) == (6, 2, 4)
        assert follower.state.problem is None


class Tables(nn.Module):
    """A RecStore table and one of TorchRec's own in one collection each, and a dense
    layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bags = RecStoreEmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name="t", embedding_dim=8, num_embeddings=100, feature_names=["f"]
                )
            ],
            lr=0.3,
        )
        stock = EmbeddingBagConfig(
            name="stock", embedding_dim=8, num_embeddings=50, feature_names=["g"]
        )
        self.stock = EmbeddingBagCollection(tables=[stock])
        self.over = nn.Linear(16, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """(B, 1)."""
        pooled: list[KeyedTensor] = [self.bags(features), self.stock(features)]
        out: Tensor = self.over(torch.cat([each.values() for each in pooled], dim=1))
        return out


@pytest.mark.parametrize(
    ("index", "rows", "dtype"),
    [
        ("hash", "memory", torch.float32),
        pytest.param("hash", "mapped", torch.int8, marks=pytest.mark.slow),
        pytest.param("sorted", "memory", torch.int8, marks=pytest.mark.slow),
    ],
)
def test_a_full_export_is_a_program_and_its_tensors(
    index: str, rows: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """What is unpickled has no rows and no dense values: these are in safetensors,
    equal to those of an export.
    """
    model = Tables()
    features = KeyedJaggedTensor(
        ["f", "g"], torch.randint(0, 50, (40,)), lengths=torch.full((20,), 2)
    )
    model(features).sum().backward()
    place = tmp_path / "published"
    options = {"dtype": dtype, "index": index, "rows": rows}
    with DeltaPublisher(
        model, place, every_s=0, full_every_s=0, **options
    ) as publisher:  # type: ignore[arg-type]
        for number in (1, 2):
            publish(publisher)
            name = f"{number:012d}"
            export_for_inference(model, tmp_path / "export.pt", **options)  # type: ignore[arg-type]
            export = torch.jit.load(tmp_path / "export.pt")
            program = torch.jit.load(place / f"{name}.pt")
            tensors = safetensors.torch.load_file(place / f"{name}.safetensors")
            if rows == "memory":
                assert len(program.recstore_ids("t")) == 0
                assert torch.equal(tensors["t/ids"], export.recstore_ids("t"))
                assert torch.equal(tensors["t/rows"], export.recstore_rows("t")[1:])
            assert not program.recstore_rows("stock").any()
            assert torch.equal(tensors["stock/rows"], export.recstore_rows("stock"))
            zeros, dense = (
                dict(program.named_parameters()),
                dict(export.named_parameters()),
            )
            assert zeros.keys() == {"over.weight", "over.bias"}
            for key, value in zeros.items():
                assert not value.any()
                assert torch.equal(tensors[f"dense/{key}"], dense[key])
            program.verify()
            with Follower(place) as follower:
                assert follower.poll()
                assert follower.version == export.recstore_version()
                assert torch.equal(follower.model(features), export(features))
                follower.model.verify()
            model(features).sum().backward()
            with torch.no_grad():
                model.over.bias += 1
    # The tensors of another publication, which are signed, too.
    (place / "000000000003.safetensors").write_bytes(
        (place / "000000000002.safetensors").read_bytes()
    )
    refused = "this model is of version" if rows == "mapped" else "another publication"
    with (
        Follower(place) as follower,
        pytest.warns(
            RecStoreWarning, match=f"full export 3 cannot be loaded: .*{refused}"
        ),
    ):
        follower.poll()


def damage(
    place: str, number: int, kind: str, server: Callable[[], RedisServer]
) -> None:
    """Changes a byte of a published file, or deletes the file."""
    if "://" not in place:
        path = publications_at(place).path_of(number, kind)  # type: ignore[arg-type]
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        return
    with server().client() as client:
        if kind == "full":
            key = f"clicks:{number}:full:0"
            client.setrange(key, client.strlen(key) // 2, b"damaged")
        else:
            client.xdel("clicks", f"{number}-0")


def test_a_chain_that_breaks(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def server() -> RedisServer:
        found: RedisServer = request.getfixturevalue("server")
        return found

    model = trained()
    with (
        DeltaPublisher(model, place, every_s=0, full_every_s=1e6) as publisher,
        Follower(place) as follower,
    ):
        publish(publisher)
        follower.poll()
        for step in range(2):
            change(model, step)
            publish(publisher)
        damage(place, 2, "delta", server)
        version = follower.version
        with pytest.warns(
            RecStoreWarning,
            match="publication 2 cannot be applied: .*rows are served until",
        ):
            assert not follower.poll()
        for _ in range(2):
            assert not follower.poll(), "it neither warns again nor continues"
        assert (follower.version, follower.versions_behind) == (version, 2)
        assert "publication 2 cannot be applied" in str(follower.state.problem)
        publisher._writer._next_full = 0  # type: ignore[union-attr]
        publish(publisher)
        assert follower.poll()
        assert_follows(follower, model, tmp_path)
        assert (
            follower.state.problem,
            follower.state.number,
            follower.state.fulls_loaded,
        ) == (None, 4, 2)

        # A follower that starts now cannot load the newest full export, and cannot
        # continue from the one before.
        damage(place, 4, "full", server)
        with Follower(place) as other, pytest.warns(RecStoreWarning) as warned:
            other.poll()
        told = " ".join(str(each.message) for each in warned)
        assert "full export 4 cannot be loaded" in told
        assert "publication 2 cannot be applied" in told
        assert other.state.number == 1
        assert follower.state.number == 4


def test_one_publisher_at_a_time(place: str) -> None:
    model = trained()
    publisher = DeltaPublisher(model, place, every_s=0)
    publish(publisher)
    if "://" not in place:
        with pytest.raises(
            BlockingIOError,
            match=f"process {os.getpid()} on host .* has been publishing to it since",
        ):
            DeltaPublisher(model, place)
        publisher.close()
        return
    # The newer publisher takes over, because a server does not know whether the older
    # one is alive.
    with DeltaPublisher(model, place, every_s=0) as newer:
        publish(newer)
        for _ in range(2):
            with pytest.raises(
                BlockingIOError, match="another publisher has begun to publish to it"
            ):
                publish(publisher)
        with pytest.raises(
            BlockingIOError, match="another publisher has begun to publish to it"
        ):
            publisher.close()
        publisher.close()


def test_a_place_that_loses_everything(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = trained()
    with (
        DeltaPublisher(model, place, every_s=0, full_every_s=1e6) as publisher,
        Follower(place) as follower,
    ):
        publish(publisher)
        change(model, 0)
        publish(publisher)
        follower.poll()
        if "://" in place:
            with request.getfixturevalue("server").client() as client:
                client.flushall()
        else:
            for path in Path(place).iterdir():
                path.unlink()
        assert not follower.poll()
        for step, unchanged in ((1, True), (2, False)):
            if not unchanged:
                change(model, step)
                if "://" in place:
                    with request.getfixturevalue("server").client() as client:
                        client.flushall()
                else:
                    (Path(place) / "latest.json").unlink()
            with pytest.warns(
                RecStoreWarning,
                match="has lost publications: a full export is published",
            ):
                publish(publisher)
        with pytest.warns(RecStoreWarning, match="publication 3 cannot be applied"):
            assert follower.poll()
        assert_follows(follower, model, tmp_path)


def test_a_thread_that_follows(place: str, tmp_path: Path) -> None:
    model = trained()
    with DeltaPublisher(model, place, every_s=0) as publisher:
        publish(publisher)
        with follow(place, every_s=0.05) as follower:
            version = follower.version
            change(model, 0)
            publish(publisher)
            wait_for(lambda: follower.version != version)
            assert_follows(follower, model, tmp_path)


def test_errors_of_the_writing_thread(tmp_path: Path) -> None:
    model = trained()
    place = tmp_path / "published"
    publisher = DeltaPublisher(model, place, every_s=0)
    publish(publisher)
    change(model, 0)
    (place / "000000000002.delta").mkdir()
    publisher.step()
    publisher._writer.wait()  # type: ignore[union-attr]
    with pytest.raises(OSError, match=r"000000000002\.delta is a directory"):
        publisher.step()
    (place / "000000000002.delta").rmdir()
    # The error is raised once, and the next publication is a full export.
    publisher.step()
    publisher.close()
    latest = json.loads((place / "latest.json").read_text())
    assert latest["fulls"] == [1, 2]
    with pytest.raises(ValueError, match="the publisher is closed"):
        publisher.step()
    publisher.close()


def test_what_is_refused(tmp_path: Path) -> None:
    model = trained()
    for argument, value, error in (
        ("every_s", -1, ValueError),
        ("full_every_s", "1h", TypeError),
    ):
        with pytest.raises(error, match=f"{argument} must"):
            DeltaPublisher(model, tmp_path / "a", **{argument: value})
    assert not (tmp_path / "a").exists()
    for wrong, message in (
        ("s3://bucket", "a place of publications is a directory, or redis://"),
        (
            "redis://user:secret@127.0.0.1/0",
            r"redis://127.0.0.1/0 names no stream: add \?stream=NAME",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Follower(wrong)
    with pytest.raises(
        TimeoutError, match=r"no model after 0 s: nothing has been published there"
    ):
        follow(tmp_path / "nowhere", timeout_s=0)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "latest.json").write_text("[]")
    with pytest.raises(
        ValueError, match=r"latest\.json is not what a DeltaPublisher writes"
    ):
        follow(tmp_path / "other")
    with pytest.raises(
        ConnectionError,
        match=r"redis://127\.0\.0\.1:1/0\?stream=clicks cannot be reached",
    ):
        follow("redis://127.0.0.1:1/0?stream=clicks", timeout_s=0)


@pytest.mark.usefixtures("one_rank")
def test_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """A table has one snapshot at a time: the publication waits for a later step, and
    the end waits for the save.
    """
    model = recstore()
    model(sharded_batch(0)).sum().backward()
    written = threading.Event()
    with DeltaPublisher(model, tmp_path / "published", every_s=0) as publisher:
        save = async_save(
            model, tmp_path / "checkpoint", progress=lambda done, rows: written.wait()
        )
        publisher.step()
        assert not (tmp_path / "published" / "latest.json").exists()
        threading.Timer(0.2, written.set).start()
    save.wait()
    with follow(tmp_path / "published") as follower:
        assert follower.version == version_of(model, tmp_path)


def version_of(model: nn.Module, folder: Path) -> str:
    """The version of a full export. Collective."""
    export_for_inference(model, folder / "whole.pt", index="hash")
    return str(torch.jit.load(folder / "whole.pt").recstore_version())


def publish_from_two_ranks(rank: int, world_size: int, folder: Path) -> None:
    model = recstore()
    publisher = DeltaPublisher(model, folder / "published", every_s=0)
    for step in range(3):
        model(sharded_batch(2 * step + rank)).sum().backward()
        publisher.step()
        if rank == 0:
            publisher._writer.wait()  # type: ignore[union-attr]
    if rank == 0:
        (folder / "published" / "000000000004.delta").mkdir()
    with pytest.raises(OSError, match=r"000000000004\.delta is a directory"):
        publisher.close()
    version = version_of(model, folder)
    if rank == 0:
        with Follower(folder / "published") as follower:
            follower.poll()
            assert (follower.version, follower.state.number) == (version, 3)
            assert follower.state.deltas_applied == 2
    with pytest.raises(TypeError, match="every_s must be a number of seconds"):
        DeltaPublisher(model, folder / "other", every_s="5")  # type: ignore[arg-type]


def exchange_rarely(rank: int, world_size: int, folder: Path) -> None:
    """The clocks of the ranks differ, the pace of the steps changes, and all exchange
    the time in the same steps.
    """
    now, exchanges = [0.0], []

    class Clock:
        time, sleep = staticmethod(time.time), staticmethod(time.sleep)

        @staticmethod
        def monotonic() -> float:
            return now[0] + 1000.0 * rank

    def gathered(value: object, env: Any) -> list[Any]:
        exchanges.append(step)
        return all_gathered(value, env)

    step = -1
    model = recstore()
    publisher_module.time, publisher_module.all_gathered = Clock, gathered  # type: ignore[assignment]
    publisher = DeltaPublisher(model, folder / "rarely", every_s=5, full_every_s=1e6)
    published, late = [], 0.0
    for step in range(3000):
        now[0] += 0.01 if step < 2000 else 0.05  # the steps become slower
        before = publisher._next
        publisher.step()
        if publisher._next != before:
            published.append(step)
            late = (
                max(late, now[0] + 1000.0 * rank - before)
                if len(published) > 1
                else late
            )
            if rank == 0:
                publisher._writer.wait()  # type: ignore[union-attr]
            dist.barrier()
    of_ranks: list[Any] = [None] * world_size
    dist.all_gather_object(of_ranks, (sorted(set(exchanges)), published))
    assert all(each == of_ranks[0] for each in of_ranks)
    assert len(published) == 14  # 20 and 50 seconds
    assert late <= 0.5
    assert len(set(exchanges)) <= 14 * 12
    publisher.close()


@pytest.mark.slow
def test_ranks_exchange_the_time_rarely(tmp_path: Path) -> None:
    run_on_ranks(2, partial(exchange_rarely, folder=tmp_path))


@pytest.mark.slow
def test_of_several_ranks(tmp_path: Path) -> None:
    """Rank 0 publishes the whole model, and an error of its thread is raised on every
    rank.
    """
    run_on_ranks(2, partial(publish_from_two_ranks, folder=tmp_path))


@pytest.mark.parametrize("index", ["hash", "sorted"])
def test_what_a_step_reads(
    index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a hash index, only the rows that have changed are read.

    A change that no delta has needs a full export.
    """
    whole: list[int] = []
    read = publisher_module.read_model
    monkeypatch.setattr(
        publisher_module,
        "read_model",
        lambda *arguments, **options: whole.append(1) or read(*arguments, **options),
    )
    model = trained()
    with (
        DeltaPublisher(
            model, tmp_path / "published", every_s=0, full_every_s=1e6, index=index
        ) as publisher,
        Follower(tmp_path / "published") as follower,
    ):
        for step in range(4):
            publish(publisher)
            follower.poll()
            change(model, step)
        publish(publisher)
        assert len(whole) == (1 if index == "hash" else 5)
        assert follower.poll()
        assert is_hashed(follower.model) == (index == "hash")
        model.bag.mode = "mean"
        with pytest.warns(
            RecStoreWarning, match="a full export is published without a delta: .*mean"
        ):
            publish(publisher)
        publisher.step()
    with pytest.warns(RecStoreWarning, match="because the publisher began anew"):
        follower.poll()
    assert follower.state.fulls_loaded == 2


def test_frozen_tables_are_published(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            frozen = TableOptions(frozen=True)
            self.still = RecStoreEmbeddingBag(
                100, 8, name="still", mode="sum", options=frozen
            )
            self.moving = RecStoreEmbeddingBag(100, 8, name="moving", mode="sum")

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.still(ids) + self.moving(ids)
            return out

    model = Both()
    ids = torch.arange(20).view(5, 4)
    model.still.table.insert(ids.flatten(), torch.ones(20, 8))
    place = tmp_path / "to"
    with (
        DeltaPublisher(model, place, every_s=0, full_every_s=1e6) as publisher,
        Follower(place) as follower,
    ):
        for step in range(3):
            model.train()(ids).sum().backward()
            publish(publisher)
            assert follower.poll()
            served = follower.model
            # The rows of the export have 8 bits.
            assert torch.allclose(served(ids), model.eval()(ids), atol=0.05)
            export_for_inference(model, tmp_path / f"{step}.pt", index="hash")
            exported = torch.jit.load(tmp_path / f"{step}.pt")
            assert torch.equal(served(ids), exported(ids))
    assert model.still.table.steps == 0
