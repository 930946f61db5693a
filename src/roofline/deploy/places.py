"""What of this machine each replica of a fleet has: cores, or devices by name."""

from dataclasses import replace
from pathlib import Path

from roofline.backends.options import LoadOptions
from roofline.bundle.replicas import divided
from roofline.common.errors import CapacityError
from roofline.hardware.gpus import inventory
from roofline.hardware.gpus.device import Device

COUNTS = (8, 4, 2, 1)  # of replicas that `auto` chooses from


def gpu_devices(load: LoadOptions) -> tuple[Device, ...]:
    """Return the devices that `load` names, or all, found without torch, which only a replica imports."""
    amdsmi, pynvml = inventory.import_or_none("amdsmi"), inventory.import_or_none("pynvml")
    devices = inventory.detect(amdsmi=amdsmi, pynvml=pynvml)
    return devices if load.device == "auto" else inventory.select(devices, load.device)


def replica_places(load: LoadOptions, count: int) -> list[tuple[LoadOptions, list[int]]]:
    """Return for each of so many replicas its options of loading, and the cores that it keeps to (none: any).

    Raises CapacityError where there are fewer cores or devices than they need.
    """
    if load.backend != "gpu":
        places = divided(load, count)
        threads = [place.options["threads"] for place in places]
        return [
            (replace(load, threads=share if isinstance(share, int) else None), place.cores)
            for share, place in zip(threads, places, strict=True)
        ]
    devices, size = gpu_devices(load), load.ranks
    if len(devices) < count * size:
        remedy = f"Give --replicas {len(devices) // size}, or name more devices."
        raise CapacityError(f"replicas={count} of {size} devices", count * size, len(devices), "devices", remedy)
    names = [",".join(device.id for device in devices[at * size : (at + 1) * size]) for at in range(count)]
    return [(replace(load, device=device_names), []) for device_names in names]


def automatic_count(load: LoadOptions, root: Path = Path("/")) -> int:
    """Return how many replicas `auto` means: one for each group of devices, or for each NUMA node of a host, and two at
    least where there are threads for two: one is then up while the other is restarted."""
    if load.backend == "gpu":
        limit = max(1, len(gpu_devices(load)) // load.ranks)
    else:
        from roofline.backends.cpu.select import choose_threads

        threads = int(choose_threads(load.threads).value)
        nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
        limit = max(1, min(threads // load.ranks, max(2, nodes)))
    return next(count for count in COUNTS if count <= limit)
