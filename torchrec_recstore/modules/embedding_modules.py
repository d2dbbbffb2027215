"""TorchRec's embedding collections with RecStore tables in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    pooling_type_to_str,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    reorder_inverse_indices,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_recstore.kernels import RowService
from torchrec_recstore.kernels.device_copies import CopyTarget, to_device
from torchrec_recstore.modules.eager_collection import (
    EagerCollection,
    Features,
    given_configs,
)
from torchrec_recstore.modules.eager_groups import Bags, EagerTable
from torchrec_recstore.modules.table_module import optimizer_of
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions

DEFAULT_OPTIONS = TableOptions()


class RecStoreEmbeddingBagCollection(EagerCollection, EmbeddingBagCollectionInterface):  # type: ignore[misc]
    """An ``EmbeddingBagCollection`` in one process whose tables accept any int64 id.

    The output has the order, names and shapes of TorchRec's ``EmbeddingBagCollection``.
    In training, the forward pass makes a row for each new id, and the backward pass
    updates the rows with the fused optimizer. The results are equal to those of the
    sharded module, bit for bit. In evaluation, or if a table's ``weight.requires_grad``
    is False, nothing changes, and ``TableOptions.missing`` determines the row that is
    read for an id without a row.

    Args:
        embedding_bag_configs: The configs of the tables: ``EmbeddingBagConfig``, or
            mappings of its arguments.
        lr: The learning rate of the default optimizer.
        enable_fusion: Whether one native call looks up all tables that have the same
            pooling. If False, there is one call for each table; the results are the
            same.
        fusion_k: Has no effect; ids have 64 bits. It is accepted for compatibility.
        tables: TorchRec's name for ``embedding_bag_configs``. Exactly one of the two
            must be given.
        is_weighted: Whether the per-sample weights of the input are used.
        optimizer: The optimizer of all tables, from ``torchrec_recstore.optim``.
            Default: None, ``RowWiseAdagrad(lr)``.
        options: The options of all tables, or a mapping from table names to options.
        device, fused, state_dtype: See :class:`RecStoreEmbedding`.
        client: A ``RecStoreClient`` with the tables, usually on parameter servers. The
            rows then belong to the servers: ``client.save`` saves them, and
            ``state_dict`` does not contain them. Rows are made by the update of a
            backward pass. ``fused`` and ``state_dtype`` cannot be given. Default: None,
            the tables are in the module.
        staleness: The number of updates of this process that may be in progress while
            rows are read. With 0, each backward pass waits for its update. It needs
            ``client``.

    Raises:
        TypeError, ValueError: An argument has an unsupported type or value, or RecStore
            does not support a table; the message names the argument or the table.
        ColdStoreError: A cold store cannot be opened.
        ImportError: The package of a cold store is not installed.
        ServiceError: A server of ``client`` cannot be reached, or refuses a table.

    Example::

        user = EmbeddingBagConfig(
            name="t_user",
            embedding_dim=16,
            num_embeddings=2**40,
            feature_names=["user"],
        )
        ebc = RecStoreEmbeddingBagCollection([user])
        ids = KeyedJaggedTensor(
            ["user"],
            values=torch.tensor([7, -1, 2**62]),
            lengths=torch.tensor([2, 1]),
        )
        ebc(ids).values().sum().backward()  # makes three rows and updates them
    """

    _tables_name = "embedding_bags"

    def __init__(
        self,
        embedding_bag_configs: (
            Sequence[EmbeddingBagConfig | Mapping[str, Any]] | None
        ) = None,
        lr: float = 0.01,
        enable_fusion: bool = True,
        fusion_k: int = 30,
        *,
        tables: Sequence[EmbeddingBagConfig | Mapping[str, Any]] | None = None,
        is_weighted: bool = False,
        device: torch.device | str | int | None = None,
        optimizer: Optimizer | None = None,
        options: TableOptions | Mapping[str, TableOptions] = DEFAULT_OPTIONS,
        fused: bool = True,
        state_dtype: torch.dtype = torch.float32,
        client: RowService | None = None,
        staleness: int = 0,
    ) -> None:
        super().__init__()
        configs = given_configs(
            embedding_bag_configs,
            tables,
            "embedding_bag_configs",
            EmbeddingBagConfig,
        )
        self._is_weighted = is_weighted
        self._poolings = [_pooling(config) for config in configs]
        self._register(configs, enable_fusion, fusion_k)
        optimizer = optimizer_of(optimizer, lr)
        self.embedding_bags = self._tables(
            optimizer,
            options,
            fused,
            device,
            state_dtype,
            client,
            staleness,
        )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Returns the pooled rows of the tables' features.

        Args:
            features: The ids, of any integer dtype, of the tables' features and
                possibly of others; a ``KeyedJaggedTensor`` or a ``TensorDict``. If the
                batch size varies by feature, the features must have inverse indices, as
                with TorchRec's module.

        Returns:
            (batch size, sum of dims) float32, on the device of ``features``: table by
            table, feature by feature.

        Raises:
            ValueError: A feature is missing.
            TypeError: The ids are not integers.
            RuntimeError: The module is on the meta device.
            ValueError, MemoryError, ColdStoreError: See
                :class:`torchrec_recstore.kernels.PooledGroup`.
        """
        batch = Features(
            maybe_td_to_kjt(features, None),
            self._is_weighted,
            self._configs,
        )
        inverse = batch.on_host.inverse_indices_or_none()
        rows_of_tables: dict[int, list[Tensor]] = {}
        groups = list(self._groups(self._poolings))
        for numbers, trains in groups:
            lookup = self._lookup_of(batch, numbers)
            out = self._table_groups.bags(
                lookup.tables,
                lookup.feature_tables,
                lookup.pooling,
                lookup.bags,
                train=trains,
                to=batch.target,
            )
            if self._has_device_rows and len(groups) > 1:
                out = _at_target(out, batch.target)
            has_all_tables = len(numbers) == len(self._poolings)
            if has_all_tables and lookup.bag_counts is None and inverse is None:
                return self._keyed(out, batch.target)
            rows_of_features = iter(lookup.rows_of_features(out))
            for number in numbers:
                rows_of_tables[number] = [
                    next(rows_of_features) for _ in self._feature_names[number]
                ]
        pooled = []
        for number in range(len(self._poolings)):
            pooled.extend(rows_of_tables[number])
        if inverse is not None:
            features_in_order = []
            for names in self._feature_names:
                features_in_order.extend(names)
            order = reorder_inverse_indices(inverse, features_in_order)
            order = order.to(pooled[0].device)
            pooled = [
                rows.index_select(0, bags)
                for rows, bags in zip(pooled, order, strict=True)
            ]
        return self._keyed(torch.cat(pooled, dim=1), batch.target)

    def _keyed(self, pooled: Tensor, target: CopyTarget | None) -> KeyedTensor:
        """Returns pooled rows, (batch size, sum of dims), where the rows of the batch
        go, with the name of each feature.
        """
        keys = []
        lengths = []
        for config, names in zip(self._configs, self._names_by_table, strict=True):
            keys.extend(names)
            lengths.extend([config.embedding_dim] * len(config.feature_names))
        return KeyedTensor(keys, lengths, _at_target(pooled, target))

    def prefetch(self, features: KeyedJaggedTensor) -> None:
        """Prepares the rows of a batch before its training forward.

        See :meth:`forward` for the argument.

        With ``client``, the rows of all tables are requested in another thread. The
        next forward of the same ids takes them, and reads the rows again that have been
        updated since, so that the results are the same. Without ``client``, see
        :meth:`torchrec_recstore.kernels.PooledGroup.prefetch`. In evaluation, nothing
        is done.
        """
        batch = Features(
            maybe_td_to_kjt(features, None),
            self._is_weighted,
            self._configs,
        )
        for numbers, trains in self._groups(self._poolings):
            if trains:
                lookup = self._lookup_of(batch, numbers)
                self._table_groups.prefetch_bags(
                    lookup.tables,
                    lookup.feature_tables,
                    lookup.pooling,
                    lookup.bags,
                    to=batch.target,
                )

    def _lookup_of(self, batch: Features, numbers: Sequence[int]) -> _PooledLookup:
        """Returns the lookup of a batch in the tables with these numbers."""
        feature_tables = []
        feature_names = []
        for place, number in enumerate(numbers):
            names = self._feature_names[number]
            feature_tables.extend([place] * len(names))
            feature_names.extend(names)
        bags, bag_counts = batch.bags(feature_names)
        modules = self._modules_by_table()
        return _PooledLookup(
            tables=[modules[number] for number in numbers],
            feature_tables=feature_tables,
            pooling=self._poolings[numbers[0]],
            bags=bags,
            bag_counts=bag_counts,
        )

    def is_weighted(self) -> bool:
        """Returns whether the per-sample weights of the input are used."""
        return self._is_weighted

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns the configs of the tables, in the given order."""
        return self._configs


@dataclass(slots=True)
class _PooledLookup:
    """The arguments of the lookup of a batch in several tables with one pooling.

    ``feature_tables`` are the positions in ``tables`` of the features' tables, and
    ``bag_counts`` the number of bags of each feature if it varies.
    """

    tables: list[EagerTable]
    feature_tables: list[int]
    pooling: Any
    bags: Bags
    bag_counts: list[int] | None

    def rows_of_features(self, out: Tensor) -> list[Tensor]:
        """Returns the part of the output of the lookup that is each feature's."""
        dims = [self.tables[place].table.dim for place in self.feature_tables]
        parts = torch.split(out, dims, dim=1)
        if self.bag_counts is None:
            return list(parts)
        return [
            part[:count] for part, count in zip(parts, self.bag_counts, strict=True)
        ]


