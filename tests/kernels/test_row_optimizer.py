"""User-defined optimizers: the bits of built-in ones, what is refused, and that files
and servers get no code.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore.checkpoint import load_checkpoint, save_checkpoint
from torchrec_recstore.encoding import decode, encode
from torchrec_recstore.optim import (
    Adadelta,
    Optimizer,
    RowOptimizer,
    state_bytes,
    state_names,
)
from torchrec_recstore.options import ConstantInit, NormalInit, TableOptions
from torchrec_recstore.row_types import ROW_DTYPES, STATE_TYPES
from torchrec_recstore.sharders import RecStoreSharder
from torchrec_recstore.store import Table
from torchrec_recstore_service.wire.table_spec import TableSpec

from ..instruction_sets import check_same_bits
from .optimizer_cases import BUILT_IN, NADAM, rows, table

OWN = [own for own, _ in BUILT_IN]
DIMS = (1, 16, 33, 64)
TYPES = list(itertools.product(ROW_DTYPES, STATE_TYPES))


def trained(
    optimizer: Optimizer, dim: int, dtype: torch.dtype, state_dtype: torch.dtype
) -> dict[str, Tensor]:
    """Returns the rows of a table after five updates with duplicates, with its states
    in their order.
    """
    made = Table(
        dim,
        dtype,
        optimizer=optimizer,
        options=TableOptions(NormalInit(0.0, 0.5), seed=7),
        stochastic_rounding=True if dtype.itemsize < 4 else None,
        state_dtype=state_dtype,
    )
    generator = torch.Generator().manual_seed(dim)
    for lr in (0.1, 0.1, 0.05, 0.2, 0.0):
        ids = torch.randint(-20, 20, (60,), generator=generator)
        made.update(ids, torch.randn(60, dim, generator=generator), lr=lr)
    found = made.read_rows(made.ids())
    return {
        "weight": found["weight"],
        **{name: found[name] for name in state_names(optimizer)},
    }


@pytest.mark.parametrize(
    ("own", "built_in"), BUILT_IN, ids=lambda each: getattr(each, "name", "")
)
def test_the_bits_are_those_of_a_built_in_optimizer(
    own: RowOptimizer, built_in: Optimizer
) -> None:
    for dim, (dtype, state_dtype) in itertools.product(DIMS, TYPES):
        ours, theirs = (
            trained(each, dim, dtype, state_dtype) for each in (own, built_in)
        )
        assert [name.removeprefix(f"{own.name}.") for name in ours] == list(theirs)
        for one, other in zip(ours.values(), theirs.values(), strict=True):
            assert torch.equal(one, other), (dim, dtype, state_dtype)
        assert state_bytes(own, dim, 2) == state_bytes(built_in, dim, 2)


def test_the_bits_are_those_of_the_formula_in_float32() -> None:
    # numpy's roots are exact, and torch's are not
    made, f = table(NADAM, 20), np.float32
    w, m, v = rows(made).numpy(), np.zeros((8, 20), f), np.zeros((8, 20), f)
    generator = torch.Generator().manual_seed(0)
    lr, mu = float(f(0.1)), 0.45
    for t in range(1, 11):
        grads = torch.randn(8, 20, generator=generator)
        made.update(torch.arange(8), grads)
        g = grads.numpy()
        m = f(0.9) * m + f(1 - 0.9) * g
        v = f(0.999) * v + f(1 - 0.999) * (g * g)
        ahead = (
            f(lr * mu / (1 - mu ** (t + 1))) * m + f(lr * (1 - mu) / (1 - mu**t)) * g
        )
        w = w - ahead / (np.sqrt(v * f(1 / (1 - 0.999**t))) + f(1e-8))
        assert np.array_equal(rows(made).numpy(), w)


@pytest.mark.parametrize("state_dtype", STATE_TYPES)
def test_several_states_and_one_of_the_row(state_dtype: torch.dtype) -> None:
    own = RowOptimizer(
        1.0,
        name="many",
        states={"count": "row", "a": "element", "b": "element", "c": "element"},
        row="count += 1;",
        step="a += g; b += a; c += b; w -= lr * c / count;",
    )
    options = TableOptions(ConstantInit(0.0))
    one, other = (
        Table(5, optimizer=own, options=options, state_dtype=state_dtype)
        for _ in range(2)
    )
    ids, ones = torch.tensor([7, -1]), torch.ones(2, 5)
    for _ in range(4):
        one.update(ids, ones)
    found = one.read_rows(ids)
    assert list(found)[1:5] == ["many.a", "many.b", "many.c", "many.count"]
    assert [
        found[name].unique().tolist() for name in ("many.a", "many.b", "many.c")
    ] == [[4.0], [10.0], [20.0]]
    if state_dtype is torch.float32:  # a float16 state stores the root of the count
        assert found["many.count"].tolist() == [4.0, 4.0]
        torch.testing.assert_close(
            found["weight"], torch.full((2, 5), -(1 + 4 / 2 + 10 / 3 + 20 / 4))
        )
    other.write_rows(ids, found)
    again = other.read_rows(ids)
    assert all(torch.equal(found[name], again[name]) for name in found)


def _digests() -> list[str]:
    digest = hashlib.sha256()
    for own, built_in in BUILT_IN:
        for dtype, state_dtype in TYPES:
            ours, theirs = (
                trained(each, 33, dtype, state_dtype) for each in (own, built_in)
            )
            assert all(map(torch.equal, ours.values(), theirs.values()))
            digest.update(
                b"".join(each.float().numpy().tobytes() for each in ours.values())
            )
    return [digest.hexdigest()]


@pytest.mark.slow
def test_the_bits_are_the_same_with_each_instruction_set() -> None:
    check_same_bits(_digests)


ONE: dict[str, Any] = {
    "name": "one",
    "step": "m += g; w -= lr * m;",
    "states": {"m": "element"},
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"states": {"m": "both"}},
            r"states must be 'element', and at most one 'row', got \['both'\]",
        ),
        ({"states": {"m": "row", "n": "row"}}, "at most one 'row'"),
        (
            {"hyperparameters": {"a": float("inf")}},
            r"hyperparameters\['a'\] must be a finite number",
        ),
        ({"lr": -1.0}, "RowOptimizer.lr must be finite"),
        ({"max_gradient": 0.0}, "RowOptimizer.max_gradient must be positive"),
    ],
)
def test_wrong_arguments_are_refused_at_once(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RowOptimizer(**ONE | change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"name": "a b"},
            (
                r"RowOptimizer 'a b': 'a b' is no name in C\+\+, or has a meaning in"
                r" the code"
            ),
        ),
        ({"name": ""}, "'' is no name"),
        ({"states": {"w": "element"}}, "'w' is no name"),
        ({"states": {"double": "element"}}, "'double' is no name"),
        ({"states": {"recstore_w": "element"}}, "'recstore_w' is no name"),
        ({"once": {"row_sum": "1"}}, "'row_sum' is no name"),
        (
            {"hyperparameters": {"m": 1.0}},
            "RowOptimizer 'one': the name 'm' is there twice",
        ),
        (
            {"step": "w -= lr * rate;"},
            (
                "table 'table': RowOptimizer 'one' does not compile: step:1:11: error:"
                " 'rate' was not"
            ),
        ),
        (
            {"step": "\nw -= 0.5 * g;"},
            "step:2:.*implicit conversion from 'float' to 'double'",
        ),
        ({"step": "float w = g;"}, "step:1:.*declaration of 'w' shadows"),
        ({"step": "w -= row_sum(g);"}, "shadows"),
        ({"step": "w -= g"}, "step:1:.*expected ';'"),
        ({"step": ""}, "RowOptimizer 'one' has no step"),
        ({"row": "norm = 1;"}, "row:1:.*'norm' was not declared"),
        ({"once": {"rate": "lr / beta"}}, "once:1:.*'beta' was not declared"),
        ({"hyperparameters": {f"h{i}": 1.0 for i in range(32)}}, "at most 32 numbers"),
    ],
)
def test_code_that_does_not_compile_is_refused_before_there_is_a_table(
    change: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Table(4, optimizer=RowOptimizer(**ONE | change))


def test_a_missing_compiler_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ValueError,
        match=(
            r"'one' needs a C\+\+ compiler: install g\+\+, or set CXX:"
            r" .*no-such-compiler"
        ),
    ):
        Table(4, optimizer=RowOptimizer(**ONE))


def _compiled() -> None:
    Table(4, optimizer=RowOptimizer(**ONE, hyperparameters={"unused": 1.0}))


def test_processes_compile_once_and_leave_no_other_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counter = tmp_path / "cxx"
    counter.write_text(f'#!/bin/sh\necho run >> {tmp_path}/runs\nexec g++ "$@"\n')
    counter.chmod(0o755)
    monkeypatch.setenv("CXX", str(counter))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_compiled) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0
    _compiled()
    # a number is no part of the code
    Table(4, optimizer=RowOptimizer(**ONE, hyperparameters={"unused": 2.0}))
    assert (tmp_path / "runs").read_text() == "run\n"
    assert sorted(
        path.suffix for path in (tmp_path / "cache/torchrec_recstore").iterdir()
    ) == ["", ".so"]
    assert (tmp_path / "cache/torchrec_recstore").stat().st_mode & 0o77 == 0


def model(optimizer: Optimizer) -> DistributedModelParallel:
    config = EmbeddingBagConfig(
        name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"]
    )
    bags = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    sharders = [RecStoreSharder(optimizer=optimizer)]
    return DistributedModelParallel(bags, sharders=sharders, device=torch.device("cpu"))


def step(module: DistributedModelParallel) -> Tensor:
    """Makes a training step, and returns the rows before it."""
    ids = torch.arange(-4, 4)
    pooled = module(
        KeyedJaggedTensor(["f"], ids, lengths=torch.ones(8, dtype=torch.int64))
    ).wait()["f"]
    (pooled * torch.arange(32.0).view(8, 4)).sum().backward()
    return pooled.detach()  # type: ignore[no-any-return]


def test_a_checkpoint_has_the_name_and_the_states_and_no_code(
    one_rank: None, tmp_path: Path
) -> None:
    first, second = model(NADAM), model(replace(NADAM, lr=0.5))
    for _ in range(2):
        step(first)
    save_checkpoint(first, tmp_path / "saved")
    text = (tmp_path / "saved/metadata.json").read_text()
    assert '"nadam"' in text
    assert "sqrt" not in text
    assert "rate_of_g" not in text
    load_checkpoint(second, tmp_path / "saved")
    second.fused_optimizer.param_groups[0]["lr"] = 0.1
    for _ in range(3):
        assert torch.equal(step(first), step(second))
    keys = str(first.fused_optimizer.state_dict()["state"])
    assert "nadam.exp_avg_sq" in keys
    for optimizer in (replace(NADAM, name="other"), Adadelta()):
        with pytest.raises(
            ValueError,
            match=(
                r"saved with the optimizer RowOptimizer\(.*name='nadam'.* does not fit"
            ),
        ):
            load_checkpoint(model(optimizer), tmp_path / "saved")


def test_an_optimizer_from_a_file_cannot_run() -> None:
    read = decode(encode(NADAM, {}), {})
    assert state_names(read) == state_names(NADAM)
    assert read.numbers() == NADAM.numbers()
    assert read.hyperparameter_values() == NADAM.hyperparameter_values()
    assert read.lr == NADAM.lr
    with pytest.raises(
        ValueError,
        match="'nadam' has no step: files do not contain the code of an optimizer",
    ):
        Table(4, optimizer=read)


def test_parameter_servers_refuse_it() -> None:
    with pytest.raises(
        ValueError,
        match="must not be the RowOptimizer 'nadam', because servers do not run code",
    ):
        TableSpec(4, torch.float32, NADAM, TableOptions())
