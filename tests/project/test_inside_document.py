"""docs/inside.md names files that exist, and says of the sources what stands in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.packages import PACKAGES, ROOT
from torchrec_recstore import ops

DOCUMENT = (ROOT / "docs" / "inside.md").read_text()
THREADS = ("Thread", "Timer", "ThreadPoolExecutor", "run_in_executor", "to_thread")
NAMED = sorted(set(re.findall(r"[\w/]+/\w+\.(?:py|h|cpp|inl|proto)\b", DOCUMENT)))


@pytest.mark.parametrize("name", NAMED)
def test_named_files_exist(name: str) -> None:
    places = (ROOT / name, *(package / name for package in PACKAGES.values()))
    assert any(place.is_file() for place in places)


def on_the_map() -> set[Path]:
    """The files and folders that the map at the beginning of the page names."""
    block = DOCUMENT.split("```text\n", 1)[1].split("```", 1)[0]
    paths: set[Path] = set()
    parents: list[Path] = []
    for line in block.splitlines():
        level = (len(line) - len(line.lstrip())) // 4
        folder = parents[level - 1] if level else ROOT
        # Names are separated from what they hold by several blanks, as from each other.
        names = re.match(r"\s*((?:[\w./]+(?:  |$))+)", line)
        assert names is not None, line
        entries = [folder / name for name in names[1].split()]
        paths.update(entries)
        parents[level:] = [entries[0]]
    return paths


def test_the_map_is_the_tree() -> None:
    places = on_the_map()
    assert [path for path in places if not path.exists()] == []
    for package in PACKAGES.values():
        for path in package.iterdir():
            is_module = path.suffix == ".py" and path.name != "__init__.py"
            is_room = path.is_dir() and not path.name.startswith("_")
            assert path in places or not (is_module or is_room), (
                f"{path} is not on the map"
            )
    csrc = PACKAGES["torchrec_recstore"] / "csrc"
    assert {path for path in csrc.iterdir() if path.is_dir()} <= places


def test_the_core_is_described() -> None:
    assert len(NAMED) > 50
    assert {
        "csrc/index/index.h",
        "csrc/rows/rows.h",
        "csrc/lookup/pass.h",
        "csrc/snapshot/snapshot.h",
        "csrc/ops/table.cpp",
    } <= set(NAMED)


def test_each_file_that_starts_threads_is_in_the_table_of_threads() -> None:
    """So that somebody looks at what a new thread calls."""
    section = DOCUMENT[DOCUMENT.index("## Threads") : DOCUMENT.index("## Cold tier")]
    starting: set[str] = set()
    for package in PACKAGES.values():
        for path in package.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and ast.unparse(node.func).rpartition(".")[2] in THREADS
                ):
                    starting.add(f"{path.parent.name}/{path.name}")
    assert len(starting) > 15
    missing = sorted(file for file in starting if file not in section)
    assert missing == [], (
        f"docs/inside.md does not say what the threads of {missing} call"
    )


@pytest.mark.parametrize(
    ("said", "file", "stands"),
    [
        ("line of 64 bytes", "index/index_lines.h", "sizeof(IndexLine) == 64"),
        ("the lines 1, 3, 6, 10, 14, 18", "index/index_lines.h", "kMostStep = 4"),
        ("grow by a fifth", "index/index.cpp", "kGrowth = 5"),
        ("into 64 parts", "index/index.h", "kPartBits = 6"),
        ("first 512 KiB", "base/memory.cpp", "size_t{512} << 10"),
        ("32nd of `max_rows`", "bounds/eviction.cpp", "kQueuePart = 32"),
        ("Philox4x32-10", "rows/philox.h", "round < 10"),
        ("tasks of about a thousand ids", "lookup/forward.cpp", "kTaskIds = 1024"),
        ("two generations", "bounds/sightings.h", "two generations"),
    ],
)
def test_numbers_are_those_of_the_core(said: str, file: str, stands: str) -> None:
    assert said in " ".join(DOCUMENT.split())
    assert stands in (ROOT / "torchrec_recstore" / "csrc" / file).read_text()


def test_versions_are_those_of_the_build() -> None:
    setup = (ROOT / "setup.py").read_text()
    assert "(2.11 and later)" in " ".join(DOCUMENT.split())
    assert "0x020b" in setup
    assert "(3.10 and later)" in " ".join(DOCUMENT.split())
    assert "cp310" in setup


def test_ops_named_are_there() -> None:
    assert all(
        hasattr(ops, name)
        for name in ("group_forward", "group_backward", "group_accumulated_backward")
    )
