"""The dashboard of examples/grafana shows what the servers export, and nothing else."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.packages import ROOT
from tests.recstore_server import RecStoreServer
from tests.redis_server import free_port
from tests.serving.predict.test_predictor import FollowCommand
from tests.serving.publish.test_publisher import trained, wait_for
from torchrec_recstore import RecStoreClient
from torchrec_recstore.inference import DeltaPublisher

DASHBOARD = json.loads((ROOT / "examples" / "grafana" / "recstore.json").read_text())
LEFT_OUT = {
    "python_info": "it never changes",
    "process_virtual_memory_bytes": "the resident memory says what is used",
    "process_start_time_seconds": "for alerts on restarts",
    "process_cpu_seconds_total": "that of the machine's own dashboard",
    "process_open_fds": "it follows the connections",
    "process_max_fds": "it never changes",
    "recstore_predict_seconds_created": "the time at which the process began to count",
    "recstore_predictions_created": "the time at which the process began to count",
    "recstore_table_misses_total": "the lookups without the hits",
    "recstore_table_steps": "the clock of a table",
    "recstore_table_device_rows": "servers have no rows on a device",
    "recstore_table_device_hits_total": "servers have no rows on a device",
    "recstore_table_device_arrivals_total": "servers have no rows on a device",
    "recstore_table_device_written_back_total": "servers have no rows on a device",
    "recstore_calls_ended": "calls that were ended, a part of the failed ones",
    "recstore_row_calls_ended": "calls that were ended, a part of the failed ones",
    "recstore_health_watches": "those of supervisors",
    "recstore_shared_memory_bytes": "it follows the connections",
    "recstore_tables": "the legends of the tables show them",
    "recstore_received_bytes": "only while a save of other servers is restored",
    "recstore_clients": "those that may repeat a write",
}


def panels() -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = DASHBOARD["panels"]
    return [panel for panel in shown if panel["type"] != "row"]


def queries() -> list[str]:
    expressions = [target["expr"] for panel in panels() for target in panel["targets"]]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            expressions.append(variable["query"])
    return expressions


def names_in(query: str) -> list[str]:
    return re.findall(r"\b(?:recstore|process|python)_\w+", query)


class Exported:
    """What a server exports: its families, and the labels of their samples."""

    def __init__(self, text: str) -> None:
        self.types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
        self.labels: dict[str, set[str]] = {}
        for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? ", text, re.MULTILINE):
            self.labels[name] = set(re.findall(r'(\w+)="', labels))


def scraped(address: str) -> Exported:
    url = f"http://{address}/metrics"
    return Exported(urllib.request.urlopen(url, timeout=60).read().decode())


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """What ``recstore serve`` and ``recstore follow`` export after some calls."""
    folder: Path = tmp_path_factory.mktemp("monitored")
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    server = RecStoreServer(folder / "data", "--metrics", addresses[0])
    with RecStoreClient([server.address]) as client:
        client.init_data("t", (10, 4), torch.float32)
        client.update("t", torch.arange(3), torch.ones(3, 4))
        both = scraped(addresses[0])
    server.kill()
    with DeltaPublisher(trained(), folder / "published", every_s=0):
        pass
    follower = FollowCommand(
        f"m={folder / 'published'}",
        *("--http", "127.0.0.1:0", "--metrics", addresses[1]),
    )
    wait_for(lambda: follower.http("/health")[0] == 200)
    follower.predict(ids=torch.arange(4).view(1, 4))
    of_follower = scraped(addresses[1])
    follower.command.terminate()
    both.types |= of_follower.types
    both.labels |= of_follower.labels
    return both


def family_of(name: str) -> str:
    return name.removesuffix("_bucket")


def test_each_metric_of_a_query_is_exported(exported: Exported) -> None:
    for query in queries():
        assert names_in(query), query
        for name in names_in(query):
            assert family_of(name) in exported.types, name


def test_each_metric_is_on_the_dashboard_or_left_out(exported: Exported) -> None:
    shown = {family_of(name) for query in queries() for name in names_in(query)}
    assert shown.isdisjoint(LEFT_OUT)
    assert shown | LEFT_OUT.keys() == exported.types.keys()


def test_labels_and_kinds_fit(exported: Exported) -> None:
    """A sum is by labels that the metric has, and a rate is that of a counter."""
    for query in queries():
        for labels, name in re.findall(r"by \(([\w, ]+)\) \((?:\w+\()?(\w+)\{", query):
            wanted = set(labels.split(", "))
            assert wanted <= exported.labels[name], (query, exported.labels[name])
        counted = set(re.findall(r"(?:rate|increase)\((\w+)", query))
        for name in names_in(query):
            kind = exported.types[family_of(name)]
            assert (name in counted) == (kind != "gauge"), query


def test_the_document_is_one_of_grafana() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells: set[tuple[int, int]] = set()
    for place in places:
        assert place["x"] + place["w"] <= 24
        covered = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert cells.isdisjoint(covered), place
        cells |= covered
    for panel in panels():
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["description"].endswith(".")
        refs = [target["refId"] for target in panel["targets"]]
        assert len(refs) == len(set(refs))
