"""Where the three distributions of the repository are."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:  # a requirement of pytest
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECTS = {
    "torchrec_recstore": ROOT,
    "torchrec_recstore_service": ROOT / "service",
    "torchrec_recstore_serving": ROOT / "serving",
}
"""The folder with the ``pyproject.toml`` of each package."""

PYTHON_PATH = os.pathsep.join(map(str, PROJECTS.values()))
"""The search path with which another Python imports this checkout, wherever the
packages are installed from.
"""

PACKAGES = {name: project / name for name, project in PROJECTS.items()}
"""The folder of each package."""


def metadata_of(package: str) -> dict[str, Any]:
    """The table ``[project]`` of a package's ``pyproject.toml``."""
    text = (PROJECTS[package] / "pyproject.toml").read_text()
    project: dict[str, Any] = tomllib.loads(text)["project"]
    return project


def requirements_in_project(package: str) -> dict[str, list[str]]:
    """The requirements of each extra, and under "" those that are always needed."""
    project = metadata_of(package)
    return {"": project["dependencies"], **project["optional-dependencies"]}


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
