"""The sharder and sharded module of ``EmbeddingCollection``."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.types import Awaitable, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_recstore.sharders.collection import RecStoreCollection, RecStoreCollectionSharder
from torchrec_recstore.sharders.sharding_kernels import RecStoreSequenceLookup
from torchrec_recstore.torchrec_seams.models import (
    SequenceCollectionSeams,
    need_indices,
    on_meta_device,
    uses_index_dedup,
)


class RecStoreShardedEmbeddingCollection(RecStoreCollection, SequenceCollectionSeams, ShardedEmbeddingCollection):  # type: ignore[misc]
    """A sharded ``EmbeddingCollection`` whose tables are in RecStore or on TorchRec's kernels, as the plan says.

    The output has one row for each id. Rows are made and updated as in
    :class:`RecStoreShardedEmbeddingBagCollection`. TorchRec 1.8.0 has no table-column-wise, table-row-wise and grid
    sharding for ``EmbeddingCollection``. The errors are those of :class:`RecStoreShardedEmbeddingBagCollection`.
    """

    _supported = ("table_wise", "column_wise", "row_wise")
    _configs_name = "embedding_configs"
    _tables_name = "embeddings"
    _lookup_type = RecStoreSequenceLookup

    def __init__(self, module: EmbeddingCollection, *args: Any, **kwargs: Any) -> None:
        # The stock constructor loads the weights of all tables of a module that is not on the meta device (torchrec
        # 1.8.0), but RecStore tables do not take the weights of the unsharded module. So the constructor gets a module
        # on the meta device, and the weights of the tables on TorchRec's kernels are loaded below.
        super().__init__(on_meta_device(module), *args, **kwargs)
        hashed = sorted(self._hashed_features)
        if hashed and need_indices(self):
            raise ValueError(f"need_indices is not supported with routing='hash': features {hashed}")
        if module.device != torch.device("meta"):
            recstore = {f"embeddings.{name}.weight" for name in self.recstore_table_names()}
            stock = {key: weight for key, weight in module.state_dict().items() if key not in recstore}
            self.load_state_dict(stock, strict=False)

    @property
    def unsharded_module_type(self) -> type[EmbeddingCollection]:
        """The class of the unsharded module, by which ``DistributedModelParallel.reshard`` finds the sharder."""
        kind: type[EmbeddingCollection] = EmbeddingCollection
        return kind

    def input_dist(self, ctx: EmbeddingCollectionContext, features: Any) -> Awaitable[Any]:
        """Distributes a batch to the ranks. See :meth:`RecStoreCollection.input_dist`.

        Raises:
            NotImplementedError: The module is in training, and the batch size varies by feature.
        """
        # TorchRec 1.8.0 expands the rows of these batches with fbgemm::permute_1D_sparse_data, which has no gradient on
        # CPU, so that the gradients would be wrong.
        trains = self.training and torch.is_grad_enabled() and self.recstore_table_names()
        if trains and isinstance(features, KeyedJaggedTensor) and features.variable_stride_per_key():
            raise NotImplementedError(
                f"RecStore tables {self.recstore_table_names()}: an EmbeddingCollection cannot train on batches of "
                "varying size: TorchRec has no gradient for it on CPU; give all features the same batch size"
            )
        return super().input_dist(ctx, features)


class RecStoreEmbeddingCollectionSharder(RecStoreCollectionSharder, EmbeddingCollectionSharder):  # type: ignore[misc]
    """The sharder of ``EmbeddingCollection`` that places tables in RecStore.

    See :class:`RecStoreSharder`, the sharder of ``EmbeddingBagCollection``; the arguments, the errors and the dtypes of
    rows and results are the same.
    """

    _sharded = RecStoreShardedEmbeddingCollection

    def own_arguments(self) -> dict[str, Any]:
        """Returns the arguments that only the sharded module of this sharder has."""
        return {"use_index_dedup": uses_index_dedup(self)}

    def reshard(
        self,
        sharded_module: RecStoreShardedEmbeddingCollection,
        changed_shard_to_params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> RecStoreShardedEmbeddingCollection:
        """Changes the plan of a sharded module in place. ``DistributedModelParallel.reshard`` calls this method.

        TorchRec has the method for ``EmbeddingBagCollection`` only. See :func:`torchrec_recstore.reshard`, which
        changes the plan of a whole model and raises the same errors.
        """
        sharded_module.update_shards(changed_shard_to_params, env, device)
        return sharded_module
