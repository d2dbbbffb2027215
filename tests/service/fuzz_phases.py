"""Phases of saves and loads in any order, for fuzz.py, and what the table "kept" has to
have after each of them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from torchrec_recstore.optim import Adagrad
from torchrec_recstore.options import TableOptions
from torchrec_recstore_service.server.data_directory import DataDirectory
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.table_spec import TableSpec

KEPT = "kept"
DIM = 4
IDS = torch.arange(-500, 500)
_NAMES = ("monday", "tuesday", "wednesday")

Call = Callable[[str, list[bytes]], tuple[bool, list[bytes]]]
"""A function that makes a call.

It returns whether the call has succeeded, and its replies.
"""


class Phases:
    """Makes phases of saves and loads.

    All weights of the table "kept" are one number, which a save keeps.

    Args:
        chosen: The source of random numbers.
        tables: The tables of the server.
        directory: The data directory of the server.
    """

    def __init__(
        self, chosen: random.Random, tables: HostedTables, directory: DataDirectory
    ) -> None:
        self._random = chosen
        self._tables = tables
        self._directory = directory
        self._value = 0.0
        self._saved: dict[str, float] = {}  # by the id of a save
        self._known: list[pb.Saved] = []  # saves that were begun
        self._tokens = ["a", "b"]
        self._count = 0
        self.done: Counter[str] = Counter()
        """The number of phases that have succeeded."""

    @property
    def label(self) -> str:
        """The label of the run of the server."""
        member = self._directory.membership
        assert member is not None
        return member.run_label

    def step(self, call: Call) -> None:
        """Makes a phase, or several of them in their order, and checks the rows after
        each.
        """
        how = self._random.choice(
            (
                self._save,
                self._save,
                self._save_in_order,
                self._load,
                self._load,
                self._reshard,
            )
        )
        how(call)
        if self._random.random() < 0.2:
            self._count += 1
            self._value = float(self._count)
            self._tables.push(KEPT, IDS, torch.full((len(IDS), DIM), self._value))

    def check(self) -> None:
        """Checks the rows of the table "kept"."""
        assert self._tables.pull(KEPT, IDS).unique().tolist() == [self._value]
        assert torch.equal(self._tables.ids(KEPT), IDS)

    def _save(self, call: Call) -> None:
        phase = self._random.choice(("RESERVE", "PREPARE", "COMMIT", "ABORT"))
        self._phase_of_save(
            call, phase, self._some() if phase != "RESERVE" else self._new()
        )

    def _save_in_order(self, call: Call) -> None:
        save = self._new()
        for phase in ("RESERVE", "PREPARE", "COMMIT"):
            if self._random.random() < 0.95:
                self._phase_of_save(call, phase, save)

    def _phase_of_save(self, call: Call, phase: str, save: pb.Saved) -> None:
        request = pb.SaveRequest(
            phase=pb.SaveRequest.Phase.Value(phase),
            epoch=self.label if self._random.random() < 0.95 else f"{self.label}1",
            save=save,
            overwrite=True,
            servers=["127.0.0.1:1"],
            forget=self._random.choices(_NAMES, k=self._random.randrange(2)),
        )
        before = {saved.id for saved in self._directory.prepared}
        good, replies = call("Save", [request.SerializeToString()])
        if good:
            self.done[f"save {phase}"] += 1
            if phase == "RESERVE":
                save.number = pb.SaveReply.FromString(replies[0]).number
            if phase == "PREPARE" and save.id not in before:
                self._saved.setdefault(save.id, self._value)
        self.check()

    def _load(self, call: Call) -> None:
        token = self._random.choice(self._tokens)
        save = pb.Saved() if self._random.random() < 0.1 else self._some()
        exact = self._random.random() < 0.9
        phases = self._random.choice(
            (["PREPARE", "COMMIT"], ["PREPARE"], ["COMMIT"], ["ABORT"])
        )
        for phase in phases:
            if self._random.random() < 0.1:
                save = self._some()
            self._phase_of_load(call, phase, token, save, exact)

    def _phase_of_load(
        self,
        call: Call,
        phase: str,
        token: str,
        save: pb.Saved,
        exact: bool = True,
        parts: int = 0,
    ) -> bool:
        member = self._directory.membership
        assert member is not None
        epoch = member.epoch + self._random.choice((0, 1, 1, 1, 1, 1, 2))
        request = pb.LoadRequest(
            phase=pb.LoadRequest.Phase.Value(phase),
            token=token,
            save=save,
            exact=exact,
            set=member.set,
            members=1,
            epoch=epoch,
            slots=member.slots,
            parts=parts,
        )
        good, _ = call("Load", [request.SerializeToString()])
        if good:
            self.done[f"load {phase}"] += 1
        if good and phase == "COMMIT" and epoch > member.epoch:
            self._tokens = [
                self._random.choice(self._tokens),
                f"{self._random.randrange(2**32)}",
            ]
            if save.name:
                self._value = self._saved[save.id]
            else:
                self._make()
        self.check()
        return good

    def _make(self) -> None:
        """Makes the table again after an epoch has begun without rows."""
        assert not self._tables.specs()
        self._tables.create(
            KEPT, TableSpec(DIM, torch.float32, Adagrad(lr=0.1), TableOptions())
        )
        self._tables.push(KEPT, IDS, torch.full((len(IDS), DIM), self._value))

    def _reshard(self, call: Call) -> None:
        """Copies a save of this server to itself, as if it were one of other servers,
        and loads it.
        """
        source, copy = self._some(), self._new()
        if source.id not in self._saved:
            return

        def read(file: str = "") -> Any:
            good, replies = call(
                "ReadFile",
                [pb.ReadFileRequest(save=source, file=file).SerializeToString()],
            )
            return pb.ReadFileReply.FromString(replies[0]) if good else None

        files = read()
        for file in () if files is None else files.files:
            content = read(file).content
            if self._random.random() < 0.05:
                content = content[: self._random.randrange(len(content) + 1)]
            call(
                "WriteFile",
                [
                    pb.WriteFileRequest(
                        id=copy.id, file=file, content=content
                    ).SerializeToString()
                ],
            )
            self.check()
        copy.number = self._random.randrange(1, 100)
        if self._phase_of_load(call, "RESHARD", copy.id, copy, parts=1):
            self._saved[copy.id] = self._saved[source.id]
        for phase in ("PREPARE", "COMMIT"):
            self._phase_of_load(call, phase, copy.id, copy)
        if self._random.random() < 0.5:
            self._phase_of_load(call, "ABORT", copy.id, copy, parts=1)

    def _new(self) -> pb.Saved:
        save = pb.Saved(
            name=self._random.choice(_NAMES), id=f"{self._random.randrange(2**64):x}"
        )
        self._known = [*self._known[-5:], save]
        return save

    def _some(self) -> pb.Saved:
        there = [*self._known, *self._directory.saves, *self._directory.prepared]
        return self._random.choice(there) if there else pb.Saved(name="none", id="1")
