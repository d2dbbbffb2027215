"""The first programs of the documentation print no warning but those of TorchRec that
docs/errors.md explains.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages import ROOT

from .pages import blocks

EXPLAINED = (
    (ROOT / "docs/errors.md")
    .read_text()
    .partition("## Warnings of TorchRec and torch")[2]
)
ANY = re.compile(r"\\?\.\\?\.\\?\.")


def explained() -> list[re.Pattern[str]]:
    """The warnings of the table, of which ``...`` is any text."""
    first_cells = re.findall(r"^\| `(.*?)` \| ", EXPLAINED, re.MULTILINE)
    return [re.compile(".*" + ANY.sub(".*", re.escape(cell))) for cell in first_cells]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", ["README.md", "docs/first-table.md", "examples/dlrm/minimal.py"]
)
def test_the_first_programs_print_no_warning(page: str, tmp_path: Path) -> None:
    if page.endswith(".md"):
        codes = [block.text for block in blocks(ROOT / page) if block.kind == "python"]
        program = "\n".join(codes)
    else:
        program = (ROOT / page).read_text()
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    # they call it, and do not only run where nothing warns
    loud = program.replace("quiet()", "None")
    (tmp_path / "program.py").write_text(loud)
    if page == "README.md":
        done = subprocess.run(
            [sys.executable, "program.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        printed = [
            line
            for line in done.stderr.splitlines()
            if line.strip() and not line.startswith("  ")
        ]
        known = explained()
        unknown = [
            line
            for line in printed
            if not any(pattern.match(line) for pattern in known)
        ]
        assert unknown == []
        assert printed


def test_quiet_hides_what_the_page_lists_and_nothing_else() -> None:
    program = """
import logging, sys, warnings
import torchrec_recstore
torchrec_recstore.quiet()
torchrec_recstore.quiet()
assert "torch" not in sys.modules
from torchrec_recstore.quiet_warnings import _LOGGERS as lines
for name, beginnings in lines.items():
    logger = logging.getLogger(None if name == "root" else name)
    for beginning in beginnings:
        logger.warning("%s ...", beginning)
    logger.warning("another line of %s", name)
warnings.warn("HeuristicalStorageReservation is known to cause issues, ...", FutureWarning)
warnings.warn("another warning", FutureWarning)
warnings.warn("a warning of ours", torchrec_recstore.RecStoreWarning)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    shown = [line for line in done.stderr.splitlines() if "another" in line]
    assert len(shown) == 5
    assert "a warning of ours" in done.stderr
    assert "..." not in done.stderr


def test_the_planner_says_nothing_of_a_sharding_type_that_recstore_lacks(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    import torch
    from torch.distributed import group
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    from torchrec_recstore import RecStoreConstraints, RecStorePlanner, RecStoreSharder

    tables = [
        EmbeddingBagConfig(name=n, embedding_dim=8, num_embeddings=9, feature_names=[n])
        for n in ("a", "b")
    ]
    ebc = EmbeddingBagCollection(tables, device=torch.device("meta"))
    constraints = {
        "a": RecStoreConstraints(),
        "b": ParameterConstraints(compute_kernels=["fused"]),
    }
    planner = RecStorePlanner(
        topology=Topology(world_size=1, compute_device="cpu"), constraints=constraints
    )
    planner.collective_plan(ebc, [RecStoreSharder()], group.WORLD)
    said = [
        each
        for each in caplog.messages
        if each.startswith("No available compute kernels")
    ]
    assert [each for each in said if "for a." in each] == []
    # of other kernels, TorchRec's warnings stay
    assert [each for each in said if "for b." in each]
