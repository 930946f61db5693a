"""What a device reaches through torch alone, independently of our kernels: a copy and a product of matrices."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from roofline.common.errors import CapacityError

if TYPE_CHECKING:
    import torch

COPY_BYTES = 2 << 30  # far beyond any cache
SIDES = (4096, 8192, 16384)  # of the square products: which one is fastest differs between chips
SECONDS = 0.25  # of each measurement, so that clocks settle


@dataclass(frozen=True)
class DeviceRoofs:
    """flops: of bf16 products, a multiply and an add are two; bytes_per_s: read and written by a copy; copied: bytes of
    one copy, both ways; side: of the fastest product; measured: date and time, ISO 8601, UTC."""

    flops: float
    bytes_per_s: float
    copied: int
    side: int
    measured: str

    def record(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def measure_roofs(
    device: str = "cuda", *, copy_bytes: int = COPY_BYTES, sides: Sequence[int] = SIDES, seconds: float = SECONDS
) -> DeviceRoofs:
    """Measure a device in this process. Takes about `seconds` for each size.

    Args:
        device: as torch names it.
        copy_bytes: of the source; what a quarter of the device's free memory cannot hold is halved until it can.
        sides: of square bf16 products. seconds: how long each is repeated; the fastest repeat counts.

    Raises CapacityError where not even a small copy fits.
    """
    import torch

    place = torch.device(device)
    size = _fitting(copy_bytes, place)
    copy = _copy(size, place, seconds)
    fitting = [side for side in sides if 6 * side * side <= 2 * size] or [min(sides)]  # three matrices
    best = max((_product(side, place, seconds), side) for side in fitting)
    if place.type == "cuda":
        torch.cuda.empty_cache()  # what was held for this is others' again
    return DeviceRoofs(best[0], copy, 2 * size, best[1], datetime.now(UTC).isoformat(timespec="seconds"))


def _copy(size: int, place: "torch.device", seconds: float) -> float:
    import torch

    source = torch.empty(size, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    return float(2 * size / _fastest(lambda: target.copy_(source), place, seconds))


def _product(side: int, place: "torch.device", seconds: float) -> float:
    import torch

    # Random: zeros draw less power, and clocks stay higher than they do at work.
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=place) for _ in range(2))
    out = torch.empty_like(a)
    return float(2 * side**3 / _fastest(lambda: torch.mm(a, b, out=out), place, seconds))


def _fitting(wanted: int, place: "torch.device") -> int:
    import torch

    if place.type != "cuda":
        return wanted
    free = torch.cuda.mem_get_info(place)[0]
    size = wanted
    while 4 * size > free:
        size //= 2
    if size < 1 << 24:
        raise CapacityError("measuring the device's roofs", 4 << 24, free, "bytes", "Free some of its memory.")
    return size


def _fastest(run: Any, place: "torch.device", seconds: float) -> float:
    """The shortest of the runs that `seconds` hold, at least three; each is waited for."""
    import torch

    def once() -> float:
        start = time.perf_counter()
        run()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        return time.perf_counter() - start

    once()
    times = [once()]
    while len(times) < 3 or sum(times) < seconds:
        times.append(once())
    return min(times)
