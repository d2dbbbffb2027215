"""TorchRec's DLRM with raw ids by Accelerate: a plain loop with save_state.

The same command continues to the bit.

    python examples/trainers/accelerate_loop.py                  # generated rows
    python examples/trainers/accelerate_loop.py --data train.txt --folder runs/accelerate
    accelerate launch --cpu --num_processes 2 examples/trainers/accelerate_loop.py --data train.txt

accelerator.prepare gets the optimizer of the dense layers and the data, but not the
model: DistributedModelParallel has distributed it. Two hooks save and load the model
with save_checkpoint and load_checkpoint, within save_state and load_state. After a
crash, or after Ctrl-C, give the same command again, with any number of processes.

The model is that of examples/dlrm/minimal.py. The log is split by time: the first 80 %
train, the last 10 % test. Packages: requirements/trainers.txt.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, skip_first_batches
from torch import Tensor
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
    counts, ids, labels = (torch.stack(column) for column in zip(*rows, strict=True))
    return Batch(counts, features(ids), labels)


def main(data: Path | None, folder: Path, checkpoint_every: int) -> None:
    """Trains for one epoch, from the newest checkpoint on if there is one, and prints
    the AUC of the test rows.
    """
    prepare_torch()
    accelerator = Accelerator(cpu=True)
    # Accelerate makes a process group for several processes only
    if accelerator.num_processes == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = build()
    # all parameters but those of the tables
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.Adam(dense.values(), lr=0.001)

    rows = TensorDataset(*(read(str(data)) if data else generate()))
    training, test = range(len(rows) * 8 // 10), range(len(rows) * 9 // 10, len(rows))
    batch_size = BATCH_SIZE // accelerator.num_processes
    training = DataLoader(
        rows, batch_size, sampler=training, drop_last=True, collate_fn=batch_of
    )
    test = DataLoader(rows, 4096, sampler=test, collate_fn=batch_of)
    # each process gets some of the batches
    optimizer, training, test = accelerator.prepare(optimizer, training, test)

    step, begin = 0, 0
    accelerator.register_save_state_pre_hook(
        lambda models, weights, path: save_checkpoint(
            model, f"{path}/model", training_state={"step": step}
        )
    )
    accelerator.register_load_state_pre_hook(
        lambda models, path: load_checkpoint(model, f"{path}/model")
    )

    def save() -> None:
        """Saves under another name first, so that a crash leaves no checkpoint without
        some of its files.
        """
        if accelerator.is_main_process:
            shutil.rmtree(folder / "saving", ignore_errors=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(folder / "saving"))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (folder / "saving").rename(folder / f"step-{step:09}")
            for old in sorted(folder.glob("step-*"))[:-KEEP]:
                shutil.rmtree(old)

    if newest := max(folder.glob("step-*"), default=None):
        accelerator.load_state(str(newest))
        step = begin = int(newest.name.removeprefix("step-"))
        accelerator.print(f"continues after step {step}")
    accelerator.wait_for_everyone()  # until all processes have read the names
    for batch in skip_first_batches(training, begin):
        optimizer.zero_grad()
        loss, _ = model(batch)
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        if step % checkpoint_every == 0:
            save()
            accelerator.print(
                f"step {step}: training loss {loss.item():.4f}", flush=True
            )
    if step > begin and step % checkpoint_every:
        save()

    model.eval()
    with torch.no_grad():
        # without rows twice
        tested = [accelerator.gather_for_metrics(model(batch)[1][1:]) for batch in test]
    logits, labels = (torch.cat(parts) for parts in zip(*tested, strict=True))
    area = binary_auroc(logits, labels.long()).item()
    num_rows = sum(stats.rows for stats in table_stats(model).values())
    accelerator.print(
        f"{num_rows:,} rows in {len(SPARSE)} tables, test AUC {area:.4f}", flush=True
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
