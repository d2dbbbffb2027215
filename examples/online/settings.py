"""The settings of an online run.

Every process of the run reads them from the run's folder. Needs no torch.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.command import DataError

from torchrec_recstore.options import RedisStore

FILE = "settings.json"
FORMAT = 2
"""The number of the format of all files of a run.

It changes with the fields of a click.
"""


_BROKERS = re.compile(r"kafka://([^@/?#,]+:\d+)(,[^@/?#,]+:\d+)*")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run.

    Attributes:
        folder: The folder of the run. It contains everything that the run writes.
        url: The Redis server of the clicks, ``redis://host:port/db``, or their Kafka
            brokers, ``kafka://host:port``. None: the clicks are in the file
            ``clicks.log``.
        stream: The name of the Redis stream or of the Kafka topic.
        seed: The seed of the clicks, of the dense weights and of the tables.
        history: The number of clicks from before the beginning. They are trained on
            before anything is published.
        clicks: The number of all clicks. The run ends after the last one.
        rate: The number of clicks a second.
        start_ms: The time of the first live click, the one after the history, in
            milliseconds since 1970. The example writes this click when all processes
            are ready, which is some seconds later.
        session_ms: The moment at which the command was started, or was started again,
            in milliseconds since 1970.
        paced: Whether live clicks are written at their rate. If False, all clicks are
            written at once.
        batch_size: The number of clicks of a step.
        window: The number of clicks of a window, over which AUC and calibration are
            computed.
        checkpoint_every: The number of steps between checkpoints.
        publish_every_s: The time between publications, in seconds.
        expire_s: The time of the clicks, in seconds, after which a row that no click
            has used is deleted.
        dim: The width of the embeddings.
        lr: The learning rate of the embeddings and of the dense layers (Adam).
        grpc: The address of the follower for gRPC.
        http: The address of the follower for HTTP.
        frozen_grpc: The address of the frozen model for gRPC.
        frozen_http: The address of the frozen model for HTTP.

    Raises:
        DataError: The URL of the Kafka brokers has more than addresses, for example a
            password.
    """

    folder: Path
    url: str | None
    stream: str = "clicks"
    seed: int = 0
    history: int = 140_000
    clicks: int = 320_000
    rate: int = 2000
    start_ms: int = 1_700_000_000_000
    session_ms: int = 0
    paced: bool = True
    batch_size: int = 256
    window: int = 8000
    checkpoint_every: int = 40
    publish_every_s: float = 5.0
    expire_s: int = 30
    dim: int = 16
    lr: float = 0.02
    grpc: str = ""
    http: str = ""
    frozen_grpc: str = ""
    frozen_http: str = ""

    def __post_init__(self) -> None:
        if self.is_kafka and not _BROKERS.fullmatch(self.url or ""):
            raise DataError(
                "--url must be kafka://host:port, or several host:port with commas,"
                " without credentials"
            )

    @property
    def is_kafka(self) -> bool:
        """Whether the clicks are in a Kafka topic."""
        return self.url is not None and self.url.startswith("kafka:")

    @property
    def published(self) -> Path:
        """The directory to which the trainer publishes and which the follower follows."""
        return self.folder / "published"

    @property
    def frozen(self) -> Path:
        """The directory that contains the first full export only."""
        return self.folder / "frozen"

    @property
    def opened(self) -> Path:
        """The file with the moment at which the first live click was due.

        It is in milliseconds since 1970. The time for which a run was interrupted does
        not count: the moment is later then.
        """
        return self.folder / "opened"

    @property
    def written(self) -> Path:
        """The file with the number of the last click that the generator has written."""
        return self.folder / "written"

    @property
    def redis(self) -> Path:
        """The folder of the Redis server that the example starts.

        It does not exist if there is none.
        """
        return self.folder / "redis"

    @property
    def checkpoints(self) -> Path:
        """The folder of the trainer's checkpoints."""
        return self.folder / "checkpoints"

    def shown(self) -> dict[str, Any]:
        """Returns the settings for JSON, without the credentials in the URL."""
        url = self.url
        if url is not None and not self.is_kafka:
            url = RedisStore(url).public_url
        return asdict(self) | {"folder": str(self.folder), "url": url}

    def write(self) -> None:
        """Writes the settings into the run's folder.

        Only the user can read the file, because the URL is complete.
        """
        settings = {"format": FORMAT, **self.shown(), "url": self.url}
        path = self.folder / FILE
        path.touch(mode=0o600)
        path.write_text(json.dumps(settings, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Settings:
        """Reads the settings of a run's folder.

        Raises:
            DataError: Another version of the example has written them.
        """
        settings = json.loads((folder / FILE).read_text())
        if settings.pop("format", 1) != FORMAT:
            raise DataError(
                f"{folder}: another version of the example has written this run: choose"
                " a new folder"
            )
        settings["folder"] = folder
        return cls(**settings)
