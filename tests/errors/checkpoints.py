"""Errors of checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.planner.types import ParameterConstraints

from tests.checkpoint import models
from tests.checkpoint.test_contents import Document, change
from tests.errors.situations import situation
from tests.sharders.models import bag, collection, sharded
from torchrec_recstore import compact_checkpoint, load_checkpoint, load_distributed_checkpoint, save_checkpoint
from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.modules import RecStoreEmbedding


def saved(path: Path) -> Path:
    """A checkpoint of a trained model."""
    model = models.recstore()
    models.train(model)
    save_checkpoint(model, path)
    return path


def only(directory: Path, pattern: str) -> Path:
    """The first file that matches the pattern."""
    return min(directory.glob(pattern))


@situation("A damaged file")
def a_bit_flipped(one_rank: None, tmp_path: Path) -> None:
    file = only(saved(tmp_path / "1000"), "*item*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    load_checkpoint(models.recstore(), tmp_path / "1000")


@situation("A missing file")
def a_file_deleted(one_rank: None, tmp_path: Path) -> None:
    only(saved(tmp_path / "1000"), "*item*").unlink()
    load_checkpoint(models.recstore(), tmp_path / "1000")


@situation("A base that was replaced")
def a_base_saved_again(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    models.train(model)
    save_checkpoint(model, tmp_path / "1000")
    save_checkpoint(model, tmp_path / "1001", delta_of=tmp_path / "1000")
    models.train(model)
    shutil.rmtree(tmp_path / "1000")
    save_checkpoint(model, tmp_path / "1000")
    load_checkpoint(model, tmp_path / "1001")


@situation("Replacing a checkpoint that a delta needs")
def a_base_overwritten(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    save_checkpoint(model, tmp_path / "1000")
    save_checkpoint(model, tmp_path / "1001", delta_of=tmp_path / "1000")
    save_checkpoint(model, tmp_path / "1000", overwrite=True)


@situation("Replacing a directory with other files")
def notes_beside_the_rows(one_rank: None, tmp_path: Path) -> None:
    (saved(tmp_path / "1000") / "notes.txt").write_text("keep this")
    save_checkpoint(models.recstore(), tmp_path / "1000", overwrite=True)


@situation("Two processes that save to one path")
def a_second_saver(one_rank: None, tmp_path: Path) -> None:
    with Destination(tmp_path / "1000"):
        save_checkpoint(models.recstore(), tmp_path / "1000")


@situation("A base that is being replaced")
def a_base_being_saved_again(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    save_checkpoint(model, tmp_path / "1000")
    with Destination(tmp_path / "1000", overwrite=True):
        save_checkpoint(model, tmp_path / "1001", delta_of=tmp_path / "1000")


@situation("A format of a newer version")
def from_the_future(one_rank: None, tmp_path: Path) -> None:
    metadata = only(saved(tmp_path / "1000"), "*.json")
    document = json.loads(metadata.read_text())
    document["version"] = 1000
    metadata.write_text(json.dumps(document))
    load_checkpoint(models.recstore(), tmp_path / "1000")


@situation("A field of a newer version")
def an_option_from_the_future(one_rank: None, tmp_path: Path) -> None:
    def with_it(document: Document) -> None:
        document["tables"]["item"]["options"]["shape"] = "round"

    change(saved(tmp_path / "1000"), with_it)
    load_checkpoint(models.recstore(), tmp_path / "1000")


@situation("A part that is not in the metadata")
def a_part_left_out(one_rank: None, tmp_path: Path) -> None:
    change(saved(tmp_path / "1000"), lambda document: document["tables"]["item"]["parts"].pop())
    load_checkpoint(models.recstore(), tmp_path / "1000")


@situation("Parts that do not have the table's rows")
def a_wrong_number_of_rows(one_rank: None, tmp_path: Path) -> None:
    change(saved(tmp_path / "1000"), lambda document: document["tables"]["item"].update(rows=7))
    load_checkpoint(models.recstore(), tmp_path / "1000")


@situation("A table that the checkpoint does not have")
def a_new_table(one_rank: None, tmp_path: Path) -> None:
    save_checkpoint(sharded(collection(bag("t_user"))), tmp_path / "1000")
    load_checkpoint(sharded(collection(bag("t_user"), bag("t_item", ["item"]))), tmp_path / "1000")


@situation("A table that only the checkpoint has")
def a_table_less(one_rank: None, tmp_path: Path) -> None:
    save_checkpoint(sharded(collection(bag("t_user"), bag("t_item", ["item"]))), tmp_path / "1000")
    load_checkpoint(sharded(collection(bag("t_user"))), tmp_path / "1000")


@situation("Another dim than in the checkpoint")
def another_dim(one_rank: None, tmp_path: Path) -> None:
    save_checkpoint(sharded(collection(bag("t_user", dim=4))), tmp_path / "1000")
    load_checkpoint(sharded(collection(bag("t_user", dim=8))), tmp_path / "1000")


@situation("Another optimizer than in the checkpoint")
def another_optimizer(one_rank: None, tmp_path: Path) -> None:
    save_checkpoint(models.recstore(), tmp_path / "1000")
    load_checkpoint(models.recstore(optimizer=EmbOptimType.ADAM), tmp_path / "1000")


@situation("A delta of an unknown checkpoint")
def an_unknown_base(one_rank: None, tmp_path: Path) -> None:
    saved(tmp_path / "1000")
    save_checkpoint(models.recstore(), tmp_path / "1001", delta_of=tmp_path / "1000")


@situation("A DCP checkpoint without optimizer state")
def weights_alone(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "1000")
    load_distributed_checkpoint(model, tmp_path / "1000")


@situation("A DCP checkpoint with several models")
def two_models(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    dcp.save({"net": model.state_dict(), "ema": model.state_dict()}, checkpoint_id=tmp_path / "1000")
    load_distributed_checkpoint(model, tmp_path / "1000")


@situation("Tables on TorchRec's own kernels in a checkpoint")
def a_stock_table(one_rank: None, tmp_path: Path) -> None:
    stock = {"t_user": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])}
    model = sharded(collection(bag("t_user"), device="cpu"), constraints=stock)
    save_checkpoint(model, tmp_path / "1000")


@situation("An eager module in a checkpoint")
def an_eager_module(tmp_path: Path) -> None:
    save_checkpoint(torch.nn.Sequential(RecStoreEmbedding(100, 8)), tmp_path / "1000")


@situation("Training state that cannot be saved")
def a_lambda(one_rank: None, tmp_path: Path) -> None:
    save_checkpoint(models.recstore(), tmp_path / "1000", training_state={"schedule": torch.nn.ReLU()})


@situation("Saving to an existing path")
def saved_twice(one_rank: None, tmp_path: Path) -> None:
    save_checkpoint(models.recstore(), saved(tmp_path / "1000"))


@situation("Folding into an existing path")
def folded_twice(one_rank: None, tmp_path: Path) -> None:
    compact_checkpoint(saved(tmp_path / "1000"), tmp_path / "1000")


@situation("Loading from a path without a checkpoint")
def nothing_there(one_rank: None, tmp_path: Path) -> None:
    load_checkpoint(models.recstore(), tmp_path / "1000")


@situation("A directory that cannot be written")
def a_file_in_the_way(one_rank: None, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("no folder")
    save_checkpoint(models.recstore(), tmp_path / "run" / "1000")
