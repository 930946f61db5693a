"""load(backend="gpu") on Triton's interpreter: a device that is none, with as much memory as a test wants."""

from roofline.backends.gpu import devices
from roofline.backends.gpu.measure import roofs
from roofline.hardware.chips import chips
from roofline.hardware.gpus.device import Device
from roofline.hardware.roofs import Roofs


class Interpreted(devices.UsableDevice):
    """CPU tensors in the place of the device's."""

    torch_name = "cpu"


def pretend(monkeypatch, memory=1 << 27):
    """From now on the device found is one of that many bytes."""
    device = Device("nvidia", 0, "a pretended GPU", "sm_90", memory=memory, torch=0)
    found = Interpreted(0, device, chips.get("sm_90"), memory)
    monkeypatch.setattr(devices, "find", lambda *_wanted: found)
    limits = Roofs(None, 1e12, 1e11, ((1 << 30, 1e11),), threads=0, chip=device.name)
    monkeypatch.setattr(roofs, "ensure_op_roofs", lambda *_device: limits)
