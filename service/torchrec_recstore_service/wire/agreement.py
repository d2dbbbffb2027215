"""What several servers have to agree on: which set they are, in which epoch, and which
saves they all have.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.protocol import ServerSetError

SLOTS = 5040
"""The number of slots among which ids are distributed by a hash.

It is divisible by 1 to 10.
"""


@dataclass(frozen=True)
class Begin:
    """The beginning of an epoch on some servers of a set.

    Args:
        set: The identity of the set.
        epoch: The number of the epoch.
        token: The token of the epoch.
        save: The save that the epoch begins with. It has no name if the epoch begins
            without rows.
        members: For each server, its number in the set.
        slots: For each slot, the number of the server that stores its ids.
        pending: The indices of the servers that have to begin, in the order in which
            they begin.
        waiting: The indices of the servers of the epoch that were stopped, and have to
            be resumed. Default: none.
        exact: See ``LoadRequest`` in recstore.proto.
    """

    set: str
    epoch: int
    token: str
    save: pb.Saved
    members: tuple[int, ...]
    slots: tuple[int, ...]
    pending: tuple[int, ...]
    waiting: tuple[int, ...] = ()
    exact: bool = True

    @property
    def label(self) -> str:
        """The label of the epoch."""
        return epoch_label(self.set, self.epoch, self.token)


def epoch_label(identity: str, number: int, token: str) -> str:
    """Returns the label of an epoch.

    An epoch of version 1 of the protocol has no token.
    """
    return f"{identity}/{number}/{token}" if token else f"{identity}/{number}"


def number_of(label: str) -> int:
    """Returns the number of the epoch with this label."""
    return int(label.split("/")[1])


def first_run(token: str, member: int, members: int) -> str:
    """Returns the name of the first run of a server in an epoch.

    Each server of a set has another one. A call that reaches another server of the set,
    because a port or a name leads there, is therefore refused.
    """
    return token if members == 1 else f"{token}-{member}"


def same_runs(run: str, token: str, member: int) -> set[str]:
    """Returns all names of a run of a server.

    Servers of earlier releases call the first run by the token.
    """
    first = {token, first_run(token, member, members=2)}
    return first if run in first else {run}


def run_label(label: str, run: str) -> str:
    """Returns the name of a run in calls. ``label`` is the label of its epoch."""
    return f"{label}/{run}"


def label_of(state: pb.DescribeReply) -> str:
    """Returns the label of the last epoch of a server."""
    return epoch_label(state.set, state.epoch, state.token)


def run_of(state: pb.DescribeReply) -> str:
    """Returns the last run of a server that is in a set."""
    run: str = state.runs[state.member]
    return run


def new_slots(servers: int) -> tuple[int, ...]:
    """Returns a map of slots to the numbers of so many servers, with equal shares."""
    return tuple(slot % servers for slot in range(SLOTS))


def to_resume(addresses: Sequence[str], states: Sequence[pb.DescribeReply]) -> Begin:
    """Returns how all servers get into one epoch, if no acknowledged write is lost that
    is not lost on all of them.

    Nothing is pending if all servers are in one epoch, also if some of them wait to be
    resumed. New servers become a set. Servers that were all killed begin an epoch with
    the newest save that all of them have. A server that has not been in the last epoch,
    in which nothing was written yet, follows.

    Args:
        addresses: The address of each server.
        states: The state of each server.

    Raises:
        ServerSetError: The servers are in different states.
    """
    _check_one_set(addresses, states)
    known = [state for state in states if state.set]
    top = max(state.epoch for state in states)
    there = [state for state in states if _is_there(state) and state.epoch == top]
    if there:
        epoch, token, save = top, there[0].token, there[0].at
        if (
            len(there) < len(states)
            and top == 1
            and any(state.tables for state in there)
        ):
            raise _different(addresses, states)
        fit = all(
            state.token == token and not _is_rolled_back(state, there)
            for state in there
        ) and all(
            state in there
            or (
                not _is_there(state)
                and state.epoch < top
                and (state.set or top == 1)
                and _fits(state, save)
            )
            for state in states
        )
    else:
        epoch, token = top + 1, _new_token()
        save = max(
            (state.at for state in states), key=lambda at: (at.number, at.id, at.name)
        )
        fit = all(
            not _is_there(state)
            and state.epoch == top
            and (_fits(state, save) or len(states) == 1)
            for state in states
        )
    if not fit:
        raise _different(addresses, states)
    pending = [
        index
        for index, state in enumerate(states)
        if not (_is_there(state) and state.epoch == top)
    ]
    waiting = tuple(index for index, state in enumerate(states) if state.waits)
    slots = tuple(known[0].slots) if known else new_slots(len(states))
    name = known[0].set if known else uuid.uuid4().hex
    return Begin(
        name,
        epoch,
        token,
        save,
        *_numbers(addresses, states, pending, slots),
        waiting=waiting,
    )


def to_load(
    addresses: Sequence[str],
    states: Sequence[pb.DescribeReply],
    name: str | None,
    exact: bool,
) -> Begin:
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
    everyone = range(len(states))
    return Begin(
        identity,
        epoch,
        _new_token(),
        save,
        *_numbers(addresses, states, everyone, slots),
        exact=exact,
    )


def to_reshard(
    addresses: Sequence[str],
    states: Sequence[pb.DescribeReply],
    sources: Sequence[str],
    of_sources: Sequence[pb.DescribeReply],
    name: str,
) -> tuple[pb.Saved, Begin]:
    """Returns how servers begin an epoch with a save of other servers, whose rows are
    distributed over them anew.

    Args:
        addresses: The address of each server that begins.
        states: The state of each server that begins. It belongs to no set, or to the
            set of the sources.
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
                f"the server {address} belongs to another set than"
                f" {', '.join(sources)}: name servers that are empty, or of the"
                " same set"
            )
    everyone = (*states, *of_sources)
    number = (
        max(
            (
                saved.number
                for state in everyone
                for saved in (*state.saves, *state.prepared)
            ),
            default=0,
        )
        + 1
    )
    if not any(state.set for state in states):
        identity = uuid.uuid4().hex
    everywhere = tuple(range(len(states)))
    new = pb.Saved(name=name, id=uuid.uuid4().hex, number=number)
    epoch = max(state.epoch for state in everyone) + 1
    return save, Begin(
        identity,
        epoch,
        _new_token(),
        new,
        everywhere,
        new_slots(len(states)),
        everywhere,
    )


