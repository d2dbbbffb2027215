"""What a model that is served says about a request that does not fit: the same over
HTTP and gRPC.
"""

# Not with annotations from __future__: fx, and with it TorchRec's tracer, copies them
# into code as they are.

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from torchrec_recstore.inference import DeltaPublisher, export_for_inference
from torchrec_recstore_serving.predict import predictor_pb2 as pb
from torchrec_recstore_serving.predict.messages import array_of
from torchrec_recstore_serving.predict.requests import JaggedArgument, Request
from torchrec_recstore_serving.predict.requests import call as predict

from ..models import FEATURES, Model, batch, train
from ..publish.test_publisher import wait_for
from .test_predictor import FollowCommand, refusal


class OwnFeature(Model):
    """A model that also reads a feature itself, which is in none of its collections."""

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        out: Tensor = self.over(self.bags(features).values())
        return out + features["x"].lengths().unsqueeze(1)


class OwnDict(Model):
    """A model with a dict of its own, in which some keys are missing."""

    scales: dict[str, float]

    def __init__(self) -> None:
        super().__init__()
        self.scales = {"even": 2.0}

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        out: Tensor = self.over(self.bags(features).values())
        read = features.to_dict()
        examples = read["x"].lengths().size(0)
        name = "even" if examples % 2 == 0 else "odd"
        if examples == 5:
            raise KeyError("five")
        return out * self.scales[name]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FollowCommand]:
    folder = tmp_path_factory.mktemp("published")
    with DeltaPublisher(train(OwnFeature()), folder, every_s=0) as publisher:
        publisher.step()
    command = FollowCommand(folder, "--http", "127.0.0.1:0")
    wait_for(lambda: command.http("/health")[0] == 200)
    yield command
    command.command.process.terminate()
    command.command.process.join()


def post(server: FollowCommand, features: dict[str, Any]) -> tuple[int, str]:
    status, document = server.http("/predict", {"arguments": {"features": features}})
    return status, document.get("error", "")


def call(server: FollowCommand, features: KeyedJaggedTensor) -> Any:
    jagged = pb.Jagged(
        keys=features.keys(),
        values=array_of(features.values()),
        lengths=array_of(features.lengths()),
    )
    request = pb.PredictRequest(arguments={"features": pb.Argument(jagged=jagged)})
    return server.stub.Predict(request)


def test_a_missing_feature_is_named(server: FollowCommand) -> None:
    complete = {name: [[7], [8, 9]] for name in FEATURES}
    assert post(server, complete) == (200, "")
    # TorchRec's own error for the feature that the model reads itself is a KeyError
    for missing, says in (
        ("f", "the batch has no feature f"),
        ("x", "it reads the feature 'x', which they lack"),
    ):
        present = [name for name in FEATURES if name != missing]
        message = (
            "the model refuses its arguments ('features' with the features"
            f" {', '.join(map(repr, present))}): {says}"
        )
        assert post(server, {name: complete[name] for name in present}) == (
            400,
            message,
        )
        features = KeyedJaggedTensor.from_jt_dict(
            {name: batch(2)[name] for name in present}
        )
        assert refusal(lambda features=features: call(server, features)) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            message,
        )
    assert call(server, batch(2)).outputs


def test_a_key_that_the_model_itself_lacks_is_no_missing_feature(
    tmp_path: Path,
) -> None:
    export_for_inference(train(OwnDict()), tmp_path / "model.pt")
    model = torch.jit.load(tmp_path / "model.pt")

    def answer(examples: int, names: Sequence[str]) -> dict[str, Tensor]:
        features = JaggedArgument(
            keys=tuple(names),
            values=torch.arange(examples * len(names)),
            lengths=torch.ones(len(names), examples, dtype=torch.int64),
        )
        return predict(model, Request({"features": features}, examples), {})

    complete = list(FEATURES)
    assert answer(2, complete)["output"].shape == (2, 1)
    for examples, key in ((1, "odd"), (5, "five")):
        with pytest.raises((RuntimeError, torch.jit.Error), match=f"KeyError: {key}$"):
            answer(examples, complete)
    lacking = [name for name in complete if name != "x"]
    for examples in (2, 1):
        with pytest.raises(
            ValueError, match="it reads the feature 'x', which they lack"
        ):
            answer(examples, lacking)


def test_a_text_in_the_place_of_an_id(server: FollowCommand) -> None:
    complete: dict[str, Any] = {name: [[7], [8, 9]] for name in FEATURES}
    for text in ("shoes", "17"):
        status, message = post(server, {**complete, "f": [[7], [8, text]]})
        assert status == 400
        assert message == (
            f"the argument 'features' has {text!r} at features['f'][1][1]: ids and"
            " lengths are integers, and this is a text: send the integer that the text"
            " had as an id in training"
        )
    parts = {
        "keys": list(FEATURES),
        "values": ["shoes"] * 4,
        "lengths": torch.ones(4, dtype=torch.int64).tolist(),
    }
    status, message = post(server, json.loads(json.dumps(parts)))
    assert status == 400
    assert "features.values[0]: ids and lengths are integers, and this is a" in message
