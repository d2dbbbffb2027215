"""The settings of the training examples, each of which is a flag.

This module imports no torch: ``--help`` is fast.
"""

# ruff: noqa: RUF009  (flag returns a field of a dataclass)

from __future__ import annotations

import inspect
import sys
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

import typer
from common.command import DataError, leave, prepare_torch

from torchrec_recstore.commands.output import status_of
from torchrec_recstore.option_flags import cold_store_of_flag, options_of_flags
from torchrec_recstore.options import RedisStore, Servers, TableOptions

_Settings = TypeVar("_Settings")

DATA, MODEL, BOUNDS, RUN, CHECKPOINTS, LOG = PANELS = (
    *("Data", "Model", "Limits of each table"),
    *("Run", "Checkpoints", "Curves and report"),
)

HINT_ROWS = 2**40
"""``num_embeddings`` of a RecStore table.

The table has no size, so this is only a hint.
"""


def flag(
    default: Any, panel: str | None, about: str, *names: str, **options: Any
) -> Any:
    """Returns a field of settings that is a flag.

    Args:
        default: The default value. ``MISSING``: the flag must be given.
        panel: The heading of the flag in ``--help``, one of ``PANELS``. None: no
            heading of its own.
        about: The text of the flag in ``--help``.
        names: The name of the flag. Default: the name of the field.
        options: More arguments of ``typer.Option``, such as ``min``.
    """
    return field(
        default=default,
        metadata={
            "flag": typer.Option(*names, help=about, rich_help_panel=panel, **options)
        },
    )


def refuse(*cases: tuple[object, str]) -> None:
    """Raises a DataError with the message of the first case whose condition is true."""
    for wrong, message in cases:
        if wrong:
            raise DataError(message)


