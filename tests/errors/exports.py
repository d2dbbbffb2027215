"""Errors of models for inference."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch
from torch import nn

from tests.errors.situations import situation
from tests.secrets import write_secret
from torchrec_recstore import RecStoreEmbeddingBag
from torchrec_recstore.inference import (
    DeltaPublisher,
    export_delta,
    export_for_inference,
    follow,
    read_delta,
    verify,
)
from torchrec_recstore_serving.export import native_library


def bags(name: str = "t_item", dim: int = 4) -> RecStoreEmbeddingBag:
    """A table with three rows."""
    module = RecStoreEmbeddingBag(10, dim, name=name, mode="sum")
    module(torch.arange(3).view(1, 3)).sum().backward()
    return module


@situation("ValueError", "Linear has no tables: there is nothing to export")
def nothing_to_export() -> None:
    """A model without tables to export.

    Cause: no part of the model is a collection of RecStore's or TorchRec's tables. Fix:
    pass the model that `DistributedModelParallel` wraps or returns, and not its dense
    part.
    """
    export_for_inference(nn.Linear(1, 1))


@situation(
    "ValueError",
    "dtype must be one of torch.float32, torch.float16, torch.int8, torch.quint4x2"
    " (which is TorchRec's int4), got torch.float64",
)
def as_float64() -> None:
    export_for_inference(bags(), dtype=torch.float64)


@situation("ValueError", 'index must be "sorted" or "hash", got \'tree\'')
def a_tree(tmp_path: Path) -> None:
    export_for_inference(bags(), tmp_path / "model.pt", index="tree")


@situation(
    "ImportError",
    "_serving.abi3.so was built with torch 1.0, and this is torch ...: build the"
    " package with `pip install --no-build-isolation ./serving`, or export with"
    ' index="sorted", which needs no library',
)
def another_torch(tmp_path: Path) -> None:
    (tmp_path / "_serving.abi3.so").write_bytes(
        b"recstore serving library for torch 1.0"
    )
    with mock.patch.object(native_library, "_FOLDER", tmp_path):
        native_library.load_library.__wrapped__()


@situation("ValueError", "table 't_item' has dim 5: int4 rows need a multiple of 4")
def five_columns() -> None:
    """A dim that does not fit the data type.

    Cause: FBGEMM packs int8 rows in groups of two columns, and int4 rows in groups of
    four. Fix: export in `torch.float16`, or in `torch.int8` if the dim is even.
    """
    export_for_inference(bags(dim=5), dtype=torch.quint4x2)


@situation(
    "ValueError",
    "table 't_item' has weights from -5 to 100000: int8 rows hold finite weights up to"
    " 65504",
)
def a_great_weight() -> None:
    """Weights that a data type cannot hold.

    Cause: all rows except float32 rows store their weights, or their scale and least
    weight, as float16. Fix: find out why training made such weights. `torch.float32`
    exports them without change.
    """
    model = bags()
    model.table.insert(torch.tensor([1]), torch.tensor([[-5.0, 0.0, 1.0, 1e5]]))
    export_for_inference(model)


@situation("ValueError", ".../model.pt is damaged: its checksum does not fit")
def a_bit_of_a_row(tmp_path: Path) -> None:
    """A served file that is damaged.

    Cause: the bytes of the file are not those that were written. `verify`, `recstore
    inspect` and `export_delta` detect this; `torch.jit.load` does not. Fix: copy the
    file again from a complete copy, or export it again.
    """
    file = tmp_path / "model.pt"
    export_for_inference(bags(), file, dtype=torch.float32)
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    verify(file)


@situation(
    "ValueError",
    ".../model.pt has the format 2, which torchrec_recstore ... does not know: a newer"
    " version wrote it; upgrade with: pip install --upgrade path/to/torchrec_recstore",
)
def an_export_from_the_future(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    export_for_inference(bags(), file)
    file.write_bytes(
        file.read_bytes().replace(b"recstore export 0001", b"recstore export 0002")
    )
    verify(file)


@situation(
    "ValueError",
    ".../model.pt has no signature, and the key .../key is required: write it with the"
    " same key",
)
def without_a_signature(tmp_path: Path) -> None:
    key = write_secret(tmp_path / "key", "0123456789abcdef" * 2)
    export_for_inference(bags(), tmp_path / "model.pt")
    verify(tmp_path / "model.pt", key=key)


@situation(
    "ValueError",
    ".../model.pt is not signed with the key .../key: it was changed, or was written"
    " with another key",
)
def of_another_key(tmp_path: Path) -> None:
    key, other = (
        write_secret(tmp_path / name, f"{name}-0123456789abcdef0123456789abcdef")
        for name in ("key", "other")
    )
    export_for_inference(bags(), tmp_path / "model.pt", key=other)
    verify(tmp_path / "model.pt", key=key)


@situation(
    "ValueError",
    "every user of this machine may write .../published: chmod o-w .../published, or"
    " publish and follow with a key: a model that is loaded runs code",
)
def written_by_everyone(tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    (tmp_path / "published").chmod(0o777)
    follow(tmp_path / "published")


@situation("ValueError", "the model has the tables ['t_item'], base has ['t_user']")
def another_model(tmp_path: Path) -> None:
    """An export delta of another model.

    Cause: `base` is the export of another model, or of this model when it had other
    tables. Fix: pass the file that is served, or export and serve the whole model.
    """
    export_for_inference(bags("t_user"), tmp_path / "served.pt")
    export_delta(
        bags("t_item"), tmp_path / "delta.safetensors", base=tmp_path / "served.pt"
    )


@situation(
    "RuntimeError",
    "...this thread holds the model: release it before a delta is applied...",
)
def held(tmp_path: Path) -> None:
    model = bags()
    export_for_inference(model, tmp_path / "served.pt", index="hash")
    served = torch.jit.load(tmp_path / "served.pt")
    model(torch.arange(3).view(1, 3)).sum().backward()
    export_delta(model, tmp_path / "delta.safetensors", base=served)
    hold = served.recstore_hold()
    try:
        served.apply_delta(read_delta(tmp_path / "delta.safetensors"))
    finally:
        hold.release()


@situation("FileNotFoundError", "there is no exported model at .../served.pt")
def no_base(tmp_path: Path) -> None:
    """An export delta without a base.

    Cause: `base` must be the path of the model that is served, and there is no file at
    this path. Fix: correct the path, or export the whole model first.
    """
    export_delta(bags(), tmp_path / "delta.safetensors", base=tmp_path / "served.pt")


@situation("ValueError", "redis://127.0.0.1:6379/0 names no stream: add ?stream=NAME")
def no_stream() -> None:
    follow("redis://127.0.0.1:6379/0")


@situation(
    "OSError", ".../published: no model after 0.1 s: nothing has been published there"
)
def nothing_published(tmp_path: Path) -> None:
    """A source without publications.

    Cause: `follow` has waited for `timeout_s` for the first full export. Fix: start the
    `DeltaPublisher`, compare the two paths or URLs, or wait longer.
    """
    follow(tmp_path / "published", timeout_s=0.1)


@situation(
    "BlockingIOError",
    ".../published cannot be published to: process ... on host ... has been publishing"
    " to it since ...: wait for that process, or use another directory",
)
def two_publishers(tmp_path: Path) -> None:
    with DeltaPublisher(bags(), tmp_path / "published"):
        DeltaPublisher(bags(), tmp_path / "published")
