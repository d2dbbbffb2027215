"""The models of examples/models compute what the papers say: compared with loops over
every number.
"""

from __future__ import annotations

import math

import pytest
import torch
from models import dcn_v2, din, hstu, sasrec, two_tower
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.crossnet import CrossNet

from torchrec_recstore import Adam, RecStoreEmbeddingCollection

from . import data


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def test_hstu_attention_is_pointwise_and_causal() -> None:
    q, k, v = torch.randn(3, 2, 5, 2, 3)
    bias = torch.randn(2, 5, 5)
    attended = hstu.attend(q, k, v, bias)
    for b in range(2):
        for i in range(5):
            for h in range(2):
                expected = torch.zeros(3)
                for j in range(i + 1):
                    expected += (
                        silu(float(q[b, i, h] @ k[b, j, h] + bias[b, i, j]))
                        / hstu.LENGTH
                        * v[b, j, h]
                    )
                torch.testing.assert_close(attended[b, i, h], expected)


def test_hstu_bias_depends_on_distances_in_place_and_time() -> None:
    bias = hstu.Bias()
    times = torch.tensor([[0, 7, 7, 1000, 10**8]])
    computed = bias(times[:, 1:], times[:, :-1])
    for i in range(4):
        for j in range(i + 1):
            seconds = max(int(times[0, i + 1] - times[0, j]), 1)
            expected = bias.place[i - j] + bias.time[int(math.log(seconds) / 0.301)]
            torch.testing.assert_close(computed[0, i, j], expected)
    assert (
        bias(times[:, 1:], torch.zeros(1, 4, dtype=torch.int64) - 2**40)
        .isfinite()
        .all()
    ), "padding has no time"


