"""The models of a server of predictions, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from torchrec_recstore_serving.predict.batching import Answer
from torchrec_recstore_serving.predict.requests import Value

_SOURCE = re.compile(
    r"(?:(?P<name>[\w.-]+)=)?(?P<place>.+?)(?:@(?P<number>\d+))?",
    re.ASCII,
)


@dataclass(frozen=True)
class ModelSource:
    """Where a model of a server comes from.

    Args:
        place: The place that is followed; see
            :func:`torchrec_recstore.inference.follow`.
        pinned: The number of the only publication that is served. None: the newest one
            is served.
    """

    place: str
    pinned: int | None = None


def sources_of(texts: Sequence[str]) -> dict[str, ModelSource]:
    """Returns the sources of ``[NAME=]SOURCE[@NUMBER]``, by name.

    The name of a single source may be missing: ``""``.

    Raises:
        ValueError: A name is missing or occurs twice.
    """
    sources: dict[str, ModelSource] = {}
    for text in texts:
        name, source = _source_of(text)
        if len(texts) > 1 and not name:
            raise ValueError(f"each of several sources needs a name: write NAME={text}")
        if name in sources:
            raise ValueError(
                f"there are two sources with the name {name}: each needs a name of"
                " its own"
            )
        sources[name] = source
    return sources


def _source_of(text: str) -> tuple[str, ModelSource]:
    """Returns the name and the source of ``[NAME=]SOURCE[@NUMBER]``.

    The name may be ``""``.
    """
    match = _SOURCE.fullmatch(text)
    if match is None:
        return "", ModelSource(text)
    number = match["number"]
    pinned = None if number is None else int(number)
    return match["name"] or "", ModelSource(match["place"], pinned)


class Answering(Protocol):
    """The functions of a model that a server offers; see :class:`Predictor`."""

    jagged: Mapping[str, tuple[str, int]]

    def submit(
        self,
        arguments: Mapping[str, Value],
        *,
        caller_s: float = 0.0,
    ) -> Future[Answer]:
        """Queues a request.

        The calling thread may answer it if that takes less than ``caller_s``.
        """

    def state(self) -> dict[str, Any]:
        """Returns the state of the model."""

    def not_ready(self) -> str | None:
        """Returns why the model is not ready. None: it is."""


class NamedModels:
    """The models of a server.

    Args:
        models: The models by name, at least one. The name of a single model may be
            ``""``.
    """

    def __init__(self, models: Mapping[str, Answering]) -> None:
        self._models = models

    def unknown(self, name: str | None) -> str | None:
        """Returns an error that lists the names of the models.

        None: a model has the name, or there is no name.
        """
        if not name or name in self._models:
            return None
        if "" in self._models:
            return f"there is no model {name!r}: the only model has no name"
        return f"there is no model {name!r}: the models are {', '.join(self._models)}"

    def model(self, name: str | None) -> Answering:
        """Returns the model of a name that is known.

        Without a name: the first model.
        """
        return self._models[name] if name else next(iter(self._models.values()))

    def state(self, name: str | None = None) -> dict[str, Any]:
        """Returns the state of a model.

        Without a name: of all models, by name if they have names.
        """
        if name or "" in self._models:
            return self.model(name).state()
        states = {name: model.state() for name, model in self._models.items()}
        return {"models": states}

    def not_ready(self, name: str | None = None) -> str | None:
        """Returns why a model is not ready.

        Without a name: why some models are not. None: they are.
        """
        if name or "" in self._models:
            return self.model(name).not_ready()
        reasons: list[str] = []
        for model_name, model in self._models.items():
            reason = model.not_ready()
            if reason is not None:
                reasons.append(f"{model_name}: {reason}")
        return "; ".join(reasons) if reasons else None
