"""The roofs of a latency cell, whatever the device: measured just before and after it, the higher of the two counts."""

from collections.abc import Callable

from roofline.bench.latency.limits import Speed


class Speeds:
    """Measures when made, and again by `best`.

    Args:
        device: "cpu" or "cuda".
        working_set: bytes that a step reads; a CPU's caches make small ones faster.
        threads: of a CPU.
    """

    def __init__(self, device: str, working_set: int, threads: int | None = None) -> None:
        self._measure = _measurer(device, working_set, threads)
        self._before = self._measure()

    def best(self) -> Speed:
        """The higher figure of each roof."""
        before, after = self._before, self._measure()
        faster = max(before.flops, after.flops), max(before.bytes_per_s, after.bytes_per_s)
        return Speed(*faster, after.source)


def _measurer(device: str, working_set: int, threads: int | None) -> Callable[[], Speed]:
    from importlib.util import find_spec

    if device != "cpu" or find_spec("roofline._native") is None:
        return lambda: _by_torch(device)
    return lambda: _by_loops(working_set, threads)


def _by_torch(device: str) -> Speed:
    from roofline.backends.gpu.measure.roofs import measure_roofs

    measured = measure_roofs(device)
    return Speed(measured.flops, measured.bytes_per_s, f"torch: a bf16 product of side {measured.side}, a copy")


def _by_loops(working_set: int, threads: int | None) -> Speed:
    from roofline.backends.cpu.roofs import measure_roofs

    measured = measure_roofs(quick=True, threads=threads, reads=(working_set,))
    reads = measured.read_bytes_per_s(working_set)
    return Speed(
        measured.bf16_flops, reads, f"register-only bf16 loops and reads, {measured.isa}, {measured.threads} threads"
    )