def _pooling(config: EmbeddingBagConfig) -> Any:
    if config.pooling not in (PoolingType.SUM, PoolingType.MEAN):
        raise ValueError(
            f"RecStore table {config.name!r}: pooling must be SUM or MEAN, got"
            f" {config.pooling}"
        )
    return pooling_type_to_str(config.pooling)


class RecStoreEmbeddingCollection(EagerCollection, EmbeddingCollectionInterface):  # type: ignore[misc]
    """An ``EmbeddingCollection`` in one process whose tables accept any int64 id.

    The output has one row for each id. Rows are made and updated as in
    :class:`RecStoreEmbeddingBagCollection`.

    Args:
        embedding_configs: The configs of the tables: ``EmbeddingConfig``, or mappings
            of its arguments. All tables must have the same dim.
        lr, enable_fusion, fusion_k: See :class:`RecStoreEmbeddingBagCollection`.
        device, optimizer, options, fused, state_dtype, client, staleness: See
            :class:`RecStoreEmbeddingBagCollection`.
        tables: TorchRec's name for ``embedding_configs``. Exactly one of the two must
            be given.
        need_indices: Whether the output has the ids as its weights.

    Raises:
        ValueError: The tables have different dims.
        TypeError, ValueError, ColdStoreError, ImportError: See
            :class:`RecStoreEmbeddingBagCollection`.

    Example::

        item = EmbeddingConfig(
            name="t_item",
            embedding_dim=8,
            num_embeddings=2**40,
            feature_names=["item"],
        )
        ec = RecStoreEmbeddingCollection([item])
        ids = KeyedJaggedTensor(
            ["item"],
            values=torch.tensor([5, -3, 5]),
            lengths=torch.tensor([2, 1]),
        )
        ec(ids)["item"].values()  # (3, 8)
    """

    _tables_name = "embeddings"

    def __init__(
        self,
        embedding_configs: Sequence[EmbeddingConfig | Mapping[str, Any]] | None = None,
        lr: float = 0.01,
        enable_fusion: bool = True,
        fusion_k: int = 30,
        *,
        tables: Sequence[EmbeddingConfig | Mapping[str, Any]] | None = None,
        need_indices: bool = False,
        device: torch.device | str | int | None = None,
        optimizer: Optimizer | None = None,
        options: TableOptions | Mapping[str, TableOptions] = DEFAULT_OPTIONS,
        fused: bool = True,
        state_dtype: torch.dtype = torch.float32,
        client: RowService | None = None,
        staleness: int = 0,
    ) -> None:
        super().__init__()
        configs = given_configs(
            embedding_configs,
            tables,
            "embedding_configs",
            EmbeddingConfig,
        )
        self._embedding_dim: int = configs[0].embedding_dim
        for config in configs:
            if config.embedding_dim != self._embedding_dim:
                raise ValueError(
                    "the tables of a collection must have the same embedding_dim:"
                    f" {config.name!r} has {config.embedding_dim}, not"
                    f" {self._embedding_dim}"
                )
        self._need_indices = need_indices
        self._register(configs, enable_fusion, fusion_k)
        optimizer = optimizer_of(optimizer, lr)
        self.embeddings = self._tables(
            optimizer,
            options,
            fused,
            device,
            state_dtype,
            client,
            staleness,
        )

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Returns the row of each id.

        Args:
            features: The ids; see :meth:`RecStoreEmbeddingBagCollection.forward`.

        Returns:
            One ``JaggedTensor`` for each feature, by the feature's name, or by
            ``feature@table`` if several tables have the feature. Its values are (ids of
            the feature, dim) float32, on the device of ``features``. Its lengths are
            those of the input. With ``need_indices``, its weights are the ids.

        Raises:
            ValueError, TypeError, RuntimeError: See
                :meth:`RecStoreEmbeddingBagCollection.forward`.
            ValueError, MemoryError, ColdStoreError: See
                :class:`torchrec_recstore.kernels.SequenceGroup`.
        """
        batch = Features(
            maybe_td_to_kjt(features, None),
            False,
            self._configs,
        )
        rows_of_tables: dict[int, Tensor] = {}
        for numbers, trains in self._groups([None] * len(self._configs)):
            tables, ids, counts = self._lookup_of(batch, numbers)
            rows = self._table_groups.rows(
                tables,
                ids,
                counts,
                train=trains,
                to=batch.target,
            )
            rows_of_tables.update(zip(numbers, rows, strict=True))
        if batch.target is not None:
            rows_of_tables = _copied_together(rows_of_tables, batch.target)
        input_features = batch.on_device.to_dict()
        output: dict[str, JaggedTensor] = {}
        for number, names in enumerate(self._names_by_table):
            first = 0
            for name, feature_name in zip(
                names, self._feature_names[number], strict=True
            ):
                feature = input_features[feature_name]
                ids = feature.values()
                end = first + len(ids)
                output[name] = JaggedTensor(
                    values=rows_of_tables[number][first:end],
                    lengths=feature.lengths(),
                    weights=ids if self._need_indices else None,
                )
                first = end
        return output

    def prefetch(self, features: KeyedJaggedTensor) -> None:
        """Prepares the rows of a batch.

        See :meth:`RecStoreEmbeddingBagCollection.prefetch`.
        """
        batch = Features(
            maybe_td_to_kjt(features, None),
            False,
            self._configs,
        )
        for numbers, trains in self._groups([None] * len(self._configs)):
            if trains:
                tables, ids, counts = self._lookup_of(batch, numbers)
                self._table_groups.prefetch_rows(tables, ids, counts, to=batch.target)

    def _lookup_of(
        self,
        batch: Features,
        numbers: Sequence[int],
    ) -> tuple[list[EagerTable], Tensor, list[int]]:
        """Returns the tables with these numbers, the ids of a batch for them, table by
        table, and the number of ids of each table.
        """
        modules = self._modules_by_table()
        tables = []
        ids_of_tables = []
        counts = []
        for number in numbers:
            table_ids = batch.ids(self._feature_names[number])
            tables.append(modules[number])
            ids_of_tables.append(table_ids)
            counts.append(len(table_ids))

        ids = ids_of_tables[0]
        if len(ids_of_tables) > 1:
            ids = torch.cat(ids_of_tables)
        return tables, ids, counts

    def need_indices(self) -> bool:
        """Returns whether the output has the ids as its weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Returns the number of columns of every table."""
        return self._embedding_dim

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Returns the configs of the tables, in the given order."""
        return self._configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """Returns the keys of the output, as one list for each table."""
        return self._names_by_table


def _at_target(rows: Tensor, target: CopyTarget | None) -> Tensor:
    """Returns rows where those of a batch go. A group may have put them there."""
    if target is None or not rows.is_cpu:
        return rows
    return to_device(rows, target)


def _copied_together(
    rows_of_tables: Mapping[int, Tensor],
    target: CopyTarget,
) -> dict[int, Tensor]:
    """Returns the rows of tables, (n, dim) each, on a device. Those that are on the CPU
    are copied there, in one copy.
    """
    copies = dict(rows_of_tables)
    on_host = {n: rows for n, rows in rows_of_tables.items() if rows.is_cpu}
    if not on_host:
        return copies
    rows = to_device(torch.cat(list(on_host.values())), target)
    first = 0
    for number, table_rows in on_host.items():
        end = first + len(table_rows)
        copies[number] = rows[first:end]
        first = end
    return copies
