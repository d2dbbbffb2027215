"""What wheel and sdist hold, without compiling: the extension is the one that the tests
run with.
"""

from __future__ import annotations

import ast
import email
import importlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import torchrec_recstore
from tests.packages import (
    PACKAGES,
    PROJECTS,
    ROOT,
    metadata_of,
    requirements_in_project,
)

# What no user of an sdist needs.
LEFT_OUT = {".gitignore"}


def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    return [name for name in names if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout's files, in which setup.py can write."""
    folder = tmp_path_factory.mktemp("package") / "checkout"
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def setup_py(folder: Path, *arguments: str) -> None:
    script = (
        ["setup.py"]
        if (folder / "setup.py").exists()
        else ["-c", "from setuptools import setup; setup()"]
    )
    run = subprocess.run(
        [sys.executable, *script, "-q", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


def test_sdist_holds_the_checkout(copy: Path) -> None:
    setup_py(copy, "sdist", "--dist-dir", "made")
    (made,) = (copy / "made").iterdir()
    names = files_of(made)
    assert set(tracked()) - names == LEFT_OUT
    assert not [name for name in names if name.endswith((".so", ".pyc", ".o"))]


def files_of(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as file:
        return {name.partition("/")[2] for name in file.getnames()}


@pytest.mark.parametrize("project", ["service", "serving"])
def test_sdist_of_a_plugin_holds_its_files_and_what_it_compiles(
    copy: Path, project: str
) -> None:
    setup_py(copy / project, "sdist", "--dist-dir", "made")
    (made,) = (copy / project / "made").iterdir()
    names = files_of(made)
    assert {name for name in tracked() if name.startswith(f"{project}/")} <= {
        f"{project}/{name}" for name in names
    }
    assert not [name for name in names if name.endswith((".so", ".pyc", ".o"))]
    core = {
        "packaging/native_build.py",
        "torchrec_recstore/csrc/ops/row_api.h",
        "torchrec_recstore/csrc/base/memory.cpp",
    }
    if project == "serving":
        core |= {
            "torchrec_recstore/csrc/base/mix.h",
            "service/torchrec_recstore_service/csrc/tls.cpp",
        }
    assert {f"core/{name}" for name in core} <= names


SCRIPTS = {
    f"benchmarks/{name}.json"
    for name in ("results", "quality", "progressive", "peers", "scale", "soak")
}


@pytest.mark.parametrize(
    ("package", "library", "tag"),
    [
        pytest.param(
            "torchrec_recstore",
            "_C.abi3.so",
            "cp310-abi3-linux_x86_64",
            marks=pytest.mark.slow,
        ),
        ("torchrec_recstore_service", "_rows.abi3.so", "cp310-abi3-linux_x86_64"),
        pytest.param(
            "torchrec_recstore_serving",
            "_serving.abi3.so",
            "cp310-abi3-linux_x86_64",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_wheel(copy: Path, package: str, library: str, tag: str) -> None:
    project = copy / PROJECTS[package].relative_to(ROOT)
    setup_py(project, "build_py", "--build-lib", "build/lib")
    # newer than its sources: not compiled
    shutil.copy(PACKAGES[package] / library, project / "build/lib" / package)
    setup_py(
        project,
        "build",
        "--build-lib",
        "build/lib",
        "bdist_wheel",
        "--skip-build",
        "--dist-dir",
        "wheels",
    )
    (made,) = (project / "wheels").iterdir()
    assert made.name.endswith(f"-{tag}.whl")
    with zipfile.ZipFile(made) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        about = {
            Path(name).name: file.read(name).decode()
            for name in file.namelist()
            if ".dist-info/" in name
        }
    root = f"{PACKAGES[package].relative_to(ROOT)}/"
    ours = {
        f"{package}/{name.removeprefix(root)}"
        for name in tracked()
        if name.startswith(root) and "/csrc/" not in name
    }
    ours.add(f"{package}/{library}")
    if package == "torchrec_recstore":
        scripts = {
            name for name in tracked() if name.startswith(("examples/", "benchmarks/"))
        } - SCRIPTS
        ours |= {f"{package}/{name}" for name in scripts}
        assert "recstore = torchrec_recstore.cli:main" in about["entry_points.txt"]
    else:
        assert (
            f"torchrec-recstore=={torchrec_recstore.__version__}" in about["METADATA"]
        )
        assert "[torchrec_recstore.commands]" in about["entry_points.txt"]
    assert names == ours
    metadata = email.message_from_string(about["METADATA"])
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_payload() == (PROJECTS[package] / "README.md").read_text()


def requirements(package: str = "torchrec_recstore") -> dict[str, dict[str, str]]:
    """Distributions by extra, "" for what is always needed, each with its bound."""
    bounds: dict[str, dict[str, str]] = {}
    for extra, lines in requirements_in_project(package).items():
        bounds[extra] = {}
        for line in lines:
            match = re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?(.*)", line)
            assert match is not None, line
            bounds[extra][match[1]] = match[2]
    return bounds


def test_versions_are_locked_to_each_other() -> None:
    version = f"=={torchrec_recstore.__version__}"
    ours = {name.replace("_", "-") for name in PACKAGES}
    for package in PACKAGES:
        assert (
            importlib.import_module(package).__version__
            == torchrec_recstore.__version__
        )
        # The version of the core is read from its module.
        written = metadata_of(package).get("version", torchrec_recstore.__version__)
        assert written == torchrec_recstore.__version__
        bounds = {
            bound
            for wanted in requirements(package).values()
            for name, bound in wanted.items()
            if name in ours
        }
        assert bounds == {version}


def pins() -> dict[str, str]:
    text = "\n".join(path.read_text() for path in (ROOT / "requirements").glob("*.txt"))
    return dict(
        re.findall(r"^([\w-]+)(?:\[[\w,]+\])?==([\w.]+)", text, flags=re.MULTILINE)
    )


def test_what_extras_name_is_pinned() -> None:
    # those are checked in test_triples.py
    of_triples = {"torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"}
    wanted_by = [
        (extra, wanted)
        for package in PACKAGES
        for extra, wanted in requirements(package).items()
    ]
    for extra, wanted in wanted_by:
        for name, bound in wanted.items():
            if (extra.startswith("torchrec") and name in of_triples) or name.replace(
                "-", "_"
            ) in PACKAGES:
                continue
            assert name in pins(), f"[{extra}] {name}"
            assert not bound.startswith("==") or pins()[name] == bound[2:], (
                f"[{extra}] {name}"
            )


COMMON = ["", "torchrec-cpu", "torchrec", "rocksdb", "redis", "cli"]


@pytest.mark.parametrize(
    ("folder", "package", "extras"),
    [
        # Two cold stores import the package of their extra when they are made.
        ("torchrec_recstore/store", "torchrec_recstore", ["", "rocksdb", "redis"]),
        ("torchrec_recstore/kernels", "torchrec_recstore", [""]),
        ("torchrec_recstore", "torchrec_recstore", [*COMMON, "parquet"]),
        (
            "service/torchrec_recstore_service",
            "torchrec_recstore_service",
            ["", "redis", "rocksdb"],
        ),
        (
            "serving/torchrec_recstore_serving/export",
            "torchrec_recstore_serving",
            [""],
        ),
        (
            "serving/torchrec_recstore_serving/retrieval",
            "torchrec_recstore_serving",
            ["", "retrieval"],
        ),
        (
            "serving/torchrec_recstore_serving/publish",
            "torchrec_recstore_serving",
            ["", "redis"],
        ),
        (
            "serving/torchrec_recstore_serving/predict",
            "torchrec_recstore_serving",
            ["", "predict"],
        ),
        ("examples", "torchrec_recstore", [*COMMON, "examples", "trainers"]),
        ("benchmarks", "torchrec_recstore", [*COMMON, "examples"]),
    ],
)
def test_what_is_imported_is_required(
    folder: str, package: str, extras: list[str]
) -> None:
    known = {
        name.replace("-", "_").lower()
        for extra in extras
        for name in requirements(package)[extra]
    }
    # An extra of the service asks for the extra of the core with the same name.
    for extra in extras:
        if extra:
            names = requirements().get(extra, {})
            known |= {name.replace("-", "_").lower() for name in names}
    if folder in ("examples", "benchmarks"):
        plugins = (
            requirements(f"torchrec_recstore_{plugin}")
            for plugin in ("service", "serving")
        )
        known |= {
            name.replace("-", "_")
            for plugin in plugins
            for wanted in plugin.values()
            for name in wanted
        }
    if folder == "benchmarks":
        # peers_tfra.py runs in an environment of its own
        known |= {"tensorflow", "tensorflow_recommenders_addons"}
    if package == "torchrec_recstore":
        known.add("triton")  # it comes with the torch of an accelerator
    # it exports TorchRec's models, of whom has them
    if package == "torchrec_recstore_serving":
        known |= {name.replace("-", "_") for name in requirements()["torchrec-cpu"]} | {
            "torchrec"
        }
    own = {
        path.stem for each in {folder, "examples"} for path in (ROOT / each).rglob("*")
    } | set(PACKAGES)
    # Python 3.10 knows the names that a distribution lists in top_level.txt, a file
    # that these do not have.
    distributions = {
        "google": ["protobuf"],
        "faiss": ["faiss_cpu"],
    } | packages_distributions()
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            names += (
                [node.module]
                if isinstance(node, ast.ImportFrom) and node.module and not node.level
                else []
            )
            for name in (
                {each.partition(".")[0] for each in names}
                - own
                - sys.stdlib_module_names
            ):
                candidates = {
                    each.replace("-", "_").lower()
                    for each in distributions.get(name, [name])
                }
                # Namespaces that several distributions share: one of them is enough.
                assert candidates & known, f"{path.relative_to(ROOT)} imports {name}"
