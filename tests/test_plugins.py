"""The core works without the other distributions, finds them by their entry points, and
names one that is missing.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
import typer

import torchrec_recstore
import torchrec_recstore.inference
import torchrec_recstore_service
import torchrec_recstore_serving
from torchrec_recstore import cli, plugins
from torchrec_recstore.commands.scripts import missing_in_one_line
from torchrec_recstore.installing import install
from torchrec_recstore.plugins import missing

from .packages import PACKAGES, PYTHON_PATH, metadata_of

OTHERS = sorted(PACKAGES.keys() - {"torchrec_recstore"})


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no other distribution was installed."""
    monkeypatch.setattr(plugins, "_entry_points", lambda **wanted: ())
    uncached = plugins.plugin.__wrapped__
    for module in (plugins, torchrec_recstore.inference):
        monkeypatch.setattr(module, "plugin", uncached)


def test_what_the_others_add_is_what_their_setup_lists() -> None:
    for package in OTHERS:
        listed = metadata_of(package)["entry-points"]
        names = {name for group in listed.values() for name in group}
        owners = plugins._PLUGINS | plugins._COMMANDS
        assert names == {
            name
            for name, owner in owners.items()
            if package == f"torchrec_recstore_{owner}"
        }
        for name in listed["torchrec_recstore.plugins"]:
            assert plugins.plugin(name) is not None
    assert all(entry is not None for entry in plugins.commands().values())


def test_the_public_names_are_those_of_the_others() -> None:
    # a function of RecStore's programs, which import it from the service
    of_seed = {"get_kv_client"}
    assert set(torchrec_recstore_service.__all__) - of_seed <= set(
        torchrec_recstore.__all__
    )
    for name in sorted(set(torchrec_recstore_service.__all__) - of_seed):
        assert getattr(torchrec_recstore, name) is getattr(
            torchrec_recstore_service, name
        )
    for name in torchrec_recstore_serving.__all__:
        assert getattr(torchrec_recstore.inference, name) is getattr(
            torchrec_recstore_serving, name
        )


def test_the_names_of_serving_are_no_second_package() -> None:
    """Else ``torchrec_recstore.inference.delta`` would be a second copy of a module,
    with classes of its own.
    """
    assert not hasattr(torchrec_recstore.inference, "__path__")
    with pytest.raises(ModuleNotFoundError, match="is not a package"):
        importlib.import_module("torchrec_recstore.inference.delta")
    names: dict[str, object] = {}
    exec("from torchrec_recstore.inference import *", names)
    assert set(torchrec_recstore_serving.__all__) <= names.keys()


@pytest.mark.usefixtures("alone")
def test_a_scan_of_modules_needs_no_other_distribution() -> None:
    # unittest asks every module
    assert getattr(torchrec_recstore.inference, "__warningregistry__", None) is None


class Broken:
    """The entry point of a distribution of another version."""

    def load(self) -> object:
        raise ImportError(
            "cannot import name 'x' from 'torchrec_recstore.commands.output'"
        )


def test_a_command_that_does_not_load_leaves_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = cli._of_others("serve", Broken())  # type: ignore[arg-type]
    with pytest.raises(typer.Exit):
        command(None)
    assert (
        capsys.readouterr().err
        == "error: cannot import name 'x' from 'torchrec_recstore.commands.output'\n"
    )


def test_only_a_missing_package_is_told_in_one_line() -> None:
    with (
        pytest.raises(ImportError, match="a library is damaged"),
        missing_in_one_line(),
    ):
        raise ImportError("a library is damaged")
    told = (
        "grpc is missing: pip install 'path/to/torchrec_recstore\\[service\\]'"
        " path/to/torchrec_recstore/service"
    )
    with pytest.raises(ValueError, match=told), missing_in_one_line():
        raise ModuleNotFoundError("No module named 'grpc'", name="grpc")


@pytest.mark.usefixtures("alone")
def test_a_missing_distribution_is_named() -> None:
    for name, needed in (
        ("client", "torchrec-recstore-service"),
        ("serving", "torchrec-recstore-serving"),
    ):
        command = install(part=needed.removeprefix("torchrec-recstore-"))
        with pytest.raises(
            ImportError,
            match=f"{needed}, which is not installed: {command}$",
        ):
            plugins.plugin(name)
    assert set(plugins.commands().values()) == {None}


@pytest.mark.slow
def test_the_core_loads_none_of_the_others() -> None:
    code = """
import sys
sys.modules.update(dict.fromkeys(("torchrec_recstore_service", "torchrec_recstore_serving", "grpc")))
import torchrec_recstore
from torchrec_recstore import plugins
plugins._entry_points = lambda **wanted: ()
import torchrec_recstore.cli
for package in ("store", "kernels", "modules", "sharders", "planner", "checkpoint", "doctor"):
    __import__(f"torchrec_recstore.{package}")
from torchrec_recstore import RecStoreSharder, Table
Table(4).close()
"""
    environment = os.environ | {"PYTHONPATH": PYTHON_PATH}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_the_error_of_a_missing_command_says_what_to_install() -> None:
    serving = "pip install path/to/torchrec_recstore/serving"
    assert str(missing("export")).endswith(serving)
    with_server = "pip install 'path/to/torchrec_recstore/serving[predict]' path/to/torchrec_recstore/service"
    assert str(missing("follow")).endswith(with_server)