def test_hstu_layer() -> None:
    layer = hstu.Layer().eval()
    x, times = torch.randn(1, 4, hstu.DIM), torch.tensor([[5, 9, 200, 300, 4000]])
    projected = nn.functional.silu(layer.f1(layer.norm_in(x)))
    u, v, q, k = (
        projected[..., part * hstu.DIM : (part + 1) * hstu.DIM] for part in range(4)
    )
    heads = [
        slice(head * hstu.DIM // hstu.HEADS, (head + 1) * hstu.DIM // hstu.HEADS)
        for head in range(hstu.HEADS)
    ]
    bias = layer.bias(times[:, 1:], times[:, :-1])
    parts = [
        nn.functional.silu(q[..., h] @ k[..., h].mT + bias).tril()
        / hstu.LENGTH
        @ v[..., h]
        for h in heads
    ]
    expected = x + layer.f2(layer.norm_out(torch.cat(parts, dim=-1)) * u)
    torch.testing.assert_close(layer(x, times[:, 1:], times[:, :-1]), expected)


def hstu_batch() -> tuple[KeyedJaggedTensor, Tensor]:
    lengths = torch.tensor([4, 2, 3, 2, 2, 2])
    values = torch.randint(50, (int(lengths.sum()),)) * 2**50
    times = torch.randint(1000, (3, 5)).sort(dim=1).values
    return KeyedJaggedTensor(["item", "negative"], values, lengths=lengths), times


def test_hstu_predictions_do_not_depend_on_later_movies_and_padding() -> None:
    model = hstu.HSTU(hstu.StaticTable(torch.arange(50) * 2**50)).eval()
    ids, times = hstu_batch()
    predicted, targets, negatives = model(ids, times)
    changed, later = ids.values().clone(), times.clone()
    changed[3], changed[5] = (
        (changed[3] + 2**50) % (50 * 2**50),
        (changed[5] + 2**50) % (50 * 2**50),
    )
    later[0, 4:], later[1, 2:] = 7, 0
    again, _, _ = model(
        KeyedJaggedTensor(["item", "negative"], changed, lengths=ids.lengths()), later
    )
    torch.testing.assert_close(again[0, :3], predicted[0, :3])
    torch.testing.assert_close(again[1, :1], predicted[1, :1])
    assert torch.equal(
        targets[1, 0],
        nn.functional.normalize(model.table(ids)["item"].values()[5], dim=0),
    )
    # The loss, place by place.
    losses = []
    movies = ids["item"].to_dense()
    for user, place in [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]:
        right = predicted[user, place] @ targets[user, place] / hstu.TEMPERATURE
        wrong = [
            predicted[user, place] @ negative / hstu.TEMPERATURE
            for negative, id_ in zip(negatives, ids["negative"].values(), strict=True)
            if id_ != movies[user][place + 1]
        ]
        losses.append(torch.logsumexp(torch.stack([right, *wrong]), dim=0) - right)
    torch.testing.assert_close(
        hstu.sampled_softmax(predicted, targets, negatives, ids),
        torch.stack(losses).mean(),
    )


def test_hstu_trains_alike_on_recstore_and_on_nn_embedding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From equal rows, with the same batches, the two tables train to the same rows,
    nearly.
    """
    monkeypatch.setattr(hstu, "DROPOUT", 0.0)
    every = torch.arange(50) * 2**50
    config = EmbeddingConfig(
        name="t_item",
        embedding_dim=hstu.DIM,
        num_embeddings=50,
        feature_names=["item", "negative"],
    )
    dynamic = RecStoreEmbeddingCollection([config], optimizer=Adam(lr=hstu.LR))
    static = hstu.StaticTable(every)
    dynamic.embeddings["t_item"].table.insert(every, static.rows.weight.detach())
    models = [hstu.HSTU(dynamic), hstu.HSTU(static)]
    models[1].load_state_dict(models[0].state_dict(), strict=False)
    sparse = torch.optim.SparseAdam([static.rows.weight], lr=hstu.LR)
    begin, losses = static.rows.weight.detach().clone(), []
    for _ in range(5):
        batch, times = hstu_batch()
        sparse.zero_grad()
        both = [hstu.sampled_softmax(*model(batch, times), batch) for model in models]
        for loss in both:
            loss.backward()
        sparse.step()
        losses.append([loss.item() for loss in both])
    for one, other in losses:
        assert one == pytest.approx(other, rel=1e-3)
    rows = dynamic.embeddings["t_item"].table.lookup(every)
    # The first steps of Adam have the sign of the gradient. Where a gradient is zero up
    # to rounding, the signs differ.
    moved = (static.rows.weight - begin).norm()
    assert (rows - static.rows.weight).norm() < 0.05 * moved


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> sasrec.Interactions:
    return sasrec.Interactions(
        data.interactions(tmp_path_factory.mktemp("data") / "Video.txt", users=90)
    )


def sasrec_batch(games: sasrec.Interactions, ends: Tensor) -> KeyedJaggedTensor:
    place, lengths = games.history(ends)
    ids = torch.cat(
        [
            games.item[place],
            games.item[place + 1],
            games.random_items(games.user, games.owned)[place],
        ]
    )
    return KeyedJaggedTensor(sasrec.KEYS, ids, lengths=lengths.repeat(3))


def test_sasrec_attention_is_causal_and_within_a_user() -> None:
    lengths = torch.tensor([4, 1, 3])
    qkv = torch.randn(8, 3 * sasrec.DIM)
    attended = sasrec.attend(qkv, lengths, dropout=0.0)
    for begin, end in [(0, 4), (4, 5), (5, 8)]:
        for place in range(begin, end):
            q, k, v = qkv[begin : place + 1].chunk(3, dim=1)
            weights = (k @ q[-1] / sasrec.DIM**0.5).softmax(dim=0)
            torch.testing.assert_close(attended[place], weights @ v)


def test_sasrec_reads_histories_and_draws_items_that_the_user_does_not_have(
    games: sasrec.Interactions,
) -> None:
    # The user has nine items.
    last = int((games.user == games.user.bincount().argmax()).nonzero()[-1])
    place, lengths = games.history(torch.tensor([last, last - 8, last - 7]))
    assert place.tolist() == [*range(last - 8, last), last - 8]
    assert lengths.tolist() == [8, 0, 1]
    owned = set(zip(games.user.tolist(), games.item.tolist(), strict=True))
    for _ in range(20):
        drawn = games.random_items(games.user, games.owned).tolist()
        assert not owned & set(zip(games.user.tolist(), drawn, strict=True))
    assert games.item[last] in games.random_items(
        games.user[last].expand(2000), games.owned[:last]
    ), "not of training"


def test_sasrec_trains_alike_on_recstore_and_on_nn_embedding(
    games: sasrec.Interactions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With batches of all items, the Adam of RecStore's rows is that of torch: the
    losses and the rows are equal.
    """
    monkeypatch.setattr(sasrec, "DROPOUT", 0.0)
    config = EmbeddingConfig(
        name="t_item",
        embedding_dim=sasrec.DIM,
        num_embeddings=60,
        feature_names=sasrec.KEYS,
    )
    dynamic = RecStoreEmbeddingCollection(
        [config], optimizer=Adam(lr=sasrec.LR, betas=sasrec.BETAS)
    )
    static = EmbeddingCollection([config])
    weight = static.embeddings["t_item"].weight
    dynamic.embeddings["t_item"].table.insert(games.items, weight.detach())
    models = [sasrec.SASRec(dynamic), sasrec.SASRec(static)]
    models[1].load_state_dict(models[0].state_dict(), strict=False)
    adam = torch.optim.Adam([weight], lr=sasrec.LR, betas=sasrec.BETAS)
    last = games.user.bincount().cumsum(0) - 1
    last = last[last > games.first[last]]
    for step in range(3):
        batch = sasrec_batch(games, last)
        assert set(batch.values().tolist()) == set(games.items.tolist())
        adam.zero_grad()
        numbers = torch.searchsorted(games.items, batch.values())
        batches = [
            batch,
            KeyedJaggedTensor(sasrec.KEYS, numbers, lengths=batch.lengths()),
        ]
        predicted = [model(each) for model, each in zip(models, batches, strict=True)]
        losses = [
            nn.functional.softplus((x * (wrong - right)).sum(dim=1)).mean()
            for x, right, wrong in predicted
        ]
        for loss in losses:
            loss.backward()
        adam.step()
        torch.testing.assert_close(
            losses[0], losses[1], rtol=0 if step == 0 else 1e-4, atol=0
        )
    rows = dynamic.embeddings["t_item"].table.lookup(games.items)
    torch.testing.assert_close(rows, weight.detach(), rtol=0, atol=1e-4)


def test_din_attention_weighs_each_movie_of_a_history() -> None:
    attention = din.Attention()
    item, history, lengths = (
        torch.randn(3, din.DIM),
        torch.randn(5, din.DIM),
        torch.tensor([2, 0, 3]),
    )
    pooled = attention(item, history, lengths)
    for sample, (begin, end) in enumerate([(0, 2), (2, 2), (2, 5)]):
        expected = torch.zeros(din.DIM)
        for h in history[begin:end]:
            expected += (
                attention.weigh(
                    torch.cat([h, item[sample], h - item[sample], h * item[sample]])
                )
                * h
            )
        torch.testing.assert_close(pooled[sample], expected)


def test_din_history_has_earlier_likes_only() -> None:
    import polars as pl

    ratings = pl.DataFrame(
        {
            "user_id": [[1], [2], [1], [1], [2], [1]],
            "item_id": [[10], [20], [11], [12], [21], [13]],
            "liked": [True, False, False, True, True, True],
        }
    )
    ids, begins, ends = din.earlier_likes(ratings)
    histories = [
        ids[begin:end].tolist() for begin, end in zip(begins, ends, strict=True)
    ]
    assert histories == [[], [], [10], [10], [], [10, 12]]


def test_dcn_cross_layers_are_those_of_the_paper() -> None:
    """x' = x0 * (W x + b) + x, with W = U V: TorchRec's layers of full rank, and a loop
    over each number.
    """
    low = dcn_v2.DCN().cross
    width = low.W_kernels[0].shape[0]
    for bias in low.bias:
        nn.init.normal_(bias)
    full = CrossNet(width, dcn_v2.CROSS_LAYERS)
    for place in range(dcn_v2.CROSS_LAYERS):
        full.kernels[place].data = low.W_kernels[place].data @ low.V_kernels[place].data
        full.bias[place].data = low.bias[place].data[:, None]
    x0 = torch.randn(2, width) / 4
    torch.testing.assert_close(low(x0), full(x0), rtol=1e-3, atol=1e-4)
    x = x0[0]
    for place in range(dcn_v2.CROSS_LAYERS):
        weights, bias = full.kernels[place], low.bias[place]
        x = torch.stack(
            [x0[0, i] * (weights[i] @ x + bias[i]) + x[i] for i in range(width)]
        )
    torch.testing.assert_close(low(x0)[0], x, rtol=1e-3, atol=1e-4)


def test_two_tower_loss_leaves_out_the_same_movie_and_corrects_for_popularity() -> None:
    users, movies = torch.randn(3, 4), torch.randn(3, 4)
    shares = torch.tensor([0.5, 0.3, 0.5])
    loss = two_tower.in_batch_softmax(
        users, movies, torch.tensor([8, 9, 8]), shares.log()
    )
    weights = torch.exp(users @ movies.T / two_tower.TEMPERATURE) / shares
    weights[0, 2] = weights[2, 0] = 0
    torch.testing.assert_close(
        loss, -(weights.diagonal() / weights.sum(dim=1)).log().mean()
    )


def test_words_have_the_same_ids_everywhere() -> None:
    assert two_tower.word_id("-77") == -77
    assert (
        two_tower.word_id("Drama")
        == din.string_id("Drama")
        == -6_282_400_381_337_191_486
    )
