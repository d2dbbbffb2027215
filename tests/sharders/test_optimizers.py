"""Which optimizer a table gets, and that its learning rate can be changed while training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad as TorchRecRowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from torchrec_recstore.optim import SGD, Adagrad, Optimizer, RowWiseAdagrad
from torchrec_recstore.options import ConstantInit, TableOptions

from .models import bag, batch, collection, sharded, tables

pytestmark = pytest.mark.usefixtures("one_rank")


def marked(optimizer: type[torch.optim.Optimizer], **kwargs: Any) -> EmbeddingBagCollection:
    ebc = collection(bag())
    apply_optimizer_in_backward(optimizer, ebc.parameters(), kwargs)
    return ebc


@pytest.mark.parametrize(
    ("in_backward", "kwargs", "expected"),
    [
        (torch.optim.SGD, {"lr": 0.2}, SGD(lr=0.2)),
        (torch.optim.Adagrad, {"lr": 0.2, "eps": 1e-5}, Adagrad(lr=0.2, eps=1e-5)),
        (TorchRecRowWiseAdagrad, {"lr": 0.2}, RowWiseAdagrad(lr=0.2)),
    ],
)
def test_both_ways_select_the_optimizer(in_backward: type, kwargs: dict[str, Any], expected: Optimizer) -> None:
    types = {SGD: EmbOptimType.EXACT_SGD, Adagrad: EmbOptimType.EXACT_ADAGRAD}
    fused_params = {"optimizer": types.get(type(expected), EmbOptimType.EXACT_ROWWISE_ADAGRAD), "learning_rate": 0.2}
    if "eps" in kwargs:
        fused_params["eps"] = kwargs["eps"]
    models = [sharded(marked(in_backward, **kwargs)), sharded(collection(bag()), fused_params)]
    for model in models:
        assert tables(model)["t"].optimizer == expected
        for _ in range(3):
            (model(batch(f=[[1, -1], [1]])).values() ** 2).sum().backward()
    rows = [tables(model)["t"].lookup(torch.tensor([1, -1])) for model in models]
    assert torch.equal(*rows)


def test_a_parameters_mark_goes_before_the_sharders_fused_params() -> None:
    fused_params = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.7}
    assert tables(sharded(marked(torch.optim.SGD, lr=0.2), fused_params))["t"].optimizer == SGD(lr=0.2)


def test_tables_with_different_optimizers_share_a_collection() -> None:
    ebc = collection(bag("a", ["f"]), bag("b", ["g"]))
    apply_optimizer_in_backward(torch.optim.Adagrad, ebc.embedding_bags["b"].parameters(), {"lr": 0.3})
    model = sharded(ebc, {"learning_rate": 0.1})
    assert {name: t.optimizer for name, t in tables(model).items()} == {"a": SGD(lr=0.1), "b": Adagrad(lr=0.3)}
    assert sorted(group["lr"] for group in model.fused_optimizer.param_groups) == [0.1, 0.3]


def test_unsupported_optimizers_fail_when_sharding() -> None:
    with pytest.raises(ValueError, match=r"'t'.*adam"):
        sharded(marked(torch.optim.Adam, lr=0.1))
    with pytest.raises(ValueError, match=r"'t'.*lamb"):
        sharded(collection(bag()), {"optimizer": EmbOptimType.LAMB})


def decrease(model: DistributedModelParallel) -> float:
    """How much a row of a sum falls in one training step with a gradient of one."""
    before = model(batch(f=[[5]])).values()
    before.sum().backward()
    return float((before.detach() - tables(model)["t"].lookup(torch.tensor([5]))).mean())


def test_learning_rate_follows_param_groups_and_schedulers() -> None:
    model = sharded(collection(bag()), {"learning_rate": 0.5}, {"t": TableOptions(initializer=ConstantInit(0.0))})
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


def test_learning_rate_is_read_in_backward() -> None:
    model = sharded(collection(bag()), {"learning_rate": 0.5}, {"t": TableOptions(initializer=ConstantInit(0.0))})
    pooled = model(batch(f=[[5]])).values()
    model.fused_optimizer.param_groups[0]["lr"] = 0.125
    pooled.sum().backward()
    assert float(tables(model)["t"].lookup(torch.tensor([5])).mean()) == pytest.approx(-0.125)


def test_warm_up() -> None:
    model = sharded(collection(bag()), {"learning_rate": 1.0}, {"t": TableOptions(initializer=ConstantInit(0.0))})
    stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=4, value=0.0)]
    optimizer = WarmupOptimizer(CombinedOptimizer([model.fused_optimizer]), stages, lr=1.0)
    seen = []
    for _ in range(4):
        seen.append(decrease(model))
        optimizer.step()
    assert seen == pytest.approx([0.0, 0.25, 0.5, 0.75])


def test_tables_stay_out_of_the_dense_optimizer_and_of_checkpoints_of_it() -> None:
    model = sharded(collection(bag("a", ["f"]), bag("b", ["g"])))
    assert list(in_backward_optimizer_filter(model.named_parameters())) == []
    assert [name.split(".")[-2] for name, _ in model.named_parameters()] == ["a", "b"]
    assert sum(parameter.numel() for parameter in model.parameters()) == 0
    assert [f"embedding_bags.{name}" for name in ("a.weight", "a.weight_id", "b.weight", "b.weight_id")] == sorted(
        model.state_dict()
    )
    combined = CombinedOptimizer(
        [
            model.fused_optimizer,
            (
                "dense",
                KeyedOptimizerWrapper({"p": torch.nn.Parameter(torch.ones(1))}, lambda p: torch.optim.SGD(p, lr=0.1)),
            ),
        ]
    )
    model.load_state_dict(model.state_dict())
    combined.load_state_dict(combined.state_dict())
