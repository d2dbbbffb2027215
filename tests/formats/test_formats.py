"""Files of every format that there has been load, to the bit; and what is written is of the format that it says."""

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
from torchrec_recstore.checkpoint import info as checkpoint_info
from torchrec_recstore.checkpoint import load_distributed_checkpoint
from torchrec_recstore.checkpoint.info import read_chain
from torchrec_recstore.checkpoint.reader import load_rows
from torchrec_recstore.inference import (
    export_delta,
    export_for_inference,
    load_library,
    read_delta,
    verification,
    verify,
)
from torchrec_recstore.inference.row_formats import DTYPES
from torchrec_recstore.options import RocksDBStore
from torchrec_recstore.service.data_directory import DataDirectory
from torchrec_recstore.service.hosted import HostedBackend
from torchrec_recstore.service.limits import Limits
from torchrec_recstore.service.metrics import NoObserver
from torchrec_recstore.service.server import ParameterServer
from torchrec_recstore.store import Table

from . import fixed

CHECKPOINTS = sorted(fixed.HERE.glob("checkpoint_*"))
EXPORTS = sorted(fixed.HERE.glob("export_*"))


def _name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


of_each_checkpoint_format = pytest.mark.parametrize("files", CHECKPOINTS, ids=lambda path: path.name)
of_each_export_format = pytest.mark.parametrize("files", EXPORTS, ids=lambda path: path.name)


def expected(files: Path, name: str) -> tuple[dict[str, Tensor], Any]:
    """What is written beside the files: tensors, and JSON."""
    path = files / "expected" / name
    tensors = safetensors.torch.load_file(path.with_suffix(".safetensors"))
    return tensors, json.loads(path.with_suffix(".json").read_text())


def assert_holds(tables: list[Table], files: Path, name: str) -> None:
    tensors, clocks = expected(files, name)
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


@of_each_checkpoint_format
@pytest.mark.parametrize("name", ["full", "delta", "second_delta", "row_wise", "column_wise", "server", "timed"])
def test_checkpoints_load_to_the_bit(files: Path, name: str) -> None:
    path = files / "server" / "stopped-0" if name == "server" else files / name
    chain = read_chain(path)
    tables = []
    for prefix in sorted({key.rpartition("/")[0] for key in expected(files, name)[0]}):
        table_name, _, columns = prefix.rpartition("/")
        saved = chain[-1].tables[table_name]
        first, last = map(int, columns.split("-"))
        dtype = getattr(torch, saved.dtype)
        table = Table(saved.dim, dtype, saved.optimizer, saved.options, name=table_name, columns=range(first, last))
        load_rows(table, table_name, chain)
        tables.append(table)
    assert_holds(tables, files, name)
    admits = [table for table in tables if table.options.admission is not None]
    assert len(admits) == sum(len(saved.columns) for saved in chain[-1].tables.values() if saved.sightings)
    for table in admits:
        assert table.sightings()[1] == max(counted.taken for counted in chain[-1].tables[table.name].sightings) > 0


@of_each_checkpoint_format
def test_rows_expire_at_the_times_of_the_checkpoint(files: Path) -> None:
    chain = read_chain(files / "timed")
    saved = chain[-1].tables["timed"]
    table = Table(saved.dim, torch.float32, saved.optimizer, saved.options, name="timed")
    load_rows(table, "timed", chain)
    assert table.ids().tolist() == [0, 1, 2, 100]
    for second in range(44, 93, 3):
        table.set_time(fixed.EVENT_TIME + second)
        table.lookup(torch.tensor([100]), train=True)
    ids = table.ids().tolist()
    assert 0 not in ids  # not used for more than 60 + 30 s
    assert 2 in ids  # not used for 52 s


@of_each_checkpoint_format
@pytest.mark.usefixtures("one_rank")
def test_checkpoints_load_into_a_model(files: Path) -> None:
    model = fixed.sharded()
    info = load_checkpoint(model, files / "full")
    assert str(info.training_state) == str(fixed.TRAINING_STATE)
    assert_holds(fixed.shards(model), files, "full")
    assert model.module.over.weight.tolist() == [[0.5, -2.0]]
    for name in ("delta", "second_delta"):
        load_checkpoint(model, files / name)
        assert_holds(fixed.shards(model), files, name)
    assert model.module.over.bias.tolist() == [2.5]
    model = fixed.sharded()
    load_distributed_checkpoint(model, files / "dcp")
    assert_holds(fixed.shards(model), files, "second_delta")
    assert model.module.over.bias.tolist() == [2.5]


@of_each_checkpoint_format
def test_a_server_goes_on_from_what_one_has_left(files: Path, tmp_path: Path) -> None:
    shutil.copytree(files / "server", tmp_path / "server")
    tables = HostedBackend(Limits(cold_store=RocksDBStore(str(tmp_path / "cold"))))
    server = ParameterServer(tables, DataDirectory(tmp_path / "server"), NoObserver())
    assert_holds([hosted.table for hosted in fixed.hosted_tables(tables)], files, "server")
    assert tables.specs()["cold"].shard == (1, 3)
    assert tables.specs()["sgd"].lossless
    state = server._set.describe()
    assert (state.live, state.set, state.at.name) == (False, "", "stopped-0")  # a client makes it a set of one server
    assert server._applied.once("client", 7, 6, lambda: pytest.fail("it has been carried out")) == 1
    tables.close()


