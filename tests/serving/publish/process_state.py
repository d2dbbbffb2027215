"""The state of the process that a thread in the background must not change."""

from __future__ import annotations

import locale
import os
import signal
import socket
import sys
import threading
import warnings

import torch
from torch import nn
from torch.fx import _symbolic_trace


def process_state() -> dict[str, object]:
    """Returns what all threads of the process share, and the modes of the calling
    thread, by name.

    The state of torch's default generator is not in it, because training changes it:
    see ``Outcome.generator``.
    """
    return {
        "Module.__call__": nn.Module.__call__,
        "Module.__getattr__": nn.Module.__getattr__,
        "Module.__init__": nn.Module.__init__,
        "fx is tracing": _symbolic_trace._is_fx_tracing_flag,
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "profiling executor": torch._C._get_graph_executor_optimize(),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "signals": [
            signal.getsignal(number)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        ],
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "locale": locale.setlocale(locale.LC_ALL),
        "socket timeout": socket.getdefaulttimeout(),
        "switch interval": sys.getswitchinterval(),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "module path": list(sys.path),
        "niceness": os.getpriority(os.PRIO_PROCESS, threading.get_native_id()),
    }
