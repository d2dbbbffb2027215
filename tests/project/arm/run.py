"""Tries the wheel for aarch64 under an emulator: the README's program, and a checkpoint
that goes there and back.

    python -m tests.project.arm.run [--directory DIR]    # make test-arm-python

The folder gets QEMU 10 of Debian's backports (that of Debian 12 crashes when torch is
imported), Debian's Python for aarch64, and the wheels of torch, FBGEMM and TorchRec.
torch's wheel for aarch64 is the one with CUDA, so that libraries without devices take
the place of CUDA's. What is there already is not fetched again. Needs a Debian 12 on
x86-64 with g++-aarch64-linux-gnu, and takes about a quarter of an hour.
"""

from __future__ import annotations

import argparse
import filecmp
import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

from tests.packages import ROOT
from tests.project.matrix.run import default_directory

MIRROR = "http://deb.debian.org/debian"
PROGRAMS = {"qemu": ("bookworm-backports", "amd64", ["qemu-user"])}
PROGRAMS["python"] = (
    "bookworm",
    "arm64",
    ["python3.11-minimal", "libpython3.11-stdlib", "libgomp1", "libstdc++6"],
)
TRAINING = Path(__file__).with_name("training.py")


def run(*command: str | Path) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(
        [*map(str, command)], stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT
    )
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(map(str, command))}\nended with status"
            f" {done.returncode}\n{done.stdout}"
        )
    return done.stdout


def unpack(target: Path, suite: str, architecture: str, packages: list[str]) -> None:
    """Unpacks Debian packages with all that they need into a folder.

    Nothing of this system is changed.
    """
    apt, root = target / "apt", target / "root"
    for folder in (
        apt / "state/lists/partial",
        apt / "cache/archives/partial",
        apt / "etc/preferences.d",
        root / "usr/lib",
    ):
        folder.mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (apt / "etc/sources.list").write_text(
        f"deb [signed-by={keys}] {MIRROR} {suite} main\n"
    )
    settings = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "Dir::State": apt / "state",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
        "Dir::Etc": apt / "etc",
        "Dir::Etc::sourceparts": "/dev/null",
        "APT::Sandbox::User": "root",
        "Debug::NoLocking": "1",
    }
    options = [f"-o{name}={value}" for name, value in settings.items()]
    run("apt-get", *options, "-qq", "update")
    run(
        "apt-get",
        *options,
        "-qq",
        "-y",
        "--no-install-recommends",
        "--download-only",
        "install",
        *packages,
    )
    if not (root / "lib").exists():
        (root / "lib").symlink_to("usr/lib")
    for package in sorted((apt / "cache/archives").glob("*.deb")):
        run("dpkg-deb", "-x", package, root)


def requirements() -> list[str]:
    """The distributions that the package and TorchRec need on a CPU, at the versions of
    this environment.
    """
    found: dict[str, str] = {}
    waiting = [Requirement("torchrec-recstore[torchrec-cpu]"), Requirement("torchrec")]
    while waiting:
        wanted = waiting.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        if name in found or re.match(
            r"nvidia-|cuda-|triton$|fbgemm-gpu(-nightly)?(-|$)(?!cpu)", name
        ):
            continue
        have = distribution(name)
        found[name] = f"{name}=={have.version.partition('+')[0]}"
        for each in map(Requirement, have.requires or []):
            if each.marker is None or any(
                each.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)
            ):
                waiting.append(each)
    del found["torchrec-recstore"]
    return sorted(found.values())


