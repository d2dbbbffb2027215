"""The code of docs/modules.md runs and prints what it says."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

DOCUMENT = (Path(__file__).parents[1] / "docs" / "modules.md").read_text()


def test_code_blocks() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    assert len(blocks) == 5
    printed = StringIO()
    with redirect_stdout(printed):
        exec("\n".join(blocks), {})
    assert printed.getvalue().splitlines() == re.findall(r"print\(.*\)  # (.*)", "\n".join(blocks))
