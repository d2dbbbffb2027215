"""The code in docs/service.md runs and prints what it says, against a real server."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from tests.recstore_server import RecStoreServer

DOCUMENT = (Path(__file__).parents[2] / "docs" / "service.md").read_text()


def test_code_blocks(own_server: RecStoreServer) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    assert len(blocks) == 2
    code = "\n".join(blocks).replace("127.0.0.1:7700", own_server.address)
    printed = StringIO()
    with redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue().splitlines() == re.findall(r"print\(.*\)  # (.*)", code)
