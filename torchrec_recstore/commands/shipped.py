"""Where the scripts lie that ``train`` and ``bench`` run: in the wheel, or beside the package of a checkout."""

from __future__ import annotations

from pathlib import Path

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


def how_to_install(module: str) -> str:
    """What to type where a module cannot be imported.

    Args:
        module: its name, of the import that failed.
    """
    package = module.partition(".")[0]
    if package in ("torchrec", "fbgemm_gpu", "tensordict", "iopath", "pyre_extensions"):
        return (
            "pip install 'torchrec-recstore[torchrec-cpu]' and then pip install --no-deps torchrec==1.8.0 "
            "(with CUDA: pip install 'torchrec-recstore[torchrec]')"
        )
    return "pip install 'torchrec-recstore[cli,examples,service]'"
