"""Imports the installed packages in other processes, and checks their versions."""

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
from torchrec_recstore.installing import install
from torchrec_recstore.triples import (
    DEFAULT,
    Triple,
    for_torch,
    nearest_to_torch,
    release,
    torch_of_fbgemm,
)

# Each module follows those that it needs.
MODULES = ("torch", "torchrec_recstore.ops", "fbgemm_gpu", "torchrec")
_TIMEOUT_S = 180

_CHILD = """
import importlib, json, logging, sys, warnings
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
for name in sys.argv[1:]:
    report = {"module": name, "error": None, "missing": None, "facts": {}}
    try:
        module = importlib.import_module(name)
        if name == "torch":
            report["facts"] = {"version": module.__version__, "cuda": module.version.cuda}
        if name == "torchrec_recstore.ops":
            kept_bytes = str(module.buffer_pool_bytes()[2])
            isa = module.instruction_set()
            report["facts"] = {"instruction_set": isa, "kept_bytes": kept_bytes}
    except BaseException as error:
        cause = error.__cause__ or error
        report["error"] = f"{type(cause).__name__}: {cause}".splitlines()[0]
        report["missing"] = cause.name if isinstance(cause, ModuleNotFoundError) else None
    print("\\n" + json.dumps(report), flush=True)
"""

# The tested versions of the packages that are not in triples.py, as in requirements/.
TESTED = {
    "torchmetrics": "1.0.3",
    "tensordict": "0.15.3",
    "safetensors": "0.8.0",
    "xxhash": "4.1.0",
}
_LEAST_TORCH = (2, 11)  # the stable ABI that the native extension is built for

