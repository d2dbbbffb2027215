"""Run alone, in a process that cannot import this project: loads and runs what a test
has exported.

    python elsewhere.py FOLDER

At first with torch alone, then with fbgemm_gpu, then with torchrec.
"""

import sys
from pathlib import Path

BLOCKED = {"torchrec_recstore", "torchrec", "fbgemm_gpu"}


class Blocker:
    """A finder that refuses imports of this package."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")


def main(folder: Path) -> None:
    sys.meta_path.insert(0, Blocker())
    import safetensors.torch
    import torch

    def check(name: str) -> None:
        path = folder / f"{name}.pt"
        served = torch.jit.load(path)
        served.verify(
            torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
        )
        for delta in sorted(folder.glob(f"{name}.*.safetensors")):
            assert served.apply_delta(safetensors.torch.load_file(delta))
        served.verify()
        output = served(*torch.load(folder / f"{name}.inputs.pt"))
        assert torch.equal(output, torch.load(folder / f"{name}.output.pt")), name
        print(name, "is right")

    check("tables-float32")
    for name in ("tables-int8", "model-float32"):
        try:
            check(name)
            message = "nothing"
        except RuntimeError as error:
            message = str(error)
        assert "Unknown builtin op: fbgemm::" in message, (
            f"{name} without fbgemm_gpu: {message}"
        )
    BLOCKED.remove("fbgemm_gpu")
    import fbgemm_gpu  # noqa: F401

    for name in ("tables-int8", "model-float32", "model-int8"):
        check(name)
    BLOCKED.remove("torchrec")
    from torchrec import KeyedJaggedTensor

    keys, values, lengths = torch.load(folder / "keyed.inputs.pt")
    output = torch.jit.load(folder / "keyed.pt")(
        KeyedJaggedTensor(keys, values, lengths=lengths)
    )
    assert torch.equal(output, torch.load(folder / "keyed.output.pt"))
    print("keyed is right")
    assert not [name for name in sys.modules if name.startswith("torchrec_recstore")]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
