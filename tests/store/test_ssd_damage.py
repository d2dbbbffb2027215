"""Damage of a kept SSDStore is an error when the file is opened, and what was not
acknowledged is not damage.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tests.processes import run_forked_command
from tests.store.disk_rows import ROW_BYTES, assert_has, random_rows
from torchrec_recstore import SSDStore
from torchrec_recstore.store import ColdStore, ColdStoreError, open_cold_store
from torchrec_recstore.utils import RecStoreWarning

IDS = torch.arange(400)
PAGE = 4096


def _open(path: Path) -> ColdStore:
    return open_cold_store(SSDStore(str(path), "rows"), name="t", row_bytes=ROW_BYTES)


def _files(path: Path) -> list[Path]:
    return sorted(path.rglob("rows/t/*"))


def _make(path: Path) -> None:
    """Closes a store of 400 rows, of which some were written twice and some deleted and
    written again.
    """
    store = _open(path)
    store.put(IDS, random_rows(400, 1))
    store.put(IDS[:50], random_rows(50, 2))
    store.delete(IDS[50:60])
    store.put(IDS[50:60], random_rows(10, 3))
    store.close()


def _rows() -> torch.Tensor:
    return torch.cat([random_rows(50, 2), random_rows(10, 3), random_rows(400, 1)[60:]])


def _assert_whole_or_refused(path: Path) -> bool:
    """Checks that a store has all rows, or is refused as damaged.

    Returns whether it was refused.
    """
    refusal = ""
    try:
        store = _open(path)
    except ColdStoreError as error:
        refusal = str(error)
    if refusal:
        assert "is damaged" in refusal
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_has(store, IDS, _rows())
    store.close()
    return False


def test_a_flipped_byte_of_the_first_row(tmp_path: Path) -> None:
    _make(tmp_path)
    with _files(tmp_path)[0].open("r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ColdStoreError, match="is damaged"):
        _open(tmp_path)


@pytest.mark.parametrize("kind", ["flip", "truncate", "zero page", "lose"])
def test_damage_anywhere_never_makes_a_row_missing_or_old(
    tmp_path: Path, kind: str
) -> None:
    original = tmp_path / "original"
    _make(original)
    chance = random.Random(kind)
    refused = 0
    for trial in range(25):
        damaged = tmp_path / "damaged"
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(original, damaged)
        files = _files(damaged)
        file = files[trial % len(files)]
        size = file.stat().st_size
        at = chance.randrange(min(size, 470 * (ROW_BYTES + 16)))
        if kind == "truncate":
            os.truncate(file, at)
        elif kind == "lose":
            file.unlink()
        else:
            content = bytearray(file.read_bytes())
            if kind == "flip":
                content[at] ^= 1 << chance.randrange(8)
            else:
                page = at // PAGE * PAGE
                content[page : page + PAGE] = bytes(min(PAGE, size - page))
            file.write_bytes(content)
        refused += _assert_whole_or_refused(damaged)
    assert refused >= 10  # Some bytes of a file are in use by no row.


def test_a_call_that_was_not_acknowledged_is_dropped_with_a_warning(
    tmp_path: Path,
) -> None:
    code = f"""if True:
        import os, signal, torch
        from tests.store import test_ssd_damage as tests
        store = tests._open(tests.Path({str(tmp_path)!r}))
        store.put(tests.IDS, tests.random_rows(400, 1))
        (file,) = [file for file in tests._files(tests.Path({str(tmp_path)!r})) if file.name == "rows"]
        end = file.with_name("rows.end")
        before = end.read_bytes()
        store.put(tests.IDS[:50], tests.random_rows(50, 2))
        end.write_bytes(before)  # as if the process had been killed before the second put was acknowledged
        os.kill(os.getpid(), signal.SIGKILL)
    """
    process = run_forked_command(["-c", code])
    assert process.returncode == -signal.SIGKILL
    with pytest.warns(RecStoreWarning, match=r"50 rows .* not acknowledged"):
        store = _open(tmp_path)
    assert_has(store, IDS, random_rows(400, 1))
    store.put(IDS[:3], random_rows(3, 4))
    store.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = _open(tmp_path)
    assert_has(store, IDS, torch.cat([random_rows(3, 4), random_rows(400, 1)[3:]]))


def test_the_lock_stays_when_its_process_opens_and_closes_the_file(
    tmp_path: Path,
) -> None:
    store = _open(tmp_path)
    store.put(IDS, random_rows(400, 1))
    for file in _files(tmp_path):
        file.read_bytes()
    code = f"""if True:
        from tests.store import test_ssd_damage as tests
        tests._open(tests.Path({str(tmp_path)!r}))
    """
    process = run_forked_command(["-c", code])
    assert "is in use by another process" in process.stderr
    store.close()


def test_a_forked_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    code = f"""if True:
        import os, signal, time
        from tests.store import test_ssd_damage as tests
        store = tests._open(tests.Path({str(tmp_path)!r}))
        store.put(tests.IDS, tests.random_rows(400, 1))
        child = os.fork()
        if child == 0:
            time.sleep(60)
        print(child, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        assert process.wait() == -signal.SIGKILL
        os.kill(child, 0)  # it lives
        store = _open(tmp_path)
        assert_has(store, IDS, random_rows(400, 1))
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()
