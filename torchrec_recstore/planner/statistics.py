"""What was measured of tables: in checkpoints, or with a sample of batches."""

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
from torchrec_recstore.utils import ceil_div

HOT_PART = 10
"""``hot_share`` is that of one in so many ids."""
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
        hot_share: The share of the distinct ids of a batch that are among the tenth of
            the ids that was most frequent in earlier batches. About this share of a
            batch finds its rows on a GPU if a tenth of them is there.
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
    hot_share: float | None = None
    ns_per_id: float | None = None

    def __post_init__(self) -> None:
        for measured_field in fields(self):
            name = measured_field.name
            value = getattr(self, name)
            if value is None:
                continue
            numbers = value if isinstance(value, tuple) else (value,)
            # Rows can have left between two checkpoints.
            lower = -math.inf if name == "rows_per_step" else 0
            upper = 1 if name.endswith("_share") else math.inf
            if not all(_is_finite_number(number) for number in numbers):
                raise ValueError(f"{name} must be finite numbers, got {value!r}")
            if not all(lower <= number <= upper for number in numbers):
                raise ValueError(
                    f"{name} must be at least {lower} and at most {upper}, got"
                    f" {value!r}"
                )

    def after(self, steps: int) -> TableStatistics:
        """Returns the statistics after some more steps.

        The table goes on to grow as it was measured.

        A growth that slows down, as that of most tables does, makes this number an
        upper bound.

        Raises:
            ValueError: ``rows`` or ``rows_per_step`` was not measured.
        """
        if self.rows is None or self.rows_per_step is None:
            missing = "rows" if self.rows is None else "rows_per_step"
            raise ValueError(f"the growth is not known: {missing} was not measured")
        new_rows = steps * self.rows_per_step
        rows = round(self.rows + new_rows)
        return replace(self, rows=max(0, rows))

    def distinct_ids(self, samples: int) -> float:
        """Returns the number of distinct ids of a batch of so many samples.

        It is 0 if ``ids_per_sample`` was not measured. The share of distinct ids falls
        with the size of a batch, so that the number is an upper bound for a batch that
        is larger than the measured ones.
        """
        share = 1.0 if self.unique_share is None else self.unique_share
        ids_of_sample = sum(self.ids_per_sample or ())
        return samples * ids_of_sample * share


def _is_finite_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def combined_statistics(
    *sources: Mapping[str, TableStatistics],
) -> dict[str, TableStatistics]:
    """Returns the statistics of several sources by table name.

    The sources can be a checkpoint and batches.

    For each field of a table, the first source that measured it counts.
    """
    combined: dict[str, TableStatistics] = {}
    for source in sources:
        for name, table in source.items():
            if name in combined:
                earlier = _measured_fields(combined[name])
                table = replace(table, **earlier)
            combined[name] = table
    return combined


def _measured_fields(table: TableStatistics) -> dict[str, Any]:
    """Returns the fields that are not None."""
    measured = {}
    for name, value in asdict(table).items():
        if value is not None:
            measured[name] = value
    return measured


