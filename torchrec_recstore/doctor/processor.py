"""The instruction set that the loops over rows run on."""

from __future__ import annotations

from collections.abc import Mapping

from torchrec_recstore.doctor.finding import Finding
from torchrec_recstore.doctor.machine import Machine
from torchrec_recstore.doctor.probe import Imported

# As csrc/row_kernels.cpp asks for them, the best first.
_NEEDS = {"avx512": {"avx512f", "avx512dq", "avx512vl", "avx512bw"}, "avx2": {"avx2", "f16c"}}
_ORDER = ("baseline", "avx2", "avx512")


def instruction_set(machine: Machine, imported: Mapping[str, Imported]) -> Finding:
    """What the native extension has chosen, against what the processor has."""
    text = machine.read("proc/cpuinfo") or ""
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    model = fields.get("model name", "a processor without a name")
    flags = set(fields.get("flags", "").split())
    best = next((name for name, needed in _NEEDS.items() if needed <= flags), "baseline")
    extension = imported.get("torchrec_recstore.ops")
    chosen = None if extension is None else extension.facts.get("instruction_set")
    if chosen is None:
        return Finding("processor", "ok", f"{model}, {best}")
    found = f"{model}: rows are worked on with {chosen}"
    if _ORDER.index(chosen) < _ORDER.index(best):
        forced = machine.environ.get("RECSTORE_ISA")
        why = "" if forced is None else f", since RECSTORE_ISA={forced}"
        fix = "reinstall torchrec-recstore" if forced is None else "unset RECSTORE_ISA"
        return Finding("processor", "warning", f"{found}, and the processor has {best}{why}", fix)
    if chosen == "baseline":
        found += ", without AVX2 the loops over rows take several times as long"
        return Finding("processor", "warning", found, "run on a processor with AVX2; in a virtual machine, pass it on")
    return Finding("processor", "ok", found)
