"""Models whose rows are mapped from their file: the same answers and deltas, rows that
processes share, bad files.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchrec_recstore.inference import (
    DeltaPublisher,
    Follower,
    export_delta,
    export_for_inference,
    load_library,
    read_delta,
    verify,
)
from torchrec_recstore.modules import RecStoreEmbedding
from torchrec_recstore_serving.export.opening import load_export

from ...secrets import write_secret
from ..models import Model, batch
from .test_hashed_tables import SMALL, assert_equal, step

try:
    load_library()
except ImportError as error:
    pytest.skip(
        f"this torch has no library of served models: {error}", allow_module_level=True
    )


def exported(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Model, Path]:
    """Exports a model of several tables."""
    model = Model(SMALL)
    for number in range(3):
        step(model, number)
    export_for_inference(
        model, folder / "mapped.pt", dtype=dtype, index="hash", rows="mapped"
    )
    return model, folder / "mapped.pt"


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, marks=pytest.mark.slow),
        pytest.param(torch.float16, marks=pytest.mark.slow),
        torch.int8,
        pytest.param(torch.quint4x2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_mapped_model_is_the_one_in_memory(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Rows, outputs and versions are equal to the bit, before and after deltas; and so
    is a copy that is written.
    """
    model, path = exported(tmp_path, dtype)
    export_for_inference(model, tmp_path / "memory.pt", dtype=dtype, index="hash")
    verify(path)
    mapped, memory = torch.jit.load(path), torch.jit.load(tmp_path / "memory.pt")
    assert_equal(mapped, memory)
    content, removed = path.read_bytes(), 0
    for number in range(3, 9):
        step(model, number)
        info = export_delta(model, tmp_path / "delta", base=memory)
        removed += info.tables["t"].removed
        for each in (mapped, memory):
            assert each.apply_delta(read_delta(tmp_path / "delta"))
        assert_equal(mapped, memory)
    assert removed > 20
    assert path.read_bytes() == content
    mapped.save(str(tmp_path / "written.pt"))
    del mapped
    path.unlink()
    assert_equal(torch.jit.load(tmp_path / "written.pt"), memory)


def test_versions_of_a_mapped_model(tmp_path: Path) -> None:
    """A delta that is refused changes nothing, and two models of one file change apart."""
    model, path = exported(tmp_path)
    one, other = torch.jit.load(path), torch.jit.load(path)
    step(model, 3)
    export_delta(model, tmp_path / "delta", base=path)
    delta, some = read_delta(tmp_path / "delta"), batch(50)
    before = one(some)
    wrong = {**delta, "t/rows": delta["t/rows"] + 1}
    wrong["checksum"] = torch.ops.recstore.checksum_of(wrong)
    for _ in range(2):
        with pytest.raises(torch.jit.Error, match="does not lead from this model"):
            one.apply_delta(wrong)
        assert torch.equal(one(some), before)
    assert one.apply_delta(delta)
    assert torch.equal(other(some), before)
    export_for_inference(model, tmp_path / "full.pt", dtype=torch.float32, index="hash")
    assert_equal(one, torch.jit.load(tmp_path / "full.pt"))


