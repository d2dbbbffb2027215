"""Runs the commands of TorchEasyRec, from the checkout that ``TORCHEASYREC_SOURCE``
names, on small click logs.

The checkout is one of github.com/alibaba/TorchEasyRec; 1.3.16 was tested, on torch 2.13
and torchrec 1.8. The tests run in an environment that has the packages of its
requirements that PyPI has::

    pip install pandas scikit-learn anytree pyodps alibabacloud_credentials "grpcio-tools<1.63" "tensorboard<2.20"

Three of its requirements are not on PyPI: pyfg, graphlearn and common_io. TorchEasyRec
imports them in every run, but uses them only to generate features, to sample negatives
and to read tables of MaxCompute, which these tests do not do. :data:`ABSENT` replaces
those of them that are not installed by modules whose classes cannot be made.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.packages import ROOT
from tests.processes import ForkedCommand
from tests.project.docs.pages import blocks
from tests.redis_server import free_port

SOURCE = os.environ.get("TORCHEASYREC_SOURCE")
"""The path of a checkout of TorchEasyRec."""

PAGE = ROOT / "docs" / "torcheasyrec.md"
CHANGES = [block.text for block in blocks(PAGE) if block.kind == "python"]
"""What the documentation adds to a job: its change, a planner, and an export of raw
ids.
"""

# TorchEasyRec leaves out TorchRec's sharder of sequence tables on a CPU, so that its
# dense optimizer trains them.
_WITH_ALL_SHARDERS = """
from torchrec.distributed.sharding_plan import get_default_sharders
from tzrec.utils import plan_util

