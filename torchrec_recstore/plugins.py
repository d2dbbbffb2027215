"""What other distributions add to this package: it finds them by their entry points and
never imports them by name.

``torchrec-recstore-service`` and ``torchrec-recstore-serving`` list what they add in
their ``pyproject.toml``.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from torchrec_recstore.installing import install

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# The group of the entry points of commands, which are typer functions or typer apps.
_COMMAND_GROUP = "torchrec_recstore.commands"
# The group of all other entry points.
_PLUGIN_GROUP = "torchrec_recstore.plugins"
# Which distribution has a name: torchrec-recstore-service or torchrec-recstore-serving.
_COMMANDS = {
    "export": "serving",
    "follow": "serving",
    "serve": "service",
    "servers": "service",
}
# The extra that a command needs besides, which has no entry points of its own.
_EXTRAS = {"follow": "predict"}
_PLUGINS = {
    "client": "service",
    "connected_to": "service",
    "looks": "service",
    "server_store": "service",
    "service": "service",
    "serving": "serving",
}


def missing(name: str) -> ImportError:
    """Returns the error of a plugin or a command that is not installed."""
    part = (_PLUGINS | _COMMANDS)[name]
    needed = f"torchrec-recstore-{part}"
    command = install(_EXTRAS.get(name, ""), part=part)
    return ImportError(
        f"this needs {needed}, which is not installed: {command}",
        name=needed,
    )


def commands() -> dict[str, EntryPoint | None]:
    """Returns the entry points of the commands of other distributions by name, None for
    those not installed.
    """
    by_name: dict[str, EntryPoint | None] = dict.fromkeys(_COMMANDS)
    for entry_point in _entry_points(group=_COMMAND_GROUP):
        by_name[entry_point.name] = entry_point
    return by_name


def _entry_points(**parameters: str) -> Any:
    # takes as long as the rest of `import torchrec_recstore`
    from importlib.metadata import entry_points

    return entry_points(**parameters)


def is_installed(name: str) -> bool:
    """Returns whether the distribution that adds a name is installed, without importing
    it.
    """
    return bool(_entry_points(group=_PLUGIN_GROUP, name=name))


@cache
def plugin(name: str) -> Any:
    """Returns what another distribution adds under a name.

    Raises:
        ImportError: The distribution is not installed. The message says how to install
            it.
    """
    for entry_point in _entry_points(group=_PLUGIN_GROUP, name=name):
        return entry_point.load()
    raise missing(name)
