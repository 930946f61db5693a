"""The devices that torch can use here, under the names that the host knows them by."""

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roofline.common.errors import CapacityError, UnsupportedError
from roofline.hardware.chips.chips import Chip
from roofline.hardware.gpus import inventory as gpus
from roofline.hardware.gpus import torch_wheel as wheel
from roofline.hardware.gpus.device import Device
from roofline.hardware.gpus.torch_wheel import PLATFORMS

if TYPE_CHECKING:
    import torch

AUTO = "auto"


@dataclass(frozen=True)
class UsableDevice:
    """A device to run on: torch's number of it, what is known of it, the row its kernels use, and bytes free now."""

    number: int
    device: Device
    chip: Chip
    free: int

    @property
    def torch_name(self) -> str:
        """What torch calls it."""
        return f"cuda:{self.number}"


def find(names: str = AUTO, rank: int = 0, ranks: int = 1) -> UsableDevice:
    """The one device that a model runs on: by name as `choose` takes it, or the first that torch can use.

    ranks: of so many processes that run it together, each with a device of its own, all of one chip, in the order of
    the names; rank: the one whose device is wanted.

    Raises UnsupportedError too where torch or triton is missing, torch sees no GPU at all, or ranks would have
    different chips; CapacityError where there are fewer devices than ranks.
    """
    devices = _usable(names)
    import torch

    if len(devices) < ranks:
        remedy = f"Lower tensor_parallel or pipeline_parallel to {len(devices)} in all, or name more devices."
        raise CapacityError(f"a model on {ranks} ranks", ranks, len(devices), "devices", remedy)
    if len({device.arch for device in devices[:ranks]}) > 1:
        kinds = ", ".join(f"{device.id} is {device.arch}" for device in devices[:ranks])
        raise UnsupportedError("ranks on different chips", kinds, ("device=... with devices of one kind",))
    device = devices[rank]
    assert device.torch is not None, "choose gives devices that torch sees"
    give_back(f"cuda:{device.torch}")  # what an earlier model left with torch is free
    return UsableDevice(device.torch, device, device.chip(), int(torch.cuda.mem_get_info(device.torch)[0]))


def give_back(device: "torch.device | str") -> None:
    """Have torch give memory that nobody uses back to the device: what it keeps looks taken to whoever asks how much
    is free, be it the next model."""
    import torch

    if torch.device(device).type == "cuda":
        gc.collect()  # an exception's traceback, or a cycle, may still hold tensors
        torch.cuda.empty_cache()


def group(names: str, number: int, groups: int, size: int = 1) -> str:
    """The names, as `find` takes them, of the number-th of so many groups of `size` devices, in the order of the names.

    Raises CapacityError where there are fewer devices than the groups need; else as `find`.
    """
    devices = _usable(names)
    if len(devices) < groups * size:
        replica_count = len(devices) // size
        ranks = f" of {size} ranks" if size > 1 else ""
        remedy = f"Lower it to {replica_count}, or name more devices." if replica_count else "Name more devices."
        raise CapacityError(f"data_parallel={groups}{ranks}", groups * size, len(devices), "devices", remedy)
    return ",".join(device.id for device in devices[number * size : (number + 1) * size])


def _usable(names: str) -> tuple[Device, ...]:
    """What a text names, at least one. Raises UnsupportedError, also where torch or triton is missing."""
    for package in ("torch", "triton"):
        if gpus.import_or_none(package) is None:
            reason = f"{package} is not installed: pip install 'roofline[gpu]'"
            raise UnsupportedError("backend 'gpu'", reason, ("backend cpu",))
    devices = choose(None if names == AUTO else names)
    if not devices:
        reason = "torch can use none here; `roofline doctor` says why and what mends it"
        raise UnsupportedError("backend 'gpu'", reason, ("backend cpu",))
    return devices


def choose(names: str | None = None) -> tuple[Device, ...]:
    """The devices that a text names (see hardware.gpus.select), None: all that torch sees and kernels are compiled for.

    Of every device given back torch knows the number (`Device.torch`), and `Device.chip` gives a row. Raises
    ConfigError where the text names none, UnsupportedError where torch does not see one, or no kernel is compiled for
    it, with the reason.
    """
    import torch

    there = gpus.detect(torch=torch, amdsmi=gpus.import_or_none("amdsmi"), pynvml=gpus.import_or_none("pynvml"))
    if names is None:
        return tuple(device for device in there if device.torch is not None and _served(device))
    chosen = gpus.select(there, names)
    for device in chosen:
        device.chip()
        if device.torch is None:
            raise UnsupportedError(device.title, _hidden(device), ("the cpu backend",))
    return chosen


def _served(device: Device) -> bool:
    try:
        device.chip()
    except UnsupportedError:
        return False
    return True


def _hidden(device: Device) -> str:
    """Why torch does not see it."""
    built = wheel.installed()
    if built is not None and built.platform != PLATFORMS[device.vendor]:
        wheel_text = f"torch {built.version} is a wheel for {built.platform or 'unknown devices'}"
        return f"{wheel_text}, not for {PLATFORMS[device.vendor]}; `roofline doctor` prints the command that mends it"
    variable = "HIP_VISIBLE_DEVICES" if device.vendor == "amd" else "CUDA_VISIBLE_DEVICES"
    return f"torch does not see it: {variable} hides it, or this user may not open it (see `roofline doctor`)"
