"""Hostile names in files that others have written never lead a loader out of their
directory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.outside import files
from tests.outside.names import ROUNDS, SEED
from tests.outside.sandbox import Sandbox
from tests.redis_server import needs_redis, redis_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(
    params=[
        files.Checkpoints,
        files.DataDirectories,
        files.PublishedDirectory,
        files.Deltas,
        pytest.param(files.PublishedStream, marks=needs_redis),
    ]
)
def case(
    request: pytest.FixtureRequest, sandbox: Sandbox, tmp_path: Path
) -> Iterator[files.Case]:
    make: Callable[..., files.Case] = request.param
    if make is files.PublishedStream:
        with redis_server(tmp_path / "redis") as server:
            yield make(sandbox.data, server)
    else:
        yield make(sandbox.data)


def test_no_field_of_a_file_leads_out_of_its_directory(
    sandbox: Sandbox, case: files.Case
) -> None:
    rounds = max(20, ROUNDS // 10)  # a load takes longer than a call
    print(f"RECSTORE_TEST_SEED={SEED} RECSTORE_TEST_NAMES={ROUNDS}")
    fuzzer = files.FileFuzzer(sandbox, random.Random(SEED), case)
    case.prepare()
    fuzzer.rounds(rounds)
    fuzzer.renamed_everywhere()
    print(dict(fuzzer.results))
    assert fuzzer.results["rounds"] > rounds / 2
    assert fuzzer.results["reads"]
