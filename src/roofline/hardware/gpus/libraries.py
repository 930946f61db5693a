"""GPUs as torch, NVML and amdsmi list them. Functions take the module, so that tests can pass a made-up one."""

from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

from roofline.hardware.chips import chips
from roofline.hardware.gpus.device import Device
from roofline.hardware.gpus.sysfs import torch_units

T = TypeVar("T")
Library = ModuleType | None  # the module of a package; None where it is not to be asked


def from_torch(torch: ModuleType) -> list[Device]:
    """What torch.cuda can use: NVIDIA's devices with a CUDA wheel, AMD's with a ROCm one, none with a CPU one.

    CUDA_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES hide devices from torch and renumber the others.
    """
    vendor = "amd" if torch.version.hip else "nvidia" if torch.version.cuda else None
    if vendor is None or not torch.cuda.is_available():
        return []
    devices = []
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        arch = f"sm_{facts.major}{facts.minor}" if vendor == "nvidia" else chips.architecture(facts.gcnArchName)
        pci = ""
        if hasattr(facts, "pci_bus_id"):
            pci = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        devices.append(
            Device(
                vendor,
                name=facts.name,
                arch=arch,
                pci=pci,
                units=facts.multi_processor_count,
                memory=facts.total_memory,
                unified=bool(getattr(facts, "is_integrated", False)),
                torch=number,
                sources=("torch",),
            )
        )
    return devices


def from_nvml(pynvml: ModuleType) -> list[Device]:
    """All that NVIDIA's driver manages, of whatever age; none where the driver is not loaded."""
    return with_nvml(pynvml, lambda handles: [_from_handle(pynvml, handle) for handle in handles])


def with_nvml(pynvml: ModuleType, read: Callable[[list[object]], list[T]]) -> list[T]:
    """What `read` makes of the handles of NVIDIA's devices while NVML is open; nothing where its driver is not loaded,
    or a device does not answer (it fell off the bus)."""

    def read_all() -> list[T]:
        return read([pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())])

    return _in_session(pynvml.NVMLError, pynvml.nvmlInit, read_all, pynvml.nvmlShutdown)


def _from_handle(pynvml: ModuleType, handle: object) -> Device:
    capability = answer_or_none(pynvml.NVMLError, pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    memory = answer_or_none(pynvml.NVMLError, pynvml.nvmlDeviceGetMemoryInfo, handle)
    return Device(
        "nvidia",
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        arch="sm_{}{}".format(*capability) if capability else "",
        pci=nvml_address(pynvml, handle),
        memory=memory.total if memory else None,
        sources=("nvml",),
    )


def nvml_address(pynvml: ModuleType, handle: object) -> str:
    """PCI address of a device as /sys writes it; NVML writes eight digits of the domain."""
    return pci_address(pynvml.nvmlDeviceGetPciInfo(handle).busId)


def pci_address(bus_id: str | bytes) -> str:
    """ "00000000:17:00.0" of an nvmlPciInfo_t -> "0000:17:00.0"."""
    domain, _, bus_address = _text(bus_id).lower().partition(":")
    return f"{int(domain, 16):04x}:{bus_address}"


def from_amdsmi(amdsmi: ModuleType) -> list[Device]:
    """All that AMD's driver manages; none where it is not loaded."""
    return with_amdsmi(amdsmi, lambda handles: [_from_processor(amdsmi, handle) for handle in handles])


def with_amdsmi(amdsmi: ModuleType, read: Callable[[list[object]], list[T]]) -> list[T]:
    """What `read` makes of the handles of AMD's devices while amdsmi is open; nothing where its driver is not loaded,
    or does not answer."""

    def read_all() -> list[T]:
        return read(amdsmi.amdsmi_get_processor_handles())

    return _in_session(amdsmi.AmdSmiException, amdsmi.amdsmi_init, read_all, amdsmi.amdsmi_shut_down)


def _in_session(
    error: type[Exception], start: Callable[[], object], read: Callable[[], list[T]], stop: Callable[[], object]
) -> list[T]:
    try:
        start()
    except error:
        return []
    try:
        return read()
    except error:
        return []
    finally:
        stop()


def _from_processor(amdsmi: ModuleType, handle: object) -> Device:
    error, kinds = amdsmi.AmdSmiException, amdsmi.AmdSmiMemoryType
    facts = answer_or_none(error, amdsmi.amdsmi_get_gpu_asic_info, handle) or {}
    name = facts.get("market_name", "")
    arch = facts.get("target_graphics_version", "")
    arch = arch if chips.family_and_number(arch)[0] else ""
    units = facts.get("num_compute_units")
    return Device(
        "amd",
        name="" if name == "N/A" else name,
        arch=arch,
        pci=amdsmi.amdsmi_get_gpu_device_bdf(handle).lower(),
        units=torch_units(arch, units) if arch and isinstance(units, int) else None,
        memory=answer_or_none(error, amdsmi.amdsmi_get_gpu_memory_total, handle, kinds.VRAM),
        shared=answer_or_none(error, amdsmi.amdsmi_get_gpu_memory_total, handle, kinds.GTT),
        sources=("amdsmi",),
    )


def answer_or_none(error: type[Exception], question: Callable[..., T], *arguments: object) -> T | None:
    """What `question` returns, None where the library cannot answer it for this device (it raises `error`)."""
    try:
        return question(*arguments)
    except error:
        return None


def _text(value: str | bytes) -> str:
    """Older bindings of NVML give bytes."""
    return value.decode() if isinstance(value, bytes) else value
