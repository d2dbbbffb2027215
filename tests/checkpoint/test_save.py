"""Saves and loads in one process: all state is restored, invalid calls are refused, and
a refusal changes nothing.
"""

from __future__ import annotations

import errno
import json
import shutil
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore import (
    CheckpointError,
    RecStoreWarning,
    async_save,
    load_checkpoint,
    read_info,
    save_checkpoint,
)
from torchrec_recstore.checkpoint import writer
from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.encoding import decode
from torchrec_recstore.modules import RecStoreEmbedding

from . import models

pytestmark = pytest.mark.usefixtures("one_rank")
ELEMENT = EmbOptimType.EXACT_ADAGRAD
Held = list[Any]


def held(model: DistributedModelParallel) -> Held:
    """Returns the rows, step counts and dense weights."""
    tables = [
        shard.table
        for shards in model.module.sparse.recstore_state.shards.values()
        for shard in shards
    ]
    return [
        models.shards(model),
        [(t.steps, t.optimizer_steps) for t in tables],
        model.module.over.weight.clone(),
    ]


def assert_same(one: Held, other: Held) -> None:
    assert one[1] == other[1]
    assert torch.equal(one[2], other[2])
    for (name, columns, ids, rows), (name_2, columns_2, ids_2, rows_2) in zip(
        one[0], other[0], strict=True
    ):
        assert (name, columns) == (name_2, columns_2)
        assert torch.equal(ids, ids_2)
        assert rows.keys() == rows_2.keys()
        assert all(torch.equal(rows[key], rows_2[key]) for key in rows)


def other_model(**kinds: Any) -> DistributedModelParallel:
    """A model with other rows and weights."""
    model = models.recstore(**kinds)
    models.train(model, steps=2, distinct=90)
    with torch.no_grad():
        model.module.over.weight.add_(1)
    return model


def trained(**kinds: Any) -> DistributedModelParallel:
    model = models.recstore(**kinds)
    models.train(model)
    return model


@pytest.mark.parametrize(
    "optimizer",
    [
        EmbOptimType.EXACT_SGD,
        EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        EmbOptimType.ADAM,
        EmbOptimType.LAMB,
    ],
)
def test_forth_and_back(
    tmp_path: Path, optimizer: EmbOptimType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PART_BYTES", 700)  # several parts for each table
    model = trained(optimizer=optimizer)
    info = save_checkpoint(model, tmp_path / "saved")
    assert len(info.tables["item"].parts) > 2
    other = other_model(optimizer=optimizer)
    loaded = load_checkpoint(other, tmp_path / "saved")
    assert_same(held(other), held(model))
    assert loaded == info == read_info(tmp_path / "saved")
    for each in (model, other):
        models.train(each, steps=3, distinct=60)
    assert_same(held(other), held(model))


def test_files_are_readable_with_safetensors_alone(tmp_path: Path) -> None:
    model = trained(optimizer=EmbOptimType.ADAM)
    save_checkpoint(model, tmp_path / "saved")
    metadata = json.loads((tmp_path / "saved" / "metadata.json").read_text())
    for name, _, ids, rows in models.shards(model):
        (part,) = metadata["tables"][name]["parts"]
        tensors = safetensors.torch.load_file(tmp_path / "saved" / part["file"])
        assert torch.equal(tensors.pop("ids"), ids)
        assert (
            tensors.keys()
            == rows.keys()
            == {"weight", "exp_avg", "exp_avg_sq", "last_step", "frequency"}
        )
        assert all(torch.equal(tensors[key], rows[key]) for key in rows)


def test_training_state_and_info(tmp_path: Path) -> None:
    state = {
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(2, 3)}},
            "groups": [{"lr": 0.1}],
        },
        "position": (1, "epoch", None, True, float("inf")),
        "scalar": torch.tensor(5, dtype=torch.int64),
        "$float": {"$dict": 1},
    }
    save_checkpoint(trained(), tmp_path / "saved", training_state=state)
    for info in (
        read_info(tmp_path / "saved"),
        load_checkpoint(other_model(), tmp_path / "saved"),
    ):
        loaded = info.training_state
        assert str(loaded) == str(state)
        assert torch.equal(
            loaded["optimizer"]["state"][0]["exp_avg"],
            state["optimizer"]["state"][0]["exp_avg"],
        )  # type: ignore[index]
        assert (info.step, info.world_size, info.delta_of) == (5, 1, None)
        assert info.bytes == sum(
            f.stat().st_size for f in info.path.iterdir() if f.name != "metadata.json"
        )


