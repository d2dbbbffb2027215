"""docs/your-model.ipynb runs, also from any of its cells, and prints what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.packages import ROOT

from .test_pages import imported_names

NOTEBOOK = ROOT / "docs" / "your-model.ipynb"


def read() -> NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cells: list[NotebookNode]) -> str:
    """What the cells have printed, to stderr too."""
    return "".join(output.get("text", "") for cell in cells for output in cell.outputs)


def displayed(cells: list[NotebookNode]) -> list[NotebookNode]:
    """What the cells show beside what they print, which arrives in one message or in
    several as time has it.
    """
    return [
        output["data"] for cell in cells for output in cell.outputs if "data" in output
    ]


def check(text: str) -> None:
    assert "equal to the bit: True" in text
    assert "the same predictions: True" in text
    found = re.search(r"test AUC after one epoch (0\.\d\d)", text)
    assert found is not None
    assert 0.68 < float(found[1]) < 0.8
    assert "Warning" not in text


def test_the_page_shows_outputs_of_a_run() -> None:
    cells = code_cells(read())
    check(printed(cells))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), (
        "run from the top, once"
    )
    code = "\n".join(cell.source for cell in cells)
    assert {name for _, name in imported_names(code)} >= {
        "save_checkpoint",
        "export_for_inference",
    }
    assert str(Path.home()) not in NOTEBOOK.read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_from_any_cell(tmp_path: Path) -> None:
    """Runs the cells from the top, and once more in the same kernel, where every name is
    that of a later cell.

    The folder is empty: the notebook needs no checkout.
    """
    notebook = read()
    shown = displayed(code_cells(notebook))
    client = NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    )
    with client.setup_kernel():
        for _ in range(2):
            for place, cell in enumerate(notebook.cells):
                if cell.cell_type == "code":
                    client.execute_cell(cell, place)
            check(printed(code_cells(notebook)))
            assert displayed(code_cells(notebook)) == shown
