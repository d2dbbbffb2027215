"""Makes the DLRM example's modules importable, as they are when its script runs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "dlrm"))
