"""Where the scripts lie that ``train`` and ``bench`` run: in the wheel, or beside the package of a checkout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrec_recstore.triples import DEFAULT

# Of setup.cfg, the one that brings a package.
_EXTRAS = {"rocksdict": "rocksdb", "redis": "redis", "hiredis": "redis"} | dict.fromkeys(
    ("matplotlib", "polars", "rich", "tensorboard", "torchmetrics", "tqdm", "typer"), "examples"
)
_PACKAGE = Path(__file__).resolve().parents[1]


def folder_of(name: str) -> Path:
    """The folder ``examples`` or ``benchmarks``.

    Raises:
        FileNotFoundError: this installation came without it.
    """
    for folder in (_PACKAGE / name, _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"this installation of torchrec_recstore came without its {name}: install its wheel")


@contextmanager
def missing_in_one_line() -> Iterator[None]:
    """Where its body imports a package that is not installed, says what to type.

    Raises:
        ValueError: with that.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "torchrec_recstore":
            raise
        raise ValueError(f"{error.name} is missing: {how_to_install(error.name)}") from None


def how_to_install(module: str) -> str:
    """What to type where a module cannot be imported.

    Args:
        module: its name, of the import that failed.
    """
    package = module.partition(".")[0]
    if package in ("torchrec", "fbgemm_gpu", "tensordict", "iopath", "pyre_extensions"):
        return (
            f"{DEFAULT.install_on_cpu} (with CUDA: pip install 'torchrec-recstore[torchrec]'; "
            "for another torch: recstore doctor)"
        )
    return f"pip install 'torchrec-recstore[{_EXTRAS.get(package, 'cli,examples,service')}]'"
