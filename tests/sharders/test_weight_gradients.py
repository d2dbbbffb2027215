"""Per-sample weights that require a gradient get it, or the batch raises an error."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.planner.types import ParameterConstraints

from torchrec_recstore.options import ConstantInit, TableOptions
from torchrec_recstore.planner import RecStoreConstraints
from torchrec_recstore.sharders import (
    RecStorePrefetchPipeline,
    RecStoreSharder,
    table_stats,
)
from torchrec_recstore.utils import RecStoreWarning

from .models import bag, batch, collection, sharded, tables

pytestmark = pytest.mark.usefixtures("one_rank")

OPTIONS = TableOptions(initializer=ConstantInit(0.25))
SPLIT_ROWS = ["row_wise", "table_row_wise", "grid_shard"]


def two_tables(
    device: str = "meta", is_weighted: bool = True
) -> EmbeddingBagCollection:
    tables = [bag("a", ["f"], dim=8, rows=10), bag("b", ["g"], dim=8, rows=10)]
    return collection(*tables, device=device, is_weighted=is_weighted)


def weighted(*order: str, weights: torch.Tensor | None = None) -> KeyedJaggedTensor:
    """Returns two bags of the features ``f`` and ``g``.

    The default weights require a gradient.
    """
    bags = {"f": [[1, 2, 1], [3]], "g": [[4], [5, 1]]}
    features = batch(**{name: bags[name] for name in order})
    if weights is None:
        weights = learned()
    return KeyedJaggedTensor(
        list(order), features.values(), lengths=features.lengths(), weights=weights
    )


def learned() -> torch.Tensor:
    return torch.linspace(0.5, 2.0, 7).requires_grad_()


def gradient(model: nn.Module, *order: str) -> torch.Tensor | None:
    weights = learned()
    (model(weighted(*order, weights=weights)).values() ** 2).sum().backward()
    return weights.grad


def of_types(a: str, b: str, min_partition: int = 4) -> DistributedModelParallel:
    constraints: dict[str, ParameterConstraints] = {
        name: (
            ParameterConstraints(sharding_types=[kind], compute_kernels=["dense"])
            if kind == "data_parallel"
            else RecStoreConstraints(
                sharding_types=[kind], options=OPTIONS, min_partition=min_partition
            )
        )
        for name, kind in (("a", a), ("b", b))
    }
    return sharded(two_tables(), constraints=constraints)


def test_one_rank_without_a_plan_gives_the_gradient_of_the_unsharded_collection() -> (
    None
):
    reference = two_tables("cpu")
    for table in reference.embedding_bags.values():
        nn.init.uniform_(table.weight)
    model = DistributedModelParallel(
        nn.Sequential(two_tables()), sharders=[RecStoreSharder()]
    )
    tables = {table.name: table for table in model.module[0].recstore_tables()}
    for name, table in reference.embedding_bags.items():
        tables[name].insert(torch.arange(10), table.weight.detach())
    expected, found = gradient(reference, "f", "g"), gradient(model, "f", "g")
    assert expected is not None
    torch.testing.assert_close(found, expected)
    assert expected.abs().min() > 0


@pytest.mark.parametrize(
    "sharding_type", [*SPLIT_ROWS, "column_wise", "table_column_wise"]
)
def test_shardings_that_lose_the_gradient_are_refused(sharding_type: str) -> None:
    model = of_types(sharding_type, sharding_type)
    with pytest.raises(NotImplementedError) as refused:
        model(weighted("f", "g"))
    assert (
        str(refused.value)
        == "RecStore table 'a': the weights of feature(s) 'f' require a gradient,"
        f" which TorchRec's input distribution does not carry ({sharding_type} on 1"
        " rank(s)): shard all tables of the collection table_wise, use a"
        " FeatureProcessedEmbeddingBagCollection, which makes weights after it, or"
        " detach the weights"
    )
    assert all(stats.rows == stats.steps == 0 for stats in table_stats(model).values())


def test_a_split_over_two_shardings_is_refused() -> None:
    for types, table in (
        (("table_wise", "row_wise"), "a"),
        (("data_parallel", "table_wise"), "b"),
    ):
        for order in (("f", "g"), ("g", "f")):
            with pytest.raises(
                NotImplementedError,
                match=f"table '{table}'.* shard all tables .* table_wise, use",
            ):
                of_types(*types)(weighted(*order))


def test_features_in_another_order_are_refused() -> None:
    model = of_types("table_wise", "table_wise")
    with pytest.raises(
        NotImplementedError, match=r"give the features in the order \['f', 'g'\], use"
    ):
        gradient(model, "g", "f")
    assert gradient(model, "f", "g") is not None


def test_columns_that_are_not_split_keep_the_gradient() -> None:
    assert (
        gradient(of_types("column_wise", "column_wise", min_partition=8), "f", "g")
        is not None
    )


@pytest.mark.parametrize("sharding_type", SPLIT_ROWS)
def test_what_asks_for_no_gradient_is_not_refused(sharding_type: str) -> None:
    model = of_types(sharding_type, sharding_type)
    with torch.no_grad():
        model(weighted("f", "g"))
    model.eval()(weighted("f", "g"))
    model.train()
    model(weighted("f", "g", weights=torch.ones(7))).values().sum().backward()
    unweighted = sharded(two_tables(is_weighted=False), sharding_type=sharding_type)
    unweighted(weighted("f", "g")).values().sum().backward()


@pytest.mark.parametrize("kind", [TrainPipelineSparseDist, RecStorePrefetchPipeline])
def test_pipelines_refuse_before_anything_has_changed(
    kind: type[TrainPipelineSparseDist],
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = two_tables()

        def forward(
            self, features: KeyedJaggedTensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            loss = self.bags(features).values().sum()
            return loss, loss.detach()

    for sharding_type, refused in (("row_wise", True), ("table_wise", False)):
        constraints = {
            n: RecStoreConstraints(sharding_types=[sharding_type], options=OPTIONS)
            for n in "ab"
        }
        model = Model()
        model.bags = sharded(model.bags, constraints=constraints).module
        wrapped = DistributedModelParallel(model, sharders=[])
        pipeline = kind(
            wrapped,
            torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1),
            torch.device("cpu"),
        )
        weights = learned()
        batches = iter([weighted("f", "g", weights=weights) for _ in range(2)])
        if refused:
            with pytest.raises(NotImplementedError, match="require a gradient"):
                pipeline.progress(batches)
            assert all(stats.rows == 0 for stats in table_stats(wrapped).values())
        else:
            pipeline.progress(batches)
            assert weights.grad is not None


def test_evaluation_gives_the_gradient_of_the_rows_and_says_that_no_row_is_updated() -> (
    None
):
    model = of_types("table_wise", "table_wise")
    gradient(model, "f", "g")
    rows = {
        name: table.read_rows(table.ids())["weight"]
        for name, table in tables(model).items()
    }
    model.eval()
    with pytest.warns(
        RecStoreWarning,
        match="tables a, b: backward of a lookup in evaluation mode updates no row",
    ):
        found = gradient(model, "f", "g")
    assert found is not None
    assert found.abs().min() > 0
    for name, table in tables(model).items():
        assert torch.equal(table.read_rows(table.ids())["weight"], rows[name])
    reference = two_tables("cpu").eval()
    for name, embedding in reference.embedding_bags.items():
        with torch.no_grad():
            embedding.weight[1:6] = tables(model)[name].lookup(torch.arange(1, 6))
    torch.testing.assert_close(
        found, gradient(reference, "f", "g"), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("sharding_type", SPLIT_ROWS)
def test_evaluation_names_the_weights_whose_gradient_is_lost(
    sharding_type: str,
) -> None:
    model = of_types("table_wise", sharding_type).eval()
    with pytest.warns(
        RecStoreWarning,
        match=r"loses a gradient: .* table 'a': the weights of feature\(s\) 'f'",
    ):
        model(weighted("f", "g"))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", RecStoreWarning)
        model(weighted("f", "g"))
