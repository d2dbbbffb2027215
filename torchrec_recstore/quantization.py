"""Errors for torch's and TorchRec's quantization, which would silently skip RecStore
tables.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

_WRAPPERS = {"_dmp_wrapped_module", "module"}
"""The attributes in which ``DistributedModelParallel`` and ``DistributedDataParallel``
have the whole model.
"""


class RefusesQuantization:
    """A mixin for modules with RecStore tables: a request to quantize the module raises
    an error.

    ``torch.ao.quantization.quantize_dynamic``, which TorchRec's ``quantize_embeddings``
    and ``quantize_inference_model`` call, replaces modules by their exact type, and
    leaves all others unchanged. Before, it sets the attribute ``qconfig`` of every
    module, which is the only place to detect the request (torch 2.13). Other layers of
    the model may be quantized.
    """

    @property
    def qconfig(self) -> None:
        """None, once the user has set it to None.

        Quantization then leaves the module out.
        """
        if "_qconfig" not in self.__dict__:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute 'qconfig'"
            )

    @qconfig.setter
    def qconfig(self, config: object) -> None:
        frame = sys._getframe(1)
        # skips nn.Module.__setattr__
        while frame.f_code.co_name == "__setattr__" and frame.f_back is not None:
            frame = frame.f_back
        # the caller may be torch's _propagate_qconfig_helper; these are its arguments
        asked = frame.f_locals
        left_out = "_qconfig" in self.__dict__
        if config is not None or (
            "qconfig_dict" in asked and not left_out and _asks_for_tables(asked)
        ):
            raise NotImplementedError(
                f"{type(self).__name__} cannot be quantized in place:"
                " torchrec_recstore.inference.export_for_inference returns a copy of"
                " the model with static, quantized tables; to quantize only other"
                " layers, pass the model and their types, or set the table module's"
                " qconfig to None"
            )
        if "qconfig_dict" not in asked:
            self.__dict__["_qconfig"] = None

    @qconfig.deleter
    # quantization deletes the attribute of every module at its end
    def qconfig(self) -> None:
        self.__dict__.pop("_qconfig", None)


def _asks_for_tables(asked: dict[str, Any]) -> bool:
    """Returns whether a call of ``propagate_qconfig_`` is for the module itself, or
    names types of embeddings.
    """
    if set(str(asked.get("prefix") or "module").split(".")) <= _WRAPPERS:
        return True
    kinds: tuple[type, ...] = (nn.Embedding, nn.EmbeddingBag, RefusesQuantization)
    # The subclasses are TorchRec's collections, quantized ones included, and RecStore's
    # collections.
    torchrec = sys.modules.get("torchrec.modules.embedding_modules")
    if torchrec is not None:
        kinds += (
            torchrec.EmbeddingBagCollectionInterface,
            torchrec.EmbeddingCollectionInterface,
        )
    return any(
        isinstance(kind, type) and issubclass(kind, kinds)
        for kind in asked["qconfig_dict"]
    )
