"""How evenly rows lie on ranks under either ``TableOptions.routing``: rows of the fullest rank over the mean.

    python benchmarks/routing.py [--ranks 8] [--data criteo.tsv.gz]

One JSON row a pattern of ids: sequential ones, multiples of the number of ranks and, with ``--data``, the distinct ids
of two categorical features of a Criteo log: the one with the most, and the one that hash routing spreads worst. The
split is TorchRec's own, with a hint (``num_embeddings``) of 2**40 rows.
"""

from __future__ import annotations

import argparse
import gzip

import fbgemm_gpu  # noqa: F401  (registers the split)
import torch
from measure import emit

from torchrec_recstore import ops

HINT = 2**40
FIRST_CATEGORICAL = 14


def imbalance(ids: torch.Tensor, ranks: int, routing: str) -> float:
    """Rows of the fullest rank over the mean, for (rows,) distinct int64 ids."""
    if routing == "hash":
        ids = ops.mix_ids(ids, False)
    rows, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
        torch.tensor([len(ids)]),
        ids,
        bucketize_pos=False,
        sequence=False,
        block_sizes=torch.tensor([-(-HINT // ranks)]),
        my_size=ranks,
    )
    return round(float(rows.max() / rows.float().mean()), 3)


def criteo_ids(path: str) -> dict[str, torch.Tensor]:
    """The distinct ids of each categorical feature that has a thousand or more."""
    features: list[set[int]] = [set() for _ in range(26)]
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as lines:
        for line in lines:
            for known, field in zip(features, line.rstrip("\n").split("\t")[FIRST_CATEGORICAL:], strict=True):
                known.add(int(field, 16) if field else 0)
    return {f"C{i}": torch.tensor(sorted(ids)) for i, ids in enumerate(features, 1) if len(ids) >= 1000}


def main() -> None:
    """Measures and prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--data", help="a Criteo log, plain or .gz")
    arguments = parser.parse_args()
    ranks = arguments.ranks
    patterns = {"sequential": torch.arange(100_000), "multiples": torch.arange(100_000) * ranks + 2**50}
    if arguments.data:
        features = criteo_ids(arguments.data)
        patterns["criteo, most ids"] = max(features.values(), key=len)
        patterns["criteo, worst under hash"] = max(features.values(), key=lambda ids: imbalance(ids, ranks, "hash"))
    for name, ids in patterns.items():
        both = {routing: imbalance(ids, ranks, routing) for routing in ("block", "hash")}
        emit({"benchmark": "routing", "ids": name, "rows": len(ids), "ranks": ranks, **both})


if __name__ == "__main__":
    main()
