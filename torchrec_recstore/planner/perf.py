"""The time of collectives of tables with measured statistics, for TorchRec's planner."""

from __future__ import annotations

from collections.abc import Mapping

from torchrec.distributed.planner.estimator.annotations import bwd_comms, fwd_comms
from torchrec.distributed.planner.estimator.types import ShardPerfContext
from torchrec.distributed.types import ShardingType

from torchrec_recstore.planner.traffic import PlacedTable, RankTraffic, library_factor, rank_traffic
from torchrec_recstore.sharders import RECSTORE_KERNEL
from torchrec_recstore.sharders.perf import MeasuredSpeed, RecStorePerfConfig, evaluator_of
from torchrec_recstore.torchrec_seams.planning import default_backward_comms_ms, default_forward_comms_ms

_TYPES = [each.value for each in ShardingType if each is not ShardingType.DATA_PARALLEL]
_COUNTED = (ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value, ShardingType.ROW_WISE.value)


class MeasuredPerfConfig(RecStorePerfConfig):
    """The config of TorchRec's performance estimator with the measured numbers of tables.

    TorchRec's formulas count the pooled rows and their gradients, and not the ids, their lengths and their weights, and
    add the time of a copy on a GPU to the gradients of row-wise tables (torchrec 1.8.0). For RecStore tables that were
    measured, the bytes of :func:`rank_traffic` count instead, at the topology's bandwidths.

    Args:
        measured: The measured speeds by table name.
    """

    def __init__(self, measured: Mapping[str, MeasuredSpeed]) -> None:
        super().__init__(measured)
        self._counted = set(measured)

    @fwd_comms(_TYPES)  # type: ignore[untyped-decorator]
    def forward_comms_ms(self, context: ShardPerfContext) -> float:
        """Returns the estimated milliseconds of the collectives before and after the lookups."""
        if not self._counts(context):
            return default_forward_comms_ms(evaluator_of(context), context, self)
        return sum(self._ms(context, each) for each in _traffic(context) if each.collective != "gradients")

    @bwd_comms(_TYPES)  # type: ignore[untyped-decorator]
    def backward_comms_ms(self, context: ShardPerfContext) -> float:
        """Returns the estimated milliseconds of the collectives with gradients."""
        if not self._counts(context):
            return default_backward_comms_ms(evaluator_of(context), context, self)
        return sum(self._ms(context, each) for each in _traffic(context) if each.collective == "gradients")

    def _ms(self, context: ShardPerfContext, traffic: RankTraffic) -> float:
        bandwidths = context.comms_bandwidths
        assert bandwidths is not None
        device = "cuda" if self._over_bus else "cpu"
        return milliseconds(traffic, bandwidths.intra_host_bw, bandwidths.inter_host_bw, device)

    def _counts(self, context: ShardPerfContext) -> bool:
        # On one rank no bytes are exchanged. TorchRec's formulas then prefer table-wise tables, which need no copies.
        return (
            context.table_name in self._counted
            and context.world_size > 1
            and context.compute_kernel == RECSTORE_KERNEL
            and context.sharding_type in _COUNTED
            and context.is_pooled
        )


def milliseconds(traffic: RankTraffic, within_host: float, between_hosts: float, compute_device: str) -> float:
    """Returns the time of a collective: that of the bytes sent, or of those received if it is longer.

    Args:
        traffic: The bytes of a rank.
        within_host: The bytes per millisecond between ranks of a host.
        between_hosts: The bytes per millisecond between ranks of different hosts.
        compute_device: The type of the device, which tells the library: see :func:`library_factor`.
    """
    return library_factor(traffic.collective, compute_device) * max(
        (whole - between) / within_host + between / between_hosts
        for whole, between in (
            (traffic.sent, traffic.sent_between_hosts),
            (traffic.received, traffic.received_between_hosts),
        )
    )


def _traffic(context: ShardPerfContext) -> list[RankTraffic]:
    """Returns the bytes of the rank with the shard. Those of ranks without a shard of the table are not counted."""
    in_rows = context.sharding_type == ShardingType.ROW_WISE.value
    bags = [n * b for n, b in zip(context.num_poolings, context.batch_sizes, strict=True)]
    table = PlacedTable(
        # The evaluation is that of one shard: a shard of columns exchanges as much as a table with its columns does.
        sharding_type="row_wise" if in_rows else "table_wise",
        ranks=tuple(range(context.world_size)) if in_rows else (0,),
        dim=context.emb_dim,
        features=round(sum(bags)),
        ids_per_sample=sum(n * length for n, length in zip(bags, context.input_lengths, strict=True)),
        weighted=context.is_weighted,
        element_bytes=context.fwd_sr_comm_data_type_size if in_rows else context.fwd_a2a_comm_data_type_size,
    )
    return rank_traffic([table], 0, context.world_size, 1, context.local_world_size)
