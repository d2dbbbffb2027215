"""The page asks a server for its metrics by curl, which a slim image lacks.

MLflow and Weights & Biases are replaced by functions with their public signatures.
"""

import shutil
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

from tests.project.docs.run_page import Missing

if shutil.which("curl") is None:
    raise Missing("curl is not on this machine")

logged = []


def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
    logged.append((dict(metrics), step))


class Run:
    def log(self, data: dict[str, object], step: int | None = None) -> None:
        logged.append((dict(data), step))

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        pass


@contextmanager
def start_run() -> Iterator[None]:
    yield None


mlflow = types.ModuleType("mlflow")
mlflow.start_run = start_run
mlflow.log_metrics = log_metrics
wandb = types.ModuleType("wandb")
wandb.init = lambda project: Run()
sys.modules["mlflow"] = mlflow
sys.modules["wandb"] = wandb
