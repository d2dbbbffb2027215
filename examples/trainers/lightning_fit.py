"""TorchRec's DLRM with raw ids by Lightning's Trainer.fit.

    # generated rows
    python examples/trainers/lightning_fit.py
    python examples/trainers/lightning_fit.py --data train.txt --folder runs/lightning
    torchrun --nproc-per-node 2 examples/trainers/lightning_fit.py --data train.txt

The same command continues to the bit. ModelCheckpoint decides when a checkpoint is
saved and which ones are kept, and Checkpoints below saves them with save_checkpoint. A
file of Lightning's own would have the weights of the rows, but not the state of their
optimizer, and only the rows of one process. After a crash, or after Ctrl-C, give the
same command again, with any number of processes.

The model is that of examples/dlrm/minimal.py. The log is split by time: the first 80 %
train, the last 10 % test. Packages: requirements/trainers.txt.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics.classification import BinaryAUROC
from torchrec.datasets.utils import Batch
from torchrec.optim.optimizers import in_backward_optimizer_filter

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.command import prepare_torch
from dlrm.minimal import BATCH_SIZE, SPARSE, batches, build, generate, read

from torchrec_recstore import load_checkpoint, save_checkpoint, table_stats


class Checkpoints(CheckpointIO):
    """Lightning's checkpoints as those of RecStore.

    All ranks call each method, and share the folder.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Saves the model and Lightning's state.

        The state has loops, callbacks, and the optimizer of the dense layers.
        """
        save_checkpoint(self.model, path, training_state=checkpoint, overwrite=True)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Loads the model, and returns Lightning's state."""
        return load_checkpoint(self.model, path).training_state

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a checkpoint that ModelCheckpoint no longer keeps."""
        if dist.get_rank() == 0 and Path(path).exists():
            shutil.rmtree(path)


class Training(lightning.LightningModule):
    """Trains and tests the model of examples/dlrm/minimal.py."""

    strict_loading = False  # there is nothing to load in its state_dict

    def __init__(self) -> None:
        super().__init__()
        self.model = build()
        self.auc = BinaryAUROC()  # over all ranks

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns nothing.

        Checkpoints saves the model, and its state_dict would copy all rows into memory.
        """
        return {}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer of the dense layers.

        The rows are updated in the backward pass.
        """
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        return torch.optim.Adam(dense.values(), lr=0.001)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Returns the loss of a batch."""
        loss, _ = self.model(batch)
        self.log("loss", loss, prog_bar=True, batch_size=len(batch.labels))
        return loss

    def test_step(self, batch: Batch, index: int) -> None:
        """Counts a batch in the AUC."""
        _, (_, logits, labels) = self.model(batch)
        self.auc.update(logits.double().sigmoid(), labels.long())


def main(data: Path | None, folder: Path, checkpoint_every: int) -> None:
    """Trains for one epoch, and prints the AUC of the test rows.

    The training continues from the newest checkpoint if there is one.
    """
    prepare_torch()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = read(str(data)) if data else generate()
    num_rows = len(rows[0])
    train_rows = tuple(tensor[: num_rows * 8 // 10] for tensor in rows)
    test_rows = tuple(tensor[num_rows * 9 // 10 :] for tensor in rows)
    # A StatefulDataLoader has a position, which Lightning saves with its loops.
    training = StatefulDataLoader(batches(train_rows, BATCH_SIZE), batch_size=None)
    test = StatefulDataLoader(batches(test_rows, 4096), batch_size=None)

    torch.manual_seed(0)
    module = Training()
    keep_newest = ModelCheckpoint(
        folder,
        "{step:09}",
        monitor="step",
        mode="max",
        save_top_k=2,
        every_n_train_steps=checkpoint_every,
    )
    trainer = lightning.Trainer(
        max_epochs=1,
        # DistributedModelParallel distributes the model. To Lightning, each process is
        # a training of its own.
        strategy=SingleDeviceStrategy("cpu"),
        plugins=[Checkpoints(module.model), LightningEnvironment()],
        callbacks=[keep_newest],
        enable_progress_bar=dist.get_rank() == 0,
        logger=False,
        enable_model_summary=False,
    )
    newest = max(folder.glob("*.ckpt"), default=None)
    trainer.fit(module, training, ckpt_path=newest)
    trainer.save_checkpoint(folder / f"step={trainer.global_step:09}.ckpt")
    trainer.test(module, test)
    table_rows = sum(stats.rows for stats in table_stats(module.model).values())
    test_auc = module.auc.compute().item()
    if dist.get_rank() == 0:
        print(
            f"{table_rows:,} rows in {len(SPARSE)} tables, test AUC {test_auc:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument(
        "--data",
        type=Path,
        help="Criteo click log, plain or .gz; default: generated rows",
    )
    flags.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/lightning"),
        help="folder of the checkpoints",
    )
    flags.add_argument(
        "--checkpoint-every",
        type=int,
        default=40,
        help="number of steps between two checkpoints",
    )
    main(**vars(flags.parse_args()))
    os._exit(0)  # gloo's threads abort in some normal exits (torch 2.13)
