"""The style of the pages that the examples write: colours, the style sheet, and parts of a page. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

# Colours that colour-blind readers can distinguish. Source: Okabe and Ito, Color Universal Design, 2008.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

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


def document(title: str, body: str, head: str = "") -> str:
    """Returns a page as HTML.

    Args:
        title: The title of the page, as plain text.
        body: The body, as HTML.
        head: More elements of the head, as HTML. Default: none.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{head}<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def facts(shown: Mapping[str, str]) -> str:
    """Returns the main numbers of a page as HTML, by name."""
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in shown.items())
    return f'<dl class="facts">{items}</dl>'


def spread(places: list[float], gap: float) -> list[float]:
    """Moves ascending positions between 0 and 1 apart, to a distance of ``gap`` or less if there is not enough room."""
    gap = min(gap, 1 / max(len(places) - 1, 1))
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap) if moved else place)
    limit = 1.0
    for number in reversed(range(len(moved))):
        moved[number] = min(moved[number], limit)
        limit = moved[number] - gap
    return moved
