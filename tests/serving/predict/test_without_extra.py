"""Exports, publishers and followers work without the extra ``predict``, and the server
of predictions names it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ...packages import PYTHON_PATH

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


def run(folder: Path, code: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_EXTRA + code]
    environment = os.environ | {"PYTHONPATH": PYTHON_PATH}
    ended = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_exports(tmp_path: Path) -> None:
    run(
        tmp_path,
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


def test_a_publisher_and_a_follower(tmp_path: Path) -> None:
    run(
        tmp_path,
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


def test_the_server_names_the_extra(tmp_path: Path) -> None:
    printed = run(
        tmp_path,
        """
try:
    from torchrec_recstore_serving.predict.predictor import serve_predictions
except ImportError as error:
    print(error)
""",
    )
    assert NAMES_THE_EXTRA in printed
    printed = run(
        tmp_path,
        """
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
