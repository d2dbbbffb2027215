"""Packages of the extras, which only some uses need."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires

from torchrec_recstore.doctor.finding import Finding
from torchrec_recstore.doctor.packages import Versions, installed

EXTRAS = {
    "cli": "progress and tables of this command",
    "examples": "recstore train",
    "service": "recstore serve, RecStoreClient",
    "rocksdb": "cold rows on a disk",
    "redis": "cold rows on a Redis or Valkey server",
}


def optional_packages(versions: Versions = installed) -> Iterator[Finding]:
    """Looks at each extra's packages.

    Args:
        versions: gives the version of a distribution, or None.
    """
    try:
        lines = requires("torchrec-recstore") or []
    except PackageNotFoundError:
        return  # a checkout on the path: nothing says what belongs to an extra
    for extra, use in EXTRAS.items():
        yield extra_packages(extra, use, requirements_of(extra, lines), versions)


def requirements_of(extra: str, lines: list[str]) -> dict[str, str]:
    """The distributions of an extra, each with the least or the only version that fits.

    Args:
        extra: its name.
        lines: as the distribution's metadata has them: ``redis>=8; extra == "redis"``.
    """
    found = {}
    for line in lines:
        requirement, _, marker = line.partition(";")
        if re.search(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]", marker):
            name, bound = re.fullmatch(r"\s*([\w.-]+)\s*(.*?)\s*", requirement).groups()  # type: ignore[union-attr]
            found[name] = bound.strip("()")
    return found


def extra_packages(extra: str, use: str, wanted: dict[str, str], versions: Versions) -> Finding:
    """One extra."""
    there = {name: versions(name) for name in wanted}
    missing = [name for name, number in there.items() if number is None]
    fix = f"pip install 'torchrec-recstore[{extra}]'"
    name = f"[{extra}]"
    if missing:
        return Finding(name, "ok", f"{use}: not installed ({', '.join(missing)})", fix)
    old = [f"{each} {there[each]}, wanted {bound}" for each, bound in wanted.items() if not fits(there[each], bound)]
    if old:
        return Finding(name, "warning", f"{use}: {'; '.join(old)}", f"{fix} --upgrade")
    server = f"; {shutil.which('redis-server') or 'no redis-server on this machine'}" if extra == "redis" else ""
    return Finding(name, "ok", f"{use}: {', '.join(f'{each} {number}' for each, number in there.items())}{server}")


def fits(number: str | None, bound: str) -> bool:
    """Whether a version is within ``>=1.2``, ``==1.2`` or no bound."""
    found = re.match(r"(>=|==)\s*([\d.]+)", bound)
    if number is None or found is None:
        return True
    has, wants = (
        tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])) for text in (number, found[2])
    )
    return has >= wants if found[1] == ">=" else has[: len(wants)] == wants
