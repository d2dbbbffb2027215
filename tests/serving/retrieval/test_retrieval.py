"""The rows that an index finds are those of an exact search in the served model, after
any deltas.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from torchrec_recstore.inference import (
    DeltaPublisher,
    Follower,
    Retrieval,
    export_delta,
    export_for_inference,
    export_retrieval,
    follow,
    read_delta,
)
from torchrec_recstore.modules import RecStoreEmbeddingBag
from torchrec_recstore.utils import RecStoreWarning
from torchrec_recstore_serving.retrieval.vector_index import recall

from ...checkpoint.models import batch, recstore
from ...distributed.workers import run_on_ranks
from ..publish.test_publisher import Clicks, change, publish, trained

faiss = pytest.importorskip("faiss")

EDGES = torch.tensor([-(2**63), -(2**63) + 1, -2, -1, 0, 1, 2**63 - 2, 2**63 - 1])


class Items(nn.Module):
    """A table of items whose tower has two dense layers."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.item = RecStoreEmbeddingBag(1000, dim, name="t_item", mode="sum", lr=0.3)
        self.first = nn.Sequential(nn.Linear(dim, 16), nn.ReLU(), nn.Linear(16, 5))
        self.tower = self.first  # A delta must name the parameters of each path.

    def forward(self, ids: Tensor) -> Tensor:
        """(B, L) -> (B, 5)."""
        out: Tensor = self.tower(self.item(ids))
        return out


def set_rows(model: Items, ids: Tensor, generator: torch.Generator) -> None:
    table = model.item.table
    table.insert(ids, torch.randn(len(ids), table.dim, generator=generator))


def vectors_of(
    served: torch.jit.ScriptModule, tower: str | None
) -> tuple[Tensor, Tensor]:
    """The ids and the vectors that an index of a float32 export must have."""
    rows = served.recstore_rows("t_item")[1:]
    with torch.no_grad():
        return served.recstore_ids("t_item"), (
            rows
            if tower is None
            else dict(served.named_modules(remove_duplicate=False))[tower](rows)
        )


def assert_finds(
    index: Retrieval,
    served: torch.jit.ScriptModule,
    k: int = 10,
    queries: Tensor | None = None,
) -> None:
    """An exact index finds what a search without it finds."""
    ids, vectors = vectors_of(
        served, index.tower if isinstance(index.tower, str) else None
    )
    assert index.version == served.recstore_version()
    assert len(index) == len(ids)
    queries = torch.randn(7, vectors.shape[1]) if queries is None else queries
    if index.metric == "l2":
        every, sign = torch.cdist(queries.double(), vectors.double()).square(), -1
    else:
        every, sign = queries.double() @ vectors.double().T, 1
    best = (sign * every).topk(min(k, len(ids)), dim=1)
    scores, found = index.search(queries, k)
    torch.testing.assert_close(
        scores[:, : len(ids)].double(), sign * best.values, atol=1e-4, rtol=1e-4
    )
    assert recall(found[:, : len(ids)], ids[best.indices]) == 1.0
    worst = torch.inf if index.metric == "l2" else -torch.inf
    assert (scores[:, len(ids) :] == worst).all()


