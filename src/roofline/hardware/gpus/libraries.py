"""GPUs as torch, NVML and amdsmi list them. Each function is handed the module, so that made-up ones can test it."""

from collections.abc import Callable
from typing import Any, TypeVar

from roofline.hardware.chips import chips
from roofline.hardware.gpus.device import Device
from roofline.hardware.gpus.sysfs import torch_units

T = TypeVar("T")


def from_torch(torch: Any) -> list[Device]:
    """What torch.cuda can use: NVIDIA's devices with a CUDA wheel, AMD's with a ROCm one, none with a CPU one.

    CUDA_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES hide devices from torch and renumber the others.
    """
    vendor = "amd" if torch.version.hip else "nvidia" if torch.version.cuda else None
    if vendor is None or not torch.cuda.is_available():
        return []
    found = []
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        arch = f"sm_{facts.major}{facts.minor}" if vendor == "nvidia" else chips.architecture(facts.gcnArchName)
        pci = ""
        if hasattr(facts, "pci_bus_id"):
            domain, bus, device = (getattr(facts, f"pci_{part}_id") for part in ("domain", "bus", "device"))
            pci = f"{domain:04x}:{bus:02x}:{device:02x}.0"
        found.append(
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
    return found


def from_nvml(pynvml: Any) -> list[Device]:
    """All that NVIDIA's driver manages, of whatever age; none where the driver is not loaded."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        return [_from_handle(pynvml, handle) for handle in handles]
    except pynvml.NVMLError:  # a device that fell off the bus
        return []
    finally:
        pynvml.nvmlShutdown()


def _from_handle(pynvml: Any, handle: Any) -> Device:
    capability = answer_or_none(pynvml.NVMLError, pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    memory = answer_or_none(pynvml.NVMLError, pynvml.nvmlDeviceGetMemoryInfo, handle)
    return Device(
        "nvidia",
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        arch="sm_{}{}".format(*capability) if capability else "",
        pci=nvml_address(pynvml.nvmlDeviceGetPciInfo(handle)),
        memory=memory.total if memory else None,
        sources=("nvml",),
    )


def nvml_address(info: Any) -> str:
    """PCI address as /sys writes it, of an nvmlPciInfo_t, where the domain has eight digits."""
    domain, _, rest = _text(info.busId).lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def from_amdsmi(amdsmi: Any) -> list[Device]:
    """All that AMD's driver manages; none where it is not loaded."""
    return with_processors(amdsmi, lambda handles: [_from_processor(amdsmi, handle) for handle in handles])


def with_processors(amdsmi: Any, read: Callable[[list[Any]], list[T]]) -> list[T]:
    """What `read` makes of the handles of all processors, the library being open meanwhile; nothing where its driver is
    not loaded, or does not answer."""
    try:
        amdsmi.amdsmi_init()
    except amdsmi.AmdSmiException:
        return []
    try:
        return read(amdsmi.amdsmi_get_processor_handles())
    except amdsmi.AmdSmiException:
        return []
    finally:
        amdsmi.amdsmi_shut_down()


def _from_processor(amdsmi: Any, handle: Any) -> Device:
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


def answer_or_none(error: type[Exception], question: Callable[..., Any], *given: Any) -> Any | None:
    """The answer, None where the library cannot give it for this device."""
    try:
        return question(*given)
    except error:
        return None


def _text(value: str | bytes) -> str:
    """Older bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else value
