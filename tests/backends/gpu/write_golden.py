"""Rewrite the goldens of compiled kernels, of the chips that are named or all; the diff is what a change does to them.

`--kernel NAME` compiles one kernel alone, and leaves the lines of all others as they are. Stops where a gate is not
passed: a golden is not the place to accept that.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import gpu_golden as golden

from roofline.backends.gpu.ahead import check as static
from roofline.hardware.chips import chips

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("chips", nargs="*")
    parser.add_argument("--kernel")
    asked = parser.parse_args()
    for name in asked.chips or chips.chips():
        proofs = list(static.prove([chips.get(name)], kernel=asked.kernel))
        violations = [str(violation) for proof in proofs for violation in proof.violations]
        if violations:
            sys.exit("\n".join(violations))
        golden.write(name, proofs, keep=asked.kernel is not None)
        print(f"{name}: {len(proofs)} binaries, {sum(proof.seconds for proof in proofs):.1f} s of compiling")
