"""What doctor says of GPUs: devices, the row of the table each uses or why none, what keeps them from being used."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.cli.output import Record
from roofline.common.errors import UnsupportedError

if TYPE_CHECKING:
    from roofline.hardware.gpus.device import Device


def examine(root: Path = Path("/")) -> Record:
    """As plain values. torch is not imported: its wheel is looked at. `root` is where /sys, /proc and /dev are."""
    from roofline.hardware.gpus import health as gpu_health
    from roofline.hardware.gpus import inventory as gpus
    from roofline.hardware.gpus import torch_wheel as wheel

    devices = gpus.detect(root, amdsmi=gpus.import_or_none("amdsmi"), pynvml=gpus.import_or_none("pynvml"))
    torch = wheel.installed()
    return {
        "devices": [_facts(device) for device in devices],
        "torch": None if torch is None else asdict(torch),
        "findings": [asdict(finding) for finding in gpu_health.findings(devices, torch, root)],
    }


def _facts(device: "Device") -> Record:
    product = device.product
    facts = {**asdict(device), "id": device.id, "product": product and product.name, "usable": device.usable}
    try:
        chip = device.chip()
    except UnsupportedError as error:
        return {**facts, "chip": None, "status": "refused", "reason": error.reason}
    return {**facts, "chip": chip.name, "status": chip.status, "reason": chip.notes}


def rows(report: Record) -> list[tuple[str, str]]:
    """Lines of doctor's table."""
    devices = [(device["id"], _line(device)) for device in report["devices"]] or [("GPUs", "none")]
    torch = report["torch"]
    built = "not installed" if torch is None else f"{torch['version']} ({torch['platform'] or 'platform not known'})"
    return [*devices, ("torch", built)]


def _line(device: Record) -> str:
    from roofline.common.units import human_bytes

    parts = [device["name"] or device["product"] or f"device {device['code'] or 'of unknown number'}"]
    if device["chip"] is None:
        parts.append(f"{device['arch'] or 'architecture not known'}: refused, {device['reason']}")
    else:
        relative = "" if device["chip"] == device["arch"] else f" as {device['chip']}"
        parts.append(f"{device['arch']}{relative}, kernels {device['status']}")
    if device["memory"] is not None:
        unified = f", {human_bytes(device['usable'])} with the host's" if device["usable"] != device["memory"] else ""
        parts.append(f"{human_bytes(device['memory'])}{unified}")
    return "; ".join(parts)
