"""``report.html``: what a run was asked to do, what came of it, and its curves; one file that needs no other."""

from __future__ import annotations

import sys
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from common.curves import Curve, has_curves, read_curves
from common.log_folder import read_about
from common.plots import Plot, draw
from common.whole_file import write_whole
from common.words import ALL, plain, share, short_bytes

from torchrec_recstore import TableStats

PAGE_FILE = "report.html"
TITLES = {"dlrm": "DLRM on a click log", "two_tower": "Two-tower retrieval on MovieLens"}
STYLE = """
:root { color-scheme: light dark; --back: #fff; --fore: #1a1a1a; --faint: #5c5c5c; --line: #d9d9d9; --card: #f6f6f6 }
@media (prefers-color-scheme: dark) {
  :root { --back: #16181c; --fore: #e8e8e8; --faint: #a5a5a5; --line: #3a3d42; --card: #202329 }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 84rem; background: var(--back); color: var(--fore);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.6rem; margin: 0.5rem 0 } h2 { font-size: 1.2rem; margin: 2rem 0 0.5rem }
p { margin: 0.3rem 0 } .faint { color: var(--faint) }
.facts { display: flex; flex-wrap: wrap; gap: 0.75rem; margin: 1rem 0; padding: 0 }
.facts div { background: var(--card); border: 1px solid var(--line); border-radius: 0.5rem; padding: 0.5rem 1rem;
  flex: 1 1 8rem }
.facts dt { color: var(--faint); font-size: 0.85rem } .facts dd { margin: 0; font-size: 1.3rem; font-weight: 600 }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); gap: 1rem }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 0 2rem }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 0.5rem; padding: 0.75rem }
figure img { display: block; width: 100%; height: auto; background: #fff; border-radius: 0.25rem }
figure h3 { margin: 0 0 0.5rem; font-size: 1rem }
figcaption { margin-top: 0.5rem; color: var(--faint); font-size: 0.85rem }
.wide { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th { overflow-wrap: normal }
th, td { padding: 0.2rem 0.6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
.wide th, .wide td { text-align: right; white-space: nowrap } .wide tr > :first-child { text-align: left }
tfoot td { font-weight: 600 }
"""


def write_report(folder: Path) -> Path:
    """Makes ``report.html`` of a run's log, with its plots as PNG files beside; of a run that was killed as well.

    Args:
        folder: of the log.

    Returns:
        The report.

    Raises:
        FileNotFoundError: no run has written curves there.
        OSError: something cannot be read or written.
    """
    if not has_curves(folder):
        raise FileNotFoundError(f"{folder}: no run has written curves there")
    about, curves = read_about(folder), read_curves(folder)
    plots = draw(curves)
    for plot in plots:
        write_whole(folder / f"{plot.name}.png", plot.png)
    page = folder / PAGE_FILE
    write_whole(page, _page(folder, about, curves, plots).encode())
    return page


def show(log_dir: str | None) -> None:
    """Makes the report of a run that has ended, and says where it is; what goes wrong is said, and nothing more."""
    if log_dir is None:
        return
    try:
        print(f"report: {write_report(Path(log_dir))}", file=sys.stderr)
    except Exception as error:  # whatever it is, the run has its result
        print(f"warning: no report was made: {error}", file=sys.stderr)


def _page(folder: Path, about: Mapping[str, Any], curves: Mapping[str, Curve], plots: Sequence[Plot]) -> str:
    title = TITLES.get(about.get("example", ""), "Training run")
    result = about.get("result") or {}
    settings = about.get("settings") or {}
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="faint">{escape(_when(folder, about, curves))}</p>',
        _facts(result, curves),
        "<h2>Curves</h2>",
        f'<div class="plots">{"".join(map(_figure, plots))}</div>' if plots else "<p>The run has no point yet.</p>",
        '<p class="faint">A point tells of the steps since the one before. Times are rank 0\'s. Lookups count each id '
        "of a step once; ids without a row are new ones, and such whose row has left or is held back.</p>",
        "<h2>Tables</h2>",
        _tables(result, curves),
        '<div class="columns">',
        _section("Settings", settings),
        _section("Versions", about.get("versions") or {}),
        _section("Machine", about.get("machine") or {}),
        _section("Result", {name: value for name, value in result.items() if not isinstance(value, Mapping)}),
        "</div>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} - {escape(folder.absolute().name)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _when(folder: Path, about: Mapping[str, Any], curves: Mapping[str, Curve]) -> str:
    parts = [str(folder.absolute())]
    started = about.get("started") or []
    if started:
        parts.append(f"began {started[0]}")
    if len(started) > 1:
        parts.append(f"went on {', '.join(started[1:])}")
    if not about.get("result"):
        last = max((curve.samples[-1] for curve in curves.values()), default=0)
        parts.append(f"has not come to its end: the last point is at {last:,} training samples")
    return " · ".join(parts)


