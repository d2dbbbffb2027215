"""Checkpoints with correct checksums and inconsistent contents are refused, and the
error names the file.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import xxhash

from tests.formats.fixed import CHECKPOINTS
from tests.outside.files import with_checksum
from torchrec_recstore import CheckpointError
from torchrec_recstore.checkpoint.files import file_info
from torchrec_recstore.checkpoint.fold import check_rows, compact_checkpoint
from torchrec_recstore.checkpoint.info import METADATA, VERSION, read_chain, read_info
from torchrec_recstore.checkpoint.reader import held_rows, load_rows
from torchrec_recstore.options import LRU, TableOptions
from torchrec_recstore.store import Table
from torchrec_recstore_service.server.data_directory import DataDirectory
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.wire.table_spec import TableSpec

Document = dict[str, Any]
INSTALL = (
    r".* torchrec_recstore [\d.]+ does not know: .*pip install --upgrade"
    r" path/to/torchrec_recstore"
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Saves full checkpoints and deltas of one rank and of two ranks."""
    shutil.copytree(CHECKPOINTS, tmp_path / "saved")
    return tmp_path / "saved"


def change(checkpoint: Path, how: Callable[[Document], object]) -> None:
    """Changes the metadata, and corrects the checksums of the metadata and of every
    file.
    """
    file = checkpoint / METADATA
    document = json.loads(file.read_bytes())
    how(document)
    for name in document["files"]:
        if os.path.isfile(checkpoint / name):
            found = file_info(checkpoint / name)
            document["files"][name] = {"bytes": found.bytes, "xxh3_128": found.xxh3_128}
    document.pop("checksum", None)
    document["checksum"] = "0" * 32  # the last field
    text = json.dumps(document, indent=1) + "\n"
    file.write_text(text.replace("0" * 32, xxhash.xxh3_128_hexdigest(text.encode())))


def load(checkpoint: Path) -> None:
    """Loads all rows of one table into a new table."""
    chain = read_chain(checkpoint)
    table = chain[-1].tables["item"]
    with Table(table.dim, optimizer=table.optimizer, name="item") as fresh:
        load_rows(fresh, "item", chain)
        check_rows(chain, "item", held_rows(fresh))


def assert_refused(checkpoint: Path, message: str) -> None:
    """Checks that loading and folding both refuse the checkpoint."""
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        compact_checkpoint(checkpoint, checkpoint.parent / "compacted")
    assert not (checkpoint.parent / "compacted").exists()


def test_the_unchanged_ones_are_good(saved: Path) -> None:
    for path in ("full", "delta", "second_delta", "row_wise", "column_wise"):
        change(saved / path, lambda document: None)
        # The other checkpoints are bases of deltas.
        if path in ("row_wise", "column_wise"):
            compact_checkpoint(saved / path, saved / f"compact-{path}")


def test_the_folder_of_several_checkpoints_names_the_newest(tmp_path: Path) -> None:
    for number, name in enumerate(("900", "1000", "first")):
        shutil.copytree(CHECKPOINTS / "full", tmp_path / "run" / name)
        time = 1_000_000_000 + (0 if name == "first" else number)
        os.utime(tmp_path / "run" / name / METADATA, (time, time))
    # what a save that was killed leaves
    shutil.copytree(CHECKPOINTS / "full", tmp_path / "run" / ".1100.saving-1")
    with pytest.raises(FileNotFoundError) as error:
        read_info(tmp_path / "run")
    assert str(error.value) == (
        f"no checkpoint at {tmp_path / 'run'}: it is a folder with 3 checkpoint(s): pass"
        f" one of them, of which {tmp_path / 'run' / '1000'} was saved last"
    )
    with pytest.raises(FileNotFoundError, match=f"it has no {METADATA}$"):
        read_info(tmp_path)


def drop(what: str, *, file_too: bool = True) -> Callable[[Document], None]:
    def dropped(document: Document) -> None:
        part = document["tables"]["item"][what].pop()
        if file_too:
            del document["files"][part["file"]]

    return dropped


def set_value(*path: Any, to: Any) -> Callable[[Document], None]:
    def changed(document: Document) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = to(document[path[-1]]) if callable(to) else to

    return changed


