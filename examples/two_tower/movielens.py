"""MovieLens in RecBole's atomic files, as raw ids: who rated what, and what is known of users and items.

The files ``ml-100k.inter``, ``.user`` and ``.item``, plain or gzip, are tab-separated under a header of ``name:type``
columns. Numbers are their own id; words (a zip code, a genre) become the id that their hash is.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common.command import DataError

NAME = "ml-100k"
AGE_YEARS = 5
"""Width of an age bucket."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Features:
    """Features of many users, or of many items, each a list of ids.

    Attributes:
        names: of the features.
        lists: for every feature, a list of ids for each user or item.
    """

    names: tuple[str, ...]
    lists: tuple[list[list[int]], ...]


@dataclass(frozen=True)
class MovieLens:
    """Interactions in time order, by the places of user and item in their files.

    Attributes:
        users: features; the first is the user's id.
        items: features; the first is the item's id.
        train: (n, 2) user and item, all but each user's last interaction.
        test: (m, 2) user and item, the last interaction of each user who has at least two.
    """

    users: Features
    items: Features
    train: Ids
    test: Ids


def integer(field: str) -> int:
    """An int64.

    Raises:
        ValueError: the field is none.
    """
    value = int(field)
    if not -(2**63) <= value < 2**63:
        raise ValueError(field)
    return value


def token_id(token: str) -> int:
    """A 64-bit id of any token: a number is its own; a word's hash is the same everywhere, and all but unique."""
    try:
        return integer(token)
    except ValueError:
        return int.from_bytes(hashlib.blake2b(token.encode(), digest_size=8).digest(), "little", signed=True)


def _time(field: str) -> float:
    seconds = float(field)
    if not math.isfinite(seconds):  # nothing can be put in order by it
        raise ValueError(field)
    return seconds


def _own_id(field: str) -> list[int]:
    return [integer(field)]


def _age_bucket(field: str) -> list[int]:
    return [integer(field) // AGE_YEARS] if field else []


def _tokens(field: str) -> list[int]:
    return [token_id(token) for token in field.split()]


ToIds = Callable[[str], list[int]]

USER_FEATURES: dict[str, tuple[str, ToIds]] = {
    "user_id": ("user_id", _own_id),
    "age": ("age", _age_bucket),
    "gender": ("gender", _tokens),
    "occupation": ("occupation", _tokens),
    "zip": ("zip_code", _tokens),
}
"""Name of a feature: the column of its file, and how its field becomes ids; an empty field has none."""

ITEM_FEATURES: dict[str, tuple[str, ToIds]] = {
    "item_id": ("item_id", _own_id),
    "year": ("release_year", _tokens),
    "genres": ("class", _tokens),
}


def load(folder: Path) -> MovieLens:
    """Reads the three files and leaves each user's last interaction out for the test.

    Raises:
        DataError: a file is missing, damaged, lacks a column, or has a bad line; the message names file and line.
    """
    users, user_places = _features(_find(folder, "user"), USER_FEATURES)
    items, item_places = _features(_find(folder, "item"), ITEM_FEATURES)
    path = _find(folder, "inter")
    parsers = {"user_id": _place_in(user_places), "item_id": _place_in(item_places), "timestamp": _time}
    rows = [values for _, values in _rows(path, parsers)]
    # sorted() keeps the order of the file where a user rated several items in the same second.
    ordered = np.array([row[:2] for row in sorted(rows, key=lambda row: row[2])], np.int64)
    train, test = leave_last_out(ordered)
    if not len(test):
        raise DataError(f"{path}: no user has two interactions, one to train on and one to test")
    return MovieLens(users, items, train, test)


def leave_last_out(interactions: Ids) -> tuple[Ids, Ids]:
    """Splits (n, 2) interactions in time order into all but each user's last, and the last of those who have two."""
    users, counts = np.unique(interactions[:, 0], return_counts=True)
    last = {int(user): place for place, user in enumerate(interactions[:, 0])}
    test = np.array(sorted(last[int(user)] for user in users[counts > 1]), np.int64)
    return np.delete(interactions, test, axis=0), interactions[test]


def _find(folder: Path, kind: str) -> Path:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    paths = [folder / f"{NAME}.{kind}", folder / f"{NAME}.{kind}.gz"]
    for path in paths:
        if path.exists():
            return path
    raise DataError(f"{folder}: neither {paths[0].name} nor {paths[1].name} is there")


def _lines(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for line in file:
                yield line.rstrip("\r\n")
    except OSError as error:  # among them gzip's own
        raise DataError(f"{path}: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8: {error.reason}") from error


def _rows(path: Path, parsers: Mapping[str, Callable[[str], object]]) -> Iterator[tuple[int, list[Any]]]:
    """Yields (line number, the wanted columns' values) of every line under the header."""
    lines = _lines(path)
    header = [column.split(":")[0] for column in next(lines, "").split("\t")]
    for name in parsers:
        if name not in header:
            raise DataError(f"{path}, line 1: no column {name!r} in the header")
    wanted = [(header.index(name), name, parse) for name, parse in parsers.items()]
    number = 1
    for number, line in enumerate(lines, start=2):
        fields = line.split("\t")
        if len(fields) != len(header):
            raise DataError(f"{path}, line {number}: expected {len(header)} columns, found {len(fields)}")
        values = []
        for place, name, parse in wanted:
            try:
                values.append(parse(fields[place]))
            except ValueError:
                raise DataError(
                    f"{path}, line {number}, column {name}: {fields[place]!r} is no number of 64 bits"
                ) from None
            except KeyError as error:
                raise DataError(f"{path}, line {number}, column {name}: {error.args[0]}") from None
        yield number, values
    if number == 1:
        raise DataError(f"{path}: no row under the header")


def _features(path: Path, columns: dict[str, tuple[str, ToIds]]) -> tuple[Features, dict[int, int]]:
    """Returns the features and where each id, the first of them, stands in the file."""
    lists: tuple[list[list[int]], ...] = tuple([] for _ in columns)
    places: dict[int, int] = {}
    for number, row in _rows(path, dict(columns.values())):
        for ids, of_feature in zip(row, lists, strict=True):
            of_feature.append(ids)
        if row[0][0] in places:
            raise DataError(f"{path}, line {number}: id {row[0][0]} for the second time")
        places[row[0][0]] = len(places)
    return Features(tuple(columns), lists), places


def _place_in(places: dict[int, int]) -> Callable[[str], int]:
    def place(field: str) -> int:
        try:
            return places[integer(field)]
        except KeyError:
            raise KeyError(f"id {field} is in no line of the file of features") from None

    return place
