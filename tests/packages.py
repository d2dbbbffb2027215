"""Where the three distributions of the repository are."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECTS = {
    "torchrec_recstore": ROOT,
    "torchrec_recstore_service": ROOT / "service",
    "torchrec_recstore_serving": ROOT / "serving",
}
"""The folder with the ``setup.cfg`` of each package."""

PYTHON_PATH = os.pathsep.join(map(str, PROJECTS.values()))
"""The search path with which another Python imports this checkout, wherever the
packages are installed from.
"""

PACKAGES = {name: project / name for name, project in PROJECTS.items()}
"""The folder of each package."""


def sources() -> dict[str, Path]:
    """The Python files of all packages by the names of their modules, without generated
    ones.
    """
    return {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for folder in PACKAGES.values()
        for path in sorted(folder.rglob("*.py"))
        if "_pb2" not in path.name
    }
