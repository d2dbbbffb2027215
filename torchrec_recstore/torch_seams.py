"""The private names of torch that the package uses: what torch has no public way to do.

Each was checked on torch 2.13. ``make matrix`` runs their tests with each release of
:mod:`torchrec_recstore.triples`. ``fake_ops`` has the names of torch's ordered effects.

Tests: tests/kernels/test_table_group.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel

keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Returns whether the backward that is running keeps its graph for another one.

A tensor that is not saved with ``save_for_backward`` must be freed by its function when
autograd frees the saved ones, and only this function says when that is.
"""


def is_traced_by_dispatch() -> bool:
    """Returns whether a mode of ``__torch_dispatch__`` is active, as in ``make_fx``.

    ``torch.compiler.is_compiling`` knows ``torch.compile`` and ``torch.export`` only.
    """
    return torch._C._len_torch_dispatch_stack() > 0


def is_in_autograd_function() -> bool:
    """Returns whether the forward of an autograd function is running.

    The first forward of a reentrant checkpoint is one.

    Autograd disables grad there, as ``torch.no_grad`` does, and forward-mode grad too,
    which ``torch.no_grad`` leaves on. ``torch.inference_mode`` disables both. The
    public way to ask would be to compute a tangent in each evaluation.
    """
    return not (
        torch.is_grad_enabled()
        or torch._C._is_fwd_grad_enabled()
        or torch.is_inference_mode_enabled()
    )


def is_in_data_parallel() -> bool:
    """Returns whether the forward of a ``DistributedDataParallel`` module is running.

    A module inside is not told, and its parameters do not show it. Without the name,
    which torch may remove, the answer is False.
    """
    return getattr(DistributedDataParallel, "_active_ddp_module", None) is not None
