r"""TorchRec's DLRM with raw ids by Accelerate: a plain loop with save_state.

    # generated rows
    python examples/trainers/accelerate_loop.py
    python examples/trainers/accelerate_loop.py --data train.txt \
        --folder runs/accelerate
    accelerate launch --cpu --num_processes 2 \
        examples/trainers/accelerate_loop.py --data train.txt

The same command continues to the bit. accelerator.prepare gets the optimizer of the
dense layers and the data, but not the model: DistributedModelParallel has distributed
it. Two hooks save and load the model with save_checkpoint and load_checkpoint, within
save_state and load_state. After a crash, or after Ctrl-C, give the same command again,
with any number of processes.

The model is that of examples/dlrm/minimal.py. The log is split by time: the first 80 %
train, the last 10 % test. Packages: requirements/trainers.txt.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, skip_first_batches
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.classification import binary_auroc
from torchrec.datasets.utils import Batch
from torchrec.optim.optimizers import in_backward_optimizer_filter

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.command import prepare_torch
from dlrm.minimal import BATCH_SIZE, SPARSE, build, features, generate, read

from torchrec_recstore import load_checkpoint, save_checkpoint, table_stats

KEEP = 2  # checkpoints


def batch_of(rows: list[tuple[Tensor, Tensor, Tensor]]) -> Batch:
    """Makes TorchRec's batch of rows of a ``TensorDataset``."""
    counts, ids, labels = zip(*rows, strict=True)
    return Batch(
        torch.stack(counts),
        features(torch.stack(ids)),
        torch.stack(labels),
    )


def tested_auc(
    accelerator: Accelerator,
    model: nn.Module,
    test: DataLoader[Any],
) -> float:
    """Returns the AUC of the test rows."""
    model.eval()
    all_logits = []
    all_labels = []
    with torch.no_grad():
        for batch in test:
            _, (_, logits, labels) = model(batch)
            # of all processes, and no row twice
            logits, labels = accelerator.gather_for_metrics((logits, labels))
            all_logits.append(logits)
            all_labels.append(labels)
    area = binary_auroc(
        torch.cat(all_logits),
        torch.cat(all_labels).long(),
    )
    return area.item()


def main(
    data: Path | None,
    folder: Path,
    checkpoint_every: int,
) -> None:
    """Trains for one epoch, and prints the AUC of the test rows.

    The training continues from the newest checkpoint if there is one.
    """
    prepare_torch()
    accelerator = Accelerator(cpu=True)
    # Accelerate makes a process group only for several processes.
    if accelerator.num_processes == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = build()
    # all parameters but those of the tables
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.Adam(dense.values(), lr=0.001)

    rows = TensorDataset(*(read(str(data)) if data else generate()))
    num_rows = len(rows)
    batch_size = BATCH_SIZE // accelerator.num_processes
    training = DataLoader(
        rows,
        batch_size,
        sampler=range(num_rows * 8 // 10),
        drop_last=True,
        collate_fn=batch_of,
    )
    test = DataLoader(
        rows,
        4096,
        sampler=range(num_rows * 9 // 10, num_rows),
        collate_fn=batch_of,
    )
    # each process gets some of the batches
    optimizer, training, test = accelerator.prepare(optimizer, training, test)

    step = 0

    def save_model(
        models: list[nn.Module],
        weights: list[Any],
        path: str,
    ) -> None:
        save_checkpoint(model, f"{path}/model", training_state={"step": step})

    def load_model(models: list[nn.Module], path: str) -> None:
        load_checkpoint(model, f"{path}/model")

    accelerator.register_save_state_pre_hook(save_model)
    accelerator.register_load_state_pre_hook(load_model)

    def save() -> None:
        """Saves under another name first, so that every checkpoint is complete."""
        unfinished = folder / "saving"
        if accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(unfinished))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            unfinished.rename(folder / f"step-{step:09}")
            for old in sorted(folder.glob("step-*"))[:-KEEP]:
                shutil.rmtree(old)

    newest = max(folder.glob("step-*"), default=None)
    if newest is not None:
        accelerator.load_state(str(newest))
        step = int(newest.name.removeprefix("step-"))
        accelerator.print(f"continues after step {step}")
    accelerator.wait_for_everyone()  # until all processes have read the names
    first_step = step
    for batch in skip_first_batches(training, first_step):
        optimizer.zero_grad()
        loss, _ = model(batch)
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        if step % checkpoint_every == 0:
            save()
            accelerator.print(
                f"step {step}: training loss {loss.item():.4f}",
                flush=True,
            )
    if step > first_step and step % checkpoint_every != 0:
        save()

    test_auc = tested_auc(accelerator, model, test)
    table_rows = sum(stats.rows for stats in table_stats(model).values())
    accelerator.print(
        f"{table_rows:,} rows in {len(SPARSE)} tables, test AUC {test_auc:.4f}",
        flush=True,
    )


if __name__ == "__main__":
    flags = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument(
        "--data",
        type=Path,
        help="Criteo click log, plain or .gz; default: generated rows",
    )
    flags.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/accelerate"),
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
