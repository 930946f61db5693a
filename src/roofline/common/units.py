"""Numbers as people read and write them."""

import re
from collections.abc import Sequence

from roofline.common.errors import ConfigError

_SIZES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZES |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def parse_bytes(key: str, value: int | str) -> int:
    """Bytes of 1000000, "20gb" or "1.5 GiB". Raises ConfigError naming the key."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", str(value).strip().lower())
    if not match or match[2] not in _SIZES or float(match[1]) * _SIZES[match[2]] < 1:
        raise ConfigError(f"{key}: {value!r} is no number of bytes such as 1000000, 20gb or 1.5GiB")
    return int(float(match[1]) * _SIZES[match[2]])


def now_utc() -> str:
    """Date and time now, ISO 8601, UTC, to the second."""
    from datetime import UTC, datetime  # a start of ours needs no time of day

    return datetime.now(UTC).isoformat(timespec="seconds")


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'. Binary prefixes, one decimal above 1 KiB."""
    amount, unit = _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"


def human_rate(per_second: float, unit: str) -> str:
    """6.1e10, 'B' -> '61.0 GB/s'. Decimal prefixes, as hardware is rated."""
    amount, prefix = _scaled(per_second, 1000, ("", "k", "M", "G", "T"))
    return f"{amount:.1f} {prefix}{unit}/s"


def human_seconds(seconds: float) -> str:
    """0.00123 -> '1.23 ms', 754 -> '13 min'."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.2f} ms"
    if seconds < 600:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36000 else f"{seconds / 3600:.0f} h"


def human_count(amount: float) -> str:
    """1234567 -> '1.23 M'; '' for 0."""
    if not amount:
        return ""
    amount, prefix = _scaled(amount, 1000, ("", "k", "M", "G", "T"))
    return f"{amount:.3g} {prefix}" if prefix else f"{amount:.0f}"


def counted(count: int, noun: str) -> str:
    """1, 'step' -> '1 step'; 1200, 'step' -> '1,200 steps'."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _scaled(amount: float, base: int, prefixes: Sequence[str]) -> tuple[float, str]:
    """The amount in the first of these units, each `base` times the one before, in which it is below `base`."""
    for prefix in prefixes[:-1]:
        if abs(amount) < base:
            return amount, prefix
        amount /= base
    return amount, prefixes[-1]