EXTRAS = {  # and what each of them is used for
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
    """The result of an import: its error in one line, the module that it missed, facts."""

    error: str | None = None
    missing: str | None = None
    facts: dict[str, str] = field(default_factory=dict)


def probe(
    modules: Sequence[str],
    python: str = sys.executable,
    timeout_s: float = _TIMEOUT_S,
) -> dict[str, Imported]:
    """Imports modules in separate processes, so that imports that crash or never return
    are reported too.

    Each module follows the modules that it needs. A process has ``timeout_s`` seconds
    for all its imports.
    """
    results: dict[str, Imported] = {}
    while len(results) < len(modules):
        remaining = [name for name in modules if name not in results]
        output, failure = _output_of_imports(remaining, python, timeout_s)
        for line in output.splitlines():
            if line.startswith('{"module"'):
                report = json.loads(line)
                results[report["module"]] = Imported(
                    report["error"],
                    report["missing"],
                    report["facts"],
                )
        unreported = [name for name in remaining if name not in results]
        if unreported:
            # The process has ended in the first import that it did not report.
            results[unreported[0]] = Imported(error=f"its import {failure}")
    return results


def _output_of_imports(
    modules: Sequence[str],
    python: str,
    timeout_s: float,
) -> tuple[str, str]:
    """Imports modules in a process, and returns what it has printed, and how it ended
    if it did not import all of them.
    """
    with subprocess.Popen(
        [python, "-c", _CHILD, *modules],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        try:
            output = child.communicate(timeout=timeout_s)[0]
        except subprocess.TimeoutExpired:
            child.kill()
            output = child.communicate()[0]
            return output, f"has not returned in {timeout_s:g} s"
    status = child.returncode
    if status < 0:
        return output, f"ends the process with {signal.Signals(-status).name}"
    return output, f"ends the process with status {status}"


def installed(name: str) -> str | None:
    """Returns the version of a distribution, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def packages(
    imported: Mapping[str, Imported],
    versions: Versions = installed,
) -> Iterator[Finding]:
    """Checks each package, from the result of importing each of :data:`MODULES`."""
    yield python(sys.version_info[:3], sys.executable)
    yield torch(imported["torch"], versions)
    yield extension(
        imported["torchrec_recstore.ops"],
        imported["torch"],
        versions,
    )
    yield fbgemm(imported["fbgemm_gpu"], imported["torch"], versions)
    yield torchrec(
        imported["torchrec"],
        imported["fbgemm_gpu"],
        imported["torch"],
        versions,
    )
    yield dependency("torchmetrics", "torchrec", versions)
    yield dependency("tensordict", "torchrec", versions)
    yield dependency("safetensors", "", versions)
    yield dependency("xxhash", "", versions)


def python(number: tuple[int, ...], executable: str) -> Finding:
    """Python is version 3.10 or later."""
    description = f"{'.'.join(map(str, number))}, {executable}"
    if tuple(number) < (3, 10):
        return Finding("python", "problem", description, "install Python 3.10 or later")
    return Finding("python", "ok", description)


def torch(imported: Imported, versions: Versions) -> Finding:
    """The version of torch is new enough, and torch can be imported."""
    number = _torch_version(imported, versions)
    fix = f"pip install torch=={DEFAULT.torch}"
    if number is None:
        return Finding("torch", "problem", "not installed", fix)
    if imported.error is not None:
        description = f"{number} cannot be imported: {imported.error}"
        fix = f"pip install torch=={number.partition('+')[0]} --force-reinstall"
        return Finding("torch", "problem", description, fix)
    cuda = imported.facts.get("cuda")
    description = f"{number} ({f'CUDA {cuda}' if cuda else 'CPU'})"
    if release(number) < _LEAST_TORCH:
        description += ", and the native extension needs 2.11 or later"
        return Finding("torch", "problem", description, fix)
    return Finding("torch", "ok", description)


def _torch_version(imported: Imported, versions: Versions) -> str | None:
    return imported.facts.get("version") or versions("torch")


def extension(
    imported: Imported,
    of_torch: Imported,
    versions: Versions,
) -> Finding:
    """The native extension of torchrec_recstore can be loaded."""
    name = "torchrec_recstore"
    number = versions("torchrec-recstore") or "not installed, found on the path"
    if of_torch.error is not None:
        description = f"{number}; its native extension needs torch"
        return Finding(name, "problem", description, "fix torch first")
    if imported.error is not None:
        description = f"{number}; its native extension does not load: {imported.error}"
        flags = "--no-build-isolation --no-deps --force-reinstall"
        fix = f"in a checkout: make build; otherwise: {install(flags=flags)}"
        return Finding(name, "problem", description, fix)
    return Finding(name, "ok", f"{number}, native extension loads")


def fbgemm(
    imported: Imported,
    of_torch: Imported,
    versions: Versions,
) -> Finding:
    """FBGEMM, whose kernels TorchRec uses, is installed once and built for this torch."""
    installed_numbers = {}
    for name in ("fbgemm-gpu-cpu", "fbgemm-gpu"):
        number = versions(name)
        if number is not None:
            installed_numbers[name] = number
    torch_number = _torch_version(of_torch, versions)
    triple = DEFAULT if torch_number is None else for_torch(torch_number)
    if triple is None:
        return _no_fbgemm(
            installed_numbers,
            release(torch_number or ""),
            nearest_to_torch(torch_number or ""),
        )
    name = next(iter(installed_numbers), "fbgemm-gpu-cpu")
    fix = f"pip install {name}=={triple.fbgemm}"
    if not installed_numbers:
        return Finding("fbgemm", "warning", _WITHOUT_TORCHREC, fix)
    description = ", ".join(
        f"{name} {number}" for name, number in installed_numbers.items()
    )
    if len(installed_numbers) == 2:
        description += ": both write the same files"
        fix = f"pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && {fix}"
        return Finding("fbgemm", "problem", description, fix)
    description += " (CPU)" if name == "fbgemm-gpu-cpu" else " (CUDA)"
    if of_torch.error is not None:
        description += " needs torch"
        return Finding("fbgemm", "problem", description, "fix torch first")
    misfit = _misfit(installed_numbers[name], release(torch_number or ""))
    if misfit:
        description += f" {misfit}; {triple} fit each other"
        return Finding("fbgemm", "problem", description, fix)
    if imported.error is not None:
        description += f" cannot be imported: {imported.error}"
        if name == "fbgemm-gpu-cpu":
            fix += " --force-reinstall --no-deps"
        else:
            fix = (
                "pip uninstall -y fbgemm-gpu && pip install"
                f" fbgemm-gpu-cpu=={triple.fbgemm}"
            )
        return Finding("fbgemm", "problem", description, fix)
    return Finding("fbgemm", "ok", description)


def _misfit(fbgemm_number: str, torch_release: tuple[int, int]) -> str:
    """Returns why this FBGEMM does not load with this torch; empty if it does."""
    major, minor = torch_of_fbgemm(fbgemm_number)
    if (major, minor) == torch_release:
        return ""
    return (
        f"loads with torch {major}.{minor} only, and torch is"
        f" {torch_release[0]}.{torch_release[1]}"
    )


def _no_fbgemm(
    installed_numbers: Mapping[str, str],
    torch_release: tuple[int, int],
    nearest: Triple,
) -> Finding:
    """FBGEMM beside a torch that belongs to none of the tested triples."""
    torch_number = f"{torch_release[0]}.{torch_release[1]}"
    fix = f"to train with TorchRec: {nearest.install_on_cpu}"
    if not installed_numbers:
        description = (
            f"no FBGEMM is known for torch {torch_number}: Table and RecStoreClient"
            " work, TorchRec does not"
        )
        return Finding("fbgemm", "warning", description, fix)
    misfits = []
    for name, number in installed_numbers.items():
        misfit = _misfit(number, torch_release)
        if misfit:
            misfits.append(f"{name} {number} {misfit}")
    if misfits:
        return Finding(
            "fbgemm",
            "problem",
            "; ".join(misfits),
            fix,
        )
    names = " and ".join(
        f"{name} {number}" for name, number in installed_numbers.items()
    )
    description = f"{names}; no FBGEMM is tested with torch {torch_number}"
    return Finding("fbgemm", "warning", description, fix)


def torchrec(
    imported: Imported,
    of_fbgemm: Imported,
    of_torch: Imported,
    versions: Versions,
) -> Finding:
    """TorchRec is installed in the version that was tested with this torch."""
    number = versions("torchrec")
    triple = nearest_to_torch(_torch_version(of_torch, versions) or DEFAULT.torch)
    fix = f"pip install --no-deps torchrec=={triple.torchrec}"
    if number is None:
        return Finding("torchrec", "warning", _WITHOUT_TORCHREC, triple.install_on_cpu)
    if imported.error is not None and of_fbgemm.error is not None:
        description = f"{number} cannot be imported without fbgemm"
        return Finding("torchrec", "problem", description, "fix fbgemm first")
    if imported.error is not None:
        description = f"{number} cannot be imported: {imported.error}"
        if imported.missing is not None:
            fix = triple.install_on_cpu
        return Finding("torchrec", "problem", description, fix)
    if number != triple.torchrec:
        description = f"{number}; {triple} are tested with each other"
        return Finding("torchrec", "warning", description, fix)
    return Finding("torchrec", "ok", number)


def dependency(
    name: str,
    dependent: str,
    versions: Versions,
) -> Finding:
    """A distribution is installed in the tested version.

    The distribution ``dependent`` requires it, or torchrec_recstore if that is empty.
    """
    number = versions(name)
    tested = TESTED[name]
    fix = f"pip install {name}=={tested}"
    if number is None and dependent and versions(dependent) is None:
        return Finding(name, "ok", f"not installed; only {dependent} needs it")
    if number is None:
        description = f"not installed, {dependent or 'torchrec_recstore'} needs it"
        return Finding(name, "problem", description, fix)
    if dependent and number != tested:
        description = f"{number}; {dependent} is tested with {tested}"
        return Finding(name, "warning", description, fix)
    return Finding(name, "ok", number)


def optional_packages(versions: Versions = installed) -> Iterator[Finding]:
    """Checks the packages of each extra."""
    try:
        requires("torchrec-recstore")
    except PackageNotFoundError:
        return  # a checkout that is not installed has no metadata of extras
    for extra, use in EXTRAS.items():
        yield extra_packages(
            extra,
            use,
            bounds_of_extra(extra, _requires),
            versions,
        )


def _requires(distribution: str) -> list[str] | None:
    try:
        return requires(distribution)
    except PackageNotFoundError:
        return None


def bounds_of_extra(
    extra: str,
    requires_of: Callable[[str], list[str] | None],
) -> dict[str, str]:
    """Returns the distributions of an extra with their version specifiers, and what
    those of ours among them need.
    """
    core_lines = requires_of("torchrec-recstore") or []
    bounds = requirements_of(extra, core_lines)
    for name in ("torchrec-recstore-service", "torchrec-recstore-serving"):
        if name in bounds:
            lines = requires_of(name) or []
            bounds |= requirements_of("", lines)
            bounds |= requirements_of(extra, lines)
    always_needed = requirements_of("", core_lines)
    return {name: bound for name, bound in bounds.items() if name not in always_needed}


def requirements_of(extra: str, lines: list[str]) -> dict[str, str]:
    """Returns the distributions of an extra with their version specifiers, from
    ``redis>=8; extra == "redis"``.

    The extra ``""`` is what is always needed.
    """
    bounds = {}
    for line in lines:
        requirement, _, marker = line.partition(";")
        extras = re.findall(r"extra\s*==\s*['\"](.*?)['\"]", marker)
        if extra in extras or (not extra and not marker):
            match = re.fullmatch(r"\s*([\w.-]+)(?:\[.*?\])?\s*(.*?)\s*", requirement)
            assert match is not None
            bounds[match[1]] = match[2].strip("()")
    return bounds


def extra_packages(
    extra: str,
    use: str,
    bounds: dict[str, str],
    versions: Versions,
) -> Finding:
    """The packages of an extra are installed in versions that fit."""
    numbers = {name: versions(name) for name in bounds}
    missing = [name for name, number in numbers.items() if number is None]
    fix = install(extra)
    title = f"[{extra}]"
    if missing:
        description = f"{use}: not installed ({', '.join(missing)})"
        return Finding(title, "ok", description, fix)
    misfits = [
        f"{name} {numbers[name]}, wanted {bound}"
        for name, bound in bounds.items()
        if not fits(numbers[name], bound)
    ]
    if misfits:
        description = f"{use}: {'; '.join(misfits)}"
        return Finding(
            title,
            "warning",
            description,
            f"{fix} --upgrade",
        )
    installed_packages = ", ".join(
        f"{name} {number}" for name, number in numbers.items()
    )
    description = f"{use}: {installed_packages}"
    if extra == "redis":
        server = shutil.which("redis-server") or "no redis-server on this machine"
        description += f"; {server}"
    return Finding(title, "ok", description)


def fits(number: str | None, bound: str) -> bool:
    """Returns whether a version satisfies ``>=1.2``, ``==1.2`` or an empty specifier."""
    specifier = re.match(r"(>=|==)\s*([\d.]+)", bound)
    if number is None or specifier is None:
        return True
    version_parts = _parts_of_version(number)
    bound_parts = _parts_of_version(specifier[2])
    if specifier[1] == ">=":
        return version_parts >= bound_parts
    return version_parts[: len(bound_parts)] == bound_parts


def _parts_of_version(number: str) -> tuple[int, ...]:
    """Returns (2, 13, 0) of ``2.13.0+cpu``."""
    public, _, _ = number.partition("+")
    return tuple(int(part) for part in re.findall(r"\d+", public))
