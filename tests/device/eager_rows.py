"""Programs of modules without sharding whose tables have rows on the device.

The tests of the programs are in test_eager_rows.py. The same program runs on the CPU,
which ignores ``device_rows``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)

from tests.device import streams
from tests.device.device_rows import as_on_cpu
from tests.device.scenarios import DIM, Found, batches, host, outputs
from torchrec_recstore import (
    LRU,
    Adagrad,
    RecStoreEmbedding,
    RecStoreEmbeddingBag,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    TableOptions,
)

STEPS = 12
FEW = TableOptions(device_rows=14, max_rows=50, eviction=LRU())
"""Some batches need more rows of a table on the device."""
MANY = TableOptions(device_rows=60)
NAMES = {"t_user": ["u"], "t_item": ["i", "j"], "t_side": ["j"]}
OPTIONS = {"t_user": FEW, "t_item": MANY, "t_side": TableOptions()}
"""The last table stays on the host."""


def bags(weighted: bool = False, **arguments: Any) -> RecStoreEmbeddingBagCollection:
    """Two tables with sums, and two with means."""
    tables = []
    for name, features in {**NAMES, "t_mean": ["u", "i"]}.items():
        mean = name in ("t_side", "t_mean")
        config = EmbeddingBagConfig(
            name=name,
            embedding_dim=DIM,
            num_embeddings=2**40,
            feature_names=features,
            pooling=PoolingType.MEAN if mean else PoolingType.SUM,
        )
        tables.append(config)
    return RecStoreEmbeddingBagCollection(
        tables,
        optimizer=Adagrad(lr=0.1),
        options={**OPTIONS, "t_mean": MANY},
        is_weighted=weighted,
        **arguments,
    )


def sequences(**arguments: Any) -> RecStoreEmbeddingCollection:
    tables = []
    for name, features in NAMES.items():
        config = EmbeddingConfig(
            name=name,
            embedding_dim=DIM,
            num_embeddings=2**40,
            feature_names=features,
        )
        tables.append(config)
    return RecStoreEmbeddingCollection(
        tables, optimizer=Adagrad(lr=0.1), options=OPTIONS, **arguments
    )


def tables_of(model: nn.Module) -> dict[str, Any]:
    modules = model.embedding_bags if hasattr(model, "embedding_bags") else None
    modules = model.embeddings if modules is None else modules
    return {name: module.table for name, module in modules.items()}  # type: ignore[operator,union-attr]


def step(model: nn.Module, features: KeyedJaggedTensor) -> list[Tensor]:
    """Trains with a batch and returns the outputs."""
    out = outputs(model(features))
    torch.stack([(part * part).sum() for part in out]).sum().backward()  # type: ignore[no-untyped-call]
    return [host(part) for part in out]


def found_in(model: nn.Module) -> Found:
    """The rows, the statistics and the state of a module."""
    found: Found = {}
    for name, table in tables_of(model).items():
        found[name] = [table.lookup(table.ids()), as_on_cpu(table.stats())]
    return {**found, "state": host(dict(model.state_dict()))}


def trained(model: nn.Module, device: torch.device) -> Found:
    """Trains a module, and evaluates, moves, copies and loads it meanwhile."""
    seen = []
    for number, features in enumerate(batches(STEPS, device)):
        if number % 3 == 1:
            model.prefetch(features)  # type: ignore[operator]
        seen.append(step(model, features))
        if number == 4:
            model.float()
            model.to("cpu")
        if number == 6:
            seen.append(step(copy.deepcopy(model), features))
        if number % 4 == 2:
            model.eval()
            seen.append([host(part) for part in outputs(model(features))])
            model.train()
        if number == 8:
            model.load_state_dict(model.state_dict())
        if number == 9:
            # TorchRec keeps the parts of a batch when it copies the batch.
            on_cpu = list(batches(STEPS, torch.device("cpu")))[number]
            seen.append(step(model, on_cpu))
    return {"out": seen, **found_in(model)}


def varying(device: torch.device) -> Iterator[KeyedJaggedTensor]:
    """Batches whose features have different numbers of bags, with trained weights."""
    bags_of_features = [3, 5, 2]
    lengths = torch.tensor([2, 0, 1, 3, 1, 0, 2, 1, 1, 2])
    count = int(lengths.sum())
    inverse = torch.stack([torch.arange(6) % bags for bags in bags_of_features])
    for number in range(STEPS):
        weights = torch.linspace(0.5, 2.0, count).to(device)
        yield KeyedJaggedTensor(
            ["u", "i", "j"],
            values=((torch.arange(count) * 31 + number) % 40).to(device),
            lengths=lengths.to(device),
            weights=weights.requires_grad_(),
            stride_per_key_per_rank=[[bags] for bags in bags_of_features],
            inverse_indices=(["u", "i", "j"], inverse.to(device)),
        )


def weighted(device: torch.device) -> Found:
    model = bags(weighted=True)
    seen = []
    gradients = []
    for features in varying(device):
        seen.append(step(model, features))
        gradients.append(host(features.weights().grad))
    return {"out": seen, "gradients": gradients, **found_in(model)}


def unfused(device: torch.device) -> Found:
    """Modules that look up each table by a call of its own, of which one is not
    trained for some steps.
    """
    model = bags(enable_fusion=False)
    seen = []
    for number, features in enumerate(batches(STEPS, device)):
        trains = number % 5 != 3
        model.embedding_bags["t_item"].weight.requires_grad_(trains)
        seen.append(step(model, features))
    return {"out": seen, **found_in(model)}


def drop_ins(device: torch.device) -> Found:
    """The replacements of torch's modules."""
    ids = torch.tensor([3, -1, 2**60, 3, 8, -1]).to(device)
    offsets = torch.tensor([0, 2, 3]).to(device)
    weights = torch.linspace(0.5, 2.0, 6).to(device).requires_grad_()
    make_bag: Callable[..., Any] = RecStoreEmbeddingBag
    make_rows: Callable[..., Any] = RecStoreEmbedding
    half = {"dtype": torch.float16, "scale_grad_by_freq": True, "padding_idx": 3}
    programs: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
        "sum": (make_bag(9, DIM, mode="sum", name="a", options=MANY), (ids, offsets)),
        "weighted": (
            make_bag(9, DIM, mode="sum", name="b", options=MANY),
            (ids, offsets, weights),
        ),
        "padded": (
            make_bag(9, DIM, padding_idx=3, name="c", dtype=torch.half, options=MANY),
            (ids, offsets),
        ),
        "rows": (make_rows(9, DIM, name="d", options=MANY), (ids.view(2, 3),)),
        "scaled": (make_rows(9, DIM, name="e", options=MANY, **half), (ids,)),
    }
    found: Found = {}
    for name, (module, arguments) in programs.items():
        seen = []
        for _ in range(3):
            out = module(*arguments)
            (out.float() * out.float()).sum().backward()
            seen.append(host(out))
        table = module.table
        rows = table.lookup(table.ids())
        found[name] = {"out": seen, "rows": rows, "stats": as_on_cpu(table.stats())}
    return {**found, "gradient": host(weights.grad)}


