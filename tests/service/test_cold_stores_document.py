"""What docs/cold_stores.md says of shared stores holds: its code runs against real servers and prints what it says."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from tests.recstore_server import RecStoreServer

DOCUMENT = (Path(__file__).parents[2] / "docs" / "cold_stores.md").read_text()


def test_code_blocks(server: RecStoreServer, second: RecStoreServer) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    printed = StringIO()
    with redirect_stdout(printed):
        exec(block.replace("127.0.0.1:7300", server.address).replace("127.0.0.1:7301", second.address), {})
    assert printed.getvalue().splitlines() == re.findall(r"print\(.*\)  # (.*)", block)
