"""Interpreters that run programs to the end of an interpreter, without an import of
torch for each program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .packages import PYTHON_PATH

# The names of a program stay in the main module, so they are alive when the child ends
# as every interpreter does. Names of this loop are in a function's frame alone.
_LOOP = """
def _next_program():
    import json, os, sys
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setpgrp()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for stream, file in ((1, request["stdout"]), (2, request["stderr"])):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
            os.chdir(request["directory"])
            return compile(request["code"], "<program>", "exec")
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, flush=True)
    sys.exit()

exec(_next_program())
"""


class ForkingInterpreter:
    """An interpreter that runs the code ``begin`` once, and forks for each program.

    A program runs in the module ``__main__``, after ``begin``, and its process ends as
    that of a script does: with exit functions and the end of the interpreter. The
    processes of :mod:`tests.processes` end without them.
    """

    def __init__(self, begin: str, *flags: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", begin + _LOOP],
            env=os.environ | {"PYTHONPATH": PYTHON_PATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, code: str, directory: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program, in ``directory`` or else in that of the tests."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        output = Path(self._folder.name, "stdout")
        errors = Path(self._folder.name, "stderr")
        for file in (output, errors):
            file.unlink(missing_ok=True)
        request = {
            "code": code,
            "directory": str(directory or Path.cwd()),
            "stdout": str(output),
            "stderr": str(errors),
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        return subprocess.CompletedProcess(
            [], status, output.read_text(), errors.read_text()
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()
