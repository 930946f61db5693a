"""What a plan has to assume where nothing was measured: how near to the roofs steps come, and how sure that is.

All figures are of the public ones that `python -m benchmarks.published` lists, and that it computes them from.
"""

import math
from collections.abc import Sequence
from typing import Literal

from roofline.backends.simulated.calibration import Calibration

Kind = Literal["prefill", "decode", "serving"]

# Shares that tuned engines reach, by bits of a weight: of a GPU's bandwidth when they decode one stream; of its rate of
# products in prefill. Engines spend longer on unpacking fewer bits; integers of 4 bits are multiplied as 8-bit ones.
READS = {16: 0.62, 8: 0.52, 4: 0.56}
ARITHMETIC = {16: 0.55, 8: 0.55, 4: 0.22}
# Of a CPU's roofs, whatever the weights: medians of our own engine's rows of decode and of prefill, with weights of 4
# bits (benchmarks/records/2026-11-21-peers.json).
HOST_READS, HOST_ARITHMETIC = 0.47, 0.57
LINK_SECONDS = 25e-6  # an exchange of a few bytes, for each doubling of the devices that make it
NAMED = "assumed; see docs/how-to/plan.md"
HOST_NAMED = "as measured on CPUs, of weights of 4 bits; see docs/explanation/measured.md"
GIVEN = "as asked for, the others assumed; see docs/how-to/plan.md"
# Published over planned time, an 80 % interval for one more figure of the kind: (kind, whether several devices share
# the model, whether weights have about 4 bits, which counts for single steps on one device) -> lowest and highest.
SPREADS: dict[tuple[Kind, bool, bool], tuple[float, float]] = {
    ("prefill", False, False): (0.80, 1.23),
    ("prefill", False, True): (0.82, 1.27),
    ("prefill", True, False): (0.91, 1.25),
    ("decode", False, False): (0.86, 1.32),
    ("decode", False, True): (0.68, 1.26),
    ("decode", True, False): (0.72, 1.68),
    ("serving", False, False): (0.72, 1.25),
    ("serving", True, False): (0.66, 1.85),
}
# Measured over planned time in all of those rows, from the lowest to the highest.
HOST_SPREADS: dict[Kind, tuple[float, float]] = {
    "prefill": (0.95, 1.13),
    "decode": (0.69, 1.54),
    "serving": (0.69, 1.17),
}
FEW = 16  # requests at a time of a copy, up to which a step counts as one of decoding


def assumed(
    reads: float | None = None,
    arithmetic: float | None = None,
    step_us: float | None = None,
    row_us: float | None = None,
    link_us: float | None = None,
    bits: float = 16.0,
    devices: int = 1,
    host: bool = False,
) -> Calibration:
    """The calibration of devices that nobody measured. What is None is assumed.

    Args:
        bits: of a weight on average, as it lies in memory.
        devices: that share a copy of the model.
        host: whether a CPU computes it.
    """
    usual = (HOST_READS, HOST_ARITHMETIC) if host else (READS[class_of(bits)], ARITHMETIC[class_of(bits)])
    all_assumed = (reads, arithmetic, step_us, row_us, link_us) == (None,) * 5
    link_seconds = LINK_SECONDS * math.log2(devices) if link_us is None else link_us * 1e-6
    return Calibration(
        reads=usual[0] if reads is None else reads,
        arithmetic=usual[1] if arithmetic is None else arithmetic,
        step_seconds=0.0 if step_us is None else step_us * 1e-6,
        row_seconds=0.0 if row_us is None else row_us * 1e-6,
        link_seconds=link_seconds,
        source=GIVEN if not all_assumed else HOST_NAMED if host else NAMED,
    )


def class_of(bits: float) -> int:
    """The width of weights that READS has a share for: 16, 8 or 4 bits."""
    return 4 if bits < 6.6 else 8 if bits < 12 else 16


def spread(calibration: Calibration, kind: Kind, devices: int, bits: float) -> tuple[float, float] | None:
    """Between which factors of a planned time the true one is likely to lie; None where the shares were measured or
    asked for, so that no public figure says how sure they are."""
    if calibration.source == HOST_NAMED:
        return HOST_SPREADS[kind]
    if calibration.source != NAMED:
        return None
    several = devices > 1
    return SPREADS[kind, several, kind != "serving" and not several and class_of(bits) == 4]


def in_words(calibration: Calibration) -> str:
    """The figures of a calibration, for people."""
    if calibration.shares:
        shares = [f"{share:.0%} in a step of {tokens:.0f} tokens" for tokens, share in _examples(calibration.shares)]
        return f"of the limit {', '.join(shares)}"
    parts = [
        f"{calibration.reads:.0%} of the read roof",
        f"{calibration.arithmetic:.0%} of the roof of arithmetic",
        f"{calibration.step_seconds * 1e6:.0f} us a step",
    ]
    if calibration.row_seconds:
        parts.append(f"{calibration.row_seconds * 1e6:.1f} us a row")
    if calibration.link_seconds:
        parts.append(f"{calibration.link_seconds * 1e6:.0f} us an exchange")
    return ", ".join(parts)


def short(calibration: Calibration) -> str:
    """The shares of a calibration in a few characters: of reads and arithmetic, or the lowest and the highest."""
    if not calibration.shares:
        return f"{calibration.reads:.0%}/{calibration.arithmetic:.0%}"
    shares = [share for _, share in calibration.shares]
    return f"{min(shares):.0%}-{max(shares):.0%}"


def _examples(shares: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The first, the lowest, the highest and the last share."""
    ends = (shares[0], min(shares, key=lambda row: row[1]), max(shares, key=lambda row: row[1]), shares[-1])
    return sorted(dict.fromkeys(ends))
