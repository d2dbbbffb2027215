"""The releases of torch, TorchRec and FBGEMM that fit each other and that the tests run
with.

The list is kept here only. ``recstore doctor``, the warning of an untested TorchRec and
``make matrix`` read it; ``tests/project/package/test_triples.py`` compares
pyproject.toml, requirements/ and the README with it. None of the packages is imported
here, so that the list can be read where they are not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchrec_recstore.installing import install


@dataclass(frozen=True)
class Triple:
    """One release of torch, of torchrec, and of fbgemm-gpu-cpu and fbgemm-gpu.

    FBGEMM 1.X is built for torch 2.(X+5), and its libraries load with no other minor
    version of torch.
    """

    torch: str
    torchrec: str
    fbgemm: str

    def __str__(self) -> str:
        return (
            f"torch {self.torch}, torchrec {self.torchrec}, fbgemm-gpu-cpu"
            f" {self.fbgemm}"
        )

    @property
    def extra(self) -> str:
        """The extra of pyproject.toml that installs this triple with CUDA; ``-cpu``
        is appended for the one without.

        It has no dot: pip before 23.3 ignores an extra whose name has one, and takes
        any torch.
        """
        return f"torchrec-{'-'.join(map(str, release(self.torchrec)))}"

    @property
    def install_on_cpu(self) -> str:
        """The command that installs this triple without CUDA.

        TorchRec itself requires the CUDA build of FBGEMM.
        """
        extra = "torchrec" if self == DEFAULT else self.extra
        return (
            f"{install(f'{extra}-cpu')} && pip install --no-deps"
            f" torchrec=={self.torchrec}"
        )


def release(number: str) -> tuple[int, int]:
    """The major and the minor version: (2, 13) for ``2.13.0+cpu``."""
    parts = number.partition("+")[0].split(".")
    major = int(parts[0]) if parts[0].isdigit() else 0
    has_minor = len(parts) > 1 and parts[1].isdigit()
    return major, int(parts[1]) if has_minor else 0


TRIPLES = (
    Triple("2.12.1", "1.7.0", "1.7.0"),
    Triple("2.13.0", "1.8.0", "1.8.0"),
    Triple("2.14.1", "1.9.2", "1.9.0"),
)
"""In ascending order."""

DEFAULT = TRIPLES[1]
"""The triple of requirements/ and of the extras ``[torchrec]`` and ``[torchrec-cpu]``.
"""


def for_torch(number: str) -> Triple | None:
    """The triple with this minor version of torch, or None if there is none."""
    for triple in TRIPLES:
        if release(triple.torch) == release(number):
            return triple
    return None


def nearest_to_torch(number: str) -> Triple:
    """The triple with the newest torch that is not newer than ``number``; the default
    triple if all are newer.
    """
    newest = release(number)
    older = [triple for triple in TRIPLES if release(triple.torch) <= newest]
    return older[-1] if older else DEFAULT


def torch_of_fbgemm(number: str) -> tuple[int, int]:
    """The minor version of torch that a release of FBGEMM is built for: (2, 13) for
    ``1.8.0``.
    """
    return (2, release(number)[1] + 5)
