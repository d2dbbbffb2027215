"""Export a DLRM that was trained by ``train.py`` to a TorchScript file.

    python examples/dlrm/train.py --data train.txt --checkpoint run
    # int8 rows
    python examples/dlrm/export.py --checkpoint run --out dlrm.pt
    # compares the test AUC
    python examples/dlrm/export.py --checkpoint run --out dlrm.pt --check train.txt

The file runs without this project.

The ``forward(dense, ids)`` of the file takes dense features (B, 13) float32 and ids (B,
26) int64, and returns logits (B,). docs/serving.md describes how to serve the file, in
Python with fbgemm_gpu or in C++.
"""

# Flags are read before the import of TorchRec, which takes seconds: E402.
# A flag is the field of a dataclass: RUF009.
# ruff: noqa: E402, RUF009

# This file does not import annotations from __future__, because TorchScript reads the
# annotations of Served.

import sys
from contextlib import closing
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.command import DataError, run
from common.settings import flag, flag_name, settings_of_flags


@dataclass(frozen=True)
class Export:
    """Export a trained DLRM from a checkpoint to a TorchScript file, and compare the
    test AUC.
    """

    checkpoint: Path = flag(
        MISSING,
        None,
        "A checkpoint, or a folder of checkpoints. The newest one is used.",
        metavar="DIR",
    )
    out: Path = flag(MISSING, None, "File to write.", metavar="FILE")
    dtype: Literal["int8", "int4", "fp16", "float32"] = flag(
        "int8", None, "Data type of the embedding rows."
    )
    min_frequency: int = flag(
        0, None, "Omit rows that were looked up in fewer training steps.", min=0
    )
    top_rows: int | None = flag(
        None,
        None,
        "Export only this many rows of each table, the most frequent ones.",
        min=1,
    )
    check: str | None = flag(
        None,
        None,
        "Compare the test AUC of the trained and the exported model on the data of the"
        " run: the file, or 'generated'.",
        metavar="DATA",
    )
    limit_rows: int | None = flag(
        None, None, "The value of --limit-rows of the run.", min=1
    )
    json_out: Path | None = flag(
        None, None, "Write the result as JSON.", "--json", metavar="OUT"
    )


export_settings = settings_of_flags(Export) if __name__ == "__main__" else None

import torch
from common.checkpoints import CheckpointFolder
from common.processes import process_group
from common.report import check_file, write_json
from criteo import ID_NAMES
from rich.console import Console
from rich.filesize import decimal
from sources import RowSource, batches_of, open_source, splits
from torch import Tensor, nn
from torchmetrics.classification import BinaryAUROC
from torchrec.models.dlrm import DLRM
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from train import Settings, build

from torchrec_recstore import CheckpointInfo, load_checkpoint, read_info
from torchrec_recstore.inference import export_for_inference
from torchrec_recstore_serving.export.row_formats import DTYPES

CHECK_ROWS = 4096


