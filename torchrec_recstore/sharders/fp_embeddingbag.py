"""The sharder of ``FeatureProcessedEmbeddingBagCollection``, with tables in RecStore or on TorchRec's kernels."""

from __future__ import annotations

import copy

import torch
from torchrec.distributed.fp_embeddingbag import (
    FeatureProcessedEmbeddingBagCollectionSharder,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
from torchrec.distributed.types import ParameterSharding, QuantizedCommCodecs, ShardingEnv
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_recstore.sharders.embeddingbag import RecStoreSharder
from torchrec_recstore.sharders.plan import warn_of_planner
from torchrec_recstore.torchrec_seams.models import FeatureProcessedSharderSeams


class RecStoreFeatureProcessedEmbeddingBagCollectionSharder(
    FeatureProcessedSharderSeams,
    FeatureProcessedEmbeddingBagCollectionSharder,  # type: ignore[misc]
):
    """The sharder of ``FeatureProcessedEmbeddingBagCollection`` that places tables in RecStore.

    The feature processors are trained as with TorchRec's sharder. TorchRec's sharder itself cannot place tables in
    RecStore, because it does not ask ``ebc_sharder`` for its compute kernels (torchrec 1.8.0).

    Args:
        ebc_sharder: The sharder of the inner ``EmbeddingBagCollection``. Default: ``RecStoreSharder()``.
        qcomm_codecs_registry: The codecs of quantized communication, as for TorchRec's sharder. Default: None.

    Raises:
        TypeError: ``ebc_sharder`` is not a :class:`RecStoreSharder`.
    """

    def __init__(
        self,
        ebc_sharder: RecStoreSharder | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        if ebc_sharder is None:
            ebc_sharder = RecStoreSharder(qcomm_codecs_registry=qcomm_codecs_registry)
        if not isinstance(ebc_sharder, RecStoreSharder):
            raise TypeError(f"ebc_sharder must be a RecStoreSharder, got {type(ebc_sharder).__name__}")
        super().__init__(ebc_sharder, qcomm_codecs_registry)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(ebc_sharder={self.inner_sharder!r})"

    @property
    def module_type(self) -> type[FeatureProcessedEmbeddingBagCollection]:
        """The class of the modules that this sharder shards."""
        kind: type[FeatureProcessedEmbeddingBagCollection] = super().module_type
        warn_of_planner(self, kind, self.inner_sharder.offers_stock)
        return kind

    def with_stock_kernels(self) -> RecStoreFeatureProcessedEmbeddingBagCollectionSharder:
        """Returns a copy that also offers TorchRec's kernels, for planners that choose the kernel by constraint."""
        offer = copy.copy(self)
        offer.inner_sharder = self.inner_sharder.with_stock_kernels()
        return offer

    def shard(
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedFeatureProcessedEmbeddingBagCollection:
        """Returns the sharded module. See ``RecStoreSharder.shard``; the arguments are the same.

        If ``device`` is None, the module is on the CPU. (TorchRec's sharder uses CUDA by default.)
        """
        return super().shard(module, params, env, device or torch.device("cpu"), module_fqn)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the sharding types that ``ebc_sharder`` supports."""
        types: list[str] = self.inner_sharder.sharding_types(compute_device_type)
        return types

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns the compute kernels that ``ebc_sharder`` offers."""
        kernels: list[str] = self.inner_sharder.compute_kernels(sharding_type, compute_device_type)
        return kernels
