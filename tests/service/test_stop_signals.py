"""How a server waits for SIGTERM and SIGINT."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from torchrec_recstore_service.server.listening import stopped_by_signals


def test_a_signal_that_another_thread_receives_ends_the_wait_at_once() -> None:
    def send() -> None:
        time.sleep(0.2)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    with stopped_by_signals() as stop:
        sender = threading.Thread(target=send)
        sender.start()
        assert stop.wait(3600.0)  # longer than pytest waits
        sender.join()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_wait_counts_once(number: int) -> None:
    with stopped_by_signals() as stop:
        assert not stop.wait(0.01)
        os.kill(os.getpid(), number)
        assert stop.wait(10.0)
        assert not stop.wait(0.01)


def test_other_signals_do_not_stop() -> None:
    before = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    try:
        with stopped_by_signals() as stop:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert not stop.wait(0.1)
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_the_handlers_of_before_are_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with stopped_by_signals():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert signal.set_wakeup_fd(-1) == -1
