"""The process that shows items to users: it asks the served model for a score, and then writes the user's click.

A generator that was killed continues behind the last click of the stream.
"""

from __future__ import annotations

import json
import time
import urllib.request

import numpy as np
from online.clicks import Clicks, generated
from online.settings import Settings
from online.streams import stream_of

TICK_S = 0.1
MOST = 2048
"""The number of clicks that are written together."""
TIMEOUT_S = 1.0


class Server:
    """Asks ``recstore follow`` for scores over HTTP. After a failure it is left alone for a second.

    Args:
        address: The address of the server, ``host:port``.
    """

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/predict"
        self._again = 0.0

    def logits(self, clicks: Clicks) -> list[float] | float:
        """Returns the logits of clicks (B,), or NaN if the server does not answer."""
        if time.monotonic() < self._again:
            return np.nan
        features = {name: [[id] for id in clicks[name].tolist()] for name in ("user", "item")}
        body = json.dumps({"arguments": {"features": features}}).encode()
        try:
            with urllib.request.urlopen(self._url, body, timeout=TIMEOUT_S) as answer:
                (logits,) = json.load(answer)["outputs"].values()
        except OSError:  # It is not there yet, it was killed, or it has no model yet.
            self._again = time.monotonic() + 1
            return np.nan
        return list(logits)


def generate(settings: Settings) -> None:
    """Writes the clicks that the stream lacks: the history at once, and each live click when its time has come."""
    stream = stream_of(settings)
    served, frozen = Server(settings.http), Server(settings.frozen_http)
    number = stream.last()
    while number < settings.clicks:
        live = settings.paced and number >= settings.history
        due = _due(settings, served, frozen) if live else settings.history if settings.paced else settings.clicks
        last = min(due, number + MOST, settings.clicks)
        if last <= number:
            time.sleep(TICK_S)
            continue
        clicks = generated(settings, number + 1, last)
        if live:
            clicks["served"], clicks["frozen"] = served.logits(clicks), frozen.logits(clicks)
        stream.append(number + 1, clicks)
        number = last


def _due(settings: Settings, served: Server, frozen: Server) -> int:
    """Returns the number of the last click that is due. The first live click is due when both servers answer."""
    if not settings.opened.exists():
        first = generated(settings, settings.history + 1, settings.history + 1)
        if not all(isinstance(server.logits(first), list) for server in (served, frozen)):
            return settings.history
        beside = settings.opened.with_suffix(".new")
        beside.write_text(str(time.time_ns() // 1_000_000))
        beside.replace(settings.opened)
    passed_ms = time.time_ns() // 1_000_000 - int(settings.opened.read_text())
    return settings.history + 1 + passed_ms * settings.rate // 1000
