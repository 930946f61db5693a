"""Numbers as people read and write them."""

import re

from roofline.common.errors import ConfigError

_SIZES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZES |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def parse_bytes(key: str, value: int | str) -> int:
    """Bytes of 1000000, "20gb" or "1.5 GiB". Raises ConfigError naming the key."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", str(value).strip().lower())
    if not match or match[2] not in _SIZES or float(match[1]) * _SIZES[match[2]] < 1:
        raise ConfigError(f"{key}: {value!r} is no number of bytes such as 1000000, 20gb or 1.5GiB")
    return int(float(match[1]) * _SIZES[match[2]])


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'. Binary prefixes, one decimal above 1 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_rate(per_second: float, unit: str) -> str:
    """6.1e10, 'B' -> '61.0 GB/s'. Decimal prefixes, as hardware is rated."""
    for prefix in ("", "k", "M", "G"):
        if abs(per_second) < 1000:
            return f"{per_second:.1f} {prefix}{unit}/s"
        per_second /= 1000
    return f"{per_second:.1f} T{unit}/s"


def human_seconds(seconds: float) -> str:
    """0.00123 -> '1.23 ms'."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds:.1f} s"


def human_count(amount: float) -> str:
    """1234567 -> '1.23 M'; '' for 0."""
    if not amount:
        return ""
    for prefix in ("", "k", "M", "G"):
        if amount < 1000:
            return f"{amount:.0f}" if not prefix else f"{amount:.3g} {prefix}"
        amount /= 1000
    return f"{amount:.3g} T"
