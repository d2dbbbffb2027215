"""A call of one server crosses few functions of ours in the client, so that its way is
read in minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch

from tests.recstore_server import RecStoreServer
from torchrec_recstore import RecStoreClient

# Python 3.12 runs them without a function of their own
IN_PLACE = {"<listcomp>", "<genexpr>", "<dictcomp>"}


def crossed(call: Callable[[], object]) -> list[str]:
    """The functions of our packages that a call runs in this thread, each once."""
    found: dict[tuple[str, int], str] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
        if (
            event == "call"
            and module.startswith("torchrec_recstore")
            and code.co_name not in IN_PLACE
        ):
            found[module, code.co_firstlineno] = f"{module}.{code.co_name}"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return list(found.values())


@pytest.mark.parametrize("shared_memory", [True, False])
def test_calls_of_one_server(server: RecStoreServer, shared_memory: bool) -> None:
    ids, grads = torch.tensor([1, 2, 3]), torch.ones(3, 4)
    with RecStoreClient([server.address], shared_memory=shared_memory) as client:
        client.init_data("crossed", (1000, 4))
        client.update("crossed", ids, grads)  # the first call of a client also connects
        pull = crossed(lambda: client.pull("crossed", ids))
        update = crossed(lambda: client.update("crossed", ids, grads))
    print(f"a pull crosses {len(pull)} functions, an update {len(update)}")
    assert 5 < len(pull) <= 25, "\n".join(pull)
    assert 5 < len(update) <= 30, "\n".join(update)
