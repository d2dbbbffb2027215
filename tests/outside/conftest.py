"""The watched folders of each test, in which the test runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.outside.sandbox import Sandbox


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    sandbox = Sandbox(tmp_path / "sandbox")
    monkeypatch.chdir(sandbox.cwd)
    return sandbox
