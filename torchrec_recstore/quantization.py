"""Quantization by torch and TorchRec, which would pass RecStore tables over without a word."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


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
