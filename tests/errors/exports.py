"""Errors of models for inference."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch
from torch import nn

from tests.errors.situations import situation
from torchrec_recstore import RecStoreEmbeddingBag
from torchrec_recstore.inference import (
    DeltaPublisher,
    export_delta,
    export_for_inference,
    follow,
    library,
    read_delta,
    verify,
)


def bags(name: str = "t_item", dim: int = 4) -> RecStoreEmbeddingBag:
    """A table with three rows."""
    module = RecStoreEmbeddingBag(10, dim, name=name, mode="sum")
    module(torch.arange(3).view(1, 3)).sum().backward()
    return module


@situation("A model without tables to export")
def nothing_to_export() -> None:
    export_for_inference(nn.Linear(1, 1))


@situation("An unsupported data type of an export")
def as_float64() -> None:
    export_for_inference(bags(), dtype=torch.float64)


@situation("An unknown index of an export")
def a_tree(tmp_path: Path) -> None:
    export_for_inference(bags(), tmp_path / "model.pt", index="tree")


@situation("A library of served models for another torch")
def another_torch(tmp_path: Path) -> None:
    (tmp_path / "_serving.abi3.so").write_bytes(b"recstore serving library for torch 1.0")
    with mock.patch.object(library, "_FOLDER", tmp_path):
        library.load_library.__wrapped__()


@situation("A dim that does not fit the data type")
def five_columns() -> None:
    export_for_inference(bags(dim=5), dtype=torch.quint4x2)


@situation("Weights that a data type cannot hold")
def a_great_weight() -> None:
    model = bags()
    model.table.insert(torch.tensor([1]), torch.tensor([[-5.0, 0.0, 1.0, 1e5]]))
    export_for_inference(model)


@situation("A served file that is damaged")
def a_bit_of_a_row(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    export_for_inference(bags(), file, dtype=torch.float32)
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    verify(file)


@situation("A served file of a newer version")
def an_export_from_the_future(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    export_for_inference(bags(), file)
    file.write_bytes(file.read_bytes().replace(b"recstore export 0001", b"recstore export 0002"))
    verify(file)


@situation("An export delta of another model")
def another_model(tmp_path: Path) -> None:
    export_for_inference(bags("t_user"), tmp_path / "served.pt")
    export_delta(bags("t_item"), tmp_path / "delta.safetensors", base=tmp_path / "served.pt")


@situation("A delta of a model that its thread holds")
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


@situation("An export delta without a base")
def no_base(tmp_path: Path) -> None:
    export_delta(bags(), tmp_path / "delta.safetensors", base=tmp_path / "served.pt")


@situation("A stream without a name")
def no_stream() -> None:
    follow("redis://127.0.0.1:6379/0")


@situation("A source without publications")
def nothing_published(tmp_path: Path) -> None:
    follow(tmp_path / "published", timeout_s=0.1)


@situation("Two publishers to one directory")
def two_publishers(tmp_path: Path) -> None:
    with DeltaPublisher(bags(), tmp_path / "published"):
        DeltaPublisher(bags(), tmp_path / "published")
