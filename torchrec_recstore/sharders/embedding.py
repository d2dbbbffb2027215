"""``EmbeddingCollection`` over RecStore tables, beside TorchRec's own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import EmbeddingSharding
from torchrec.distributed.types import Awaitable, ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_recstore.sharders.collection import RecStoreCollection, RecStoreCollectionSharder
from torchrec_recstore.sharders.lookup import RecStoreSequenceLookup


class RecStoreShardedEmbeddingCollection(RecStoreCollection, ShardedEmbeddingCollection):  # type: ignore[misc]
    """A sharded ``EmbeddingCollection`` in which the plan may give tables to RecStore.

    As :class:`RecStoreShardedEmbeddingBagCollection`, with a row an id instead of pooled bags. TorchRec 1.8.0 has no
    table-column-wise, table-row-wise and grid sharding for it.

    Raises:
        ValueError: a RecStore table with a sharding type, data type, ``init_fn``, optimizer, routing or ``max_rows``
            that RecStore does not support; on every rank, also those without a shard of it.
        ColdStoreError, ImportError: a cold store cannot be opened; on every rank.
    """

    _supported = (ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value, ShardingType.ROW_WISE.value)
    _configs_name = "embedding_configs"
    _tables_name = "embeddings"
    _lookup_type = RecStoreSequenceLookup

    def __init__(self, module: EmbeddingCollection, *args: Any, **kwargs: Any) -> None:
        # The stock constructor ends by loading the weights of a module that is not on the meta device, which RecStore
        # tables do not take (torchrec 1.8.0): it is given none, and the weights of the other tables follow.
        without_weights = copy.copy(module)
        without_weights._device = torch.device("meta")
        super().__init__(without_weights, *args, **kwargs)
        hashed = sorted(self._hashed_features())
        if hashed and self._need_indices:
            raise ValueError(f"need_indices is not supported with routing='hash': features {hashed}")
        if module.device != torch.device("meta"):
            recstore = {f"embeddings.{name}.weight" for name in self.recstore_table_names()}
            stock = {key: weight for key, weight in module.state_dict().items() if key not in recstore}
            self.load_state_dict(stock, strict=False)

    def input_dist(self, ctx: EmbeddingCollectionContext, features: Any) -> Awaitable[Any]:
        """As for the bags.

        Raises:
            NotImplementedError: training on a batch whose size varies by feature: TorchRec 1.8.0 repeats the rows with
                ``fbgemm::permute_1D_sparse_data``, which has no gradient on CPU, and would train on wrong ones.
        """
        trains = self.training and torch.is_grad_enabled() and self.recstore_table_names()
        if trains and isinstance(features, KeyedJaggedTensor) and features.variable_stride_per_key():
            raise NotImplementedError(
                f"RecStore tables {self.recstore_table_names()}: an EmbeddingCollection cannot train on batches of "
                "varying size: TorchRec has no gradient for it on CPU; give all features the same batch size"
            )
        return super().input_dist(ctx, features)

    def _shardings(self) -> list[EmbeddingSharding[Any, Any, Any, Any]]:
        return list(self._sharding_type_to_sharding.values())

    def _create_lookups(self) -> None:
        super()._create_lookups()
        if not self.enable_embedding_update:
            return
        for sharding, lookup in zip(self._shardings(), self._lookups, strict=True):
            if sharding.enable_embedding_update:
                self._updates.append(sharding.create_update(lookup))


class RecStoreEmbeddingCollectionSharder(RecStoreCollectionSharder, EmbeddingCollectionSharder):  # type: ignore[misc]
    """Shards ``EmbeddingCollection`` with RecStore tables; to it what :class:`RecStoreSharder` is to the bags.

    Rows are stored as the config's ``data_type`` says: FP32, FP16 or BF16. Casting the sharded model, by
    ``bfloat16()``, ``half()`` or ``to(dtype)``, leaves them and their lookups as they are: set ``data_type`` instead.
    ``fused_params["output_dtype"]``, FP32 by default as in TorchRec's kernels, is the dtype of the lookups' results;
    ``fused_params["stochastic_rounding"]``, off by default, rounds updates of 16-bit rows at random.

    Args:
        fused_params: as for TorchRec's sharder; selects the optimizer unless ``apply_optimizer_in_backward`` does.
        optimizer: of the RecStore tables, instead; the only way to those that TorchRec has no name for.
        accumulation_steps: backward passes whose gradients are summed before the rows of the RecStore tables are
            updated, once, with the learning rate of the last; forwards in between read the rows as they were.
        args, kwargs: TorchRec's other arguments.

    Raises:
        ValueError: ``optimizer`` and ``fused_params`` disagree.
    """

    _sharded = RecStoreShardedEmbeddingCollection

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> RecStoreShardedEmbeddingCollection:
        """The sharded module.

        Raises:
            ValueError: the plan or ``fused_params`` ask of a RecStore table what RecStore does not support, or ways of
                selecting its optimizer disagree.
            NotImplementedError: ``DMPCollection``, with RecStore tables in the plan.
        """
        fused_params, params = self._dealt_out(module, params, env)
        return RecStoreShardedEmbeddingCollection(
            module,
            params,
            env,
            fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            use_index_dedup=self._use_index_dedup,
            module_fqn=module_fqn,
        )
