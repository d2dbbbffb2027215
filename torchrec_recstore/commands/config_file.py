"""The flag ``--config`` of the commands with many flags: a file of flags.

Tests: tests/commands/test_config_file.py.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any

import typer

Value = str | bool | list[str]


def _read(context: typer.Context, path: Path | None) -> Path | None:
    """Makes the values of a file the defaults of the command's other flags."""
    if path is None or context.resilient_parsing:
        return path
    options = _options(context)
    values: dict[str, Value] = {}
    for key, value in _content(path).items():
        name = key.replace("_", "-")
        option = options.get(name)
        if option is None:
            raise _refusal(f"{path}: {_unknown(key, options, context)}")
        if option.name in values:
            raise _refusal(f"{path}: {key!r} is there twice, with - and with _")
        values[option.name] = _value(value, option, f"{path}: {key}")
    context.default_map = values
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="TOML file with flags: max-rows = 1000. The command line goes first.",
        is_eager=True,
        callback=_read,
        show_default=False,
    ),
]
"""The parameter of a command whose flags may be in a file.

Its callback has read the file when the command is called.
"""


def _refusal(message: str) -> typer.BadParameter:
    return typer.BadParameter(message)


def _options(context: typer.Context) -> dict[str, Any]:
    """Returns the flags of a command that a file may have, by name, without dashes."""
    options: dict[str, Any] = {}
    for parameter in context.command.params:
        if parameter.param_type_name != "option" or parameter.is_eager:
            continue
        for name in parameter.opts:
            options[name.lstrip("-")] = parameter
    return options


def _content(path: Path) -> dict[str, Any]:
    try:
        import tomllib
    except ModuleNotFoundError:
        raise _refusal("a file of flags needs Python 3.11 or later") from None
    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise _refusal(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise _refusal(f"{path} is no TOML file: {error}") from error


def _unknown(
    key: str,
    options: dict[str, Any],
    context: typer.Context,
) -> str:
    """Says that a command has no such flag, and which one is nearest."""
    text = f"{context.command_path} has no flag --{key}"
    nearest = difflib.get_close_matches(key.replace("_", "-"), options, 1)
    return f"{text}; the nearest one is --{nearest[0]}" if nearest else text


def _value(value: Any, option: Any, place: str) -> Value:
    """Returns a value of a file in the form that the command line has."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise _refusal(f"{place} must be true or false, got {value!r}")
        return value
    if option.multiple:
        if not isinstance(value, list):
            raise _refusal(f"{place} must be a list, got {value!r}")
        return [_text(part, place) for part in value]
    return _text(value, place)


def _text(value: Any, place: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _refusal(f"{place} must be a text or a number, got {value!r}")
    return str(value)
