"""Trains a sharded table from one checkpoint to the next, on whichever processor runs
this: see run.py.

    python training.py FROM TO STEPS

FROM is a checkpoint, or "-" for none. TO is the same to the byte on each processor,
because the gradients do not come from matrix products.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType

from torchrec_recstore import RecStoreSharder, load_checkpoint, save_checkpoint

DIMS = {"FP32": 16, "FP16": 20, "BF16": 64, "INT8": 36}


def main(source: str, target: str, steps: int) -> None:
    """Trains for ``steps`` steps after those of ``source``, and writes ``target``."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    configs = [
        EmbeddingBagConfig(
            name=f"t_{name}",
            embedding_dim=dim,
            num_embeddings=2**40,
            feature_names=[name],
            data_type=DataType[name],
        )
        for name, dim in DIMS.items()
    ]
    sharder = RecStoreSharder(
        fused_params={"optimizer": EmbOptimType.ADAM, "learning_rate": 0.01}
    )
    module = EmbeddingBagCollection(configs, device=torch.device("meta"))
    model = DistributedModelParallel(
        module, sharders=[sharder], device=torch.device("cpu")
    )
    begin = (
        0 if source == "-" else load_checkpoint(model, source).training_state["step"]
    )
    for step in range(begin, begin + steps):
        random = torch.Generator().manual_seed(step)
        ids = torch.randint(-(2**40), 2**40, (4 * 200,), generator=random) // 2**30
        out = (
            model(KeyedJaggedTensor(list(DIMS), ids, lengths=torch.full((4 * 100,), 2)))
            .wait()
            .values()
        )
        out.backward(torch.randint(-8, 8, out.shape, generator=random) / 8)
    save_checkpoint(model, target, training_state={"step": begin + steps})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
