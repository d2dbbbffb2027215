"""Imports the installed packages in a separate process, and checks that they fit each
other.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version

from torchrec_recstore.doctor.machine import Finding
from torchrec_recstore.triples import (
    DEFAULT,
    Triple,
    for_torch,
    nearest_to_torch,
    release,
    torch_of_fbgemm,
)

# Each follows those that it needs.
MODULES = ("torch", "torchrec_recstore.ops", "fbgemm_gpu", "torchrec")
_TIMEOUT_S = 180

_CHILD = """
import importlib, json, logging, sys, warnings
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
for name in sys.argv[1:]:
    told = {"module": name, "error": None, "missing": None, "facts": {}}
    try:
        module = importlib.import_module(name)
        if name == "torch":
            told["facts"] = {"version": module.__version__, "cuda": module.version.cuda}
        if name == "torchrec_recstore.ops":
            kept = str(module.buffer_pool_bytes()[2])
            told["facts"] = {"instruction_set": module.instruction_set(), "kept_bytes": kept}
    except BaseException as error:
        cause = error.__cause__ or error
        told["error"] = f"{type(cause).__name__}: {cause}".splitlines()[0]
        told["missing"] = cause.name if isinstance(cause, ModuleNotFoundError) else None
    print("\\n" + json.dumps(told), flush=True)
