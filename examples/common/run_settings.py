"""The settings and flags that all training examples share. They do not import torch, so that ``--help`` is fast."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from common.command import DataError

from torchrec_recstore.option_flags import cold_store_of_flag, options_of_flags
from torchrec_recstore.options import RedisStore, Servers, TableOptions

Eviction = Literal["lru", "lfu"]
Backend = Literal["recstore", "fused"]
Sharding = Literal["table_wise", "row_wise"]
Optimizer = Literal["sgd", "adagrad", "rowwise_adagrad"]
LrSchedule = Literal["constant", "linear", "cosine"]

HINT_ROWS = 2**40
"""``num_embeddings`` of a RecStore table. The table has no size, so this is only a hint."""

LOG = "Curves and report"

LogDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder for TensorBoard curves and report.html.",
        show_default="runs/<example>-<date>-<time>, or the folder log in that of --checkpoint",
        rich_help_panel=LOG,
    ),
]
NoLog = Annotated[bool, typer.Option("--no-log", help="Write neither curves nor a report.", rich_help_panel=LOG)]
LogEvery = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Number of steps between two points of a curve.", rich_help_panel=LOG),
]
JsonOut = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="OUT",
        help="Write the result as JSON to this file. With -, write it to stdout, and the tables to stderr.",
        allow_dash=True,
        rich_help_panel=LOG,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The limits of each table. Without a limit, a table keeps all its rows in memory.

    Attributes:
        max_rows: The maximum number of rows of each table in memory, over all ranks.
        eviction: The eviction policy of a full table. LRU if only ``max_rows`` is given.
        half_life_steps: The half-life of LFU's frequencies, in steps.
        expire_steps: A row is deleted if no step has looked it up for this number of steps.
        min_frequency: The number of steps that look up an id before the id gets a row.
        cold_store: The cold store for evicted rows: the URL of a Redis server or a path for RocksDB.
    """

    max_rows: int | None = None
    eviction: Eviction | None = None
    half_life_steps: int | None = None
    expire_steps: int | None = None
    min_frequency: int | None = None
    cold_store: str | None = None

    def flags(self) -> dict[str, int | str]:
        """Returns the values of the flags that are set, by flag."""
        return {f"--{name.replace('_', '-')}": value for name, value in asdict(self).items() if value is not None}

    def check(self) -> None:
        """Checks the limits.

        Raises:
            DataError: A limit is invalid, or contradicts another limit.
        """
        try:
            self.options()
        except ValueError as error:
            raise DataError(str(error)) from error

    def options(self, seed: int = 0) -> TableOptions:
        """Returns the options of each table."""
        return options_of_flags(**asdict(self), seed=seed)

    def shown(self) -> dict[str, int | str | None]:
        """Returns the limits for a report, with the credentials removed from a URL."""
        store = None if self.cold_store is None else cold_store_of_flag(self.cold_store)
        return asdict(self) | ({"cold_store": store.public_url} if isinstance(store, RedisStore) else {})


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of a run. Each setting is a flag of the command.

    Attributes:
        backend: "recstore" (tables without a size, raw ids) or "fused" (stock TorchRec, ids modulo the table's size).
        dim: The width of the embeddings.
        num_embeddings: The number of rows of a fused table. RecStore ignores it.
        batch_size: The number of samples of a step, over all ranks.
        epochs: The number of passes over the training part.
        optimizer: The optimizer of the embeddings, fused into their backward pass.
        lr: The learning rate of the embeddings.
        dense_lr: The learning rate of the dense layers, which Adam trains.
        seed: The seed of the dense weights, the tables and all other random numbers.
        sharding: The sharding type of every table.
        bounds: The limits of each table.
        servers: The addresses of the parameter servers that own the tables, separated by commas. None: the tables are
            on the ranks.
        staleness: The number of updates that may be in progress while rows are read from servers.
        json_out: The file for the result as JSON. "-" is stdout; the report then goes to stderr.
        log: Whether curves are written during training, and a report at the end.
        log_dir: The folder for curves and report. None creates a new folder.
        log_every: The number of steps between two points of a curve.
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
    servers: str | None = None
    staleness: int = 1
    json_out: Path | None
    log: bool = False
    log_dir: Path | None = None
    log_every: int = 50

    @property
    def goes_on(self) -> bool:
        """Whether the run may resume another run and continue its curves."""
        return False

    @property
    def modulo(self) -> int | None:
        """The divisor that ids are taken modulo of, or None for raw ids."""
        return self.num_embeddings if self.backend == "fused" else None

    @property
    def declared_rows(self) -> int:
        """``num_embeddings`` in the configs of the tables."""
        return self.modulo or HINT_ROWS

    def options(self) -> TableOptions:
        """Returns the options of each table."""
        options = self.bounds.options(self.seed)
        if self.servers is None:
            return options
        addresses = [address.strip() for address in self.servers.split(",")]
        return replace(options, servers=Servers(addresses, staleness=self.staleness))

    def shown(self) -> dict[str, Any]:
        """Returns the settings for a report, by name, without output paths and without the credentials in a URL."""
        shown = asdict(self) | {"bounds": self.bounds.shown()}
        for name in ("json_out", "log", "log_dir", "log_every"):
            del shown[name]
        return {name: str(value) if isinstance(value, Path) else value for name, value in shown.items()}

    def check(self, world_size: int) -> None:
        """Checks the settings before the work begins.

        Raises:
            DataError: A setting contradicts another setting, or does not fit the number of ranks.
        """
        if self.batch_size % world_size:
            raise DataError(f"--batch-size {self.batch_size} cannot be split evenly over {world_size} ranks")
        if self.backend == "fused" and self.sharding == "row_wise":
            raise DataError("--backend fused has no row_wise sharding on CPU: TorchRec's sharder does not offer it")
        if self.backend == "fused" and self.bounds.flags():
            raise DataError(f"{next(iter(self.bounds.flags()))} is for --backend recstore: stock tables keep every row")
        self.bounds.check()
        if self.servers is not None:
            self._check_servers()
        max_rows = self.bounds.max_rows
        if self.sharding == "row_wise" and max_rows is not None and max_rows < world_size:
            raise DataError(f"--max-rows {max_rows} is less than the {world_size} ranks that share a table's rows")
        if self.backend == "fused" and self.dim % 4:
            raise DataError(f"--backend fused needs a --dim that is a multiple of 4, not {self.dim}")

    def _check_servers(self) -> None:
        if self.backend == "fused":
            raise DataError("--servers is for --backend recstore")
        if self.sharding != "table_wise":
            raise DataError("--servers needs --sharding table_wise: the servers distribute the rows of a table")
        if self.bounds.cold_store is not None:
            raise DataError("--cold-store cannot be used with --servers: each server chooses its own")
        try:
            self.options()
        except ValueError as error:
            raise DataError(f"--servers: {error}") from error
