"""The documentation builds without a warning, its links lead somewhere, and the
reference has every public name.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sphinx.util.inventory import InventoryFile

import torchrec_recstore
from tests.packages import ROOT

DOCS = ROOT / "docs"


@pytest.mark.slow
def test_the_site(tmp_path: Path) -> None:
    """One test, since the build takes seconds."""
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-d",
        str(tmp_path / "doctrees"),
    ]
    site = tmp_path / "html"
    run = subprocess.run(
        [*command, str(DOCS), str(site)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert not missing_names(site / "objects.inv")
    assert not pages_that_need_a_network(site)


def missing_names(inventory: Path) -> set[str]:
    """Public names that the reference does not have."""
    loaded = InventoryFile.loads(inventory.read_bytes(), uri="")
    there = {
        name
        for kind, names in loaded.data.items()
        if kind.startswith("py:")
        for name in names
    }
    assert len(there) > 100
    packages = [
        each.name
        for each in pkgutil.iter_modules(
            torchrec_recstore.__path__, "torchrec_recstore."
        )
        if each.ispkg
    ]
    return {
        f"{package}.{name}"
        for package in ["torchrec_recstore", *packages]
        for name in getattr(importlib.import_module(package), "__all__", ())
        if not there & {f"{package}.{name}", f"torchrec_recstore.{name}"}
    }


def pages_that_need_a_network(site: Path) -> list[Path]:
    """Those with a script, a style or a picture of another host."""
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    return [
        page
        for page in pages
        for tag in re.findall(r"<(?:script|link|img)\b[^>]*>", page.read_text())
        if re.search(r'src="(https?:)?//|rel="stylesheet"[^>]*href="(https?:)?//', tag)
    ]
