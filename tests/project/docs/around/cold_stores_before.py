"""The Redis server that the page clears."""

from pathlib import Path

from tests.project.docs.run_page import Missing
from tests.redis_server import PROGRAM, RedisServer

if PROGRAM is None:
    raise Missing("neither redis-server nor valkey-server is on this machine")
RedisServer(Path("redis").absolute(), port=int("127.0.0.1:6379".rpartition(":")[2]))
