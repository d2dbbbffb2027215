"""A follower with a key loads nothing that was not signed with it, and one without a
key says whom it trusts.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.secrets import write_secret
from torchrec_recstore.inference import (
    DeltaPublisher,
    Follower,
    export_delta,
    export_for_inference,
    follow,
    read_delta,
    verify,
)
from torchrec_recstore.utils import RecStoreWarning
from torchrec_recstore_serving.export.opening import load_export
from torchrec_recstore_serving.export.verification import sign_zip

from ...processes import ForkedCommand
from ...redis_server import needs_redis, redis_server
from ..predict.test_predictor import FollowCommand
from .test_publisher import assert_follows, change, publish, trained, wait_for

FULL_FILES = ("000000000003.pt", "000000000003.safetensors")
SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return write_secret(tmp_path / "key", SECRET + "\n")


@pytest.fixture
def other_key(tmp_path: Path) -> Path:
    return write_secret(tmp_path / "other-key", SECRET[::-1])


class Evil(nn.Module):
    """A module whose file writes another file when ``torch.jit.load`` reads it."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target
        self.one = torch.ones(1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.one

    @torch.jit.export
    def __getstate__(self) -> tuple[Tensor, str, bool]:
        return self.one, self.target, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[Tensor, str, bool]) -> None:
        self.one, self.target, self.training = state[0], state[1], state[2]
        torch.save(self.one, self.target)


def evil_export(target: Path, path: Path) -> None:
    """Writes an export with a checksum that fits, which everyone can compute."""
    script = torch.jit.script(Evil(str(target)))
    script.save(str(path))
    sign_zip(path)


def test_a_file_of_somebody_else_runs_code_only_without_a_key(
    key: Path, tmp_path: Path
) -> None:
    place, target = tmp_path / "published", tmp_path / "written-by-the-file"
    with DeltaPublisher(trained(), place, every_s=0, key=key) as publisher:
        publish(publisher)
    evil_export(target, place / "000000000001.pt")
    name = "000000000001.pt"
    with (
        Follower(place, key=key) as follower,
        pytest.warns(RecStoreWarning, match=f"{name} has no signature, and the"),
    ):
        assert not follower.poll()
    with pytest.raises(
        ValueError, match=f"{name} has no signature, and the key .* is required"
    ):
        verify(place / name, key=key)
    assert not target.exists()
    with (
        Follower(place) as follower,
        pytest.warns(RecStoreWarning, match="cannot be loaded"),
    ):
        follower.poll()
    assert target.exists(), "torch.jit.load runs code of the file"


def test_signed_publications(
    place: str, key: Path, other_key: Path, tmp_path: Path
) -> None:
    model = trained()
    with (
        DeltaPublisher(model, place, every_s=0, full_every_s=1e6, key=key) as publisher,
        Follower(place, key=key) as follower,
        Follower(place, key=other_key) as stranger,
        Follower(place) as trusting,
    ):
        for step in range(3):
            publish(publisher)
            assert follower.poll()
            change(model, step)
        publish(publisher)  # the age only, or a delta
        for each in (follower, trusting):
            each.poll()
            assert_follows(each, model, tmp_path)
        assert (follower.state.fulls_loaded, follower.state.deltas_applied) == (1, 3)
        assert follower.trusts == f"everyone who has the key {key}"
        with pytest.raises(
            ValueError,
            match=(
                r"latest(\.json)? is not signed with the key .*other-key: it was"
                r" changed"
            ),
        ):
            stranger.poll()
        assert stranger.version is None
    # A publisher that has forgotten its key.
    with DeltaPublisher(model, place, every_s=0) as publisher:
        publish(publisher)
    with (
        Follower(place, key=key) as follower,
        pytest.raises(ValueError, match=r"latest(\.json)? has no signature"),
    ):
        follower.poll()
    with DeltaPublisher(model, place, every_s=0, key=other_key) as publisher:
        publish(publisher)
    with follow(place, key=other_key) as follower:
        assert_follows(follower, model, tmp_path)


