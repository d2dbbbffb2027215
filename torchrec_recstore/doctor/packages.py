"""Packages that have to fit each other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from torchrec_recstore.doctor.finding import Finding
from torchrec_recstore.doctor.probe import Imported

TESTED = {
    "torch": "2.13.0",
    "torchrec": "1.8.0",
    "fbgemm-gpu-cpu": "1.8.0",
    "torchmetrics": "1.0.3",
    "tensordict": "0.15.3",
    "safetensors": "0.8.0",
    "xxhash": "4.1.0",
}
"""What requirements/ pins, and tests run with."""

_TORCH_OF_FBGEMM = {"1.8.0": (2, 13)}  # fbgemm's libraries load with one minor version of torch alone
_LEAST_TORCH = (2, 11)  # the stable ABI that the native extension is built for

Versions = Callable[[str], str | None]


def installed(name: str) -> str | None:
    """The version of a distribution, None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def packages(imported: Mapping[str, Imported], versions: Versions = installed) -> Iterator[Finding]:
    """Looks at each.

    Args:
        imported: of :data:`torchrec_recstore.doctor.probe.MODULES`.
        versions: gives the version of a distribution, or None.
    """
    yield python(sys.version_info[:3], sys.executable)
    yield torch(imported["torch"], versions)
    yield extension(imported["torchrec_recstore.ops"], imported["torch"], versions)
    yield fbgemm(imported["fbgemm_gpu"], imported["torch"], versions)
    yield torchrec(imported["torchrec"], imported["fbgemm_gpu"], versions)
    for name, need in (("torchmetrics", "torchrec"), ("tensordict", "torchrec"), ("safetensors", ""), ("xxhash", "")):
        yield other(name, need, versions)


def python(number: tuple[int, ...], executable: str) -> Finding:
    """3.10 or later."""
    found = f"{'.'.join(map(str, number))}, {executable}"
    if tuple(number) < (3, 10):
        return Finding("python", "problem", found, "install Python 3.10 or later")
    return Finding("python", "ok", found)


def torch(found: Imported, versions: Versions) -> Finding:
    """It is there, imports, and is new enough."""
    number = found.facts.get("version") or versions("torch")
    fix = f"pip install torch=={TESTED['torch']}"
    if number is None:
        return Finding("torch", "problem", "not installed", fix)
    if found.error is not None:
        return Finding("torch", "problem", f"{number} cannot be imported: {found.error}", f"{fix} --force-reinstall")
    kind = f"CUDA {found.facts['cuda']}" if found.facts.get("cuda") else "CPU"
    if release(number) < _LEAST_TORCH:
        return Finding("torch", "problem", f"{number} ({kind}), and the native extension needs 2.11 or later", fix)
    return Finding("torch", "ok", f"{number} ({kind})")


def extension(found: Imported, of_torch: Imported, versions: Versions) -> Finding:
    """The native store."""
    name, own = "torchrec_recstore", versions("torchrec-recstore") or "not installed, found on the path"
    if of_torch.error is not None:
        return Finding(name, "problem", f"{own}; its native extension needs torch", "mend torch first")
    if found.error is not None:
        fix = "make build in a checkout; else pip install --no-build-isolation --no-deps --force-reinstall ..."
        return Finding(name, "problem", f"{own}; its native extension does not load: {found.error}", fix)
    return Finding(name, "ok", f"{own}, native extension loads")


def fbgemm(found: Imported, of_torch: Imported, versions: Versions) -> Finding:
    """TorchRec's kernels: one build of them, for this torch."""
    builds = {name: versions(name) for name in ("fbgemm-gpu-cpu", "fbgemm-gpu")}
    there = {name: number for name, number in builds.items() if number is not None}
    fix = f"pip install fbgemm-gpu-cpu=={TESTED['fbgemm-gpu-cpu']}"
    if not there:
        return Finding("fbgemm", "warning", "not installed: Table alone works, TorchRec does not", fix)
    said = ", ".join(f"{name} {number}" for name, number in there.items())
    if len(there) == 2:
        fix = f"pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && {fix}"
        return Finding("fbgemm", "problem", f"{said}: both write the same files", fix)
    name, number = next(iter(there.items()))
    said += " (CPU)" if name == "fbgemm-gpu-cpu" else " (CUDA)"
    if of_torch.error is not None:
        return Finding("fbgemm", "problem", f"{said} needs torch", "mend torch first")
    wanted = _TORCH_OF_FBGEMM.get(number)
    has = release(of_torch.facts["version"])
    if wanted is not None and has != wanted:
        why = f"{said} loads with torch {wanted[0]}.{wanted[1]} alone, and torch is {has[0]}.{has[1]}"
        return Finding("fbgemm", "problem", why, f"pip install torch=={TESTED['torch']}")
    if found.error is not None:
        fix += " --force-reinstall --no-deps" if name == "fbgemm-gpu-cpu" else " after pip uninstall -y fbgemm-gpu"
        return Finding("fbgemm", "problem", f"{said} cannot be imported: {found.error}", fix)
    return Finding("fbgemm", "ok", said)


def torchrec(found: Imported, of_fbgemm: Imported, versions: Versions) -> Finding:
    """The version whose seams the sharders hold on to."""
    number = versions("torchrec")
    fix = f"pip install --no-deps torchrec=={TESTED['torchrec']}"
    if number is None:
        found_so = "not installed: Table alone works, sharders do not"
        return Finding("torchrec", "warning", found_so, f"pip install 'torchrec-recstore[torchrec-cpu]' && {fix}")
    if found.error is not None:
        if of_fbgemm.error is not None:
            return Finding("torchrec", "problem", f"{number} cannot be imported without fbgemm", "mend fbgemm first")
        if found.missing is not None:
            fix = "pip install 'torchrec-recstore[torchrec-cpu]'"
        return Finding("torchrec", "problem", f"{number} cannot be imported: {found.error}", fix)
    if number != TESTED["torchrec"]:
        return Finding("torchrec", "warning", f"{number}; tested with {TESTED['torchrec']}", fix)
    return Finding("torchrec", "ok", number)


def other(name: str, need: str, versions: Versions) -> Finding:
    """One that has to be there.

    Args:
        name: of the distribution.
        need: whose requirement it is; without that it need not be there. Empty: ours.
        versions: gives the version of a distribution, or None.
    """
    number, tested = versions(name), TESTED[name]
    fix = f"pip install {name}=={tested}"
    if number is None:
        if need and versions(need) is None:
            return Finding(name, "ok", f"not installed; {need} alone needs it")
        return Finding(name, "problem", f"not installed, {need or 'torchrec_recstore'} needs it", fix)
    if need and number != tested:
        return Finding(name, "warning", f"{number}; {need} {TESTED[need]} is tested with {tested}", fix)
    return Finding(name, "ok", number)


def release(number: str) -> tuple[int, ...]:
    """Major and minor of a version: (2, 13) of ``2.13.0+cpu``."""
    parts = number.partition("+")[0].split(".")[:2]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)