plan_util.get_default_sharders = get_default_sharders
"""

ABSENT = {"pyfg": "", "common_io": "", "graphlearn": "python/data/values"}
"""The packages that are not on PyPI, and the module of each that is imported by a path
of its own.
"""

_ABSENT = """
class _Absent(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type.__call__(_Absent, name, (), {})

    def __call__(cls, *args, **kwargs):
        raise ImportError(f"{cls.__name__} is of a package that is not installed")


def __getattr__(name):
    return getattr(_Absent("absent", (), {}), name)
"""


def prepare(folder: Path) -> None:
    """Makes the packages ``stock/tzrec``, as it is, and ``recstore/tzrec``, with the
    change of the page.

    ``sharded/tzrec`` shards stock tables by all of TorchRec's sharders.
    """
    assert SOURCE is not None
    stock = folder / "stock"
    shutil.copytree(
        Path(SOURCE, "tzrec"),
        stock / "tzrec",
        ignore=shutil.ignore_patterns("*_pb2.py*", "__pycache__"),
    )
    protos = [str(path.relative_to(stock)) for path in stock.rglob("*.proto")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--python_out=.", *protos],
        cwd=stock,
        check=True,
    )
    for name, module in ABSENT.items():
        if importlib.util.find_spec(name) is None:
            path = stock / name / module
            path.mkdir(parents=True)
            for package in (path, *path.parents):
                if stock in package.parents:
                    (package / "__init__.py").write_text(_ABSENT)
    for name, change in (("recstore", CHANGES[0]), ("sharded", _WITH_ALL_SHARDERS)):
        shutil.copytree(stock, folder / name)
        with (folder / name / "tzrec" / "__init__.py").open("a") as file:
            file.write(change)


def write_clicks(folder: Path, factor: int = 1) -> None:
    """Writes click logs in which users, items and categories have tastes.

    All ids are multiplied by ``factor``.
    """
    rng = np.random.default_rng(0)
    users, items, categories = (
        rng.normal(size=300),
        rng.normal(size=200),
        rng.normal(size=20),
    )
    for name, rows in (("train", 4096), ("eval", 1024)):
        user, item = (
            rng.integers(0, len(users), rows),
            rng.integers(0, len(items), rows),
        )
        history = [rng.integers(0, len(items), rng.integers(1, 6)) for _ in range(rows)]
        taste = users[user] + items[item] + categories[item % 20]
        taste += [items[each].mean() for each in history]
        clicked = rng.random(rows) < 1 / (1 + np.exp(-2 * taste))
        bought = clicked & (rng.random(rows) < 0.5)
        columns = {
            "user_id": user * factor,
            "item_id": item * factor,
            "cate": item % 20 * factor,
            "price": (item / len(items)).astype("float32"),
            "level": item // 50,
            "clicks__item_id": ["|".join(map(str, each * factor)) for each in history],
            "clicks__cate": [
                "|".join(map(str, each % 20 * factor)) for each in history
            ],
            "clk": clicked.astype("int64"),
            "buy": bought.astype("int64"),
        }
        (folder / name).mkdir(parents=True)
        pq.write_table(pa.table(columns), folder / name / "part.parquet")


def _features(num_buckets: int) -> str:
    ids = "".join(
        f'feature_configs {{ id_feature {{ feature_name: "{name}" num_buckets:'
        f" {num_buckets} embedding_dim: 8 }} }}\n"
        for name in ("user_id", "item_id", "cate")
    )
    sequences = "".join(
        f'features {{ id_feature {{ feature_name: "{name}" num_buckets: {num_buckets}'
        " embedding_dim: 8 } }\n"
        for name in ("item_id", "cate")
    )
    return f"""{ids}
feature_configs {{ raw_feature {{ feature_name: "price" }} }}
feature_configs {{ raw_feature {{ feature_name: "level" boundaries: [50, 100, 150] embedding_dim: 8 }} }}
feature_configs {{
  sequence_feature {{ sequence_name: "clicks" sequence_length: 6 sequence_delim: "|" {sequences} }}
}}
"""


def _group(name: str, kind: str, *features: str) -> str:
    names = " ".join(f'feature_names: "{feature}"' for feature in features)
    return f'feature_groups {{ group_name: "{name}" {names} group_type: {kind} }}\n'


_MLP = "mlp { hidden_units: [16, 8] }"
_OF_CLICKS = "metrics { auc {} } losses { binary_cross_entropy {} }"
MODELS = {
    "din": (
        f"""
    {_group("deep", "DEEP", "user_id", "item_id", "cate", "price")}
    {_group("seq", "SEQUENCE", "item_id", "cate", "clicks__item_id", "clicks__cate")}
    multi_tower_din {{
      towers {{ input: "deep" {_MLP} }}
      din_towers {{ input: "seq" attn_mlp {{ hidden_units: [8] }} }}
      final {{ hidden_units: [8] }}
    }}
    {_OF_CLICKS}"""
    ),
    "deepfm": (
        f"""
    {_group("wide", "WIDE", "user_id", "item_id", "cate")}
    {_group("fm", "DEEP", "user_id", "item_id", "cate")}
    {_group("deep", "DEEP", "user_id", "item_id", "cate", "price")}
    deepfm {{ deep {{ hidden_units: [16, 8] }} final {{ hidden_units: [8] }} wide_embedding_dim: 4 }}
    {_OF_CLICKS}"""
    ),
    "dssm": (
        f"""
    {_group("user", "DEEP", "user_id")}
    {_group("item", "DEEP", "item_id", "cate", "price")}
    dssm {{
      user_tower {{ input: "user" {_MLP} }}
      item_tower {{ input: "item" {_MLP} }}
      output_dim: 8
      similarity: COSINE
      temperature: 0.1
      in_batch_negative: true
    }}
    metrics {{ recall_at_k {{ top_k: 5 }} }} losses {{ softmax_cross_entropy {{}} }}"""
    ),
    "mmoe": (
        f"""
    {_group("all", "DEEP", "user_id", "item_id", "cate", "price")}
    mmoe {{
      expert_mlp {{ hidden_units: [16, 8] }}
      num_expert: 2
      task_towers {{ tower_name: "ctr" label_name: "clk" {_MLP} {_OF_CLICKS} }}
      task_towers {{ tower_name: "cvr" label_name: "buy" {_MLP} {_OF_CLICKS} }}
    }}"""
    ),
}
"""The part of TorchEasyRec's config that describes each model."""


def write_config(
    path: Path, model: str, num_buckets: int = 500, epochs: int = 1
) -> Path:
    """Writes a config of a job on the click logs in the config's folder, and returns
    its path.
    """
    labels = 'label_fields: "clk"' + (' label_fields: "buy"' if model == "mmoe" else "")
    path.write_text(f"""
train_input_path: "{path.parent}/train/*.parquet"
eval_input_path: "{path.parent}/eval/*.parquet"
model_dir: "{path.with_suffix("")}"
train_config {{
  sparse_optimizer {{ adagrad_optimizer {{ lr: 0.1 }} constant_learning_rate {{}} }}
  dense_optimizer {{ adam_optimizer {{ lr: 0.003 }} constant_learning_rate {{}} }}
  num_epochs: {epochs}
  save_checkpoints_epochs: 1
  use_tensorboard: false
}}
eval_config {{}}
data_config {{ batch_size: 128 dataset_type: ParquetDataset {labels} num_workers: 0 fg_mode: FG_NONE }}
{_features(num_buckets)}
model_config {{ {MODELS[model]} }}
""")
    return path


_COMMAND = """
import multiprocessing, runpy, sys
multiprocessing.set_start_method("fork", force=True)  # of a process of python: an export starts a reader of data
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def run(
    package: Path, module: str, *flags: object, ranks: int = 1, **environment: str
) -> None:
    """Runs ``torchrun -m tzrec.MODULE FLAGS`` with a package of :func:`prepare`.

    Fails with the output of the ranks.
    """
    script = package / "command.py"
    script.write_text(_COMMAND)
    world = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_PORT": str(free_port()),
    }
    world |= {
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "TORCH_MANUAL_SEED": "0",
        **environment,
    }
    arguments = [str(script), f"tzrec.{module}", *map(str, flags)]
    started = [
        ForkedCommand(
            arguments,
            {**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            daemon=False,
        )
        for rank in range(ranks)
    ]
    try:
        statuses = [command.wait(200) for command in started]
    finally:
        for command in started:
            command.kill()
    assert statuses == [0] * ranks, "\n".join(
        command.stderr[-4000:] for command in started
    )


def evaluations(
    model_dir: Path, file: str = "train_eval_result_v2.txt"
) -> list[dict[str, float]]:
    """Returns the metrics of each evaluation, by default of those during training."""
    return [json.loads(line) for line in (model_dir / file).read_text().splitlines()]
