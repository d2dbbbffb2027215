"""docs/dlrm_hstu.md needs a checkout of generative-recommenders."""

import sys

from tests.clients.dlrm_hstu import SOURCE
from tests.project.docs.run_page import Missing

if not SOURCE:
    raise Missing(
        "GENERATIVE_RECOMMENDERS_SOURCE names no checkout of generative-recommenders"
    )
sys.path.insert(0, SOURCE)
from generative_recommenders.dlrm_v3.train import (
    train_ranker,  # noqa: F401  (its import prints a warning)
)
