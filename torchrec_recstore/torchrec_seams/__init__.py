"""The private parts of TorchRec that this package uses.

They are what TorchRec has no public way to do.

Nothing outside this folder uses a private name of TorchRec
(``tests/test_torchrec_seams.py``). Each seam was checked on torchrec 1.7.0, 1.8.0 and
1.9.2, the releases of :mod:`torchrec_recstore.triples`, on which ``make matrix`` tests
them. A seam that differs between these releases says so. The import warns once if
another release of TorchRec is installed.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from torchrec_recstore.triples import TRIPLES
from torchrec_recstore.utils import warn_user


def warn_if_untested(torchrec: str) -> None:
    """Warns if a release of TorchRec is none of those that the seams were checked on."""
    if torchrec not in [triple.torchrec for triple in TRIPLES]:
        tested = "; ".join(map(str, TRIPLES))
        warn_user(
            f"torchrec {torchrec} is untested with this version of torchrec_recstore,"
            f" which uses private parts of TorchRec. Tested are: {tested}. `recstore"
            " doctor` names the releases that fit the installed torch"
        )


try:
    warn_if_untested(version("torchrec"))
except PackageNotFoundError:  # TorchRec is on the path without being installed
    warn_if_untested("of an unknown version")
