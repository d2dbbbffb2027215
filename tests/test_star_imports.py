"""Star imports, ``dir`` and ``help`` work without the other distributions and without
TorchRec.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache

import pytest

from .interpreters import ForkingInterpreter

SERVICE = {
    "NoInitialRow",
    "RecStoreClient",
    "ServerRestartedError",
    "ServerSetError",
    "ServiceError",
    "get_include",
}
WITH_TORCHREC = {
    "RecStoreSharder",
    "RecStorePlanner",
    "save_checkpoint",
    "RecStoreEmbeddingCollection",
}
CORE = {
    "Table",
    "TableOptions",
    "SGD",
    "RecStoreEmbedding",
    "read_info",
    "tune_threads",
    "RecStoreWarning",
}

# Hides packages from the import system, and distributions from the entry points, as if
# they were not installed.
HIDE = """
import importlib.metadata, sys
hidden = {hidden!r}
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
entry_points = importlib.metadata.entry_points
def visible(**wanted):
    if not wanted:
        return entry_points()  # what Triton reads
    return [point for point in entry_points(**wanted) if point.value.partition(":")[0].partition(".")[0] not in hidden]
importlib.metadata.entry_points = visible
import pydoc, warnings
warnings.filterwarnings("ignore", category=FutureWarning)
"""

OTHERS = ("torchrec_recstore_service", "torchrec_recstore_serving")
TORCHREC = ("torchrec", "fbgemm_gpu")

TORCH = "import pydoc, torch\n"
TORCH_AND_TORCHREC = TORCH + "import torchrec.distributed\n"

FACADES = (
    "torchrec_recstore",
    "torchrec_recstore.modules",
    "torchrec_recstore.checkpoint",
)


_interpreters: dict[str, ForkingInterpreter] = {}


def interpreter(begin: str) -> ForkingInterpreter:
    """An interpreter that has imported packages which are never hidden."""
    if begin not in _interpreters:
        _interpreters[begin] = ForkingInterpreter(begin, "-W", "ignore::UserWarning")
    return _interpreters[begin]


@pytest.fixture(scope="module", autouse=True)
def _close_interpreters() -> Iterator[None]:
    yield
    for started in _interpreters.values():
        started.close()
    _interpreters.clear()


def run(hidden: tuple[str, ...], code: str) -> str:
    begin = TORCH if "torchrec" in hidden else TORCH_AND_TORCHREC
    ended = interpreter(begin).run(HIDE.format(hidden=hidden) + code)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def starred(hidden: tuple[str, ...], package: str) -> set[str]:
    """Returns the names that a star import binds, and checks those that ``dir`` and
    ``help`` show.
    """
    return starred_and_said(hidden, package, set())[0]


def starred_and_said(
    hidden: tuple[str, ...], package: str, all_names: set[str]
) -> tuple[set[str], list[str]]:
    """Like :func:`starred`.

    Returns also what the package says of each other name of ``all_names``, sorted.
    """
    code = f"""
names = {{}}
exec("from {package} import *", names)
import {package} as module
assert len(set(module.__all__)) == len(module.__all__), module.__all__
assert set(module.__all__) <= names.keys() & set(dir(module)), set(module.__all__) - set(dir(module))
for name in dir(module):
    getattr(module, name)
pydoc.plain(pydoc.render_doc(module))
print(*sorted(names))
for name in sorted({all_names!r} - names.keys()):
    try:
        getattr(module, name)
    except ImportError as error:
        print(error)
"""
    names, *said = run(hidden, code).splitlines()
    return set(names.split()), said


@pytest.mark.slow
def test_the_core_alone() -> None:
    names = starred(OTHERS, "torchrec_recstore")
    assert names >= WITH_TORCHREC | CORE
    assert not names & SERVICE


def test_the_core_without_torchrec() -> None:
    names = starred(OTHERS + TORCHREC, "torchrec_recstore")
    assert names >= CORE
    assert not names & (SERVICE | WITH_TORCHREC)


@pytest.mark.slow
def test_a_module_in_the_place_of_torchrec() -> None:
    """Tests and documentation builds put modules without a specification in the place
    of packages.
    """
    code = """
import types
import torchrec_recstore
for stub in ("torchrec", "fbgemm_gpu"):
    sys.modules[stub] = types.ModuleType(stub)
names = {}
exec("from torchrec_recstore import *", names)
assert set(torchrec_recstore.__all__) <= set(dir(torchrec_recstore))
print(*sorted(names))
try:
    torchrec_recstore.RecStoreSharder
except ImportError as error:
    print(error)
"""
    starred_names, message = run(OTHERS + TORCHREC, code).splitlines()
    assert set(starred_names.split()) >= CORE
    assert not set(starred_names.split()) & WITH_TORCHREC
    assert message.startswith(
        "RecStoreSharder needs torchrec, which is not installed: pip install"
    )


@pytest.mark.slow
def test_everything() -> None:
    assert starred((), "torchrec_recstore") >= CORE | SERVICE | WITH_TORCHREC
    assert starred((), "torchrec_recstore.inference") >= {
        "verify",
        "export_for_inference",
    }


WITHOUT_TORCHREC = (*FACADES[1:], "torchrec_recstore_service")


@cache
def everything() -> dict[str, list[str]]:
    """The names of each package of ``WITHOUT_TORCHREC`` where all is installed."""
    code = f"""
import importlib, json
packages = {WITHOUT_TORCHREC!r}
print(json.dumps({{name: importlib.import_module(name).__all__ for name in packages}}))
"""
    names: dict[str, list[str]] = json.loads(run((), code))
    return names


@pytest.mark.slow
@pytest.mark.parametrize("package", WITHOUT_TORCHREC)
def test_facades_without_torchrec(package: str) -> None:
    all_names = set(everything()[package])
    names, said = starred_and_said(TORCHREC, package, all_names)
    assert names & all_names
    for name, line in zip(sorted(all_names - names), said, strict=True):
        assert line.startswith(
            f"{name} needs torchrec, which is not installed: pip install"
        )


def test_inference_without_torchrec() -> None:
    names = starred(TORCHREC, "torchrec_recstore.inference")
    assert names >= {"FollowerState", "load_library", "verify"}
    assert "export_for_inference" not in names


@pytest.mark.slow
def test_inference_without_serving() -> None:
    code = """
import torchrec_recstore.inference as inference
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    names = {}
    exec("from torchrec_recstore.inference import *", names)
assert "pip install path/to/torchrec_recstore/serving" in str(caught[-1].message), caught
assert not [name for name in names if not name.startswith("__")]
for name in dir(inference):
    getattr(inference, name)
pydoc.plain(pydoc.render_doc(inference))
try:
    inference.verify
except ImportError as error:
    print(error)
"""
    assert (
        "which is not installed: pip install path/to/torchrec_recstore/serving"
        in run(OTHERS, code)
    )


def test_a_name_of_what_is_not_installed_says_what_to_install() -> None:
    code = """
import torchrec_recstore
for name in ("RecStoreClient", "RecStoreSharder", "save_checkpoint"):
    try:
        getattr(torchrec_recstore, name)
    except ImportError as error:
        print(error)
"""
    said = run(OTHERS + TORCHREC, code).splitlines()
    assert said[0].endswith("pip install path/to/torchrec_recstore/service")
    install = (
        "needs torchrec, which is not installed: pip install"
        " 'path/to/torchrec_recstore[torchrec]'"
    )
    for name, line in zip(
        ("RecStoreSharder", "save_checkpoint"), said[1:], strict=True
    ):
        assert line.startswith(f"{name} {install}")
