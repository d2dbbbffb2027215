"""Measures how evenly ``TableOptions.routing`` distributes rows: the rows of the
fullest rank divided by the mean.

    python benchmarks/routing.py [--ranks 8] [--data criteo.tsv.gz]

Prints one JSON row for each pattern of ids: sequential ids, multiples of the number of
ranks and, with ``--data``, the distinct ids of two categorical features of a Criteo
log. These are the feature with the most ids, and the feature that hash routing
distributes least evenly. The ids are split by TorchRec's op, with a ``num_embeddings``
of 2**40.
"""

from __future__ import annotations

import argparse
import gzip

import fbgemm_gpu  # noqa: F401  (registers the op that splits ids)
import torch
from measure import emit

from torchrec_recstore import ops

HINT = 2**40
FIRST_CATEGORICAL = 14


def imbalance(ids: torch.Tensor, ranks: int, routing: str) -> float:
    """Returns the rows of the fullest rank divided by the mean.

    Args:
        ids: (rows,) int64, distinct. The ids of the rows.
        ranks: The number of ranks.
        routing: The routing of the table, "block" or "hash".
    """
    if routing == "hash":
        ids = ops.mix_ids(ids, False)
    block_size = -(-HINT // ranks)
    rows, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
        torch.tensor([len(ids)]),
        ids,
        bucketize_pos=False,
        sequence=False,
        block_sizes=torch.tensor([block_size]),
        my_size=ranks,
    )
    mean_rows = rows.float().mean()
    return round(float(rows.max() / mean_rows), 3)


def criteo_ids(path: str) -> dict[str, torch.Tensor]:
    """Returns the distinct ids of each categorical feature with at least 1,000 ids."""
    ids_of_features: list[set[int]] = [set() for _ in range(26)]
    open_log = gzip.open if path.endswith(".gz") else open
    with open_log(path, "rt") as lines:
        for line in lines:
            fields = line.rstrip("\n").split("\t")
            categorical = fields[FIRST_CATEGORICAL:]
            for ids, field in zip(ids_of_features, categorical, strict=True):
                ids.add(int(field, 16) if field else 0)
    large = {}
    for number, ids in enumerate(ids_of_features, start=1):
        if len(ids) >= 1000:
            large[f"C{number}"] = torch.tensor(sorted(ids))
    return large


def main() -> None:
    """Runs the measurements and prints the JSON rows."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--data", help="path of a Criteo log, plain or .gz")
    arguments = parser.parse_args()
    ranks = arguments.ranks
    patterns = {
        "sequential": torch.arange(100_000),
        "multiples": torch.arange(100_000) * ranks + 2**50,
    }
    if arguments.data:
        features = criteo_ids(arguments.data)
        patterns["criteo, most ids"] = max(features.values(), key=len)
        patterns["criteo, worst under hash"] = max(
            features.values(),
            key=lambda ids: imbalance(ids, ranks, "hash"),
        )
    for name, ids in patterns.items():
        emit(
            {
                "benchmark": "routing",
                "ids": name,
                "rows": len(ids),
                "ranks": ranks,
                "block": imbalance(ids, ranks, "block"),
                "hash": imbalance(ids, ranks, "hash"),
            }
        )


if __name__ == "__main__":
    main()
