"""Generates clicks whose taste drifts.

A click depends only on the settings and on its number.

Users and items are angles on a circle. A user is likely to click an item that lies in
the direction that the user likes, and all directions rotate: after ``TURN_S`` seconds
they have made one turn. New users and items appear all the time and old ones vanish,
and the newest items are shown most.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from online.settings import Settings

Clicks = npt.NDArray[Any]

OUTCOMES = ("history", "answered", "no answer in time", "refused", "not asked")
"""The outcomes of the request for the score of a click.

No score of a click of the history was requested.
"""
HISTORY, ANSWERED, NO_ANSWER, REFUSED, NOT_ASKED = range(len(OUTCOMES))

LATE_S = 2.0
"""A click is late if it was written more than this time after it was due."""

CLICK = np.dtype(
    [
        ("time_ms", "<i8"),
        ("user", "<i8"),
        ("item", "<i8"),
        ("clicked", "<i8"),
        ("served", "<f8"),
        ("frozen", "<f8"),
        ("served_outcome", "<i8"),
        ("frozen_outcome", "<i8"),
        ("age", "<f8"),
        ("waited", "<f8"),
    ]
)
"""A click.

- ``time_ms``: The time in milliseconds since 1970.
- ``user``, ``item``: The ids.
- ``clicked``: The label, 0 or 1.
- ``served``, ``frozen``: The logits that the served model and the frozen model gave
  before the label was known. NaN: the model did not answer.
- ``served_outcome``, ``frozen_outcome``: The outcomes of both requests, numbers of
  ``OUTCOMES``.
- ``age``: The age in seconds of the rows of the served model at this click. If it did
  not answer, these are the rows that have answered last, which have become older since.
- ``waited``: The time in seconds from the moment at which the click was due until it
  was written.

The age and the time are NaN for clicks of the history.
"""

BLOCK = 1024  # clicks of one random stream
USERS = 600  # at any time
ITEMS = 300  # at any time
NEW_USERS_S = 4.0  # new users a second
NEW_ITEMS_S = 4.0  # new items a second
TURN_S = 360.0
SCALE = 3.0
BIAS = -1.0
# The product with an odd number maps 64-bit numbers one to one.
_ODD = np.uint64(0x9E3779B97F4A7C15)
# Multiples of these fill the circle evenly.
_GOLDEN = 0.6180339887498949
_PLASTIC = 0.7548776662466927


def generated(settings: Settings, first: int, last: int) -> Clicks:
    """Returns the clicks with the numbers from ``first`` to ``last``, both included.

    The first click has the number 1.

    Returns:
        (last - first + 1,) of the dtype :data:`CLICK`, without scores.
    """
    first_block = (first - 1) // BLOCK
    last_block = (last - 1) // BLOCK
    if last_block < first_block:
        return np.empty(0, CLICK)
    blocks = []
    for number in range(first_block, last_block + 1):
        blocks.append(_block(settings, number))
    clicks_before = first_block * BLOCK
    begin = first - 1 - clicks_before
    end = last - clicks_before
    return np.concatenate(blocks)[begin:end]


def time_ms(settings: Settings, number: npt.NDArray[np.int64] | int) -> Any:
    """Returns the time of a click, in milliseconds since 1970."""
    clicks_since_start = number - 1 - settings.history
    return settings.start_ms + clicks_since_start * 1000 // settings.rate


def _block(settings: Settings, block: int) -> Clicks:
    random = np.random.default_rng([settings.seed, block])
    clicks = np.empty(BLOCK, CLICK)
    first = block * BLOCK + 1
    numbers = np.arange(first, first + BLOCK)
    clicks["time_ms"] = time_ms(settings, numbers)
    second = (numbers - 1) / settings.rate

    user_age = USERS * random.random(BLOCK)
    item_age = ITEMS * random.random(BLOCK) ** 2
    user = np.floor(second * NEW_USERS_S - user_age).astype(np.int64)
    item = np.floor(second * NEW_ITEMS_S - item_age).astype(np.int64)
    user_id = user.view(np.uint64) * _ODD
    item_id = item.view(np.uint64) * _ODD
    clicks["user"] = user_id.view(np.int64)
    clicks["item"] = item_id.view(np.int64)

    turns = _GOLDEN * item - _PLASTIC * user - second / TURN_S
    logits = SCALE * np.cos(2 * np.pi * turns) + BIAS
    probabilities = 1 / (1 + np.exp(-logits))
    clicks["clicked"] = random.random(BLOCK) < probabilities
    for name in ("served", "frozen", "age", "waited"):
        clicks[name] = np.nan
    for name in ("served_outcome", "frozen_outcome"):
        clicks[name] = HISTORY
    return clicks
