"""``recstore follow``: predictions over gRPC and HTTP with the newest rows, and
requests that are answered together.
"""

from __future__ import annotations

import json
import math
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from tests.secrets import write_secret
from torchrec_recstore.inference import DeltaPublisher, Follower
from torchrec_recstore.modules import RecStoreEmbedding
from torchrec_recstore_service.server.listening import ListenOptions
from torchrec_recstore_serving.predict import predictor_pb2 as pb
from torchrec_recstore_serving.predict.batching import Answer, Batcher
from torchrec_recstore_serving.predict.messages import (
    array_of,
    tensor_of,
    value_of,
    value_of_json,
)
from torchrec_recstore_serving.predict.predictor import PredictorOptions, jagged_of
from torchrec_recstore_serving.predict.predictor_pb2_grpc import PredictorStub
from torchrec_recstore_serving.predict.requests import (
    JaggedArgument,
    Request,
    request_of,
)

from ...processes import ForkedCommand
from ..models import Model, OfPlainTensors, batch, plain_batch, train
from ..publish.test_publisher import change, trained, wait_for

TOKEN = "correct-horse-battery"


def published(model: nn.Module, folder: Path) -> Follower:
    with DeltaPublisher(model, folder, every_s=0) as publisher:
        publisher.step()
    follower = Follower(folder)
    follower.poll()
    return follower


def answered_together(
    follower: Follower, requests: list[Request], jagged: Any = None
) -> tuple[list[Answer], float]:
    """The answers to requests that wait while a thread is busy, and the number of calls
    of the model.
    """
    gate = threading.Event()
    batcher = Batcher(
        follower,
        jagged or {},
        max_examples=1000,
        threads=1,
        observe=lambda seconds, failed: gate.wait(),
    )
    try:
        first = batcher.submit(requests[0])
        wait_for(lambda: batcher.report()["batches"] == 1)
        futures = [batcher.submit(request) for request in requests]
        gate.set()
        return [future.result() for future in [first, *futures]], batcher.report()[
            "batches"
        ]
    finally:
        gate.set()
        batcher.close()


def test_requests_of_plain_tensors(tmp_path: Path) -> None:
    model = OfPlainTensors()
    for _ in range(3):
        model(*plain_batch()).sum().backward()
    batches = [plain_batch(bags) for bags in (1, 3, 2, 5)]
    jagged = dict([jagged_of("values,lengths,4")])
    requests = [
        request_of(dict(zip(("dense", "values", "lengths"), each, strict=True)), jagged)
        for each in batches
    ]
    with published(model.eval(), tmp_path / "published") as follower:
        answers, calls = answered_together(follower, requests, jagged)
        assert calls == 2
        for answer, given in zip(answers, [batches[0], *batches], strict=True):
            assert answer.version == follower.version
            torch.testing.assert_close(
                answer.outputs["output"], follower.model(*given).detach()
            )


def jagged_argument(features: KeyedJaggedTensor) -> JaggedArgument:
    keys = features.keys()
    return JaggedArgument(
        tuple(keys), features.values(), features.lengths().view(len(keys), -1), None
    )


class Pooled(Model):
    """The model without the sum over all rows of the batch, so that each example has
    its own output.
    """

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        out: Tensor = self.over(self.bags(features).values())
        return out


def test_requests_of_keyed_jagged_tensors(tmp_path: Path) -> None:
    model = train(Pooled(), 2)
    given = [batch(bags) for bags in (2, 1, 4)]
    requests = [request_of({"features": jagged_argument(each)}, {}) for each in given]
    with published(model, tmp_path / "published") as follower:
        answers, calls = answered_together(follower, requests)
        assert calls == 2
        for answer, each in zip(answers, [given[0], *given], strict=True):
            torch.testing.assert_close(
                answer.outputs["output"], follower.model(each).detach()
            )


class Several(nn.Module):
    """Results of two kinds: one has a row for each example, the other is a sum over the
    batch.
    """

    def __init__(self, summed: bool) -> None:
        super().__init__()
        self.rows = RecStoreEmbedding(10, 4, name="t", lr=0.1)
        self.summed = summed

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        rows = self.rows(ids)
        return {"rows": rows, "last": rows.sum() if self.summed else rows[:, -1]}