"""

# The tested versions of the packages that are not in triples.py, as in requirements/.
TESTED = {
    "torchmetrics": "1.0.3",
    "tensordict": "0.15.3",
    "safetensors": "0.8.0",
    "xxhash": "4.1.0",
}
_LEAST_TORCH = (2, 11)  # the stable ABI that the native extension is built for

EXTRAS = {  # the use of each
    "cli": "progress and tables of this command",
    "examples": "recstore train",
    "service": "recstore serve, RecStoreClient",
    "serving": "recstore export, DeltaPublisher, Follower",
    "predict": "recstore follow",
    "rocksdb": "cold rows on a disk",
    "redis": "cold rows on a Redis or Valkey server",
}

_WITHOUT_TORCHREC = "not installed: Table and RecStoreClient work, TorchRec does not"

Versions = Callable[[str], str | None]


@dataclass(frozen=True)
class Imported:
    """The result of an import: its error in one line, the name of a module that was not
    found, facts by name.
    """

    error: str | None = None
    missing: str | None = None
    facts: dict[str, str] = field(default_factory=dict)


def probe(
    modules: Sequence[str], python: str = sys.executable, timeout_s: float = _TIMEOUT_S
) -> dict[str, Imported]:
    """Imports modules in separate processes, so that imports that crash or never return
    are reported too.

    Each module follows the modules that it needs. A process has ``timeout_s`` seconds
    for all its imports.
    """
    found: dict[str, Imported] = {}
    while left := [name for name in modules if name not in found]:
        command = [python, "-c", _CHILD, *left]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as child:
            try:
                out, ended = child.communicate(timeout=timeout_s)[0], ""
            except subprocess.TimeoutExpired:
                child.kill()
                out, ended = (
                    child.communicate()[0],
                    f"has not returned in {timeout_s:g} s",
                )
        for line in out.splitlines():
            if line.startswith('{"module"'):
                told = json.loads(line)
                found[told["module"]] = Imported(
                    told["error"], told["missing"], told["facts"]
                )
        crashed = next((name for name in left if name not in found), None)
        if crashed is not None:
            status = child.returncode
            how = signal.Signals(-status).name if status < 0 else f"status {status}"
            found[crashed] = Imported(
                error=f"its import {ended or f'ends the process with {how}'}"
            )
    return found


def installed(name: str) -> str | None:
    """Returns the version of a distribution, or None if the distribution is not
    installed.
    """
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def packages(
    imported: Mapping[str, Imported], versions: Versions = installed
) -> Iterator[Finding]:
    """Checks each package, from the result of importing each of :data:`MODULES`."""
    yield python(sys.version_info[:3], sys.executable)
    yield torch(imported["torch"], versions)
    yield extension(imported["torchrec_recstore.ops"], imported["torch"], versions)
    yield fbgemm(imported["fbgemm_gpu"], imported["torch"], versions)
    yield torchrec(
        imported["torchrec"], imported["fbgemm_gpu"], imported["torch"], versions
    )
    for name, need in (
        ("torchmetrics", "torchrec"),
        ("tensordict", "torchrec"),
        ("safetensors", ""),
        ("xxhash", ""),
    ):
        yield other(name, need, versions)


def python(number: tuple[int, ...], executable: str) -> Finding:
    """Python is version 3.10 or later."""
    found = f"{'.'.join(map(str, number))}, {executable}"
    if tuple(number) < (3, 10):
        return Finding("python", "problem", found, "install Python 3.10 or later")
    return Finding("python", "ok", found)


def torch(found: Imported, versions: Versions) -> Finding:
    """The version of torch is new enough, and torch can be imported."""
    number = _torch_version(found, versions)
    fix = f"pip install torch=={DEFAULT.torch}"
    if number is None:
        return Finding("torch", "problem", "not installed", fix)
    if found.error is not None:
        said = f"{number} cannot be imported: {found.error}"
        return Finding(
            "torch",
            "problem",
            said,
            f"pip install torch=={number.partition('+')[0]} --force-reinstall",
        )
    kind = f"CUDA {found.facts['cuda']}" if found.facts.get("cuda") else "CPU"
    if release(number) < _LEAST_TORCH:
        return Finding(
            "torch",
            "problem",
            f"{number} ({kind}), and the native extension needs 2.11 or later",
            fix,
        )
    return Finding("torch", "ok", f"{number} ({kind})")


def _torch_version(found: Imported, versions: Versions) -> str | None:
    return found.facts.get("version") or versions("torch")


def extension(found: Imported, of_torch: Imported, versions: Versions) -> Finding:
    """The native extension of torchrec_recstore can be loaded."""
    name, own = (
        "torchrec_recstore",
        versions("torchrec-recstore") or "not installed, found on the path",
    )
    if of_torch.error is not None:
        return Finding(
            name,
            "problem",
            f"{own}; its native extension needs torch",
            "fix torch first",
        )
    if found.error is not None:
        again = (
            "pip install --no-build-isolation --no-deps --force-reinstall"
            " torchrec-recstore"
        )
        fix = f"in a checkout: make build; otherwise: {again}"
        return Finding(
            name,
            "problem",
            f"{own}; its native extension does not load: {found.error}",
            fix,
        )
    return Finding(name, "ok", f"{own}, native extension loads")


def fbgemm(found: Imported, of_torch: Imported, versions: Versions) -> Finding:
    """FBGEMM, whose kernels TorchRec uses, is installed once and is built for the torch
    that is installed.
    """
    there = {
        name: number
        for name in ("fbgemm-gpu-cpu", "fbgemm-gpu")
        if (number := versions(name)) is not None
    }
    torch_number = _torch_version(of_torch, versions)
    triple = DEFAULT if torch_number is None else for_torch(torch_number)
    if triple is None:
        return _no_fbgemm(
            there, release(torch_number or ""), nearest_to_torch(torch_number or "")
        )
    name = next(iter(there), "fbgemm-gpu-cpu")
    fix = f"pip install {name}=={triple.fbgemm}"
    if not there:
        return Finding("fbgemm", "warning", _WITHOUT_TORCHREC, fix)
    said = ", ".join(f"{name} {number}" for name, number in there.items())
    if len(there) == 2:
        fix = f"pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && {fix}"
        return Finding("fbgemm", "problem", f"{said}: both write the same files", fix)
    said += " (CPU)" if name == "fbgemm-gpu-cpu" else " (CUDA)"
    if of_torch.error is not None:
        return Finding("fbgemm", "problem", f"{said} needs torch", "fix torch first")
    if misfit := _misfit(there[name], release(torch_number or "")):
        return Finding(
            "fbgemm", "problem", f"{said} {misfit}; {triple} fit each other", fix
        )
    if found.error is not None:
        on_cpu = (
            "pip uninstall -y fbgemm-gpu && pip install"
            f" fbgemm-gpu-cpu=={triple.fbgemm}"
        )
        fix = (
            f"{fix} --force-reinstall --no-deps" if name == "fbgemm-gpu-cpu" else on_cpu
        )
        return Finding(
            "fbgemm", "problem", f"{said} cannot be imported: {found.error}", fix
        )
    return Finding("fbgemm", "ok", said)


def _misfit(fbgemm_number: str, torch_release: tuple[int, int]) -> str:
    """Why this FBGEMM does not load with this torch; empty if it does."""
    major, minor = torch_of_fbgemm(fbgemm_number)
    said = (
        f"loads with torch {major}.{minor} only, and torch is"
        f" {torch_release[0]}.{torch_release[1]}"
    )
    return "" if (major, minor) == torch_release else said


def _no_fbgemm(
    there: Mapping[str, str], torch_release: tuple[int, int], nearest: Triple
) -> Finding:
    """FBGEMM beside a torch that belongs to none of the tested triples."""
    has = f"{torch_release[0]}.{torch_release[1]}"
    fix = f"to train with TorchRec: {nearest.install_on_cpu}"
    if not there:
        said = (
            f"no FBGEMM is known for torch {has}: Table and RecStoreClient work,"
            " TorchRec does not"
        )
        return Finding("fbgemm", "warning", said, fix)
    misfits = [
        f"{name} {number} {why}"
        for name, number in there.items()
        if (why := _misfit(number, torch_release))
    ]
    if misfits:
        return Finding("fbgemm", "problem", "; ".join(misfits), fix)
    said = " and ".join(f"{name} {number}" for name, number in there.items())
    return Finding(
        "fbgemm", "warning", f"{said}; no FBGEMM is tested with torch {has}", fix
    )


def torchrec(
    found: Imported, of_fbgemm: Imported, of_torch: Imported, versions: Versions
) -> Finding:
    """TorchRec is installed in the version that was tested with the torch that is
    installed.
    """
    number = versions("torchrec")
    triple = nearest_to_torch(_torch_version(of_torch, versions) or DEFAULT.torch)
    fix = f"pip install --no-deps torchrec=={triple.torchrec}"
    if number is None:
        return Finding("torchrec", "warning", _WITHOUT_TORCHREC, triple.install_on_cpu)
    if found.error is not None and of_fbgemm.error is not None:
        return Finding(
            "torchrec",
            "problem",
            f"{number} cannot be imported without fbgemm",
            "fix fbgemm first",
        )
    if found.error is not None:
        fix = fix if found.missing is None else triple.install_on_cpu
        return Finding(
            "torchrec", "problem", f"{number} cannot be imported: {found.error}", fix
        )
    if number != triple.torchrec:
        return Finding(
            "torchrec", "warning", f"{number}; {triple} are tested with each other", fix
        )
    return Finding("torchrec", "ok", number)


def other(name: str, need: str, versions: Versions) -> Finding:
    """A distribution that ``need`` (by default torchrec_recstore) requires is installed
    in the tested version.
    """
    number, tested = versions(name), TESTED[name]
    fix = f"pip install {name}=={tested}"
    if number is None and need and versions(need) is None:
        return Finding(name, "ok", f"not installed; only {need} needs it")
    if number is None:
        return Finding(
            name,
            "problem",
            f"not installed, {need or 'torchrec_recstore'} needs it",
            fix,
        )
    if need and number != tested:
        return Finding(
            name, "warning", f"{number}; {need} is tested with {tested}", fix
        )
    return Finding(name, "ok", number)


def optional_packages(versions: Versions = installed) -> Iterator[Finding]:
    """Checks the packages of each extra."""
    try:
        requires("torchrec-recstore")
    except PackageNotFoundError:
        return  # a checkout that is not installed has no metadata of extras
    for extra, use in EXTRAS.items():
        yield extra_packages(extra, use, wanted_by(extra, _requires), versions)


def _requires(distribution: str) -> list[str] | None:
    try:
        return requires(distribution)
    except PackageNotFoundError:
        return None


def wanted_by(
    extra: str, requires_of: Callable[[str], list[str] | None]
) -> dict[str, str]:
    """Returns the distributions of an extra with their version specifiers, and what
    those of ours among them need.
    """
    core = requires_of("torchrec-recstore") or []
    found = requirements_of(extra, core)
    for name in found.keys() & {
        "torchrec-recstore-service",
        "torchrec-recstore-serving",
    }:
        lines = requires_of(name) or []
        found |= requirements_of("", lines) | requirements_of(extra, lines)
    return {
        name: bound
        for name, bound in found.items()
        if name not in requirements_of("", core)
    }


def requirements_of(extra: str, lines: list[str]) -> dict[str, str]:
    """Returns the distributions of an extra with their version specifiers, from
    ``redis>=8; extra == "redis"``.

    The extra ``""`` is what is always needed.
    """
    found = {}
    for line in lines:
        requirement, _, marker = line.partition(";")
        if extra in re.findall(r"extra\s*==\s*['\"](.*?)['\"]", marker) or (
            not extra and not marker
        ):
            name, bound = re.fullmatch(
                r"\s*([\w.-]+)(?:\[.*?\])?\s*(.*?)\s*", requirement
            ).groups()  # type: ignore[union-attr]
            found[name] = bound.strip("()")
    return found


def extra_packages(
    extra: str, use: str, wanted: dict[str, str], versions: Versions
) -> Finding:
    """The packages of an extra are installed in versions that fit."""
    there = {name: versions(name) for name in wanted}
    missing = [name for name, number in there.items() if number is None]
    fix = f"pip install 'torchrec-recstore[{extra}]'"
    name = f"[{extra}]"
    if missing:
        return Finding(name, "ok", f"{use}: not installed ({', '.join(missing)})", fix)
    old = [
        f"{each} {there[each]}, wanted {bound}"
        for each, bound in wanted.items()
        if not fits(there[each], bound)
    ]
    if old:
        return Finding(name, "warning", f"{use}: {'; '.join(old)}", f"{fix} --upgrade")
    server = (
        f"; {shutil.which('redis-server') or 'no redis-server on this machine'}"
        if extra == "redis"
        else ""
    )
    return Finding(
        name,
        "ok",
        f"{use}:"
        f" {', '.join(f'{each} {number}' for each, number in there.items())}{server}",
    )


def fits(number: str | None, bound: str) -> bool:
    """Returns whether a version satisfies ``>=1.2``, ``==1.2`` or an empty specifier."""
    found = re.match(r"(>=|==)\s*([\d.]+)", bound)
    if number is None or found is None:
        return True
    parts = (re.findall(r"\d+", text.partition("+")[0]) for text in (number, found[2]))
    has, wants = (tuple(map(int, each)) for each in parts)
    return has >= wants if found[1] == ">=" else has[: len(wants)] == wants
