"""Publishers that are killed at chosen points.

It runs in a separate process, which forks a process for each of them.

python -m tests.serving.publish.dying_publisher PLACE FOLDER KILLS

The last publisher is not killed. It writes the full export ``final.pt`` of its model
into FOLDER.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch

from torchrec_recstore.inference import DeltaPublisher, Follower, export_for_inference
from torchrec_recstore.utils import RecStoreWarning

from ...checkpoint.crashing import FILE_CALLS, KILLED, Calls, in_a_fork
from .test_publisher import change, publish, trained

NETWORK_CALLS = ("send", "sendall", "recv", "recv_into")
PUBLICATIONS = 3


def published(place: str, seed: int) -> torch.nn.Module:
    """Publishes a model that is trained meanwhile; half of the runs publish full
    exports only at their beginning.
    """
    torch.manual_seed(seed)
    model = trained()
    with DeltaPublisher(
        model, place, every_s=0, full_every_s=0 if seed % 2 else 1e6
    ) as publisher:
        for step in range(PUBLICATIONS):
            publish(publisher)
            change(model, step + seed)
    return model


def whole(place: str) -> int:
    """What is there can be followed without a warning, whatever the killed publisher
    has left.
    """
    warnings.simplefilter("error", RecStoreWarning)
    with Follower(place) as follower:
        follower.poll()
        assert follower.versions_behind == 0
    return 0


def main(place: str, folder: Path, kills: int) -> None:
    torch.set_num_threads(1)

    def count() -> int:
        with Calls() as calls:
            published(place, 1)
        (folder / "names").write_text(json.dumps(calls.names))
        return 0

    assert in_a_fork(count) == 0
    names = json.loads((folder / "names").read_text())
    points = [
        at for at, name in enumerate(names) if name in (*FILE_CALLS, *NETWORK_CALLS)
    ]
    for kill in range(kills):
        die_at = points[len(points) * (kill + 1) // (kills + 1)]

        def dying(seed: int = kill, die_at: int = die_at) -> int:
            with Calls(die_at):
                published(place, seed + 2)
            return 0

        # The calls of two runs differ a little, so that a late point may not be
        # reached.
        assert in_a_fork(dying) in (KILLED, 0)
        assert in_a_fork(lambda: whole(place)) == 0

    def last() -> int:
        export_for_inference(
            published(place, kills + 2), folder / "final.pt", index="hash"
        )
        return 0

    assert in_a_fork(last) == 0


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
