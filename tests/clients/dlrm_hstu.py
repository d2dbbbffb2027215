"""Trains DlrmHSTU of generative-recommenders, from the checkout that
``GENERATIVE_RECOMMENDERS_SOURCE`` names.

``torchrun`` runs this file with a JSON document as its argument. The checkout is one of
github.com/meta-recsys/generative-recommenders; commit 6135bc3 was tested, on torch 2.13
and torchrec 1.8. The environment needs ``gin-config``, ``pandas`` and ``triton``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

SOURCE = os.environ.get("GENERATIVE_RECOMMENDERS_SOURCE")
"""The path of a checkout of generative-recommenders."""

PAGE = Path(__file__).parents[2] / "docs" / "dlrm_hstu.md"
DIM, BATCH, ROWS = 32, 8, 1000


def main() -> None:
    """Trains some steps, and writes the losses of each rank to
    ``<losses>-<rank>.json``.

    The argument: tables, ``"stock"`` or ``"recstore"``; begin and steps, the numbers of
    the steps; save and load, the paths of checkpoints; stock, a file of the rows of
    stock tables, which is written by them and read by the others; losses, a path.
    """
    job = json.loads(sys.argv[1])
    assert SOURCE is not None
    sys.path.insert(0, SOURCE)
    import gin
    import torch
    import torch.distributed as dist
    from generative_recommenders.common import HammerKernel
    from generative_recommenders.dlrm_v3.configs import (
        get_embedding_table_config,
        get_hstu_configs,
    )
    from generative_recommenders.dlrm_v3.train import train_ranker, utils
    from generative_recommenders.dlrm_v3.utils import MetricsLogger
    from generative_recommenders.modules.dlrm_hstu import DlrmHSTU
    from torchrec.distributed.planner import Topology

    from tests.project.docs.pages import blocks

    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), torch.device("cpu")
    gin.parse_config_file(
        f"{SOURCE}/generative_recommenders/dlrm_v3/train/gin/debug.gin"
    )
    for way in ("save", "load"):
        gin.bind_parameter(f"{way}_dmp_checkpoint.path", job.get(way, ""))
    gin.bind_parameter("MetricsLogger.tensorboard_log_path", "")
    utils.Topology = lambda compute_device, hbm_cap, **sizes: Topology(
        compute_device="cpu", **sizes
    )
    if job["tables"] == "recstore":
        exec(next(block.text for block in blocks(PAGE) if block.kind == "python"), {})

    torch.manual_seed(0)
    config = get_hstu_configs("debug")
    config.hstu_attn_num_layers = config.hstu_num_heads = 1
    config.hstu_attn_linear_dim = config.hstu_attn_qk_dim = DIM // 2
    config.hstu_transducer_embedding_dim = config.hstu_embedding_table_dim = (
        config.hstu_preprocessor_hidden_dim
    ) = DIM
    config.max_seq_len, config.max_num_candidates = 64, 4
    config.hstu_input_dropout_ratio = config.hstu_linear_dropout_rate = 0.0
    tables = get_embedding_table_config("debug")
    for table in tables.values():
        table.embedding_dim = DIM
        if job["tables"] == "stock":
            table.num_embeddings = ROWS
    model = DlrmHSTU(
        hstu_configs=config,
        embedding_tables=tables,
        is_inference=False,
        bf16_training=False,
    )
    model.set_hammer_kernel(HammerKernel.PYTORCH)
    model, optimizer = utils.make_optimizer_and_shard(
        model, device, dist.get_world_size()
    )
    if "stock" in job and job["tables"] == "stock":
        torch.save(
            {key: value.clone() for key, value in whole_state(model).items()},
            job["stock"],
        )
    elif "stock" in job:
        model.load_state_dict(torch.load(job["stock"]), strict=False)
    metrics = MetricsLogger(
        config.multitask_configs,
        batch_size=BATCH,
        window_size=100,
        device=device,
        rank=rank,
    )
    train_ranker.load_dmp_checkpoint(
        model=model, optimizer=optimizer, metric_logger=metrics, device=device
    )
    loader, _ = utils.make_train_test_dataloaders(
        hstu_config=config, embedding_table_configs=tables, batch_size=BATCH
    )
    samples = loader.dataset.dataset.dataset
    losses = []
    for step in range(job["begin"], job["begin"] + job["steps"]):
        torch.manual_seed(1000 * step + rank)
        samples.load_query_samples(list(range(BATCH)))
        sample = samples.get_samples(list(range(BATCH)))
        optimizer.zero_grad()
        loss = sum(
            model(sample.uih_features_kjt, sample.candidates_features_kjt)[2].values()
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    utils.save_dmp_checkpoint(
        model=model,
        optimizer=optimizer,
        metric_logger=metrics,
        rank=rank,
        batch_idx=job["begin"] + job["steps"],
    )
    Path(f"{job['losses']}-{rank}.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def whole_state(model):  # type: ignore[no-untyped-def]
    """The state of a model on one rank, with plain tensors."""
    from torchrec.distributed.types import ShardedTensor

    return {
        key: (
            value.local_shards()[0].tensor
            if isinstance(value, ShardedTensor)
            else value
        )
        for key, value in model.state_dict().items()
    }


if __name__ == "__main__":
    main()
