"""The page changes the package of TorchEasyRec, which a checkout has."""

import sys
from pathlib import Path

from tests.clients.torcheasyrec import SOURCE, prepare
from tests.project.docs.run_page import Missing

if not SOURCE:
    raise Missing("TORCHEASYREC_SOURCE names no checkout of TorchEasyRec")
prepare(Path.cwd())
sys.path.insert(0, "stock")
