"""The models of examples/models: the commands of their docstrings run, and the models
learn.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from ..commands import ROOT, run_forked, run_script
from . import data

SHARED = ROOT.parent / "shared"
NAMES = ["dcn_v2", "din", "hstu", "sasrec", "two_tower"]


def docstring(name: str) -> str:
    text = ast.get_docstring(
        ast.parse((ROOT / "examples/models" / f"{name}.py").read_text())
    )
    assert text is not None
    return text


def commands() -> list[tuple[str, int, list[str]]]:
    """The commands of all docstrings: the model, the number of ranks, and the flags
    after those of the data.
    """
    found = []
    for name in NAMES:
        pattern = (
            rf"^ +(python|torchrun --nproc-per-node (\d)) examples/models/{name}\.py"
            r" --data \S+(.*?)(?:  #.*)?$"
        )
        for match in re.finditer(pattern, docstring(name), flags=re.MULTILINE):
            found.append((name, int(match[2] or 1), match[3].split()))
    return found


# By model: flags and floor of the last figure for the data of this test, and for the
# real data.
FIGURES: dict[str, tuple[list[str], float, list[str], float]] = {
    "dcn_v2": (["--batch-size", "64"], 0.9, [], 0.745),
    "din": (["--epochs", "6"], 0.8, ["--epochs", "1"], 0.71),
    "hstu": (["--epochs", "4"], 0.9, ["--epochs", "4"], 0.08),
    "sasrec": (["--epochs", "20"], 0.9, ["--epochs", "3"], 0.5),
    "two_tower": (["--epochs", "12"], 0.5, ["--epochs", "3"], 0.11),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    movielens = data.movielens(folder)
    files = {
        "dcn_v2": data.criteo(folder / "train.txt"),
        "sasrec": data.interactions(folder / "Video.txt"),
    }
    return dict.fromkeys(NAMES, movielens) | files


def figure(printed: str) -> float:
    found = re.search(r"(?:AUC|:) ([01]\.\d{4})(?: \+- 0\.\d{4})?\n\Z", printed)
    assert found is not None, printed
    return float(found[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "flags"),
    [
        pytest.param(
            *each,
            id=" ".join([each[0], f"{each[1]} ranks", *each[2]]),
            marks=[pytest.mark.slow] * (each[1] > 1 or bool(each[2])),
        )
        for each in commands()
    ],
)
def test_the_commands_run_and_learn(
    name: str, ranks: int, flags: list[str], paths: dict[str, Path]
) -> None:
    more, floor, _, _ = FIGURES[name]
    # Each interpreter of torchrun imports TorchRec for seconds: one model shows that
    # the models start with it.
    start = run_script if ranks > 1 and name == "dcn_v2" else run_forked
    done = start(f"models/{name}.py", "--data", paths[name], *flags, *more, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert figure(done.stdout) > floor
    assert done.stdout.count("samples/s") + done.stdout.count("predictions/s") == 1, (
        "printed by one rank"
    )
    if "--live" in flags:
        shown = re.findall(
            r"^publication \d+: (\d+\.\d) of 10 movies are new, .* (\d\.\d{4}),",
            done.stdout,
            re.MULTILINE,
        )
        assert len(shown) == 12
        assert all(float(new) > 0 and float(recall) > 0.99 for new, recall in shown)


def test_every_docstring_has_commands() -> None:
    assert {name for name, _, _ in commands()} == set(NAMES)
    assert {name for name, ranks, _ in commands() if ranks > 1} >= set(NAMES) - {"din"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.skipif(not SHARED.exists(), reason="the data sets are not on this machine")
def test_learns_on_the_real_data(name: str) -> None:
    files = {
        "dcn_v2": "criteo/criteo_kaggle_sample.tsv.gz",
        "sasrec": "sasrec/Video.txt",
    }
    path = SHARED / files.get(name, "movielens")
    _, _, flags, floor = FIGURES[name]
    done = run_forked(f"models/{name}.py", "--data", path, *flags)
    assert done.returncode == 0, done.stderr
    assert figure(done.stdout) > floor
