"""What other distributions add to this package: it finds them by their entry points and never imports them by name.

``torchrec-recstore-service`` and ``torchrec-recstore-serving`` list what they add in their ``setup.cfg``.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

COMMANDS = "torchrec_recstore.commands"
"""The group of the entry points of commands: typer functions, or typer apps with several commands."""

_PLUGINS = "torchrec_recstore.plugins"
_NAMES = {
    "torchrec-recstore-service": {"client", "connected_to", "looks", "redis_store", "server_store", "service"},
    "torchrec-recstore-serving": {"serving"},
}
_COMMANDS = {"export": "serving", "follow": "serving", "serve": "service", "servers": "service"}


def missing(name: str) -> ImportError:
    """Returns the error of a plugin or a command whose distribution is not installed."""
    command = f"torchrec-recstore-{_COMMANDS.get(name)}"
    needed = next((distribution for distribution, names in _NAMES.items() if name in names), command)
    return ImportError(f"this needs {needed}, which is not installed: pip install {needed}")


def commands() -> dict[str, EntryPoint | None]:
    """Returns the entry points of the commands of other distributions by name, None for those not installed."""
    return {**dict.fromkeys(_COMMANDS), **{entry.name: entry for entry in entry_points(group=COMMANDS)}}


@cache
def plugin(name: str) -> Any:
    """Returns what another distribution adds under a name.

    Raises:
        ImportError: The distribution is not installed. The message says how to install it.
    """
    for entry in entry_points(group=_PLUGINS, name=name):
        return entry.load()
    raise missing(name)
