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
from tests.checkpoint.test_info import Document, change
from tests.errors.situations import situation
from tests.sharders.models import bag, collection, sharded
from torchrec_recstore import (
    compact_checkpoint,
    load_checkpoint,
    load_distributed_checkpoint,
    load_distributed_state,
    save_checkpoint,
)
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


@situation(
    "CheckpointError",
    ".../item-00000-0-8-00000.safetensors is damaged: its checksum does not fit",
)
def a_bit_flipped(one_rank: None, tmp_path: Path) -> None:
    """A damaged file.

    Cause: the bytes of the file are not those that were written, because of a disk
    fault or an incomplete copy. Fix: copy the file again from a complete copy, or load
    an older checkpoint.
    """
    file = only(saved(tmp_path / "1000"), "*item*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    load_checkpoint(models.recstore(), tmp_path / "1000")


@situation("CheckpointError", ".../item-00000-0-8-00000.safetensors is missing")
def a_file_deleted(one_rank: None, tmp_path: Path) -> None:
    """A missing file.

    Cause: a part of the checkpoint was deleted, or was not copied with the other files.
    Fix: copy the whole directory of the checkpoint.
    """
    only(saved(tmp_path / "1000"), "*item*").unlink()
    load_checkpoint(models.recstore(), tmp_path / "1000")


@situation(
    "CheckpointError",
    ".../1001 is a delta of another checkpoint than the one that is now at .../1000",
)
def a_base_saved_again(one_rank: None, tmp_path: Path) -> None:
    """A base that was replaced.

    Cause: the base of a delta was deleted and saved again. Fix: keep the bases of
    deltas, or fold the deltas with `recstore compact` before you replace the base.
    """
    model = models.recstore()
    models.train(model)
    save_checkpoint(model, tmp_path / "1000")
    save_checkpoint(model, tmp_path / "1001", delta_of=tmp_path / "1000")
    models.train(model)
    shutil.rmtree(tmp_path / "1000")
    save_checkpoint(model, tmp_path / "1000")
    load_checkpoint(model, tmp_path / "1001")


@situation(
    "FileExistsError",
    ".../1000 is needed to load .../1001, which is a delta of it: save to another path,"
    " or fold that delta first (recstore compact) and delete it",
)
def a_base_overwritten(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    save_checkpoint(model, tmp_path / "1000")
    save_checkpoint(model, tmp_path / "1001", delta_of=tmp_path / "1000")
    save_checkpoint(model, tmp_path / "1000", overwrite=True)


@situation(
    "FileExistsError",
    ".../1000 contains files that do not belong to the checkpoint and would be deleted"
    " with it: notes.txt; move them away, or save to another path",
)
def notes_beside_the_rows(one_rank: None, tmp_path: Path) -> None:
    (saved(tmp_path / "1000") / "notes.txt").write_text("keep this")
    save_checkpoint(models.recstore(), tmp_path / "1000", overwrite=True)


@situation(
    "BlockingIOError",
    ".../1000 cannot be written: process ... on host ... has been writing it since ...:"
    " wait for that process, or use another path",
)
def a_second_saver(one_rank: None, tmp_path: Path) -> None:
    with Destination(tmp_path / "1000"):
        save_checkpoint(models.recstore(), tmp_path / "1000")


@situation(
    "BlockingIOError",
    ".../1000, which .../1001 needs, cannot be used: process ... on host ... has been"
    " writing it since ...: wait for that process",
)
def a_base_being_saved_again(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    save_checkpoint(model, tmp_path / "1000")
    with Destination(tmp_path / "1000", overwrite=True):
        save_checkpoint(model, tmp_path / "1001", delta_of=tmp_path / "1000")


@situation(
    "CheckpointError",
    ".../metadata.json is of version 1000 of the format 'recstore checkpoint', which"
    " torchrec_recstore ... does not know: a newer version wrote it; upgrade with: pip"
    " install --upgrade path/to/torchrec_recstore",
)
def from_the_future(one_rank: None, tmp_path: Path) -> None:
    metadata = only(saved(tmp_path / "1000"), "*.json")
    document = json.loads(metadata.read_text())
    document["version"] = 1000
    metadata.write_text(json.dumps(document))
    load_checkpoint(models.recstore(), tmp_path / "1000")


@situation(
    "CheckpointError",
    ".../metadata.json: a value of the type 'TableOptions' has the field 'shape', which"
    " torchrec_recstore ... does not know: a newer version wrote it; upgrade with: pip"
    " install --upgrade path/to/torchrec_recstore",
)
def an_option_from_the_future(one_rank: None, tmp_path: Path) -> None:
    def with_it(document: Document) -> None:
        document["tables"]["item"]["options"]["shape"] = "round"

    change(saved(tmp_path / "1000"), with_it)
    load_checkpoint(models.recstore(), tmp_path / "1000")


@situation(
    "CheckpointError",
    ".../1000 has the file item-00000-0-8-00000.safetensors, which belongs to no table:"
    " a part is not listed",
)
def a_part_left_out(one_rank: None, tmp_path: Path) -> None:
    """A part that is not in the metadata.

    Cause: `metadata.json` is wrong or was edited by hand. The checksums are correct,
    but the table would lose rows. Fix: load an older checkpoint, and save with
    `save_checkpoint`.
    """
    change(
        saved(tmp_path / "1000"),
        lambda document: document["tables"]["item"]["parts"].pop(),
    )
    load_checkpoint(models.recstore(), tmp_path / "1000")


@situation(
    "CheckpointError", ".../1000: table 'item' has 7 rows, and its parts have ..."
)
def a_wrong_number_of_rows(one_rank: None, tmp_path: Path) -> None:
    """Parts that do not have the table's rows.

    Cause: `metadata.json` is wrong, or it lists files of another checkpoint. An id in
    several parts gives a similar error. Fix: load an older checkpoint, and save with
    `save_checkpoint`.
    """
    change(
        saved(tmp_path / "1000"),
        lambda document: document["tables"]["item"].update(rows=7),
    )
    load_checkpoint(models.recstore(), tmp_path / "1000")


@situation(
    "ValueError",
    "the checkpoint .../1000 has no table 't_item': strict=False leaves the model's as"
    " it is",
)
def a_new_table(one_rank: None, tmp_path: Path) -> None:
    save_checkpoint(sharded(collection(bag("t_user"))), tmp_path / "1000")
    load_checkpoint(
        sharded(collection(bag("t_user"), bag("t_item", ["item"]))), tmp_path / "1000"
    )


@situation(
    "ValueError",
    "the model has no RecStore table 't_item', which the checkpoint .../1000 has:"
    " strict=False ignores the checkpoint's table",
)
def a_table_less(one_rank: None, tmp_path: Path) -> None:
    save_checkpoint(
        sharded(collection(bag("t_user"), bag("t_item", ["item"]))), tmp_path / "1000"
    )
    load_checkpoint(sharded(collection(bag("t_user"))), tmp_path / "1000")


@situation(
    "ValueError",
    "table 't_user' has dim 4 in the checkpoint .../1000, 8 in the model: a function in"
    " rows={...}, with optimizer=False, can make rows of the other dim",
)
def another_dim(one_rank: None, tmp_path: Path) -> None:
    save_checkpoint(sharded(collection(bag("t_user", dim=4))), tmp_path / "1000")
    load_checkpoint(sharded(collection(bag("t_user", dim=8))), tmp_path / "1000")


@situation(
    "ValueError",
    "table 'user' was saved with the optimizer RowWiseAdagrad(lr=0.1, eps=1e-08,"
    " weight_decay=0.0, weight_decay_mode='l2'), whose state does not fit the model's"
    " Adam(lr=0.1, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0): optimizer=False"
    " loads the rows without it",
)
def another_optimizer(one_rank: None, tmp_path: Path) -> None:
    save_checkpoint(models.recstore(), tmp_path / "1000")
    load_checkpoint(models.recstore(optimizer=EmbOptimType.ADAM), tmp_path / "1000")


@situation(
    "ValueError",
    "delta_of: this model has neither saved nor loaded .../1000: save without delta_of",
)
def an_unknown_base(one_rank: None, tmp_path: Path) -> None:
    saved(tmp_path / "1000")
    save_checkpoint(models.recstore(), tmp_path / "1001", delta_of=tmp_path / "1000")


@situation(
    "ValueError",
    "the checkpoint has no optimizer state of RecStore table 'user': save"
    " model.fused_optimizer.state_dict() with the model, or let it start at zero with"
    " strict=False",
)
def weights_alone(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "1000")
    load_distributed_checkpoint(model, tmp_path / "1000")


@situation(
    "ValueError",
    "sparse.embedding_bags.user.weight: the checkpoint has 1 ids outside [0, 3), and"
    " row i is id i",
)
def an_id_that_a_stock_table_lacks(one_rank: None, tmp_path: Path) -> None:
    key = "sparse.embedding_bags.user.weight"
    saved = {
        key: torch.ones(2, 8),
        f"{key}_id": torch.tensor([1, -1]),
        f"{key}_rows": torch.tensor([2]),
    }
    dcp.save(saved, checkpoint_id=tmp_path / "1000")
    load_distributed_state({key: torch.ones(3, 8)}, checkpoint_id=tmp_path / "1000")


@situation(
    "ValueError",
    "the checkpoint .../1000 has no table and no tensor of the model:"
    " load_distributed_state loads the state of an optimizer alone",
)
def an_optimizer_alone(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    dcp.save(model.fused_optimizer.state_dict(), checkpoint_id=tmp_path / "1000")
    load_distributed_checkpoint(model, tmp_path / "1000")


@situation(
    "ValueError",
    "the checkpoint has the model under the keys 'ema', 'net': set model_key to one of"
    " them",
)
def two_models(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    dcp.save(
        {"net": model.state_dict(), "ema": model.state_dict()},
        checkpoint_id=tmp_path / "1000",
    )
    load_distributed_checkpoint(model, tmp_path / "1000")


@situation(
    "ValueError",
    "embedding_bags.t_user.weight is a ShardedTensor: a checkpoint holds RecStore"
    " tables and plain tensors; use torch.distributed.checkpoint for tables on"
    " TorchRec's own kernels",
)
def a_stock_table(one_rank: None, tmp_path: Path) -> None:
    stock = {
        "t_user": ParameterConstraints(
            sharding_types=["table_wise"], compute_kernels=["fused"]
        )
    }
    model = sharded(collection(bag("t_user"), device="cpu"), constraints=stock)
    save_checkpoint(model, tmp_path / "1000")


@situation(
    "ValueError",
    "0.weight is the table of a module that is not sharded: a checkpoint holds the"
    " tables of sharded modules; save and load the state_dict of this module",
)
def an_eager_module(tmp_path: Path) -> None:
    save_checkpoint(torch.nn.Sequential(RecStoreEmbedding(100, 8)), tmp_path / "1000")


@situation(
    "TypeError",
    "training_state/schedule is of type ReLU, which cannot be saved: pass plain values"
    " and tensors",
)
def a_lambda(one_rank: None, tmp_path: Path) -> None:
    save_checkpoint(
        models.recstore(),
        tmp_path / "1000",
        training_state={"schedule": torch.nn.ReLU()},
    )


@situation(
    "FileExistsError", ".../1000 exists already: pass overwrite=True to replace it"
)
def saved_twice(one_rank: None, tmp_path: Path) -> None:
    save_checkpoint(models.recstore(), saved(tmp_path / "1000"))


@situation("FileExistsError", ".../1000 exists already: name a path that does not")
def folded_twice(one_rank: None, tmp_path: Path) -> None:
    compact_checkpoint(saved(tmp_path / "1000"), tmp_path / "1000")


@situation("FileNotFoundError", "no checkpoint at .../1000: no such directory")
def nothing_there(one_rank: None, tmp_path: Path) -> None:
    """Loading from a path without a checkpoint.

    Cause: the path is wrong, or the save has failed: a failed save leaves no
    checkpoint. Fix: look for the newest checkpoint in the parent directory. `recstore
    inspect` shows the contents of a directory.
    """
    load_checkpoint(models.recstore(), tmp_path / "1000")


@situation("OSError", "[Errno 20] Not a directory: '.../run'")
def a_file_in_the_way(one_rank: None, tmp_path: Path) -> None:
    """A directory that cannot be written.

    Cause: a part of the path is a file, the user has no rights, or the disk is full
    (`No space left on device`). Fix: save to another path, or free space on the disk.
    """
    (tmp_path / "run").write_text("no folder")
    save_checkpoint(models.recstore(), tmp_path / "run" / "1000")
