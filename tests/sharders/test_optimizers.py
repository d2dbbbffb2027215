"""Tests which optimizer a table gets, and that its learning rate can change during
training.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec import EmbeddingBagCollection
from torchrec import optim as stock
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from torchrec_recstore.optim import (
    LAMB,
    LARSSGD,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Optimizer,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RMSprop,
    RowWiseAdagrad,
)
from torchrec_recstore.options import ConstantInit, TableOptions
from torchrec_recstore.planner import RecStoreConstraints
from torchrec_recstore.sharders import RecStoreSharder
from torchrec_recstore.store import Table

from .models import bag, batch, collection, sharded, tables

pytestmark = pytest.mark.usefixtures("one_rank")


def marked(
    optimizer: type[torch.optim.Optimizer], **kwargs: Any
) -> EmbeddingBagCollection:
    ebc = collection(bag())
    apply_optimizer_in_backward(optimizer, ebc.parameters(), kwargs)
    return ebc


@pytest.mark.parametrize(
    ("in_backward", "kwargs", "kind", "more", "expected"),
    [
        (torch.optim.SGD, {}, "EXACT_SGD", {}, SGD(lr=0.2)),
        (
            torch.optim.SGD,
            {"momentum": 0.9},
            "EXACT_SGD",
            {"momentum": 0.9},
            SGD(lr=0.2, momentum=0.9),
        ),
        (
            stock.SGD,
            {"weight_decay": 0.1},
            "SGD",
            {"weight_decay": 0.1},
            SGD(lr=0.2, weight_decay=0.1),
        ),
        (
            torch.optim.Adagrad,
            {"eps": 1e-5},
            "EXACT_ADAGRAD",
            {"eps": 1e-5},
            Adagrad(lr=0.2, eps=1e-5),
        ),
        (stock.Adagrad, {}, "EXACT_ADAGRAD", {}, Adagrad(lr=0.2)),
        (stock.RowWiseAdagrad, {}, "EXACT_ROWWISE_ADAGRAD", {}, RowWiseAdagrad(lr=0.2)),
        (
            torch.optim.Adam,
            {"betas": (0.8, 0.9)},
            "ADAM",
            {"beta1": 0.8, "beta2": 0.9},
            Adam(0.2, betas=(0.8, 0.9)),
        ),
        (
            stock.Adam,
            {"beta1": 0.8},
            "ADAM",
            {"beta1": 0.8},
            Adam(lr=0.2, betas=(0.8, 0.999)),
        ),
        (
            stock.PartialRowWiseAdam,
            {},
            "PARTIAL_ROWWISE_ADAM",
            {},
            PartialRowWiseAdam(lr=0.2),
        ),
        (
            stock.LAMB,
            {"weight_decay": 0.1},
            "LAMB",
            {"weight_decay": 0.1},
            LAMB(lr=0.2, weight_decay=0.1),
        ),
        (
            stock.PartialRowWiseLAMB,
            {},
            "PARTIAL_ROWWISE_LAMB",
            {},
            PartialRowWiseLAMB(lr=0.2),
        ),
        (
            stock.LarsSGD,
            {"eta": 0.1},
            "LARS_SGD",
            {"eta": 0.1},
            LARSSGD(lr=0.2, eta=0.1),
        ),
    ],
)
def test_every_way_selects_the_optimizer(
    in_backward: type,
    kwargs: dict[str, Any],
    kind: str,
    more: dict[str, Any],
    expected: Optimizer,
) -> None:
    models = [
        sharded(marked(in_backward, lr=0.2, **kwargs)),
        sharded(
            collection(bag()),
            {"optimizer": EmbOptimType[kind], "learning_rate": 0.2, **more},
        ),
        sharded(collection(bag()), optimizer=expected),
    ]
    for model in models:
        assert tables(model)["t"].optimizer == expected
        for _ in range(3):
            (model(batch(f=[[1, -1], [1]])).values() ** 2).sum().backward()
    rows = [tables(model)["t"].lookup(torch.tensor([1, -1])) for model in models]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize(
    "optimizer", [AdamW(0.2), RMSprop(0.2), Ftrl(0.2, l1=0.01)], ids=repr
)
def test_optimizers_without_a_name_in_torchrec(
    optimizer: Optimizer, sharding_type: str
) -> None:
    options = TableOptions(seed=3)
    model = sharded(
        collection(bag()), None, {"t": options}, sharding_type, optimizer=optimizer
    )
    alone = Table(
        4, optimizer=optimizer, options=replace(options, expected_rows=1000), name="t"
    )
    ids = torch.tensor([1, -1, 1])
    for _ in range(3):
        model(batch(f=[[1, -1], [1]])).values().sum().backward()
        alone.update(ids, torch.ones(3, 4))
    rows = tables(model)["t"].lookup(ids)
    assert tables(model)["t"].optimizer == optimizer
    assert torch.equal(rows, alone.lookup(ids))
    assert model.fused_optimizer.param_groups[0]["lr"] == 0.2


def test_ways_that_disagree_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"Ftrl\(.*exact_adagrad"):
        RecStoreSharder({"optimizer": EmbOptimType.EXACT_ADAGRAD}, optimizer=Ftrl())
    with pytest.raises(ValueError, match=r"'t'.*Ftrl\(.*adam"):
        sharded(marked(torch.optim.Adam, lr=0.1), optimizer=Ftrl())
    with pytest.raises(ValueError, match=r"'t'.*lr=0\.5.*lr=0\.1"):
        sharded(marked(torch.optim.Adam, lr=0.1), optimizer=Adam(lr=0.5))
    with pytest.raises(TypeError, match="optimizer"):
        RecStoreSharder(optimizer=torch.optim.Adam)  # type: ignore[arg-type]
    assert tables(sharded(marked(torch.optim.Adam, lr=0.1), optimizer=Adam(lr=0.1)))[
        "t"
    ].optimizer == Adam(lr=0.1)


def test_an_own_optimizer_beside_stock_tables() -> None:
    def build(fused_params: dict[str, Any] | None) -> DistributedModelParallel:
        ebc = collection(bag("a", ["f"]), bag("b", ["g"]), device="cpu")
        constraints = {
            "a": RecStoreConstraints(),
            "b": ParameterConstraints(compute_kernels=["fused"]),
        }
        return sharded(
            ebc, fused_params, constraints=constraints, optimizer=Adagrad(lr=0.2)
        )

    with pytest.raises(ValueError, match=r"'b'.*'fused'.*Adagrad"):
        build(None)
    model = build({"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.2})
    model(batch(f=[[1]], g=[[1]])).values().sum().backward()
    assert tables(model)["a"].optimizer == Adagrad(lr=0.2)


def test_a_mark_and_fused_params_must_name_the_same_optimizer() -> None:
    adagrad = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}
    with pytest.raises(
        ValueError,
        match=(
            "table 't': fused_params select Adagrad, apply_optimizer_in_backward"
            " selects SGD"
        ),
    ):
        sharded(marked(torch.optim.SGD, lr=0.2), adagrad)
    # If both select the same optimizer, the table's arguments take precedence, as in
    # TorchRec. If the sharder selects no optimizer, apply_optimizer_in_backward selects
    # it.
    assert (
        tables(sharded(marked(torch.optim.Adagrad, lr=0.2), adagrad))["t"].optimizer.lr
        == 0.2
    )
    assert tables(sharded(marked(torch.optim.SGD, lr=0.2), {"learning_rate": 0.1}))[
        "t"
    ].optimizer == SGD(lr=0.2)


def test_tables_with_different_optimizers_share_a_collection() -> None:
    ebc = collection(bag("a", ["f"]), bag("b", ["g"]))
    apply_optimizer_in_backward(
        torch.optim.Adagrad, ebc.embedding_bags["b"].parameters(), {"lr": 0.3}
    )
    model = sharded(ebc, {"learning_rate": 0.1})
    assert {name: t.optimizer for name, t in tables(model).items()} == {
        "a": SGD(lr=0.1),
        "b": Adagrad(lr=0.3),
    }
    assert sorted(group["lr"] for group in model.fused_optimizer.param_groups) == [
        0.1,
        0.3,
    ]


def test_unsupported_optimizers_fail_when_sharding() -> None:
    with pytest.raises(ValueError, match=r"'t'.*nesterov"):
        sharded(marked(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True))
    with pytest.raises(ValueError, match=r"'t'.*shampoo"):
        sharded(collection(bag()), {"optimizer": EmbOptimType.SHAMPOO})


def decrease(model: DistributedModelParallel) -> float:
    """Returns the decrease of a row in one training step with a gradient of one."""
    before = model(batch(f=[[5]])).values()
    before.sum().backward()
    return float(
        (before.detach() - tables(model)["t"].lookup(torch.tensor([5]))).mean()
    )


def test_learning_rate_follows_param_groups_and_schedulers() -> None:
    model = sharded(
        collection(bag()),
        {"learning_rate": 0.5},
        {"t": TableOptions(initializer=ConstantInit(0.0))},
    )
    optimizer = model.fused_optimizer
    assert decrease(model) == pytest.approx(0.5)
    optimizer.param_groups[0]["lr"] = 0.25
    assert decrease(model) == pytest.approx(0.25)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for expected in (0.25, 0.125, 0.0625):
        assert decrease(model) == pytest.approx(expected)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise"])
def test_accumulation(sharding_type: str) -> None:
    """After three backward passes, there is one update with the sum, with the learning
    rate of the third pass.
    """
    options = {"t": TableOptions(initializer=ConstantInit(0.0))}
    model = sharded(
        collection(bag()),
        {"learning_rate": 1.0},
        options,
        sharding_type,
        accumulation_steps=3,
    )
    for step, (ids, lr) in enumerate(
        [([5], 1.0), ([5, 6], 1.0), ([5], 0.5), ([7], 0.5)]
    ):
        model.fused_optimizer.param_groups[0]["lr"] = lr
        model(batch(f=[ids])).values().sum().backward()
        rows = tables(model)["t"].lookup(torch.tensor([5, 6, 7]))[:, 0].tolist()
        assert rows == ([-1.5, -0.5, 0.0] if step >= 2 else [0.0, 0.0, 0.0])


@pytest.mark.parametrize(("steps", "error"), [(0, ValueError), (1.5, TypeError)])
def test_a_bad_number_of_accumulation_steps_is_an_error(
    steps: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="accumulation_steps"):
        RecStoreSharder(accumulation_steps=steps)


def test_ftrl_through_a_warm_up_from_zero() -> None:
    options = {"t": TableOptions(initializer=ConstantInit(0.0))}
    model = sharded(collection(bag()), None, options, optimizer=Ftrl(lr=1.0, beta=1.0))
    stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=4, value=0.0)]
    optimizer = WarmupOptimizer(
        CombinedOptimizer([model.fused_optimizer]), stages, lr=1.0
    )
    seen = []
    for _ in range(3):
        seen.append(decrease(model))
        optimizer.step()
    assert seen[0] == 0.0
    assert all(0.0 < fall < 1.0 for fall in seen[1:])


def test_learning_rate_is_read_in_backward() -> None:
    model = sharded(
        collection(bag()),
        {"learning_rate": 0.5},
        {"t": TableOptions(initializer=ConstantInit(0.0))},
    )
    pooled = model(batch(f=[[5]])).values()
    model.fused_optimizer.param_groups[0]["lr"] = 0.125
    pooled.sum().backward()
    assert float(tables(model)["t"].lookup(torch.tensor([5])).mean()) == pytest.approx(
        -0.125
    )


def test_warm_up() -> None:
    model = sharded(
        collection(bag()),
        {"learning_rate": 1.0},
        {"t": TableOptions(initializer=ConstantInit(0.0))},
    )
    stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=4, value=0.0)]
    optimizer = WarmupOptimizer(
        CombinedOptimizer([model.fused_optimizer]), stages, lr=1.0
    )
    seen = []
    for _ in range(4):
        seen.append(decrease(model))
        optimizer.step()
    assert seen == pytest.approx([0.0, 0.25, 0.5, 0.75])


def test_the_parameter_of_a_table_has_the_optimizer_of_the_table() -> None:
    model = sharded(
        collection(bag()),
        {"learning_rate": 1.0},
        {"t": TableOptions(initializer=ConstantInit(0.0))},
    )
    (parameter,) = model.parameters()
    (optimizer,) = parameter._in_backward_optimizers
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.zero_grad()
    assert decrease(model) == pytest.approx(0.25)
    stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=4, value=0.0)]
    warm_up = WarmupOptimizer(optimizer, stages, lr=1.0)
    seen = []
    for _ in range(3):
        warm_up.zero_grad()
        seen.append(decrease(model))
        warm_up.step()
    assert seen == pytest.approx([0.0, 0.25, 0.5])
    assert list(warm_up.state_dict()["state"]) == ["__warmup"]


_ROWS = [f"{table}.weight{suffix}" for table in "ab" for suffix in ("", "_id", "_rows")]


def test_tables_stay_out_of_the_dense_optimizer_and_of_checkpoints_of_it() -> None:
    model = sharded(collection(bag("a", ["f"]), bag("b", ["g"])))
    assert list(in_backward_optimizer_filter(model.named_parameters())) == []
    assert [name.split(".")[-2] for name, _ in model.named_parameters()] == ["a", "b"]
    assert sum(parameter.numel() for parameter in model.parameters()) == 0
    assert [f"embedding_bags.{name}" for name in _ROWS] == sorted(model.state_dict())
    combined = CombinedOptimizer(
        [
            model.fused_optimizer,
            (
                "dense",
                KeyedOptimizerWrapper(
                    {"p": torch.nn.Parameter(torch.ones(1))},
                    lambda p: torch.optim.SGD(p, lr=0.1),
                ),
            ),
        ]
    )
    model.load_state_dict(model.state_dict())
    combined.load_state_dict(combined.state_dict())


def test_the_number_of_updates_is_set_as_that_of_stock_tables() -> None:
    """The first update of Adam depends on it: an update that counts as the 11th is
    smaller.
    """
    model = sharded(
        collection(bag()), {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1}
    )
    model.fused_optimizer.set_optimizer_step(10)
    model(batch(f=[[1, 2]])).values().sum().backward()
    assert [table.state().optimizer_steps for table in tables(model).values()] == [11]
