"""Hostile names, which lead out of a directory if they become parts of paths, for the
fuzzers.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

ROUNDS = int(os.environ.get("RECSTORE_TEST_NAMES", "200"))
"""The number of rounds of each fuzzer."""

SEED = int(os.environ.get("RECSTORE_TEST_SEED", "52"))
"""The seed of the hostile names. Each fuzzer prints it."""

VICTIM = "victim"
"""The name of the directory that lies beside each directory above the one that is
fuzzed.
"""

_UPS = 6
_SLASHES = (
    "\N{DIVISION SLASH}",
    "\N{FULLWIDTH SOLIDUS}",
    "\N{FRACTION SLASH}",
    "\\",
    "%2f",
    "%252F",
)
_DOTS = (
    "..",
    "\N{FULLWIDTH FULL STOP}" * 2,
    "%2e%2e",
    "%252e%252e",
    ".\N{ZERO WIDTH SPACE}.",
)
_OWN_NAMES = (
    "lock",
    "server.json",
    "set.json",
    "pair.json",
    "metadata.json",
    "latest.json",
    "stopped-0",
    ".server.json",
    "rows",
    "rows.end",
)
_ODD_NAMES = (
    "",
    ".",
    "..",
    "...",
    " ",
    "~",
    "~root",
    "$HOME",
    "-rf",
    "*",
    "a\nb",
    "a\0b",
    "\0",
    "\x7f",
    "\u2028",
    "\u202e",
    "\N{SNOWMAN}",
    "\ufeffx",
    "C:\\victim",
    "file:///etc/passwd",
    "unix-abstract:recstore",
    "dns:///localhost",
    "{}",
    "%s%n",
)


class HostileNames:
    """Makes hostile names.

    Args:
        chosen: The source of random numbers.
        root: The directory that has all victims. Absolute names point there.
        begins: Names that exist in the directory that is fuzzed. Paths that go up begin
            with them, because the kernel refuses ``x/../victim`` where there is no
            ``x``.
    """

    def __init__(
        self, chosen: random.Random, root: Path, begins: Sequence[str]
    ) -> None:
        self._random = chosen
        self._root = root
        self._begins = tuple(begins)

    def escapes(self) -> list[str]:
        """Returns each path from a directory that exists, or from none, to a victim."""
        begins = ("", *(f"{name}/" for name in self._begins))
        return [
            f"{begin}{'../' * ups}{VICTIM}"
            for begin in begins
            for ups in range(1, _UPS)
        ]

    def escape(self) -> str:
        """Returns one of :meth:`escapes`."""
        return self._random.choice(self.escapes())

    def text(self) -> str:
        """Returns a name.

        It may have lone surrogates, which stand for bytes that are no UTF-8.
        """
        makers = (
            self._going_up,
            self._going_up,
            self._going_up,
            self._absolute,
            self._encoded,
            self._odd,
            self._long,
            self._cut,
            self._own,
        )
        return self._random.choice(makers)()

    def unicode(self) -> str:
        """Returns a name that UTF-8 can encode."""
        return self.text().encode(errors="surrogateescape").decode(errors="replace")

    def bytes(self) -> bytes:
        """Returns the bytes of a name, which may be no UTF-8."""
        return self.text().encode(errors="surrogateescape")

    def _target(self) -> str:
        targets = (
            VICTIM,
            VICTIM,
            f"{VICTIM}/file",
            f"{VICTIM}-file",
            "new",
            f"{VICTIM}/new",
        )
        return self._random.choice(targets)

    def _going_up(self) -> str:
        begin = self._random.choice(
            ("", "", "./", *(f"{name}/" for name in self._begins))
        )
        ups = "../" * self._random.randrange(1, _UPS)
        end = self._random.choice(
            ("", "", "", "/", "/.", "\0", "\n", ".json", "/../" + VICTIM)
        )
        return f"{begin}{ups}{self._target()}{end}"

    def _absolute(self) -> str:
        begin = self._random.choice(("", "/", "file://", "unix:", "//proc/self/root"))
        end = self._random.choice(("", "/", "\0.safetensors"))
        return f"{begin}{self._root}/{self._target()}{end}"

    def _encoded(self) -> str:
        up = self._random.choice(_DOTS) + self._random.choice(_SLASHES)
        return up * self._random.randrange(1, _UPS) + VICTIM

    def _odd(self) -> str:
        return self._random.choice(_ODD_NAMES)

    def _own(self) -> str:
        return self._random.choice((*_OWN_NAMES, *self._begins))

    def _long(self) -> str:
        size = self._random.choice((64, 65, 200, 201, 255, 256, 4095, 4096, 5000))
        letter = self._random.choice(("x", "x", "\N{SNOWMAN}", "../", "a/"))
        return (letter * size)[:size] + self._random.choice(("", f"/{VICTIM}"))

    def _cut(self) -> str:
        """Returns a name with a byte that no UTF-8 has, or with a lone surrogate."""
        odd = self._random.choice(("\udcff", "\udc80", "\udcc3"))
        return self._random.choice((odd, f"../{odd}", f"../{VICTIM}{odd}", f"x{odd}y"))
