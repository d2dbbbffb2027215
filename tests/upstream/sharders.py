"""RecStore's sharders with the arguments of TorchRec's test sharders: one sharding type
and one kernel.
"""

from __future__ import annotations

from typing import Any

from torchrec.distributed.fbgemm_qcomm_codec import (
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.test_utils.emb_sharder import TestECSharder
from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs

from torchrec_recstore.sharders import (
    RECSTORE_KERNEL,
    RecStoreCollectionSharder,
    RecStoreEmbeddingCollectionSharder,
    RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
    RecStoreSharder,
)

Codecs = dict[str, QuantizedCommCodecs]


class _OneChoice(RecStoreCollectionSharder):
    """Offers one sharding type and one kernel, RecStore's or one of TorchRec's."""

    def __init__(
        self,
        sharding_type: str,
        kernel_type: str = RECSTORE_KERNEL,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: Codecs | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dict(fused_params or {}), qcomm_codecs_registry, **kwargs)
        self._sharding_type = sharding_type
        self._kernel_type = kernel_type
        self._offers_stock = kernel_type != RECSTORE_KERNEL

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [self._sharding_type]

    def compute_kernels(
        self, sharding_type: str, compute_device_type: str
    ) -> list[str]:
        return [self._kernel_type]


class BagSharder(_OneChoice, RecStoreSharder):
    """Replaces ``TestEBCSharder``."""


class EmbeddingSharder(_OneChoice, RecStoreEmbeddingCollectionSharder):
    """Replaces ``TestECSharder``."""


class _WithQComms:
    """The arguments of ``TestEmbeddingCollectionSharder``."""

    def __init__(
        self,
        sharding_type: str,
        kernel_type: str = RECSTORE_KERNEL,
        qcomms_config: QCommsConfig | None = None,
        fused_params: dict[str, Any] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        codecs = (
            {} if qcomms_config is None else get_qcomm_codecs_registry(qcomms_config)
        )
        params = {"learning_rate": 0.1, **(fused_params or {})}
        super().__init__(sharding_type, kernel_type, params, codecs)
        self._use_index_dedup = use_index_dedup


class SequenceSharder(_WithQComms, EmbeddingSharder):
    """Replaces ``TestEmbeddingCollectionSharder``."""


class StockSequenceSharder(_WithQComms, TestECSharder):
    """``TestEmbeddingCollectionSharder``, which the wheel lacks, with TorchRec's own
    tables.
    """


class FeatureProcessedSharder(RecStoreFeatureProcessedEmbeddingBagCollectionSharder):
    """Replaces ``TestFPEBCSharder``."""

    def __init__(
        self,
        sharding_type: str,
        kernel_type: str = RECSTORE_KERNEL,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: Codecs | None = None,
    ) -> None:
        super().__init__(
            BagSharder(sharding_type, kernel_type, fused_params, qcomm_codecs_registry)
        )


def default_sharders() -> list[ModuleSharder[Any]]:
    """Replaces ``get_default_sharders``: RecStore's sharders, and TorchRec's for other
    modules.
    """
    ours = [
        RecStoreSharder(),
        RecStoreEmbeddingCollectionSharder(),
        RecStoreFeatureProcessedEmbeddingBagCollectionSharder(),
    ]
    types = {sharder.module_type for sharder in ours}
    return [
        *ours,
        *(
            sharder
            for sharder in get_default_sharders()
            if sharder.module_type not in types
        ),
    ]
