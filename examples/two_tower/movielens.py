"""Reads MovieLens from RecBole's atomic files as raw ids: ratings, and features of users and items.

The files ``ml-100k.inter``, ``.user`` and ``.item``, plain or gzip, are tab-separated and have a header of
``name:type`` columns. A number is its own id. The id of a word (a zip code, a genre) is a hash of the word.
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
"""The width of an age bucket in years."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Features:
    """The features of users or of items. A feature of a user or item is a list of ids.

    Attributes:
        names: The names of the features.
        lists: For each feature, a list of ids for each user or item.
    """

    names: tuple[str, ...]
    lists: tuple[list[list[int]], ...]


@dataclass(frozen=True)
class MovieLens:
    """Interactions in the order of time. Users and items are numbered by their positions in their files.

    Attributes:
        users: The features of the users. The first feature is the user's id.
        items: The features of the items. The first feature is the item's id.
        train: (n, 2) int64. User and item of all interactions except those of ``test``.
        test: (m, 2) int64. User and item of the last interaction of each user with at least two interactions.
    """

    users: Features
    items: Features
    train: Ids
    test: Ids


def integer(field: str) -> int:
    """Returns the int64 in a field.

    Raises:
        ValueError: The field is not an int64.
    """
    value = int(field)
    if not -(2**63) <= value < 2**63:
        raise ValueError(field)
    return value


def token_id(token: str) -> int:
    """Returns the 64-bit id of a token: the number itself, or the hash of a word, which is equal on every machine."""
    try:
        return integer(token)
    except ValueError:
        return int.from_bytes(hashlib.blake2b(token.encode(), digest_size=8).digest(), "little", signed=True)


def _time(field: str) -> float:
    seconds = float(field)
    if not math.isfinite(seconds):  # such a time has no place in the order
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
"""The column in the file and the function that turns a field into ids, by feature. An empty field has no ids."""

ITEM_FEATURES: dict[str, tuple[str, ToIds]] = {
    "item_id": ("item_id", _own_id),
    "year": ("release_year", _tokens),
    "genres": ("class", _tokens),
}


def load(folder: Path) -> MovieLens:
    """Reads the three files and separates the last interaction of each user for the test.

    Raises:
        DataError: A file is missing or damaged, lacks a column, or has a bad line. The message names the file and the
            line.
    """
    users, user_places = _features(_find(folder, "user"), USER_FEATURES)
    items, item_places = _features(_find(folder, "item"), ITEM_FEATURES)
    path = _find(folder, "inter")
    parsers = {"user_id": _place_in(user_places), "item_id": _place_in(item_places), "timestamp": _time}
    rows = [values for _, values in _rows(path, parsers)]
    # sorted() keeps the order of the file if a user rated several items in the same second.
    ordered = np.array([row[:2] for row in sorted(rows, key=lambda row: row[2])], np.int64)
    train, test = leave_last_out(ordered)
    if not len(test):
        raise DataError(f"{path}: no user has two interactions, one to train on and one to test")
    return MovieLens(users, items, train, test)


def leave_last_out(interactions: Ids) -> tuple[Ids, Ids]:
    """Splits (n, 2) interactions in the order of time into training and test interactions.

    The test interactions are the last interactions of the users with at least two interactions.
    """
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
    raise DataError(f"{folder}: there is neither {paths[0].name} nor {paths[1].name}")


def _lines(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for line in file:
                yield line.rstrip("\r\n")
    except OSError as error:  # gzip.BadGzipFile is an OSError
        raise DataError(f"{path}: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8: {error.reason}") from error


def _rows(path: Path, parsers: Mapping[str, Callable[[str], object]]) -> Iterator[tuple[int, list[Any]]]:
    """Yields (line number, values of the columns in ``parsers``) of every line below the header."""
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
                    f"{path}, line {number}, column {name}: {fields[place]!r} is not a 64-bit number"
                ) from None
            except KeyError as error:
                raise DataError(f"{path}, line {number}, column {name}: {error.args[0]}") from None
        yield number, values
    if number == 1:
        raise DataError(f"{path}: there is no row below the header")


def _features(path: Path, columns: dict[str, tuple[str, ToIds]]) -> tuple[Features, dict[int, int]]:
    """Returns the features, and the position in the file of each id of the first feature."""
    lists: tuple[list[list[int]], ...] = tuple([] for _ in columns)
    places: dict[int, int] = {}
    for number, row in _rows(path, dict(columns.values())):
        for ids, of_feature in zip(row, lists, strict=True):
            of_feature.append(ids)
        if row[0][0] in places:
            raise DataError(f"{path}, line {number}: id {row[0][0]} occurs for the second time")
        places[row[0][0]] = len(places)
    return Features(tuple(columns), lists), places


def _place_in(places: dict[int, int]) -> Callable[[str], int]:
    def place(field: str) -> int:
        try:
            return places[integer(field)]
        except KeyError:
            raise KeyError(f"id {field} is not in the file of features") from None

    return place