def test_deltas_hold_what_changed_and_chains_load(tmp_path: Path) -> None:
    model, other = trained(optimizer=ELEMENT), other_model(optimizer=ELEMENT)
    full = save_checkpoint(model, tmp_path / "0")
    (item,) = (s.table for s in model.module.sparse.recstore_state.shards["item"])
    previous = tmp_path / "0"
    for number in range(1, 5):
        before = item.ids()
        models.train(model, steps=1, distinct=40 + 5 * number)
        gone = before[:: number + 2]
        item.remove(gone)
        models.train(model, steps=1, distinct=10)  # Some of the removed ids may return.
        info = save_checkpoint(model, tmp_path / str(number), delta_of=previous)
        rows = sum(part.rows for part in info.tables["item"].parts)
        assert rows < info.tables["item"].rows == len(item)
        load_checkpoint(other, tmp_path / str(number))
        assert_same(held(other), held(model))
        previous = tmp_path / str(number)
    # Training can continue after a load, and any earlier checkpoint can be the base of
    # a delta.
    for each in (model, other):
        models.train(each, steps=1)
    again = save_checkpoint(other, tmp_path / "other", delta_of=previous)
    assert (
        sum(part.rows for part in again.tables["item"].parts)
        < again.tables["item"].rows
    )
    save_checkpoint(model, tmp_path / "of the first", delta_of=full.path)
    for path in ("other", "of the first"):
        third = other_model(optimizer=ELEMENT)
        load_checkpoint(third, tmp_path / path)
        assert_same(held(third), held(model))
    nothing = save_checkpoint(
        model, tmp_path / "nothing", delta_of=tmp_path / "of the first"
    )
    assert [
        len(table.parts) + len(table.removed) for table in nothing.tables.values()
    ] == [0, 0]


def test_a_delta_knows_what_was_loaded_otherwise(tmp_path: Path) -> None:
    model, other = trained(), other_model()
    state = model.state_dict()
    save_checkpoint(model, tmp_path / "0")
    models.train(model, steps=1, distinct=50)
    model.load_state_dict(state)
    save_checkpoint(model, tmp_path / "1", delta_of=tmp_path / "0")
    load_checkpoint(other, tmp_path / "1")
    assert_same(held(other), held(model))
    # A load replaces all rows, so the marks of earlier saves and loads are no longer
    # known.
    load_checkpoint(model, tmp_path / "0")
    with pytest.raises(ValueError, match="no longer known"):
        save_checkpoint(model, tmp_path / "2", delta_of=tmp_path / "1")
    save_checkpoint(model, tmp_path / "2", delta_of=tmp_path / "0")
    load_checkpoint(other, tmp_path / "2")
    assert_same(held(other), held(model))


def test_a_delta_lists_the_ids_that_stay_where_most_left(tmp_path: Path) -> None:
    model = models.recstore()
    (table,) = (s.table for s in model.module.sparse.recstore_state.shards["user"])
    table.insert(torch.arange(80_000), torch.zeros(80_000, models.DIM))
    save_checkpoint(model, tmp_path / "full")
    table.remove(torch.arange(79_000))
    table.insert(torch.arange(-5, 0), torch.ones(5, models.DIM))
    info = save_checkpoint(model, tmp_path / "delta", delta_of=tmp_path / "full")
    assert info.tables["user"].removal == "stay"
    assert info.bytes < 20_000
    other = other_model()
    load_checkpoint(other, tmp_path / "delta")
    assert_same(held(other), held(model))


