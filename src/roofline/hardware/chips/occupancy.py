"""How many programs of a kernel stay on a compute unit or multiprocessor at a time: what hides its waits for memory."""

from dataclasses import dataclass

from roofline.common.errors import ConfigError
from roofline.hardware.chips.chips import Chip


@dataclass(frozen=True)
class Occupancy:
    """programs: that share one local memory (see Chip); waves: of them on each SIMD, on average; share: of the most a
    SIMD holds; bound: what lets no more in: "registers", "local memory", "waves" or "programs"."""

    programs: int
    waves: float
    share: float
    bound: str


def occupancy(chip: Chip, registers: int, warps: int, local_bytes: int = 0) -> Occupancy:
    """How a kernel fits whose threads have that many registers, in programs of `warps` waves with `local_bytes` each.

    As LLVM's AMDGPU backend and CUDA's occupancy calculator count: registers are given out in multiples of
    register_step, a SIMD holds whole waves. LLVM leaves local memory out where it is dynamic, as Triton's is. Raises
    ConfigError for a program that does not fit at all.
    """
    granted = max(-(-registers // chip.register_step), 1) * chip.register_step
    local = local_bytes + chip.local_overhead
    limits = {
        "waves": chip.waves * chip.simds // warps,
        "registers": chip.register_file // granted * chip.simds // warps,
        "local memory": chip.local_total // local if local else chip.programs,
        "programs": chip.programs,
    }
    bound = min(limits, key=lambda name: limits[name])
    programs = limits[bound]
    if programs < 1 or registers > chip.registers or local_bytes > chip.local_bytes:
        raise ConfigError(
            f"a program of {warps} warps with {registers} registers a thread and {local_bytes:,} bytes of local memory "
            f"does not fit {chip.name}: choose smaller tiles"
        )
    waves = programs * warps / chip.simds
    return Occupancy(programs, waves, waves / chip.waves, bound)
