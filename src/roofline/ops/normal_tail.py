"""P(X < -a) of a standard normal X, for a >= 0, as every order computes it: no bit depends on a libm's erf.

2^(p(z) - a^2 * log2(e) / 2) with z = min(a, 6), p by Horner with one FMA a step, 2^x of `exp2`. p(a) is the tail's
logarithm without its square, a slow function: degree 10, fitted on [0, 6] with weights that fall as the exponent's own
rounding grows. Relative error: below 4e-7 for a <= 1, below 3.1e-6 up to a = 6; beyond, where the tail is below 1e-9, p
stays what it is at 6 and the tail is too large by up to a factor of two. The C++ core uses these constants; a test
compares the two.
"""

from typing import TYPE_CHECKING

from roofline.ops.exp2 import exp2_falling, fma, polynomial

if TYPE_CHECKING:
    from torch import Tensor

_HEX = (
    "-0x1.fffffep-1 -0x1.26af0ap+0 0x1.0c73d8p-2 -0x1.ae70b6p-5 0x1.d13032p-8 -0x1.0257bep-13 "
    "-0x1.cebe2ep-13 0x1.f2ba5ep-15 -0x1.0ef3a2p-17 0x1.3da6fcp-21 -0x1.3e0cf2p-26"
)
COEFFICIENTS = tuple(float.fromhex(number) for number in _HEX.split())
FITTED = 6.0
HALF_LOG2E = float.fromhex("0x1.715476p-1")


def normal_tail(a: "Tensor") -> "Tensor":
    """P(X < -a) of float32 a >= 0."""
    import torch

    value = polynomial(a.clamp(max=FITTED), COEFFICIENTS)
    return exp2_falling(fma(a * a, torch.full_like(a, -HALF_LOG2E), value))
