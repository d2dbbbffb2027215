"""Tests of versions that fit each other or not, and of imports that fail in real
processes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packages import PROJECTS, requirements_in_project
from torchrec_recstore.doctor.machine import Finding
from torchrec_recstore.doctor.packages import (
    EXTRAS,
    MODULES,
    TESTED,
    Imported,
    bounds_of_extra,
    extra_packages,
    fits,
    packages,
    probe,
    python,
    requirements_of,
)
from torchrec_recstore.triples import DEFAULT, TRIPLES, Triple

ROOT = Path(__file__).parents[2]
GOOD = {
    "torch": Imported(facts={"version": "2.13.0+cpu"}),
    "torchrec_recstore.ops": Imported(facts={"instruction_set": "avx2"}),
    "fbgemm_gpu": Imported(),
    "torchrec": Imported(),
}


def of_triple(triple: Triple) -> dict[str, str]:
    return {
        "torch": triple.torch,
        "torchrec": triple.torchrec,
        "fbgemm-gpu-cpu": triple.fbgemm,
    }


def look(
    versions: dict[str, str | None], imported: dict[str, Imported] | None = None
) -> dict[str, Finding]:
    """Returns the findings that are not ok for tested versions, changed by the
    arguments.
    """
    there: dict[str, str | None] = {
        **TESTED,
        **of_triple(DEFAULT),
        "torchrec-recstore": "0.1.0",
        **versions,
    }
    findings = {
        finding.name: finding
        for finding in packages({**GOOD, **(imported or {})}, there.get)
    }
    # The checks report no other package than those of the test.
    return {
        name: finding for name, finding in findings.items() if finding.status != "ok"
    }


def test_what_is_tested_is_what_is_pinned() -> None:
    text = "".join(
        (ROOT / "requirements" / name).read_text()
        for name in ("base.txt", "torchrec.txt")
    )
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)$", text, flags=re.MULTILINE))
    tested = {**TESTED, **of_triple(DEFAULT)}
    assert {name: pins[name] for name in tested} == tested


def test_all_fits() -> None:
    assert look({}) == {}


@pytest.mark.parametrize(
    ("versions", "imported", "expected"),
    [
        (
            {"torch": None},
            {
                "torch": Imported(
                    "ModuleNotFoundError: No module named 'torch'", "torch"
                )
            },
            {
                "torch": ("problem", "not installed", "pip install torch==2.13.0"),
                "torchrec_recstore": (
                    "problem",
                    "its native extension needs torch",
                    "fix torch first",
                ),
                "fbgemm": (
                    "problem",
                    "fbgemm-gpu-cpu 1.8.0 (CPU) needs torch",
                    "fix torch first",
                ),
            },
        ),
        (
            {},
            {"torch": Imported("OSError: libtorch.so: no such file")},
            {
                "torch": (
                    "problem",
                    "cannot be imported: OSError: libtorch",
                    "torch==2.13.0 --force-reinstall",
                ),
                "torchrec_recstore": (
                    "problem",
                    "its native extension needs torch",
                    "fix torch first",
                ),
                "fbgemm": (
                    "problem",
                    "fbgemm-gpu-cpu 1.8.0 (CPU) needs torch",
                    "fix torch first",
                ),
            },
        ),
        (
            {},
            {
                "torch": Imported(facts={"version": "2.10.1"}),
                "torchrec_recstore.ops": Imported("ImportError: symbol"),
            },
            {
                "torch": (
                    "problem",
                    "2.10.1 (CPU), and the native extension needs 2.11",
                    "pip install torch==2.13.0",
                ),
                "torchrec_recstore": (
                    "problem",
                    "does not load: ImportError: symbol",
                    "make build",
                ),
                "fbgemm": (
                    "problem",
                    "loads with torch 2.13 only, and torch is 2.10",
                    (
                        "to train with TorchRec: pip install"
                        " 'path/to/torchrec_recstore[torchrec-cpu]'"
                    ),
                ),
            },
        ),
        (
            {"fbgemm-gpu": "1.8.0"},
            {},
            {
                "fbgemm": (
                    "problem",
                    "both write the same files",
                    "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && pip",
                )
            },
        ),
        (
            {"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"},
            {
                "fbgemm_gpu": Imported("OSError: libcudart.so.12"),
                "torchrec": Imported("OSError: libcudart.so.12"),
            },
            {
                "fbgemm": (
                    "problem",
                    "fbgemm-gpu 1.8.0 (CUDA) cannot be imported",
                    "pip uninstall -y fbgemm-gpu && pip install fbgemm-gpu-cpu==1.8.0",
                ),
                "torchrec": (
                    "problem",
                    "cannot be imported without fbgemm",
                    "fix fbgemm first",
                ),
            },
        ),
        (
            {
                "fbgemm-gpu-cpu": None,
                "torchrec": None,
                "torchmetrics": None,
                "tensordict": None,
            },
            {},
            {
                "fbgemm": (
                    "warning",
                    "not installed: Table and RecStoreClient work",
                    "pip install fbgemm-gpu-cpu==1.8.0",
                ),
                "torchrec": (
                    "warning",
                    "not installed: Table and RecStoreClient work",
                    (
                        "pip install 'path/to/torchrec_recstore[torchrec-cpu]' && pip install"
                        " --no-deps torchrec==1.8.0"
                    ),
                ),
            },
        ),
        (
            {"torchrec": "1.9.0"},
            {},
            {
                "torchrec": (
                    "warning",
                    (
                        "1.9.0; torch 2.13.0, torchrec 1.8.0, fbgemm-gpu-cpu 1.8.0 are"
                        " tested with each other"
                    ),
                    "pip install --no-deps torchrec==1.8.0",
                )
            },
        ),
        (
            {},
            {
                "torchrec": Imported(
                    "ModuleNotFoundError: No module named 'iopath'", "iopath"
                )
            },
            {
                "torchrec": (
                    "problem",
                    "No module named 'iopath'",
                    "pip install 'path/to/torchrec_recstore[torchrec-cpu]'",
                )
            },
        ),
        (
            {"torchmetrics": "1.4.0", "safetensors": "0.9.1"},
            {},
            {
                "torchmetrics": (
                    "warning",
                    "torchrec is tested with 1.0.3",
                    "pip install torchmetrics==1.0.3",
                )
            },
        ),
        (
            {"xxhash": None, "tensordict": None},
            {},
            {
                "xxhash": (
                    "problem",
                    "torchrec_recstore needs it",
                    "pip install xxhash==4.1.0",
                ),
                "tensordict": (
                    "problem",
                    "torchrec needs it",
                    "pip install tensordict==0.15.3",
                ),
            },
        ),
    ],
)
def test_verdicts(
    versions: dict[str, str | None],
    imported: dict[str, Imported],
    expected: dict[str, tuple[str, str, str]],
) -> None:
    found = look(versions, imported)
    assert found.keys() == expected.keys()
    for name, (status, says, fix) in expected.items():
        assert found[name].status == status
        assert says in found[name].found
        assert fix in found[name].fix


def torch_is(number: str) -> dict[str, Imported]:
    return {"torch": Imported(facts={"version": number})}


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
def test_every_tested_triple_fits(triple: Triple) -> None:
    assert look(dict(of_triple(triple)), torch_is(triple.torch)) == {}
    # a later patch of that torch
    assert look(dict(of_triple(triple)), torch_is(f"{triple.torch[:-1]}7+cpu")) == {}


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
@pytest.mark.parametrize("others", TRIPLES, ids=str)
def test_the_advice_fits_the_torch_that_is_installed(
    triple: Triple, others: Triple
) -> None:
    """The advice is the triple of the installed torch, and never an FBGEMM that does
    not load with it.
    """
    if others == triple:
        return
    fails = Imported("OSError: undefined symbol")
    found = look(
        {**of_triple(others), "torch": triple.torch},
        {**torch_is(triple.torch), "fbgemm_gpu": fails},
    )
    has = ".".join(triple.torch.split(".")[:2])
    assert found.keys() == {"fbgemm", "torchrec"}
    assert (found["fbgemm"].status, found["fbgemm"].fix) == (
        "problem",
        f"pip install fbgemm-gpu-cpu=={triple.fbgemm}",
    )
    assert f"only, and torch is {has}; {triple} fit each other" in found["fbgemm"].found
    assert found["torchrec"].fix == f"pip install --no-deps torchrec=={triple.torchrec}"
    none = look(
        {"torch": triple.torch, "torchrec": None, "fbgemm-gpu-cpu": None},
        torch_is(triple.torch),
    )
    assert none["fbgemm"].fix == f"pip install fbgemm-gpu-cpu=={triple.fbgemm}"
    assert none["torchrec"].fix == triple.install_on_cpu


def test_a_torch_without_fbgemm() -> None:
    """Table and the client work with it; to train, the advice is the newest triple with
    an older torch.
    """
    nothing: dict[str, str | None] = dict.fromkeys(
        ("torchrec", "fbgemm-gpu-cpu", "torchmetrics", "tensordict")
    )
    found = look(nothing, torch_is("2.15.0"))
    assert found.keys() == {"fbgemm", "torchrec"}
    install = (
        "pip install 'path/to/torchrec_recstore[torchrec-1-9-cpu]' && pip install --no-deps"
        " torchrec==1.9.2"
    )
    assert (found["fbgemm"].status, found["torchrec"].status) == ("warning", "warning")
    assert (
        found["fbgemm"].found
        == "no FBGEMM is known for torch 2.15: Table and RecStoreClient work, TorchRec"
        " does not"
    )
    assert found["fbgemm"].fix == f"to train with TorchRec: {install}"
    assert found["torchrec"].fix == install
    does_not_load = {
        **torch_is("2.15.0"),
        "fbgemm_gpu": Imported("OSError"),
        "torchrec": Imported("OSError"),
    }
    stale = look({"fbgemm-gpu-cpu": "1.9.0", "torchrec": "1.9.2"}, does_not_load)
    assert (stale["fbgemm"].status, stale["fbgemm"].fix) == (
        "problem",
        found["fbgemm"].fix,
    )
    assert (
        stale["fbgemm"].found
        == "fbgemm-gpu-cpu 1.9.0 loads with torch 2.14 only, and torch is 2.15"
    )
    later = look({"fbgemm-gpu-cpu": "1.10.0"}, torch_is("2.15.0"))
    assert (
        later["fbgemm"].found
        == "fbgemm-gpu-cpu 1.10.0; no FBGEMM is tested with torch 2.15"
    )
    assert later["fbgemm"].status == "warning"


def test_python() -> None:
    assert python((3, 10, 0), "python").status == "ok"
    assert python((3, 9, 18), "python").status == "problem"


LINES = [
    "torch>=2.11",
    'redis>=8; extra == "redis"',
    "hiredis>=3 ; extra == 'redis'",
    'rich; extra == "cli"',
]


def test_extras() -> None:
    wanted = requirements_of("redis", LINES)
    assert wanted == {"redis": ">=8", "hiredis": ">=3"}

    def extra(versions: dict[str, str]) -> Finding:
        get: Callable[[str], str | None] = versions.get
        return extra_packages("redis", "cold rows", wanted, get)

    assert extra({"redis": "8.1.0", "hiredis": "3.5.0"}).status == "ok"
    missing = extra({"redis": "8.1.0"})
    assert (missing.status, missing.found) == (
        "ok",
        "cold rows: not installed (hiredis)",
    )
    assert missing.fix == "pip install 'path/to/torchrec_recstore[redis]'"
    old = extra({"redis": "7.4.1", "hiredis": "3.5.0"})
    assert (old.status, old.found) == ("warning", "cold rows: redis 7.4.1, wanted >=8")


def test_extras_of_the_real_packages() -> None:
    """Those of the other distributions are checked through them, so that a missing
    grpcio is seen.
    """
    lines: dict[str, list[str]] = {}
    for package in PROJECTS:
        requirements = requirements_in_project(package)
        in_metadata = requirements.pop("")
        for extra, of_extra in requirements.items():
            in_metadata += [f'{line}; extra == "{extra}"' for line in of_extra]
        lines[package.replace("_", "-")] = in_metadata
    wanted = {extra: bounds_of_extra(extra, lines.get) for extra in EXTRAS}
    assert all(
        re.fullmatch(r"([<>=~!]=?[\d.]+)?", bound)
        for some in wanted.values()
        for bound in some.values()
    )
    assert wanted["redis"].keys() == {"redis", "hiredis"}
    assert wanted["service"].keys() >= {
        "grpcio",
        "grpcio-health-checking",
        "prometheus-client",
        "protobuf",
    }
    assert "redis" not in wanted["service"]
    assert wanted["serving"].keys() >= {"torchrec-recstore-serving", "rich"}
    of_predictions = {"torchrec-recstore-service", "grpcio", "tornado"}
    assert not of_predictions & wanted["serving"].keys()
    assert wanted["predict"].keys() >= {
        "torchrec-recstore-serving",
        "grpcio-health-checking",
        *of_predictions,
    }
    assert "torch" not in wanted["service"]  # the core needs it anyway
    assert wanted["rocksdb"].keys() == {"rocksdict"}


@pytest.mark.parametrize(
    ("number", "bound", "expected"),
    [
        ("1.10.0", ">=1.9", True),
        ("1.8", ">=1.9", False),
        ("1.0.3", "==1.0.3", True),
        ("1.0.30", "==1.0.3", False),
        ("2.13.0+cpu", "==2.13.0", True),
        ("5", "", True),
    ],
)
def test_fits(number: str, bound: str, expected: bool) -> None:
    assert fits(number, bound) is expected


def test_imports_that_fail_crash_and_never_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real child process imports modules that the test has written."""
    (tmp_path / "fails.py").write_text("import is_not_there\n")
    (tmp_path / "crashes.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "hangs.py").write_text("import time\nprint('noise')\ntime.sleep(60)\n")
    (tmp_path / "works.py").write_text("print('{noise}')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = probe(["fails", "crashes", "ends", "works"])
    assert found["fails"].error == "ModuleNotFoundError: No module named 'is_not_there'"
    assert found["fails"].missing == "is_not_there"
    assert found["crashes"].error == "its import ends the process with SIGSEGV"
    assert found["ends"].error == "its import ends the process with status 3"
    assert found["works"] == Imported()
    assert (
        probe(["hangs", "works"], timeout_s=1)["hangs"].error
        == "its import has not returned in 1 s"
    )


def test_torch_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    found = probe(MODULES)
    assert all(
        found[name].missing == "torch" for name in MODULES if name != "fbgemm_gpu"
    )
    assert "torch" not in [
        finding.name for finding in packages(found) if finding.status == "ok"
    ]
    # the module of the test process is not changed
    assert sys.modules["torch"].__version__
