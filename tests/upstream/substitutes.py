"""What TorchRec's own tests need in order to test RecStore on a CPU.
:mod:`tests.upstream.adapted` puts it in place.

TorchRec's test modules, those of the wheel and those of the checkout that
``TORCHREC_SOURCE`` names, are imported as they are but for the following, none of which
changes what a test asserts (torchrec 1.8.0):

- ``EmbeddingComputeKernel.FUSED``, ``FUSED_UVM`` and ``FUSED_UVM_CACHING`` are
  RecStore's kernel.
- CUDA devices are the CPU and nccl is gloo; conditions on the number of GPUs do not
  skip a test.
- The sharders are RecStore's, also the default ones, and a plan's default kernel is
  RecStore's.
- ``copy_state_dict`` loads the rows of RecStore tables, which ``state_dict`` returns as
  copies, by ``load_state_dict``.
- Ranks are started by :mod:`tests.upstream.adapted`, and a test has the same seed in
  every run.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from torch import nn
from torchrec.distributed import sharding_plan
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import (
    DistributedModelParallel as StockDistributedModelParallel,
)
from torchrec.distributed.shard import _shard_modules
from torchrec.distributed.shard import shard as stock_shard

from torchrec_recstore.sharders import (
    RecStoreEmbeddingCollectionSharder,
    RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
    RecStoreSharder,
)

from . import sharders
from .tables import KERNEL, STOCK

SOURCE = os.environ.get("TORCHREC_SOURCE")
"""The path of a checkout of TorchRec of the installed version. Its tests run too."""

TEST_UTILS = tuple(
    f"torchrec.distributed.test_utils.{name}"
    for name in ("test_sharding", "test_model_parallel", "test_model_parallel_base")
)
SOURCE_PACKAGES = (
    "torchrec.distributed.tests",
    "torchrec.distributed.composable.tests",
    "torchrec.distributed.train_pipeline.tests",
)


class OnCpu(ast.NodeTransformer):
    """The syntax tree of a module of TorchRec's tests, for RecStore's kernel on a CPU."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node.value == "nccl":
            return ast.copy_location(ast.Constant("gloo"), node)
        if isinstance(node.value, str) and (
            node.value == "cuda" or node.value.startswith("cuda:")
        ):
            return ast.copy_location(ast.Constant("cpu"), node)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and str(first.value).startswith("cuda:"):
            return ast.copy_location(ast.Constant("cpu"), node)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        of_kernels = (
            isinstance(node.value, ast.Name)
            and node.value.id == "EmbeddingComputeKernel"
        )
        if of_kernels and node.attr in ("FUSED", "FUSED_UVM", "FUSED_UVM_CACHING"):
            return ast.copy_location(
                ast.Attribute(
                    node.value, EmbeddingComputeKernel(KERNEL).name, node.ctx
                ),
                node,
            )
        return self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt]:
        names = [
            alias.name
            for alias in node.names
            if alias.name in REPLACED and alias.asname is None
        ]
        code = [
            f"from {__name__} import REPLACED",
            *(f"{name} = REPLACED[{name!r}]" for name in names),
        ]
        return [node, *(ast.parse("\n".join(code)).body if names else [])]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [
            d for d in node.decorator_list if not _calls(d, "skipIf")
        ]
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = [
            d for d in node.decorator_list if not _calls(d, "skipIf")
        ]
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if _calls(node.value, "skipTest"):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)


def _calls(node: ast.AST, method: str) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == method
    )


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        tree = OnCpu().visit(ast.parse(self.get_data(self.path), self.path))
        return compile(
            ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True
        )

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if (
            module.__name__ == "torchrec.distributed.test_utils.test_sharding"
            and not STOCK
        ):
            vars(module).update(
                stock_copy_state_dict=module.copy_state_dict,
                copy_state_dict=copy_state_dict,
            )


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in SOURCE_PACKAGES:
            package = importlib.machinery.ModuleSpec(name, None, is_package=True)
            package.submodule_search_locations = (
                [str(Path(SOURCE, *name.split(".")))] if SOURCE else []
            )
            return package
        if name not in TEST_UTILS and name.rpartition(".")[0] not in SOURCE_PACKAGES:
            return None
        if SOURCE is None and name == "torchrec.distributed.tests.test_sequence_model":
            return importlib.util.spec_from_loader(name, _SequenceModel())
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


