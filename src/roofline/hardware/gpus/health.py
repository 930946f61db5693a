"""What keeps the GPUs of a host from being used, each with the command that corrects it."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from roofline.common.files import text_of
from roofline.hardware.chips import chips
from roofline.hardware.gpus.device import Device
from roofline.hardware.gpus.torch_wheel import PLATFORMS, Wheel

# Below torch's index of wheels: folders for each vendor, of versions that torch >= 2.10 is there for.
_FOLDER = {"amd": "rocm7.1", "nvidia": "cu128"}
_SPOKEN = {"cuda": "for CUDA", "rocm": "for ROCm", "cpu": "for CPUs only", "xpu": "for Intel", "": "of unknown make"}
_AMD_NODES = ("dev/kfd", "dev/dri/renderD*")
_CONTAINER = {
    "amd": "start the container with --device=/dev/kfd --device=/dev/dri --group-add video --group-add render",
    "nvidia": "start the container with --gpus all",
}


@dataclass(frozen=True)
class HealthFinding:
    """cause: what is wrong and what it does; remedy: the command that corrects it."""

    cause: str
    remedy: str


def _may_use(node: Path) -> bool:
    """Whether this user may read and write it, by mode or by the access list that udev gives a user at the screen."""
    return os.access(node, os.R_OK | os.W_OK)


def findings(
    devices: Sequence[Device], wheel: Wheel | None, root: Path = Path("/"), may_use: Callable[[Path], bool] = _may_use
) -> list[HealthFinding]:
    """All that is wrong, the most basic first. Devices that no kernel is compiled for have nothing to mend."""
    served = [device for device in devices if chips.refused(device.arch or device.vendor) is None]
    vendors = list(dict.fromkeys(device.vendor for device in served))
    problems: list[HealthFinding] = []
    if "amd" in vendors:
        problems += _amd_nodes(root, may_use)
    if "nvidia" in vendors and not any("nvml" in device.sources for device in devices):
        problems += _nvidia_driver(root)
    problems += [finding for vendor in vendors for finding in _wheel(vendor, served, wheel)]
    return problems


def _wheel(vendor: str, served: Sequence[Device], wheel: Wheel | None) -> Iterator[HealthFinding]:
    if wheel and wheel.platform == PLATFORMS[vendor]:
        return
    names = ", ".join(device.title for device in served if device.vendor == vendor)
    here = f"torch {wheel.version} is a wheel {_SPOKEN[wheel.platform]}" if wheel else "torch is not installed"
    cause = f"{here}: it cannot use {names}, which needs a wheel {_SPOKEN[PLATFORMS[vendor]]}."
    if wheel and any(PLATFORMS.get(device.vendor) == wheel.platform for device in served):
        cause += " One environment holds one torch: use another for these devices."
    force = "--force-reinstall " if wheel else ""
    remedy = f'pip install {force}torch --index-url "$TORCH_INDEX/{_FOLDER[vendor]}"'
    yield HealthFinding(f"{cause} TORCH_INDEX: where torch's installation page keeps its wheels.", remedy)


def _amd_nodes(root: Path, may_use: Callable[[Path], bool]) -> Iterator[HealthFinding]:
    """The nodes that ROCm opens: amdkfd's and, for each GPU, its render node."""
    closed: dict[str, list[str]] = {}
    for pattern in _AMD_NODES:
        nodes = sorted(root.glob(pattern))
        if not nodes:
            yield _missing(root, "/" + pattern.replace("*", "128"))
        for node in nodes:
            if not may_use(node):
                closed.setdefault(_group(root, node), []).append("/" + str(node.relative_to(root)))
    for group, names in closed.items():
        cause = f"{', '.join(names)} cannot be opened: this user is not in the group {group}."
        if group.isdigit():  # without a name here: a container's /etc/group is not the host's
            yield HealthFinding(cause, f"start the container with --group-add {group}")
        elif group == "root":
            remedy = f"sudo chgrp render {' '.join(names)} && sudo chmod g+rw {' '.join(names)}"
            yield HealthFinding(f"{', '.join(names)} cannot be opened: only root may.", remedy)
        else:
            yield HealthFinding(cause, f"sudo usermod -aG {group} $USER, then log in again")


def _missing(root: Path, node: str) -> HealthFinding:
    if (root / "sys/module/amdgpu").exists():
        return HealthFinding(f"{node} is not there though AMD's driver is loaded.", _CONTAINER["amd"])
    return HealthFinding(f"{node} is not there: AMD's driver is not loaded.", "sudo modprobe amdgpu")


def _group(root: Path, node: Path) -> str:
    """The name of the group that owns a node, its number where the group has no name here."""
    number = str(node.stat().st_gid)
    entries = [line.split(":") for line in (text_of(root / "etc/group") or "").splitlines()]
    return next((entry[0] for entry in entries if len(entry) > 2 and entry[2] == number), number)


def _nvidia_driver(root: Path) -> Iterator[HealthFinding]:
    if not (root / "proc/driver/nvidia/version").exists():
        yield HealthFinding("NVIDIA's driver is not loaded.", "sudo modprobe nvidia, or install the driver")
    elif not (root / "dev/nvidiactl").exists():
        yield HealthFinding("/dev/nvidiactl is not there though NVIDIA's driver is loaded.", _CONTAINER["nvidia"])
