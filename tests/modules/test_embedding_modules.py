"""The eager collections against TorchRec's own unsharded ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from tests.modules.collections import (
    IDS,
    bag_tables,
    batch,
    places,
    rows_of,
    sequence_tables,
)
from torchrec_recstore import ConstantInit, TableOptions, UniformInit
from torchrec_recstore.modules import (
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    SparseAdamW,
)
from torchrec_recstore.modules.table_module import TableModule
from torchrec_recstore.optim import SGD, Adagrad
from torchrec_recstore.utils import RecStoreWarning

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN


def give_rows(stock: nn.ModuleDict, ours: nn.ModuleDict) -> None:
    """Writes the weights of TorchRec's module to the rows of :data:`IDS` of our tables."""
    for name, table in ours.items():
        assert isinstance(table, TableModule)
        table.table.insert(IDS.sort().values, stock[name].weight.detach())  # type: ignore[arg-type]


def assert_same(ours: KeyedTensor, stock: KeyedTensor) -> None:
    assert ours.keys() == stock.keys()
    assert ours.length_per_key() == stock.length_per_key()
    assert ours.offset_per_key() == stock.offset_per_key()
    torch.testing.assert_close(ours.values(), stock.values(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("enable_fusion", [True, False])
@pytest.mark.parametrize(
    ("poolings", "weighted", "keys"),
    [
        ([SUM], False, ("b", "a", "c")),
        ([MEAN], False, ("c", "unused", "b", "a")),
        ([SUM, MEAN, SUM], False, ("a", "b", "c")),
        ([SUM], True, ("b", "c", "a")),
    ],
)
def test_bags_as_torchrec(
    poolings: Any, weighted: bool, keys: Any, enable_fusion: bool
) -> None:
    stock = EmbeddingBagCollection(
        tables=bag_tables(*poolings, stock=True), is_weighted=weighted
    )
    optimizer = torch.optim.Adagrad(stock.parameters(), lr=0.1, eps=1e-8)
    ours = RecStoreEmbeddingBagCollection(
        bag_tables(*poolings),
        enable_fusion=enable_fusion,
        is_weighted=weighted,
        optimizer=Adagrad(lr=0.1, eps=1e-8),
    )
    give_rows(stock.embedding_bags, ours.embedding_bags)
    assert ours.is_weighted() is weighted
    for step in range(3):
        given = batch(step, weighted, keys)
        others = places(given)
        outs = ours(given), stock(others)
        assert_same(*outs)
        grad = torch.randn_like(outs[0].values())
        optimizer.zero_grad()
        for out in outs:
            out.values().backward(grad)
        optimizer.step()
        if weighted:
            torch.testing.assert_close(
                given.weights().grad, others.weights().grad, rtol=1e-5, atol=1e-6
            )
    for name, table in ours.embedding_bags.items():
        weight = stock.embedding_bags[name].weight.detach()
        torch.testing.assert_close(rows_of(table.table), weight, rtol=1e-5, atol=1e-6)
    assert_same(
        ours.eval()(batch(9, weighted, keys)), stock(places(batch(9, weighted, keys)))
    )


@pytest.mark.parametrize("need_indices", [True, False])
@pytest.mark.parametrize("enable_fusion", [True, False])
def test_sequences_as_torchrec(enable_fusion: bool, need_indices: bool) -> None:
    stock = EmbeddingCollection(
        tables=sequence_tables(stock=True), need_indices=need_indices
    )
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    ours = RecStoreEmbeddingCollection(
        sequence_tables(),
        enable_fusion=enable_fusion,
        need_indices=need_indices,
        optimizer=SGD(lr=0.1),
    )
    give_rows(stock.embeddings, ours.embeddings)
    assert (ours.need_indices(), ours.embedding_dim()) == (need_indices, 4)
    assert ours.embedding_names_by_table() == stock.embedding_names_by_table()
    for step in range(3):
        given = batch(step)
        outs: list[dict[str, JaggedTensor]] = [ours(given), stock(places(given))]
        assert list(outs[0]) == list(outs[1])
        for name in outs[0]:
            mine, other = outs[0][name], outs[1][name]
            assert torch.equal(mine.values(), other.values()) or step
            torch.testing.assert_close(
                mine.values(), other.values(), rtol=1e-6, atol=1e-6
            )
            assert torch.equal(mine.lengths(), other.lengths())
            if need_indices:
                assert torch.equal(mine.weights(), given[name.split("@")[0]].values())
            else:
                assert mine.weights_or_none() is None
        optimizer.zero_grad()
        for out in outs:
            out["c"].values().mul_(2.0)  # Outputs can be changed in place.
            sum((out[name].values() ** 2).sum() for name in sorted(out)).backward()  # type: ignore[union-attr]
        optimizer.step()
    for name, table in ours.embeddings.items():
        weight = stock.embeddings[name].weight.detach()
        torch.testing.assert_close(rows_of(table.table), weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("enable_fusion", [True, False])
def test_a_batch_whose_size_varies_by_feature(enable_fusion: bool) -> None:
    given = KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=IDS[torch.tensor([0, 4, 3, 4, 8, 9, 1])],
        lengths=torch.tensor([2, 1, 0, 1, 2, 1]),
        stride_per_key_per_rank=[[3], [1], [2]],
        inverse_indices=(
            ["a", "b", "c"],
            torch.tensor([[2, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0]]),
        ),
    )
    stock = EmbeddingBagCollection(tables=bag_tables(stock=True))
    ours = RecStoreEmbeddingBagCollection(
        bag_tables(), enable_fusion=enable_fusion, optimizer=SGD(lr=1.0)
    )
    give_rows(stock.embedding_bags, ours.embedding_bags)
    outs = ours(given), stock(places(given))
    assert_same(*outs)
    grad = torch.randn_like(outs[0].values())
    for out in outs:
        out.values().backward(grad)
    for name, table in ours.embedding_bags.items():
        stepped = (
            stock.embedding_bags[name].weight.detach()
            - stock.embedding_bags[name].weight.grad
        )
        torch.testing.assert_close(rows_of(table.table), stepped, rtol=1e-5, atol=1e-6)
    sequences = EmbeddingCollection(tables=sequence_tables(stock=True))
    eager = RecStoreEmbeddingCollection(sequence_tables(), enable_fusion=enable_fusion)
    give_rows(sequences.embeddings, eager.embeddings)
    for name, jagged in sequences(places(given)).items():
        mine = eager(given)[name]
        assert torch.equal(mine.values(), jagged.values())
        assert torch.equal(mine.lengths(), jagged.lengths())


def test_fusion_changes_no_bit_and_limits_no_id() -> None:
    """One call, or one call for each table, with any pooling, frozen tables, and 64-bit
    ids for any fusion_k.
    """

    def train(enable_fusion: bool, fusion_k: int) -> list[Tensor]:
        ebc = RecStoreEmbeddingBagCollection(
            bag_tables(SUM, MEAN, SUM), 0.05, enable_fusion, fusion_k, is_weighted=True
        )
        found = []
        for step in range(4):
            ebc.embedding_bags["t2"].requires_grad_(step % 2 == 0)
            given = batch(step, weighted=True)
            out = ebc(given).values()
            (out**2).sum().backward()
            found += [out, given.weights().grad]
        for name, table in ebc.embedding_bags.items():
            found += [
                table.table.ids(),
                rows_of(table.table),
                torch.tensor(table.table.stats().steps),
            ]
            if name == "t0":
                assert torch.equal(table.table.ids(), IDS.sort().values)
        return found

    plain = train(False, 30)
    for fused in (train(True, 30), train(True, 1), train(True, 63)):
        assert all(torch.equal(*pair) for pair in zip(plain, fused, strict=True))
    assert [int(steps) for steps in plain[-7::3][:1] + plain[-1:]] == [4, 2]


def test_one_call_looks_all_tables_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchrec_recstore import ops

    calls: list[str] = []
    for name in ("group_forward", "rows_forward"):
        original = getattr(ops, name)
        monkeypatch.setattr(
            ops, name, lambda *a, _o=original, _n=name: (calls.append(_n), _o(*a))[1]
        )
    for enable_fusion, count in ((True, 1), (False, 3)):
        RecStoreEmbeddingBagCollection(bag_tables(), enable_fusion=enable_fusion)(
            batch(0)
        )
        assert calls == ["group_forward"] * count
        calls.clear()
        RecStoreEmbeddingCollection(sequence_tables(), enable_fusion=enable_fusion)(
            batch(0)
        )
        assert calls == ["rows_forward"] * count
        calls.clear()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("enable_fusion", [True, False])
def test_a_batch_without_ids(enable_fusion: bool, fused: bool) -> None:
    """An empty batch is a step and an update, as with a sharded module."""
    none = torch.empty(0, dtype=torch.int64)
    given = KeyedJaggedTensor(
        ["a", "b", "c"], none, torch.empty(0), lengths=torch.zeros(6, dtype=torch.int64)
    )
    ebc = RecStoreEmbeddingBagCollection(
        bag_tables(), enable_fusion=enable_fusion, fused=fused, is_weighted=True
    )
    ec = RecStoreEmbeddingCollection(
        sequence_tables(), enable_fusion=enable_fusion, fused=fused
    )
    pooled = ebc(given).values()
    assert torch.equal(pooled, torch.zeros(2, 22))
    rows = [jagged.values() for jagged in ec(given).values()]
    assert [tuple(part.shape) for part in rows] == [(0, 4)] * 4
    pooled.sum().backward()
    torch.cat(rows).sum().backward()
    if not fused:
        SparseAdamW().step([ebc, ec])
    for module in (*ebc.embedding_bags.values(), *ec.embeddings.values()):
        assert (
            len(module.table),
            module.table.steps,
            module.table.optimizer_steps,
        ) == (0, 1, 1)


def test_evaluation_changes_nothing() -> None:
    options = {"t0": TableOptions(missing="init", initializer=ConstantInit(2.0))}
    ebc = RecStoreEmbeddingBagCollection(bag_tables(), options=options).eval()
    out = ebc(batch(0))
    assert out.values().requires_grad
    lengths = batch(0)["b"].lengths()
    assert torch.equal(out["b@t0"], 2.0 * lengths[:, None].expand(-1, 4))
    assert torch.equal(out["c"], torch.zeros(5, 6))
    with torch.no_grad():
        ebc.train()(batch(0))
    assert all(len(table.table) == 0 for table in ebc.embedding_bags.values())


@pytest.mark.parametrize("pooling", [SUM, MEAN])
def test_weights_have_the_gradients_of_training_in_evaluation(
    pooling: PoolingType,
) -> None:
    ebc = RecStoreEmbeddingBagCollection(
        bag_tables(pooling), is_weighted=True, optimizer=SGD(lr=0.0)
    )
    grads = []
    for training in (True, False):
        given = batch(0, weighted=True)
        (ebc.train(training)(given).values() + 0.5).square().sum().backward()
        grads.append(given.weights().grad)
    assert grads[0] is not None
    assert float(grads[0].abs().min()) > 0
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fused", [True, False])
def test_a_backward_in_evaluation_warns_and_trains_nothing(fused: bool) -> None:
    bags = RecStoreEmbeddingBagCollection(bag_tables(), fused=fused)
    rows = RecStoreEmbeddingCollection(sequence_tables(), fused=fused)
    look_ups = (
        (lambda: bags(batch(0)).values()),
        (lambda: torch.cat([each.values() for each in rows(batch(0)).values()])),
    )
    for module, look_up in zip((bags, rows), look_ups, strict=True):
        before = look_up()
        module.eval()
        with pytest.warns(
            RecStoreWarning,
            match=(
                r"tables t0, t1, t2: backward of a lookup in evaluation mode updates no"
            ),
        ):
            look_up().sum().backward()
        assert torch.equal(look_up(), before)
        module.requires_grad_(False)
        assert not look_up().requires_grad


def test_configs_of_either_kind() -> None:
    """Tests configs as mappings, int32 ids, a TensorDict, and a feature that has the
    name of its table.
    """
    mapping = {
        "name": "t",
        "num_embeddings": 10,
        "embedding_dim": 4,
        "weight_init_min": 1.0,
        "weight_init_max": 2.0,
    }
    ebc = RecStoreEmbeddingBagCollection([mapping])
    assert ebc.embedding_bag_configs()[0].feature_names == ["t"]
    given = KeyedJaggedTensor(
        ["t"], torch.tensor([3, -3], dtype=torch.int32), lengths=torch.tensor([1, 1])
    )
    out = ebc(given).values()
    assert bool(((out >= 1.0) & (out < 2.0)).all())
    jagged = torch.nested.nested_tensor(
        [torch.tensor([3]), torch.tensor([-3])], layout=torch.jagged
    )
    assert torch.equal(ebc(TensorDict({"t": jagged}, batch_size=[2])).values(), out)
    half = EmbeddingConfig(
        name="t",
        num_embeddings=10,
        embedding_dim=4,
        feature_names=["t"],
        data_type=DataType.BF16,
    )
    ec = RecStoreEmbeddingCollection(tables=[half])
    assert ec.embeddings["t"].table.dtype is torch.bfloat16
    assert ec(given)["t"].values().dtype is torch.float32


def test_the_learning_rate_is_all_tables() -> None:
    ebc = RecStoreEmbeddingBagCollection(bag_tables(), optimizer=SGD(lr=0.5))
    ebc.learning_rate = 0.0
    before = ebc(batch(0))
    before.values().sum().backward()
    assert torch.equal(ebc(batch(0)).values(), before.values())
    assert [table.learning_rate for table in ebc.embedding_bags.values()] == [0.0] * 3


def test_in_a_model_of_torchrec() -> None:
    tables = [replace(config, embedding_dim=8) for config in bag_tables()[:2]]
    model = DLRM(RecStoreEmbeddingBagCollection(tables, lr=0.5), 3, [8, 8], [4, 1])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    labels = (batch(0)["c"].lengths() > 0).float()
    assert 0 < int(labels.sum()) < 5
    dense, losses = torch.randn(5, 3), []
    for _ in range(20):
        loss = nn.functional.binary_cross_entropy_with_logits(
            model(dense, batch(0)).squeeze(1), labels
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 < losses[0]


def test_under_feature_processors_of_torchrec() -> None:
    """The weights of positions get the same gradients as with TorchRec's own tables."""
    stock = EmbeddingBagCollection(tables=bag_tables(stock=True), is_weighted=True)
    ours = RecStoreEmbeddingBagCollection(bag_tables(), is_weighted=True)
    give_rows(stock.embedding_bags, ours.embedding_bags)
    grads = []
    for collection, given in ((stock, places(batch(0))), (ours, batch(0))):
        processors = PositionWeightedModuleCollection({"a": 3, "b": 3, "c": 3})
        model = FeatureProcessedEmbeddingBagCollection(collection, processors)
        (model(given).values() + 0.5).square().sum().backward()
        grads.append([weight.grad for weight in processors.parameters()])
    for mine, other in zip(*reversed(grads), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def one(**more: Any) -> EmbeddingBagConfig:
    arguments = {
        "name": "t",
        "num_embeddings": 10,
        "embedding_dim": 4,
        "feature_names": ["f"],
        **more,
    }
    return EmbeddingBagConfig(**arguments)


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (TypeError, "fusion_k must be an int, got float", {"fusion_k": 30.0}),
        (TypeError, "fusion_k must be an int, got bool", {"fusion_k": True}),
        (TypeError, "enable_fusion must be a bool", {"enable_fusion": 1}),
        (
            TypeError,
            "exactly one of embedding_bag_configs and tables must be given",
            {"tables": [one()]},
        ),
        (
            TypeError,
            "exactly one of embedding_bag_configs and tables must be given",
            {"embedding_bag_configs": None},
        ),
        (ValueError, "at least one table", {"embedding_bag_configs": []}),
        (
            TypeError,
            "must be EmbeddingBagConfig or a mapping, got str",
            {"embedding_bag_configs": ["t"]},
        ),
        (
            ValueError,
            "Duplicate table name t",
            {"embedding_bag_configs": [one(), one()]},
        ),
        (
            ValueError,
            "'t': data_type INT4",
            {"embedding_bag_configs": [one(data_type=DataType.INT4)]},
        ),
        (
            ValueError,
            "'t': init_fn",
            {"embedding_bag_configs": [one(init_fn=nn.init.zeros_)]},
        ),
        (
            ValueError,
            "'t': use_virtual_table",
            {"embedding_bag_configs": [one(use_virtual_table=True)]},
        ),
        (
            ValueError,
            "'t': pooling must be",
            {"embedding_bag_configs": [one(pooling=PoolingType.NONE)]},
        ),
        (
            ValueError,
            "'t': weight_init_min",
            {"embedding_bag_configs": [one(weight_init_min=5.0)]},
        ),
        (ValueError, r"unknown table\(s\) 'u'", {"options": {"u": TableOptions()}}),
        (TypeError, "options must be TableOptions", {"options": {"t": 1}}),
        (ValueError, "device must be cpu or meta", {"device": torch.device("cuda", 1)}),
        (ValueError, r"lr=0\.2 disagrees", {"lr": 0.2, "optimizer": SGD()}),
    ],
)
def test_bad_arguments(
    error: type[Exception], match: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(error, match=match):
        RecStoreEmbeddingBagCollection(
            **{"embedding_bag_configs": [one()], **arguments}
        )


def test_bad_input() -> None:
    ebc = RecStoreEmbeddingBagCollection([one()], is_weighted=True)
    given = KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match="is_weighted=True needs weights"):
        ebc(given)
    with pytest.raises(
        TypeError, match=r"ids must be integers, got torch.float32 for features \['f'\]"
    ):
        ebc(KeyedJaggedTensor(["f"], torch.tensor([1.0]), lengths=torch.tensor([1])))
    with pytest.raises(
        ValueError, match=r"the batch has no feature 'f' of table 't': it has \['g'\]"
    ):
        ebc(
            KeyedJaggedTensor(
                ["g"], torch.tensor([1]), torch.ones(1), torch.tensor([1])
            )
        )
    assert len(ebc.embedding_bags["t"].table) == 0
    tables = [
        EmbeddingConfig(name=f"t{dim}", num_embeddings=10, embedding_dim=dim)
        for dim in (4, 8)
    ]
    with pytest.raises(ValueError, match="'t8' has 8, not 4"):
        RecStoreEmbeddingCollection(tables)


@pytest.mark.parametrize("varying", [False, True])
def test_missing_features_are_named_with_all_of_their_tables(varying: bool) -> None:
    ids = {"values": torch.arange(3), "lengths": torch.ones(3, dtype=torch.int64)}
    if varying:
        order = (["a", "b"], torch.tensor([[0, 1], [0, 0]]))
        ids |= {"stride_per_key_per_rank": [[2], [1]], "inverse_indices": order}
    else:
        ids["lengths"] = torch.tensor([1, 2])
    lacking = (
        r"no feature 'c' of table 't', 'd' of table 't', 'c' of table 'u': it has"
        r" \['a', 'b'\]"
    )
    for kind, config in (
        (RecStoreEmbeddingBagCollection, EmbeddingBagConfig),
        (RecStoreEmbeddingCollection, EmbeddingConfig),
    ):
        names = {"t": ["c", "a", "d"], "u": ["c"]}
        module = kind(
            [
                config(name=n, num_embeddings=9, embedding_dim=4, feature_names=f)
                for n, f in names.items()
            ]
        )
        for use in (module, module.prefetch):
            with pytest.raises(ValueError, match=lacking):
                use(KeyedJaggedTensor(["a", "b"], **ids))


def test_an_initializer_of_the_options_goes_before_that_of_the_config() -> None:
    config = one(init_fn=nn.init.zeros_, weight_init_min=5.0, weight_init_max=6.0)
    ebc = RecStoreEmbeddingBagCollection(
        [config], options=TableOptions(UniformInit(1.0, 2.0))
    )
    out = ebc(
        KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))
    ).values()
    assert bool(((out >= 1.0) & (out < 2.0)).all())


@pytest.mark.parametrize("fused", [True, False])
def test_a_reentrant_checkpoint_is_refused(fused: bool) -> None:
    scale = torch.ones(1, requires_grad=True)
    bags = RecStoreEmbeddingBagCollection(bag_tables(), fused=fused)
    rows = RecStoreEmbeddingCollection(sequence_tables(), fused=fused)
    features = batch(1)
    for look_up in (
        lambda given: bags(features).values() * given,
        lambda given: next(iter(rows(features).values())).values() * given,
    ):
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            checkpoint(look_up, scale, use_reentrant=True)
        checkpoint(look_up, scale, use_reentrant=False).sum().backward()
    for model in (bags.eval(), rows.eval()):
        checkpoint(
            lambda given, model=model: (model(features), given * 2)[1],
            scale,
            use_reentrant=True,
        )
