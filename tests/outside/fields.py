"""All fields of messages and documents that can hold a name, found by their
descriptors.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

Path = tuple[str, ...]
"""The names of the fields from a message to one of its strings or bytes."""

_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def text_fields(
    kind: Descriptor, before: tuple[Descriptor, ...] = ()
) -> Iterator[Path]:
    """Yields the path of each string and of each bytes of a message, at any depth."""
    for field in kind.fields:
        if field.type in _TEXTS:
            yield (field.name,)
        elif (
            field.type == FieldDescriptor.TYPE_MESSAGE
            and field.message_type not in before
        ):
            for path in text_fields(field.message_type, (*before, kind)):
                yield (field.name, *path)


def with_text(message: Message, path: Path, name: bytes) -> bytes:
    """Returns a message as bytes, with one string or bytes replaced.

    A string is replaced in the bytes of the message, so that it can be no UTF-8.

    Args:
        message: The message, which is not changed.
        path: A path of :func:`text_fields`.
        name: The bytes of the string.
    """
    changed = copy.deepcopy(message)
    # Protobuf refuses strings that are no UTF-8, so another string of the same size
    # keeps the place.
    place = (b"\x01\x02\x03\x04PLACE" * (len(name) // 9 + 1))[: len(name)]
    _set(changed, path, place)
    written = changed.SerializeToString()
    return (
        written.replace(place, name) if len(place) >= 9 else _short(message, path, name)
    )


def _short(message: Message, path: Path, name: bytes) -> bytes:
    changed = copy.deepcopy(message)
    _set(changed, path, name.decode(errors="replace").encode())
    return changed.SerializeToString()


def _set(message: Message, path: Path, value: bytes) -> None:
    field = message.DESCRIPTOR.fields_by_name[path[0]]
    is_map = (
        field.message_type is not None and field.message_type.GetOptions().map_entry
    )
    if is_map:
        _set_in_map(message, field, path[1:], value)
    elif len(path) > 1:
        inner = getattr(message, field.name)
        if field.is_repeated:
            inner = inner[0] if len(inner) else inner.add()
        _set(inner, path[1:], value)
    elif field.is_repeated:
        values = getattr(message, field.name)
        kept = list(values)[1:]
        del values[:]
        values.extend([_typed(field, value), *kept])
    else:
        setattr(message, field.name, _typed(field, value))


def _set_in_map(message: Message, field: Any, path: Path, value: bytes) -> None:
    entries = getattr(message, field.name)
    value_field = field.message_type.fields_by_name["value"]
    key = next(iter(entries), "x")
    if path[0] == "key":
        key = value.decode()
        value = b""
    if value_field.type == FieldDescriptor.TYPE_MESSAGE:
        entry = entries[key]  # the access makes the entry
        if path[0] == "value":
            _set(entry, path[1:], value)
    elif value_field.type in _TEXTS:
        entries[key] = _typed(value_field, value)
    else:
        entries[key] = 1


def _typed(field: Any, value: bytes) -> str | bytes:
    return value if field.type == FieldDescriptor.TYPE_BYTES else value.decode()


def places(document: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the place of each value in a JSON document that is no list and no object.

    A place is a tuple of keys and numbers.
    """
    if isinstance(document, dict):
        for key, value in document.items():
            yield from places(value, (*before, key))
    elif isinstance(document, list):
        for number, value in enumerate(document):
            yield from places(value, (*before, number))
    else:
        yield before


def with_value(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Returns a copy of a JSON document with another value at a place."""
    changed = copy.deepcopy(document)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed


def with_key(document: Any, place: tuple[Any, ...], key: str) -> Any:
    """Returns a copy of a JSON document in which the innermost key before a place has
    another name.
    """
    changed = copy.deepcopy(document)
    at = max(index for index, part in enumerate(place) if isinstance(part, str))
    inner = changed
    for part in place[:at]:
        inner = inner[part]
    inner[key] = inner.pop(place[at])
    return changed


def renamed(document: Any, old: str, new: str) -> Any:
    """Returns a copy of a JSON document in which a string has another value, wherever
    it stands.

    Keys are renamed, too. A document whose parts refer to each other by this name still
    agrees.
    """
    if isinstance(document, dict):
        return {
            renamed(key, old, new): renamed(value, old, new)
            for key, value in document.items()
        }
    if isinstance(document, list):
        return [renamed(value, old, new) for value in document]
    return new if document == old else document


def changed_document(document: Any, chosen: random.Random, name: str) -> Any:
    """Returns a copy of a JSON document with a hostile name at a random place."""
    place = chosen.choice(list(places(document)))
    if not place:
        return name
    inner = document
    for key in place:
        inner = inner[key]
    how = chosen.random()
    if how < 0.1:
        # A value of a type that has a path, as the package's own files encode it.
        return with_value(document, place, {"$type": "SSDStore", "path": name})
    if how < 0.55 and isinstance(inner, str):
        return renamed(document, inner, name)
    if how < 0.8 and any(isinstance(part, str) for part in place):
        at = max(index for index, part in enumerate(place) if isinstance(part, str))
        return (
            renamed(document, place[at], name)
            if how < 0.7
            else with_key(document, place, name)
        )
    return with_value(document, place, name)
