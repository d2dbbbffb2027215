"""How several servers agree on their set, their epoch and their saves."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
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


def epoch_label(set_id: str, number: int, token: str) -> str:
    """Returns the label of an epoch.

    An epoch of version 1 of the protocol has no token.
    """
    return f"{set_id}/{number}/{token}" if token else f"{set_id}/{number}"


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
    names_of_first = {token, first_run(token, member, members=2)}
    if run in names_of_first:
        return names_of_first
    return {run}


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
    last_epoch = max(state.epoch for state in states)
    in_epoch = [state for state in states if _is_in_epoch(state, last_epoch)]
    if in_epoch:
        epoch = last_epoch
        token = in_epoch[0].token
        save = in_epoch[0].at
        fit = _can_join(states, in_epoch, last_epoch)
    else:
        epoch = last_epoch + 1
        token = _new_id()
        save = max((state.at for state in states), key=_age_of)
        fit = _can_begin_together(states, last_epoch, save)
    if not fit:
        raise _different(addresses, states)

    pending = []
    waiting = []
    for index, state in enumerate(states):
        if not _is_in_epoch(state, last_epoch):
            pending.append(index)
        if state.waits:
            waiting.append(index)
    members = _members(addresses, states)
    return Begin(
        set=_set_of(states) or _new_id(),
        epoch=epoch,
        token=token,
        save=save,
        members=members,
        slots=_slots(states),
        pending=_in_order(pending, members),
        waiting=tuple(waiting),
    )


def _can_join(
    states: Sequence[pb.DescribeReply],
    in_epoch: Sequence[pb.DescribeReply],
    last_epoch: int,
) -> bool:
    """Returns whether all servers are in the last epoch, or can follow into it."""
    token = in_epoch[0].token
    save = in_epoch[0].at
    # A new set of servers begins without rows. What was written to some of them since
    # is not on those that follow.
    some_follow = len(in_epoch) < len(states)
    if some_follow and last_epoch == 1 and any(state.tables for state in in_epoch):
        return False
    for state in in_epoch:
        if state.token != token or _is_rolled_back(state, in_epoch):
            return False
    for state in states:
        if state in in_epoch:
            continue
        has_been_before = state.epoch < last_epoch and not _has_rows(state)
        is_known = state.set or last_epoch == 1
        can_follow = has_been_before and is_known and _fits(state, save)
        if not can_follow:
            return False
    return True


def _can_begin_together(
    states: Sequence[pb.DescribeReply],
    last_epoch: int,
    save: pb.Saved,
) -> bool:
    """Returns whether servers that were all killed can begin an epoch with a save."""
    for state in states:
        if _has_rows(state) or state.epoch != last_epoch:
            return False
        if len(states) > 1 and not _fits(state, save):
            return False
    return True


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
    save = pb.Saved() if name is None else _save_of(addresses, states, name)
    members = _members(addresses, states)
    last_epoch = max(state.epoch for state in states)
    return Begin(
        set=_set_of(states) or _new_id(),
        epoch=last_epoch + 1,
        token=_new_id(),
        save=save,
        members=members,
        slots=_slots(states),
        pending=_in_order(range(len(states)), members),
        exact=exact,
    )


def to_reshard(
    addresses: Sequence[str],
    states: Sequence[pb.DescribeReply],
    sources: Sequence[str],
    states_of_sources: Sequence[pb.DescribeReply],
    name: str,
) -> tuple[pb.Saved, Begin]:
    """Returns how servers begin an epoch with a save of other servers, whose rows are
    distributed over them anew.

    Args:
        addresses: The address of each server that begins.
        states: The state of each server that begins. It belongs to no set, or to the
            set of the sources.
        sources: The address of each server that has the save.
        states_of_sources: The state of each server that has the save.
        name: The name of the save.

    Returns:
        The save of the sources, and the beginning.

    Raises:
        FileNotFoundError: A source does not have this save.
        ServerSetError: A server belongs to another set.
    """
    _check_one_set(sources, states_of_sources)
    save = _save_of(sources, states_of_sources, name)
    set_id = states_of_sources[0].set
    for address, state in zip(addresses, states, strict=True):
        if state.set not in ("", set_id):
            listed = ", ".join(sources)
            raise ServerSetError(
                f"the server {address} belongs to another set than {listed}: name"
                " servers that are empty, or of the same set"
            )
    if not any(state.set for state in states):
        set_id = _new_id()

    last_number = 0
    last_epoch = 0
    for state in [*states, *states_of_sources]:
        last_epoch = max(last_epoch, state.epoch)
        for saved in [*state.saves, *state.prepared]:
            last_number = max(last_number, saved.number)

    servers = tuple(range(len(states)))
    token = _new_id()
    new_save = pb.Saved(
        name=name,
        id=_new_id(),
        number=last_number + 1,
    )
    begin = Begin(
        set=set_id,
        epoch=last_epoch + 1,
        token=token,
        save=new_save,
        members=servers,
        slots=new_slots(len(states)),
        pending=servers,
    )
    return save, begin


def complete_saves(states: Sequence[pb.DescribeReply]) -> list[pb.Saved]:
    """Returns the saves that all servers have and that count, in their order."""
    ids_on_all = set.intersection(*map(_ids_of_saves, states))
    saves = {}
    for state in states:
        for saved in state.saves:
            if saved.id in ids_on_all:
                saves[saved.id] = saved
    return sorted(saves.values(), key=lambda saved: (saved.number, saved.id))


def _ids_of_saves(state: pb.DescribeReply) -> set[str]:
    return {saved.id for saved in [*state.saves, *state.prepared]}


def summary(addresses: Sequence[str], states: Sequence[pb.DescribeReply]) -> str:
    """Says for each server what its state is."""
    parts = []
    for address, state in zip(addresses, states, strict=True):
        parts.append(f"{address} {state_of(state, states)}")
    return "; ".join(parts)


def state_of(state: pb.DescribeReply, states: Sequence[pb.DescribeReply] = ()) -> str:
    """Says what the state of a server is: "is in epoch 3".

    Args:
        state: The state of the server.
        states: The states of the servers that it is compared with. Default: none.
    """
    if not state.set:
        if not state.at.name:
            return "is empty"
        return f"is in no set and has the save {state.at.name!r}"
    label = label_of(state)
    in_same_epoch = [server for server in states if label_of(server) == label]
    if _is_rolled_back(state, in_same_epoch):
        return (
            f"has older rows of epoch {state.epoch} than before: its data directory was"
            " rolled back, or is a copy"
        )
    epoch = str(state.epoch)
    # epochs of one number that several clients have begun differ by their tokens
    tokens = {server.token for server in states if server.epoch == state.epoch}
    tokens.discard("")
    if len(tokens) > 1:
        epoch = f"{epoch} ({state.token[:8]})"
    if state.live:
        return f"is in epoch {epoch}"
    if state.waits:
        return f"was stopped in epoch {epoch} and started again"
    rows = f"from the save {state.at.name!r}" if state.at.name else "without rows"
    return f"was killed in epoch {state.epoch} and started again {rows}"


def has_lost(
    state: pb.DescribeReply,
    label: str,
    run: str,
) -> bool:
    """Returns whether a server has lost a run that a client knows, because it began
    again from an older stop.

    Args:
        state: The state of the server.
        label: The label of the epoch of the run.
        run: The run.
    """
    if label_of(state) != label:
        return False  # A server of another epoch may have no run.
    known_runs = [*state.earlier, run_of(state), state.next]
    return run not in known_runs


def _new_id() -> str:
    return uuid.uuid4().hex


def _has_rows(state: pb.DescribeReply) -> bool:
    """Returns whether a server has the rows of its epoch."""
    return bool(state.live or state.waits)


def _is_in_epoch(state: pb.DescribeReply, epoch: int) -> bool:
    """Returns whether a server has the rows of the epoch with this number."""
    return _has_rows(state) and bool(state.epoch == epoch)


def _age_of(saved: pb.Saved) -> tuple[int, str, str]:
    """Returns the key by which saves are ordered, the oldest one first."""
    return (saved.number, saved.id, saved.name)


def _set_of(states: Sequence[pb.DescribeReply]) -> str:
    """Returns the identity of the set of servers. Empty if they belong to none yet."""
    for state in states:
        if state.set:
            return str(state.set)
    return ""


def _slots(states: Sequence[pb.DescribeReply]) -> tuple[int, ...]:
    """Returns the map of slots of a set of servers, or a new one."""
    for state in states:
        if state.set:
            return tuple(state.slots)
    return new_slots(len(states))


def _is_rolled_back(
    state: pb.DescribeReply,
    in_same_epoch: Sequence[pb.DescribeReply],
) -> bool:
    """Returns whether a server waits whose last run is not the one that the servers in
    its epoch know.

    They may know its next run already, because a client has begun to resume the server.
    """
    if not state.waits:
        return False
    runs = {state.next, *same_runs(run_of(state), state.token, state.member)}
    return any(
        _has_rows(server) and server.runs[state.member] not in runs
        for server in in_same_epoch
    )


def _check_one_set(
    addresses: Sequence[str],
    states: Sequence[pb.DescribeReply],
) -> None:
    in_sets = [state for state in states if state.set]
    if not in_sets:
        return
    if len({state.set for state in in_sets}) > 1:
        sets = ", ".join(
            f"{address} of {state.set[:8] or 'none'}"
            for address, state in zip(addresses, states, strict=True)
        )
        raise ServerSetError(
            f"the servers belong to different sets: {sets}; name the servers of one set"
        )
    named = ", ".join(addresses)
    for address, state in zip(addresses, states, strict=True):
        if state.set and state.members != len(states):
            raise ServerSetError(
                f"the set of the server {address} has {state.members} servers, and"
                f" {len(states)} are named: {named}; name all servers of the set"
            )
    if len({state.member for state in in_sets}) < len(in_sets):
        raise ServerSetError(f"two of the addresses are of the same server: {named}")


def _different(
    addresses: Sequence[str],
    states: Sequence[pb.DescribeReply],
) -> ServerSetError:
    saves = complete_saves(states)
    named = ",".join(addresses)
    if saves:
        effect = (
            "brings all of them to their newest complete save: recstore servers"
            f" restore {saves[-1].name} {named}"
        )
    else:
        effect = (
            "lets all of them begin without rows, because there is no complete save:"
            f" recstore servers reset {named}"
        )
    return ServerSetError(
        f"the servers are in different states: {summary(addresses, states)}. This"
        f" command {effect}"
    )


def _fits(state: pb.DescribeReply, save: pb.Saved) -> bool:
    """Returns whether a server that is in no epoch can begin with a save without losing
    another save.
    """
    if not save.name:
        return not state.at.name
    if not save.id:
        return False
    return save.id == state.at.id or save.id in _ids_of_saves(state)


def _save_of(
    addresses: Sequence[str],
    states: Sequence[pb.DescribeReply],
    name: str,
) -> pb.Saved:
    saves = complete_saves(states)
    for saved in reversed(saves):
        if saved.name == name:
            return saved
    # one server loads any checkpoint: its own without a manifest, or that of a model
    if len(states) == 1:
        return pb.Saved(name=name)
    complete = ", ".join(repr(saved.name) for saved in saves) or "none"
    for address, state in zip(addresses, states, strict=True):
        names = {saved.name for saved in [*state.saves, *state.prepared]}
        if name not in names:
            raise FileNotFoundError(
                f"server {address} has no save {name!r}; the complete saves are:"
                f" {complete}"
            )
    raise FileNotFoundError(
        f"the servers have different saves of the name {name!r}:"
        f" {', '.join(addresses)}; the complete saves are: {complete}"
    )


def _members(
    addresses: Sequence[str],
    states: Sequence[pb.DescribeReply],
) -> tuple[int, ...]:
    """Returns the number of each server in the set.

    All clients compute the same numbers for servers that are in no set, in whichever
    order they name the servers.
    """
    members = [state.member for state in states]
    members_of_set = {state.member for state in states if state.set}
    free = [member for member in range(len(states)) if member not in members_of_set]
    by_address = sorted(range(len(states)), key=lambda index: addresses[index])
    new = [index for index in by_address if not states[index].set]
    for index, member in zip(new, free, strict=False):
        members[index] = member
    return tuple(members)


def _in_order(indices: Iterable[int], members: Sequence[int]) -> tuple[int, ...]:
    """Returns the indices of servers in the order of their numbers in the set."""
    return tuple(sorted(indices, key=lambda index: members[index]))