READER = """
import sys, torch
torch.ops.load_library(sys.argv[1])
model = torch.jit.load(sys.argv[2])
print(float(model(torch.arange(400_000)).detach().sum()), flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_processes_share_the_rows(tmp_path: Path) -> None:
    """Two processes have each page of the file once, and their own memory has no rows."""
    model, ids = RecStoreEmbedding(10, 16, name="t"), torch.arange(400_000)
    model.train()
    model(ids).sum().backward()
    path = tmp_path / "mapped.pt"
    export_for_inference(
        model.eval(), path, dtype=torch.float32, index="hash", rows="mapped"
    )
    command = [sys.executable, "-c", READER, str(load_library()), str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    readers = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    try:
        answers = {reader.stdout.readline() for reader in readers}
        assert answers == {f"{float(model(ids).detach().sum())}\n"}
        sizes = [of_mapping(reader.pid, path) for reader in readers]
    finally:
        for reader in readers:
            reader.communicate("\n", timeout=60)
    size = path.stat().st_size
    assert size > 400_000 * 72
    for rss, pss, own in sizes:
        assert rss > 0.95 * size, "the process has read all rows"
        assert own == 0
        assert pss == pytest.approx(rss / 2, rel=0.05), (
            "the other process has the other half"
        )


def of_mapping(process: int, path: Path) -> tuple[int, int, int]:
    """Returns the resident bytes of a file in a process, its share of them, and those
    that only the process has.
    """
    text = Path(f"/proc/{process}/smaps").read_text()
    (part,) = re.findall(rf"{re.escape(str(path))}\n(.*?)VmFlags", text, re.DOTALL)
    found = dict(re.findall(r"^(\w+): +(\d+) kB$", part, re.MULTILINE))
    rss, pss, own = (int(found[name]) * 1024 for name in ("Rss", "Pss", "Anonymous"))
    return rss, pss, own


def test_a_file_that_is_written_after_it_was_loaded(tmp_path: Path) -> None:
    """A file that is cut or written in place raises an error, and does not end the
    process; a renamed one goes on.
    """
    _, path = exported(tmp_path)
    content, some = path.read_bytes(), batch(20)
    served = torch.jit.load(path)
    wanted = served(some)
    os.truncate(path, len(content) // 2)
    for call in (lambda: served(some), lambda: served.recstore_ids("t"), served.verify):
        with pytest.raises(
            RuntimeError, match="has been written since it was loaded: load it again"
        ):
            call()
    path.write_bytes(content)
    with pytest.raises(RuntimeError, match="has been written since it was loaded"):
        served(some)
    served = torch.jit.load(path)
    path.rename(tmp_path / "renamed.pt")
    path.write_bytes(content[:1000])
    assert torch.equal(served(some), wanted)


def test_bad_files(tmp_path: Path) -> None:
    _, path = exported(tmp_path)
    content = path.read_bytes()
    for damaged in (content[:-1], content[: len(content) // 2], content[:1000]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            verify(path)
        # The last byte is one of the checksum, which loading does not compare.
        if damaged != content[:-1]:
            with pytest.raises(ValueError, match=re.escape(str(path))):
                load_export(path)
    changed = bytearray(content)
    # in the record of a table
    changed[changed.rindex(b"rows/", 0, changed.index(b"PK\1\2")) + 5000] ^= 1
    path.write_bytes(changed)
    with pytest.raises(ValueError, match=re.escape(f"{path} is damaged")):
        verify(path)
    with pytest.raises(RuntimeError, match="load it by the path of the file"):
        torch.jit.load(io.BytesIO(content))


def test_what_is_refused(tmp_path: Path) -> None:
    model = RecStoreEmbedding(10, 4, name="t").eval()
    for message, arguments in (
        (
            'rows="mapped" needs index="hash"',
            {"path": tmp_path / "x.pt", "rows": "mapped"},
        ),
        (
            'rows="mapped" is about the file: pass path, too',
            {"index": "hash", "rows": "mapped"},
        ),
        (
            'rows must be "memory", "mapped" or "servers", got \'disk\'',
            {"path": tmp_path / "x.pt", "rows": "disk"},
        ),
    ):
        with pytest.raises(ValueError, match=message):
            export_for_inference(model, **arguments)
    with pytest.raises(
        TypeError, match='rows must be "memory", "mapped" or "servers", got int'
    ):
        export_for_inference(model, tmp_path / "x.pt", rows=1)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("signs", [False, True])
def test_following(signs: bool, place: str, tmp_path: Path) -> None:
    """Followers map what is published once, also from Redis and with a key, whose files
    lie in folders of their own.
    """
    key = write_secret(tmp_path / "key", "0123456789abcdef" * 2) if signs else None
    model, ids, before = (
        RecStoreEmbedding(50, 4, name="t", lr=0.3),
        torch.arange(6),
        mappings(),
    )
    with (
        DeltaPublisher(
            model, place, every_s=0, dtype=torch.float32, rows="mapped", key=key
        ) as publisher,
        Follower(place, key=key) as follower,
        Follower(place, key=key, pinned=2) as pinned,
    ):
        for number in range(3):
            model.train()(ids).sum().backward()
            model.eval()
            publisher.step()
            publisher._wait()
            follower.poll()
            assert torch.equal(follower.model(ids), model(ids))
            if number == 1:
                wanted = model(ids)
        pinned.poll()
        assert torch.equal(pinned.model(ids), wanted)
        assert (follower.state.fulls_loaded, follower.state.deltas_applied) == (1, 2)
        assert len(mappings() - before) == 1, "both have the same pages"


def mappings() -> set[str]:
    """The mappings of models' files in this process."""
    return set(
        re.findall(
            r".* r--s .*(?:\.pt|recstore-follow-).*",
            Path("/proc/self/maps").read_text(),
        )
    )
