"""TorchRec's DLRM by Ray Train on two workers, which may be killed.

    # generated rows
    python examples/trainers/ray_train.py
    # a Criteo click log, also .gz
    python examples/trainers/ray_train.py --data train.txt
    # a folder of Parquet files
    python examples/trainers/ray_train.py --data rows
    # the second worker is killed after step 80
    python examples/trainers/ray_train.py --kill-at 80

Ray Data reads the raw ids from Parquet. When a worker dies, Ray Train starts both
workers again, and they continue from the newest checkpoint. Ray Data gives each worker
the same rows in the same order again, so that the next checkpoints are the same to the
bit as without the death. Each is printed with its checksum.

The model is that of examples/dlrm/minimal.py. The log is split by time: the first 80 %
train, the last 10 % test. Packages: requirements/trainers.txt.
"""

import argparse
import logging
import os
import signal
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import ray.cloudpickle
import ray.data
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from torchmetrics.classification import BinaryAUROC
from torchrec.datasets.utils import Batch
from torchrec.optim.optimizers import in_backward_optimizer_filter

sys.path.insert(0, str(Path(__file__).parents[1]))

from dlrm import minimal
from dlrm.minimal import BATCH_SIZE, DENSE, SPARSE, build, features, generate, read

from torchrec_recstore import load_checkpoint, save_checkpoint, table_stats

WORKERS = 2
ROWS_OF_A_FILE = 4096


def write_parquet(log: Path | None, folder: Path) -> None:
    """Writes a click log, or generated rows, as Parquet files.

    The names of the files are in the order of the rows.
    """
    counts, ids, labels = read(str(log)) if log else generate()
    columns = {"label": labels.numpy()}
    columns |= dict(zip(DENSE, counts.T.numpy(), strict=True))
    columns |= dict(zip(SPARSE, ids.T.numpy(), strict=True))
    parts = pl.DataFrame(columns).iter_slices(ROWS_OF_A_FILE)
    folder.mkdir(parents=True)
    for number, part in enumerate(parts):
        part.write_parquet(folder / f"part-{number:05}.parquet")


def batch_of(columns: dict[str, np.ndarray]) -> Batch:
    """Makes TorchRec's batch of a batch of Ray Data."""
    counts = np.stack([columns[name] for name in DENSE], axis=1)
    ids = np.stack([columns[name] for name in SPARSE], axis=1)
    return Batch(
        torch.from_numpy(counts),
        features(torch.from_numpy(ids)),
        torch.tensor(columns["label"]),
    )


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Trains for one epoch and tests.

    Ray Train calls it in each worker, within a process group of all workers.
    """
    # Ray makes TorchRec print each step of its planner
    logging.disable(logging.WARNING)
    folder = Path(config["folder"])
    rank = ray.train.get_context().get_world_rank()
    steps = config["steps"]
    torch.manual_seed(0)
    model = build()
    # all parameters but those of the tables
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.Adam(dense.values(), lr=0.001)

    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        state = load_checkpoint(model, checkpoint.path).training_state
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        if rank == 0:
            print(f"continues after step {step}", flush=True)

    shard = ray.train.get_dataset_shard("rows")
    rows = iter(shard.iter_batches(batch_size=BATCH_SIZE // WORKERS))
    for columns in islice(rows, step, steps):
        optimizer.zero_grad()
        loss, _ = model(batch_of(columns))
        loss.backward()
        optimizer.step()
        step += 1
        saves = step % config["checkpoint_every"] == 0 or step == steps
        if saves:
            # The workers write it together, where Ray Train expects it. If one of them
            # dies before Ray Train knows the checkpoint, one of this name exists.
            path = folder / f"step-{step:09}"
            state = {"optimizer": optimizer.state_dict(), "step": step}
            info = save_checkpoint(model, path, training_state=state, overwrite=True)
            if rank == 0:
                print(
                    f"step {step}: training loss {loss.item():.4f}, checkpoint"
                    f" {info.checksum}",
                    flush=True,
                )
        if step == config["kill_at"] and rank == 1 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if saves:
            ray.train.report(
                {"step": step},
                checkpoint=ray.train.Checkpoint(path) if rank == 0 else None,
                checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
            )

    auc = BinaryAUROC()  # over all workers
    model.eval()
    with torch.no_grad():
        for columns in islice(rows, steps // 8, None):
            _, (_, logits, labels) = model(batch_of(columns))
            auc.update(logits.double().sigmoid(), labels.long())
    return {
        "rows": sum(stats.rows for stats in table_stats(model).values()),
        "auc": auc.compute().item(),
    }


def main(
    data: Path | None,
    folder: Path,
    kill_at: int | None,
    checkpoint_every: int,
    worker_cpus: float,
    **cluster: Any,
) -> None:
    """Starts Ray, and has it train."""
    folder = folder.absolute()
    if data is not None and data.is_dir():
        parquet = data
    else:
        parquet = folder / "data"
        if not parquet.exists():
            write_parquet(data, parquet)
    # the workers need not find its file
    ray.cloudpickle.register_pickle_by_value(minimal)
    # without a dashboard, Ray Train 2.60 warns each second
    os.environ.setdefault("RAY_LOGGER_LEVEL", "error")
    cluster = {name: value for name, value in cluster.items() if value is not None}
    ray.init(**cluster, include_dashboard=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    files = pl.scan_parquet(parquet / "*.parquet")
    num_rows = files.select(pl.len()).collect().item()
    steps = num_rows * 8 // 10 // BATCH_SIZE
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "folder": str(folder),
            "steps": steps,
            "kill_at": kill_at,
            "checkpoint_every": checkpoint_every,
        },
        # Ray Data needs CPUs, too: it waits forever if the workers take all of them.
        scaling_config=ray.train.ScalingConfig(
            num_workers=WORKERS,
            resources_per_worker={"CPU": worker_cpus},
        ),
        torch_config=TorchConfig(backend="gloo"),
        datasets={"rows": ray.data.read_parquet(str(parquet))},
        # Without it, a worker gets the rows that happen to be read first.
        dataset_config=ray.train.DataConfig(
            execution_options=ray.data.ExecutionOptions(preserve_order=True)
        ),
        run_config=ray.train.RunConfig(
            name=folder.name,
            storage_path=str(folder.parent),
            failure_config=ray.train.FailureConfig(max_failures=3),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit().return_value
    print(
        f"{result['rows']:,} rows in {len(SPARSE)} tables, test AUC"
        f" {result['auc']:.4f}",
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
        help="Criteo click log, or a folder of Parquet files; default: generated",
    )
    flags.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/ray"),
        help="folder of the run and its checkpoints",
    )
    flags.add_argument(
        "--checkpoint-every",
        type=int,
        default=40,
        help="number of steps between two checkpoints",
    )
    flags.add_argument(
        "--kill-at",
        type=int,
        help="step after which the second worker is killed, once",
    )
    flags.add_argument(
        "--worker-cpus",
        type=float,
        default=0.5,
        help="CPUs of a worker; Ray Data needs a free one",
    )
    flags.add_argument(
        "--address",
        default="local",
        help="address of a Ray cluster; default: starts one",
    )
    flags.add_argument(
        "--num-cpus",
        type=int,
        help="CPUs of the started cluster; default: all, which must be two",
    )
    flags.add_argument(
        "--object-store-memory",
        type=int,
        help="shared memory of the started cluster in bytes",
    )
    main(**vars(flags.parse_args()))