PART = ("tables", "item", "parts", 0)


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        ("full", drop("parts"), r"full: table 'item' has \d+ rows, and its parts have \d"),
        ("full", drop("parts", file_too=False), "full has the file item-.*-00002.safetensors, which"),
        ("full", set_value("tables", "item", "rows", to=7), "full: table 'item' has 7 rows, and its parts have"),
        ("full", set_value("files", to=lambda files: dict(list(files.items())[1:])), "full has no checksum of dense"),
        ("full", set_value(*PART, "columns", to=[0, 4]), r"table 'item' has no shard of rank 0 and columns \(0, 4\)"),
        ("full", set_value(*PART, "rank", to=1), "table 'item' has no shard of rank 1"),
        ("full", set_value("tables", "item", "columns", to=[[0, 4]]), "table 'item' has dim 8, and column shards"),
        ("full", set_value("tables", "item", "dtype", to="int4"), "has weights of an unknown data type 'int4'"),
        ("full", set_value(*PART, "last_id", to=2**63 - 1), "item-.* and item-.* have ids in the same range"),
        ("full", set_value(*PART, "first_id", to=-(2**62)), "item-.*-00000.safetensors does not have the ids from -"),
        ("full", set_value("dense", to=[]), "full has the file dense.safetensors, which belongs to no table"),
        ("full", set_value("tables", "user", "sightings", to=[]), "the file user-.*-sightings.safetensors, which"),
        ("column_wise", drop("parts"), r"'item' has no part of the columns \(4, 8\) for the rows of item-"),
        ("row_wise", drop("parts"), r"row_wise: table 'item' has \d+ rows, and its parts have"),
        ("second_delta", drop("removed"), r"table 'item' has \d+ rows, and its files list 0 ids that stay"),
        ("delta", drop("parts"), r"table 'item' of .*delta .* and should have"),
        ("delta", set_value("tables", "item", "rows", to=lambda rows: rows + 1), r"'item' of .*delta .* should have"),
        ("delta", drop("removed"), r"table 'item' of .*delta .* and should have"),
    ],
)  # fmt: skip
def test_what_metadata_says_wrongly(
    saved: Path, name: str, how: Callable[[Document], None], message: str
) -> None:
    change(saved / name, how)
    assert_refused(saved / name, message)


def test_a_number_of_rows_that_the_file_does_not_have(saved: Path) -> None:
    def fewer(document: Document) -> None:
        document["tables"]["item"]["rows"] -= 1
        document["tables"]["item"]["parts"][0]["rows"] -= 1

    change(saved / "full", fewer)
    assert_refused(
        saved / "full",
        r"item-00000-0-8-00000.safetensors has ids of shape \(\d,\), and metadata.json"
        r" says",
    )


def test_tensors_of_another_shape(saved: Path) -> None:
    for file in (saved / "full").glob("item-*"):
        tensors = safetensors.torch.load_file(file)
        tensors["sum"] = tensors["sum"][:, None].expand(-1, 8).contiguous()
        safetensors.torch.save_file(tensors, file)
    change(saved / "full", lambda document: None)
    assert_refused(
        saved / "full", r"item-.* has tensors of the shapes .*'sum': \[\d, 8\]"
    )


def one_id_twice(checkpoint: Path) -> int:
    """Replaces the id of a row of one rank by an id of the other rank.

    The metadata stays consistent.
    """
    (_, one), (path, other) = (
        (path, safetensors.torch.load_file(path))
        for path in sorted(checkpoint.glob("item-*"))
    )
    ids = other["ids"]
    place, id = next(
        (place, id)
        for id in one["ids"].tolist()
        for place in range(1, len(ids) - 1)
        if ids[place - 1] < id < ids[place + 1]
    )
    ids[place] = id
    safetensors.torch.save_file(other, path)
    change(checkpoint, lambda document: None)
    return id


def small_table(checkpoint: Path) -> Table:
    """Loads a table into a table that has no room for all rows."""
    optimizer = read_chain(checkpoint)[-1].tables["item"].optimizer
    return Table(
        8, optimizer=optimizer, options=TableOptions(max_rows=4, eviction=LRU())
    )


