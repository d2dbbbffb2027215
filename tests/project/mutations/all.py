"""All mutations."""

from __future__ import annotations

from . import core, device, python

MUTATIONS = [
    *core.CORE,
    *core.ROUTING,
    *core.BOUNDS,
    *core.OPTIMIZERS,
    *device.DEVICE,
    *python.ROUTING,
    *python.BOUNDS,
    *python.CHECKPOINTS,
    *python.SERVICE,
    *python.PARTS_OF_CHECKPOINTS,
    *python.FROZEN,
]
