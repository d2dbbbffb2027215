"""Collections that RecStore can hold and that no sharder takes are refused or warned
about.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from tests.sharders.models import bag, collection, sequence, sequences
from torchrec_recstore import (
    RecStoreConstraints,
    RecStorePlanner,
    RecStoreSharder,
    get_recstore_sharders,
)
from torchrec_recstore.planner import RecStoreEnumerator, TableStatistics
from torchrec_recstore.planner.left_out import rank_bytes
from torchrec_recstore.sharders import RecStoreEmbeddingCollectionSharder
from torchrec_recstore.utils import RecStoreWarning

HUGE = 2**40
TOPOLOGY = Topology(world_size=1, compute_device="cpu")

Constraints = dict[str, ParameterConstraints]


def bags(rows: int) -> nn.Module:
    return collection(bag("t_user", rows=rows))


def rows_of(rows: int) -> nn.Module:
    return sequences(sequence("t_item", rows=rows))


def processed_bags(rows: int) -> nn.Module:
    inner = collection(bag("t_word", rows=rows), is_weighted=True)
    return FeatureProcessedEmbeddingBagCollection(
        inner, {"f": PositionWeightedModule(max_feature_length=3)}
    )


KINDS: dict[str, tuple[Callable[[int], nn.Module], str, str, str]] = {
    "bags": (bags, "t_user", "EmbeddingBagCollection", "RecStoreSharder"),
    "rows": (
        rows_of,
        "t_item",
        "EmbeddingCollection",
        "RecStoreEmbeddingCollectionSharder",
    ),
    "words": (
        processed_bags,
        "t_word",
        "FeatureProcessedEmbeddingBagCollection",
        "RecStoreFeatureProcessedEmbeddingBagCollectionSharder",
    ),
}
# The sharders and the collections that they leave out.
CASES: list[tuple[Callable[[], ModuleSharder[nn.Module]], list[str]]] = [
    (RecStoreSharder, ["rows"]),
    (RecStoreEmbeddingCollectionSharder, ["bags", "words"]),
    (lambda: get_recstore_sharders()[2], ["bags", "rows"]),
]
LEFT_OUT = [(make, kind) for make, kinds in CASES for kind in kinds]


def taken_kind(sharder: ModuleSharder[nn.Module]) -> str:
    for kind, (_, _, collection_class, _) in KINDS.items():
        if sharder.module_type.__name__ == collection_class:
            return kind
    raise AssertionError(sharder)


def planned(
    sharder: ModuleSharder[nn.Module],
    kind: str,
    rows: int,
    constraints: Constraints | None = None,
) -> ShardingPlan:
    """Returns the plan of a model with the sharder's kind of collection and another
    kind.
    """
    own = taken_kind(sharder)
    layers = nn.ModuleDict({own: KINDS[own][0](HUGE), kind: KINDS[kind][0](rows)})
    model = nn.ModuleDict({"layers": layers})
    planner = RecStorePlanner(topology=TOPOLOGY, constraints=constraints, debug=False)
    return planner.plan(model, [sharder])


@pytest.mark.parametrize(("make", "kind"), LEFT_OUT)
def test_a_table_with_constraints_is_refused(
    make: Callable[[], ModuleSharder[nn.Module]], kind: str
) -> None:
    _, table, collection_class, sharder_class = KINDS[kind]
    sharder = make()
    message = (
        rf"no sharder takes module 'layers\.{kind}' \({collection_class}\) with"
        rf" table\(s\) '{table}', so that the "
        rf"constraints .* of '{table}' have no effect: pass"
        rf" get_recstore_sharders\(...\), which has a {sharder_class},"
    )
    with pytest.raises(PlannerError, match=message):
        planned(sharder, kind, 100, {table: RecStoreConstraints()})


@pytest.mark.parametrize(("make", "kind"), LEFT_OUT)
def test_a_table_that_no_rank_can_allocate_is_refused(
    make: Callable[[], ModuleSharder[nn.Module]], kind: str
) -> None:
    _, table, collection_class, _ = KINDS[kind]
    sharder = make()
    message = (
        rf"\({collection_class}\) .*, so that each rank would allocate '{table}' as a"
        r" dense parameter of 16,384.0 GiB"
    )
    with pytest.raises(PlannerError, match=message):
        planned(sharder, kind, HUGE)


@pytest.mark.parametrize(("make", "kind"), LEFT_OUT)
def test_a_small_table_is_warned_about(
    make: Callable[[], ModuleSharder[nn.Module]], kind: str
) -> None:
    sharder = make()
    with pytest.warns(
        RecStoreWarning,
        match=(
            rf"'layers\.{kind}' .* dense parameters outside of RecStore: pass get_rec"
        ),
    ):
        plan = planned(sharder, kind, 100)
    assert list(plan.plan) == [f"layers.{taken_kind(sharder)}"]


@pytest.mark.filterwarnings("error::torchrec_recstore.utils.RecStoreWarning")
def test_nothing_is_left_out() -> None:
    layers = nn.ModuleDict(
        {kind: make(HUGE) for kind, (make, _, _, _) in KINDS.items()}
    )
    constraints: Constraints = {
        table: RecStoreConstraints() for _, table, _, _ in KINDS.values()
    }
    planner = RecStorePlanner(topology=TOPOLOGY, constraints=constraints, debug=False)
    assert sorted(planner.plan(layers, get_recstore_sharders()).plan) == sorted(KINDS)


@pytest.mark.filterwarnings("error::torchrec_recstore.utils.RecStoreWarning")
def test_a_sharder_of_torchrec_takes_a_collection() -> None:
    layers = nn.ModuleDict({"bags": bags(HUGE), "rows": rows_of(100)})
    planner = RecStorePlanner(topology=TOPOLOGY, debug=False)
    plan = planner.plan(layers, [RecStoreSharder(), EmbeddingCollectionSharder()])
    assert sorted(plan.plan) == ["bags", "rows"]
    # Without a sharder of RecStore, the model is not RecStore's.
    RecStorePlanner(topology=TOPOLOGY, debug=False).plan(
        nn.ModuleDict({"rows": rows_of(9)}), []
    )


def test_statistics_name_a_table() -> None:
    layers = nn.ModuleDict({"bags": bags(HUGE), "rows": rows_of(100)})
    planner = RecStorePlanner(
        topology=TOPOLOGY, statistics={"t_item": TableStatistics(rows=10)}, debug=False
    )
    with pytest.raises(PlannerError, match="statistics of 't_item' have no effect"):
        planner.plan(layers, [RecStoreSharder()])


def test_the_enumerator_in_the_planner_of_torchrec() -> None:
    enumerator = RecStoreEnumerator(
        TOPOLOGY, constraints={"t_item": RecStoreConstraints()}
    )
    planner = EmbeddingShardingPlanner(
        topology=TOPOLOGY, enumerator=enumerator, debug=False
    )
    layers = nn.ModuleDict({"bags": bags(HUGE), "rows": rows_of(100)})
    with pytest.raises(PlannerError, match="no sharder takes module 'rows'"):
        planner.plan(layers, [RecStoreSharder()])


def test_the_memory_is_that_of_the_device() -> None:
    topology = Topology(world_size=2, compute_device="cuda", hbm_cap=7, ddr_cap=9)
    assert rank_bytes(topology) == 7
    assert (
        rank_bytes(Topology(world_size=2, compute_device="cpu", hbm_cap=7, ddr_cap=9))
        == 9
    )
