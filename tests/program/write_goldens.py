"""Rewrite the goldens of test_program_passes; the diff is what a change of a pass does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from test_program_passes import GOLDEN, MODELS, programs

from roofline.program.text import print_program

for name in MODELS:
    for stage, program in programs(name).items():
        (GOLDEN / f"{name}.{stage}.txt").write_text(print_program(program))
