"""Packages of AOTInductor are signed, and code of a package that is not signed with the
key does not run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.secrets import write_secret
from torchrec_recstore.inference import (
    export_for_inference,
    load_package,
    sign_package,
    verify,
)

from ...processes import run_forked_command
from ..models import OfPlainTensors, plain_batch

SECRET = "0123456789abcdef0123456789abcdef"


class Twice(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values * 2


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return write_secret(tmp_path / "key", SECRET)


@pytest.fixture
def other_key(tmp_path: Path) -> Path:
    return write_secret(tmp_path / "other-key", SECRET[::-1])


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """An exported program, which torch writes as a ``.pt2`` file without a compiler."""
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(Twice(), (torch.ones(3),)), path)
    return path


def _runs(path: Path) -> bool:
    loaded = torch.export.load(path).module()
    return bool(torch.equal(loaded(torch.ones(3)), torch.full((3,), 2.0)))


def test_a_signed_file_loads_as_before_and_is_verified(
    program: Path, key: Path, other_key: Path
) -> None:
    mode = program.stat().st_mode
    size = program.stat().st_size
    with pytest.raises(ValueError, match="has no checksum"):
        verify(program)
    sign_package(program)
    verify(program)
    with pytest.raises(
        ValueError, match=r"model\.pt2 has no signature, and the key .* is required"
    ):
        verify(program, key=key)
    assert _runs(program)
    sign_package(program, key=key)
    verify(program)
    verify(program, key=key)
    assert _runs(program)
    with zipfile.ZipFile(program) as archive:
        assert archive.testzip() is None
    with pytest.raises(
        ValueError, match=r"model\.pt2 is not signed with the key .*other-key"
    ):
        verify(program, key=other_key)
    sign_package(program, key=other_key)  # the key is replaced
    verify(program, key=other_key)
    assert _runs(program)
    sign_package(program)
    assert program.stat().st_size < size + 100
    assert program.stat().st_mode == mode
    assert not list(program.parent.glob(".*"))


def test_each_changed_byte_is_found(program: Path, key: Path) -> None:
    sign_package(program, key=key)
    content = program.read_bytes()
    for place in range(0, len(content), max(1, len(content) // 60)):
        changed = bytearray(content)
        changed[place] ^= 1
        program.write_bytes(changed)
        with pytest.raises(ValueError, match=r"model\.pt2"):
            verify(program, key=key)
    for shorter in (content[:-1], content[: len(content) // 2], b""):
        program.write_bytes(shorter)
        with pytest.raises(ValueError, match=r"model\.pt2"):
            verify(program, key=key)


def test_a_signature_is_for_one_kind_of_file(
    tmp_path: Path, program: Path, key: Path
) -> None:
    """A signature of an exported model is none of a package, and the other way round."""
    exported = tmp_path / "model.pt"
    model = OfPlainTensors()
    model(*plain_batch()).sum().backward()
    export_for_inference(model.eval(), exported, dtype=torch.float32, key=key)
    with pytest.raises(ValueError, match="is an exported model or a delta"):
        sign_package(exported, key=key)
    with pytest.raises(
        ValueError, match="is an exported model or a delta, and no package"
    ):
        load_package(exported, key=key)
    verify(exported, key=key)
    sign_package(program, key=key)
    for path, word, other in (
        (exported, b"export", b"package"),
        (program, b"package", b"export"),
    ):
        content = path.read_bytes()
        begin = content.rindex(b"recstore " + word)
        changed = bytearray(
            content[:begin] + b"recstore " + other + content[begin + 9 + len(word) :]
        )
        at = content.rindex(b"PK\x05\x06") + 20
        changed[at : at + 2] = (len(changed) - at - 2).to_bytes(2, "little")
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"is not signed with the key|is damaged"):
            verify(path, key=key)


def test_what_cannot_be_signed(tmp_path: Path, key: Path) -> None:
    text = tmp_path / "text.pt2"
    for content in (b"", b"no zip file, and longer than the end of one"):
        text.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"/text\.pt2 is no zip file as torch writes it"
        ):
            sign_package(text, key=key)
        assert text.read_bytes() == content
    with pytest.raises(FileNotFoundError, match="missing"):
        sign_package(tmp_path / "missing.pt2", key=key)
    with pytest.raises(TypeError, match="key must be the path of a file"):
        load_package(text, key=None)  # type: ignore[arg-type]


def test_the_commands(program: Path, key: Path, other_key: Path) -> None:
    def recstore(*arguments: str) -> tuple[int, str]:
        done = run_forked_command(["-m", "torchrec_recstore.cli", *arguments])
        return done.returncode, done.stdout + done.stderr

    assert recstore("sign", str(program), "--key", str(key)) == (
        0,
        f"signed {program} with the key {key}\n",
    )
    status, shown = recstore("inspect", str(program), "--key", str(key))
    assert status == 0
    assert "kind            package" in shown
    assert f"signature       good, of {key}" in shown
    status, shown = recstore("inspect", str(program), "--key", str(other_key))
    assert status == 2
    assert "is not signed with the key" in shown
    status, shown = recstore("inspect", str(program.parent), "--key", str(key))
    assert status == 2
    assert "--key needs the file of an exported model, a delta or a package" in shown


_COMPILE = """if True:
    import sys, torch
    program = torch.export.load(sys.argv[1])
    torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[2])
"""
_LOAD = """if True:
    import sys, torch
    loaded = torch._inductor.aoti_load_package(sys.argv[1])
    print(loaded(torch.ones(3)).tolist())
"""
_EVIL = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void run(void) { fclose(fopen(getenv("EVIL_TARGET"), "w")); }
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_code_of_a_package_that_is_not_signed_does_not_run(
    tmp_path: Path, program: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "compiled.pt2"
    subprocess.run(
        [sys.executable, "-c", _COMPILE, str(program), str(package)], check=True
    )
    sign_package(package, key=key)
    assert load_package(package, key=key)(torch.ones(3)).tolist() == [2.0] * 3
    plain = subprocess.run(
        [sys.executable, "-c", _LOAD, str(package)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert plain.stdout == "[2.0, 2.0, 2.0]\n"

    # Somebody who can write the file puts a library into it. Loading it runs its code,
    # before any call.
    target = tmp_path / "written-by-the-package"
    source = tmp_path / "evil.c"
    source.write_text(_EVIL)
    library = tmp_path / "evil.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True
    )
    evil = tmp_path / "evil.pt2"
    with (
        zipfile.ZipFile(package) as archive,
        zipfile.ZipFile(evil, "w", zipfile.ZIP_STORED) as changed,
    ):
        for name in archive.namelist():
            changed.writestr(
                name,
                library.read_bytes() if name.endswith(".so") else archive.read(name),
            )
    monkeypatch.setenv("EVIL_TARGET", str(target))
    subprocess.run(
        [sys.executable, "-c", _LOAD, str(evil)],
        env=dict(os.environ),
        capture_output=True,
        check=False,
    )
    assert target.exists()
    target.unlink()
    shutil.copy(evil, tmp_path / "checksum.pt2")
    sign_package(tmp_path / "checksum.pt2")  # everyone can compute a checksum
    for path in (evil, tmp_path / "checksum.pt2"):
        with pytest.raises(ValueError, match=r"has no signature|has no checksum"):
            load_package(path, key=key)
    assert not target.exists()
