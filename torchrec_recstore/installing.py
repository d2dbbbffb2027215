"""The pip commands that install the distributions of this project.

All errors, ``recstore doctor`` and the pages of the documentation have their commands
from :data:`CHECKOUT`; ``tests/test_installing.py`` compares the pages with it. Nothing
is imported here that must be installed first.
"""

from __future__ import annotations

import shlex

CHECKOUT: str | None = "path/to/torchrec_recstore"
"""The place of a checkout in commands, because no package index has the distributions.

None on the day of their publication: all commands then name the distributions.
"""

DISTRIBUTION = "torchrec-recstore"

# The other distributions that each extra needs, which pip takes from their folders as
# long as no index has them.
_OTHERS_OF_EXTRA = {
    "predict": ("service", "serving"),
    "retrieval": ("serving",),
    "service": ("service",),
    "serving": ("serving",),
}


def requirement(part: str = "", extras: str = "") -> str:
    """Returns what pip takes for one distribution, quoted for a shell.

    Args:
        part: "service" or "serving". Default: the plugin itself.
        extras: The extras, separated by commas. Default: none.
    """
    if CHECKOUT is None:
        name = f"{DISTRIBUTION}-{part}" if part else DISTRIBUTION
    else:
        name = f"{CHECKOUT}/{part}" if part else CHECKOUT
    return shlex.quote(f"{name}[{extras}]" if extras else name)


def install(
    extras: str = "",
    *,
    part: str = "",
    flags: str = "",
) -> str:
    """Returns the command that installs a distribution with extras.

    From a checkout, the command has the folders of the other distributions that the
    extras need.

    Args:
        extras: The extras, separated by commas. Default: none.
        part: "service" or "serving". Default: the plugin itself.
        flags: Flags of ``pip install``. Default: none.
    """
    words = ["pip install"]
    if flags:
        words.append(flags)
    words.append(requirement(part, extras))
    if CHECKOUT is not None:
        folders: list[str] = []
        for extra in extras.split(","):
            for other in _OTHERS_OF_EXTRA.get(extra, ()):
                if other != part and other not in folders:
                    folders.append(other)
        words += [requirement(folder) for folder in folders]
    return " ".join(words)
