"""2^x as every order computes it: our own polynomial, so that no bit depends on a libm.

n = round-half-even(x), f = x - n in [-0.5, 0.5]; 2^f by Horner with one FMA a step; 2^n by adding n to the exponent.
The C++ core uses these constants; a test compares the two. Coefficients: a degree-6 fit, relative error below 2^-23.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_HEX = "1.0 0x1.62e430p-1 0x1.ebfbdap-3 0x1.c6b08ep-5 0x1.3b2ab6p-7 0x1.5d87fep-10 0x1.430912p-13"
COEFFICIENTS = tuple(float.fromhex(number) for number in _HEX.split())
# Arguments of exp2_signed are clamped to +-LARGEST; exp2_falling gives 0 below -LARGEST.
LARGEST = 126.0
LOG2E = float.fromhex("0x1.715476p+0")  # log2(e) rounded to float32


def fma(a: "Tensor", b: "Tensor", c: "Tensor") -> "Tensor":
    """a * b + c with one rounding to float32 (by way of float64, whose product of two float32 is exact)."""
    return c.double().addcmul(a.double(), b.double()).float()


def polynomial(x: "Tensor", coefficients: Sequence[float]) -> "Tensor":
    """The polynomial at float32 x, its constant term first among the coefficients: Horner with one FMA a step."""
    import torch

    value = torch.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = fma(value, x, torch.full_like(x, coefficient))
    return value


def exp2_signed(x: "Tensor") -> "Tensor":
    """2^x of float32 with x clamped to [-126, 126]."""
    import torch

    x = x.clamp(-LARGEST, LARGEST)
    integer = torch.round(x)  # half to even
    value = polynomial(x - integer, COEFFICIENTS)
    return (value.view(torch.int32) + (integer.to(torch.int32) << 23)).view(torch.float32)


def exp2_falling(x: "Tensor") -> "Tensor":
    """2^x of float32 for x <= 0; 0 where x < -126 (also for -inf)."""
    import torch

    return torch.where(x < -LARGEST, torch.zeros_like(x), exp2_signed(torch.nan_to_num(x, neginf=-LARGEST)))