@pytest.mark.parametrize("file", [file for files in EXPORTS for file in sorted(files.glob("*.pt"))], ids=_name_of)
def test_exports_and_deltas_load_to_the_bit(file: Path) -> None:
    files, name = file.parent, file.stem
    if not can_load(int(files.name.removeprefix("export_"))):
        pytest.skip("the library of served models was built with another torch")
    for path in (file, files / f"{name}_delta.safetensors"):
        verify(path)
    tensors, versions = expected(files, name)
    served = torch.jit.load(files / f"{name}.pt")
    inputs = {key.removeprefix("input/"): value for key, value in tensors.items() if key.startswith("input/")}
    assert_answers(served, inputs, tensors, "before", versions[0])
    assert served.apply_delta(read_delta(files / f"{name}_delta.safetensors"))
    assert_answers(served, inputs, tensors, "after", versions[1])


def assert_answers(
    served: torch.jit.ScriptModule, inputs: dict[str, Tensor], tensors: dict[str, Tensor], when: str, version: str
) -> None:
    wanted = {key.removeprefix(f"{when}/"): value for key, value in tensors.items() if key.startswith(f"{when}/")}
    answer = fixed.answer(served, inputs)
    # FBGEMM sums quantised rows with one rounding or two, as the machine has it.
    torch.testing.assert_close(answer.pop("output"), wanted.pop("output"))
    assert answer.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[key]) for key, value in answer.items())
    assert served.recstore_version() == version


@of_each_export_format
def test_deltas_are_made_of_exports(files: Path, tmp_path: Path) -> None:
    """By a trainer of this version, for a server that goes on with an older file."""
    if not can_load(int(files.name.removeprefix("export_"))):
        pytest.skip("the library of served models was built with another torch")
    model = fixed.train_served(fixed.Served(), 3)
    info = export_delta(model, tmp_path / "nothing", base=files / "model.pt")
    assert {(table.rows, table.removed) for table in info.tables.values()} == {(0, 0)}
    assert not info.dense
    info = export_delta(fixed.train_served(model, 5), tmp_path / "delta", base=files / "model.pt")
    served = torch.jit.load(files / "model.pt")
    assert served.apply_delta(read_delta(tmp_path / "delta"))
    assert served.recstore_version() == info.version
    full = torch.jit.load(export_for(model, tmp_path / "full.pt"))
    for name in full.recstore_tables():
        assert torch.equal(served.recstore_ids(name), full.recstore_ids(name))
        assert torch.equal(served.recstore_rows(name), full.recstore_rows(name))


def export_for(model: torch.nn.Module, path: Path) -> Path:
    export_for_inference(model, path, dtype=DTYPES["int4"])
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_a_change_of_format_has_a_number_of_its_own(tmp_path: Path) -> None:
    """What is written now has the structure of the files that lie here under its number."""
    fixed.write_model_checkpoints(tmp_path)
    fixed.write_server_data(tmp_path)
    known = fixed.HERE / f"checkpoint_{checkpoint_info.VERSION}"
    for name in ("full", "delta", "second_delta", "server/stopped-0"):
        assert structure_of_checkpoint(tmp_path / name) == structure_of_checkpoint(known / name), HOW_TO
    state = json.loads((tmp_path / "server" / "server.json").read_bytes())
    assert shape_of(state) == shape_of(json.loads((known / "server" / "server.json").read_bytes())), HOW_TO
    for index, number in fixed.EXPORT_FORMATS.items():
        if not can_load(number):
            continue
        fixed.write_exports(tmp_path, tmp_path / index, index)
        for name in ("tables_float32", "tables_int8", "model"):
            of_known = structure_of_export(fixed.HERE / f"export_{number}", name)
            assert structure_of_export(tmp_path / index, name) == of_known, HOW_TO


def can_load(number: int) -> bool:
    """Whether this process can load exports of a format. Those with a hash index need the library of this torch."""
    if number == verification.HASHED_FORMAT:
        try:
            load_library()
        except ImportError:
            return False
    return True


HOW_TO = """the structure of what is written has changed: give the format a new number, by which older versions of the
package refuse it, and put its files beside those of the older formats: python -m tests.formats.fixed DIRECTORY"""


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
    return {name: (tensor.dtype, tensor.dim()) for name, tensor in safetensors.torch.load_file(path).items()}


def structure_of_export(files: Path, name: str) -> Any:
    """What a program may use of a served model, and the keys of a delta."""
    served = torch.jit.load(files / f"{name}.pt")
    methods = {
        name: re.sub(r"\(\S+ self", "(self", str(served._c._get_method(name).schema))
        for name in served._c._method_names()
    }
    tensors = {name: (tensor.dtype, tensor.dim()) for name, tensor in served.state_dict().items()}
    return methods, tensors, structure_of_tensors(files / f"{name}_delta.safetensors")