def complete_saves(states: Sequence[pb.DescribeReply]) -> list[pb.Saved]:
    """Returns the saves that count on a server and that all servers have, in the order
    in which they were made.
    """
    everywhere = set.intersection(
        *({saved.id for saved in (*s.saves, *s.prepared)} for s in states)
    )
    counts = {
        saved.id: saved
        for state in states
        for saved in state.saves
        if saved.id in everywhere
    }
    return sorted(counts.values(), key=lambda saved: (saved.number, saved.id))


def summary(addresses: Sequence[str], states: Sequence[pb.DescribeReply]) -> str:
    """Says for each server what its state is."""
    return "; ".join(
        f"{address} {state_of(state, states)}"
        for address, state in zip(addresses, states, strict=True)
    )


def state_of(state: pb.DescribeReply, states: Sequence[pb.DescribeReply] = ()) -> str:
    """Says what the state of a server is: "is in epoch 3".

    Args:
        state: The state of the server.
        states: The states of the servers that it is compared with. Default: none.
    """
    if not state.set:
        return (
            "is empty"
            if not state.at.name
            else f"is in no set and has the save {state.at.name!r}"
        )
    if _is_rolled_back(
        state, [other for other in states if label_of(other) == label_of(state)]
    ):
        return (
            f"has older rows of epoch {state.epoch} than before: its data directory was"
            " rolled back, or is a copy"
        )
    token = (
        f" ({state.token[:8]})"
        if len({s.token for s in states if s.epoch == state.epoch and s.token}) > 1
        else ""
    )
    if state.live:
        return f"is in epoch {state.epoch}{token}"
    if state.waits:
        return f"was stopped in epoch {state.epoch}{token} and started again"
    rows = f"from the save {state.at.name!r}" if state.at.name else "without rows"
    return f"was killed in epoch {state.epoch} and started again {rows}"


def has_lost(state: pb.DescribeReply, label: str, run: str) -> bool:
    """Returns whether a server has lost a run that a client knows, because it began
    again from an older stop.

    Args:
        state: The state of the server.
        label: The label of the epoch of the run.
        run: The run.
    """
    return label_of(state) == label and run not in (
        *state.earlier,
        run_of(state),
        state.next,
    )


