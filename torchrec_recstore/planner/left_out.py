"""Collections that RecStore can hold and that none of the given sharders takes, and the
sharders that are none of RecStore's.

Tests: tests/planner/test_left_out.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    Topology,
)
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_recstore.sharders.plan_entries import asks_for_recstore
from torchrec_recstore.torchrec_seams.models import configs_of
from torchrec_recstore.utils import warn_user

_SHARDERS: dict[type[nn.Module], str] = {
    EmbeddingBagCollection: "RecStoreSharder",
    EmbeddingCollection: "RecStoreEmbeddingCollectionSharder",
    FeatureProcessedEmbeddingBagCollection: (
        "RecStoreFeatureProcessedEmbeddingBagCollectionSharder"
    ),
}
"""The sharder of each kind of collection that RecStore can hold."""


@dataclass(frozen=True)
class LeftOut:
    """A collection that no sharder takes.

    Args:
        path: The path of the collection in the model.
        kind: The class of the collection.
        configs: The configs of its tables.
    """

    path: str
    kind: type[nn.Module]
    configs: Sequence[BaseEmbeddingConfig]

    @property
    def description(self) -> str:
        """The path and the kind of the collection, for messages."""
        name = f"module {self.path!r}" if self.path else "the model"
        return f"{name} ({self.kind.__name__})"


def rank_bytes(topology: Topology) -> int:
    """Returns the memory of a rank for dense parameters, in bytes.

    It is that of the rank with the most memory.
    """
    sizes: list[int] = []
    for device in topology.devices:
        on_host = topology.compute_device == "cpu"
        sizes.append(device.storage.ddr if on_host else device.storage.hbm)
    return max(sizes)


def refuse_left_out(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    named: Collection[str],
    most_bytes: int,
) -> None:
    """Checks the collections that no sharder takes.

    TorchRec leaves their tables as dense parameters on every rank.

    Warns of each of these collections whose tables fit into the memory of a rank and
    have no constraints.

    Args:
        module: The model.
        sharders: The sharders of the model.
        named: The names of the tables that have constraints or statistics.
        most_bytes: The memory in bytes that a rank has for dense parameters.

    Raises:
        PlannerError: A table of such a collection has constraints or statistics, or is
            larger than ``most_bytes``.
    """
    kinds = {sharder.module_type for sharder in sharders}
    for collection in _left_out(module, kinds):
        names = [config.name for config in collection.configs]
        tables = f"table(s) {', '.join(map(repr, names))}"
        fix = (
            "pass get_recstore_sharders(...), which has a"
            f" {_SHARDERS[collection.kind]}, as the sharders of the planner and of"
            " DistributedModelParallel"
        )
        problem = f"no sharder takes {collection.description} with {tables}"
        for config in collection.configs:
            if config.name in named:
                raise PlannerError(
                    f"{problem}, so that the constraints or statistics of {config.name!r}"
                    f" have no effect: {fix}",
                    error_type=PlannerErrorType.INPUT_VALIDATION,
                )
            needed = _dense_bytes(config)
            if needed > most_bytes:
                raise PlannerError(
                    f"{problem}, so that each rank would allocate {config.name!r} as a"
                    f" dense parameter of {needed / 2**30:,.1f} GiB: {fix}",
                    error_type=PlannerErrorType.INPUT_VALIDATION,
                )
        warn_user(
            f"{problem}, so that each rank has them as dense parameters outside of"
            f" RecStore: {fix}"
        )


def check_sharders(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    constraints: Mapping[str, ParameterConstraints],
) -> None:
    """Checks the argument ``sharders`` of a planner.

    Args:
        module: The model.
        sharders: The argument.
        constraints: The constraints, by table name.

    Raises:
        TypeError: ``sharders`` is no list or tuple of sharders.
        PlannerError: The sharder of a table that RecStore can hold is TorchRec's, and
            the constraints of the table, or the lack of them, ask for RecStore.
    """
    fix = "pass sharders=[RecStoreSharder(...)], or sharders=get_recstore_sharders(...)"
    if not isinstance(sharders, list | tuple):
        raise TypeError(f"sharders must be a list, got {_kind_of(sharders)}: {fix}")
    for sharder in sharders:
        if not isinstance(sharder, ModuleSharder):
            raise TypeError(
                f"sharders must be a list of sharders, got {_kind_of(sharder)} in it:"
                f" {fix}"
            )
    # TorchRec uses the last sharder of a kind of collections.
    by_kind = {sharder.module_type: sharder for sharder in sharders}
    has_recstore = any(is_recstore_sharder(sharder) for sharder in sharders)
    for child in module.modules():
        sharder_of_child = by_kind.get(type(child))
        if type(child) not in _SHARDERS or sharder_of_child is None:
            continue
        if is_recstore_sharder(sharder_of_child):
            continue
        for config in _configs_inside(child):
            constraint = constraints.get(config.name)
            is_asked_for = constraint is not None or not has_recstore
            if is_asked_for and asks_for_recstore(constraint):
                raise PlannerError(
                    f"table {config.name!r} is planned for RecStore, and the sharder of"
                    f" its {type(child).__name__} is TorchRec's"
                    f" {type(sharder_of_child).__name__}: {fix}, to the planner and to"
                    " DistributedModelParallel",
                    error_type=PlannerErrorType.INPUT_VALIDATION,
                )


def is_recstore_sharder(sharder: object) -> bool:
    """Returns whether a sharder places tables in RecStore."""
    return hasattr(sharder, "with_stock_kernels")


def _configs_inside(child: nn.Module) -> Sequence[BaseEmbeddingConfig]:
    """Returns the configs of a collection, or of the collection inside of it."""
    configs: list[BaseEmbeddingConfig] = []
    for module in child.modules():
        if type(module) in (EmbeddingBagCollection, EmbeddingCollection):
            configs += configs_of(module)
    return configs


def _kind_of(value: object) -> str:
    """Returns what is in the place of a sharder or of sharders, for messages."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"a {type(value).__name__}"


def _left_out(
    module: nn.Module,
    kinds: Collection[type[nn.Module]],
) -> Iterator[LeftOut]:
    """Yields the collections without a sharder.

    They are those that TorchRec's enumerator and ``DistributedModelParallel`` leave
    out.
    """
    pending: list[tuple[str, nn.Module, type[nn.Module] | None]] = [("", module, None)]
    while pending:
        path, child, inside_of = pending.pop(0)
        kind = type(child)
        if kind in kinds:
            continue
        if kind in (EmbeddingBagCollection, EmbeddingCollection):
            outer_path = path.rpartition(".")[0]
            yield LeftOut(
                outer_path if inside_of else path,
                inside_of or kind,
                configs_of(child),
            )
            continue
        processed = kind if kind is FeatureProcessedEmbeddingBagCollection else None
        for name, grandchild in child.named_children():
            child_path = f"{path}.{name}" if path else name
            pending.append((child_path, grandchild, processed))


def _dense_bytes(config: BaseEmbeddingConfig) -> int:
    element_bytes: int = data_type_to_dtype(config.data_type).itemsize
    elements: int = config.num_embeddings * config.embedding_dim
    return elements * element_bytes