@pytest.mark.parametrize(
    ("metric", "tower", "kind"),
    [
        ("inner_product", None, "sorted"),
        ("l2", "tower", "sorted"),
        ("l2", None, "hash"),
        ("inner_product", "tower", "hash"),
        pytest.param("l2", None, "sorted", marks=pytest.mark.slow),
        pytest.param("inner_product", "tower", "sorted", marks=pytest.mark.slow),
        pytest.param("inner_product", None, "hash", marks=pytest.mark.slow),
        pytest.param("l2", "tower", "hash", marks=pytest.mark.slow),
    ],
)
def test_after_any_deltas(
    metric: str, tower: str | None, kind: str, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(len(metric) + len(kind))
    torch.manual_seed(0)
    model = Items().eval()
    set_rows(model, EDGES, generator)
    export_for_inference(model, tmp_path / "model.pt", dtype=torch.float32, index=kind)
    served = torch.jit.load(tmp_path / "model.pt")
    index = export_retrieval(served, "t_item", tower=tower, metric=metric)
    assert_finds(index, served)
    for step in range(8):
        some = torch.randint(-5, 40, (30,), generator=generator).unique()
        set_rows(model, torch.cat([EDGES[step % 3 :: 3], some]).unique(), generator)
        model.item.table.remove(torch.cat([EDGES[(step + 1) % 3 :: 3], some[::2]]))
        if step % 3 == 2:
            with torch.no_grad():
                model.tower[0].weight.mul_(-1.5)
        export_delta(model, tmp_path / "delta", base=served)
        delta = read_delta(tmp_path / "delta")
        served.apply_delta(delta)
        index.update(served, delta)
        assert_finds(index, served)
    model.item.table.remove(model.item.table.ids())
    export_delta(model, tmp_path / "delta", base=served)
    delta = read_delta(tmp_path / "delta")
    served.apply_delta(delta)
    index.update(served, delta)
    assert_finds(index, served, queries=torch.randn(2, index.dim or 0))


@pytest.mark.parametrize("kind", ["sorted", "hash"])
def test_which_vectors_are_computed_again(kind: str, tmp_path: Path) -> None:
    """Those of the changed rows; and all of them after a change of what a tower depends
    on.
    """
    generator = torch.Generator().manual_seed(0)
    model = Items().eval()
    set_rows(model, torch.arange(100), generator)
    export_for_inference(model, tmp_path / "model.pt", dtype=torch.float32, index=kind)
    served = torch.jit.load(tmp_path / "model.pt")
    computed: list[Tensor] = []

    def tower(served: torch.jit.ScriptModule, ids: Tensor) -> Tensor:
        computed.append(ids)
        out: Tensor = served(ids.unsqueeze(1))
        return out

    index = export_retrieval(served, "t_item", tower=tower)
    steps = {"rows": [3, 200], "dense": [*range(100), 200]}
    for step, expected in steps.items():
        computed.clear()
        if step == "rows":
            set_rows(model, torch.tensor([3, 200]), generator)
        else:
            with torch.no_grad():
                model.tower[2].bias.add_(1)
        export_delta(model, tmp_path / "delta", base=served)
        delta = read_delta(tmp_path / "delta")
        served.apply_delta(delta)
        index.update(served, delta)
        assert torch.cat(computed).tolist() == expected
        ids, queries = served.recstore_ids("t_item"), torch.randn(3, 5)
        best = (queries @ served(ids.unsqueeze(1)).detach().T).topk(5).indices
        assert torch.equal(index.search(queries, 5)[1], ids[best])
    computed.clear()
    index.update(served)
    assert not computed, "the index has this version"


@pytest.mark.parametrize(
    "metric", [pytest.param("inner_product", marks=pytest.mark.slow), "l2"]
)
def test_recall_of_clusters(metric: str, tmp_path: Path) -> None:
    """recall@100 is within 0.01 of an exact search, at first and after more rows have
    changed than there were.
    """
    generator = torch.Generator().manual_seed(0)
    model = Items(16).eval()
    centers = torch.randn(40, 16, generator=generator)

    def near(count: int, among: slice) -> Tensor:
        some = centers[among]
        places = torch.randint(len(some), (count,), generator=generator)
        return some[places] + 0.3 * torch.randn(count, 16, generator=generator)

    model.item.table.insert(torch.arange(4000), near(4000, slice(0, 20)))
    export_for_inference(
        model, tmp_path / "model.pt", dtype=torch.float32, index="hash"
    )
    served = torch.jit.load(tmp_path / "model.pt")
    index = export_retrieval(served, "t_item", metric=metric, clusters=64)
    exact = export_retrieval(served, "t_item", metric=metric)
    assert 1 <= index.probes < 64
    # Rows of new clusters come and replace others: first a few at a time, then most of
    # them.
    sizes, first, anew = [0] + [150] * 6 + [3000] * 3, 1000, 0
    for size in sizes:
        if size:
            ids = (first + torch.arange(size)) % 6000
            first += size
            model.item.table.insert(ids, near(size, slice(20, 40)))
            export_delta(model, tmp_path / "delta", base=served)
            delta = read_delta(tmp_path / "delta")
            served.apply_delta(delta)
            before = index._index
            index.update(served, delta)
            anew += index._index is not before
            exact.update(served, delta)
            assert_finds(exact, served, queries=near(5, slice(0, 40)))
        rows = vectors_of(served, None)[1]
        queries = rows[torch.randint(len(rows), (500,))]
        assert (
            recall(index.search(queries, 100)[1], exact.search(queries, 100)[1]) > 0.99
        ), first
    assert anew == 1, "the clusters are computed again when they are worn"


def test_a_tower_that_changes_keeps_its_clusters(tmp_path: Path) -> None:
    """All vectors are computed again, and the recall is measured, without k-means."""
    torch.manual_seed(0)
    model = Items().eval()
    set_rows(model, torch.arange(-500, 2500), torch.Generator().manual_seed(0))
    export_for_inference(
        model, tmp_path / "model.pt", dtype=torch.float32, index="hash"
    )
    served = torch.jit.load(tmp_path / "model.pt")
    index, exact = (
        export_retrieval(served, "t_item", tower="tower", clusters=count)
        for count in (30, 1)
    )

    def centers() -> Tensor:
        assert index._index is not None
        return torch.from_numpy(index._index.index.quantizer.reconstruct_n(0, 30))

    before = centers()
    with torch.no_grad():
        model.tower[2].weight.add_(0.01)
    export_delta(model, tmp_path / "delta", base=served)
    delta = read_delta(tmp_path / "delta")
    served.apply_delta(delta)
    for each in (index, exact):
        each.update(served, delta)
    assert_finds(exact, served)
    assert torch.equal(centers(), before)
    queries = vectors_of(served, "tower")[1][::7]
    assert recall(index.search(queries, 100)[1], exact.search(queries, 100)[1]) > 0.99


def test_a_follower_answers_live(place: str) -> None:
    torch.manual_seed(0)
    model = Items()
    model(torch.arange(-10, 50).view(10, 6)).sum().backward()
    queries = torch.randn(4, 5)
    mine, other = Retrieval("t_item", tower="tower"), Retrieval("t_item", metric="l2")
    with DeltaPublisher(
        model, place, every_s=0, full_every_s=1e6, dtype=torch.float32
    ) as publisher:
        publish(publisher)
        with Follower(place, retrieval=[mine, other]) as follower:
            assert follower.poll()
            before = mine.search(queries, 5)
            for step in range(4):
                model.train()(
                    torch.arange(60 * step, 60 * step + 20).view(5, 4)
                ).sum().backward()
                model.item.table.remove(torch.tensor([-10 + step]))
                if step == 2:
                    with torch.no_grad():
                        model.tower[2].weight.neg_()
                publish(publisher)
                assert follower.poll()
                for index in (mine, other):
                    assert_finds(index, follower.model)
                with mine.hold() as held:
                    assert held is follower.model
            assert (follower.state.fulls_loaded, follower.state.deltas_applied) == (
                1,
                4,
            )
            assert not torch.equal(before[1], mine.search(queries, 5)[1])


def test_a_search_is_of_one_version(tmp_path: Path) -> None:
    """Threads search while a follower changes the index."""
    model = trained()
    failed: list[BaseException] = []
    versions = set()
    end = threading.Event()
    index = Retrieval("t")

    def search() -> None:
        try:
            while not end.is_set():
                with index.hold() as served:
                    ids, rows = served.recstore_ids("t"), served.recstore_rows("t")[1:]
                    queries = torch.randn(2, 8)
                    scores, _ = index.search(queries, len(ids) + 3)
                    best = (queries @ rows.T).sort(descending=True).values
                    torch.testing.assert_close(
                        scores[:, :-3], best, atol=1e-3, rtol=1e-3
                    )
                    assert (scores[:, -3:] == -torch.inf).all()
                    versions.add(index.version)
        except BaseException as error:
            failed.append(error)

    with DeltaPublisher(
        model, tmp_path / "place", every_s=0, dtype=torch.float32
    ) as publisher:
        publish(publisher)
        with Follower(tmp_path / "place", retrieval=index) as follower:
            follower.poll()
            threads = [threading.Thread(target=search) for _ in range(2)]
            for thread in threads:
                thread.start()
            for step in range(12):
                change(model, step)
                publish(publisher)
                assert follower.poll()
            end.set()
            for thread in threads:
                thread.join(30)
    assert not failed
    assert len(versions) > 1


def test_files(tmp_path: Path) -> None:
    """FAISS itself reads the file, which has all vectors but that of the id -1."""
    model = Items().eval()
    path = tmp_path / "items.faiss"
    with pytest.raises(
        RuntimeError, match="the index of table 't_item' has no vector yet"
    ):
        export_retrieval(model, "t_item", path)
    assert not list(tmp_path.iterdir())
    set_rows(model, torch.arange(-10, 50), torch.Generator().manual_seed(0))
    index = export_retrieval(
        model, "t_item", path, tower="tower", metric="l2", dtype=torch.float32
    )
    queries = torch.randn(4, 5)
    scores, found = index.search(queries, 60)
    plain = [
        torch.from_numpy(each)
        for each in faiss.read_index(str(path)).search(queries.numpy(), 59)
    ]
    assert torch.equal(plain[1], found[found != -1].view(4, 59))
    assert torch.equal(plain[0], scores[found != -1].view(4, 59))
    before = path.read_bytes()
    model.item.table.remove(torch.arange(10))
    export_for_inference(
        model, tmp_path / "model.pt", dtype=torch.float32, index="hash"
    )
    index.update(torch.jit.load(tmp_path / "model.pt"))
    index.write(path)
    assert faiss.read_index(str(path)).ntotal == 49
    assert len(path.read_bytes()) < len(before)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "items.faiss",
        "model.pt",
    ]