@pytest.mark.parametrize(
    ("name", "place_of"),
    [
        pytest.param("latest.json", 0.001, marks=pytest.mark.slow),
        ("latest.json", 0.999),
        ("000000000002.json", 0.5),
        pytest.param("000000000002.delta", 0.001, marks=pytest.mark.slow),
        ("000000000002.delta", 0.5),
        pytest.param("000000000002.delta", 0.999, marks=pytest.mark.slow),
        (FULL_FILES[0], 0.5),
        (FULL_FILES[1], 0.001),
        pytest.param(FULL_FILES[1], 0.999, marks=pytest.mark.slow),
    ],
)
def test_a_changed_byte(name: str, place_of: float, key: Path, tmp_path: Path) -> None:
    """The follower names the file, serves what it has, and goes on when the file is
    right.
    """
    place, model = tmp_path / "published", trained()
    with DeltaPublisher(
        model, place, every_s=0, full_every_s=1e6, key=key
    ) as publisher:
        publish(publisher)
        with Follower(place, key=key) as follower, warnings.catch_warnings():
            warnings.simplefilter("ignore", RecStoreWarning)
            assert follower.poll()
            version = follower.version
            for step in range(2):
                change(model, step)
                publisher._writer._next_full = 1e9 if step == 0 else 0  # type: ignore[union-attr]
                publish(publisher)
            # The full export is only loaded if a delta before it is gone.
            if name in FULL_FILES:
                (place / "000000000002.delta").unlink()
            elif name != "latest.json":  # Otherwise the full export would be loaded.
                (place / FULL_FILES[0]).rename(tmp_path / "aside")
            file = place / name
            whole = file.read_bytes()
            at = int(len(whole) * place_of)
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            said = []
            warnings.showwarning = lambda message, *_: said.append(str(message))  # type: ignore[assignment]
            warnings.simplefilter("always", RecStoreWarning)
            try:
                assert not follower.poll()
            except ValueError as error:
                assert name == "latest.json"
                said.append(str(error))
            assert name in " ".join(said)
            assert (follower.version, follower.model.recstore_version()) == (
                version,
                version,
            )
            file.write_bytes(whole)
            time.sleep(0.6)
            assert follower.poll()
            if name in ("latest.json", *FULL_FILES):
                assert_follows(follower, model, tmp_path)
                assert follower.state.problem is None