def _new_token() -> str:
    return uuid.uuid4().hex


def _is_there(state: pb.DescribeReply) -> bool:
    """Returns whether a server has the rows of its epoch."""
    return bool(state.live or state.waits)


def _is_rolled_back(
    state: pb.DescribeReply, others: Sequence[pb.DescribeReply]
) -> bool:
    """Returns whether a server waits whose last run is not the one that the others in
    its epoch know.

    They may know its next run already, because a client has begun to resume the server.
    """
    if not state.waits:
        return False
    runs = {state.next, *same_runs(run_of(state), state.token, state.member)}
    return any(
        _is_there(other) and other.runs[state.member] not in runs for other in others
    )


def _check_one_set(
    addresses: Sequence[str], states: Sequence[pb.DescribeReply]
) -> None:
    known = [state for state in states if state.set]
    if len({state.set for state in known}) > 1:
        sets = ", ".join(
            f"{a} of {s.set[:8] or 'none'}"
            for a, s in zip(addresses, states, strict=True)
        )
        raise ServerSetError(
            f"the servers belong to different sets: {sets}; name the servers of one set"
        )
    if known and known[0].members != len(states):
        raise ServerSetError(
            "the set of the server"
            f" {addresses[[s.set for s in states].index(known[0].set)]} has"
            f" {known[0].members} servers, and {len(states)} are named:"
            f" {', '.join(addresses)}; name all servers of the set"
        )
    if len({state.member for state in known}) < len(known):
        raise ServerSetError(
            f"two of the addresses are of the same server: {', '.join(addresses)}"
        )


def _different(
    addresses: Sequence[str], states: Sequence[pb.DescribeReply]
) -> ServerSetError:
    saves, named = complete_saves(states), ",".join(addresses)
    if saves:
        mend = (
            "brings all of them to their newest complete save: recstore servers"
            f" restore {saves[-1].name} {named}"
        )
    else:
        mend = (
            "lets all of them begin without rows, because there is no complete save:"
            f" recstore servers reset {named}"
        )
    return ServerSetError(
        f"the servers are in different states: {summary(addresses, states)}. This"
        f" command {mend}"
    )


def _fits(state: pb.DescribeReply, save: pb.Saved) -> bool:
    """Returns whether a server that is in no epoch can begin with a save without losing
    another save.
    """
    if not save.name:
        return not state.at.name
    return bool(save.id) and any(
        saved.id == save.id for saved in (state.at, *state.saves, *state.prepared)
    )


def _save_of(
    addresses: Sequence[str], states: Sequence[pb.DescribeReply], name: str
) -> pb.Saved:
    found = [saved for saved in complete_saves(states) if saved.name == name]
    if found:
        return found[-1]
    # one server loads any checkpoint: its own without a manifest, or that of a model
    if len(states) == 1:
        return pb.Saved(name=name)
    has = [
        any(saved.name == name for saved in (*state.saves, *state.prepared))
        for state in states
    ]
    complete = ", ".join(repr(saved.name) for saved in complete_saves(states)) or "none"
    if all(has):
        raise FileNotFoundError(
            f"the servers have different saves of the name {name!r}:"
            f" {', '.join(addresses)}; the complete saves are: {complete}"
        )
    lacking = addresses[has.index(False)]
    raise FileNotFoundError(
        f"server {lacking} has no save {name!r}; the complete saves are: {complete}"
    )


def _numbers(
    addresses: Sequence[str],
    states: Sequence[pb.DescribeReply],
    pending: Sequence[int],
    slots: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns the number of each server, the slots, and the pending servers in the
    order of their numbers.

    All clients compute the same numbers for servers that are in no set, in whichever
    order they name the servers.
    """
    taken = {state.member for state in states if state.set}
    free = (number for number in range(len(states)) if number not in taken)
    numbers = [state.member for state in states]
    for index in sorted(range(len(states)), key=lambda index: addresses[index]):
        if not states[index].set:
            numbers[index] = next(free)
    return (
        tuple(numbers),
        slots,
        tuple(sorted(pending, key=lambda index: numbers[index])),
    )