def test_what_cannot_be_answered_together(tmp_path: Path) -> None:
    """Requests of another kind, results without a row for each example, and requests
    that fail.
    """
    ids = [
        torch.tensor([1, 2]),
        torch.tensor([3]),
        torch.tensor([[4]]),
        torch.tensor([5], dtype=torch.int32),
    ]
    requests = [request_of({"ids": each}, {}) for each in ids]
    for summed, calls in ((False, 4), (True, 6)):
        model = Several(summed)
        model(torch.arange(6))["rows"].sum().backward()
        with published(model.eval(), tmp_path / f"{summed}") as follower:
            answers, found = answered_together(follower, requests[:3], {})
            assert found <= calls
            for answer, each in zip(answers, [ids[0], *ids[:3]], strict=True):
                for name, wanted in follower.model(each).items():
                    assert torch.equal(answer.outputs[name], wanted)
    with published(trained(), tmp_path / "clicks") as follower:
        batcher = Batcher(follower, {}, max_examples=1000, threads=1)
        good = request_of({"ids": torch.ones(1, 4, dtype=torch.int64)}, {})
        bad = request_of({"ids": torch.ones(1, 1, 1, dtype=torch.int64)}, {})
        futures = [batcher.submit(each) for each in (good, bad, good)]
        assert (
            futures[0].result().outputs["output"].shape
            == futures[2].result().outputs["output"].shape
            == (1, 1)
        )
        assert futures[1].exception() is not None
        batcher.close()
        assert batcher.report()["failed"] == 1
        with pytest.raises(RuntimeError, match="the server stops"):
            batcher.submit(good)


def test_a_short_call_may_be_made_by_the_caller(tmp_path: Path) -> None:
    """The calling thread calls the model if calls are short, and fewer threads than
    allowed call it.
    """
    gate, callers = threading.Event(), []

    def observe(seconds: float, failed: bool) -> None:
        callers.append(threading.current_thread())
        assert gate.wait(60)

    request = request_of({"ids": torch.ones(1, 4, dtype=torch.int64)}, {})
    with published(trained(), tmp_path / "published") as follower:
        batcher = Batcher(follower, {}, max_examples=1000, threads=1, observe=observe)
        gate.set()
        # nothing is known of the first call
        for caller_s in (math.inf, 0.0, math.inf, 1e-9, math.inf):
            assert batcher.submit(request, caller_s=caller_s).result(60).outputs[
                "output"
            ].shape == (1, 1)
        assert [caller is threading.current_thread() for caller in callers] == [
            False,
            False,
            True,
            False,
            True,
        ]
        batcher.close()
        assert batcher.report()["requests"] == 5


