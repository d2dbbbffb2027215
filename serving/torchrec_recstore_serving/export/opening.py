"""Opens exported models, and checks their bytes.

Tests: tests/serving/export/test_delta.py and test_verification.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from torchrec_recstore.encoding import not_known
from torchrec_recstore_serving.export.native_library import load_library
from torchrec_recstore_serving.export.row_formats import FORMATS
from torchrec_recstore_serving.export.signing import Key
from torchrec_recstore_serving.export.verification import (
    FORMAT,
    check_file,
    verify,
)


def open_base(
    base: str | Path | torch.jit.ScriptModule,
    key: Key | None = None,
) -> torch.jit.ScriptModule:
    """Checks a served model and returns it.

    A path is loaded first, if it is signed with the key.

    Raises:
        ValueError: The model was not exported by this package, is damaged, or is of
            another format.
        OSError: There is no such file.
    """
    if not isinstance(base, torch.jit.ScriptModule):
        if not Path(base).is_file():
            raise FileNotFoundError(f"there is no exported model at {base}")
        if key is None:
            verify(base)
            return load_export(base)
        with tempfile.TemporaryDirectory(prefix="recstore-base-") as folder:
            copy = private_copy(Path(base), Path(folder), str(base), key)
            return load_export(copy)
    _check_served(base, "base")
    # A check would read all rows of a model with a hash index. Its version follows from
    # the changed rows of each delta.
    if not is_hashed(base):
        try:
            base.verify()
        except torch.jit.Error as error:
            raise ValueError(
                f"base cannot be used: {str(error).strip().splitlines()[-1]}"
            ) from error
    return base


def private_copy(
    path: Path,
    folder: Path,
    name: str,
    key: Key | None,
    on_block: Callable[[], object] = lambda: None,
) -> Path:
    """Copies a file into a folder of this process, and checks the copy.

    Nobody can change the copy afterwards.

    Returns:
        The path of the copy.

    Raises:
        OSError, ValueError: See :func:`verify`.
    """
    copy = folder / path.name
    with path.open("rb") as source, copy.open("w+b") as file:
        while block := source.read(1 << 24):
            file.write(block)
            on_block()
        file.flush()
        check_file(file, name, key, on_block)
    return copy


def load_libraries() -> None:
    """Loads the libraries that served models may need.

    A thread that loads models is started after this call.
    """
    with suppress(ImportError):  # Models with a sorted index load without the library.
        load_library()
    with suppress(ImportError):  # Models with float32 rows load without FBGEMM.
        import fbgemm_gpu  # noqa: F401  (registers the ops of quantised rows)


def load_export(path: str | Path) -> torch.jit.ScriptModule:
    """Loads a served model from a file that :func:`verify` has passed.

    Raises:
        ValueError: The model was not exported by this package.
    """
    load_libraries()
    try:
        served = torch.jit.load(path)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        cause = str(error).strip().splitlines() or [""]
        raise ValueError(
            f"{path} cannot be loaded as an exported model: {cause[0]}"
        ) from error
    assert isinstance(served, torch.jit.ScriptModule)
    _check_served(served, str(path))
    return served


def _check_served(model: torch.jit.ScriptModule, name: str) -> None:
    if not hasattr(model, "recstore_format"):
        raise ValueError(
            f"{name} is not a model that export_for_inference or export_checkpoint has"
            " written"
        )
    if model.recstore_format() != FORMAT:
        raise ValueError(not_known(f"{name} has the format {model.recstore_format()}"))


def is_hashed(base: torch.jit.ScriptModule) -> bool:
    """Returns whether a served model searches ids with a hash index."""
    return hasattr(base, "recstore_hold")


def dtype_of(base: torch.jit.ScriptModule) -> torch.dtype:
    """Returns the data type in which a served model's rows were exported."""
    name = base.recstore_row_format()
    dtypes = {row_format: dtype for dtype, row_format in FORMATS.items()}
    return dtypes[name]
