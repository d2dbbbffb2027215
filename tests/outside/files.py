"""Puts hostile names into the documents of files, and loads the files.

A document is found by its file, and each of its values and keys is changed. A new field
is therefore fuzzed as soon as the files have it. Checksums are computed anew, as those
who write such a file would.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import shutil
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import safetensors
import safetensors.torch
import torch
import xxhash
from torch import Tensor

from tests.formats import fixed
from tests.outside.fields import changed_document, places, renamed
from tests.outside.names import HostileNames
from tests.outside.sandbox import MARKED_WEIGHT, Sandbox
from tests.redis_server import RedisServer
from tests.serving.publish.test_publisher import change, publish, trained
from torchrec_recstore.checkpoint import compact_checkpoint
from torchrec_recstore.checkpoint.info import METADATA, read_chain
from torchrec_recstore.checkpoint.reader import load_rows
from torchrec_recstore.inference import DeltaPublisher, Follower, read_delta
from torchrec_recstore.store import Table
from torchrec_recstore_service.server.data_directory import DataDirectory
from torchrec_recstore_service.server.native import CallCounts
from torchrec_recstore_service.server.server import ParameterServer
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_serving.export import verification

_NO_CHECKSUM = "0" * 32
_REFUSALS = (
    ValueError,
    OSError,
    TypeError,
    KeyError,
    torch.jit.Error,
    safetensors.SafetensorError,
)


class Case(ABC):
    """Files that others may have written, and the functions that load them.

    Args:
        data: The directory of the files, which exists and is empty.
    """

    readable: ClassVar[frozenset[str]] = frozenset()
    """The names of files that a load may read wherever they are."""
    directories: ClassVar[tuple[str, ...]] = ()
    """The names of directories that the directory of the files has."""

    def __init__(self, data: Path) -> None:
        self.data = data

    @abstractmethod
    def prepare(self) -> None:
        """Writes the files."""

    def restore(self) -> None:
        """Writes the files as they were, after a round."""
        for entry in self.data.iterdir():
            (
                shutil.rmtree(entry)
                if entry.is_dir() and not entry.is_symlink()
                else entry.unlink()
            )
        self.prepare()

    @abstractmethod
    def documents(self) -> Sequence[str]:
        """Returns the names of the documents."""

    @abstractmethod
    def read(self, name: str) -> Any:
        """Returns a document as JSON."""

    @abstractmethod
    def write(self, name: str, document: Any) -> None:
        """Replaces a document, with its checksum."""

    @abstractmethod
    def load(self) -> Iterable[Tensor]:
        """Loads the files, and does what else uses their names.

        Returns the rows that were read.
        """


class JsonCase(Case):
    """Files of which some are JSON documents."""

    def documents(self) -> Sequence[str]:
        """See :meth:`Case.documents`."""
        return [
            str(path.relative_to(self.data))
            for path in sorted(self.data.rglob("*.json"))
        ]

    def read(self, name: str) -> Any:
        """See :meth:`Case.read`."""
        return json.loads((self.data / name).read_bytes())

    def write(self, name: str, document: Any) -> None:
        """See :meth:`Case.write`."""
        path = self.data / name
        if path.name == METADATA and isinstance(document, dict):
            path.write_text(with_checksum(document))
        else:
            path.write_text(json.dumps(document))


class Checkpoints(JsonCase):
    """Checkpoints of a model, and deltas of them.

    A delta names its base by a path, so the metadata of any directory may be read. It
    must have the checksum that the delta names, before another file there is read.
    """

    readable = frozenset({METADATA})
    directories = ("full", "delta")
    _NAMES = ("full", "delta", "second_delta", "row_wise", "column_wise")

    def prepare(self) -> None:
        """See :meth:`Case.prepare`."""
        for name in self._NAMES:
            shutil.copytree(fixed.CHECKPOINTS / name, self.data / name)

    def __init__(self, data: Path) -> None:
        super().__init__(data)
        self._changed = "full"

    def write(self, name: str, document: Any) -> None:
        """See :meth:`Case.write`."""
        self._changed = Path(name).parts[0]
        super().write(name, document)

    def load(self) -> Iterable[Tensor]:
        """Loads the changed checkpoint and a delta of it, folds them, and replaces
        them.
        """
        names = [self._changed]
        if self._changed in ("full", "delta"):
            names.append("second_delta")
        for name in names:
            yield from attempt(lambda name=name: self._loaded(name))
            yield from attempt(lambda name=name: self._compacted(name))
        for name in names:
            yield from attempt(lambda name=name: self._replaced(name))

    def _loaded(self, name: str) -> list[Tensor]:
        chain = read_chain(self.data / name)
        return [rows for table in chain[-1].tables for rows in _rows_of(chain, table)]

    def _compacted(self, name: str) -> list[Tensor]:
        compact_checkpoint(self.data / name, self.data / f"{name}-folded")
        return self._loaded(f"{name}-folded")

    def _replaced(self, name: str) -> list[Tensor]:
        tables = HostedTables()
        try:
            tables.save(self.data / name, overwrite=True)
        finally:
            tables.close()
        return []


class DataDirectories(JsonCase):
    """The data directory of a server, which someone has copied there."""

    directories = ("stopped-0", ".prepared-first")

    def prepare(self) -> None:
        """See :meth:`Case.prepare`."""
        shutil.copytree(fixed.CHECKPOINTS / "server", self.data, dirs_exist_ok=True)
        # The tables of the fixed files need a cold store; a server without one has
        # those of this save.
        starts = {"pair": "first", "starts": ["0" * 32]}
        (self.data / "pair.json").write_text(json.dumps(starts))
        shutil.copytree(self.data / "stopped-0", self.data / ".prepared-first")
        self._name_save(self.data / "stopped-0", "stopped-0")
        self._name_save(self.data / ".prepared-first", "monday")

    def _name_save(self, path: Path, name: str) -> None:
        document = json.loads((path / METADATA).read_bytes())
        manifest = {"name": name, "id": "first", "number": 1}
        state = document["training_state"]
        state.setdefault("dict", state.get("dict", []))
        document["training_state"] = {**state, "save": manifest}
        (path / METADATA).write_text(with_checksum(document))

    def load(self) -> Iterable[Tensor]:
        """Starts a server with the files, and stops it."""
        yield from attempt(self._served)

    def _served(self) -> list[Tensor]:
        tables = HostedTables()
        directory = DataDirectory(self.data)
        try:
            for saved in directory.prepared:
                directory.publish(saved.id)  # type: ignore[arg-type]
            server = ParameterServer(tables, directory, CallCounts())
            server._set.begin()
            server.save_to_stop()
            rows = []
            for name in tables.specs():
                rows.append(tables.pull(name, tables.ids(name)))
            return rows
        finally:
            tables.close()
            directory.close()


class PublishedDirectory(JsonCase):
    """A directory of publications, as a publisher has written it."""

    def __init__(self, data: Path) -> None:
        super().__init__(data)
        self._original = data.parents[4] / "original"  # beside the sandbox

    def prepare(self) -> None:
        """See :meth:`Case.prepare`."""
        if not self._original.exists():
            publish_twice(str(self._original))
        shutil.copytree(self._original, self.data, dirs_exist_ok=True)

    def load(self) -> Iterable[Tensor]:
        """Follows the publications, and begins to publish to the same place."""
        yield from attempt(lambda: followed(str(self.data)))
        yield from attempt(lambda: publish_twice(str(self.data)))


class PublishedStream(Case):
    """Publications on a stream of Redis.

    Args:
        data: The directory, which has no files.
        server: The server.
    """

    def __init__(self, data: Path, server: RedisServer) -> None:
        super().__init__(data)
        self._server = server
        self._place = f"{server.url}/0?stream=names"
        self._dumped: dict[bytes, bytes] = {}

    def prepare(self) -> None:
        """See :meth:`Case.prepare`."""
        with self._server.client() as client:
            client.flushall()
            if not self._dumped:
                publish_twice(self._place)
                self._dumped = {key: client.dump(key) for key in client.scan_iter()}
                return
            for key, value in self._dumped.items():
                client.restore(key, 0, value)

    def documents(self) -> Sequence[str]:
        """See :meth:`Case.documents`."""
        return ["latest", "1-0", "2-0"]

    def read(self, name: str) -> Any:
        """See :meth:`Case.read`."""
        with self._server.client() as client:
            if name == "latest":
                return json.loads(client.get("names:latest"))
            entry = client.xrange("names", name, name)[0][1]
            return json.loads(entry[b"publication"])

    def write(self, name: str, document: Any) -> None:
        """See :meth:`Case.write`."""
        with self._server.client() as client:
            if name == "latest":
                client.set("names:latest", json.dumps(document))
                return
            entries = client.xrange("names", "-", "+")
            client.delete("names")
            for entry_id, entry in entries:
                if entry_id.decode() == name:
                    entry[b"publication"] = json.dumps(document).encode()
                client.xadd("names", entry, id=entry_id)

    def load(self) -> Iterable[Tensor]:
        """Follows the publications."""
        yield from attempt(lambda: followed(self._place))


class Deltas(Case):
    """The delta of an export, whose tensors have the names of tables."""

    def __init__(self, data: Path) -> None:
        super().__init__(data)
        self._served = torch.jit.load(fixed.EXPORTS / "sorted" / "model.pt")

    def prepare(self) -> None:
        """See :meth:`Case.prepare`."""
        shutil.copytree(fixed.EXPORTS / "sorted", self.data, dirs_exist_ok=True)

    def documents(self) -> Sequence[str]:
        """See :meth:`Case.documents`."""
        return ["names", "strings", "header"]

    def read(self, name: str) -> Any:
        """Returns the names of the tensors, those that hold text, or the header of
        safetensors.
        """
        path = self.data / "model.delta"
        tensors = safetensors.torch.load_file(path)
        if name == "names":
            return list(tensors)
        if name == "strings":
            return {
                key: bytes(tensors[key].tolist()).decode()
                for key in ("base", "version")
            }
        with safetensors.safe_open(path, "pt") as file:
            return file.metadata() or {"": ""}

    def write(self, name: str, document: Any) -> None:
        """See :meth:`Case.write`."""
        path = self.data / "model.delta"
        tensors = safetensors.torch.load_file(path)
        with safetensors.safe_open(path, "pt") as file:
            header = file.metadata()
        if name == "names":
            tensors = dict(zip(map(str, document), tensors.values(), strict=False))
        elif name == "strings":
            for key, text in document.items():
                tensors[key] = torch.tensor(list(text.encode()), dtype=torch.uint8)
        else:
            header = document
        if "checksum" in tensors:
            checksum_of = verification.scripted_function(verification.checksum_of)
            tensors["checksum"] = checksum_of(tensors)
        safetensors.torch.save_file(tensors, path, metadata=header)

    def load(self) -> Iterable[Tensor]:
        """Applies the delta to the export."""
        yield from attempt(self._applied)

    def _applied(self) -> list[Tensor]:
        served = copy.deepcopy(self._served)  # a copy is compiled already
        served.apply_delta(read_delta(self.data / "model.delta"))
        return [served.recstore_rows(name).float() for name in served.recstore_tables()]


class FileFuzzer:
    """Changes one document after the other, and checks the victims after each load.

    Args:
        sandbox: The sandbox.
        chosen: The source of random numbers.
        case: The files, in the sandbox.
    """

    def __init__(self, sandbox: Sandbox, chosen: random.Random, case: Case) -> None:
        self._sandbox = sandbox
        self._random = chosen
        self._case = case
        self._names = HostileNames(chosen, sandbox.root, case.directories)
        self.results: Counter[str] = Counter()
        """The number of rounds, and of those in which something was read."""

    def rounds(self, number: int) -> None:
        """Makes rounds. The files must load before the first of them.

        Raises:
            AssertionError: A file of a victim was read or changed.
        """
        assert list(self._case.load()), "the files do not load as they are"
        for turn in range(number):
            self._case.restore()
            documents = self._case.documents()
            name = documents[turn % len(documents)]
            document = self._case.read(name)
            hostile = self._random.choice((self._names.unicode, self._names.escape))()
            changed = changed_document(document, self._random, hostile)
            self._checked(
                f"{name} with {hostile!r}",
                lambda: self._case.write(name, changed),  # noqa: B023
            )

    def renamed_everywhere(self) -> None:
        """Replaces each string by one of the names that lead to the victims.

        Documents of the same kind have most strings in common. Each string is replaced
        in one of the documents that have it.
        """
        self._case.restore()
        documents = {name: self._case.read(name) for name in self._case.documents()}
        owners: dict[str, list[str]] = {}
        for name, document in documents.items():
            for text in _texts(document):
                owners.setdefault(text, []).append(name)
        escapes = self._names.escapes()
        self._random.shuffle(escapes)
        every_escape = itertools.cycle(escapes)
        for text in sorted(owners):
            name = self._random.choice(owners[text])
            hostile = next(every_escape)
            self._case.restore()
            changed = renamed(documents[name], text, hostile)
            where = f"{name} with {hostile!r} for {text!r}"
            self._checked(where, lambda: self._case.write(name, changed))  # noqa: B023

    def _checked(self, where: str, change: Callable[[], None]) -> None:
        try:
            change()
        except (ValueError, TypeError, AttributeError, OverflowError):
            self.results["cannot be written"] += 1
            return
        self.results["rounds"] += 1
        try:
            with self._sandbox.watched(self._case.readable), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for rows in self._case.load():
                    self.results["reads"] += 1
                    assert not bool((rows == MARKED_WEIGHT).any()), (
                        "marked rows were read"
                    )
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from error


def with_checksum(document: dict[str, Any]) -> str:
    """Returns the metadata of a checkpoint as it is in its file, with a checksum that
    fits.
    """
    document = {key: value for key, value in document.items() if key != "checksum"}
    document["checksum"] = _NO_CHECKSUM
    text = json.dumps(document, indent=1) + "\n"
    checksum = xxhash.xxh3_128_hexdigest(text.encode())
    begin, _, end = text.rpartition(_NO_CHECKSUM)
    return begin + checksum + end


def attempt(load: Callable[[], list[Tensor] | None]) -> list[Tensor]:
    """Returns what was loaded. Nothing, if the files were refused."""
    try:
        return load() or []
    except _REFUSALS:
        return []


def publish_twice(place: str) -> None:
    """Publishes a model and a change of it.

    The model is a small one: the documents have the same fields for all models.
    """
    model = trained()
    with DeltaPublisher(model, place, every_s=0, full_every_s=1e6) as publisher:
        publish(publisher)
        change(model, 0)
        publish(publisher)


def followed(place: str) -> list[Tensor]:
    """Returns the rows of the newest publication."""
    with Follower(place) as follower:
        if not follower.poll():
            return []
        model = follower.model
        return [model.recstore_rows(name).float() for name in model.recstore_tables()]


def _rows_of(chain: Sequence[Any], name: str) -> list[Tensor]:
    saved = chain[-1].tables[name]
    dtype = getattr(torch, saved.dtype)
    table = Table(saved.dim, dtype, saved.optimizer, saved.options, name=name)
    try:
        load_rows(table, name, chain)
        return [table.read_rows(table.ids())["weight"].float()]
    finally:
        table.close()


def _texts(document: Any) -> set[str]:
    texts: set[str] = set()
    for place in places(document):
        texts.update(part for part in place if isinstance(part, str))
        value = document
        for part in place:
            value = value[part]
        if isinstance(value, str):
            texts.add(value)
    return texts
