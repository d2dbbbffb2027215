"""Signs packages of AOTInductor (``.pt2``), and loads only signed ones.

A package contains compiled code. A process that loads it runs this code with all rights
of the process. The signature is in the comment of the zip file, which torch's loaders
in Python and C++ ignore.

Tests: tests/serving/export/test_packages.py.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from torchrec_recstore.checkpoint.files import whole_file
from torchrec_recstore_serving.export.opening import private_copy
from torchrec_recstore_serving.export.signing import key_at
from torchrec_recstore_serving.export.verification import (
    kind_of,
    remove_comment,
    sign_zip,
)


def sign_package(path: str | Path, *, key: str | Path | None = None) -> None:
    """Adds a checksum and a signature to a ``.pt2`` file.

    :func:`verify` then checks the file.

    The file can be one of ``torch._inductor.aoti_compile_and_package`` or of
    ``torch.export.save``. It is replaced at once, and torch and Triton load it as
    before. A signature that the file has already is replaced.

    Args:
        path: The file.
        key: The file of the key. Readers need the same key. Default: None, only a
            checksum is added.

    Raises:
        BlockingIOError: Another process writes the file.
        FileNotFoundError: There is no such file.
        OSError: The file or the key cannot be read, or the file cannot be written. The
            file is as it was.
        ValueError: The file is no zip file of torch, or it is an exported model, or the
            key cannot be used.
    """
    path = Path(path).resolve()  # The file that a link names is replaced, not the link.
    secret = key_at(key)
    if not path.is_file():
        raise FileNotFoundError(f"there is no package at {path}")
    with whole_file(path, keeps_mode=True) as beside:
        with path.open("rb") as source, beside.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 24)
        _check_package(beside, path)
        remove_comment(beside)
        sign_zip(beside, secret, kind="package", name=str(path))


def load_package(path: str | Path, *, key: str | Path) -> Any:
    """Loads a package of AOTInductor if it is signed with a key.

    The file is copied into a folder that other users cannot read, the copy is checked
    and then loaded. So nobody can replace the file between the check and the load.

    Args:
        path: A package that :func:`sign_package` has signed.
        key: The file of the key.

    Returns:
        The result of ``torch._inductor.aoti_load_package``, which is called as the
        model is.

    Raises:
        OSError: The file or the key cannot be read.
        ValueError: The file has no signature or the one of another key, is damaged, or
            is no package. None of its code has run.
    """
    secret = key_at(key)
    if secret is None:
        raise TypeError("key must be the path of a file, got None")
    with tempfile.TemporaryDirectory(prefix="recstore-package-") as folder:
        copy = private_copy(Path(path), Path(folder), str(path), secret)
        if kind_of(copy) != "package":
            raise ValueError(
                f"{path} is an exported model or a delta, and no package of AOTInductor"
            )
        return torch._inductor.aoti_load_package(str(copy))


def _check_package(copy: Path, path: Path) -> None:
    """Raises ValueError if a file is an exported model.

    Its signature must not be replaced by one of a package.
    """
    try:
        kind = kind_of(copy)
    except ValueError:  # no checksum yet
        return
    if kind != "package":
        raise ValueError(
            f"{path} is an exported model or a delta: pass key= when it is exported,"
            " and it is signed then"
        )
