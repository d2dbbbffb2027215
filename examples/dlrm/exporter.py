"""Runs ``export.py``: loads the model from its checkpoint, writes the file, and compares the test AUC."""

# This file does not import annotations from __future__, because TorchScript reads the annotations of Served.

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common.checkpoints import CheckpointFolder
from common.command import DataError
from common.processes import process_group
from common.report import check_file, write_json
from common.run_settings import Bounds
from criteo import ID_NAMES
from rich.console import Console
from rich.filesize import decimal
from settings import Settings
from sharded import build
from sources import RowSource, open_source, splits, steps_of
from torch import Tensor, nn
from torchmetrics.classification import BinaryAUROC
from torchrec.models.dlrm import DLRM
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_recstore import CheckpointInfo, load_checkpoint, read_info
from torchrec_recstore.inference import export_for_inference
from torchrec_recstore.inference.row_formats import DTYPES

CHECK_ROWS = 4096


@dataclass(frozen=True)
class Export:
    """The settings of an export. Each setting is a flag of the command."""

    checkpoint: Path
    out: Path
    dtype: str
    min_frequency: int
    top_rows: int | None
    check: str | None
    limit_rows: int | None
    json_out: Path | None


class Served(nn.Module):
    """A DLRM that takes plain tensors, for a server.

    Args:
        dlrm: The DLRM with the features C1 to C26. Each sample has one id of each feature.
    """

    def __init__(self, dlrm: DLRM) -> None:
        super().__init__()
        self.dlrm = dlrm
        self._features = list(ID_NAMES)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Returns the logits, (B,), of dense features (B, 13) float32 and ids (B, 26) int64."""
        values = ids.t().reshape(-1)
        features = KeyedJaggedTensor(keys=self._features, values=values, lengths=torch.ones_like(values))
        logits: Tensor = self.dlrm(dense, features)
        return logits.squeeze(1)


def export(asked: Export) -> None:
    """Exports the model, compares the test AUC if ``check`` is set, and prints a report.

    Raises:
        DataError: The checkpoint, the data or a file cannot be used.
    """
    check_file(asked.json_out)
    check_file(asked.out)
    with process_group():
        info = _checkpoint(asked.checkpoint)
        settings = _settings(info, asked)
        source = None if asked.check is None else _source(info, settings)
        trained, _ = build(settings)
        try:
            load_checkpoint(trained, info.path)
            model = Served(trained.module.model).eval()
            exported = export_for_inference(
                model,
                asked.out,
                dtype=DTYPES[asked.dtype],
                min_frequency=asked.min_frequency,
                top_rows=asked.top_rows,
            )
            del exported  # what is checked is the file
        except (ValueError, OSError) as error:
            raise DataError(str(error)) from error
        result: dict[str, Any] = {
            "checkpoint": str(info.path),
            "out": str(asked.out),
            "dtype": asked.dtype,
            "bytes": asked.out.stat().st_size,
            "checkpoint_bytes": info.bytes,
            "rows": sum(table.rows for table in info.tables.values()),
        }
        if source is not None:
            served = torch.jit.load(asked.out)
            result["test_auc_trained"], result["test_auc_exported"] = _aucs([model, served], settings, source)
        _report(result)
        write_json(asked.json_out, result)


def _checkpoint(path: Path) -> CheckpointInfo:
    newest = None if (path / "metadata.json").exists() or not path.is_dir() else CheckpointFolder(path, 1).newest()
    try:
        return newest or read_info(path)
    except (ValueError, OSError) as error:
        raise DataError(str(error)) from error


def _settings(info: CheckpointInfo, asked: Export) -> Settings:
    """Those of the run, as far as the model depends on them."""
    identity = (info.training_state or {}).get("identity")
    if not isinstance(identity, dict):
        raise DataError(f"{info.path} was not written by train.py")
    bounds = Bounds()
    if identity.get("--half-life-steps"):  # frequencies are halved by it
        most = max(table.rows for table in info.tables.values())
        bounds = Bounds(max_rows=max(1, most), eviction="lfu", half_life_steps=identity["--half-life-steps"])
    return Settings(
        data=Path(asked.check) if asked.check not in (None, "generated") else None,
        limit_rows=asked.limit_rows,
        skip_bad_rows=True,
        backend="recstore",
        num_embeddings=1,
        sharding="table_wise",
        bounds=bounds,
        json_out=None,
        **{name: identity[f"--{name.replace('_', '-')}"] for name in _FROM_RUN},
    )


_FROM_RUN = ("dim", "optimizer", "lr", "dense_lr", "batch_size", "epochs", "seed")


def _source(info: CheckpointInfo, settings: Settings) -> RowSource:
    source = open_source(settings)
    trained_on = info.training_state["identity"]["--data"]
    if source.fingerprint != trained_on:
        raise DataError(f"--check: {source.path} is not the data of {info.path}, which is {trained_on}")
    return source


@torch.no_grad()
def _aucs(models: list[Any], settings: Settings, source: RowSource) -> list[float]:
    """Returns the AUC of each model on the test part."""
    aucs = [BinaryAUROC() for _ in models]
    _, _, test = splits(source)
    with closing(steps_of(settings, source, test, CHECK_ROWS)) as steps:
        for batch, rows in steps:
            ids = batch.sparse_features.values().view(-1, rows).t()
            for model, auc in zip(models, aucs, strict=True):
                # In float64, because the float32 sigmoid of large logits is exactly 1, which would make ties.
                auc.update(torch.sigmoid(model(batch.dense_features, ids).double()), batch.labels)
    return [float(auc.compute()) for auc in aucs]


def _report(result: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(f"{result['out']}: {result['dtype']}, {decimal(result['bytes'])}", soft_wrap=True)
    console.print(f"checkpoint         {decimal(result['checkpoint_bytes'])}, {result['rows']:,} rows")
    if "test_auc_trained" in result:
        console.print(f"test AUC, trained  {result['test_auc_trained']:.6f}")
        console.print(f"test AUC, exported {result['test_auc_exported']:.6f}")