def _facts(result: Mapping[str, Any], curves: Mapping[str, Curve]) -> str:
    """The numbers that come first: of the result, or where there is none of the last point."""

    def last(tag: str) -> float | None:
        return curves[tag].values[-1] if tag in curves else None

    rows = result.get("rows")
    facts = {
        "test AUC": result.get("test_auc"),
        "test logloss": result.get("test_logloss"),
        "recall@10": result.get("recall_at_10"),
        "validation AUC": result.get("val_auc", last("AUC/validation")),
        "training loss": result.get("train_loss", last("loss/training")),
        "samples": result.get("train_samples"),
        "samples/s": result.get("train_samples_per_second", last("speed/samples_per_second")),
        "rows": sum(rows.values()) if rows else last(f"rows/{ALL}"),
        "memory": last("memory/processes"),
    }
    shown = {
        name: short_bytes(value) if name == "memory" else f"{value:.4f}" if abs(value) < 10 else f"{value:,.0f}"
        for name, value in facts.items()
        if value is not None
    }
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in shown.items())
    return f'<dl class="facts">{items}</dl>'


def _figure(plot: Plot) -> str:
    data = b64encode(plot.png).decode("ascii")
    return (
        f"<figure><h3>{escape(plot.title)}</h3>"
        f'<img src="data:image/png;base64,{data}" alt="{escape(plot.text)}">'
        f"<figcaption>{escape(plot.text)}</figcaption></figure>"
    )


def _section(title: str, values: Mapping[str, Any]) -> str:
    """A table of names and values; a value that holds others is taken apart."""
    lines: list[str] = []
    for name, value in values.items():
        parts = value.items() if isinstance(value, Mapping) else [("", value)]
        for part, each in parts:
            if part and each is None:
                continue  # a bound that is not set
            whole = f"{name} {part}".strip().replace("_", " ")
            lines.append(f"<tr><th scope=row>{escape(whole)}</th><td>{escape(plain(each))}</td></tr>")
    return f"<section><h2>{escape(title)}</h2><table>{''.join(lines)}</table></section>" if lines else ""


def _tables(result: Mapping[str, Any], curves: Mapping[str, Curve]) -> str:
    """What each table holds, and has done since its process began."""
    rows = result.get("rows") or _last(curves, "rows")
    sizes = result.get("bytes") or _last(curves, "bytes")
    counts = {name: TableStats(**each) for name, each in (result.get("counts") or {}).items()}
    if not rows:
        return "<p>Nothing is known of the tables yet.</p>"
    columns: dict[str, list[str]] = {"table": [*rows]}
    columns["rows"] = [f"{rows[name]:,.0f}" for name in rows]
    columns["bytes"] = [short_bytes(sizes[name]) for name in rows]
    done = [counts.get(name) for name in rows]
    if counts:
        columns["hit rate"] = [share(stats.hits / stats.lookups) if stats and stats.lookups else "-" for stats in done]
        for count in ("lookups", "inserts", "evicted", "expired", "refused", "cold_rows", "cold_hits"):
            numbers = [getattr(stats, count) if stats else 0 for stats in done]
            if any(numbers):
                columns[count.replace("_", " ")] = [f"{number:,}" for number in numbers]
    foot = _row(
        "td", ["all", f"{sum(rows.values()):,.0f}", short_bytes(sum(sizes.values()))] + [""] * (len(columns) - 3)
    )
    lines = "".join(_row("td", cells) for cells in zip(*columns.values(), strict=True))
    head = f"<thead>{_row('th', columns)}</thead>"
    return f'<div class="wide"><table>{head}<tbody>{lines}</tbody><tfoot>{foot}</tfoot></table></div>'


def _row(cell: str, texts: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{cell}>{escape(text)}</{cell}>' for text in texts)}</tr>"


def _last(curves: Mapping[str, Curve], kind: str) -> dict[str, float]:
    """The last value of each table's curve."""
    found = {tag.partition("/")[2]: curve.values[-1] for tag, curve in curves.items() if tag.startswith(f"{kind}/")}
    found.pop(ALL, None)
    return found
