"""The manifests of docs/service.md are valid, and start servers with flags that exist."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from torchrec_recstore.cli import app

from .pages import ROOT, blocks

PAGE = ROOT / "docs" / "service.md"


def manifests(kind: str) -> list[str]:
    return [block.text for block in blocks(PAGE) if block.kind == kind]


def served(arguments: list[str]) -> dict[str, Any]:
    """The values of the flags of ``recstore serve``. An unknown flag is an error."""
    command: Any = typer.main.get_command(app)
    with command.commands["serve"].make_context("serve", arguments) as context:
        return dict(context.params)


def test_kubernetes() -> None:
    (text,) = manifests("yaml")
    service, servers = yaml.safe_load_all(text)
    assert (service["kind"], servers["kind"]) == ("Service", "StatefulSet")
    pod = servers["spec"]["template"]
    assert servers["spec"]["serviceName"] == service["metadata"]["name"]
    labels = servers["spec"]["selector"]["matchLabels"]
    assert pod["metadata"]["labels"] == labels == service["spec"]["selector"]
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["recstore", "serve"]
    flags = served(container["args"])
    names = [f"{servers['metadata']['name']}-{number}" for number in range(servers["spec"]["replicas"])]
    assert flags["servers"] == ",".join(f"{name}.{service['metadata']['name']}:7700" for name in names)
    port = container["ports"][0]["containerPort"]
    assert flags["listen"] == f"0.0.0.0:{port}"
    assert port == service["spec"]["ports"][0]["port"]
    assert container["readinessProbe"]["tcpSocket"]["port"] == container["ports"][0]["name"]
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    volumes = {each["metadata"]["name"] for each in servers["spec"]["volumeClaimTemplates"]}
    assert mounts.keys() == volumes | {volume["name"] for volume in pod["spec"]["volumes"]}
    assert flags["data"] == mounts["data"]
    for flag in ("token_file", "tls_cert", "tls_key", "tls_ca"):
        assert Path(flags[flag]).parent == mounts["secrets"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > 30


def test_systemd(tmp_path: Path) -> None:
    (text,) = manifests("ini")
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text)
    program, command, *arguments = shlex.split(unit["Service"]["ExecStart"].replace("%i", "7700"))
    assert (Path(program).name, command) == ("recstore", "serve")
    flags = served(arguments)
    assert flags["listen"] in flags["servers"].split(",")
    assert str(flags["data"]) == f"/var/lib/{unit['Service']['StateDirectory']}".replace("%i", "7700")
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: the unit was not verified")
    file = tmp_path / "recstore@.service"
    file.write_text(text.replace(program, "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False)
    assert str(file.name) not in done.stderr, done.stderr
