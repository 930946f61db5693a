"""What a plan has to assume where nothing was measured: how near to the roofs the steps come."""

from collections.abc import Sequence

from roofline.backends.simulated.calibration import Calibration

# Tuned engines that decode one stream reach 60 to 70 % of a GPU's bandwidth, and 55 to 60 % of its rate of products in
# prefill (gpt-fast on A100 and MI250X, AMD's tuned MI210: docs/how-to/plan.md); the middles of these.
READS, ARITHMETIC = 0.65, 0.55
LINK_SECONDS = 10e-6  # an exchange of a few bytes among devices of one host, of the order that libraries take
NAMED = "assumed; see docs/how-to/plan.md"


def assumed(
    reads: float | None = None,
    arithmetic: float | None = None,
    step_us: float | None = None,
    link_us: float | None = None,
) -> Calibration:
    """The calibration of devices that nobody measured. What is None is assumed."""
    return Calibration(
        reads=READS if reads is None else reads,
        arithmetic=ARITHMETIC if arithmetic is None else arithmetic,
        step_seconds=0.0 if step_us is None else step_us * 1e-6,
        link_seconds=LINK_SECONDS if link_us is None else link_us * 1e-6,
        source=NAMED,
    )


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
