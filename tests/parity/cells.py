"""The cells of the parity table: the tables of TorchRec models that are tried in
RecStore, and their configurations.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from .extras import EXTRAS

SHARDINGS = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_column_wise",
    "table_row_wise",
    "grid_shard",
)
# those that TorchRec's EmbeddingCollection has
SEQUENCE_SHARDINGS = ("table_wise", "row_wise", "column_wise")
WORLD_SIZES = (1, 2, 4)
BAGS, SEQUENCES = "EmbeddingBagCollection", "EmbeddingCollection"


@dataclass(frozen=True)
class Cell:
    """One model with one sharding type for all of its tables.

    Args:
        pooling: "sum" or "mean"; "none" for sequences.
        weighted: Whether the model has a weighted collection beside the unweighted
            collection.
        varying: Whether the batch size varies by feature (VBE).
        data_type: The name of the rows'
            ``torchrec.modules.embedding_configs.DataType``.
        extra: What the batches carry beyond that which the tables need, a key of
            ``EXTRAS``. Empty: nothing.
    """

    module: str
    sharding: str
    world_size: int
    pooling: str = "sum"
    weighted: bool = False
    varying: bool = False
    data_type: str = "FP32"
    extra: str = ""

    @property
    def sequential(self) -> bool:
        """Whether the tables belong to an ``EmbeddingCollection``."""
        return self.module == SEQUENCES

    @property
    def rows_split(self) -> bool:
        """Whether the rows of a table are spread over the ranks of the world or of a
        node.
        """
        return self.sharding in ("row_wise", "table_row_wise", "grid_shard")


def all_cells() -> list[Cell]:
    """All cells: fp32 in every combination, 16-bit types with all sharding types but
    not with all batches.
    """
    cells = [
        Cell(BAGS, sharding, world_size, pooling, weighted, varying)
        for world_size, sharding, pooling, weighted, varying in product(
            WORLD_SIZES, SHARDINGS, ("sum", "mean"), (False, True), (False, True)
        )
    ]
    for world_size, sharding, data_type in product(
        WORLD_SIZES, SHARDINGS, ("FP16", "BF16")
    ):
        cells.append(Cell(BAGS, sharding, world_size, data_type=data_type))
        if world_size == 2:
            cells.append(
                Cell(
                    BAGS,
                    sharding,
                    world_size,
                    "mean",
                    weighted=True,
                    data_type=data_type,
                )
            )
    for world_size in WORLD_SIZES:
        cells += [
            Cell(SEQUENCES, sharding, world_size, "none") for sharding in SHARDINGS
        ]
        for sharding in SEQUENCE_SHARDINGS:
            cells.append(Cell(SEQUENCES, sharding, world_size, "none", varying=True))
            cells += [
                Cell(SEQUENCES, sharding, world_size, "none", data_type=t)
                for t in ("FP16", "BF16")
            ]
    for world_size, sharding, pooling, extra in product(
        WORLD_SIZES, SHARDINGS, ("sum", "mean"), EXTRAS
    ):
        cells.append(Cell(BAGS, sharding, world_size, pooling, extra=extra))
    for world_size, sharding, extra in product(WORLD_SIZES, SEQUENCE_SHARDINGS, EXTRAS):
        cells.append(Cell(SEQUENCES, sharding, world_size, "none", extra=extra))
    return cells


def subset() -> list[Cell]:
    """The cells of ``make test``: every value of every dimension at least once."""
    return [
        Cell(BAGS, "table_wise", 1, varying=True),
        Cell(BAGS, "row_wise", 1, "mean", weighted=True),
        Cell(BAGS, "column_wise", 1, "mean"),
        Cell(BAGS, "table_wise", 1, data_type="FP16"),
        Cell(BAGS, "row_wise", 1, data_type="BF16"),
        Cell(SEQUENCES, "row_wise", 1, "none"),
        Cell(SEQUENCES, "table_wise", 1, "none", data_type="FP16"),
        Cell(BAGS, "row_wise", 2, weighted=True),
        Cell(BAGS, "table_wise", 2, "mean", weighted=True, varying=True),
        Cell(BAGS, "column_wise", 2, varying=True),
        Cell(BAGS, "table_column_wise", 2, "mean"),
        Cell(BAGS, "table_row_wise", 2, "mean", weighted=True),
        Cell(BAGS, "grid_shard", 2, "mean", weighted=True),
        Cell(BAGS, "table_wise", 2, "mean", weighted=True, data_type="BF16"),
        Cell(BAGS, "row_wise", 2, varying=True),
        Cell(SEQUENCES, "column_wise", 2, "none"),
        Cell(SEQUENCES, "table_wise", 2, "none", varying=True),
        Cell(SEQUENCES, "table_row_wise", 2, "none"),
        Cell(BAGS, "grid_shard", 4, "mean"),
        Cell(BAGS, "row_wise", 1, "mean", extra="weights"),
        Cell(BAGS, "row_wise", 2, "mean", extra="weights"),
        Cell(SEQUENCES, "row_wise", 2, "none", extra="weights"),
        Cell(BAGS, "table_row_wise", 2, "mean", extra="further features"),
        Cell(BAGS, "column_wise", 2, extra="int64 lengths"),
        Cell(BAGS, "table_wise", 2, extra="int32 ids"),
        Cell(BAGS, "table_wise", 1, extra="only offsets"),
        Cell(BAGS, "grid_shard", 2, "mean", extra="inverse indices"),
        Cell(BAGS, "row_wise", 1, "mean", extra="stride per key"),
    ]