def test_an_id_in_the_parts_of_two_ranks(saved: Path) -> None:
    """Only the ids show the damage.

    A table without room for all rows also refuses the checkpoint.
    """
    id = one_id_twice(saved / "row_wise")
    message = f"table 'item' of .*row_wise has the id {id} in several parts"
    assert_refused(saved / "row_wise", message)
    chain = read_chain(saved / "row_wise")
    with Table(
        8,
        optimizer=chain[-1].tables["item"].optimizer,
        options=TableOptions(max_rows=4, eviction=LRU()),
    ) as small:
        load_rows(small, "item", chain)
        assert held_rows(small) is None
        with pytest.raises(CheckpointError, match=message):
            check_rows(chain, "item", held_rows(small))


def test_a_table_without_room_for_all_rows_takes_a_good_one(saved: Path) -> None:
    chain = read_chain(saved / "delta")
    with Table(
        8,
        optimizer=chain[-1].tables["item"].optimizer,
        options=TableOptions(max_rows=4, eviction=LRU()),
    ) as small:
        load_rows(small, "item", chain)
        check_rows(chain, "item", held_rows(small))
        assert len(small) == 4


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (set_value("version", to=VERSION + 1), rf"version {VERSION + 1} of the format 'recstore checkpoint'"),
        (lambda document: document.update(new=1), "metadata.json: it has the field 'new', which"),
        (lambda document: document["tables"]["item"].update(new=1), "table 'item' has the field 'new', which"),
        (lambda document: document["tables"]["item"]["parts"][0].update(new=1), "a part of table 'item' has the field"),
        (lambda document: document["tables"]["item"]["options"].update(new=1), "'TableOptions' has the field 'new'"),
        (lambda document: document["tables"]["item"]["optimizer"].update(new=1), "'RowWiseAdagrad' has the"),
        (set_value("tables", "item", "optimizer", "$type", to="Shampoo"), "a value of the type 'Shampoo'"),
        (set_value("delta_of", to={"path": "x", "checksum": "y", "new": 1}), "delta_of has the field 'new'"),
    ],
)  # fmt: skip
def test_what_a_newer_version_has_written(
    saved: Path, how: Callable[[Document], None], message: str
) -> None:
    change(saved / "full", how)
    with pytest.raises(CheckpointError, match=message + INSTALL):
        read_chain(saved / "full")


@pytest.mark.parametrize(
    "name", ["../victim", "/victim", "a/b", "..", "", "a\0b", "x" * 4096]
)
def test_a_file_whose_name_leads_out_of_the_checkpoint(saved: Path, name: str) -> None:
    def rename(document: Document) -> None:
        first = document["tables"]["item"]["parts"][0]
        document["files"][name] = document["files"].pop(first["file"])
        first["file"] = name

    change(saved / "full", rename)
    assert_refused(saved / "full", "the name of a file")


@pytest.mark.parametrize(
    "value", ["../victim", None, [], {}, {"$type": "SSDStore", "path": "../victim"}]
)
@pytest.mark.parametrize("field", ["optimizer", "options"])
def test_an_optimizer_and_options_are_of_their_types(
    saved: Path, field: str, value: object
) -> None:
    change(saved / "full", set_value("tables", "item", field, to=value))
    assert_refused(
        saved / "full", f"metadata.json: the {field} of table 'item' must be "
    )


@pytest.mark.parametrize(
    "path",
    [
        ("step",),
        ("world_size",),
        ("delta_of", "path"),
        ("files", "dense.safetensors", "xxh3_128"),
        ("tables", "item", "dim"),
        ("tables", "item", "dtype"),
        ("tables", "item", "rows"),
        ("tables", "item", "steps"),
        ("tables", "item", "optimizer_steps"),
        ("tables", "item", "times"),
        ("tables", "item", "columns", 0, 1),
        (*PART, "file"),
        (*PART, "rank"),
        (*PART, "columns", 0),
        (*PART, "first_id"),
    ],
)
@pytest.mark.parametrize("value", [["7"], {"$type": "LRU"}, 1.5, True])
def test_a_value_of_another_type(
    saved: Path, path: tuple[Any, ...], value: object
) -> None:
    how = set_value(*path, to=value)
    file = saved / "delta" / METADATA
    document = json.loads(file.read_bytes())
    how(document)
    file.write_text(with_checksum(document))
    with pytest.raises(CheckpointError, match=r"metadata\.json: "):
        read_info(saved / "delta")


