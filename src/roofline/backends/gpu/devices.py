"""Which GPU a model runs on: one asked for by name or the first, with its row of the table of chips."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roofline.common.errors import UnsupportedError
from roofline.hardware import chips, gpus

if TYPE_CHECKING:
    from roofline.hardware.chips import Chip
    from roofline.hardware.device import Device

AUTO = "auto"


@dataclass(frozen=True)
class Found:
    """A device that torch can use: its number there, what is known of it, its row, and bytes free now."""

    number: int
    device: "Device"
    chip: "Chip"
    free: int


def find(wanted: str = AUTO) -> Found:
    """The device that a name says (`hardware.gpus.select`), or torch's first.

    Raises UnsupportedError where torch or triton is missing, torch sees no GPU or not that one, or its chip is refused;
    ConfigError for a name that no device here has.
    """
    torch = _torch()
    known = gpus.detect(torch=torch, amdsmi=gpus.installed("amdsmi"), pynvml=gpus.installed("pynvml"))
    usable = [device for device in known if device.torch is not None]
    if not usable:
        reason = "torch sees none here; `roofline doctor` says why and what mends it"
        raise UnsupportedError("backend 'gpu'", reason, ("backend cpu",))
    chosen = usable[0] if wanted == AUTO else gpus.select(known, wanted)[0]
    if chosen.torch is None:
        reason = f"this torch cannot use it, only {', '.join(device.id for device in usable)}"
        raise UnsupportedError(f"device {wanted!r}", reason, ("a torch for that vendor",))
    number = int(chosen.torch)
    return Found(number, chosen, chips.resolve(chosen.arch), int(torch.cuda.mem_get_info(number)[0]))


def _torch() -> Any:
    for package in ("torch", "triton"):
        if gpus.installed(package) is None:
            reason = f"{package} is not installed: pip install 'roofline[gpu]'"
            raise UnsupportedError("backend 'gpu'", reason, ("backend cpu",))
    import torch

    return torch
