"""Exports a trained model as a static model that runs without this package."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import (
    ShardedFeatureProcessedEmbeddingBagCollection,
)
from torchrec.distributed.types import ShardedModule, ShardingEnv
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
)
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_recstore.checkpoint.files import check_path
from torchrec_recstore.checkpoint.stock import gathered
from torchrec_recstore.modules import RecStoreEmbedding, RecStoreEmbeddingBag
from torchrec_recstore.modules.embedding_modules import (
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
)
from torchrec_recstore.modules.table_module import TableModule
from torchrec_recstore.options import Initializer, TableOptions, default_initializer
from torchrec_recstore.sharders.collection import RecStoreCollection
from torchrec_recstore.sharders.gather import (
    all_gathered,
    refused_together,
    whole_environment,
)
from torchrec_recstore.sharders.model_tables import refuse_remote_tables
from torchrec_recstore.store import Table
from torchrec_recstore.table_configs import ROW_DTYPES, initializer_of
from torchrec_recstore.torchrec_seams.models import (
    collection_inside,
    configs_of,
    feature_processors,
    is_weighted,
    need_indices,
    sharding_env,
)
from torchrec_recstore_serving.export.changed_rows import (
    ChangedRows,
    changed_since,
    remember,
)
from torchrec_recstore_serving.export.delta import (
    DeltaInfo,
    dtype_of,
    is_hashed,
    open_base,
    write_delta,
)
from torchrec_recstore_serving.export.eager_modules import (
    PositionWeights,
    ProcessedFeatures,
    StaticEmbedding,
    StaticEmbeddingBag,
    StaticEmbeddingBagCollection,
    StaticEmbeddingCollection,
    StaticTable,
)
from torchrec_recstore_serving.export.hashed_tables import check_index, mapped_tables
from torchrec_recstore_serving.export.row_formats import (
    FORMATS,
    check_dim,
    check_dtype,
    check_range,
    packed,
)
from torchrec_recstore_serving.export.scriptable_modules import (
    copied_with,
    scriptable,
    served_collection,
)
from torchrec_recstore_serving.export.selection import (
    check_counted,
    check_counts,
    check_selection,
    missing_row,
    selected,
    warn_of_initial_rows,
    warn_unless_finite,
    whole_table,
)
from torchrec_recstore_serving.export.signing import Key, key_at
from torchrec_recstore_serving.export.tables_on_servers import (
    ON_SERVERS,
    ServerTable,
    TableOnServers,
    served_on_servers,
    tables_on_servers,
)
from torchrec_recstore_serving.export.torchscript import save_script, scripted

# The modules that an export replaces.
_KINDS = (
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    EmbeddingBagCollection,
    EmbeddingCollection,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    RecStoreEmbedding,
    RecStoreEmbeddingBag,
    ShardedFeatureProcessedEmbeddingBagCollection,
    FeatureProcessedEmbeddingBagCollection,
)


def export_for_inference(
    model: nn.Module,
    path: str | Path | None = None,
    *,
    dtype: torch.dtype = torch.int8,
    min_frequency: int = 0,
    top_rows: int | None = None,
    index: str = "sorted",
    rows: str = "memory",
    key: str | Path | None = None,
) -> nn.Module:
    """Makes a model for inference from a trained model.

    The result runs without this package.

    The result has the same module tree, where each collection of tables is replaced by
    a static one: raw ids are searched in a sorted tensor of ids, and TorchRec's own
    module of that kind looks up the rows. An id without a row reads as zeros.
    TorchRec's own tables, sharded or not, are exported too, with their row numbers as
    ids. The given model does not change and can be trained further. The call is
    collective if the model is sharded.

    With float32 rows the outputs are bit-equal to those of the given model in
    evaluation mode. If the rows of a table are sharded over several ranks, the order of
    the sums may differ, and TorchRec's own tables may round differently.
    docs/serving.md gives the errors of the other data types.

    Args:
        model: ``DistributedModelParallel``, or any module that contains sharded modules
            or modules of :mod:`torchrec_recstore.modules`.
        path: The file for the scripted model, which ``torch.jit.load`` loads without
            this package. Rank 0 writes it completely or not at all. docs/serving.md
            describes how to serve and update it. Default: None, no file.
        dtype: The data type of the exported rows: ``torch.int8``, ``torch.quint4x2``
            (TorchRec's int4), ``torch.float16`` or ``torch.float32``. Default:
            ``torch.int8``.
        min_frequency: The minimum frequency of an exported row of a RecStore table. The
            frequency is the number of training steps that have looked up the row since
            its id was admitted, or of the occurrences of the id, as LFU eviction counts
            it: it is halved if the eviction policy has a half-life. Rows that were
            inserted and never trained have frequency 0. Tables with ``Scored()`` do not
            count, and are refused. Default: 0, all rows.
        top_rows: The maximum number of exported rows of each RecStore table. The rows
            of the highest frequency are exported, and among equal frequencies the
            smallest ids. Default: None, no limit.
        index: How the scripted model searches ids. ``"sorted"`` needs no library
            besides torch and FBGEMM. ``"hash"`` needs the library of
            :func:`torchrec_recstore.inference.load_library`; it searches many times as
            fast, a copy of the model shares the rows, and deltas take time for the
            changed rows only. docs/serving.md says when to take which. Default:
            ``"sorted"``.
        rows: Where a process has the rows of the RecStore tables that it serves.
            ``"memory"``: it reads them into its memory. ``"mapped"``, which needs
            ``index="hash"``: it maps them from the file, so that all processes of a
            host share them, and the model may be larger than the memory;
            docs/serving.md has the conditions. Default: ``"memory"``.
        key: The file of a secret key of at least 32 characters, with which the file at
            ``path`` is signed; docs/publishing.md says why. Default: None, no
            signature.

    Returns:
        The model in evaluation mode, on the CPU, on every rank.

    Raises:
        TypeError, ValueError: An argument is invalid; ``dtype`` does not support a
            table's dim, or with ``rows="servers"`` is not that of the rows; a table is
            on the meta device; a table is on servers, or with ``rows="servers"`` none
            is; ``min_frequency`` or ``top_rows`` is given and a table was never
            trained; a sharded module cannot be exported; the model has no tables; or
            with ``path``, TorchScript cannot compile a module. The message names the
            argument, the table or the module.
        ImportError: ``index`` is ``"hash"``, and the native library was built with a
            different version of torch.
        OSError: The file cannot be written.
        ColdStoreError: A cold store fails.
        ServiceError: With ``rows="servers"``, a server cannot be reached. All of these
            errors are raised on every rank.

    Warns:
        RecStoreWarning: A table reads ids without a row as random initial rows
        (``TableOptions.missing="init"``). The
            exported table reads them as zeros. Or float32 rows or dense tensors have
            NaN or infinity.
    """
    env = whole_environment()
    signing: Key | None = None
    with refused_together(env):
        check_index(index, rows)
        if rows == "mapped" and path is None:
            raise ValueError('rows="mapped" is about the file: pass path, too')
        if key is not None and path is None:
            raise ValueError("key signs a file: pass path, too")
        signing = key_at(key) if env.rank == 0 else None
    marks: dict[Table, int] = {}
    exported = read_model(model, dtype, min_frequency, top_rows, env, marks, path, rows)
    version = ""
    if path is not None:
        with refused_together(env):
            if env.rank == 0:
                served = scriptable(exported, index=index)
                script = scripted(served)
                save_script(script, Path(path), signing, mapped_tables(served, rows))
                version = script.recstore_version()
        if index == "hash" and not min_frequency and top_rows is None:
            remember(marks, all_gathered(version, env)[0])
    return exported


def read_model(
    model: nn.Module,
    dtype: torch.dtype,
    min_frequency: int,
    top_rows: int | None,
    env: ShardingEnv,
    marks: dict[Table, int],
    path: str | Path | None = None,
    rows: str = "memory",
) -> nn.Module:
    """Returns the static model, and adds the change mark of each shard to ``marks``.

    See export_for_inference.
    """
    with refused_together(env):
        row_format = check_dtype(dtype)
        check_selection(min_frequency, top_rows)
        if rows == "servers" and (min_frequency or top_rows is not None):
            raise ValueError(
                'min_frequency and top_rows select exported rows, and rows="servers"'
                " exports none"
            )
        if path is not None and env.rank == 0:
            check_path(Path(path))
        kinds = _collections(model, rows)
        for module in model.modules():
            if isinstance(module, RecStoreCollection):
                module.recstore_state.copies.check()
        for config_name, dim in _dims(kinds):
            check_dim(config_name, dim, row_format)
    on_servers = tables_on_servers(kinds, dtype, env) if rows == "servers" else {}
    conversion = _Conversion(dtype, min_frequency, top_rows, marks, on_servers)
    exported = conversion.model(model, kinds, env)
    warn_of_initial_rows(conversion.initial_rows)
    warn_unless_finite(exported)
    return exported


def export_delta(
    model: nn.Module,
    path: str | Path,
    *,
    base: str | Path | torch.jit.ScriptModule,
    min_frequency: int = 0,
    top_rows: int | None = None,
    key: str | Path | None = None,
) -> DeltaInfo:
    """Writes the differences between a model and an earlier export into a file.

    Collective if the model is sharded.

    The served model's method ``apply_delta`` applies the delta. Rows are compared in
    their exported form, so the delta is exact after training, after loading a
    checkpoint, and if ``top_rows`` selects other rows. The file contains only the
    differences.

    The call takes as long as an export and more memory. It reads only the rows that
    have changed if ``base`` is a model with ``index="hash"`` whose version this process
    has exported or made by a delta, if no rows are selected by frequency, and if the
    tables have not been loaded since and are not sharded by column.

    Args:
        model: The model; see :func:`export_for_inference`.
        path: The delta's file, in the format of safetensors. Rank 0 writes it
            completely or not at all.
        base: The file of the earlier export, which rank 0 reads, or the model that
            ``torch.jit.load`` has loaded from it. Deltas may have been applied to the
            loaded model.
        min_frequency: The value with which ``base`` was exported. Default: 0.
        top_rows: The value with which ``base`` was exported. Default: None.
        key: The file of the secret key with which the delta is signed. If ``base`` is a
            file, it must have been signed with the same key. Default: None, no
            signature.

    Returns:
        A description of the delta, on every rank.

    Raises:
        TypeError, ValueError, OSError, ColdStoreError: See
            :func:`export_for_inference`; or ``base`` is an export of a different model.
            All of these errors are raised on every rank.
    """
    env = whole_environment()
    signing: Key | None = None
    served: torch.jit.ScriptModule | None = None
    dtype: torch.dtype | None = None
    hashed, version, rows = False, "", "memory"
    with refused_together(env):
        if env.rank == 0:
            check_path(Path(path))
            signing = key_at(key)
            served = open_base(base, signing)
            dtype = dtype_of(served)
            hashed, version = is_hashed(served), served.recstore_version()
            rows = "servers" if served_on_servers(served) else "memory"
    dtype, hashed, version, rows = all_gathered((dtype, hashed, version, rows), env)[0]
    assert dtype is not None
    chained = hashed and not min_frequency and top_rows is None
    marks: dict[Table, int] = {}
    exported, changes = None, None
    if chained:
        exported, changes = read_changes(model, dtype, version, env, marks, rows)
    if exported is None or changes is None:
        marks = {}
        exported = read_model(
            model, dtype, min_frequency, top_rows, env, marks, rows=rows
        )
    info: DeltaInfo | None = None
    with refused_together(env):
        if served is not None:
            info = write_delta(
                scriptable(exported), served, Path(path), changes, signing
            )
    info = all_gathered(info, env)[0]
    assert info is not None
    if chained:
        remember(marks, info.version)
    return info


def read_changes(
    model: nn.Module,
    dtype: torch.dtype,
    version: str,
    env: ShardingEnv,
    marks: dict[Table, int],
    rows: str = "memory",
) -> tuple[nn.Module, list[ChangedRows] | None]:
    """Returns the static model without the rows of RecStore tables, and the rows that
    have changed since a version.

    In the model, each of these tables has one row. The id of the row is the position of
    the table's changes in the list. The list is None, on every rank, if it is not known
    which rows have changed.
    """
    with refused_together(env):
        kinds = _collections(model, rows)
        for module in model.modules():
            if isinstance(module, RecStoreCollection):
                module.recstore_state.copies.check()
    on_servers = tables_on_servers(kinds, dtype, env) if rows == "servers" else {}
    conversion = _Conversion(dtype, 0, None, marks, on_servers, structure=True)
    exported = conversion.model(model, kinds, env)
    changes = []
    for name, shards, of_table in conversion.sources:
        found = changed_since(name, shards, version, FORMATS[dtype], of_table, marks)
        if found is None:
            return exported, None
        changes.append(found)
    names = [name for name, _, _ in conversion.sources]
    float32 = {
        name: each.rows
        for name, each in zip(names, changes, strict=True)
        if dtype == torch.float32
    }
    warn_unless_finite(exported, float32)
    return exported, changes


def _collections(model: nn.Module, rows: str) -> list[nn.Module]:
    """Returns the modules that an export replaces.

    A feature-processed collection comes after the collection in it.

    Raises:
        ValueError: There is no such module, a sharded module cannot be exported, or a
            table is on servers and ``rows`` is not ``"servers"``.
    """
    if rows != "servers":
        refuse_remote_tables(model, ON_SERVERS)
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, _KINDS)
    ]
    for name, module in model.named_modules():
        inside = any(
            name == outer or name.startswith(f"{outer}.") or outer == ""
            for outer, _ in found
        )
        if isinstance(module, ShardedModule) and not inside:
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__}, whose tables"
                " cannot be exported"
            )
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no tables: there is nothing to export"
        )
    return [
        module
        for _, module in sorted(
            found, key=lambda each: _processors(each[1]) is not None
        )
    ]


def _processors(module: nn.Module) -> nn.Module | None:
    """Returns the feature processors of a feature-processed collection; None for other
    modules.
    """
    kinds = (
        ShardedFeatureProcessedEmbeddingBagCollection,
        FeatureProcessedEmbeddingBagCollection,
    )
    return feature_processors(module) if isinstance(module, kinds) else None


def _dims(modules: list[nn.Module]) -> list[tuple[str, int]]:
    dims = [
        (config.name, config.embedding_dim)
        for module in modules
        for config in configs_of(module)
    ]
    single = [
        module
        for module in modules
        if isinstance(module, RecStoreEmbedding | RecStoreEmbeddingBag)
    ]
    return dims + [(module.table.name, module.embedding_dim) for module in single]


class _Conversion:
    """The conversion of one model's collections into static collections.

    Args:
        dtype: The data type of the rows.
        min_frequency: The minimum frequency of an exported row.
        top_rows: The maximum number of exported rows of each table. None: no limit.
        marks: The change mark of each shard whose rows are read is added to it.
        on_servers: The tables whose rows stay on servers, by collection and name.
        structure: Whether no rows are read. Each RecStore table then has one row, whose
            id is the table's position in :attr:`sources`. Default: False.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        min_frequency: int,
        top_rows: int | None,
        marks: dict[Table, int],
        on_servers: Mapping[tuple[nn.Module, str], TableOnServers],
        structure: bool = False,
    ) -> None:
        self._marks = marks
        self._on_servers = on_servers
        self._structure = structure
        self.sources: list[tuple[str, list[Table], ShardingEnv | None]] = []
        """The name, the shards and the environment of each table whose rows were not
        read.
        """
        self._dtype = dtype
        self._min_frequency = min_frequency
        self._top_rows = top_rows
        self.initial_rows: list[str] = []
        """The tables whose ids without a row read as initial rows in the model."""
        self._done: dict[int, nn.Module] = {}

    def model(
        self, model: nn.Module, kinds: list[nn.Module], env: ShardingEnv
    ) -> nn.Module:
        """Returns a copy of a model in evaluation mode, with static modules in the
        place of ``kinds``.
        """
        replaced: dict[int, Any] = {id(module): self.of(module) for module in kinds}
        with refused_together(env):
            exported = copied_with(model, replaced).eval().requires_grad_(False)
            exported.zero_grad()
        return exported

    def of(self, module: nn.Module) -> nn.Module:
        """Returns the static module that replaces ``module``."""
        if id(module) not in self._done:
            self._done[id(module)] = self._with_servers(module, self._of(module))
        return self._done[id(module)]

    def _with_servers(self, module: nn.Module, static: nn.Module) -> nn.Module:
        """Returns the static module of a collection; if it has tables on servers, the
        served module with them.
        """
        of_module = {
            name: table
            for (each, name), table in self._on_servers.items()
            if each is module
        }
        if not of_module:
            return static
        assert isinstance(
            static, StaticEmbeddingBagCollection | StaticEmbeddingCollection
        )
        served = served_collection(static)
        tables: nn.ModuleList = served.tables  # type: ignore[assignment]
        for number, (config, _) in enumerate(static.tables()):
            if config.name in of_module:
                tables[number] = ServerTable(
                    config.name, FORMATS[self._dtype], of_module[config.name]
                )
        self.initial_rows += [
            name for name, table in of_module.items() if not table.zeros
        ]
        return served

    def _of(self, module: nn.Module) -> nn.Module:
        processors = _processors(module)
        if processors is not None:
            weights = {
                id(each): PositionWeights(copy.deepcopy(each))
                for each in processors.modules()
                if type(each) is PositionWeightedModule
            }
            return ProcessedFeatures(
                copied_with(processors, dict(weights)),
                self.of(collection_inside(module)),
            )
        if isinstance(module, RecStoreEmbedding | RecStoreEmbeddingBag):
            ids, rows = self._rows_of_module(module)
            if isinstance(module, RecStoreEmbedding):
                return StaticEmbedding(module, ids, rows, FORMATS[self._dtype])
            return StaticEmbeddingBag(module, ids, rows, FORMATS[self._dtype])
        tables = self._tables(module)
        if isinstance(module, ShardedEmbeddingBagCollection):
            return StaticEmbeddingBagCollection(
                tables, is_weighted(module), self._dtype
            )
        if isinstance(module, EmbeddingBagCollection | RecStoreEmbeddingBagCollection):
            return StaticEmbeddingBagCollection(
                tables, module.is_weighted(), self._dtype
            )
        if isinstance(module, ShardedEmbeddingCollection):
            return StaticEmbeddingCollection(tables, need_indices(module), self._dtype)
        return StaticEmbeddingCollection(tables, module.need_indices(), self._dtype)  # type: ignore[operator]

    def _tables(self, module: nn.Module) -> list[StaticTable]:
        stock = self._stock_weights(module)
        tables = []
        for config in configs_of(module):
            if config.name in stock:
                tables.append(StaticTable(config, None, stock[config.name].float()))
            elif (
                module,
                config.name,
            ) in self._on_servers:  # the place of a ServerTable
                tables.append(
                    StaticTable(
                        config,
                        torch.empty(0, dtype=torch.int64),
                        torch.zeros(1, config.embedding_dim),
                    )
                )
            else:
                ids, weight = self._rows_of_table(module, config)
                tables.append(StaticTable(config, ids, weight))
            check_range(config.name, tables[-1].weight, FORMATS[self._dtype])
        return tables

    def _stock_weights(self, module: nn.Module) -> Mapping[str, Tensor]:
        if isinstance(
            module, RecStoreEmbeddingBagCollection | RecStoreEmbeddingCollection
        ):
            return {}
        dynamic = (
            set(module.recstore_table_names())
            if isinstance(module, RecStoreCollection)
            else set()
        )
        names = {config.name for config in configs_of(module)} - dynamic
        if not names:
            return {}
        emits = (
            module.recstore_state.emits_rows
            if isinstance(module, RecStoreCollection)
            else True
        )
        if isinstance(module, RecStoreCollection):
            module.recstore_state.emits_rows = False
        try:
            state = module.state_dict()
        finally:
            if isinstance(module, RecStoreCollection):
                module.recstore_state.emits_rows = emits
        weights = {
            key.split(".")[-2]: value
            for key, value in state.items()
            if key.endswith(".weight")
        }
        weights = {name: weights[name] for name in sorted(names)}
        for name, weight in weights.items():
            # A ShardedTensor is also a Tensor, and raises on is_meta if this rank has
            # no part of it.
            if type(weight) in (Tensor, nn.Parameter) and weight.is_meta:
                raise ValueError(
                    f"table {name!r} is on the meta device and has no rows"
                )
        if not isinstance(module, ShardedModule):
            return {
                name: weight.detach().cpu().clone() for name, weight in weights.items()
            }
        plain = {
            name: weight
            for name, weight in weights.items()
            if type(weight) in (Tensor, nn.Parameter)
        }
        sharded = {
            name: weight for name, weight in weights.items() if name not in plain
        }
        whole = gathered(sharded, sharding_env(module))
        return {
            **whole,
            **{name: weight.detach().cpu().clone() for name, weight in plain.items()},
        }

    def _rows_of_table(
        self, module: nn.Module, config: BaseEmbeddingConfig
    ) -> tuple[Tensor, Tensor]:
        if isinstance(module, RecStoreCollection):
            state = module.recstore_state.tables[config.name]
            shards = [shard.table for shard in state.shards]
            options = state.options
            env: ShardingEnv | None = sharding_env(module)
        else:
            tables: nn.ModuleDict = (
                getattr(module, "embedding_bags", None) or module.embeddings  # type: ignore[assignment]
            )
            table_module = tables[config.name]
            assert isinstance(table_module, TableModule)
            shards, options, env = (
                [table_module.table],
                table_module.table.options,
                None,
            )
        missing = self._missing_row(
            config.name,
            initializer_of(config, options),
            options,
            config.embedding_dim,
            ROW_DTYPES[config.data_type],
        )
        # TorchRec's modules quantise the rows.
        return self._rows(config.name, shards, missing, env, "float32")

    def _rows_of_module(self, module: TableModule) -> tuple[Tensor, Tensor]:
        table = module.table
        initializer = default_initializer(table.options)
        missing = self._missing_row(
            table.name, initializer, table.options, table.dim, table.dtype
        )
        return self._rows(table.name, [table], missing, None, FORMATS[self._dtype])

    def _missing_row(
        self,
        name: str,
        initializer: Initializer,
        options: TableOptions,
        dim: int,
        dtype: torch.dtype,
    ) -> Tensor:
        check_counts(name, options, self._min_frequency, self._top_rows)
        missing, exact = missing_row(initializer, options, dim, dtype)
        if not exact:
            self.initial_rows.append(name)
        return missing

    def _rows(
        self,
        name: str,
        shards: list[Table],
        missing: Tensor,
        env: ShardingEnv | None,
        row_format: str,
    ) -> tuple[Tensor, Tensor]:
        """Returns the ids, and the rows in the row format after a first row for ids
        without a row.
        """
        if self._structure:
            self.sources.append((name, shards, env))
            return torch.tensor([len(self.sources) - 1]), packed(
                name, missing.expand(2, -1).contiguous(), row_format
            )
        whole = whole_table(name, shards, missing, env, row_format, self._marks)
        check_counted(
            name, len(whole.ids), whole.steps, self._min_frequency, self._top_rows
        )
        places = selected(whole.frequency, self._min_frequency, self._top_rows)
        if len(places) == len(whole.ids):
            return whole.ids, whole.rows
        return whole.ids[places], whole.rows[F.pad(places + 1, [1, 0])]
