"""What several servers have to agree on: which set they are, in which epoch, and which saves they all have."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.protocol import ServerSetError

SLOTS = 5040
"""The number of slots among which ids are distributed by a hash. It is divisible by 1 to 10."""


@dataclass(frozen=True)
class Begin:
    """The beginning of an epoch on some servers of a set.

    Args:
        set: The identity of the set.
        epoch: The number of the epoch.
        save: The save that the epoch begins with. It has no name if the epoch begins without rows.
        members: For each server, its number in the set.
        slots: For each slot, the number of the server that stores its ids.
        pending: The indices of the servers that have to begin, in the order in which they begin.
        exact: See ``LoadRequest`` in recstore.proto.
    """

    set: str
    epoch: int
    save: pb.Saved
    members: tuple[int, ...]
    slots: tuple[int, ...]
    pending: tuple[int, ...]
    exact: bool = True

    @property
    def label(self) -> str:
        """The name of the epoch in calls."""
        return f"{self.set}/{self.epoch}"


def new_slots(servers: int) -> tuple[int, ...]:
    """Returns a map of slots to the numbers of so many servers, with equal shares."""
    return tuple(slot % servers for slot in range(SLOTS))


def to_resume(addresses: Sequence[str], states: Sequence[pb.DescribeReply]) -> Begin:
    """Returns how all servers get into one epoch, if no acknowledged write is lost that is not lost on all of them.

    Nothing is pending if all servers are in one epoch. New servers become a set. Servers that were all started again
    begin an epoch with the newest save that all of them have. A server that has not been in the last epoch, in which
    nothing was written yet, follows.

    Args:
        addresses: The address of each server.
        states: The state of each server.

    Raises:
        ServerSetError: The servers are in different states.
    """
    _check_one_set(addresses, states)
    known = [state for state in states if state.set]
    top = max(state.epoch for state in states)
    live = [state for state in states if state.live and state.epoch == top]
    if live:
        epoch, save = top, live[0].at
        if len(live) < len(states) and top == 1 and any(state.tables for state in live):
            raise _different(addresses, states)
        fit = all(
            state in live or (not state.live and state.epoch < top and (state.set or top == 1) and _fits(state, save))
            for state in states
        )
    else:
        epoch = top + 1
        save = max((state.at for state in states), key=lambda at: (at.number, at.id, at.name))
        fit = all(
            not state.live and state.epoch == top and (_fits(state, save) or len(states) == 1) for state in states
        )
    if not fit:
        raise _different(addresses, states)
    pending = [index for index, state in enumerate(states) if not (state.live and state.epoch == top)]
    slots = tuple(known[0].slots) if known else new_slots(len(states))
    name = known[0].set if known else uuid.uuid4().hex
    return Begin(name, epoch, save, *_numbers(addresses, states, pending, slots))


def to_load(addresses: Sequence[str], states: Sequence[pb.DescribeReply], name: str | None, exact: bool) -> Begin:
    """Returns how all servers begin an epoch with a save.

    Args:
        addresses: The address of each server.
        states: The state of each server.
        name: The name of the save. None: the epoch begins without rows.
        exact: See ``LoadRequest`` in recstore.proto.

    Raises:
        FileNotFoundError: A server does not have this save.
        ServerSetError: The servers are not one set.
    """
    _check_one_set(addresses, states)
    known = [state for state in states if state.set]
    save = pb.Saved() if name is None else _save_of(addresses, states, name)
    slots = tuple(known[0].slots) if known else new_slots(len(states))
    identity = known[0].set if known else uuid.uuid4().hex
    epoch = max(state.epoch for state in states) + 1
    return Begin(identity, epoch, save, *_numbers(addresses, states, range(len(states)), slots), exact=exact)


def to_reshard(
    addresses: Sequence[str],
    states: Sequence[pb.DescribeReply],
    sources: Sequence[str],
    of_sources: Sequence[pb.DescribeReply],
    name: str,
) -> tuple[pb.Saved, Begin]:
    """Returns how servers begin an epoch with a save of other servers, whose rows are distributed over them anew.

    Args:
        addresses: The address of each server that begins.
        states: The state of each server that begins. It belongs to no set, or to the set of the sources.
        sources: The address of each server that has the save.
        of_sources: The state of each server that has the save.
        name: The name of the save.

    Returns:
        The save of the sources, and the beginning.

    Raises:
        FileNotFoundError: A source does not have this save.
        ServerSetError: A server belongs to another set.
    """
    _check_one_set(sources, of_sources)
    save = _save_of(sources, of_sources, name)
    identity = of_sources[0].set
    for address, state in zip(addresses, states, strict=True):
        if state.set not in ("", identity):
            raise ServerSetError(
                f"the server {address} belongs to another set than {', '.join(sources)}: name servers that are empty, "
                "or of the same set"
            )
    everyone = (*states, *of_sources)
    number = max((saved.number for state in everyone for saved in (*state.saves, *state.prepared)), default=0) + 1
    if not any(state.set for state in states):
        identity = uuid.uuid4().hex
    everywhere = tuple(range(len(states)))
    new = pb.Saved(name=name, id=uuid.uuid4().hex, number=number)
    epoch = max(state.epoch for state in everyone) + 1
    return save, Begin(identity, epoch, new, everywhere, new_slots(len(states)), everywhere)


def complete_saves(states: Sequence[pb.DescribeReply]) -> list[pb.Saved]:
    """Returns the saves that count on a server and that all servers have, in the order in which they were made."""
    everywhere = set.intersection(*({saved.id for saved in (*s.saves, *s.prepared)} for s in states))
    counts = {saved.id: saved for state in states for saved in state.saves if saved.id in everywhere}
    return sorted(counts.values(), key=lambda saved: (saved.number, saved.id))


def summary(addresses: Sequence[str], states: Sequence[pb.DescribeReply]) -> str:
    """Says for each server what its state is."""
    return "; ".join(f"{address} {state_of(state)}" for address, state in zip(addresses, states, strict=True))


def state_of(state: pb.DescribeReply) -> str:
    """Says what the state of a server is: "is in epoch 3"."""
    if not state.set:
        return "is empty" if not state.at.name else f"is in no set and has the save {state.at.name!r}"
    if state.live:
        return f"is in epoch {state.epoch}"
    rows = f"from the save {state.at.name!r}" if state.at.name else "without rows"
    return f"was killed in epoch {state.epoch} and started again {rows}"


def _check_one_set(addresses: Sequence[str], states: Sequence[pb.DescribeReply]) -> None:
    known = [state for state in states if state.set]
    if len({state.set for state in known}) > 1:
        sets = ", ".join(f"{a} of {s.set[:8] or 'none'}" for a, s in zip(addresses, states, strict=True))
        raise ServerSetError(f"the servers belong to different sets: {sets}; name the servers of one set")
    if known and known[0].members != len(states):
        raise ServerSetError(
            f"the set of the server {addresses[[s.set for s in states].index(known[0].set)]} has {known[0].members} "
            f"servers, and {len(states)} are named: {', '.join(addresses)}; name all servers of the set"
        )
    if len({state.member for state in known}) < len(known):
        raise ServerSetError(f"two of the addresses are of the same server: {', '.join(addresses)}")


def _different(addresses: Sequence[str], states: Sequence[pb.DescribeReply]) -> ServerSetError:
    saves, named = complete_saves(states), ",".join(addresses)
    if saves:
        mend = f"brings all of them to their newest complete save: recstore servers restore {saves[-1].name} {named}"
    else:
        mend = f"lets all of them begin without rows, because there is no complete save: recstore servers reset {named}"
    return ServerSetError(f"the servers are in different states: {summary(addresses, states)}. This command {mend}")


def _fits(state: pb.DescribeReply, save: pb.Saved) -> bool:
    """Returns whether a server that is in no epoch can begin with a save without losing another save."""
    if not save.name:
        return not state.at.name
    return bool(save.id) and any(saved.id == save.id for saved in (state.at, *state.saves, *state.prepared))


def _save_of(addresses: Sequence[str], states: Sequence[pb.DescribeReply], name: str) -> pb.Saved:
    found = [saved for saved in complete_saves(states) if saved.name == name]
    if found:
        return found[-1]
    if len(states) == 1:  # one server loads any checkpoint: its own without a manifest, or that of a model
        return pb.Saved(name=name)
    has = [any(saved.name == name for saved in (*state.saves, *state.prepared)) for state in states]
    complete = ", ".join(repr(saved.name) for saved in complete_saves(states)) or "none"
    if all(has):
        raise FileNotFoundError(
            f"the servers have different saves of the name {name!r}: {', '.join(addresses)}; the complete saves are: "
            f"{complete}"
        )
    lacking = addresses[has.index(False)]
    raise FileNotFoundError(f"server {lacking} has no save {name!r}; the complete saves are: {complete}")


def _numbers(
    addresses: Sequence[str], states: Sequence[pb.DescribeReply], pending: Sequence[int], slots: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns the number of each server, the slots, and the pending servers in the order of their numbers.

    All clients compute the same numbers for servers that are in no set, in whichever order they name the servers.
    """
    taken = {state.member for state in states if state.set}
    free = (number for number in range(len(states)) if number not in taken)
    numbers = [state.member for state in states]
    for index in sorted(range(len(states)), key=lambda index: addresses[index]):
        if not states[index].set:
            numbers[index] = next(free)
    return tuple(numbers), slots, tuple(sorted(pending, key=lambda index: numbers[index]))
