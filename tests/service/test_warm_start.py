"""Warm starts of the tables of a client."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.recstore_server import RecStoreServer
from torchrec_recstore import RecStoreEmbeddingBag, load_checkpoint, save_checkpoint
from torchrec_recstore.optim import SGD, Adagrad, Adam
from torchrec_recstore.options import Scored, TableOptions
from torchrec_recstore_service import RecStoreClient

from ..checkpoint import models

IDS = torch.tensor([3, -7, 2**40])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of a client with the tables ``a`` and ``b``, of dim 4, both trained
    with Adagrad.
    """
    with RecStoreClient() as client:
        for name, times in (("a", 1), ("b", 2)):
            client.init_data(name, (100, 4), torch.float32, optimizer=Adagrad(lr=0.1))
            for _ in range(times):
                client.update(name, IDS, torch.ones(3, 4))
        client.save(tmp_path / "saved")
        torch.save(
            {name: client.pull(name, IDS) for name in ("a", "b")}, tmp_path / "rows.pt"
        )
    return tmp_path / "saved"


def rows(saved: Path) -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = torch.load(saved.with_name("rows.pt"))
    return loaded


def test_another_optimizer(saved: Path) -> None:
    with RecStoreClient() as client:
        for name in ("a", "b"):
            client.init_data(name, (100, 4), torch.float32, optimizer=SGD(lr=1.0))
        with pytest.raises(
            ValueError, match="optimizer=False loads the rows without it"
        ):
            client.load(saved)
        client.load(saved, optimizer=False)
        assert torch.equal(client.pull("b", IDS), rows(saved)["b"])
        assert client.stats("b").steps == 2
        client.update("b", IDS, torch.ones(3, 4))
        assert torch.equal(client.pull("b", IDS), rows(saved)["b"] - 1)


def test_states_start_at_zero(saved: Path) -> None:
    with RecStoreClient() as client:
        client.load(saved, optimizer=False)
        client.update("b", IDS, torch.ones(3, 4))
        # The first step of Adagrad with the gradient 1.
        step = rows(saved)["b"] - client.pull("b", IDS)
        assert torch.allclose(step, torch.full((3, 4), 0.1))


def test_some_tables_and_other_names(saved: Path) -> None:
    with RecStoreClient() as client:
        client.init_data("b", (100, 4), torch.float32, optimizer=SGD(lr=1.0))
        client.update("b", IDS, torch.ones(3, 4))
        before = client.pull("b", IDS)
        client.load(saved, tables=["a"])
        assert torch.equal(client.pull("b", IDS), before)
        assert torch.equal(client.pull("a", IDS), rows(saved)["a"])
        client.load(saved, tables=["new"], rename={"b": "new"})
        assert torch.equal(client.pull("new", IDS), rows(saved)["b"])
        assert torch.equal(client.pull("a", IDS), rows(saved)["a"])


def test_rows_of_another_dim(saved: Path) -> None:
    with RecStoreClient() as client:
        client.init_data("a", (100, 2), torch.float32, optimizer=Adam(lr=1.0))
        client.load(
            saved,
            tables=["a"],
            optimizer=False,
            rows={"a": lambda weights: weights[:, 2:] * 2},
        )
        assert torch.equal(client.pull("a", IDS), rows(saved)["a"][:, 2:] * 2)


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "tables": (
        {"tables": ["nobody"]},
        "tables: the checkpoint .* has no table 'nobody'; it has 'a', 'b'",
    ),
    "rename": (
        {"rename": {"nobody": "a"}},
        "rename: the checkpoint has no table 'nobody'; it has 'a', 'b'",
    ),
    "chosen": (
        {"rename": {"a": "c"}, "tables": ["b"]},
        "rename has table 'c', which is not in tables",
    ),
    "no source": (
        {"rename": {"a": "c"}},
        "'a' is renamed, so that nothing is loaded into",
    ),
    "no source of chosen": (
        {"rename": {"a": "c"}, "tables": ["a", "c"]},
        "'a' is renamed, so that nothing is loaded into",
    ),
    "rows": (
        {"rows": {"c": torch.abs}, "optimizer": False},
        "rows: .* has no table 'c'",
    ),
    "missing": (
        {"rows": {"b": torch.abs}, "optimizer": False, "tables": ["b"]},
        "make it with its dim before",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_refused_changes_nothing(saved: Path, case: str) -> None:
    arguments, message = CASES[case]
    with RecStoreClient() as client:
        client.init_data("a", (100, 4), torch.float32, optimizer=Adagrad(lr=0.1))
        client.update("a", IDS, torch.ones(3, 4))
        before = client.pull("a", IDS)
        with pytest.raises(ValueError, match=message):
            client.load(saved, **arguments)
        assert torch.equal(client.pull("a", IDS), before)
        assert client.data_name_list() == ["a"]


def test_a_checkpoint_of_a_model(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    models.train(model)
    save_checkpoint(model, tmp_path / "saved")
    with RecStoreClient() as client:
        client.load(
            tmp_path / "saved", optimizer=False, rename={"user": "item", "item": "user"}
        )
        (_, _, ids, of_user), _ = models.shards(model)
        assert torch.equal(client.pull("item", ids), of_user["weight"])


def test_a_table_that_is_not_chosen_may_be_unfit(
    one_rank: None, tmp_path: Path
) -> None:
    """Processes of clients have no eviction by scores; that of the other table is not
    asked for.
    """
    options = {
        "user": TableOptions(max_rows=1000, eviction=Scored()),
        "item": TableOptions(),
    }
    model = models.recstore(options=options)
    models.train(model)
    save_checkpoint(model, tmp_path / "saved")
    refused: list[dict[str, Any]] = [
        {},
        {"tables": ["user"]},
        {"tables": ["new"], "rename": {"user": "new"}},
    ]
    with RecStoreClient() as client:
        for arguments in refused:
            with pytest.raises(
                ValueError, match=r"table 'user' of .* Load the checkpoint into a model"
            ):
                client.load(tmp_path / "saved", **arguments)
        client.load(tmp_path / "saved", tables=["item"])
        client.load(tmp_path / "saved", tables=["new"], rename={"item": "new"})
        *_, (_, _, ids, of_item) = models.shards(model)
        for name in ("item", "new"):
            assert torch.equal(client.pull(name, ids), of_item["weight"])


def test_the_way_to_servers(
    one_rank: None, tmp_path: Path, server: RecStoreServer
) -> None:
    model = models.recstore()
    models.train(model)
    save_checkpoint(model, tmp_path / "saved")
    module = RecStoreEmbeddingBag(100, 4, optimizer=SGD(lr=1.0), name="half")
    load_checkpoint(
        module,
        tmp_path / "saved",
        tables=["half"],
        rename={"user": "half"},
        optimizer=False,
        rows={"half": lambda weights: weights[:, :4]},
    )
    name = f"half{random.getrandbits(40)}"
    with RecStoreClient([server.address]) as client:
        client.init_data(name, (100, 4), torch.float32, optimizer=SGD(lr=1.0))
        for ids in module.table.ids().split(10):
            client.push(name, ids, module.table.lookup(ids))
        (_, _, ids, of_user), _ = models.shards(model)
        assert torch.equal(client.pull(name, ids), of_user["weight"][:, :4])


def test_servers_refuse_it(saved: Path, server: RecStoreServer) -> None:
    refused = pytest.raises(
        ValueError,
        match=r"need a client without servers\. .*To take over a part .*push",
    )
    with RecStoreClient([server.address]) as client, refused:
        client.load("monday", optimizer=False)
