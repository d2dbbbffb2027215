"""Sets the time of the events by which the rows of a model expire."""

from __future__ import annotations

from torch import nn

from torchrec_recstore.sharders.gather import all_gathered, whole_environment
from torchrec_recstore.sharders.model_tables import tables_of_rank
from torchrec_recstore.store.arguments import check_time
from torchrec_recstore.store.table_state import set_event_time


def set_time(model: nn.Module, unix_seconds: float) -> None:
    """Sets the time by which rows expire to that of the events, for tables with ``Expiry(seconds=...)``. Collective.

    Without this call, tables read the system's clock; the tables of a sharded model all read that of the first rank.
    From the first call on, training steps are made at the time of the last call. Checkpoints save this, so that a run
    that is repeated or resumed expires the same rows in the same steps. The ranks exchange the time in each call. About
    ten calls within ``Expiry.seconds`` are enough.

    The first call sets the time to the latest ``unix_seconds`` of all ranks. After it, a time that is more than
    ``Expiry.max_jump_s`` later or earlier than the present one is refused, and the latest of the others counts. If this
    one is earlier than the present one, the call changes nothing, because events may be slightly out of order.
    ``TableStats.refused_times`` counts the calls that refuse a time. The first, tenth, hundredth and so on warns.

    If ten calls in a row refuse the times of all ranks and agree, the last of them sets the time, so that neither a
    pause of the events nor a wrong time stops the expiry. Of each call, the time that is nearest to the present one
    counts. Calls agree if the time of each is at most ``Expiry.max_jump_s`` away from that of the call before. If the
    time goes back in this way, or in the first call because the system's clock is later, no row expires too early: rows
    age on by the time that passes from then on.

    Args:
        model: ``DistributedModelParallel``, or any module that contains sharded modules or eager modules.
        unix_seconds: The time in seconds since 1970.

    Raises:
        TypeError: ``unix_seconds`` is not a number.
        ValueError: ``unix_seconds`` is negative or not finite, or the model has tables on servers. All of these errors
            are raised on every rank, and no table has changed.
    """
    tables = tables_of_rank(
        model,
        "set_time: {} is on servers, whose rows expire by the servers' clocks: call set_time for models without tables "
        "on servers",
    )
    micros, error = 0, None
    try:
        micros = check_time(unix_seconds)
    except (TypeError, ValueError) as refused:
        error = refused
    told = all_gathered((micros, error), whole_environment())
    for _, first in told:
        if first is not None:
            raise first
    set_event_time(tables, [each for each, _ in told])
