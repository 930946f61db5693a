"""A driver of a chip that is not here: Triton compiles for it as a launch would, and launches do nothing.

For processes of their own: Triton has one driver a process.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from roofline.hardware.chips.chips import Chip

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget


class AbsentDriver:
    """What Triton asks a driver for. The chip's name is the device's number, under which Triton keeps binaries."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self.utils = self  # its methods are those below that take a device's name

    def get_current_target(self) -> "GPUTarget":
        return target(self.chip)

    def get_current_device(self) -> str:
        return self.chip.name

    def get_current_stream(self, device: str) -> int:
        return 0

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        return lambda *arguments: None

    def get_device_properties(self, device: str) -> dict[str, int]:
        return {"max_shared_mem": self.chip.local_bytes}

    def load_binary(self, name: str, binary: bytes, shared: int, device: str) -> tuple[None, None, int, int, int]:
        return None, None, 0, 0, 1024  # module, function, registers, spills, most threads of a program


def target(chip: Chip) -> "GPUTarget":
    """Triton's name of a chip, as its driver gives it on that chip."""
    from triton.backends.compiler import GPUTarget

    if chip.vendor == "amd":
        return GPUTarget("hip", chip.name, chip.lanes)
    return GPUTarget("cuda", int(chip.name.removeprefix("sm_")), chip.lanes)


def install(chip: Chip) -> None:
    """Make it this process's driver. Raises RuntimeError under TRITON_INTERPRET."""
    import triton
    from triton.runtime import driver

    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted in this process, and cannot be compiled")
    driver.set_active(AbsentDriver(chip))


def record_requests() -> dict[str, bool]:
    """Key of each binary that launches ask Triton's compiler for from now on -> whether it lay in the cache."""
    import triton

    requests: dict[str, bool] = {}

    def listen(*, metadata: dict[str, str], cache_hit: bool, **rest: object) -> None:
        requests.setdefault(metadata["hash"], cache_hit)

    triton.knobs.compilation.listener = listen
    return requests