def test_values_that_are_refused() -> None:
    for value, message in (
        (pb.Argument(), "the argument 'x' is empty"),
        (pb.Argument(array=pb.Array(dtype="int63")), "x has the unknown dtype 'int63'"),
        (pb.Argument(array=pb.Array(dtype="int64", shape=[2], data=b"12345678")), "does not have 8 bytes"),
        (pb.Argument(array=pb.Array(dtype="int64", shape=[-1], data=b"")), "does not have 0 bytes"),
        (pb.Argument(jagged=pb.Jagged(keys=["a", "b"], values=array_of(torch.arange(1)),
                                      lengths=array_of(torch.ones(1, dtype=torch.int32)))),
         "x must have keys, and one length for each key and example"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            value_of(value, "x")
    for document, message in (
        ({"u": [[1]], "i": []}, "each feature must have one bag for each example"),
        (
            {"keys": ["u"], "values": [1, 2], "lengths": [1]},
            "the lengths are 1 in total, and there are 2 values",
        ),
        (
            {"keys": ["u"], "values": [1], "lengths": [2, -1]},
            "the lengths are 1 in total",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            value_of_json(document, "x")
    for part in ("values", "lengths"):
        given = {
            "values": torch.arange(1),
            "lengths": torch.ones(1, 1, dtype=torch.int64),
        }
        given[part] = given[part].float()
        with pytest.raises(
            ValueError, match=f"the {part} of bags must be integers, got torch.float32"
        ):
            JaggedArgument((), **given)
    with pytest.raises(
        ValueError, match="'lengths' must be a vector with a multiple of 2 lengths"
    ):
        request_of(
            {"values": torch.arange(3), "lengths": torch.ones(3, dtype=torch.int64)},
            {"values": ("lengths", 2)},
        )
    for wrong in ("a,b", "a,b,0", "a,,3"):
        with pytest.raises(
            ValueError, match="--jagged must be VALUES,LENGTHS,FEATURES"
        ):
            jagged_of(wrong)
    for option, value, message in (
        ("max_batch", 0, "--max-batch"),
        ("poll_s", 0, "--poll-every"),
    ):
        with pytest.raises(ValueError, match=message):
            PredictorOptions({}, ListenOptions("127.0.0.1:0"), **{option: value})
    with pytest.raises(
        ValueError,
        match=r"--http 0\.0\.0\.0:1 can be reached from other machines: that needs",
    ):
        PredictorOptions({}, ListenOptions("127.0.0.1:0"), http="0.0.0.0:1")


class FollowCommand:
    """``recstore follow`` in a forked process."""

    def __init__(self, source: object, *flags: str) -> None:
        command = [
            "-m",
            "torchrec_recstore.cli",
            "follow",
            str(source),
            "--listen",
            "127.0.0.1:0",
            "--json",
        ]
        self.command = ForkedCommand([*command, *flags])
        wait_for(lambda: bool(self.lines()) or not self.command.process.is_alive())
        assert self.lines(), self.command.stderr
        self.serving = self.lines()[0]
        self.stub = PredictorStub(grpc.insecure_channel(self.serving["address"]))

    def lines(self) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for line in self.command.stdout.splitlines(keepends=True)
            if line.endswith("\n")
        ]

    def predict(self, **arguments: Tensor) -> Any:
        given = {
            name: pb.Argument(array=array_of(each)) for name, each in arguments.items()
        }
        return self.stub.Predict(
            pb.PredictRequest(arguments=given),
            metadata=[("authorization", f"Bearer {TOKEN}")],
        )

    def http(
        self, path: str, document: object = None, token: str = TOKEN
    ) -> tuple[int, Any]:
        data = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(
            f"http://{self.serving['http']}{path}",
            data,
            {"Authorization": f"Bearer {token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        call()
    return error.value.code(), error.value.details()


def test_the_command(tmp_path: Path) -> None:
    write_secret(tmp_path / "token", TOKEN)
    source = tmp_path / "published"
    server = FollowCommand(
        source, "--http", "127.0.0.1:0", "--token-file", str(tmp_path / "token"), "--poll-every", "0.05",
        "--report-every", "0.1",
    )  # fmt: skip
    ids = torch.randint(-50, 300, (6, 4))
    health = health_pb2_grpc.HealthStub(
        grpc.insecure_channel(server.serving["address"])
    )
    try:
        assert refusal(lambda: server.predict(ids=ids)) == (
            grpc.StatusCode.UNAVAILABLE, "no full export has been loaded yet",
        )  # fmt: skip
        assert server.http("/predict", {"arguments": {"ids": [[1]]}})[0] == 503
        assert server.http("/health", token="")[0] == 503
        assert (
            health.Check(health_pb2.HealthCheckRequest()).status
            == health_pb2.HealthCheckResponse.NOT_SERVING
        )
        model = trained()
        with DeltaPublisher(model, source, every_s=0, dtype=torch.float32) as publisher:
            publisher.step()
            wait_for(lambda: server.http("/health")[0] == 200)
            for step in range(2):
                with torch.no_grad():
                    wanted = model(ids)
                reply = server.predict(ids=ids)
                torch.testing.assert_close(
                    tensor_of(reply.outputs["output"], "output"), wanted
                )
                assert reply.number == step + 1
                status, document = server.http(
                    "/predict", {"arguments": {"ids": ids.tolist()}}
                )
                assert (status, document["version"]) == (200, reply.version)
                torch.testing.assert_close(
                    torch.tensor(document["outputs"]["output"]), wanted
                )
                change(model, step)
                publisher.step()
                publisher._writer.wait()  # type: ignore[union-attr]
                wait_for(
                    lambda step=step: server.http("/state")[1]["number"] == step + 2
                )
        assert (
            health.Check(health_pb2.HealthCheckRequest()).status
            == health_pb2.HealthCheckResponse.SERVING
        )
        state = json.loads(
            server.stub.State(
                pb.StateRequest(), metadata=[("authorization", f"Bearer {TOKEN}")]
            ).json
        )
        assert (state["requests"], state["failed"], state["versions_behind"]) == (
            4,
            0,
            0,
        )
        assert 0 < state["p50_ms"] <= state["p99_ms"]
        assert (
            refusal(lambda: server.stub.State(pb.StateRequest()))[0]
            == grpc.StatusCode.UNAUTHENTICATED
        )
        assert server.http("/state", token="wrong") == (
            401,
            {"error": "the token is missing or wrong"},
        )
        assert refusal(lambda: server.predict(rows=ids)) == (
            grpc.StatusCode.INVALID_ARGUMENT, "the model's arguments are ids: got rows",
        )  # fmt: skip
        code, message = refusal(lambda: server.predict(ids=ids[:, None]))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert message.startswith(
            "the model refuses its arguments ('ids' of shape [6, 1, 4]): ids must have"
            " the shape"
        )
        assert refusal(lambda: server.predict(ids=ids.float())) == (
            grpc.StatusCode.INVALID_ARGUMENT, "ids must be integers, and the argument(s) 'ids' hold floats",
        )  # fmt: skip
        for path, given, status in (
            ("/predict", [], 400),
            ("/other", {}, 404),
            ("/other", None, 404),
        ):
            assert server.http(path, given)[0] == status
        wait_for(lambda: server.lines()[-1].get("number") == 3)
    finally:
        server.command.terminate()
        assert server.command.wait(60) == 0, server.command.stderr
    first, *states, last = server.lines()
    assert (first["event"], last["event"]) == ("serving", "stopped")
    assert states[-1]["seconds_behind"] >= 0
    assert states[-1]["fulls_loaded"] == 1
