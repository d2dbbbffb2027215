"""What wheel and sdist hold, without compiling: the extension is the one that the tests run with."""

from __future__ import annotations

import ast
import configparser
import email
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

ROOT = Path(__file__).parents[2]
# What no user of an sdist needs.
LEFT_OUT = {".gitignore"}


def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
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
    run = subprocess.run([sys.executable, "setup.py", "-q", *arguments], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_sdist_holds_the_checkout(copy: Path) -> None:
    setup_py(copy, "sdist", "--dist-dir", "made")
    (made,) = (copy / "made").iterdir()
    with tarfile.open(made) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert set(tracked()) - names == LEFT_OUT
    assert not [name for name in names if name.endswith((".so", ".pyc", ".o"))]


def test_wheel(copy: Path) -> None:
    library = copy / "build/lib/torchrec_recstore"
    setup_py(copy, "build_py", "--build-lib", "build/lib")
    extensions = ["_C.abi3.so", "_serving.abi3.so"]
    for name in extensions:  # newer than their sources: they are not compiled again
        shutil.copy(Path(torchrec_recstore.__file__).parent / name, library)
    setup_py(copy, "build", "--build-lib", "build/lib", "bdist_wheel", "--skip-build", "--dist-dir", "wheels")
    (made,) = (copy / "wheels").iterdir()
    assert made.name.endswith("-cp310-abi3-linux_x86_64.whl")
    with zipfile.ZipFile(made) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        about = {Path(name).name: file.read(name).decode() for name in file.namelist() if ".dist-info/" in name}
    ours = {name for name in tracked() if name.startswith("torchrec_recstore/") and "/csrc/" not in name}
    scripts = {name for name in tracked() if name.startswith(("examples/", "benchmarks/"))}
    scripts -= {f"benchmarks/{name}.json" for name in ("results", "quality", "scale")}
    assert names == ours | {f"torchrec_recstore/{name}" for name in [*scripts, *extensions]}
    assert "recstore = torchrec_recstore.cli:main" in about["entry_points.txt"]
    metadata = email.message_from_string(about["METADATA"])
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License"] == "Apache-2.0"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()


def requirements() -> dict[str, dict[str, str]]:
    """Distributions by extra, "" for what is always needed, each with its bound."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = {"": config["options"]["install_requires"], **config["options.extras_require"]}
    found = {}
    for extra, text in lines.items():
        wanted = [re.fullmatch(r"([\w-]+)(.*)", line) for line in text.split("\n") if line.strip()]
        found[extra] = {match[1]: match[2] for match in wanted if match is not None}
    return found


def pins() -> dict[str, str]:
    text = "\n".join(path.read_text() for path in (ROOT / "requirements").glob("*.txt"))
    return dict(re.findall(r"^([\w-]+)==([\w.]+)", text, flags=re.MULTILINE))


def test_what_extras_name_is_pinned() -> None:
    of_triples = {"torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"}  # those are checked in test_triples.py
    for extra, wanted in requirements().items():
        for name, bound in wanted.items():
            if extra.startswith("torchrec") and name in of_triples:
                continue
            assert name in pins(), f"[{extra}] {name}"
            assert not bound.startswith("==") or pins()[name] == bound[2:], f"[{extra}] {name}"


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("torchrec_recstore/store", ["", "rocksdb", "redis", "service"]),  # docs/install.md: usable without an extra
        ("torchrec_recstore/kernels", [""]),
        ("torchrec_recstore", ["", "torchrec-cpu", "torchrec", "rocksdb", "redis", "service", "cli", "parquet"]),
        ("examples", ["", "torchrec-cpu", "torchrec", "redis", "cli", "examples"]),
        ("benchmarks", ["", "torchrec-cpu", "torchrec", "rocksdb", "redis", "service", "cli", "examples"]),
    ],
)
def test_what_is_imported_is_required(folder: str, extras: list[str]) -> None:
    known = {name.replace("-", "_").lower() for extra in extras for name in requirements()[extra]}
    own = {path.stem for each in {folder, "examples"} for path in (ROOT / each).rglob("*")} | {"torchrec_recstore"}
    distributions = packages_distributions()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for name in {each.partition(".")[0] for each in names} - own - sys.stdlib_module_names:
                candidates = {each.replace("-", "_").lower() for each in distributions.get(name, [name])}
                # Namespaces that several distributions share: one of them is enough.
                assert candidates & known, f"{path.relative_to(ROOT)} imports {name}"
