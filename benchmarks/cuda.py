"""Measures a training step of DLRM on a CUDA device above tables in host memory, and
above TorchRec's tables.

    python benchmarks/cuda.py [--sides kernel,eager] [--dim 64] [--batch-size 8192]
    [--rows 1000000] [--zipf]

``kernel`` and ``eager`` need torch alone: RecStore's group of tables, and modules, on
the host, and the dense part on the device. So do ``device_1``, ``device_10`` and
``device_100``: the group with 1, 10 and 100 % of the rows on the device, too. The other
sides need TorchRec and FBGEMM's CUDA build: RecStore's sharded tables (``recstore``),
the same in ``RecStorePrefetchPipeline`` (``pipeline``), and TorchRec's tables in device
memory (``fused``), in unified memory (``fused_uvm``) and there with a cache on the
device (``fused_uvm_caching``). Prints a JSON row for each side and then a table: the
time of a step over a step of the dense part alone, the copies over the bus, and their
overlap with kernels.

Where there is no CUDA device, the script prints one line and ends with status 1.
``--device cpu`` runs all of it but the copies on the CPU, to test the script.
"""

import sys
from pathlib import Path

# This file is found first where torch looks for the package cuda-bindings, whose
# modules are cuda.bindings and others.
_folders = [Path(place) / "cuda" for place in sys.path]
__path__ = [str(folder) for folder in _folders if folder.is_dir()]

if __name__ == "__main__":
    from accelerator import main

    sys.exit(main(__doc__))
