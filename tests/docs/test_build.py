"""The documentation builds without a warning, its links lead somewhere, and the reference has every public name."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from sphinx.util.inventory import InventoryFile

import torchrec_recstore

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(output / "doctrees")]
    run = subprocess.run([*command, str(DOCS), str(output / "html")], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return output / "html"


def test_the_reference_has_every_public_name(site: Path) -> None:
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    there = {name for kind, names in inventory.data.items() if kind.startswith("py:") for name in names}
    assert len(there) > 100
    missing = set()
    packages = [
        each.name for each in pkgutil.iter_modules(torchrec_recstore.__path__, "torchrec_recstore.") if each.ispkg
    ]
    for package in ["torchrec_recstore", *packages]:
        for name in getattr(importlib.import_module(package), "__all__", ()):
            if not there & {f"{package}.{name}", f"torchrec_recstore.{name}"}:
                missing.add(f"{package}.{name}")
    assert not missing


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    """A page is read without a network: no script, style or picture of another host."""
    for page in site.rglob("*.html"):
        for tag in ("<script", "<link", "<img"):
            for part in page.read_text().split(tag)[1:]:
                source = part.split(">")[0]
                assert 'src="http' not in source, page
                assert 'rel="stylesheet" href="http' not in source, page
