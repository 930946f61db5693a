"""Which instruction set and how many threads: chosen once, each with its reason."""

from dataclasses import dataclass

from roofline.common import env
from roofline.common.errors import UnsupportedError


@dataclass(frozen=True)
class Choice:
    """A value that was chosen, and why."""

    value: str | int
    reason: str


def choose_isa(wanted: str | None = None) -> Choice:
    """The best instruction set of this chip, or a lower one on demand (argument, then ROOFLINE_ISA).

    Raises UnsupportedError where the one demanded is not available.
    """
    from roofline import _native

    available = _native.isas()
    asked = wanted or env.read("ROOFLINE_ISA")
    if asked is None:
        return Choice(available[0], f"best of {', '.join(available)}")
    if asked not in available:
        raise UnsupportedError(f"instruction set {asked!r}", "this chip or this build does not have it", available)
    return Choice(asked, "asked for" if wanted else "ROOFLINE_ISA")


def choose_threads(wanted: int | None = None) -> Choice:
    """Usable cores: the smaller of the affinity mask and the whole cores of the cgroup's quota; or what is asked."""
    asked = wanted or env.threads()
    if asked is not None:
        return Choice(asked, "asked for" if wanted else "ROOFLINE_THREADS")
    from roofline.hardware.detect import cores_allowed, cpu_quota, usable_cores

    allowed, quota = cores_allowed(), cpu_quota()
    by_mask = quota is None or quota >= allowed
    reason = "cores in the affinity mask" if by_mask else f"cgroup quota of {quota:.1f} cores"
    return Choice(usable_cores(allowed, quota), reason)