class Served(nn.Module):
    """A DLRM that takes plain tensors, for a server.

    Args:
        dlrm: The DLRM with the features C1 to C26. Each sample has one id of each
            feature.
    """

    def __init__(self, dlrm: DLRM) -> None:
        super().__init__()
        self.dlrm = dlrm
        self._features = list(ID_NAMES)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Returns the logits of samples, (B,).

        Args:
            dense: (B, 13) float32. The dense features.
            ids: (B, 26) int64. One id for each feature.
        """
        values = ids.t().reshape(-1)
        features = KeyedJaggedTensor(
            keys=self._features, values=values, lengths=torch.ones_like(values)
        )
        logits: Tensor = self.dlrm(dense, features)
        return logits.squeeze(1)


def export(export_settings: Export) -> None:
    """Exports the model and prints a report.

    The test AUC is compared if ``check`` is set.

    Raises:
        DataError: The checkpoint, the data or a file cannot be used.
    """
    out = export_settings.out
    check_file(export_settings.json_out)
    check_file(out)
    with process_group():
        info = checkpoint_at(export_settings.checkpoint)
        settings = settings_of_run(info, export_settings)
        source = None
        if export_settings.check is not None:
            source = source_of_run(info, settings)
        trained, _ = build(settings)
        try:
            load_checkpoint(trained, info.path)
            model = Served(trained.module.model).eval()
            export_for_inference(
                model,
                out,
                dtype=DTYPES[export_settings.dtype],
                min_frequency=export_settings.min_frequency,
                top_rows=export_settings.top_rows,
            )
        except (ValueError, OSError) as error:
            raise DataError(str(error)) from error
        file_bytes = out.stat().st_size
        rows = sum(table.rows for table in info.tables.values())
        result: dict[str, Any] = {
            "checkpoint": str(info.path),
            "out": str(out),
            "dtype": export_settings.dtype,
            "bytes": file_bytes,
            "checkpoint_bytes": info.bytes,
            "rows": rows,
        }
        console = Console(highlight=False)
        console.print(
            f"{out}: {export_settings.dtype}, {decimal(file_bytes)}", soft_wrap=True
        )
        console.print(f"checkpoint         {decimal(info.bytes)}, {rows:,} rows")
        if source is not None:
            exported = torch.jit.load(out)  # the file is compared
            trained_auc, exported_auc = aucs_of([model, exported], settings, source)
            result["test_auc_trained"] = trained_auc
            result["test_auc_exported"] = exported_auc
            console.print(f"test AUC, trained  {trained_auc:.6f}")
            console.print(f"test AUC, exported {exported_auc:.6f}")
        write_json(export_settings.json_out, result)


def checkpoint_at(path: Path) -> CheckpointInfo:
    """Returns the metadata of a checkpoint, or of the newest one in a folder."""
    newest = None
    if path.is_dir() and not (path / "metadata.json").exists():
        newest = CheckpointFolder(path, keep=1).newest()
    try:
        return newest or read_info(path)
    except (ValueError, OSError) as error:
        raise DataError(str(error)) from error


def settings_of_run(info: CheckpointInfo, export_settings: Export) -> Settings:
    """Returns the settings of the run that wrote a checkpoint.

    Settings on which the model does not depend have their default values.
    """
    identity = (info.training_state or {}).get("identity")
    if not isinstance(identity, dict):
        raise DataError(f"{info.path} was not written by train.py")
    names = ("dim", "dtype", "optimizer", "lr", "dense_lr", "batch_size", "seed")
    model_settings = {name: identity[flag_name(name)] for name in names}
    half_life = identity.get("--half-life-steps")
    if half_life:  # the frequencies are halved by it
        max_rows = max(table.rows for table in info.tables.values())
        model_settings["max_rows"] = max(1, max_rows)
        model_settings["eviction"] = "lfu"
        model_settings["half_life_steps"] = half_life
    data = None
    if export_settings.check not in (None, "generated"):
        data = Path(export_settings.check)
    return Settings(
        data=data,
        limit_rows=export_settings.limit_rows,
        skip_bad_rows=True,
        **model_settings,
    )


def source_of_run(info: CheckpointInfo, settings: Settings) -> RowSource:
    """Opens the data of the run that wrote a checkpoint."""
    source = open_source(settings)
    trained_on = info.training_state["identity"]["--data"]
    if source.fingerprint != trained_on:
        raise DataError(
            f"--check: {source.path} is not the data of {info.path}, which is"
            f" {trained_on}"
        )
    return source


@torch.no_grad()
def aucs_of(models: list[Any], settings: Settings, source: RowSource) -> list[float]:
    """Returns the AUC of each model on the test part."""
    aucs = [BinaryAUROC() for _ in models]
    _, _, test = splits(source)
    with closing(batches_of(settings, source, test, CHECK_ROWS)) as batches:
        for batch in batches:
            ids = batch.sparse_features.values().view(-1, len(batch.labels)).t()
            for model, auc in zip(models, aucs, strict=True):
                logits = model(batch.dense_features, ids)
                # In float64, because the float32 sigmoid of large logits is exactly 1,
                # which would make ties.
                auc.update(torch.sigmoid(logits.double()), batch.labels)
    return [float(auc.compute()) for auc in aucs]


if __name__ == "__main__":
    run(lambda: export(export_settings))
