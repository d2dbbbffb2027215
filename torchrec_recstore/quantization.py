"""Errors and warnings of quantization, which would silently skip RecStore tables."""

from __future__ import annotations

from typing import cast

from torch import nn

from torchrec_recstore.utils import warn_user


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

    _times_left_out: int
    """How often ``qconfig`` was set to None, here and in the modules around."""

    @property
    def qconfig(self) -> None:
        """None, once the user has set it to None.

        Quantization then leaves the module out, without a warning.
        """
        if not hasattr(self, "_times_left_out"):
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
        # A module speaks for the modules in it.
        for module in cast("nn.Module", self).modules():
            if isinstance(module, RefusesQuantization):
                module._times_left_out = getattr(module, "_times_left_out", 0) + 1

    @qconfig.deleter
    # quantization deletes the attribute of every module at its end
    def qconfig(self) -> None:
        # A user who has set the attribute to None has set it before the quantization
        # did.
        times = self._times_left_out
        del self._times_left_out
        if times == 1:
            warn_user(
                f"{type(self).__name__} is left out of this quantization: its tables"
                " stay as they are. To quantize them, use"
                " torchrec_recstore.inference.export_for_inference; if only other"
                " layers are to be quantized, set the table module's qconfig to None"
            )
