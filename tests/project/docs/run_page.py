"""Runs the blocks of a page one after the other, in one folder, and compares their
output with the page.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.packages import PYTHON_PATH
from tests.redis_server import free_port

from .page_commands import start_commands
from .pages import Block

TIMEOUT_S = 260


class Missing(Exception):
    """A page needs a program that is not installed on this machine.

    The message names the program.
    """


def run(
    blocks: Sequence[Block], folder: Path, before: str = "", after: str = ""
) -> None:
    """Runs blocks in ``folder/page``.

    Call it in a separate process: everything that the blocks start ends with it.

    Addresses on this machine are replaced by free addresses. Equal addresses of a page
    stay equal.

    Args:
        blocks: The blocks of Python and bash, in order.
        folder: The folder. It gets a file ``failed`` or ``skipped`` that states the
            reason.
        before: Python code that runs before the blocks and shares their names.
        after: Python code that runs after the blocks.
    """
    # Servers that the shell blocks start are in this process group, and end with it.
    os.setsid()
    sys.stdout.flush()
    commands = folder / "commands"
    for made in (folder / "page", commands):
        made.mkdir()
    os.chdir(folder / "page")
    torch.set_num_threads(1)
    start_commands(commands)
    path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    os.environ.update(
        OMP_NUM_THREADS="1", PATH=path, PYTHONPATH=PYTHON_PATH, PYTHONWARNINGS="ignore"
    )
    # The blocks run in __main__, as a script does, so that their classes can be
    # pickled.
    sys.modules["__main__"] = module = ModuleType("__main__")
    names = module.__dict__
    ports: dict[str, str] = {}
    try:
        exec(_with_own_ports(before, ports), names)
        for block in blocks:
            _run(block, _with_own_ports(block.text, ports), names)
        exec(after, names)
    except Missing as error:
        (folder / "skipped").write_text(str(error))
    except BaseException:
        (folder / "failed").write_text(traceback.format_exc())
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        # gloo's teardown aborts in some runs (torch 2.13), so it is left out
        os._exit(0)


def _with_own_ports(text: str, ports: dict[str, str]) -> str:
    return re.sub(
        r"127\.0\.0\.1:[1-9]\d*",
        lambda match: ports.setdefault(match[0], f"127.0.0.1:{free_port()}"),
        text,
    )


def _run(block: Block, text: str, names: dict[str, Any]) -> None:
    if block.kind == "bash":
        with tempfile.TemporaryFile("w+") as out:
            command = ["bash", "-euc", text]
            status = subprocess.run(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
                check=False,
            )
            out.seek(0)
            printed = out.read()
        assert status.returncode == 0, (
            f"the block of line {block.line} ends with {status.returncode}:\n{printed}"
        )
        _wait_for_servers(text)
        said = block.output
    else:
        printed = _python(block, text, names)
        said = block.output if block.output is not None else _comments(text)
    if said is not None and not matches(printed, said):
        raise AssertionError(
            f"the block of line {block.line} prints\n{printed}\nwhere the page"
            f" says\n{said}"
        )


def _wait_for_servers(text: str) -> None:
    """Waits until the servers that a block has started answer.

    On a loaded machine, clients would give up earlier.
    """
    for port in re.findall(
        r"recstore serve --listen 127\.0\.0\.1:(\d+).* &$", text, re.MULTILINE
    ):
        end = time.monotonic() + TIMEOUT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", int(port)), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < end, (
                    f"the server on port {port} has not started in {TIMEOUT_S} s"
                )
                time.sleep(0.1)


def _python(block: Block, text: str, names: dict[str, Any]) -> str:
    """Runs Python code.

    Returns everything that is printed to stdout, but not the log.
    """
    # Tracebacks and TorchScript read the code from this file.
    file = Path.cwd().parent / f"block_{block.line}.py"
    file.write_text(text)
    with ExitStack() as stack:
        out = stack.enter_context(tempfile.TemporaryFile("w+"))
        stdout = os.dup(1)
        stack.callback(os.close, stdout)
        sys.stdout.flush()
        os.dup2(out.fileno(), 1)
        try:
            exec(compile(text, str(file), "exec"), names)
        finally:
            sys.stdout.flush()
            os.dup2(stdout, 1)
        out.seek(0)
        return out.read()


def _comments(text: str) -> str:
    """Returns what the block says that it prints, behind a call of print or below it."""
    one_line = r"print\(.*\)(?:  |\n *)# (?P<short>.*)"
    argument = r"(?P=indent) .*\n"
    several_lines = (
        rf"^(?P<indent> *)print\(\n(?:{argument})+(?P=indent)\)\n *# (?P<long>.*)"
    )
    calls = re.finditer(f"{one_line}|{several_lines}", text, re.MULTILINE)
    return "".join(f"{call['short'] or call['long']}\n" for call in calls)


def matches(printed: str, said: str) -> bool:
    """Whether the lines are equal up to trailing blanks.

    A line ``...`` matches any number of lines.
    """
    lines = [re.escape(line.rstrip()) + r"\n" for line in said.rstrip("\n").split("\n")]
    pattern = "".join(
        r"(?:.*\n)*?" if line == r"\.\.\.\n" else line for line in lines if said.strip()
    )
    text = "".join(
        f"{line.rstrip()}\n"
        for line in printed.rstrip("\n").split("\n")
        if printed.strip()
    )
    return re.fullmatch(pattern, text) is not None
