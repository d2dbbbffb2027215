"""Imports packages in a separate process, so that imports that crash or never return are reported too."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

MODULES = ("torch", "torchrec_recstore.ops", "fbgemm_gpu", "torchrec")
"""The modules to import. Each module follows the modules that it needs."""

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


@dataclass(frozen=True)
class Imported:
    """The result of an import.

    Args:
        error: The error in one line, or None if the import succeeded.
        missing: The name of the module that was not found, if that was the error.
        facts: Properties of the module, by name.
    """

    error: str | None = None
    missing: str | None = None
    facts: dict[str, str] = field(default_factory=dict)


def probe(modules: Sequence[str], python: str = sys.executable, timeout_s: float = _TIMEOUT_S) -> dict[str, Imported]:
    """Imports modules in separate processes and returns the results by module name.

    Args:
        modules: The names of the modules. Each module follows the modules that it needs.
        python: The path of the Python interpreter.
        timeout_s: The longest time in seconds that a process may take for all its imports. Default: 180.
    """
    found: dict[str, Imported] = {}
    while left := [name for name in modules if name not in found]:
        command = [python, "-c", _CHILD, *left]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            try:
                out, ended = child.communicate(timeout=timeout_s)[0], ""
            except subprocess.TimeoutExpired:
                child.kill()
                out, ended = child.communicate()[0], f"has not returned in {timeout_s:g} s"
        for line in out.splitlines():
            if line.startswith('{"module"'):
                told = json.loads(line)
                found[told["module"]] = Imported(told["error"], told["missing"], told["facts"])
        crashed = [name for name in left if name not in found]
        if crashed:
            if not ended:
                status = child.returncode
                ended = f"ends the process with {signal.Signals(-status).name if status < 0 else f'status {status}'}"
            found[crashed[0]] = Imported(error=f"its import {ended}")
    return found
