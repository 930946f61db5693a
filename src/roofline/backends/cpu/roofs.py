"""Measures what this CPU can do at best, independently of our kernels: register-only loops and wide reads."""

import math
from collections.abc import Sequence

from roofline.backends.cpu.select import choose_isa, choose_threads
from roofline.common.units import now_utc
from roofline.hardware import detect
from roofline.hardware import roofs as store
from roofline.hardware.busy import OtherLoad, load_of_others
from roofline.hardware.roofs import BUSY, RoofCheck, Roofs, best_of, highest, recheck

MIB = 1 << 20
# Working sets to read: within a core's own cache, the shared cache, around its edge, and memory.
LOOK_SECONDS = 0.1  # for which other programs are watched before roofs that were measured beside some are used
LEAST_SHARE = 2048  # bytes of a working set that a thread reads at least
READ_SIZES = (1 * MIB, 4 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 100 * MIB, 400 * MIB, 1600 * MIB)


def measure_roofs(
    *, quick: bool = False, threads: int | None = None, isa: str | None = None, reads: Sequence[int] | None = None
) -> Roofs:
    """Measure this chip's roofs. Takes about 4 s, or 0.8 s when `quick` (shorter repeats, no large working sets).

    reads: working sets in bytes to read, ascending; None takes READ_SIZES. What a quarter of the free memory cannot
    hold is left out. Raises UnsupportedError when this chip lacks the ISA named by `isa` or ROOFLINE_ISA.
    """
    from roofline import _native

    threads, isa = choose_threads(threads).value, choose_isa(isa).value
    machine = detect.detect()
    room = _room()
    if reads is None:
        reads = _read_sizes(quick)
    sizes = [size for size in reads if size <= room] or [min(reads[0], room)]
    sizes = [size for size in sizes if size >= threads * LEAST_SHARE] or [threads * LEAST_SHARE]
    seconds, other_load = 0.04 if quick else 0.15, OtherLoad()

    def computes(kind: str) -> float:
        alone = _native.roof_ops(kind, isa, 1, seconds / 2) if threads > 1 else 0.0
        return best_of(lambda: _native.roof_ops(kind, isa, threads, seconds), alone)

    ops = {kind: computes(kind) for kind in ("int8", "bf16", "f32")}

    def reading(size: int) -> float:
        return best_of(lambda: _native.roof_read(size, threads, seconds))

    return Roofs(
        int8_ops=ops["int8"],
        bf16_flops=ops["bf16"],
        f32_flops=ops["f32"],
        reads=tuple((size, reading(size)) for size in sizes),
        threads=threads,
        isa=isa,
        chip=machine.chip,
        measured=now_utc(),
        load=round(other_load.cores(), 2),
    )


def stored_roofs(*, threads: int | None = None, isa: str | None = None) -> Roofs | None:
    """The roofs kept for this machine at these threads and this ISA, None when never measured."""
    fingerprint = detect.detect().fingerprint
    return store.load(fingerprint, choose_threads(threads).value, choose_isa(isa).value)


def ensure_roofs(
    *, quick: bool = False, threads: int | None = None, isa: str | None = None, again: bool = False
) -> Roofs:
    """The stored roofs; measured and stored first when there are none.

    `again` measures once more and keeps the higher of the old and the new figure: a roof is what the chip has
    reached, and a busy machine only ever hides it. So do roofs that were measured beside other programs, once there
    are fewer of these.
    """
    stored = stored_roofs(threads=threads, isa=isa)
    if stored is not None and not again and (stored.load <= BUSY or load_of_others(LOOK_SECONDS) > BUSY):
        return stored
    stored_sizes = () if stored is None else (size for size, _ in stored.reads)  # any of them may be too low
    fresh = measure_roofs(quick=quick, threads=threads, isa=isa, reads=sorted({*_read_sizes(quick), *stored_sizes}))
    roofs = fresh if stored is None else highest(stored, fresh)
    store.store(roofs, detect.detect().fingerprint)
    return roofs


def recheck_roofs(*, threads: int | None = None, isa: str | None = None) -> tuple[Roofs, list[RoofCheck]]:
    """The roofs to divide by, and how the ones that were kept compare with a short measurement of now.

    To be called before a measurement whose results are shares of them. What is higher now counts from now on, and is
    stored. What stays more than AGREEMENT lower after TRIES measurements is in the list as it is: other programs, or a
    slower clock, keep the chip from its roof, and figures of this hour are not to be compared with others.
    """
    kept = ensure_roofs(threads=threads, isa=isa)
    if any(size not in dict(kept.reads) for size in READ_SIZES if size <= _room()):  # a quick measurement was kept
        kept = ensure_roofs(threads=threads, isa=isa, again=True)
    max_bytes = (
        100 * MIB if kept.load <= BUSY else math.inf
    )  # larger ones take long, and may be what other programs hid
    sizes = [size for size, _ in kept.reads if size <= max_bytes and size <= _room()] or [kept.reads[0][0]]
    raised, checks = recheck(kept, lambda: measure_roofs(quick=True, threads=threads, isa=isa, reads=sizes))
    if raised.load < kept.load or any(check.now > check.kept for check in checks):
        store.store(raised, detect.detect().fingerprint)
    return raised, checks


def _room() -> int:
    """Bytes that a working set may have: a quarter of the free memory."""
    return max((detect.detect().memory_available or 512 * MIB) // 4, MIB)


def _read_sizes(quick: bool) -> list[int]:
    return [size for size in READ_SIZES if size <= 100 * MIB or not quick]
