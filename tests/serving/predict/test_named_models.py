"""One ``recstore follow`` with several models: names, pinned publications, one source
that fails, and shared pages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from torchrec_recstore.inference import DeltaPublisher
from torchrec_recstore.modules import RecStoreEmbedding
from torchrec_recstore_service.server.listening import ListenOptions
from torchrec_recstore_serving.predict import predictor_pb2 as pb
from torchrec_recstore_serving.predict.messages import array_of, tensor_of
from torchrec_recstore_serving.predict.named_models import ModelSource, sources_of
from torchrec_recstore_serving.predict.predictor import (
    Predictor,
    PredictorOptions,
    jagged_of,
)

from ...redis_server import free_port
from ..export.test_mapped_files import of_mapping
from ..publish.test_publisher import publish, wait_for
from .test_access import scraped
from .test_predictor import FollowCommand, refusal

SERVING = health_pb2.HealthCheckResponse.SERVING


def test_sources() -> None:
    for text, name, source in (
        ("published", "", ModelSource("published")),
        ("/a/b@12", "", ModelSource("/a/b", 12)),
        ("ads-v1.2=published@7", "ads-v1.2", ModelSource("published", 7)),
        ("./a=b@3/", "", ModelSource("./a=b@3/")),
        (
            "redis://u:p@host:6379/0?stream=clicks",
            "",
            ModelSource("redis://u:p@host:6379/0?stream=clicks"),
        ),
        (
            "b=redis://host/0?stream=clicks@3",
            "b",
            ModelSource("redis://host/0?stream=clicks", 3),
        ),
    ):
        assert sources_of([text]) == {name: source}
    assert [*sources_of(["b=x", "a=x@1"])] == [
        "b",
        "a",
    ], "the first model is the one that is given first"
    with pytest.raises(
        ValueError, match="each of several sources needs a name: write NAME=y"
    ):
        sources_of(["a=x", "y"])
    with pytest.raises(
        ValueError,
        match="there are two sources with the name a: each needs a name of its own",
    ):
        sources_of(["a=x", "a=y"])


def test_options_of_one_model(tmp_path: Path) -> None:
    """--jagged may be about one model, and --max-age is not about a pinned publication."""
    sources = {
        "new": ModelSource(str(tmp_path / "published")),
        "old": ModelSource(str(tmp_path / "published"), 1),
    }
    jagged = dict(map(jagged_of, ["all,lengths,1", "old:values,lengths,2"]))
    options = PredictorOptions(
        sources, ListenOptions("127.0.0.1:0"), jagged=jagged, max_age_s=1e-6
    )
    with DeltaPublisher(trained(4), tmp_path / "published", every_s=0) as publisher:
        publish(publisher)
    for name, arguments, reason in (
        ("new", {"all"}, "the rows are older"),
        ("old", {"all", "values"}, "None"),
    ):
        predictor = Predictor(options, name)
        predictor.follower.poll()
        assert predictor.jagged.keys() == arguments
        assert str(predictor.not_ready()).startswith(reason)
        predictor.close()
    with pytest.raises(ValueError, match="--jagged x:values names no model"):
        PredictorOptions(
            sources, ListenOptions("127.0.0.1:0"), jagged={"x:values": ("lengths", 2)}
        )


def trained(dim: int) -> RecStoreEmbedding:
    model = RecStoreEmbedding(50, dim, name="t", lr=0.3)
    model(torch.arange(1000)).sum().backward()
    return model.eval()


def test_several_models(tmp_path: Path) -> None:
    """A model, an older publication of it from the same pages, another model, and one
    that cannot be read.
    """
    one, other, port = trained(16), trained(4), free_port()
    ids, places = (
        torch.arange(0, 1000, 100),
        {name: tmp_path / name for name in ("one", "other", "bad")},
    )
    places["bad"].mkdir()
    (places["bad"] / "latest.json").write_text("[]")
    options: dict[str, Any] = {
        "every_s": 0,
        "full_every_s": 1e6,
        "dtype": torch.float32,
        "rows": "mapped",
    }
    with (
        DeltaPublisher(one, places["one"], **options) as publisher,
        DeltaPublisher(other, places["other"], **options) as others,
    ):
        publish(publisher)
        publish(others)
        outputs = {"old": one(ids).detach(), "other": other(ids).detach()}
        one.train()(ids).sum().backward()
        one.eval()
        server = FollowCommand(
            *(
                f"new={places['one']}",
                f"old={places['one']}@1",
                f"other={places['other']}",
                f"bad={places['bad']}",
            ),
            *(
                "--http",
                "127.0.0.1:0",
                "--metrics",
                f"127.0.0.1:{port}",
                "--max-age",
                "600",
            ),
            *("--poll-every", "0.05", "--report-every", "0.1"),
        )
        try:
            assert list(server.serving["trusts"]) == ["new", "old", "other", "bad"]
            publish(publisher)
            outputs["new"] = one(ids).detach()
            wait_for(lambda: server.http("/models/new/state")[1]["number"] == 2)
            wait_for(
                lambda: all(
                    server.http(f"/models/{name}/health")[0] == 200 for name in outputs
                )
            )
            assert_answers(server, ids, outputs)
            # The rows are in memory once for both versions of a model.
            assert (
                of_mapping(server.command.pid, places["one"] / "000000000001.pt")[2]
                == 0
            )

            states = server.http("/state")[1]["models"]
            assert [(name, each["number"], each["pinned"]) for name, each in states.items()] == [
                ("new", 2, None), ("old", 1, 1), ("other", 1, None), ("bad", 0, None),
            ]  # fmt: skip
            assert (
                server.http("/models/old/state")[1]["version"]
                == states["old"]["version"]
            )
            assert (
                json.loads(server.stub.State(pb.StateRequest()).json)["models"].keys()
                == states.keys()
            )
            assert (
                json.loads(server.stub.State(pb.StateRequest(model="old")).json)[
                    "number"
                ]
                == 1
            )
            wait_for(
                lambda: (
                    server.lines()[-1].get("models", {}).get("new", {}).get("number")
                    == 2
                )
            )

            status, document = server.http("/health")
            assert status == 503
            assert document["reason"].startswith(
                f"bad: {places['bad']}: it cannot be read at the moment"
            )
            assert ";" not in document["reason"], "the others are ready"
            health = health_pb2_grpc.HealthStub(
                grpc.insecure_channel(server.serving["address"])
            )
            for name, ready in {
                "new": True,
                "old": True,
                "other": True,
                "bad": False,
                "": False,
            }.items():
                assert (
                    health.Check(health_pb2.HealthCheckRequest(service=name)).status
                    == SERVING
                ) == ready

            found = scraped(port)
            for name, number in (("new", 2), ("old", 1), ("other", 1), ("bad", 0)):
                assert found[f'recstore_follow_number{{model="{name}"}}'] == number
                assert found[f'recstore_follow_problem{{model="{name}"}}'] == (
                    name == "bad"
                )
            assert found['recstore_predictions_total{model="old",outcome="ok"}'] == 2
            assert found['recstore_predict_seconds_count{model="old"}'] == 2

            message = "there is no model 'x': the models are new, old, other, bad"
            for path, given in (
                ("predict", {"arguments": {}}),
                ("state", None),
                ("health", None),
            ):
                assert server.http(f"/models/x/{path}", given) == (
                    404,
                    {"error": message},
                )
            for call, request in (
                (server.stub.Predict, pb.PredictRequest),
                (server.stub.State, pb.StateRequest),
            ):
                wanted = grpc.StatusCode.NOT_FOUND, message
                assert (
                    refusal(lambda call=call, request=request: call(request(model="x")))
                    == wanted
                )
        finally:
            server.command.terminate()
            assert server.command.wait(60) == 0, server.command.stderr


def assert_answers(
    server: FollowCommand, ids: torch.Tensor, outputs: dict[str, torch.Tensor]
) -> None:
    """Each model answers by its name, and the first one, which is new, without a name."""
    arguments = {"input": ids.tolist()}
    for name, wanted in [*outputs.items(), ("", outputs["new"])]:
        reply = server.stub.Predict(
            pb.PredictRequest(
                arguments={"input": pb.Argument(array=array_of(ids))}, model=name
            )
        )
        assert torch.equal(tensor_of(reply.outputs["output"], "output"), wanted)
        status, document = server.http(
            f"/models/{name}/predict" if name else "/predict", {"arguments": arguments}
        )
        assert status == 200
        assert torch.equal(torch.tensor(document["outputs"]["output"]), wanted)


def test_a_model_without_a_name_has_no_other_one(tmp_path: Path) -> None:
    server = FollowCommand(tmp_path / "published", "--http", "127.0.0.1:0")
    try:
        error = "there is no model 'x': the only model has no name"
        assert server.http("/models/x/state") == (404, {"error": error})
    finally:
        server.command.terminate()
        assert server.command.wait(60) == 0, server.command.stderr
