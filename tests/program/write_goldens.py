"""Rewrite the goldens of test_passes.py and test_shard.py; the diff is what a change of a pass does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from test_passes import GOLDEN, MODELS, programs
from test_shard import golden_texts

from roofline.program.text import print_program

for name in MODELS:
    for stage, program in programs(name).items():
        (GOLDEN / f"{name}.{stage}.txt").write_text(print_program(program))
for file, text in golden_texts().items():
    (GOLDEN / file).write_text(text)