def test_an_empty_table() -> None:
    index = export_retrieval(Items().eval(), "t_item", tower="tower", metric="l2")
    assert len(index) == 0
    scores, ids = index.search(torch.ones(1, 5), 2)
    assert (scores.tolist(), ids.tolist()) == ([[torch.inf] * 2], [[-1] * 2])


def test_torchrecs_own_table(tmp_path: Path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = EmbeddingBagConfig(
                name="t_item",
                embedding_dim=4,
                num_embeddings=50,
                feature_names=["item"],
            )
            self.bags = EmbeddingBagCollection(tables=[config])

        def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
            """(N,), (B,) -> (B, 4)."""
            return self.bags(
                KeyedJaggedTensor(keys=["item"], values=values, lengths=lengths)
            ).values()

    model = Mixed()
    export_for_inference(
        model, tmp_path / "model.pt", dtype=torch.float32, index="hash"
    )
    served = torch.jit.load(tmp_path / "model.pt")
    index = export_retrieval(served, "t_item")
    weight = model.bags.embedding_bags["t_item"].weight
    for _ in range(2):
        assert index.search(weight[:3].detach(), 50)[1].equal(
            (weight[:3] @ weight.T).argsort(descending=True)
        )
        with torch.no_grad():
            weight[7] += 3
        export_delta(model, tmp_path / "delta", base=served)
        delta = read_delta(tmp_path / "delta")
        served.apply_delta(delta)
        index.update(served, delta)


def test_quantised_rows_are_those_of_the_served_model() -> None:
    model = Items().eval()
    set_rows(model, torch.arange(30), torch.Generator().manual_seed(0))
    ids = torch.arange(30)
    exact = model.item(ids.unsqueeze(1)).detach()
    for dtype, bound in (
        (torch.float16, 1e-3),
        (torch.int8, 0.02),
        (torch.quint4x2, 0.3),
    ):
        index = export_retrieval(model, "t_item", dtype=dtype)
        scores, found = index.search(torch.eye(8), 30)
        assert (scores.gather(1, found.argsort()) - exact.T).abs().max() < bound


def test_vectors_that_are_not_finite(tmp_path: Path) -> None:
    model = Items().eval()
    set_rows(model, torch.arange(5), torch.Generator().manual_seed(0))
    model.item.table.insert(torch.tensor([3]), torch.full((1, 8), torch.nan))
    with pytest.warns(
        RecStoreWarning,
        match="1 vectors have NaN or infinity and cannot be found, the first of id 3",
    ):
        index = export_retrieval(model, "t_item", dtype=torch.float32)
    assert sorted(index.search(torch.ones(1, 8), 4)[1][0].tolist()) == [0, 1, 2, 4]


def test_errors(tmp_path: Path) -> None:
    model = Items()
    model(torch.arange(6).view(1, 6)).sum().backward()
    for arguments, kind, message in (
        (
            {"metric": "cosine"},
            ValueError,
            'metric must be "inner_product" or "l2", got \'cosine\'',
        ),
        ({"clusters": 0}, ValueError, "clusters must be at least 1, got 0"),
        ({"clusters": True}, TypeError, "clusters must be an int, got bool"),
        (
            {"min_recall": 1.5},
            ValueError,
            "min_recall must be above 0 and at most 1, got 1.5",
        ),
        (
            {"tower": 3},
            TypeError,
            "tower must be the path of a module in the served model, or a function",
        ),
        (
            {"tower": nn.Linear(2, 2)},
            TypeError,
            "tower must be the path of a module in the served model, or a function",
        ),
        (
            {"tower": "towers"},
            ValueError,
            "the served model has no module 'towers', the tower of table 't_item'",
        ),
        (
            {"queries": torch.arange(3)},
            TypeError,
            "queries must be a tensor of floating point numbers, got torch.int64",
        ),
        (
            {"tower": lambda served, ids: ids},
            ValueError,
            r"must return \(6, D\) for 6 rows, got the shape \(6,\)",
        ),
        (
            {"tower": lambda served, ids: None},
            TypeError,
            "must return a tensor of vectors, got NoneType",
        ),
        ({"index": "tree"}, ValueError, 'index must be "sorted" or "hash"'),
        ({"path": tmp_path / "none" / "x"}, FileNotFoundError, "none is no directory"),
    ):
        with pytest.raises(kind, match=message):
            export_retrieval(model, "t_item", **arguments)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match=r"the served model has no table 't_itme': its tables are \['t_item'\]",
    ):
        export_retrieval(model, "t_itme")
    index = export_retrieval(model, "t_item")
    for queries, k, kind, message in (
        (
            torch.ones(1, 5),
            3,
            ValueError,
            "queries have 5 columns, and the vectors of 't_item' have 8",
        ),
        (
            torch.ones(8),
            3,
            ValueError,
            r"queries must have the shape \(Q, D\), got \(8,\)",
        ),
        (torch.ones(1, 8), 0, ValueError, "k must be at least 1, got 0"),
        (torch.ones(1, 8), 1.0, TypeError, "k must be an int, got float"),
    ):
        with pytest.raises(kind, match=message):
            index.search(queries, k)  # type: ignore[arg-type]
    with (
        index.hold() as served,
        pytest.raises(RuntimeError, match="would wait for itself"),
    ):
        index.update(served)
    with pytest.raises(RuntimeError, match="has no rows yet"):
        Retrieval("t_item").search(torch.ones(1, 8), 1)
    with pytest.raises(TypeError, match="retrieval must be a Retrieval"):
        Follower(tmp_path, retrieval=["t_item"])  # type: ignore[list-item]


