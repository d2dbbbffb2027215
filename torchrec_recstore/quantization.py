"""Errors and warnings of quantization, which would silently skip RecStore tables."""

from __future__ import annotations

from enum import Enum
from typing import cast

from torch import nn

from torchrec_recstore.utils import warn_user


class _LeftOutBy(Enum):
    USER = 1
    TORCH = 2
    MODULE_AROUND = 3


class RefusesQuantization:
    """A mixin for modules with RecStore tables, which cannot be quantized.

    A request to quantize the module raises an error, and a quantization of other layers
    warns that it leaves the module out.

    ``torch.ao.quantization.quantize_dynamic``, which TorchRec's ``quantize_embeddings``
    and ``quantize_inference_model`` call, replaces modules by their exact type, and
    leaves all others unchanged. It tells a module nothing but its configuration: it
    sets the attribute ``qconfig`` of every module before, to None if neither the type
    nor the name of the module is to be quantized, and deletes the attribute at the end
    (torch 2.13). A module therefore cannot tell whether the user has asked for tables
    of another type, such as ``EmbeddingBagCollection``, or for other layers only.
    """

    _left_out_by: _LeftOutBy
    """Who has set ``qconfig`` to None. The attribute is missing if it is not set."""
    _is_asked = False
    """Whether somebody has looked for ``qconfig`` since it was set or deleted.

    Torch does so before it sets the attribute, and a user does not.
    """

    @property
    def qconfig(self) -> None:
        """None, once the user has set it to None.

        Quantization then leaves the module out, without a warning.
        """
        if not hasattr(self, "_left_out_by"):
            self._is_asked = True
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute 'qconfig'"
            )

    @qconfig.setter
    def qconfig(self, config: object) -> None:
        if config is not None:
            raise NotImplementedError(
                f"{type(self).__name__} cannot be quantized in place:"
                " torchrec_recstore.inference.export_for_inference returns a copy of"
                " the model with static, quantized tables; to quantize only other"
                " layers, pass the model and their types, or set the table module's"
                " qconfig to None"
            )
        if not hasattr(self, "_left_out_by"):
            is_torch = self._is_asked
            self._left_out_by = _LeftOutBy.TORCH if is_torch else _LeftOutBy.USER
        self._is_asked = False
        # A module speaks for the modules in it.
        for module in cast("nn.Module", self).modules():
            if isinstance(module, RefusesQuantization) and not hasattr(
                module,
                "_left_out_by",
            ):
                module._left_out_by = _LeftOutBy.MODULE_AROUND

    @qconfig.deleter
    # quantization deletes the attribute of every module at its end
    def qconfig(self) -> None:
        left_out_by = self.__dict__.pop("_left_out_by", None)
        self._is_asked = False
        if left_out_by is _LeftOutBy.TORCH:
            warn_user(
                f"{type(self).__name__} is left out of this quantization: its tables"
                " stay as they are. To quantize them, use"
                " torchrec_recstore.inference.export_for_inference; if only other"
                " layers are to be quantized, set the table module's qconfig to None"
            )
