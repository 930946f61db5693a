"""The links of this host's devices, from what the kernel, amdsmi and NVML say of them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from roofline.hardware.gpus.device import Device
from roofline.hardware.gpus.libraries import answer_or_none, nvml_address, with_processors
from roofline.hardware.gpus.sysfs import kfd_address, kfd_nodes, properties
from roofline.hardware.links import topology

_XGMI = 11  # KFD's type of such a link (CRAT_IOLINK_TYPE_XGMI)
Pair = tuple[int, int, float, str]


def detect(devices: Sequence[Device], root: Path = Path("/"), amdsmi: Any = None, pynvml: Any = None) -> topology.Links:
    """The matrix of these devices, in their order. Pairs that nobody tells of have no link.

    root: where /sys is looked for; amdsmi, pynvml: the modules, None where they are not to be asked.
    """
    pairs = list(from_kfd(root, devices))
    if amdsmi is not None:
        pairs += from_amdsmi(amdsmi, devices)
    if pynvml is not None:
        pairs += from_nvml(pynvml, devices)
    dies = [device.product.dies if device.product else 1 for device in devices]
    return topology.links_from_pairs([device.id for device in devices], pairs, dies=dies)


def _numbers(devices: Sequence[Device], vendor: str) -> dict[tuple[str, int], int]:
    """A device's place among `devices` by its address and which of that address it is: partitions share one."""
    seen: dict[str, int] = {}
    found = {}
    for number, device in enumerate(devices):
        if device.vendor == vendor and device.pci:
            found[device.pci, seen.get(device.pci, 0)] = number
            seen[device.pci] = seen.get(device.pci, 0) + 1
    return found


def _places(addresses: Sequence[str], numbers: dict[tuple[str, int], int]) -> list[int | None]:
    """The numbers of what a source lists, None for what is not among the devices."""
    return [numbers.get((address, addresses[:at].count(address))) for at, address in enumerate(addresses)]


def from_kfd(root: Path, devices: Sequence[Device]) -> Iterator[Pair]:
    """XGMI links as amdkfd counts them: 50 GB/s in one direction for each of up to four between two dies of MI200."""
    nodes = kfd_nodes(root)
    addresses = [kfd_address(properties(folder / "properties")) for folder in nodes.values()]
    places = dict(zip(nodes, _places(addresses, _numbers(devices, "amd")), strict=True))
    for folder in nodes.values():
        for file in sorted(folder.glob("*_links/*/properties")):  # io_links, and p2p_links of newer kernels
            link = properties(file)
            a, b = places.get(link.get("node_from", -1)), places.get(link.get("node_to", -1))
            if link.get("type") == _XGMI and a is not None and b is not None:
                yield a, b, link.get("max_bandwidth", 0) * 1e6, "xgmi"


def from_amdsmi(amdsmi: Any, devices: Sequence[Device]) -> list[Pair]:
    """The same from AMD's library, which gives a rate for pairs that XGMI joins directly and for no other."""

    error = amdsmi.AmdSmiException

    def read_pairs(handles: list[Any]) -> list[Pair]:
        addresses = [amdsmi.amdsmi_get_gpu_device_bdf(handle).lower() for handle in handles]
        known = [
            (handle, place)
            for handle, place in zip(handles, _places(addresses, _numbers(devices, "amd")), strict=True)
            if place is not None
        ]
        found = []
        for one, a in known:
            for other, b in known:
                if a < b:
                    rate = answer_or_none(error, amdsmi.amdsmi_get_minmax_bandwidth_between_processors, one, other)
                    found.append((a, b, (rate or {}).get("max_bandwidth", 0) * 1e6, "xgmi"))
        return found

    return with_processors(amdsmi, read_pairs)


def from_nvml(pynvml: Any, devices: Sequence[Device]) -> list[Pair]:
    """NVLinks: those between two devices added up; a device's links to NVSwitches serve all the others on them."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        numbers = _numbers(devices, "nvidia")
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        places = _places([nvml_address(pynvml.nvmlDeviceGetPciInfo(handle)) for handle in handles], numbers)
        found: list[Pair] = []
        ports: dict[int, float] = {}
        for handle, place in zip(handles, places, strict=True):
            if place is None:
                continue
            rates = _nvlinks(pynvml, handle)
            ports[place] = rates.pop("", 0.0)
            found += [(place, numbers[pci, 0], rate, "nvlink") for pci, rate in rates.items() if (pci, 0) in numbers]
        found += [(a, b, min(ports[a], ports[b]), "switch") for a in ports for b in ports if a < b and ports[a] > 0]
        return found
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _nvlinks(pynvml: Any, handle: Any) -> dict[str, float]:
    """Bytes a second in one direction by the address of what is at the other end, "" for all NVSwitches together."""
    error = pynvml.NVMLError
    values = answer_or_none(
        error, pynvml.nvmlDeviceGetFieldValues, handle, [pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
    )
    if not values or values[0].nvmlReturn:
        return {}
    each, rates = values[0].value.uiVal * 1e6, dict[str, float]()
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        if answer_or_none(error, pynvml.nvmlDeviceGetNvLinkState, handle, link) != pynvml.NVML_FEATURE_ENABLED:
            continue
        kind = answer_or_none(error, pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        remote = answer_or_none(error, pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            rates[""] = rates.get("", 0.0) + each
        elif remote is not None:
            address = nvml_address(remote)
            rates[address] = rates.get(address, 0.0) + each
    return rates
