"""Settings and flags of every training example, free of torch, so that the command line answers at once."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from common.command import DataError

from torchrec_recstore.options import RedisStore, TableOptions, cold_store_of_flag, options_of_flags

Eviction = Literal["lru", "lfu"]


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Which rows a table keeps, in memory and at all; without any, every row that it has made.

    Attributes:
        max_rows: rows that each table keeps in memory, over all ranks.
        eviction: which rows leave when there are more; LRU where ``max_rows`` stands alone.
        half_life_steps: of LFU's frequencies.
        expire_steps: rows that no step has looked up for longer leave.
        min_frequency: steps that look an id up before it gets its row.
        cold_store: URL of a Redis server or a path for RocksDB, where evicted rows go.
    """

    max_rows: int | None = None
    eviction: Eviction | None = None
    half_life_steps: int | None = None
    expire_steps: int | None = None
    min_frequency: int | None = None
    cold_store: str | None = None

    def flags(self) -> dict[str, int | str]:
        """The flags that are set, and their values."""
        return {f"--{name.replace('_', '-')}": value for name, value in asdict(self).items() if value is not None}

    def check(self) -> None:
        """Finds what the tables would refuse.

        Raises:
            DataError: a bound does not fit another, or makes no sense.
        """
        try:
            self.options()
        except ValueError as error:
            raise DataError(str(error)) from error

    def options(self, seed: int = 0) -> TableOptions:
        """The options of each table."""
        return options_of_flags(**asdict(self), seed=seed)

    def shown(self) -> dict[str, int | str | None]:
        """The bounds as they may be written down: a URL without its credentials."""
        store = None if self.cold_store is None else cold_store_of_flag(self.cold_store)
        return asdict(self) | ({"cold_store": store.public_url} if isinstance(store, RedisStore) else {})


Backend = Literal["recstore", "fused"]
Sharding = Literal["table_wise", "row_wise"]
Optimizer = Literal["sgd", "adagrad", "rowwise_adagrad"]
LrSchedule = Literal["constant", "linear", "cosine"]

HINT_ROWS = 2**40
"""``num_embeddings`` of a RecStore table, which has no size: a hint that nobody has to think about."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What a run is asked to do; the command's flags, one by one.

    Attributes:
        backend: "recstore" (tables without a size, raw ids) or "fused" (stock TorchRec, ids modulo the table's size).
        dim: width of the embeddings.
        num_embeddings: rows of a fused table; RecStore has no use for it.
        batch_size: samples of a step over all ranks.
        epochs: passes over the training part.
        optimizer: of the embeddings, fused into their backward.
        lr: of the embeddings.
        dense_lr: of the dense layers, which Adam trains.
        seed: of the dense weights, the tables and whatever else is drawn.
        sharding: how every table lies on the ranks.
        bounds: which rows each table keeps.
        json_out: where the result goes too; "-" is stdout, in the report's place.
        log: whether curves are written, and a report of them at the end.
        log_dir: the folder for them; None takes a new one.
        log_every: steps from one point of a curve to the next.
    """

    backend: Backend
    dim: int
    num_embeddings: int
    batch_size: int
    epochs: int
    optimizer: Optimizer = "rowwise_adagrad"
    lr: float
    dense_lr: float
    seed: int
    sharding: Sharding
    bounds: Bounds = field(default_factory=Bounds)
    json_out: Path | None
    log: bool = False
    log_dir: Path | None = None
    log_every: int = 50

    @property
    def goes_on(self) -> bool:
        """Whether the run may go on from where another one came to, and from its curves."""
        return False

    @property
    def modulo(self) -> int | None:
        """What ids have to be taken modulo of, if anything."""
        return self.num_embeddings if self.backend == "fused" else None

    @property
    def declared_rows(self) -> int:
        """``num_embeddings`` in the tables' configs."""
        return self.modulo or HINT_ROWS

    def shown(self) -> dict[str, Any]:
        """The settings as they may be written down, by name: without where results go, a URL without credentials."""
        shown = asdict(self) | {"bounds": self.bounds.shown()}
        for name in ("json_out", "log", "log_dir", "log_every"):
            del shown[name]
        return {name: str(value) if isinstance(value, Path) else value for name, value in shown.items()}

    def check(self, world_size: int) -> None:
        """Finds what would fail only later, or less clearly.

        Raises:
            DataError: a setting does not fit another, or the number of ranks.
        """
        if self.batch_size % world_size:
            raise DataError(f"--batch-size {self.batch_size} cannot be split evenly over {world_size} ranks")
        if self.backend == "fused" and self.sharding == "row_wise":
            raise DataError(
                "--backend fused has no row_wise sharding on CPU: TorchRec's sharder does not offer it there"
            )
        if self.backend == "fused" and self.bounds.flags():
            raise DataError(f"{next(iter(self.bounds.flags()))} is for --backend recstore: stock tables keep every row")
        self.bounds.check()
        max_rows = self.bounds.max_rows
        if self.sharding == "row_wise" and max_rows is not None and max_rows < world_size:
            raise DataError(f"--max-rows {max_rows} is less than the {world_size} ranks that share a table's rows")
        if self.backend == "fused" and self.dim % 4:
            raise DataError(f"--backend fused needs a --dim that is a multiple of 4, not {self.dim}")


LOG = "Curves and report"

LogDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="TensorBoard curves while it trains, report.html at the end.",
        show_default="runs/<example>-<date>-<time>, or the folder log in that of --checkpoint",
        rich_help_panel=LOG,
    ),
]
NoLog = Annotated[bool, typer.Option("--no-log", help="Neither curves nor report.", rich_help_panel=LOG)]
LogEvery = Annotated[
    int, typer.Option(min=1, metavar="N", help="Steps from one point of a curve to the next.", rich_help_panel=LOG)
]
JsonOut = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="OUT",
        help="Write the result as JSON; to stdout for -, and the tables to stderr.",
        allow_dash=True,
        rich_help_panel=LOG,
    ),
]