def measure_statistics(
    configs: Sequence[EmbeddingBagConfig] | Sequence[EmbeddingConfig],
    batches: Iterable[KeyedJaggedTensor],
    optimizer: Optimizer | None = None,
) -> dict[str, TableStatistics]:
    """Returns, by table name, what a sample of batches tells.

    This is all but the number of rows and their growth.

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
    table_batches: dict[str, list[KeyedJaggedTensor]] = {}
    for config in configs:
        table_batches[config.name] = []
    samples = 0
    for batch in batches:
        samples += batch.stride()
        missing = missing_features(batch.keys(), configs)
        if missing:
            raise ValueError(missing)
        for config in configs:
            features = {name: batch[name] for name in config.feature_names}
            table_batch = KeyedJaggedTensor.from_jt_dict(features)
            if len(table_batch.values()):
                table_batches[config.name].append(table_batch)

    statistics_by_name = {}
    for config in configs:
        statistics_by_name[config.name] = _measured(
            config,
            table_batches[config.name],
            samples,
            optimizer,
        )
    return statistics_by_name


def _measured(
    config: EmbeddingBagConfig | EmbeddingConfig,
    batches: Sequence[KeyedJaggedTensor],
    samples: int,
    optimizer: Optimizer | None,
) -> TableStatistics:
    if not batches:
        raise ValueError(f"table {config.name!r}: the batches have no ids")
    ids = torch.cat([batch.values() for batch in batches])
    _, id_counts = torch.unique(ids, return_counts=True)
    n_unique = 0
    for batch in batches:
        batch_ids = torch.unique(batch.values())
        n_unique += len(batch_ids)

    ids_per_sample = []
    lengths = [batch.length_per_key() for batch in batches]
    for feature_lengths in zip(*lengths, strict=True):
        ids_per_sample.append(sum(feature_lengths) / samples)

    ns_per_id = None
    if optimizer is not None:
        ns_per_id = _ns_per_id(config, batches, optimizer)
    return TableStatistics(
        ids_per_sample=tuple(ids_per_sample),
        unique_share=n_unique / len(ids),
        hottest_share=int(id_counts.max()) / len(ids),
        hot_share=_hot_share(batches),
        ns_per_id=ns_per_id,
    )


def _hot_share(batches: Sequence[KeyedJaggedTensor]) -> float | None:
    """Returns the share of the distinct ids of each later batch that are among the most
    frequent ids of the earlier half; None if there is one batch.
    """
    half = len(batches) // 2
    if half == 0:
        return None
    earlier = torch.cat([batch.values() for batch in batches[:half]])
    distinct_ids, counts = torch.unique(earlier, return_counts=True)
    hot_count = ceil_div(len(distinct_ids), HOT_PART)
    most_frequent = counts.topk(hot_count).indices
    hot_ids = distinct_ids[most_frequent]

    hot = 0
    distinct = 0
    for batch in batches[half:]:
        batch_ids = torch.unique(batch.values())
        is_hot = torch.isin(batch_ids, hot_ids)
        hot += int(is_hot.sum())
        distinct += len(batch_ids)
    return hot / distinct


def _ns_per_id(
    config: EmbeddingBagConfig | EmbeddingConfig,
    batches: Sequence[KeyedJaggedTensor],
    optimizer: Optimizer,
) -> float:
    """Returns the median over the batches, which are trained twice on a new table.

    The second time counts.
    """
    collection: Any = RecStoreEmbeddingCollection
    if isinstance(config, EmbeddingBagConfig):
        collection = RecStoreEmbeddingBagCollection
    module = collection([config], optimizer=optimizer)
    times = []
    for features in [*batches, *batches]:
        start = time.perf_counter_ns()
        output: Any = module(features)
        if isinstance(output, KeyedTensor):
            rows = [output.values()]
        else:
            rows = [feature_rows.values() for feature_rows in output.values()]
        gradients = [torch.ones_like(tensor) for tensor in rows]
        torch.autograd.backward(rows, gradients)
        elapsed_ns = time.perf_counter_ns() - start
        times.append(elapsed_ns / len(features.values()))
    second_times = times[len(batches) :]
    return statistics.median(second_times)


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
    run = sorted(path.glob(f"*/{METADATA}"))
    if (path / METADATA).is_file() or not run:
        checkpoints = [read_info(path)]
    else:
        checkpoints = [read_info(metadata.parent) for metadata in run]
        checkpoints.sort(key=lambda info: info.step)

    tables = {}
    for name, table in checkpoints[-1].tables.items():
        growth = None
        for info in reversed(checkpoints):
            earlier = info.tables.get(name)
            if earlier is not None and earlier.steps < table.steps:
                new_rows = table.rows - earlier.rows
                steps = table.steps - earlier.steps
                growth = new_rows / steps
                break
        tables[name] = TableStatistics(rows=table.rows, rows_per_step=growth)
    return tables


def write_statistics(
    path: str | os.PathLike[str],
    tables: Mapping[str, TableStatistics],
) -> None:
    """Writes statistics to a JSON file, which :func:`read_statistics` reads.

    Fields that are None are left out.

    Raises:
        OSError: The file cannot be written.
    """
    entries = {name: _measured_fields(table) for name, table in tables.items()}
    document = {
        "format": FORMAT,
        "version": VERSION,
        "tables": entries,
    }
    text = json.dumps(document, indent=1)
    Path(path).write_text(text + "\n")


def _read_file(path: Path) -> dict[str, TableStatistics]:
    try:
        document: Any = json.loads(path.read_bytes())
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"it is not of the format {FORMAT!r}")
        check_fields("it", document, ("format", "version", "tables"))
        version = document["version"]
        if version != VERSION:
            raise ValueError(
                f"it is of version {version}, and this version reads {VERSION}"
            )
        tables = {}
        for name, entry in document["tables"].items():
            check_fields(f"table {name!r}", entry, TableStatistics)
            per_feature = entry.get("ids_per_sample")
            if per_feature is not None:
                if not isinstance(per_feature, list):
                    raise ValueError(
                        f"table {name!r}: ids_per_sample must be a list, got"
                        f" {per_feature!r}"
                    )
                entry["ids_per_sample"] = tuple(per_feature)
            tables[name] = TableStatistics(**entry)
        return tables
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