def test_a_follower_refuses_a_wrong_index_at_once(tmp_path: Path) -> None:
    with DeltaPublisher(Clicks(), tmp_path / "place", every_s=0) as publisher:
        publish(publisher)
    with pytest.raises(ValueError, match="the served model has no table 't_item'"):
        follow(tmp_path / "place", retrieval=Retrieval("t_item"))


def test_without_faiss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(
        ImportError,
        match=r"faiss is missing: pip install 'path/to/torchrec_recstore\[retrieval\]'"
        " path/to/torchrec_recstore/serving$",
    ):
        Retrieval("t_item")


def _sharded(rank: int, world_size: int, folder: str) -> None:
    model = recstore("row_wise")
    model(batch(rank)).sum().backward()
    export_for_inference(model, f"{folder}/model.pt", dtype=torch.float32, index="hash")
    index = export_retrieval(model, "user", f"{folder}/index", dtype=torch.float32)
    with pytest.raises(ValueError, match="the served model has no table 't_none'"):
        export_retrieval(model, "t_none")
    dist.barrier()
    served = torch.jit.load(f"{folder}/model.pt")
    assert index.version == served.recstore_version()
    assert (
        faiss.read_index(f"{folder}/index").ntotal
        == len(index)
        == len(served.recstore_ids("user"))
        > 0
    )


@pytest.mark.slow
def test_sharded(tmp_path: Path) -> None:
    run_on_ranks(2, partial(_sharded, folder=str(tmp_path)))
