"""Checkpoints, deltas and exports of collections with 8-bit rows, on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.modules.embedding_configs import DataType

from torchrec_recstore.checkpoint import (
    compact_checkpoint,
    info,
    load_checkpoint,
    save_checkpoint,
)
from torchrec_recstore.checkpoint.compare import compare_chains
from torchrec_recstore.inference import export_for_inference
from torchrec_recstore.options import NormalInit, TableOptions

from ..sharders.models import bag, batch, collection, sharded, tables

pytestmark = pytest.mark.usefixtures("one_rank")


def model(sharding_type: str = "table_wise", dim: int = 8) -> torch.nn.Module:
    ebc = collection(bag(dim=dim, data_type=DataType.INT8))
    params = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}
    return sharded(
        ebc, params, {"t": TableOptions(NormalInit(0.0, 0.5))}, sharding_type
    )


def train(module: torch.nn.Module, ids: list[int]) -> None:
    module(batch(f=[ids])).values().square().sum().backward()


def test_a_chain_of_checkpoints_loads_to_the_bit_and_exports_the_rows(
    tmp_path: Path,
) -> None:
    source = model()
    train(source, [1, 2, -7, 2**40])
    save_checkpoint(source, tmp_path / "full")
    train(source, [2, 5])
    save_checkpoint(source, tmp_path / "delta", delta_of=tmp_path / "full")
    compact_checkpoint(tmp_path / "delta", tmp_path / "compacted")
    (table,) = tables(source).values()
    rows = table.read_rows(table.ids())
    for name in ("delta", "compacted"):
        for sharding_type in ("table_wise", "row_wise", "column_wise"):
            target = model(sharding_type)
            load_checkpoint(target, tmp_path / name)
            (loaded,) = tables(target).values()
            assert torch.equal(loaded.ids(), table.ids())
            for key, value in loaded.read_rows(table.ids()).items():
                assert torch.equal(value, rows[key]), key
            train(target, [1, 5])
    features = batch(f=[[1, 2], [5], [-7, 2**40]])
    source.eval()
    expected = source(features).values()
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.int8, 2e-2)):
        found = export_for_inference(source, dtype=dtype)(features).values()
        torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 6, 7, 9])
def test_deltas_and_exports_of_exactly_one_row(dim: int, tmp_path: Path) -> None:
    source = model(dim=dim)
    train(source, [7])
    save_checkpoint(source, tmp_path / "full")
    train(source, [7])
    save_checkpoint(source, tmp_path / "delta", delta_of=tmp_path / "full")
    compact_checkpoint(tmp_path / "delta", tmp_path / "compacted")
    (table,) = tables(source).values()
    rows = table.read_rows(table.ids())
    assert rows["weight"].shape == (1, dim + 8)
    for name in ("delta", "compacted"):
        for sharding_type in ("table_wise", "row_wise", "column_wise"):
            target = model(sharding_type, dim)
            load_checkpoint(target, tmp_path / name)
            (loaded,) = tables(target).values()
            for key, value in loaded.read_rows(table.ids()).items():
                assert torch.equal(value, rows[key]), key
    chains = [info.read_chain(tmp_path / name) for name in ("full", "delta")]
    assert compare_chains(*chains).tables["t"].changed == 1
    features = batch(f=[[7], []])
    source.eval()
    expected = source(features).values()
    formats = {torch.float32: 1e-6, torch.float16: 2e-3, torch.int8: 2e-2}
    for dtype, tolerance in formats.items():
        # int8 rows of served models need an even dim
        if dtype is not torch.int8 or dim % 2 == 0:
            found = export_for_inference(source, dtype=dtype)(features).values()
            torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=0)