PROGRAMS: dict[str, Callable[[torch.device], Found]] = {
    "bags": lambda device: trained(bags(), device),
    "sequences": lambda device: trained(sequences(), device),
    "weighted": weighted,
    "unfused": unfused,
    "drop_ins": drop_ins,
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "collected": (
        lambda: RecStoreEmbedding(9, DIM, name="t", fused=False, options=MANY),
        "the module has fused=False",
    ),
    "max": (
        lambda: RecStoreEmbeddingBag(9, DIM, name="t", mode="max", options=MANY),
        "with mode='max'",
    ),
    "scaled bags": (
        lambda: RecStoreEmbeddingBag(
            9, DIM, name="t", scale_grad_by_freq=True, options=MANY
        ),
        "with scale_grad_by_freq=True",
    ),
    "8 bits": (
        lambda: RecStoreEmbedding(9, DIM, name="t", dtype=torch.int8, options=MANY),
        "dtype=torch.int8",
    ),
    "frozen": (
        lambda: RecStoreEmbedding(
            9, DIM, name="t", options=TableOptions(device_rows=9, frozen=True)
        ),
        "the table is frozen",
    ),
}
"""Modules that cannot have rows on a device, and the reason."""


def refusal(module: nn.Module, ids: Tensor) -> str:
    """Returns the error of a lookup, or "nothing"."""
    arguments = [ids]
    if isinstance(module, RecStoreEmbeddingBag):
        arguments.append(torch.arange(len(ids)).to(ids.device))
    try:
        module(*arguments)
    except ValueError as error:
        return str(error)
    return "nothing"


def refusals(device: torch.device) -> dict[str, tuple[str, str]]:
    """What modules say of ids on the CPU and on the device."""
    found = {}
    for name, (make, _) in REFUSED.items():
        ids = torch.tensor([5, 7])
        on_cpu = refusal(make(), ids)
        found[name] = (on_cpu, refusal(make(), ids.to(device)))
    model = bags()
    features, other = batches(2, device)
    step(model, features)
    model.embedding_bags["t_item"].weight.requires_grad_(False)
    try:
        step(model, other)
        message = "nothing"
    except ValueError as error:
        message = str(error)
    model.embedding_bags["t_item"].weight.requires_grad_(True)
    step(model, other)
    found["other tables"] = ("nothing", message)
    return found


def arrivals_after_prefetch(device: torch.device) -> dict[str, int]:
    """The rows that a lookup copies to the device after a prefetch of its batch."""
    counts = {}
    for name, model in (("bags", bags()), ("sequences", sequences())):
        table = tables_of(model)["t_item"]
        for number, features in enumerate(batches(4, device)):
            model.prefetch(features)
            before = table.stats().device_arrivals
            model(features)
            counts[f"{name}, batch {number}"] = table.stats().device_arrivals - before
        counts[f"{name}, all"] = table.stats().device_arrivals
    return counts


def updates_on_device(program: Callable[[torch.device], Found], device: Any) -> Any:
    """The results of a program on a device, and the number of its updates there."""
    streams.order.clear()
    found = program(device)
    updates = [entry for entry in streams.order if entry[1] == "rows.update"]
    return found, len(updates)