def test_exports_and_deltas(key: Path, other_key: Path, tmp_path: Path) -> None:
    model = trained()
    for index in ("sorted", "hash"):
        file, delta = tmp_path / f"{index}.pt", tmp_path / f"{index}.delta"
        export_for_inference(model, file, index=index, key=key)
        change(model, 0)
        export_delta(model, delta, base=file, key=key)
        served = torch.jit.load(file)
        # without this package
        served.verify(torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8))
        before = served.recstore_version()
        assert served.apply_delta(read_delta(delta, key=key))
        assert (
            load_export(file).recstore_version() == before != served.recstore_version()
        )
        export_for_inference(model, tmp_path / "plain.pt", index=index)
        assert (
            torch.jit.load(tmp_path / "plain.pt").recstore_version()
            == served.recstore_version()
        )
        for each in (file, delta):
            verify(each)
            verify(each, key=key)
            with pytest.raises(
                ValueError,
                match=(
                    f"{each} is not signed with the key {other_key}: it was changed,"
                    " or was"
                ),
            ):
                verify(each, key=other_key)
            whole = each.read_bytes()
            for at in range(0, len(whole), max(1, len(whole) // 40)):
                each.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
                with pytest.raises(ValueError, match=str(each)):
                    verify(each, key=key)
            each.write_bytes(whole)
        with pytest.raises(
            ValueError, match=f"{file} is not signed with the key {other_key}"
        ):
            export_delta(model, tmp_path / "other.delta", base=file, key=other_key)
        with pytest.raises(
            ValueError,
            match=(
                f"{tmp_path / 'plain.pt'} has no signature, and the key {key} is"
                " required"
            ),
        ):
            verify(tmp_path / "plain.pt", key=key)


def test_keys_that_are_refused(key: Path, tmp_path: Path) -> None:
    key.chmod(0o644)
    with pytest.raises(
        ValueError,
        match=(
            rf"the key {key} can be read or changed by other users \(mode 0644\):"
            r" chmod 600"
        ),
    ):
        Follower(tmp_path / "published", key=key)
    for text in ("short", "a" * 64):
        weak = write_secret(tmp_path / "weak", text)
        with pytest.raises(
            ValueError,
            match=(
                r"must have at least 32 characters, 8 of them different: openssl rand"
            ),
        ):
            DeltaPublisher(trained(), tmp_path / "published", key=weak)
    with pytest.raises(FileNotFoundError):
        verify(key, key=tmp_path / "none")
    with pytest.raises(ValueError, match="key signs a file: pass path, too"):
        export_for_inference(trained(), key=key)


def test_a_directory_that_others_can_write(key: Path, tmp_path: Path) -> None:
    place, model = tmp_path / "above" / "published", trained()
    key.chmod(0o600)
    with DeltaPublisher(model, place, every_s=0) as publisher:
        publish(publisher)
    with Follower(place) as before:
        assert before.poll()
        for step, folder in enumerate((place, place.parent)):
            mode = folder.stat().st_mode
            folder.chmod(0o777)
            refusal = (
                f"every user of this machine may write {folder}: chmod o-w {folder}, or"
                " publish and follow with"
            )
            with pytest.raises(ValueError, match=refusal):
                Follower(place)
            with pytest.warns(RecStoreWarning, match=refusal):
                publisher = DeltaPublisher(model, place, every_s=0)
            change(model, step)
            publisher.close()
            with pytest.raises(ValueError, match=refusal):
                before.poll()
            done = ForkedCommand(
                [
                    "-m",
                    "torchrec_recstore.cli",
                    "follow",
                    str(place),
                    "--listen",
                    "127.0.0.1:0",
                ]
            )
            assert done.wait(60) == 2
            assert f"every user of this machine may write {folder}" in done.stderr
            Follower(place, key=key).close()
            folder.chmod(mode)
        # In a sticky directory, others may make the files that come next.
        place.chmod(0o1777)
        with pytest.raises(
            ValueError, match=f"every user of this machine may write {place}: chmod o-w"
        ):
            before.poll()
        place.chmod(0o755)
        file = place / "000000000003.pt"
        file.chmod(0o666)
        with pytest.warns(
            RecStoreWarning,
            match=(
                rf"every user of this machine may write {file} \(mode 0666\): chmod o-w"
            ),
        ):
            Follower(place).poll()
        file.chmod(0o644)
        assert before.poll()
    place.chmod(0o775)
    if os.getuid() == 0:
        shutil.chown(place, group=1)  # not the group of the owner alone
        with pytest.warns(
            RecStoreWarning,
            match=f"the group .* may write {place}: chmod g-w {place}, or",
        ):
            Follower(place).close()


@needs_redis
def test_a_redis_server_without_a_password(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server:
        place = f"{server.url}/0?stream=clicks"
        wanted = (
            f"every user of this machine may write to {place}: set a password, or"
            " publish and follow with a key"
        )
        with (
            pytest.warns(RecStoreWarning, match=re.escape(wanted)),
            Follower(place) as follower,
        ):
            assert follower.trusts.startswith("everyone who reaches redis://127.0.0.1")
    # Nothing is sent to this address.
    far = "redis://192.0.2.1:6379/0?stream=clicks"
    with pytest.raises(
        ValueError,
        match=(
            r"everyone who reaches redis://192\.0\.2\.1.* may write to it: set a"
            r" password"
        ),
    ):
        Follower(far)
    Follower(far.replace("redis://", "redis://:secret@")).close()


def test_the_commands(key: Path, other_key: Path, tmp_path: Path) -> None:
    place = tmp_path / "published"
    with DeltaPublisher(trained(), place, every_s=0, key=key) as publisher:
        publish(publisher)
    command = FollowCommand(
        place, "--http", "127.0.0.1:0", "--poll-every", "0.02", "--key", str(other_key)
    )
    try:
        assert command.serving["trusts"] == f"everyone who has the key {other_key}"
        wait_for(lambda: command.http("/state")[1]["problem"] is not None)
        status, document = command.http("/health")
        assert status == 503
        assert (
            f"{place}/latest.json is not signed with the key {other_key}: it was"
            " changed" in document["reason"]
        )
    finally:
        command.command.terminate()
        assert command.command.wait(60) == 0, command.command.stderr
    flags = ["--listen", "127.0.0.1:0", "--key", str(tmp_path / "none")]
    refused = ForkedCommand(
        ["-m", "torchrec_recstore.cli", "follow", str(place), *flags]
    )
    assert refused.wait(60) == 2
    assert len(refused.stderr.splitlines()) == 1