@pytest.mark.parametrize(
    "store", [{"$type": "SSDStore", "path": "../victim"}, "../victim"]
)
def test_a_checkpoint_chooses_no_cold_store(saved: Path, store: object) -> None:
    """A table with the options of a checkpoint would open files at the path, and delete
    old ones.
    """
    change(
        saved / "full", set_value("tables", "user", "options", "cold_store", to=store)
    )
    assert_refused(
        saved / "full",
        "metadata.json: (the options of table 'user' name the cold|.*cold_store"
        " must be)",
    )


@pytest.mark.parametrize("field", ["step", "row", "once"])
def test_code_of_an_optimizer_is_not_taken_from_a_file(saved: Path, field: str) -> None:
    code = {
        "$type": "RowOptimizer",
        "lr": 0.1,
        "name": "mine",
        "states": {},
        field: "system(0);",
    }
    change(saved / "full", set_value("tables", "item", "optimizer", to=code))
    with pytest.raises(
        CheckpointError,
        match=f"'RowOptimizer' has the field '{field}', which files never have",
    ):
        read_chain(saved / "full")
    change(saved / "full", set_value("training_state", to=code))
    with pytest.raises(
        CheckpointError,
        match=f"'RowOptimizer' has the field '{field}', which files never have",
    ):
        read_chain(saved / "full")


@pytest.mark.parametrize(
    "field", ["step", "tables", "files", "dense", "delta_of", "training_state"]
)
def test_a_field_that_is_missing(saved: Path, field: str) -> None:
    change(
        saved / "full",
        lambda document: (
            document.pop(field) if field != "files" else document[field].clear()
        ),
    )
    with pytest.raises(
        CheckpointError, match=f"it has no field '{field}'|there is no tensor"
    ):
        read_chain(saved / "full")


@pytest.mark.parametrize("field", ["dtype", "times", "sightings", "columns"])
def test_a_field_of_a_table_that_is_missing(saved: Path, field: str) -> None:
    change(saved / "full", lambda document: document["tables"]["item"].pop(field))
    with pytest.raises(
        CheckpointError, match=f"metadata.json: table 'item' has no field '{field}'"
    ):
        read_chain(saved / "full")


def test_what_a_server_has_saved(saved: Path, tmp_path: Path) -> None:
    state = saved / "server" / "server.json"
    good = json.loads(state.read_bytes())
    for changed, message in (
        (
            {**good, "new": 1},
            f"server.json cannot be used: it has the field 'new',{INSTALL}",
        ),
        (
            {**good, "stopped": {**good["stopped"], "new": 1}},
            f"'stopped' has the field 'new',{INSTALL}",
        ),
        ({"last": "x"}, "server.json cannot be used: it has no field 'stopped'"),
    ):
        state.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            DataDirectory(saved / "server")
    spec = TableSpec(
        4,
        torch.float32,
        read_chain(saved / "full")[-1].tables["item"].optimizer,
        TableOptions(),
    )
    with pytest.raises(
        ValueError,
        match=f"not the specification of a table: it has the field 'new',{INSTALL}",
    ):
        TableSpec.from_json(json.dumps({**json.loads(spec.to_json()), "new": 1}))
    tables = HostedTables()
    change(saved / "full", drop("parts", file_too=False))
    with pytest.raises(
        CheckpointError, match=r"full has the file item-.*, which belongs to no table"
    ):
        tables.load(saved / "full")
    one_id_twice(saved / "row_wise")
    with pytest.raises(
        CheckpointError,
        match=r"table 'item' of .*row_wise has the id .* in several parts",
    ):
        tables.load(saved / "row_wise")

    def without_a_table(document: Document) -> None:
        for part in document["tables"].pop("adam")["parts"]:
            del document["files"][part["file"]]

    change(saved / "server" / "stopped-0", without_a_table)
    with pytest.raises(
        CheckpointError, match="has only the rows or only the specification of 'adam'"
    ):
        tables.load(saved / "server" / "stopped-0")
    assert not tables.specs()
    tables.close()
