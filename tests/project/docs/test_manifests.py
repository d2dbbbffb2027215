"""The manifests of the docs are valid, and start servers and trainings with flags that
exist.
"""

from __future__ import annotations

import configparser
import copy
import itertools
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from torch.distributed.run import get_args_parser
from torchx.specs.builders import materialize_appdef
from torchx.specs.finder import get_component

from tests.packages import ROOT
from torchrec_recstore.cli import app

from .pages import blocks

PAGE = ROOT / "docs" / "service.md"
TRAINING = ROOT / "docs" / "operations.md"


def manifests(kind: str, page: Path = PAGE) -> list[str]:
    return [block.text for block in blocks(page) if block.kind == kind]


def served(arguments: list[str]) -> dict[str, Any]:
    """The values of the flags of ``recstore serve``. An unknown flag is an error."""
    command: Any = typer.main.get_command(app)
    with command.commands["serve"].make_context("serve", arguments) as context:
        return dict(context.params)


def test_kubernetes() -> None:
    text, outside = manifests("yaml")
    service, servers = yaml.safe_load_all(text)
    assert (service["kind"], servers["kind"]) == ("Service", "StatefulSet")
    pod = servers["spec"]["template"]
    assert servers["spec"]["serviceName"] == service["metadata"]["name"]
    labels = servers["spec"]["selector"]["matchLabels"]
    assert pod["metadata"]["labels"] == labels == service["spec"]["selector"]
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["recstore", "serve"]
    flags = served(container["args"])
    names = [
        f"{servers['metadata']['name']}-{number}"
        for number in range(servers["spec"]["replicas"])
    ]
    assert flags["servers"] == ",".join(
        f"{name}.{service['metadata']['name']}:7700" for name in names
    )
    opened = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert flags["listen"] == f"0.0.0.0:{opened['grpc']}"
    assert flags["rows_port"] == opened["rows"]
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == opened
    assert flags["advertise_rows"] is None  # no number differs outside
    check_outside(yaml.safe_load(outside), names, opened)
    assert (
        container["readinessProbe"]["tcpSocket"]["port"]
        == container["ports"][0]["name"]
    )
    mounts = {
        mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]
    }
    volumes = {
        each["metadata"]["name"] for each in servers["spec"]["volumeClaimTemplates"]
    }
    assert mounts.keys() == volumes | {
        volume["name"] for volume in pod["spec"]["volumes"]
    }
    assert flags["data"] == mounts["data"]
    for flag in ("token_file", "tls_cert", "tls_key", "tls_ca"):
        assert Path(flags[flag]).parent == mounts["secrets"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > 30


OLDEST_KUBERNETES = "1.29"
"""The first version with the access mode ReadWriteOncePod as a stable feature."""


def objects() -> list[dict[str, Any]]:
    """All objects of Kubernetes in the pages."""
    every_object = []
    for page in (PAGE, TRAINING):
        for text in manifests("yaml", page):
            every_object += yaml.safe_load_all(text)
    return every_object


def places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all mappings with fields of Kubernetes, not with names of users."""
    if isinstance(value, list):
        return [
            place
            for number, part in enumerate(value)
            for place in places(part, (*path, number))
        ]
    if not isinstance(value, dict) or path[-1:] in USERS:
        return []
    inner = [place for key in value for place in places(value[key], (*path, key))]
    return [path, *inner]


USERS = [("matchLabels",), ("labels",), ("selector",), ("requests",), ("limits",)]


def test_kubernetes_accepts_the_manifests() -> None:
    """By the schemas of the oldest version that has all fields, and of the newest one,
    which refuse a field that they do not know.
    """
    kubernetes = pytest.importorskip(
        "kubernetes_validate", reason="it is in requirements/dev.txt"
    )
    assert len(objects()) == 5
    for version in (OLDEST_KUBERNETES, kubernetes.latest_version()):
        for manifest in objects():
            assert manifest["kind"]
            kubernetes.validate(manifest, version, strict=True)


@pytest.mark.parametrize("number", range(5))
def test_kubernetes_refuses_a_wrong_field(number: int) -> None:
    kubernetes = pytest.importorskip(
        "kubernetes_validate", reason="it is in requirements/dev.txt"
    )
    version = kubernetes.latest_version()
    manifest = objects()[number]
    for path in places(manifest):
        wrong = copy.deepcopy(manifest)
        place = wrong
        for key in path:
            place = place[key]
        place["replicaz"] = 2
        with pytest.raises(kubernetes.ValidationError, match="replicaz"):
            kubernetes.validate(wrong, version, strict=True)


def check_outside(
    service: dict[str, Any], pods: list[str], opened: dict[str, int]
) -> None:
    """Checks the Service by which clients outside the cluster reach one server."""
    assert service["kind"] == "Service"
    assert service["spec"]["selector"] == {
        "statefulset.kubernetes.io/pod-name": pods[0]
    }
    for port in service["spec"]["ports"]:
        assert port["port"] == opened[port["targetPort"]]
    assert {port["targetPort"] for port in service["spec"]["ports"]} == opened.keys()


def test_docker() -> None:
    """Both ports are mapped, and a port that has another number outside is advertised."""
    lines = [line for text in manifests("console") for line in text.splitlines()]
    commands = [
        line.removeprefix("$ ") for line in lines if line.startswith("$ docker run")
    ]
    assert len(commands) == 2
    for command in commands:
        arguments, _, serve = command.partition(" recstore serve ")
        words = shlex.split(arguments)
        mapped = {}
        for flag, value in itertools.pairwise(words):
            if flag == "-p":
                outer, _, inner = value.partition(":")
                mapped[int(inner)] = int(outer)
        flags = served(shlex.split(serve.replace("...", "FILE")))
        listen = int(flags["listen"].rpartition(":")[2])
        rows_port = flags["rows_port"]
        assert mapped.keys() == {listen, rows_port}
        advertised = int(flags["advertise_rows"] or rows_port)
        assert advertised == mapped[rows_port]


def test_systemd(tmp_path: Path) -> None:
    (text,) = manifests("ini")
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text)
    program, command, *arguments = shlex.split(
        unit["Service"]["ExecStart"].replace("%i", "7700")
    )
    assert (Path(program).name, command) == ("recstore", "serve")
    flags = served(arguments)
    assert flags["listen"] in flags["servers"].split(",")
    assert str(
        flags["data"]
    ) == f"/var/lib/{unit['Service']['StateDirectory']}".replace("%i", "7700")
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: the unit was not verified")
    file = tmp_path / "recstore@.service"
    file.write_text(text.replace(program, "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert str(file.name) not in done.stderr, done.stderr


def trained(arguments: list[str]) -> Any:
    """The arguments of torchrun, after its script's flags were read as the script does.

    An unknown flag is an error.
    """
    parsed = get_args_parser().parse_args(arguments)
    assert (ROOT / parsed.training_script).exists()
    program = [sys.executable, str(ROOT / parsed.training_script)]
    flags = [*parsed.training_script_args, "--data", "missing", "--json", "/dev/null"]
    done = subprocess.run(
        [*program, *flags, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return parsed


def test_an_elastic_job() -> None:
    (text,) = manifests("yaml", TRAINING)
    service, job = yaml.safe_load_all(text)
    assert (service["kind"], job["kind"], job["spec"]["completionMode"]) == (
        "Service",
        "Job",
        "Indexed",
    )
    pod = job["spec"]["template"]
    assert pod["metadata"]["labels"] == service["spec"]["selector"]
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["torchrun"]
    flags = trained(container["args"])
    assert (
        flags.rdzv_endpoint
        == f"{job['metadata']['name']}-0.{service['metadata']['name']}:29400"
    )
    smallest, largest = flags.nnodes.split(":")
    assert (
        int(smallest)
        < int(largest)
        == job["spec"]["completions"]
        == job["spec"]["parallelism"]
    )
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["spec"]["volumes"]}
    of_script = dict(
        each.lstrip("-").split("=")
        for each in flags.training_script_args
        if "=" in each
    )
    assert of_script["checkpoint"].startswith(mounts["checkpoints"])
    assert of_script["data"].startswith(mounts["data"])


@pytest.mark.skipif(
    sys.version_info >= (3, 14),
    reason="torchx 0.7.0 needs ast.Str, which Python 3.14 does not have",
)
def test_an_elastic_job_of_torchx() -> None:
    (text,) = [
        block for block in manifests("text", TRAINING) if block.startswith("torchx run")
    ]
    words = shlex.split(text)
    begin = words.index("dist.ddp")
    app = materialize_appdef(get_component("dist.ddp").fn, words[begin + 1 :])
    (role,) = app.roles
    assert (role.num_replicas, role.min_replicas, role.max_retries) == (3, 1, 20)
    assert role.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert {mount.dst_path for mount in role.mounts} == {"/checkpoints", "/data"}
    launched = shlex.split(role.args[-1].replace("$$", ""))
    flags = trained(launched[launched.index("--rdzv_backend") :])
    # as the page says
    assert (flags.nnodes, flags.nproc_per_node, flags.max_restarts) == ("1:3", "8", 0)
