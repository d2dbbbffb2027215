"""Makes the examples' modules importable, as they are when their scripts run."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "dlrm")]
