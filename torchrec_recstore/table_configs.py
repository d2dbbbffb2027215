"""What eager and sharded modules derive from TorchRec's description of a table, and refuse of it."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType

from torchrec_recstore.options import Initializer, TableOptions, UniformInit, default_initializer

ROW_DTYPES = {DataType.FP32: torch.float32, DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}


def check_config(config: BaseEmbeddingConfig) -> None:
    """Refuses a data type that rows cannot have, and tables of another kernel.

    Raises:
        ValueError: the message names the table.
    """
    if config.data_type not in ROW_DTYPES:
        raise ValueError(
            f"RecStore table {config.name!r}: data_type {config.data_type} is not supported, "
            f"only {', '.join(kind.name for kind in ROW_DTYPES)} are"
        )
    if config.use_virtual_table:
        raise ValueError(
            f"RecStore table {config.name!r}: use_virtual_table asks for TorchRec's own kernels: leave it out"
        )


def check_init_fn(config: BaseEmbeddingConfig, options: TableOptions | None) -> None:
    """Refuses an ``init_fn`` of the user's where ``options`` have no initializer.

    Raises:
        ValueError: the message names the table.
    """
    if (options is None or options.initializer is None) and not _is_default_init(config):
        raise ValueError(
            f"RecStore table {config.name!r}: init_fn initialises whole tables, but rows are made one at a time: "
            "set TableOptions.initializer, or the config's weight_init_min and weight_init_max"
        )


def initializer_of(config: BaseEmbeddingConfig, options: TableOptions) -> Initializer:
    """What makes the table's rows: of ``options``, else of the config's range, else the default.

    Raises:
        ValueError: the range makes no sense; the message names the table.
    """
    default = default_initializer(options, config.num_embeddings)
    low, high = config.weight_init_min, config.weight_init_max
    if options.initializer is not None or (low is None and high is None):
        return default
    if not isinstance(default, UniformInit):
        raise AssertionError("the default initializer is uniform")
    try:
        return UniformInit(default.low if low is None else low, default.high if high is None else high)
    except ValueError as error:
        raise ValueError(f"RecStore table {config.name!r}: weight_init_min, weight_init_max: {error}") from error


def _is_default_init(config: BaseEmbeddingConfig) -> bool:
    """Whether ``init_fn`` is the one that TorchRec fills in (``BaseEmbeddingConfig.__post_init__``, torchrec 1.8.0)."""
    filled_in = {"a": config.get_weight_init_min(), "b": config.get_weight_init_max()}
    init_fn = config.init_fn
    return init_fn is None or (
        isinstance(init_fn, partial) and init_fn.func is nn.init.uniform_ and init_fn.keywords == filled_in
    )


class RefusesQuantization:
    """Mixed into modules with RecStore tables: ``quantize_dynamic`` raises where it is asked to quantize them.

    ``torch.ao.quantization.quantize_dynamic``, and TorchRec's ``quantize_embeddings`` and ``quantize_inference_model``
    upon it, replace modules by their exact type and leave all others as they are. Before that they set the attribute
    ``qconfig`` of every module, which is the one seam (torch 2.13). Other layers of the model may be quantized.
    """

    @property
    def qconfig(self) -> None:
        """``None`` once it has been set to that, which makes quantization leave the module out.

        Raises:
            NotImplementedError: in setting it: the module is to be quantized.
        """
        if "_qconfig" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'qconfig'")

    @qconfig.setter
    def qconfig(self, config: object) -> None:
        frame = sys._getframe(1)
        while frame.f_code.co_name == "__setattr__" and frame.f_back is not None:  # nn.Module has one
            frame = frame.f_back
        asked = frame.f_locals  # the arguments of torch's _propagate_qconfig_helper
        left_out = "_qconfig" in self.__dict__
        if config is not None or ("qconfig_dict" in asked and not left_out and _asks_for_tables(asked)):
            raise NotImplementedError(
                f"{type(self).__name__} cannot be quantized in place: torchrec_recstore.inference.export_for_inference "
                "gives a copy of the model with static, quantized tables; to quantize other layers alone, give the "
                "model and their types, or set the table module's qconfig to None"
            )
        if "qconfig_dict" not in asked:
            self.__dict__["_qconfig"] = None

    @qconfig.deleter
    def qconfig(self) -> None:  # which quantization does of every module, in the end
        self.__dict__.pop("_qconfig", None)


_WRAPPERS = {"_dmp_wrapped_module", "module"}
"""Where ``DistributedModelParallel`` and ``DistributedDataParallel`` have the whole model."""


def _asks_for_tables(asked: dict[str, Any]) -> bool:
    """Whether a call of ``propagate_qconfig_`` is for the module itself, or names embeddings."""
    if set(str(asked.get("prefix") or "module").split(".")) <= _WRAPPERS:
        return True
    kinds: tuple[type, ...] = (nn.Embedding, nn.EmbeddingBag, RefusesQuantization)
    # Subclasses of these are TorchRec's collections, plain and quantized, and ours.
    torchrec = sys.modules.get("torchrec.modules.embedding_modules")
    if torchrec is not None:
        kinds += (torchrec.EmbeddingBagCollectionInterface, torchrec.EmbeddingCollectionInterface)
    return any(isinstance(kind, type) and issubclass(kind, kinds) for kind in asked["qconfig_dict"])