def libraries_without_cuda(site: Path, target: Path) -> None:
    """Makes the libraries of CUDA that torch's libraries need.

    Their functions return 100, cudaErrorNoDevice.
    """
    target.mkdir(exist_ok=True)
    libraries = [*site.glob("torch/lib/*.so*")]
    needed = {
        name
        for each in libraries
        for name in re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", each))
    }
    symbols = {
        (version, name)
        for each in libraries
        for name, version in re.findall(
            r"UND (\w+)@?(lib\S+)?", run("readelf", "--wide", "--dyn-syms", each)
        )
        if version in needed or re.match(r"cu|nccl|nv", name)
    }
    for library in sorted(needed - {each.name for each in libraries}):
        if not re.match(r"lib(cu|nv|nccl)", library):
            continue
        version = library if any(library == version for version, _ in symbols) else ""
        source, script = target / f"{library}.c", target / f"{library}.map"
        functions = sorted(name for of, name in symbols if of == version)
        source.write_text(
            "".join(f"long {name}(void) {{ return 100; }}\n" for name in functions)
        )
        script.write_text(f"{library} {{ global: *; }};\n")
        options = ["-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{library}"]
        options += [f"-Wl,--version-script={script}"] if version else []
        run("aarch64-linux-gnu-gcc", *options, source, "-o", target / library)


def install(folder: Path) -> list[str]:
    """Installs what is missing. Returns the command that runs the emulated Python."""
    programs = {name: folder / name / "root" for name in PROGRAMS}
    for name, (suite, architecture, packages) in PROGRAMS.items():
        if not programs[name].exists():
            unpack(folder / name, suite, architecture, packages)
    site, cuda = folder / "site", folder / "cuda"
    if not site.exists():
        platforms = [
            f"--platform=manylinux_{glibc}_aarch64"
            for glibc in ("2_28", "2_27", "2_17", "2014")
        ]
        options = [
            "--no-deps",
            "--python-version=3.11",
            *platforms,
            "--platform=any",
            f"--target={site}",
        ]
        run(sys.executable, "-m", "pip", "install", "-q", *options, *requirements())
        libraries_without_cuda(site, cuda)
    wheels = folder / "wheels"
    run("rm", "-rf", wheels)
    run(
        sys.executable,
        ROOT / "packaging" / "build_wheels.py",
        "--arch=aarch64",
        "--project=.",
        f"--out={wheels}",
    )
    (wheel,) = wheels.glob("*.whl")
    run(sys.executable, "-m", "zipfile", "-e", wheel, site)
    variables = {"PYTHONPATH": site, "LD_LIBRARY_PATH": cuda, "OMP_NUM_THREADS": 2}
    given = [
        part for name, value in variables.items() for part in ("-E", f"{name}={value}")
    ]
    root = programs["python"]
    return [
        str(programs["qemu"] / "usr/bin/qemu-aarch64"),
        "-L",
        str(root),
        *given,
        str(root / "usr/bin/python3.11"),
    ]


def main() -> None:
    """Tries the wheel, and prints what works."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--directory", type=Path, default=default_directory().with_name("arm")
    )
    folder = parser.parse_args().directory.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    arm = install(folder)
    program = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert program is not None
    assert run(*arm, "-P", "-W", "ignore", "-c", program[1]).split()[-1] == "3"
    print("the README's program: three rows", flush=True)
    here = [sys.executable]
    for name, steps in {
        "here": [(here, 9)],
        "both": [(here, 3), (arm, 3), (here, 3)],
        "there": [(arm, 9)],
    }.items():
        source = "-"
        for number, (python, count) in enumerate(steps):
            target = folder / f"{name}-{number}"
            run("rm", "-rf", target)
            run(*python, "-W", "ignore", TRAINING, source, target, str(count))
            source = str(target)
    for other in ("both-2", "there-0"):
        files = sorted(path.name for path in (folder / "here-0").iterdir())
        same, _, _ = filecmp.cmpfiles(
            folder / "here-0", folder / other, files, shallow=False
        )
        assert sorted(same) == files, f"{other} differs in {set(files) - set(same)}"
        print(
            f"{other}: {len(files)} files of the checkpoint are equal to those of"
            " x86-64",
            flush=True,
        )


if __name__ == "__main__":
    main()
