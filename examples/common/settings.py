"""The settings of the training examples, each of which is a flag.

This module imports no torch: ``--help`` is fast.
"""

# ruff: noqa: RUF009  (flag returns a field of a dataclass)

from __future__ import annotations

import inspect
import sys
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

import typer

from common.command import DataError, leave, prepare_torch
from torchrec_recstore.commands.config_file import ConfigFile
from torchrec_recstore.commands.output import status_of
from torchrec_recstore.option_flags import cold_store_of_flag, options_of_flags
from torchrec_recstore.options import RedisStore, Servers, TableOptions

_Settings = TypeVar("_Settings")

# The headings of --help
DATA = "Data"
MODEL = "Model"
BOUNDS = "Limits of each table"
RUN = "Run"
CHECKPOINTS = "Checkpoints"
LOG = "Curves and report"
PANELS = (DATA, MODEL, BOUNDS, RUN, CHECKPOINTS, LOG)

HINT_ROWS = 2**40
"""``num_embeddings`` of a RecStore table.

The table has no size, so this is only a hint.
"""


def flag(
    default: Any,
    panel: str | None,
    about: str,
    *names: str,
    **options: Any,
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
    option = typer.Option(
        *names,
        help=about,
        rich_help_panel=panel,
        **options,
    )
    return field(default=default, metadata={"flag": option})


def settings_of_flags(kind: type[_Settings]) -> _Settings:
    """Returns the settings that the flags of the command line give.

    The import of torch is prepared. The process ends here after ``--help``, and after
    one line on stderr for an invalid flag.

    Args:
        kind: A dataclass of fields that :func:`flag` returns. Its docstring is the text
            of ``--help``.
    """
    settings: _Settings | None = None

    def main(config: Path | None = None, **values: Any) -> None:
        nonlocal settings
        settings = kind(**values)

    main.__doc__ = kind.__doc__
    main.__signature__ = _signature_of_flags(kind)
    main.__annotations__ = {}
    app = typer.Typer(
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    app.command()(main)
    # `recstore train` runs a script under its own name.
    name = getattr(sys.modules["__main__"], "COMMAND", None)
    status = status_of(lambda: app(prog_name=name, standalone_mode=False))
    if settings is None:
        leave(status)
    prepare_torch()
    return settings


def _signature_of_flags(kind: type) -> inspect.Signature:
    """Returns the signature of a function that takes each field of a dataclass.

    Typer makes a flag of each parameter, in this order. The parameters of a heading
    follow each other.
    """

    def panel_number(setting: Field) -> int:
        panel = setting.metadata["flag"].rich_help_panel
        return PANELS.index(panel) if panel in PANELS else 0

    hints = get_type_hints(kind)
    parameters = []
    for setting in sorted(fields(kind), key=panel_number):
        is_required = setting.default is MISSING
        parameters.append(
            inspect.Parameter(
                setting.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if is_required else setting.default,
                annotation=Annotated[hints[setting.name], setting.metadata["flag"]],
            )
        )
    parameters.append(
        inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=ConfigFile,
        )
    )
    return inspect.Signature(parameters)


def flag_name(name: str) -> str:
    """Returns the flag of a setting: ``--max-rows`` of ``max_rows``."""
    return f"--{name.replace('_', '-')}"


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
        None,
        CHECKPOINTS,
        "Also write a checkpoint every N steps.",
        min=1,
        metavar="N",
    )
    resume: bool = flag(
        False,
        CHECKPOINTS,
        "Resume from the newest checkpoint, if there is one.",
        "--resume",
    )
    keep: int = flag(
        3,
        CHECKPOINTS,
        "Keep the newest N checkpoints.",
        min=1,
        metavar="N",
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
        """Returns the settings for a report, by name.

        The settings of the log and credentials are left out.
        """
        shown = {}
        for name, value in asdict(self).items():
            if name not in self.OF_THE_LOG:
                shown[name] = str(value) if isinstance(value, Path) else value
        return shown

    def must_match(self) -> dict[str, Any]:
        """Returns the values that must be the same when a run is resumed, by flag."""
        return {
            flag_name(name): value
            for name, value in asdict(self).items()
            if name not in self.MAY_CHANGE
        }

    def check(self) -> None:
        """Raises a DataError if a setting contradicts another setting."""
        if self.checkpoint is None:
            if self.resume:
                raise DataError("--resume needs --checkpoint DIR")
            if self.checkpoint_every is not None:
                raise DataError("--checkpoint-every needs --checkpoint DIR")


@dataclass(frozen=True, kw_only=True)
class TableSettings(RunSettings):
    """The settings of embedding tables: their places, limits and sharding."""

    backend: Literal["recstore", "fused"] = flag(
        "recstore", MODEL, "recstore: dynamic tables. fused: stock TorchRec."
    )
    dim: int = flag(
        16,
        MODEL,
        "Width of the embeddings.",
        min=1,
    )
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
        None,
        BOUNDS,
        "Half-life of the frequencies of lfu, in steps.",
        min=1,
    )
    lfu_count: Literal["steps", "occurrences"] | None = flag(
        None,
        BOUNDS,
        "What lfu counts: the steps with an id (the default), or the occurrences of the"
        " id in them.",
    )
    expire_steps: int | None = flag(
        None,
        BOUNDS,
        "Delete rows that were not looked up for this many steps.",
        min=1,
    )
    min_frequency: int | None = flag(
        None,
        BOUNDS,
        "Number of steps with an id before it gets a row.",
        min=1,
        max=255,
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
        None,
        RUN,
        "File with the token of the servers.",
        metavar="FILE",
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
    tls_key: Path | None = flag(
        None,
        RUN,
        "Private key of --tls-cert.",
        metavar="PEM",
    )
    batch_size: int = flag(
        512,
        RUN,
        "Number of samples of a step, over all ranks.",
        min=1,
    )
    seed: int = flag(
        0,
        RUN,
        "Seed of the weights, the tables and the generated rows.",
        min=0,
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
            flag_name(name) for name, value in self.limits.items() if value is not None
        ]

    @property
    def access_files(self) -> dict[str, Path | None]:
        """The certificates and keys of connections to servers, by setting."""
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
        servers = Servers(
            addresses,
            staleness=self.staleness,
            token=token,
            **files,
        )
        return replace(options, servers=servers)

    def shown(self) -> dict[str, Any]:
        """See :meth:`RunSettings.shown`.

        ``bounds`` are the limits, with the credentials removed from a URL.
        """
        limits = self.limits
        if self.cold_store is not None:
            store = cold_store_of_flag(self.cold_store)
            if isinstance(store, RedisStore):
                limits["cold_store"] = store.public_url
        shown = {
            name: value
            for name, value in super().shown().items()
            if name not in self.LIMITS
        }
        return shown | {"bounds": limits}

    def check_tables(self, world_size: int) -> None:
        """Checks the settings of the tables.

        Raises:
            DataError: A setting contradicts another setting, or does not fit the number
                of ranks.
        """
        if self.batch_size % world_size != 0:
            raise DataError(
                f"--batch-size {self.batch_size} cannot be split evenly over"
                f" {world_size} ranks"
            )
        if self.backend == "fused":
            self._check_stock_tables()
        access = (self.token_file, *self.access_files.values())
        if self.servers is None and any(access):
            raise DataError(
                "--token-file, --tls-ca, --tls-cert and --tls-key need --servers"
            )
        if self.backend == "fused" and self.dim % 4 != 0:
            raise DataError(
                f"--backend fused needs a --dim that is a multiple of 4, not {self.dim}"
            )
        row_wise = self.sharding == "row_wise"
        if self.servers is not None and row_wise:
            raise DataError(
                "--servers needs --sharding table_wise: the servers distribute the rows"
                " of a table"
            )
        if self.servers is not None and self.cold_store is not None:
            raise DataError(
                "--cold-store cannot be used with --servers: each server chooses its"
                " own"
            )
        if row_wise and self.max_rows is not None and self.max_rows < world_size:
            raise DataError(
                f"--max-rows {self.max_rows} is less than the {world_size} ranks that"
                " share a table's rows"
            )
        self._check_options()

    def _check_stock_tables(self) -> None:
        if self.sharding == "row_wise":
            raise DataError(
                "--backend fused has no row_wise sharding on CPU: TorchRec's sharder"
                " does not offer it"
            )
        if self.limit_flags:
            raise DataError(
                f"{self.limit_flags[0]} is for --backend recstore: stock tables keep"
                " every row"
            )
        if self.servers is not None:
            raise DataError("--servers is for --backend recstore")

    def _check_options(self) -> None:
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
