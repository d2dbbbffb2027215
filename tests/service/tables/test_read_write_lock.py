"""Tests of the lock that readers of a table share."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from torchrec_recstore_service.tables.read_write_lock import ReadWriteLock

DEADLINE_S = 60


def test_readers_share_it_and_a_writer_has_it_alone() -> None:
    lock, inside = ReadWriteLock(), threading.Barrier(3)
    total, seen = 0, []

    def reads() -> None:
        with lock.shared():
            inside.wait(DEADLINE_S)  # all three are inside at the same time

    def writes(_: int) -> None:
        nonlocal total
        for _ in range(200):
            with lock:
                before = total
                time.sleep(0)  # lets other threads run
                total = before + 1

    def watches(_: int) -> None:
        for _ in range(200):
            with lock.shared():
                before = total
                time.sleep(0)
                seen.append(total == before)

    with ThreadPoolExecutor(3) as threads:
        for reader in [threads.submit(reads) for _ in range(3)]:
            reader.result()
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda work: work(0), [writes, watches] * 3))
    assert total == 600
    assert all(seen)


def test_neither_readers_nor_writers_starve() -> None:
    lock, done = ReadWriteLock(), threading.Event()
    inside = entries = 0
    counting = threading.Lock()

    def reads() -> None:
        """Keeps the lock until a later reader has it, so that it is never free unless a
        writer keeps readers out.
        """
        nonlocal inside, entries
        while not done.is_set():
            with lock.shared():
                with counting:
                    inside += 1
                    entries += 1
                    entry = entries
                until = time.monotonic() + 0.1
                while (
                    entries == entry and not done.is_set() and time.monotonic() < until
                ):
                    time.sleep(0)
                with counting:
                    inside -= 1

    def writes() -> None:
        while not done.is_set():
            with lock:
                pass

    def takes(times: int) -> None:
        for _ in range(times):
            with lock:
                assert inside == 0

    def shares(times: int) -> None:
        for _ in range(times):
            with lock.shared():
                pass

    for stream, other in ((reads, takes), (writes, shares)):
        done.clear()
        with ThreadPoolExecutor(4) as threads:
            streams = [threads.submit(stream) for _ in range(3)]
            try:
                threads.submit(other, 20).result(DEADLINE_S)
            finally:
                done.set()
            for each in streams:
                each.result()


def test_an_error_leaves_it_free() -> None:
    lock = ReadWriteLock()
    for held in (lock, lock.shared()):
        try:
            with held:
                raise KeyError
        except KeyError:
            pass
    with lock:
        pass
