"""What was measured of tables: in a checkpoint, in the checkpoints of a run, or with a
sample of batches.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig

from torchrec_recstore.checkpoint.info import METADATA, read_info
from torchrec_recstore.encoding import check_fields
from torchrec_recstore.modules import (
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
)
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.table_configs import missing_features

FORMAT = "recstore statistics"
VERSION = 1


@dataclass(frozen=True)
class TableStatistics:
    """What was measured of one table. A field is None if it was not measured.

    A checkpoint tells ``rows``, and the checkpoints of a run ``rows_per_step``, too.
    Only batches tell the rest.

    Args:
        rows: The number of rows of the whole table, over all ranks.
        rows_per_step: The number of rows by which the table grows in a training step.
        ids_per_sample: For each feature of the table, in their order, the mean number
            of ids of a sample.
        unique_share: The number of distinct ids of a batch, divided by the number of
            its ids, over the features of the table.
        hottest_share: The share of the ids that are equal to the most frequent id. With
            row-wise sharding, one rank gets all of them.
        ns_per_id: The nanoseconds of a forward and a backward on this machine, divided
            by the number of ids.

    Raises:
        ValueError: A number is negative or not finite, or a share is above 1. The
            message names the field.
    """

    rows: int | None = None
    rows_per_step: float | None = None
    ids_per_sample: tuple[float, ...] | None = None
    unique_share: float | None = None
    hottest_share: float | None = None
    ns_per_id: float | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            numbers = (
                value if isinstance(value, tuple) else () if value is None else (value,)
            )
            most = 1 if each.name.endswith("_share") else math.inf
            # Rows can have left between two checkpoints.
            least = -math.inf if each.name == "rows_per_step" else 0
            if any(
                isinstance(n, bool)
                or not isinstance(n, int | float)
                or not math.isfinite(n)
                for n in numbers
            ):
                raise ValueError(f"{each.name} must be finite numbers, got {value!r}")
            if any(not least <= n <= most for n in numbers):
                raise ValueError(
                    f"{each.name} must be at least {least} and at most {most}, got"
                    f" {value!r}"
                )

    def after(self, steps: int) -> TableStatistics:
        """Returns the statistics after some more steps, if the table goes on to grow as
        it was measured.

        A growth that slows down, as that of most tables does, makes this number an
        upper bound.

        Raises:
            ValueError: ``rows`` or ``rows_per_step`` was not measured.
        """
        if self.rows is None or self.rows_per_step is None:
            missing = "rows" if self.rows is None else "rows_per_step"
            raise ValueError(f"the growth is not known: {missing} was not measured")
        return replace(self, rows=max(0, round(self.rows + steps * self.rows_per_step)))


def combined_statistics(
    *sources: Mapping[str, TableStatistics],
) -> dict[str, TableStatistics]:
    """Returns the statistics of several sources by table name, such as those of a
    checkpoint and those of batches.

    For each field of a table, the first source that measured it counts.
    """
    found: dict[str, TableStatistics] = {}
    for source in sources:
        for name, table in source.items():
            known = {
                f.name: v
                for f in fields(table)
                if (v := getattr(found.get(name), f.name, None)) is not None
            }
            found[name] = replace(table, **known)
    return found


def measure_statistics(
    configs: Sequence[EmbeddingBagConfig] | Sequence[EmbeddingConfig],
    batches: Iterable[KeyedJaggedTensor],
    optimizer: Optimizer | None = None,
) -> dict[str, TableStatistics]:
    """Returns, by table name, what a sample of batches tells: all but the number of
    rows and their growth.

    The ids of the tables' features are kept in memory.

    Args:
        configs: The configs of the tables of one collection.
        batches: At least one batch, on the CPU, with all features of the tables. The
            share of distinct ids and the time depend on the batch size: take that of
            one rank.
        optimizer: The optimizer with which the batches are also trained, on new tables
            in this process, to measure ``ns_per_id``. They are trained twice, and the
            second time, in which no row is made, counts. Default: None, ``ns_per_id``
            is not measured.

    Raises:
        ValueError: There is no batch or no id, or a batch lacks a feature. The message
            names the feature.
    """
    own: dict[str, list[KeyedJaggedTensor]] = {config.name: [] for config in configs}
    samples = 0
    for batch in batches:
        samples += batch.stride()
        if lacking := missing_features(batch.keys(), configs):
            raise ValueError(lacking)
        for config in configs:
            of_table = KeyedJaggedTensor.from_jt_dict(
                {name: batch[name] for name in config.feature_names}
            )
            if len(of_table.values()):
                own[config.name].append(of_table)
    return {
        config.name: _measured(config, own[config.name], samples, optimizer)
        for config in configs
    }


def _measured(
    config: EmbeddingBagConfig | EmbeddingConfig,
    own: Sequence[KeyedJaggedTensor],
    samples: int,
    optimizer: Optimizer | None,
) -> TableStatistics:
    if not own:
        raise ValueError(f"table {config.name!r}: the batches have no ids")
    ids = torch.cat([features.values() for features in own])
    return TableStatistics(
        ids_per_sample=tuple(
            sum(counts) / samples
            for counts in zip(*(each.length_per_key() for each in own), strict=True)
        ),
        unique_share=sum(len(torch.unique(features.values())) for features in own)
        / len(ids),
        hottest_share=int(torch.unique(ids, return_counts=True)[1].max()) / len(ids),
        ns_per_id=None if optimizer is None else _ns_per_id(config, own, optimizer),
    )


def _ns_per_id(
    config: EmbeddingBagConfig | EmbeddingConfig,
    batches: Sequence[KeyedJaggedTensor],
    optimizer: Optimizer,
) -> float:
    """Returns the median over the batches, which are trained twice on a new table.

    The second time counts.
    """
    pools = isinstance(config, EmbeddingBagConfig)
    collection: Any = (
        RecStoreEmbeddingBagCollection if pools else RecStoreEmbeddingCollection
    )
    module = collection([config], optimizer=optimizer)
    times = []
    for features in [*batches, *batches]:
        start = time.perf_counter_ns()
        out: Any = module(features)
        rows = (
            [out.values()]
            if isinstance(out, KeyedTensor)
            else [each.values() for each in out.values()]
        )
        torch.autograd.backward(rows, [torch.ones_like(each) for each in rows])
        times.append((time.perf_counter_ns() - start) / len(features.values()))
    return statistics.median(times[len(batches) :])


def read_statistics(path: str | os.PathLike[str]) -> dict[str, TableStatistics]:
    """Reads the statistics of tables.

    Args:
        path: A file of :func:`write_statistics`; the directory of a checkpoint, which
            tells ``rows``; or the directory of a run with at least two checkpoints,
            which tell ``rows`` and ``rows_per_step``: of the last checkpoint, and
            between the last two that have the table. Nothing else is known of a
            checkpoint, and is None.

    Raises:
        FileNotFoundError: There is no such file or checkpoint.
        ValueError: The file is not one of statistics. The message names it.
        CheckpointError: The metadata of a checkpoint is damaged.
    """
    path = Path(path)
    if path.is_file():
        return _read_file(path)
    if (path / METADATA).is_file() or not (
        inside := sorted(path.glob(f"*/{METADATA}"))
    ):
        return {
            name: TableStatistics(rows=table.rows)
            for name, table in read_info(path).tables.items()
        }
    checkpoints = sorted(
        (read_info(each.parent) for each in inside), key=lambda info: info.step
    )
    found = {}
    for name, table in checkpoints[-1].tables.items():
        earlier = [info.tables[name] for info in checkpoints if name in info.tables]
        earlier = [each for each in earlier if each.steps < table.steps]
        growth = (
            (table.rows - earlier[-1].rows) / (table.steps - earlier[-1].steps)
            if earlier
            else None
        )
        found[name] = TableStatistics(rows=table.rows, rows_per_step=growth)
    return found


def write_statistics(
    path: str | os.PathLike[str], tables: Mapping[str, TableStatistics]
) -> None:
    """Writes statistics to a JSON file, which :func:`read_statistics` reads.

    Fields that are None are left out.

    Raises:
        OSError: The file cannot be written.
    """
    entries = {
        name: {k: v for k, v in asdict(table).items() if v is not None}
        for name, table in tables.items()
    }
    Path(path).write_text(
        json.dumps({"format": FORMAT, "version": VERSION, "tables": entries}, indent=1)
        + "\n"
    )


def _read_file(path: Path) -> dict[str, TableStatistics]:
    try:
        document: Any = json.loads(path.read_bytes())
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"it is not of the format {FORMAT!r}")
        check_fields("it", document, ("format", "version", "tables"))
        if document["version"] != VERSION:
            raise ValueError(
                f"it is of version {document['version']}, and this version reads"
                f" {VERSION}"
            )
        found = {}
        for name, entry in document["tables"].items():
            check_fields(f"table {name!r}", entry, TableStatistics)
            if (per_feature := entry.get("ids_per_sample")) is not None:
                if not isinstance(per_feature, list):
                    raise ValueError(
                        f"table {name!r}: ids_per_sample must be a list, got"
                        f" {per_feature!r}"
                    )
                entry["ids_per_sample"] = tuple(per_feature)
            found[name] = TableStatistics(**entry)
        return found
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
