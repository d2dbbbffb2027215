"""The tables of a model whose rows are on servers, and the errors of functions that need rows in this process."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from torchrec_recstore.kernels import RemoteTable
from torchrec_recstore.modules.remote_table_module import RemoteTableModule


def remote_tables(model: nn.Module) -> Iterator[RemoteTable]:
    """Yields the tables of the eager modules of a model whose rows a client reads and updates."""
    for module in model.modules():
        if isinstance(module, RemoteTableModule):
            yield module.table


def refuse_remote_tables(model: nn.Module) -> None:
    """Raises an error if the rows of a table of the model are on servers.

    Raises:
        ValueError: There is such a table. The message names it, and says how its rows are saved.
    """
    for table in remote_tables(model):
        raise ValueError(
            f"table {table.name!r} is on servers, which own its rows: save the rows with client.save(name), and the "
            "other tensors of the model with torch.save(model.state_dict(), path)"
        )
