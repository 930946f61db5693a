"""What a device reaches through torch alone, independently of our kernels: a copy and a product of matrices."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from roofline.backends.gpu.devices import give_back
from roofline.common.errors import CapacityError
from roofline.common.json_types import JsonObject
from roofline.hardware import roofs as store
from roofline.hardware.roofs import RoofCheck, Roofs, recheck

if TYPE_CHECKING:
    import torch

COPY_BYTES = 2 << 30  # far beyond any cache
SIDES = (4096, 8192, 16384)  # of the square products: which one is fastest differs between chips
SECONDS = 0.25  # of each measurement, so that clocks settle

_LEAST_READ = 32 << 20  # bytes: a launch over fewer takes longer than its reads
_KEPT_READS, _QUICK = (64 << 20, 1 << 30), 0.05  # bytes; seconds of each measurement
_QUEUED = 1 << 30  # bytes read by runs that are queued together
_COPIES = 8  # queued together


@dataclass(frozen=True)
class DeviceRoofs:
    """flops: of bf16 products, a multiply and an add are two; bytes_per_s: read and written by a copy; copied: bytes of
    one copy, both ways; side: of the fastest product; measured: date and time, ISO 8601, UTC."""

    flops: float
    bytes_per_s: float
    copied: int
    side: int
    measured: str

    def record(self) -> JsonObject:
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
    give_back(place)  # what torch keeps for nobody is room
    size = _fitting(copy_bytes, place)
    copy = _copy(size, place, seconds)
    flops, side = _best_product(sides, size, place, seconds)
    give_back(place)  # what this took
    return DeviceRoofs(flops, copy, 2 * size, side, datetime.now(UTC).isoformat(timespec="seconds"))


def measure_op_roofs(
    device: str = "cuda", *, reads: Sequence[int], sides: Sequence[int] = SIDES, seconds: float = SECONDS / 2
) -> Roofs:
    """What ops are priced at: products in bf16 and in float32 (without TF32), and reads of working sets.

    Args:
        device, sides: as in `measure_roofs`. seconds: of each measurement.
        reads: working sets in bytes, ascending. One that a cache holds is read faster, as by a step of that size; the
            faster of a sum over it and a copy inside it counts. What a quarter of the free memory cannot hold is cut.
    """
    import torch

    place = torch.device(device)
    room = _fitting(COPY_BYTES, place)
    with _whole_float32():
        f32 = _product(min(sides), place, seconds, torch.float32)
    sizes = sorted({max(_LEAST_READ, min(size, room)) for size in reads})
    return Roofs(
        int8_ops=None,
        bf16_flops=_best_product(sides, room, place, seconds)[0],
        f32_flops=f32,
        reads=tuple((size, _read(size, place, seconds)) for size in sizes),
        threads=0,
        chip=torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def ensure_op_roofs(device: str, name: str) -> Roofs | None:
    """The roofs kept for devices of that name, measured first where there are none; None where memory is too scarce.

    device: as torch names it. What was measured is kept under ROOFLINE_HOME where that can be written.
    """
    key = _key(name)
    stored = store.load(key, 0, "")
    if stored is not None:
        return stored
    try:
        fresh = measure_op_roofs(device, reads=_KEPT_READS, seconds=_QUICK)
    except CapacityError:
        return None
    give_back(device)  # the device is about to be filled with weights
    store.store(fresh, key)
    return fresh


def recheck_op_roofs(device: str, name: str) -> tuple[Roofs, list[RoofCheck]] | None:
    """The roofs kept for devices of that name, or measured first, and how they compare with a measurement of now: as
    `recheck_roofs` of CPUs. None where memory is too scarce to measure."""
    kept = ensure_op_roofs(device, name)
    if kept is None:
        return None
    sizes = [size for size, _ in kept.reads]
    try:
        raised, checks = recheck(kept, lambda: measure_op_roofs(device, reads=sizes, seconds=_QUICK))
    except CapacityError:
        return None
    give_back(device)
    if any(check.now > check.kept for check in checks):
        store.store(raised, _key(name))
    return raised, checks


def _key(name: str) -> str:
    return "gpu-" + re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")


def link_rate(device: str, nbytes: int = 256 << 20) -> float:
    """Bytes a second that arrive on a device from pinned memory, in copies such as layers take: the best of several."""
    import torch

    place = torch.device(device)
    source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=place.type == "cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, device=place)
    return nbytes / _fastest(lambda: target.copy_(source, non_blocking=True), place, seconds=0.0, least=5)


def _read(size: int, place: "torch.device", seconds: float) -> float:
    """Bytes a second. Runs are queued in numbers that take the device a while, so that launching is not timed."""
    import torch

    times = max(1, _QUEUED // size)
    values = torch.ones(size // 4, dtype=torch.float32, device=place)
    half = values[: values.numel() // 2], values[values.numel() // 2 :][: values.numel() // 2]

    def rate(run: Callable[[], object]) -> float:
        return float(times * size / _fastest(lambda: [run() for _ in range(times)], place, seconds))

    return max(rate(lambda: torch.sum(values)), rate(lambda: half[0].copy_(half[1])))


@contextmanager
def _whole_float32() -> Iterator[None]:
    """Products of float32 with all their digits, as the ops have that are priced by them."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _copy(size: int, place: "torch.device", seconds: float) -> float:
    import torch

    source = torch.empty(size, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)

    def run() -> None:  # several: waiting takes a hundredth of one
        for _ in range(_COPIES):
            target.copy_(source)

    return float(_COPIES * 2 * size / _fastest(run, place, seconds))


def _product(side: int, place: "torch.device", seconds: float, dtype: "torch.dtype | None" = None) -> float:
    import torch

    # Random: zeros draw less power, and clocks stay higher than they do at work.
    a, b = (torch.randn(side, side, dtype=dtype or torch.bfloat16, device=place) for _ in range(2))
    out = torch.empty_like(a)
    return float(2 * side**3 / _fastest(lambda: torch.mm(a, b, out=out), place, seconds))


def _best_product(sides: Sequence[int], size: int, place: "torch.device", seconds: float) -> tuple[float, int]:
    """(operations a second, side) of the fastest product whose three matrices 2 * size bytes hold."""
    fitting = [side for side in sides if 6 * side * side <= 2 * size] or [min(sides)]
    return max((_product(side, place, seconds), side) for side in fitting)


def _fitting(target: int, place: "torch.device") -> int:
    import torch

    if place.type != "cuda":
        return target
    free, size = torch.cuda.mem_get_info(place)[0], target
    while 4 * size > free:
        size //= 2
    if size < 1 << 24:
        raise CapacityError("measuring the device's roofs", 4 << 24, free, "bytes", "Free some of its memory.")
    return size


def _fastest(run: Callable[[], object], place: "torch.device", seconds: float, least: int = 3) -> float:
    """The shortest of the runs that `seconds` hold, `least` or more; each is waited for, one before them not timed."""
    import torch

    def once() -> float:
        start = time.perf_counter()
        run()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        return time.perf_counter() - start

    once()
    times = [once()]
    while len(times) < least or sum(times) < seconds:
        times.append(once())
    return min(times)
