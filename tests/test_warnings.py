"""Warnings come once for each cause, at the user's line, and docs/errors.md explains
warnings that are there.
"""

from __future__ import annotations

import ast
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torchrec import PoolingType
from torchrec.distributed import DistributedModelParallel

from tests.modules.collections import bag_tables
from tests.packages import sources
from tests.redis_server import needs_redis, redis_server
from tests.sharders.models import bag, batch, collection, sharded
from torchrec_recstore import (
    LRU,
    RecStoreEmbeddingBagCollection,
    RecStoreSharder,
    RecStoreWarning,
    RedisStore,
    Table,
    TableOptions,
)
from torchrec_recstore.inference import export_for_inference
from torchrec_recstore.torchrec_seams import warn_if_untested
from torchrec_recstore.triples import TRIPLES

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs" / "errors.md").read_text()


def test_loading_into_meta_warns_once_for_all_tables_at_the_users_line() -> None:
    state = RecStoreEmbeddingBagCollection(bag_tables(PoolingType.SUM)).state_dict()
    model = torch.nn.Sequential(
        RecStoreEmbeddingBagCollection(bag_tables(PoolingType.SUM), device="meta")
    )
    state = {f"0.{key}": value for key, value in state.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # what Python does, which pytest changes
        for _ in range(3):
            model.load_state_dict(state, strict=False)
    ours = [warning for warning in caught if "RecStore" in str(warning.message)]
    assert [(warning.category, warning.filename) for warning in ours] == [
        (RecStoreWarning, __file__)
    ]
    assert (
        "model.load_state_dict(state"
        in Path(__file__).read_text().splitlines()[ours[0].lineno - 1]
    )


@pytest.mark.usefixtures("one_rank")
def test_weights_of_an_unsharded_module_warn_at_the_users_line() -> None:
    for device, expected in (("cpu", [(RecStoreWarning, __file__)]), ("meta", [])):
        unsharded = collection(
            bag("a", ["f"], rows=10), bag("b", ["g"], rows=10), device=device
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            DistributedModelParallel(unsharded, sharders=[RecStoreSharder()])
        ours = [
            warning
            for warning in caught
            if "do not take the weights" in str(warning.message)
        ]
        assert [(warning.category, warning.filename) for warning in ours] == expected


@pytest.mark.slow
def test_an_untested_torchrec_warns_once_at_the_users_line() -> None:
    script = (
        "import warnings\nwarnings.simplefilter('default')\nimport importlib.metadata"
        " as installed\n"
    )
    script += "real = installed.version\n"
    script += (
        "installed.version = lambda name: '1.9.9' if name == 'torchrec' else"
        " real(name)\n"
    )
    script += (
        "from torchrec_recstore import RecStoreSharder\nimport"
        " torchrec_recstore_serving.export.from_model\n"
    )
    script += "from torchrec_recstore import RecStorePlanner\n"
    command = [sys.executable, "-W", "ignore", "-c", script]
    said = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stderr
    lines = [line for line in said.splitlines() if "RecStoreWarning" in line]
    assert len(lines) == 1
    assert lines[0].startswith(
        "<string>:6: RecStoreWarning: torchrec 1.9.9 is untested with this version"
    )
    for triple in TRIPLES:
        assert str(triple) in lines[0]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_if_untested(triple.torchrec)


@pytest.mark.usefixtures("one_rank")
def test_training_warns_of_nothing() -> None:
    options = {"a": TableOptions(max_rows=10, eviction=LRU()), "b": TableOptions()}
    model = sharded(collection(bag("a", ["f"]), bag("b", ["g"])), options=options)
    # TorchRec's own are of the first step
    model(batch(f=[[1]], g=[[2]])).values().sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            model(batch(f=[[step]], g=[[-step]])).values().sum().backward()
    assert [str(warning.message) for warning in caught] == []


def test_an_export_warns_once_for_all_tables_at_the_users_line() -> None:
    options = {f"t{i}": TableOptions(missing="init") for i in range(3)}
    model = RecStoreEmbeddingBagCollection(bag_tables(PoolingType.SUM), options=options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export_for_inference(model)
    ours = [warning for warning in caught if "missing='init'" in str(warning.message)]
    assert [warning.filename for warning in ours] == [__file__]
    assert all(f"'{name}'" in str(ours[0].message) for name in options)


@needs_redis
def test_keys_that_are_left_are_logged_once_for_each_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_server(tmp_path) as server:
        options = TableOptions(
            max_rows=2, cold_store=RedisStore(server.url, retry_seconds=0)
        )
        tables = [Table(4, name=name, options=options) for name in ("one", "other")]
        for table in tables:
            table.lookup(torch.arange(2), train=True)
            table.lookup(torch.arange(2, 4), train=True)
    with caplog.at_level(logging.WARNING):
        for table in tables * 2:
            table.close()
    messages = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("torchrec_recstore")
    ]
    assert len(messages) == 2
    assert all(
        name in message
        for name, message in zip(("one", "other"), messages, strict=True)
    )
    assert all("may be left" in message for message in messages)


# The warnings that the page leaves out.
SAY_WHAT_TO_DO = {
    (
        "...: backward of a lookup in evaluation mode updates no row, although"
        " TorchRec's own tables are updated in this mode: call train() of the model"
        " before a training step"
    ),
    (
        "RecStore tables do not take the weights of the module that is sharded, which"
        " is not on the meta device: make it with device='meta'. Use"
        " TableOptions(initializer=...) for random initial rows, or load_dense_weights"
        " for given rows"
    ),
    (
        "RecStore tables on the meta device have no rows, and loading them does"
        " nothing: pass assign=True to load_state_dict, or call to_empty(device='cpu')"
        " first"
    ),
    "RecStoreClient(library_path=...) has no effect: there is no library to load",
    (
        "TorchRec's enumerator counts the rows of RecStore tables as memory of ..., and"
        " they are in host memory: use RecStorePlanner, or pass"
        " enumerator=RecStoreEnumerator(topology, ...) to TorchRec's planner"
    ),
    # kernels/device_rows.py
    (
        "table ...: a batch of ... distinct ids does not fit into ... device rows, so"
        " that its group's training lookup runs on the host: set"
        " TableOptions(device_rows=...) to at least the distinct ids of two batches, or"
        " to 0"
    ),
    (
        "tables ...: a training lookup runs on the host, because the device has no"
        " memory for it, or no room beside the batches whose backward is to come: set"
        " TableOptions(device_rows=...) to at least the distinct ids of two batches, or"
        " to 0"
    ),
    # See the error of the same cause.
    "a backward of this lookup in evaluation mode loses a gradient: ...",
    # names the missing package
    "calls on rows from other hosts go by gRPC, which takes several times as long: ...",
    (
        "table ...: ... of the saved rows have NaN or infinity, and so have their"
        " lookups: go back to a checkpoint without them, and set"
        ' TableOptions(nonfinite="skip"), which leaves a row as it is when its gradient'
        " is not finite"
    ),
    # names what to do about each cause
    (
        "calls on rows of server ... go by gRPC, which is slower, because its port for"
        " rows cannot be used (...): ..."
    ),
    "RecStoreClient(role=...) has no effect: all clients are equal",
    (
        "... is left out of this quantization: its tables stay as they are. To quantize"
        " them, use torchrec_recstore.inference.export_for_inference; if only other"
        " layers are to be quantized, set the table module's qconfig to None"
    ),
    (
        "init_func of init_data has no effect with initialize_values=False:"
        " options.initializer applies"
    ),
    "is_gdata of init_data has no effect: there is no graph",
    "part_policy of init_data has no effect: a hash of the id selects its server",
    "set_ps_backend(...) has no effect: the client selects the transport itself",
    (
        "state_dict does not contain the rows of tables on servers: client.save(name)"
        " saves them on the servers, and client.load(name) loads them"
    ),
    (
        "the exported model has NaN or infinity in ..., and so have its predictions: go"
        " back to a checkpoint without them, and lower the learning rate or clip the"
        " gradients"
    ),
    (
        "the exported model was never trained: no update has changed a row of"
        " table(s) .... Train the model or load a checkpoint before the export"
    ),
    "table '...': ..., and are not saved: save after a multiple of accumulation_steps",
    (
        "table ... is planned on TorchRec's own kernel, since its sharding names none:"
        " pass compute_kernel=... to table_wise(...) or the other sharding function for"
        " RecStore, or pass the name of TorchRec's kernel"
    ),
    (
        "table ...: set_time has refused the time ... (... refused so far): it is more"
        " than ... s away from the clock's time ..., by which rows expire. The clock"
        " follows when ten calls in a row agree. If your events can be so far apart,"
        " set Expiry(max_jump_s=...); otherwise leave out the times that are wrong"
    ),
    (
        "table(s) ... are not in RecStore: ..., which comes later in the list of"
        " sharders, overrides ...: put ... after it, or leave ... out"
    ),
    (
        "table(s) ... are not in RecStore: the plan for ... has only TorchRec's own"
        " kernels: pass ... to the planner as well, or use TorchRec's sharder"
    ),
    (
        "torchrec ... is untested with this version of torchrec_recstore, which uses"
        " private parts of TorchRec. Tested are: .... `recstore doctor` names the"
        " releases that fit the installed torch"
    ),
    (
        "tune_threads: ...: .... Start the process with GOMP_SPINCOUNT=... in its"
        " environment instead."
    ),
    (
        "tune_threads: torch has been imported already, and its threads are not those"
        " of libgomp. Start the process with OMP_WAIT_POLICY=passive in its environment"
        " instead."
    ),
}


def text_of(argument: ast.expr) -> str:
    """The text of a literal, with ``...`` in the place of what an f-string or ``%``
    puts in.
    """
    if isinstance(argument, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else "..."
            for part in argument.values
        )  # type: ignore[misc]
    return re.sub(r"%[srdg]", "...", ast.literal_eval(argument))


def warning_texts() -> Iterator[tuple[str, str]]:
    """Text and file of each warning in the packages: of ``warn_user``, and of loggers'
    ``warning``.
    """
    for file in sources().values():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and node.args and file.name != "utils.py":
                called = ast.unparse(node.func)
                if called in ("warn_user", "warnings.warn") or called.endswith(
                    ".warning"
                ):
                    yield text_of(node.args[0]), file.name


def test_every_warning_is_on_the_page_or_says_what_to_do() -> None:
    found = list(warning_texts())
    assert {file for _, file in found} >= {
        "table_module.py",
        "redis_store.py",
        "server_cold_store.py",
        "server_process.py",
    }
    section = DOCUMENT.partition("\n## Warnings\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `(.*?)` \| ", section, flags=re.MULTILINE)
    assert {text for text, _ in found} == {*listed, *SAY_WHAT_TO_DO}
    assert not set(listed) & SAY_WHAT_TO_DO