def test_async_save_is_the_model_of_its_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PART_BYTES", 700)
    changed, stage = threading.Event(), Destination.stage

    def stage_late(destination: Destination) -> Path:
        assert destination.path != tmp_path / "saved" or changed.wait(300)
        return stage(destination)

    monkeypatch.setattr(Destination, "stage", stage_late)
    model = trained()
    state = torch.zeros(3)
    before = held(model)
    saving = async_save(model, tmp_path / "saved", training_state={"x": state})
    with pytest.raises(ValueError, match="being saved already"):
        save_checkpoint(model, tmp_path / "other")
    assert not saving.done()
    models.train(model, steps=5, distinct=80)
    with torch.no_grad():
        model.module.over.weight.zero_()
        state.fill_(1)
    changed.set()
    saving.wait()
    assert saving.done()
    other = other_model()
    assert load_checkpoint(other, tmp_path / "saved").training_state["x"].tolist() == [
        0.0,
        0.0,
        0.0,
    ]
    assert_same(held(other), before)
    # The delta also has the state at the call of async_save.
    save_checkpoint(model, tmp_path / "delta", delta_of=tmp_path / "saved")
    load_checkpoint(other, tmp_path / "delta")
    assert_same(held(other), held(model))


def fails(destination: Destination) -> Path:
    raise OSError(errno.ENOSPC, "No space left on device", str(destination.path))


def test_an_async_save_that_fails_says_so_when_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained()
    monkeypatch.setattr(Destination, "stage", fails)
    saving = async_save(model, tmp_path / "saved")
    with pytest.raises(OSError, match="No space left") as waited:
        saving.wait()
    assert not hasattr(waited.value, "__notes__")
    saving = async_save(model, tmp_path / "saved")
    monkeypatch.undo()
    while not saving.done():
        time.sleep(0.01)
    # The next save raises the error of a save that was not waited for, once.
    with pytest.raises(OSError, match="No space left") as raised:
        async_save(model, tmp_path / "other")
    assert raised.value.__notes__ == [
        f"This is the error of async_save to {tmp_path / 'saved'}, whose wait() had not"
        " been called."
    ]
    assert not (tmp_path / "other").exists()
    async_save(model, tmp_path / "saved").wait()


def test_files_are_readable_by_whom_the_umask_lets(tmp_path: Path) -> None:
    info = save_checkpoint(trained(), tmp_path / "saved")
    expected = (tmp_path / "saved").stat().st_mode & 0o666
    assert {file.stat().st_mode & 0o777 for file in info.path.iterdir()} == {expected}


def test_overwrite_replaces_at_once(tmp_path: Path) -> None:
    model = trained()
    save_checkpoint(model, tmp_path / "saved")
    models.train(model)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_checkpoint(model, tmp_path / "saved")
    save_checkpoint(model, tmp_path / "saved", overwrite=True)
    other = other_model()
    load_checkpoint(other, tmp_path / "saved")
    assert_same(held(other), held(model))
    assert [file.name for file in tmp_path.iterdir() if file.is_dir()] == ["saved"]


def test_overwrite_replaces_checkpoints_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained()
    folder = tmp_path / "folder"
    save_checkpoint(model, folder / "1")
    (tmp_path / "file").write_text("not a checkpoint")
    monkeypatch.chdir(folder)
    for path in (folder, tmp_path / "file", ""):
        with pytest.raises(FileExistsError, match="is no checkpoint"):
            save_checkpoint(model, path, overwrite=True)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ValueError, match="needed to load it"):
        save_checkpoint(
            model, tmp_path / "link" / "1", delta_of=folder / "1", overwrite=True
        )
    load_checkpoint(other_model(), folder / "1")


