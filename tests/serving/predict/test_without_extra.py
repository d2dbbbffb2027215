"""Exports, publishers and followers work without the extra ``predict``, and the server
of predictions names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ...interpreters import ForkingInterpreter

pytestmark = pytest.mark.slow

# The import system does not find the packages of the extra, as if they were not
# installed.
WITHOUT_EXTRA = """
import sys
missing = {"grpc", "prometheus_client", "tornado", "torchrec_recstore_service"}
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing or name.startswith("google.protobuf"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
"""
MODEL = """
from pathlib import Path
import torch
from torch import nn
from torchrec_recstore.modules import RecStoreEmbedding
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = RecStoreEmbedding(100, 4)
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).sum(1)
model = Model()
ids = torch.tensor([3, -7, 2**40])
model(ids).sum().backward()
expected = model.eval()(ids)
"""
NAMES_THE_EXTRA = "which is not installed: pip install 'path/to/torchrec_recstore/serving[predict]' path/to/torchrec_recstore/service"


IMPORTS = """
import torch
import torchrec_recstore.inference
import torchrec_recstore.modules
"""


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ForkingInterpreter]:
    """An interpreter that lacks the packages, and has imported what programs import."""
    interpreter = ForkingInterpreter(WITHOUT_EXTRA + IMPORTS, "-W", "ignore")
    yield interpreter
    interpreter.close()


@pytest.fixture
def run(interpreter: ForkingInterpreter, tmp_path: Path) -> Callable[[str], str]:
    """A function that runs a program in an empty folder, and returns what it prints."""

    def run_program(code: str) -> str:
        ended = interpreter.run(code, tmp_path)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return run_program


def test_exports(run: Callable[[str], str]) -> None:
    run(
        MODEL
        + """
from torchrec_recstore.inference import export_delta, export_for_inference, read_delta
for index in ("sorted", "hash"):
    export_for_inference(model, "model.pt", dtype=torch.float32, index=index)
    export_delta(model, "delta.safetensors", base="model.pt")
    served = torch.jit.load("model.pt")
    served.apply_delta(read_delta("delta.safetensors"))
    assert torch.equal(served(ids), expected)
""",
    )


def test_a_publisher_and_a_follower(run: Callable[[str], str]) -> None:
    run(
        MODEL
        + """
from torchrec_recstore.inference import DeltaPublisher, follow
with DeltaPublisher(model, "published", every_s=0, dtype=torch.float32) as publisher:
    publisher.step()
with follow("published") as follower:
    assert torch.equal(follower.model(ids), expected)
import torchrec_recstore_serving.publish.redis_publications
""",
    )


def test_the_server_names_the_extra(run: Callable[[str], str]) -> None:
    printed = run(
        """
try:
    from torchrec_recstore_serving.predict.predictor import serve_predictions
except ImportError as error:
    print(error)
""",
    )
    assert NAMES_THE_EXTRA in printed
    printed = run(
        """
import sys
from torchrec_recstore.cli import main
sys.argv = ["recstore", "follow", "published", "--listen", "127.0.0.1:0"]
sys.stderr = sys.stdout
try:
    main()
except SystemExit as ended:
    print("status", ended.code)
""",
    )
    assert NAMES_THE_EXTRA in printed
    assert printed.count("\n") == 2
    assert "status 2" in printed