class _SequenceModel(importlib.abc.Loader):
    def exec_module(self, module: ModuleType) -> None:
        from . import sequence_model

        vars(module).update(
            {name: getattr(sequence_model, name) for name in sequence_model.__all__}
        )


class StateDict(OrderedDict[str, Any]):
    """A model's ``state_dict`` and the model, for :func:`copy_state_dict`."""

    def __init__(self, values: Mapping[str, Any], model: nn.Module) -> None:
        super().__init__(values)
        self.model = model


class DistributedModelParallel(StockDistributedModelParallel):
    """TorchRec's, with RecStore's sharders by default."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("sharders") is None:
            kwargs["sharders"] = sharders.default_sharders()
        super().__init__(*args, **kwargs)

    def state_dict(self, destination: Any = None, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(destination, *args, **kwargs)
        return StateDict(state, self) if destination is None else state


def shard_modules(*args: Any, **kwargs: Any) -> nn.Module:
    """TorchRec's ``_shard_modules``, with a ``state_dict`` that knows the model."""
    model: nn.Module = _shard_modules(*args, **kwargs)
    model._register_state_dict_hook(
        lambda m, state, prefix, _: None if prefix else StateDict(state, m)
    )
    return model


def copy_state_dict(
    loc: StateDict,
    glob: Mapping[str, Any],
    exclude_predfix: str | list[str] | None = None,
) -> None:
    """TorchRec's for the tensors that ``loc`` shares with its model; RecStore's rows
    are loaded into the model.
    """
    excluded = tuple(
        [exclude_predfix] if isinstance(exclude_predfix, str) else exclude_predfix or ()
    )
    keys = (
        [key for key in loc if not key.startswith(excluded)] if excluded else list(loc)
    )
    rows = {key for key in keys if f"{key}_id" in loc}
    ids = {f"{key}{suffix}" for key in rows for suffix in ("_id", "_rows")}
    from torchrec.distributed.test_utils import test_sharding

    test_sharding.stock_copy_state_dict(
        {key: loc[key] for key in keys if key not in rows | ids}, glob
    )
    missing = rows - glob.keys()
    assert not missing, missing
    if rows:
        loc.model.load_state_dict(
            {key: glob[key] for key in glob if key in rows | ids}, strict=False
        )


def shard(
    module: nn.Module,
    plan: Any,
    env: Any = None,
    device: Any = None,
    sharder: Any = None,
) -> nn.Module:
    """TorchRec's, with RecStore's sharders by default."""
    return stock_shard(module, plan, env, device, sharder or _default_sharder(module))


def construct_module_sharding_plan(
    module: nn.Module, per_param_sharding: Any, sharder: Any = None, **of: Any
) -> Any:
    """TorchRec's, with RecStore's sharders by default."""
    return sharding_plan.construct_module_sharding_plan(
        module, per_param_sharding, sharder or _default_sharder(module), **of
    )


def _default_sharder(module: nn.Module) -> Any:
    return next(
        sharder
        for sharder in sharders.default_sharders()
        if type(module) is sharder.module_type
    )


def default_compute_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a plan's entry, with the tests' kernel where no other is
    asked for.
    """
    return functools.partial(function, compute_kernel=KERNEL)


RECSTORE: dict[str, Any] = {
    "DistributedModelParallel": DistributedModelParallel,
    "_shard_modules": shard_modules,
    "shard": shard,
    "construct_module_sharding_plan": construct_module_sharding_plan,
    "copy_state_dict": copy_state_dict,
    "get_default_sharders": sharders.default_sharders,
    "EmbeddingBagCollectionSharder": RecStoreSharder,
    "EmbeddingCollectionSharder": RecStoreEmbeddingCollectionSharder,
    "FeatureProcessedEmbeddingBagCollectionSharder": (
        RecStoreFeatureProcessedEmbeddingBagCollectionSharder
    ),
    "TestEBCSharder": sharders.BagSharder,
    "TestECSharder": sharders.EmbeddingSharder,
    "TestEmbeddingCollectionSharder": sharders.SequenceSharder,
    "TestFPEBCSharder": sharders.FeatureProcessedSharder,
}
PLAN_ENTRIES = {
    name: default_compute_kernel(getattr(sharding_plan, name))
    for name in (
        "table_wise",
        "row_wise",
        "column_wise",
        "table_row_wise",
        "grid_shard",
    )
}
REPLACED: dict[str, Any] = {**PLAN_ENTRIES, **({} if STOCK else RECSTORE)}
"""The objects that have these names in TorchRec's test modules."""
