"""The links between this host's devices, from what the kernel, amdsmi and NVML report."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from roofline.hardware.gpus.device import Device
from roofline.hardware.gpus.libraries import Library, answer_or_none, nvml_address, pci_address, with_amdsmi, with_nvml
from roofline.hardware.gpus.sysfs import kfd_address, kfd_nodes, properties
from roofline.hardware.links import topology

_XGMI = 11  # KFD's type of such a link (CRAT_IOLINK_TYPE_XGMI)
Pair = tuple[int, int, float, str]  # two devices' numbers, bytes a second in one direction, kind of link


def detect(
    devices: Sequence[Device], root: Path = Path("/"), amdsmi: Library = None, pynvml: Library = None
) -> topology.Links:
    """The matrix of these devices, in their order. Pairs of which no source reports a link have none.

    root: where /sys is looked for; amdsmi, pynvml: see `inventory.import_or_none`.
    """
    pairs = list(from_kfd(root, devices))
    if amdsmi is not None:
        pairs += from_amdsmi(amdsmi, devices)
    if pynvml is not None:
        pairs += from_nvml(pynvml, devices)
    dies = [device.product.dies if device.product else 1 for device in devices]
    return topology.links_from_pairs([device.id for device in devices], pairs, dies=dies)


def _numbers(devices: Sequence[Device], vendor: str) -> dict[tuple[str, int], int]:
    """(PCI address, which of the devices at that address: partitions share one) -> a device's number."""
    counts: dict[str, int] = {}
    numbers = {}
    for number, device in enumerate(devices):
        if device.vendor == vendor and device.pci:
            at_address = counts.get(device.pci, 0)
            numbers[device.pci, at_address] = number
            counts[device.pci] = at_address + 1
    return numbers


def _places(addresses: Sequence[str], numbers: dict[tuple[str, int], int]) -> list[int | None]:
    """The numbers of the devices that a source lists, None for one that is not among ours."""
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


def from_amdsmi(amdsmi: ModuleType, devices: Sequence[Device]) -> list[Pair]:
    """XGMI links from AMD's library, which gives a rate for pairs that XGMI joins directly and for no other."""

    def read_pairs(handles: list[object]) -> list[Pair]:
        error, question = amdsmi.AmdSmiException, amdsmi.amdsmi_get_minmax_bandwidth_between_processors
        addresses = [amdsmi.amdsmi_get_gpu_device_bdf(handle).lower() for handle in handles]
        places = list(zip(handles, _places(addresses, _numbers(devices, "amd")), strict=True))
        pairs = []
        for one, a in places:
            for other, b in places:
                if a is not None and b is not None and a < b:
                    rate = answer_or_none(error, question, one, other) or {}
                    pairs.append((a, b, rate.get("max_bandwidth", 0) * 1e6, "xgmi"))
        return pairs

    return with_amdsmi(amdsmi, read_pairs)


def from_nvml(pynvml: ModuleType, devices: Sequence[Device]) -> list[Pair]:
    """NVLinks: those between two devices added up; a device's links to NVSwitches serve all the others on them."""

    def read_pairs(handles: list[object]) -> list[Pair]:
        numbers = _numbers(devices, "nvidia")
        places = _places([nvml_address(pynvml, handle) for handle in handles], numbers)
        pairs: list[Pair] = []
        ports: dict[int, float] = {}
        for handle, place in zip(handles, places, strict=True):
            if place is None:
                continue
            rates = _nvlinks(pynvml, handle)
            ports[place] = rates.pop("", 0.0)
            pairs += [(place, numbers[pci, 0], rate, "nvlink") for pci, rate in rates.items() if (pci, 0) in numbers]
        pairs += [(a, b, min(ports[a], ports[b]), "switch") for a in ports for b in ports if a < b and ports[a] > 0]
        return pairs

    return with_nvml(pynvml, read_pairs)


def _nvlinks(pynvml: ModuleType, handle: object) -> dict[str, float]:
    """Bytes a second in one direction by the address of what is at the other end, "" for all NVSwitches together."""
    error = pynvml.NVMLError
    speed = [pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
    values = answer_or_none(error, pynvml.nvmlDeviceGetFieldValues, handle, speed)
    if not values or values[0].nvmlReturn:
        return {}
    link_rate, rates = values[0].value.uiVal * 1e6, dict[str, float]()
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        if answer_or_none(error, pynvml.nvmlDeviceGetNvLinkState, handle, link) != pynvml.NVML_FEATURE_ENABLED:
            continue
        kind = answer_or_none(error, pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        remote = answer_or_none(error, pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            rates[""] = rates.get("", 0.0) + link_rate
        elif remote is not None:
            address = pci_address(remote.busId)
            rates[address] = rates.get(address, 0.0) + link_rate
    return rates
