"""Tests of the tutorial, which runs from top to bottom, alone and under torchrun, and
prints its results.
"""

from __future__ import annotations

import re

import pytest

from .commands import run_forked, run_script


def number_after(label: str, text: str) -> float:
    found = re.search(rf"^{re.escape(label)}: ([0-9.e-]+)", text, flags=re.MULTILINE)
    assert found is not None, label
    return float(found[1])


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tutorial(ranks: int) -> None:
    # a new interpreter takes seconds to import TorchRec
    start = run_forked if ranks == 1 else run_script
    done = start("tutorial.py", ranks=ranks)
    assert done.returncode == 0, done.stderr
    # A reader of the tutorial cannot fix warnings of TorchRec, so none are printed.
    assert "Warning" not in done.stderr
    said = done.stdout
    for title in (
        "Embeddings in PyTorch",
        "Planner",
        "LazyAwaitable",
        "DistributedModelParallel",
        "Fused optimizers",
    ):
        assert said.count(f"=== {title} ===") == 1, "printed by the first process alone"
    assert number_after("Backend: gloo - world size", said) == ranks
    assert "Embedding of raw ids: IndexError" in said
    # The plan puts both tables into RecStore. With two ranks, each rank has one table.
    placed = re.findall(
        r"^(\w+_table) +\| table_wise +\| customized_kernel \| \[(\d)\]",
        said,
        flags=re.MULTILINE,
    )
    assert {name for name, _ in placed} == {"product_table", "user_table"}
    assert len({rank for _, rank in placed}) == ranks
    assert "Shape: (2, 128)" in said
    # The batch has three distinct products and four users, for any number of ranks.
    assert number_after("product_table", said) == 3
    assert number_after("user_table", said) == 4
    # The optimizers of the default, of fused_params and of apply_optimizer_in_backward.
    for learning_rate in ("0.01", "0.02", "0.5"):
        assert f"lr: {learning_rate}\n" in said
    first, second = (
        number_after("First iteration loss", said),
        number_after("Second iteration loss", said),
    )
    assert second < first - 1, "backward has updated the rows"
    # Each process has complete tables.
    assert (
        said.count("Same float rows")
        == said.count(": True\nLargest error of int8")
        == 2
    )
    for key in ("product", "user"):
        assert 0 < number_after(f"Largest error of int8, {key}", said) < 0.01
    assert "Scripted, the same: True" in said
    # There are nine products, and the table may have four rows.
    assert number_after("Rows in memory", said) == 4
    assert number_after("Rows that have left", said) == 5
