"""The files of each format load, to the bit, and what is written is of the format that
it says.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from torchrec_recstore import load_checkpoint
from torchrec_recstore.checkpoint import load_distributed_checkpoint
from torchrec_recstore.checkpoint.info import read_chain
from torchrec_recstore.checkpoint.reader import load_rows, saved_state
from torchrec_recstore.inference import (
    export_delta,
    export_for_inference,
    load_library,
    read_delta,
    verify,
)
from torchrec_recstore.options import RocksDBStore
from torchrec_recstore.store import Table
from torchrec_recstore_service.server.data_directory import DataDirectory
from torchrec_recstore_service.server.native import CallCounts
from torchrec_recstore_service.server.server import ParameterServer
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.tables.limits import Limits
from torchrec_recstore_serving.export.row_formats import DTYPES

from . import fixed

FILES = fixed.CHECKPOINTS


@pytest.fixture(params=fixed.INDEXES)
def index(request: pytest.FixtureRequest) -> str:
    """The index of an export.

    Those with a hash index need the library of this torch.
    """
    if request.param == "hash":
        try:
            load_library()
        except ImportError as error:
            pytest.skip(str(error))
    return str(request.param)


def expected(name: str) -> tuple[dict[str, Tensor], Any]:
    """What is written beside the checkpoint: tensors, and JSON."""
    path = FILES / "expected" / name
    tensors = safetensors.torch.load_file(path.with_suffix(".safetensors"))
    return tensors, json.loads(path.with_suffix(".json").read_text())


def assert_holds(tables: list[Table], name: str) -> None:
    tensors, clocks = expected(name)
    tensors = dict(tensors)
    for table in tables:
        prefix = f"{table.name}/{table.columns.start}-{table.columns.stop}/"
        ids = table.ids()
        assert torch.equal(tensors.pop(f"{prefix}ids"), ids)
        for key, rows in table.read_rows(ids).items():
            wanted = tensors.pop(f"{prefix}{key}")
            assert wanted.dtype == rows.dtype
            assert torch.equal(wanted, rows), (name, prefix, key)
        assert clocks[table.name] == [table.steps, table.optimizer_steps]
    assert not tensors


@pytest.mark.parametrize(
    "name", ["full", "delta", "second_delta", "row_wise", "column_wise", "server"]
)
def test_checkpoints_load_to_the_bit(name: str) -> None:
    path = FILES / "server" / "stopped-0" if name == "server" else FILES / name
    chain = read_chain(path)
    tables = []
    for prefix in sorted({key.rpartition("/")[0] for key in expected(name)[0]}):
        table_name, _, columns = prefix.rpartition("/")
        saved = chain[-1].tables[table_name]
        first, last = map(int, columns.split("-"))
        dtype = getattr(torch, saved.dtype)
        table = Table(
            saved.dim,
            dtype,
            saved.optimizer,
            saved.options,
            name=table_name,
            columns=range(first, last),
        )
        load_rows(table, table_name, chain)
        tables.append(table)
    assert_holds(tables, name)
    admits = [table for table in tables if table.options.admission is not None]
    assert len(admits) == sum(
        len(saved.columns) for saved in chain[-1].tables.values() if saved.sightings
    )
    for table in admits:
        sightings, saved_sightings = (
            table.state().sightings,
            saved_state(chain[-1], table.name).sightings,
        )
        assert sightings is not None
        assert saved_sightings is not None
        assert len(sightings.ids) == len(saved_sightings.ids) > 0


def test_rows_expire_at_the_times_of_the_checkpoint() -> None:
    chain = read_chain(FILES / "server" / "stopped-0")
    saved = chain[-1].tables["timed"]
    table = Table(
        saved.dim, torch.float32, saved.optimizer, saved.options, name="timed"
    )
    load_rows(table, "timed", chain)
    assert table.ids().tolist() == [0, 1, 2, 100]
    for second in range(44, 93, 3):
        table.set_time(fixed.EVENT_TIME + second)
        table.lookup(torch.tensor([100]), train=True)
    ids = table.ids().tolist()
    assert 0 not in ids  # not used for more than 60 + 30 s
    assert 2 in ids  # not used for 52 s


@pytest.mark.usefixtures("one_rank")
def test_checkpoints_load_into_a_model() -> None:
    model = fixed.sharded()
    info = load_checkpoint(model, FILES / "full")
    assert str(info.training_state) == str(fixed.TRAINING_STATE)
    assert_holds(fixed.shards(model), "full")
    assert model.module.over.weight.tolist() == [[0.5, -2.0]]
    for name in ("delta", "second_delta"):
        load_checkpoint(model, FILES / name)
        assert_holds(fixed.shards(model), name)
    assert model.module.over.bias.tolist() == [2.5]
    model = fixed.sharded()
    load_distributed_checkpoint(model, FILES / "dcp")
    assert_holds(fixed.shards(model), "second_delta")
    assert model.module.over.bias.tolist() == [2.5]


def test_a_server_goes_on_from_what_one_has_left(tmp_path: Path) -> None:
    shutil.copytree(FILES / "server", tmp_path / "server")
    tables = HostedTables(Limits(cold_store=RocksDBStore(str(tmp_path / "cold"))))
    server = ParameterServer(tables, DataDirectory(tmp_path / "server"), CallCounts())
    assert_holds([hosted.table for hosted in fixed.hosted_tables(tables)], "server")
    assert tables.specs()["cold"].shard == (1, 3)
    assert tables.specs()["sgd"].lossless
    server._set.begin()
    state = server._set.describe()
    assert (state.live, state.set, state.at.name) == (True, fixed.SET.set, "stopped-0")
    assert list(state.earlier) == [fixed.SET.run]
    assert (
        server._applied.once(
            "client", 7, 6, lambda: pytest.fail("it has been carried out")
        )
        == 1
    )
    tables.close()


def test_exports_and_deltas_load_to_the_bit(index: str) -> None:
    files = fixed.EXPORTS / index
    for name in ("model.pt", "model.delta"):
        verify(files / name)
    wanted = safetensors.torch.load_file(files / "expected.safetensors")
    versions = json.loads((files / "expected.json").read_text())
    served = torch.jit.load(files / "model.pt")
    for when, version in zip(("before", "after"), versions, strict=True):
        answer = {f"{when}/{key}": value for key, value in fixed.answer(served).items()}
        # FBGEMM sums quantised rows with one rounding or two, as the machine has it.
        torch.testing.assert_close(
            answer.pop(f"{when}/output"), wanted[f"{when}/output"]
        )
        assert all(torch.equal(value, wanted[key]) for key, value in answer.items())
        assert served.recstore_version() == version
        assert served.apply_delta(read_delta(files / "model.delta")) == (
            when == "before"
        )


def test_deltas_are_made_of_exports(index: str, tmp_path: Path) -> None:
    base = fixed.EXPORTS / index / "model.pt"
    model = fixed.train_served(fixed.Served(), 3)
    info = export_delta(model, tmp_path / "nothing", base=base)
    assert {(table.rows, table.removed) for table in info.tables.values()} == {(0, 0)}
    assert not info.dense
    info = export_delta(fixed.train_served(model, 5), tmp_path / "delta", base=base)
    served = torch.jit.load(base)
    assert served.apply_delta(read_delta(tmp_path / "delta"))
    assert served.recstore_version() == info.version
    export_for_inference(model, tmp_path / "full.pt", dtype=DTYPES["int4"])
    full = torch.jit.load(tmp_path / "full.pt")
    for name in full.recstore_tables():
        assert torch.equal(served.recstore_ids(name), full.recstore_ids(name))
        assert torch.equal(served.recstore_rows(name), full.recstore_rows(name))


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_a_change_of_checkpoints_has_a_number_of_its_own(tmp_path: Path) -> None:
    """What is written now has the structure of the files that lie here under its
    number.
    """
    fixed.write_model_checkpoints(tmp_path)
    fixed.write_server_data(tmp_path)
    for name in ("full", "delta", "second_delta", "server/stopped-0"):
        assert structure_of_checkpoint(tmp_path / name) == structure_of_checkpoint(
            FILES / name
        ), HOW_TO
    for name in ("server.json", "set.json"):
        written, known = (
            json.loads((folder / "server" / name).read_bytes())
            for folder in (tmp_path, FILES)
        )
        assert shape_of(written) == shape_of(known), HOW_TO


@pytest.mark.slow
def test_a_change_of_exports_has_a_number_of_its_own(
    index: str, tmp_path: Path
) -> None:
    fixed.write_exports(tmp_path / index, index)
    assert structure_of_export(tmp_path / index) == structure_of_export(
        fixed.EXPORTS / index
    ), HOW_TO


HOW_TO = (
    "what is written has changed: give the format a new number, and write its files:"
    " python -m tests.formats.fixed"
)


def shape_of(value: Any) -> Any:
    """A JSON document's keys and types."""
    if isinstance(value, dict):
        return {key: shape_of(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape_of(each) for each in value]
    return type(value).__name__


def structure_of_checkpoint(path: Path) -> Any:
    """All but the values of its numbers, strings and tensors."""
    return shape_of(json.loads((path / "metadata.json").read_bytes())), {
        file.name: structure_of_tensors(file) for file in path.glob("*.safetensors")
    }


def structure_of_tensors(path: Path) -> Any:
    return {
        name: (tensor.dtype, tensor.dim())
        for name, tensor in safetensors.torch.load_file(path).items()
    }


def structure_of_export(files: Path) -> Any:
    """What a program may use of a served model, and the keys of a delta."""
    served = torch.jit.load(files / "model.pt")
    methods = {
        name: re.sub(r"\(\S+ self", "(self", str(served._c._get_method(name).schema))
        for name in served._c._method_names()
    }
    tensors = {
        name: (tensor.dtype, tensor.dim())
        for name, tensor in served.state_dict().items()
    }
    return methods, tensors, structure_of_tensors(files / "model.delta")
