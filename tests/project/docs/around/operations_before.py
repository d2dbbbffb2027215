"""The page asks a server for its metrics by curl, which a slim image lacks."""

import shutil

from tests.project.docs.run_page import Missing

if shutil.which("curl") is None:
    raise Missing("curl is not on this machine")
