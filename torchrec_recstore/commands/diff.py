"""``recstore diff``."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from torchrec_recstore.commands.checkpoints import rows_of, verify_files
from torchrec_recstore.commands.output import AsJson, errors_in_one_line, in_order, print_json, stdout, table_of
from torchrec_recstore.commands.progress import progress

if TYPE_CHECKING:
    from torchrec_recstore.checkpoint.compare import CheckpointDifference, Difference


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint's directory.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another's.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Compare what loading two checkpoints gives, whatever their ranks, shardings and deltas.

    Example: recstore diff run/step-000001000 run/step-000002000

    Exit status: 0 if that is the same, 1 if not, 2 if they cannot be compared.
    """
    from torchrec_recstore.checkpoint.compare import compare_chains
    from torchrec_recstore.checkpoint.info import read_chain

    with errors_in_one_line():
        first, second = read_chain(a), read_chain(b)
        verify_files(list({info.path: info for info in (*first, *second)}.values()))
        with progress("comparing", rows_of([first[-1], second[-1]])) as advance:
            difference = compare_chains(first, second, advance)
    if as_json:
        print_json(_difference_as_json(difference))
    else:
        _print_difference(difference)
    raise typer.Exit(0 if difference.equal else 1)


def _print_difference(difference: CheckpointDifference) -> None:
    out = stdout()
    table = table_of(["", "in both", "added", "gone", "changed", "weights by", "state by"])
    differences = [*in_order(difference.tables), ("dense tensors", difference.dense)]
    for name, each in differences:
        counts = [f"{count:,}" for count in (each.both, each.added, each.gone, each.changed)]
        states = [change for key, change in each.largest.items() if key != "weight"]
        state = max(states, key=lambda change: math.inf if math.isnan(change) else change, default=None)
        table.add_row(Text(name), *counts, *(_change(change) for change in (each.largest.get("weight"), state)))
    out.print(table)
    of_tables: dict[str, list[str]] = defaultdict(list)
    for name, each in differences:
        for fact, (before, after) in each.facts.items():
            of_tables[f"{fact} {before} -> {after}"].append(name)
    for fact, names in of_tables.items():
        which = "all tables" if len(names) == len(difference.tables) else ", ".join(names)
        out.print(f"{fact} ({which})", highlight=False, markup=False, soft_wrap=True)
    if difference.training_state:
        out.print("training state differs", highlight=False)
    out.print("equal" if difference.equal else "different", highlight=False)


def _change(change: float | None) -> str:
    return "" if change is None else f"{change:.3g}"


def _difference_as_json(difference: CheckpointDifference) -> dict[str, Any]:
    def each(between: Difference) -> dict[str, Any]:
        return {
            "both": between.both,
            "added": between.added,
            "gone": between.gone,
            "changed": between.changed,
            # NaN and infinity are no JSON.
            "largest": {key: value if math.isfinite(value) else None for key, value in between.largest.items()},
            "facts": {name: [_plain(value) for value in pair] for name, pair in between.facts.items()},
        }

    return {
        "equal": difference.equal,
        "tables": {name: each(between) for name, between in difference.tables.items()},
        "dense": each(difference.dense),
        "training_state_differs": difference.training_state,
    }


def _plain(value: object) -> object:
    return value if isinstance(value, int | str) else repr(value)
