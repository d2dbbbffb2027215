"""The command ``recstore`` of a page, in processes that are forked from one that has
imported TorchRec: the import takes seconds for each command.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import traceback
import warnings
from pathlib import Path

CLIENT = """
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
words = [sys.argv[1:], os.getcwd(), dict(os.environ)]
socket.send_fds(server, [json.dumps(words).encode() + b"\\n"], [0, 1, 2])
sys.exit(int(server.makefile().readline()))
"""
"""The program that a shell starts: it passes on its words, folder, environment, and open
files, and ends with the status of the command.
"""


def start_commands(folder: Path) -> None:
    """Makes the command ``recstore`` in ``folder``.

    The process that serves it belongs to the process group of this one, and ends with
    it.
    """
    address = str(folder / "socket")
    client = folder / "client.py"
    client.write_text(CLIENT.format(address=address))
    command = folder / "recstore"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{client}" "$@"\n')
    command.chmod(0o755)
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen()
    if os.fork() == 0:
        _serve(server)
    server.close()


def _serve(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        # One process waits for the command, so that the next one can begin.
        if os.fork() == 0:
            server.close()
            _answer(connection)
        connection.close()


def _answer(connection: socket.socket) -> None:
    text, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while not text.endswith(b"\n"):
        text += connection.recv(1 << 16)
    words, directory, environment = json.loads(text)
    child = os.fork()
    if child == 0:
        connection.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        _run_command(words)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    connection.sendall(f"{status}\n".encode())
    os._exit(0)


def _run_command(words: list[str]) -> None:
    """Runs ``python -W ignore -m torchrec_recstore.cli WORDS``, and ends the process."""
    warnings.simplefilter("ignore")
    sys.argv = ["recstore", *words]
    status = 0
    try:
        runpy.run_module("torchrec_recstore.cli", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