def test_chains_do_not_depend_on_the_links_they_are_reached_by(tmp_path: Path) -> None:
    model, other = trained(), other_model()
    folder = tmp_path / "deep" / "folder"
    save_checkpoint(model, folder / "1")
    (tmp_path / "link").symlink_to(folder)
    latest = folder / "latest"
    latest.symlink_to("1")
    models.train(model, steps=1)
    save_checkpoint(model, tmp_path / "link" / "2", delta_of=latest)
    latest.unlink()
    latest.symlink_to("2")
    for path in (latest, folder / "2", tmp_path / "link" / "2"):
        load_checkpoint(other, path)
        assert_same(held(other), held(model))
    folder.rename(tmp_path / "moved")
    load_checkpoint(other, tmp_path / "moved" / "latest")
    assert_same(held(other), held(model))


def test_odd_training_states(tmp_path: Path) -> None:
    model = trained()
    state = {
        "best": np.float64("inf"),
        "a/b": torch.tensor([0]),
        "a": {"b": torch.tensor([1])},
        1: torch.tensor([2]),
        "1": torch.tensor([3]),
    }
    loaded = save_and_read(model, tmp_path / "saved", state)
    assert loaded["best"] == float("inf")
    assert [
        int(t) for t in (loaded["a/b"], loaded["a"]["b"], loaded[1], loaded["1"])
    ] == [0, 1, 2, 3]
    for tensor in (
        torch.ones(2).to_sparse(),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, device="meta"),
    ):
        with pytest.raises(TypeError, match=r"/x/0 is a tensor of type"):
            save_checkpoint(model, tmp_path / "odd", training_state={"x": [tensor]})


def save_and_read(model: DistributedModelParallel, path: Path, state: Any) -> Any:
    save_checkpoint(model, path, training_state=state)
    return read_info(path).training_state


def test_a_dense_tensor_that_cannot_be_written_is_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    model, other = trained(), other_model()
    for each in (model, other):
        each.module.over.register_buffer("expanded", torch.zeros(1).expand(3))
    save_checkpoint(model, tmp_path / "saved")
    before = held(other)
    with pytest.raises(
        ValueError, match=r"over\.expanded of the model cannot be written"
    ):
        load_checkpoint(other, tmp_path / "saved")
    assert_same(held(other), before)


def test_bad_arguments_change_nothing(tmp_path: Path) -> None:
    model, other = trained(), other_model()
    save_checkpoint(model, tmp_path / "saved")
    for arguments, error, message in [
        (
            {"delta_of": tmp_path / "nowhere"},
            FileNotFoundError,
            "nowhere: no such directory",
        ),
        ({"delta_of": tmp_path}, FileNotFoundError, "a folder with 1 checkpoint"),
        ({"training_state": {"a": [1, object()]}}, TypeError, "/a/1 is of type object"),
        ({"training_state": {("a",): 1}}, TypeError, "key of type tuple"),
    ]:
        with pytest.raises(error, match=message):
            save_checkpoint(model, tmp_path / "new", **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="neither saved nor loaded"):
        save_checkpoint(other, tmp_path / "new", delta_of=tmp_path / "saved")
    save_checkpoint(model, tmp_path / "delta", delta_of=tmp_path / "saved")
    with pytest.raises(ValueError, match="needed to load it"):
        save_checkpoint(
            model, tmp_path / "saved", delta_of=tmp_path / "delta", overwrite=True
        )
    assert sorted(file.name for file in tmp_path.iterdir() if file.is_dir()) == [
        "delta",
        "saved",
    ]
    save_checkpoint(model, tmp_path / "new")


