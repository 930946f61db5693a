"""Write the limits of compiled kernels anew, of the chips that are named or all; the diff shows what changed.

Stops where a gate is not passed: the limits are not the place to accept that.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import kernel_limits

from roofline.backends.gpu.ahead import check
from roofline.hardware.chips import chips

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chips", nargs="*")
    options = parser.parse_args()
    limits = {name: {} for name in chips.chips()} | kernel_limits.read()
    for name in options.chips or chips.chips():
        proofs = list(check.prove([chips.get(name)]))
        violations = [str(violation) for proof in proofs for violation in proof.violations]
        if violations:
            sys.exit("\n".join(violations))
        limits[name] = kernel_limits.limits_of(proofs, chips.get(name))
        kernel_limits.write(limits)
        print(f"{name}: {len(proofs)} binaries, {sum(proof.seconds for proof in proofs):.1f} s of compiling")
