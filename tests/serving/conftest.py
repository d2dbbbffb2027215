"""Destinations of publications."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..redis_server import RedisServer, needs_redis, redis_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(
        tmp_path_factory.mktemp("redis"), password="correct-horse"
    ) as started:
        yield started


@pytest.fixture(
    params=[
        "directory",
        pytest.param("redis", marks=[needs_redis, pytest.mark.slow]),
    ]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A destination without publications."""
    if request.param == "directory":
        return str(tmp_path / "published")
    server: RedisServer = request.getfixturevalue("server")
    with server.client() as client:
        client.flushall()
    return f"{server.url}/0?stream=clicks"