def test_tables_on_other_kernels_are_refused_by_name(tmp_path: Path) -> None:
    save_checkpoint(
        torch.nn.ModuleDict({"sparse": trained()}), full := tmp_path / "full"
    )
    with pytest.raises(
        ValueError,
        match=r"sparse\.embedding_bags\.(user|item)\.weight is a ShardedTensor",
    ):
        save_checkpoint(models.stock(), tmp_path / "saved")
    eager = torch.nn.ModuleDict({"sparse": trained(), "own": RecStoreEmbedding(10, 4)})
    with pytest.raises(
        ValueError, match=r"own\.weight is the table of a module that is not sharded"
    ):
        save_checkpoint(eager, tmp_path / "saved")
    with pytest.raises(
        ValueError, match="has no table 'own': strict=False leaves the model's as it is"
    ):
        load_checkpoint(eager, full)
    assert not (tmp_path / "saved").exists()


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Saves a full checkpoint and a delta of it."""
    model = trained(optimizer=ELEMENT)
    save_checkpoint(model, tmp_path / "full", training_state={"t": torch.ones(4)})
    models.train(model, steps=1, distinct=60)
    (table,) = (s.table for s in model.module.sparse.recstore_state.shards["user"])
    table.remove(table.ids()[:3])
    save_checkpoint(
        model,
        tmp_path / "delta",
        delta_of=tmp_path / "full",
        training_state={"t": torch.ones(4)},
    )
    return tmp_path


def test_a_changed_byte_in_any_file_is_found_and_named(chain: Path) -> None:
    other = other_model(optimizer=ELEMENT)
    before = held(other)
    files = sorted(
        file for name in ("full", "delta") for file in (chain / name).iterdir()
    )
    assert len(files) >= 9
    for file in files:
        whole = file.read_bytes()
        for position in {
            0,
            7,
            8,
            9,
            len(whole) // 3,
            len(whole) // 2,
            len(whole) - 9,
            len(whole) - 2,
            len(whole) - 1,
        }:
            file.write_bytes(
                whole[:position]
                + bytes([whole[position] ^ 0x20])
                + whole[position + 1 :]
            )
            with pytest.raises((CheckpointError, FileNotFoundError), match=file.name):
                load_checkpoint(other, chain / "delta")
        for damaged in (whole[:-1], whole + b" ", b""):
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=file.name):
                load_checkpoint(other, chain / "delta")
        file.unlink()
        with pytest.raises((CheckpointError, FileNotFoundError), match=file.name):
            load_checkpoint(other, chain / "delta")
        file.write_bytes(whole)
        assert_same(held(other), before)
    load_checkpoint(other, chain / "delta")


def test_a_chain_without_its_beginning_is_refused(chain: Path) -> None:
    other = other_model(optimizer=ELEMENT)
    (chain / "full").rename(chain / "elsewhere")
    with pytest.raises(
        FileNotFoundError, match=r"delta is a delta of .*full, which is not there"
    ):
        load_checkpoint(other, chain / "delta")
    shutil.copytree(chain / "delta", chain / "full")
    with pytest.raises(CheckpointError, match="delta of another checkpoint"):
        load_checkpoint(other, chain / "delta")


def test_another_format_version_is_refused(chain: Path) -> None:
    file = chain / "full" / "metadata.json"
    file.write_text(file.read_text().replace('"version": 1', '"version": 7'))
    with pytest.raises(
        CheckpointError, match=r"is of version 7 .*newer version.*pip install --upgrade"
    ):
        load_checkpoint(other_model(optimizer=ELEMENT), chain / "full")
    file.write_text('{"something": "else"}')
    with pytest.raises(CheckpointError, match="damaged"):
        read_info(chain / "full")


def test_a_model_that_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(trained(), tmp_path / "saved")
    wrong_optimizer = other_model(optimizer=EmbOptimType.ADAM)
    before = held(wrong_optimizer)
    with pytest.raises(
        ValueError,
        match=r"table 'user' was saved with the optimizer RowWiseAdagrad.*Adam",
    ):
        load_checkpoint(wrong_optimizer, tmp_path / "saved")
    assert_same(held(wrong_optimizer), before)
    monkeypatch.setattr(models, "DIM", 12)
    with pytest.raises(
        ValueError,
        match=r"table 'user' has dim 8 in the checkpoint .*saved, 12 in the model",
    ):
        load_checkpoint(other_model(), tmp_path / "saved")
    monkeypatch.undo()
    monkeypatch.setattr(models, "TABLES", {"user": ["u"], "thing": ["i", "j"]})
    other = other_model()
    before = held(other)
    with pytest.raises(ValueError, match="has no table 'thing'"):
        load_checkpoint(other, tmp_path / "saved")
    monkeypatch.setattr(models, "TABLES", {"user": ["u", "i", "j"]})
    with pytest.raises(ValueError, match="the model has no RecStore table 'item'"):
        load_checkpoint(other_model(), tmp_path / "saved")
    assert_same(held(other), before)
    load_checkpoint(other, tmp_path / "saved", strict=False)
    after = models.shards(other)
    assert torch.equal(after[1][2], before[0][1][2])  # Table 'thing' has not changed.
    assert not torch.equal(after[0][2], before[0][0][2])


def test_loading_waits_for_nobody_and_breaks_no_save(tmp_path: Path) -> None:
    model = trained()
    save_checkpoint(model, tmp_path / "first")
    (table,) = (s.table for s in model.module.sparse.recstore_state.shards["user"])
    with (
        table.snapshot(),
        pytest.raises(
            ValueError, match="table 'user': the table is being saved already"
        ),
    ):
        load_checkpoint(model, tmp_path / "first")
    load_checkpoint(model, tmp_path / "first")


def test_names_that_are_no_file_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["up//", "a/b", "x" * 150, "x" * 149 + "y", "Ünï cödé"]
    monkeypatch.setattr(
        models,
        "TABLES",
        dict(zip(names, [["u"], ["i"], ["j"], ["k"], ["l"]], strict=True)),
    )
    model = models.recstore()
    for number, shards in enumerate(model.module.sparse.recstore_state.shards.values()):
        shards[0].table.insert(
            torch.tensor([number]), torch.full((1, models.DIM), float(number))
        )
    save_checkpoint(model, tmp_path / "saved")
    other = models.recstore()
    load_checkpoint(other, tmp_path / "saved")
    assert_same(held(other), held(model))
    assert [file.name for file in tmp_path.iterdir() if file.is_dir()] == ["saved"]


def test_a_full_disk(small_disk: Path) -> None:
    model = trained()
    save_checkpoint(model, small_disk / "first")
    (table,) = (s.table for s in model.module.sparse.recstore_state.shards["user"])
    table.insert(torch.arange(10_000), torch.ones(10_000, models.DIM))
    before = held(model)
    for save in (save_checkpoint, lambda *args: async_save(*args).wait()):
        with pytest.raises(OSError, match=r"No space left on device.*second") as raised:
            save(model, small_disk / "second")
        assert raised.value.errno == 28
        assert [file.name for file in small_disk.iterdir()] == ["first"]
    assert_same(held(model), before)
    other = other_model()
    load_checkpoint(other, small_disk / "first")
    table.remove(torch.arange(10_000))
    save_checkpoint(model, small_disk / "second")  # The failed save can be repeated.
    assert_same(held(other), held(model))


def test_an_unknown_type_of_a_newer_version_is_an_error() -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"a value of the type 'Shampoo', which torchrec_recstore .* does not know"
        ),
    ):
        decode({"$type": "Shampoo"}, {})


def test_rows_that_are_not_finite_are_named_once_a_table(tmp_path: Path) -> None:
    model = models.recstore()
    models.train(model)
    (shard,) = model.module.sparse.recstore_state.shards["user"]
    ids = shard.table.ids()[:3]
    weights = shard.table.lookup(ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecStoreWarning)
        save_checkpoint(model, tmp_path / "finite")
    weights[0, 1] = torch.nan
    weights[2, 0] = -torch.inf
    shard.table.insert(ids, weights)
    with pytest.warns(RecStoreWarning) as caught:
        save_checkpoint(model, tmp_path / "first")
    assert [str(warning.message) for warning in caught] == [
        "table 'user': 2 of the saved rows have NaN or infinity, and so have their"
        " lookups: go back to a checkpoint without them, and set"
        ' TableOptions(nonfinite="skip"), which leaves a row as it is when its gradient'
        " is not finite"
    ]
    assert Path(caught[0].filename) == Path(__file__)
    weights[1] = torch.nan
    shard.table.insert(ids, weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecStoreWarning)
        save_checkpoint(model, tmp_path / "second")
