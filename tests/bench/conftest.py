"""Makes the builders of this folder and of tests/program importable."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / room) for room in ("program", "engine"))]
