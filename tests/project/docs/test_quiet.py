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
@pytest.mark.parametrize("page", ["README.md", "docs/first-table.md"])
def test_what_is_printed_is_explained(page: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "\n".join(b.text for b in blocks(ROOT / page) if b.kind == "python")
    )
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    # The second line of a warning of Python is the line of code that has issued it.
    printed = [
        line
        for line in done.stderr.splitlines()
        if line.strip() and not line.startswith("  ")
    ]
    known = explained()
    assert len(known) == 7
    assert [
        line for line in printed if not any(each.match(line) for each in known)
    ] == []
    assert printed


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