def settings_of_flags(kind: type[_Settings]) -> _Settings:
    """Returns the settings that the flags of the command line give, and prepares the
    import of torch.

    The process ends here after ``--help``, and after one line on stderr for an invalid
    flag.

    Args:
        kind: A dataclass of fields that :func:`flag` returns. Its docstring is the text
            of ``--help``.
    """
    given: list[_Settings] = []

    def main(**values: Any) -> None:
        given.append(kind(**values))

    hints = get_type_hints(kind)
    panels = {panel: number for number, panel in enumerate(PANELS)}
    shown = sorted(
        fields(kind),
        key=lambda each: panels.get(each.metadata["flag"].rich_help_panel, 0),
    )
    main.__doc__ = kind.__doc__
    main.__signature__ = inspect.Signature(
        [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=(
                    inspect.Parameter.empty if each.default is MISSING else each.default
                ),
                annotation=Annotated[hints[each.name], each.metadata["flag"]],
            )
            for each in shown
        ]
    )
    main.__annotations__ = {}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    # `recstore train` runs a script under its own name.
    name = getattr(sys.modules["__main__"], "COMMAND", None)
    status = status_of(lambda: app(prog_name=name, standalone_mode=False))
    if not given:
        leave(status)
    prepare_torch()
    return given[0]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of a run's folder: checkpoints, curves and report.

    See ``run.Run``.
    """

    checkpoint: Path | None = flag(
        None,
        CHECKPOINTS,
        "Write a checkpoint after each epoch, to DIR/step-000000123.",
        metavar="DIR",
    )
    checkpoint_every: int | None = flag(
        None, CHECKPOINTS, "Also write a checkpoint every N steps.", min=1, metavar="N"
    )
    resume: bool = flag(
        False,
        CHECKPOINTS,
        "Resume from the newest checkpoint, if there is one.",
        "--resume",
    )
    keep: int = flag(
        3, CHECKPOINTS, "Keep the newest N checkpoints.", min=1, metavar="N"
    )
    log_dir: Path | None = flag(
        None,
        LOG,
        "Folder for TensorBoard curves and report.html.",
        metavar="DIR",
        show_default=(
            "runs/<example>-<date>-<time>, or the folder log in that of --checkpoint"
        ),
    )
    no_log: bool = flag(False, LOG, "Write neither curves nor a report.", "--no-log")
    log_every: int | None = flag(
        None,
        LOG,
        "Number of steps between two points of a curve.",
        min=1,
        metavar="N",
        show_default="a hundredth of the run, at most 50",
    )
    json_out: Path | None = flag(
        None,
        LOG,
        "Write the result as JSON to this file. With -, write it to stdout, and the"
        " tables to stderr.",
        "--json",
        metavar="OUT",
        allow_dash=True,
    )

    OF_THE_LOG: ClassVar[tuple[str, ...]] = (
        "json_out",
        "no_log",
        "log_dir",
        "log_every",
    )
    MAY_CHANGE: ClassVar[tuple[str, ...]] = (
        *OF_THE_LOG,
        "checkpoint",
        "checkpoint_every",
        "resume",
        "keep",
        "epochs",
    )
    """The settings that may have other values when a run is resumed.

    Subclasses add theirs.
    """

    def shown(self) -> dict[str, Any]:
        """Returns the settings for a report, by name, without those of the log and
        without credentials.
        """
        shown = {
            name: value
            for name, value in asdict(self).items()
            if name not in self.OF_THE_LOG
        }
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in shown.items()
        }

    def must_match(self) -> dict[str, Any]:
        """Returns the flags that must have the same values when a run is resumed, with
        their values.
        """
        given = {
            name: value
            for name, value in asdict(self).items()
            if name not in self.MAY_CHANGE
        }
        return {f"--{name.replace('_', '-')}": value for name, value in given.items()}

    def check(self) -> None:
        """Raises a DataError if a setting contradicts another setting."""
        if self.checkpoint is None:
            refuse(
                (self.resume, "--resume needs --checkpoint DIR"),
                (self.checkpoint_every, "--checkpoint-every needs --checkpoint DIR"),
            )


@dataclass(frozen=True, kw_only=True)
class TableSettings(RunSettings):
    """The settings of embedding tables: where they are, their limits, and how they are
    sharded.
    """

    backend: Literal["recstore", "fused"] = flag(
        "recstore", MODEL, "recstore: dynamic tables. fused: stock TorchRec."
    )
    dim: int = flag(16, MODEL, "Width of the embeddings.", min=1)
    num_embeddings: int = flag(
        100_000,
        MODEL,
        "Rows of each fused table. Ids are taken modulo this number.",
        min=1,
    )
    max_rows: int | None = flag(
        None,
        BOUNDS,
        "Maximum number of rows of each table in memory, over all ranks. It must be at"
        " least the number of distinct ids in a step.",
        min=1,
    )
    eviction: Literal["lru", "lfu"] | None = flag(
        None,
        BOUNDS,
        "Rows to evict when a table is full: the least recently used (lru, the default)"
        " or the least frequently used (lfu).",
    )
    half_life_steps: int | None = flag(
        None, BOUNDS, "Half-life of the frequencies of lfu, in steps.", min=1
    )
    lfu_count: Literal["steps", "occurrences"] | None = flag(
        None,
        BOUNDS,
        "What lfu counts: the steps with an id (the default), or the occurrences of the"
        " id in them.",
    )
    expire_steps: int | None = flag(
        None, BOUNDS, "Delete rows that were not looked up for this many steps.", min=1
    )
    min_frequency: int | None = flag(
        None, BOUNDS, "Number of steps with an id before it gets a row.", min=1, max=255
    )
    cold_store: str | None = flag(
        None,
        BOUNDS,
        "Cold store for evicted rows: a folder on an SSD, rocksdb://..., or"
        " redis://...",
        metavar="URL-OR-PATH",
    )
    servers: str | None = flag(
        None,
        RUN,
        "Parameter servers (recstore serve) that own the tables. Rows are read a batch"
        " ahead.",
        metavar="HOST:PORT,...",
    )
    staleness: int = flag(
        1,
        RUN,
        "Number of updates that may be in progress while rows are read from servers.",
        min=0,
    )
    token_file: Path | None = flag(
        None, RUN, "File with the token of the servers.", metavar="FILE"
    )
    tls_ca: Path | None = flag(
        None,
        RUN,
        "CA certificates of the servers. The connections are then encrypted.",
        metavar="PEM",
    )
    tls_cert: Path | None = flag(
        None,
        RUN,
        "Certificate of this run, if the servers require certificates.",
        metavar="PEM",
    )
    tls_key: Path | None = flag(None, RUN, "Private key of --tls-cert.", metavar="PEM")
    batch_size: int = flag(
        512, RUN, "Number of samples of a step, over all ranks.", min=1
    )
    seed: int = flag(
        0, RUN, "Seed of the weights, the tables and the generated rows.", min=0
    )
    sharding: Literal["table_wise", "row_wise"] = flag(
        "table_wise", RUN, "Sharding type of each table."
    )

    LIMITS: ClassVar[tuple[str, ...]] = (
        "max_rows",
        "eviction",
        "half_life_steps",
        "lfu_count",
        "expire_steps",
        "min_frequency",
        "cold_store",
    )

    @property
    def limits(self) -> dict[str, Any]:
        """The limits of each table, by the name of their setting.

        None: the limit is not set.
        """
        return {name: getattr(self, name) for name in self.LIMITS}

    @property
    def limit_flags(self) -> list[str]:
        """The flags of the limits that are set."""
        return [
            f"--{name.replace('_', '-')}"
            for name, value in self.limits.items()
            if value is not None
        ]

    @property
    def access_files(self) -> dict[str, Path | None]:
        """The certificates and keys of connections to servers, by the name of their
        setting.
        """
        return {
            "tls_ca": self.tls_ca,
            "tls_cert": self.tls_cert,
            "tls_key": self.tls_key,
        }

    @property
    def modulo(self) -> int | None:
        """The divisor that ids are taken modulo of, or None for raw ids."""
        return self.num_embeddings if self.backend == "fused" else None

    @property
    def declared_rows(self) -> int:
        """``num_embeddings`` in the configs of the tables."""
        return self.modulo or HINT_ROWS

    def options(self) -> TableOptions:
        """Returns the options of each RecStore table."""
        options = options_of_flags(**self.limits, seed=self.seed)
        if self.sharding == "row_wise":
            # The ids of a click log are much smaller than the hint, so block routing
            # would put all on the first rank.
            options = replace(options, routing="hash")
        if self.servers is None:
            return options
        addresses = [address.strip() for address in self.servers.split(",")]
        token = None if self.token_file is None else self.token_file.read_text().strip()
        files = {
            name: None if file is None else str(file)
            for name, file in self.access_files.items()
        }
        return replace(
            options,
            servers=Servers(addresses, staleness=self.staleness, token=token, **files),
        )

    def shown(self) -> dict[str, Any]:
        """See :meth:`RunSettings.shown`.

        ``bounds`` are the limits, with the credentials removed from a URL.
        """
        store = None if self.cold_store is None else cold_store_of_flag(self.cold_store)
        limits = self.limits | (
            {"cold_store": store.public_url} if isinstance(store, RedisStore) else {}
        )
        shown = {
            name: value
            for name, value in super().shown().items()
            if name not in self.LIMITS
        }
        return shown | {"bounds": limits}

    def check_tables(self, world_size: int) -> None:
        """Raises a DataError if a setting contradicts another setting, or does not fit
        the number of ranks.
        """
        uneven = self.batch_size % world_size
        fused, row_wise = self.backend == "fused", self.sharding == "row_wise"
        refuse(
            (
                uneven,
                (
                    f"--batch-size {self.batch_size} cannot be split evenly over"
                    f" {world_size} ranks"
                ),
            ),
            (
                fused and row_wise,
                (
                    "--backend fused has no row_wise sharding on CPU: TorchRec's"
                    " sharder does not offer it"
                ),
            ),
            (
                fused and self.limit_flags,
                (
                    f"{' '.join(self.limit_flags[:1])} is for --backend recstore: stock"
                    " tables keep every row"
                ),
            ),
            (fused and self.servers is not None, "--servers is for --backend recstore"),
            (
                self.servers is None
                and any((self.token_file, *self.access_files.values())),
                "--token-file, --tls-ca, --tls-cert and --tls-key need --servers",
            ),
            (
                fused and self.dim % 4,
                (
                    "--backend fused needs a --dim that is a multiple of 4, not"
                    f" {self.dim}"
                ),
            ),
            (
                self.servers is not None and row_wise,
                (
                    "--servers needs --sharding table_wise: the servers distribute the"
                    " rows of a table"
                ),
            ),
            (
                self.servers is not None and self.cold_store is not None,
                (
                    "--cold-store cannot be used with --servers: each server chooses"
                    " its own"
                ),
            ),
            (
                row_wise and self.max_rows is not None and self.max_rows < world_size,
                (
                    f"--max-rows {self.max_rows} is less than the {world_size} ranks"
                    " that share a table's rows"
                ),
            ),
        )
        try:
            replace(self, servers=None).options()
        except ValueError as error:
            raise DataError(str(error)) from error
        try:
            self.options()
        except OSError as error:
            raise DataError(f"--token-file: {error}") from error
        except ValueError as error:
            raise DataError(f"--servers: {error}") from error
