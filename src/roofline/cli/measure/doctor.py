"""roofline doctor: what this machine is, what it can do at best, which kernels were chosen and why, and its GPUs."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.cli.options import AsJson, Isa, Threads
from roofline.cli.output import console, plain_table, print_json
from roofline.common.errors import ConfigError, RooflineError, UnsupportedError
from roofline.common.json_types import JsonObject
from roofline.common.options import Option
from roofline.common.units import human_bytes, human_rate
from roofline.hardware.roofs import load_note

if TYPE_CHECKING:
    from roofline.hardware.gpus.device import Device


def command(
    as_json: AsJson = False,
    measure: Annotated[
        bool, Option("Measure the roofs again (about 4 s), as after they were measured on a busy machine.")
    ] = False,
    verify: Annotated[Path | None, Option("Only compare every hash of the bundle in this directory.")] = None,
    threads: Threads = None,
    isa: Isa = None,
) -> None:
    """Describe chip, cores, limits, measured roofs and GPUs, with the command that mends each thing found wrong."""
    if verify is not None:
        _verify(verify, as_json)
        return
    report = examine(measure, threads, isa)
    print_json(report, indent=1) if as_json else _show(report)


def _verify(path: Path, as_json: bool) -> None:
    from roofline.bundle.reader import is_bundle
    from roofline.bundle.weights_checks import verify

    if not is_bundle(path):
        raise ConfigError(_no_bundle(path))
    manifest = verify(path).manifest
    if as_json:
        facts = {"bundle": str(path), "id": manifest.id, "bytes": manifest.nbytes, "source": dict(manifest.source)}
        print_json(facts)
    else:
        print(f"{path}: whole, {len(manifest.files)} files, {human_bytes(manifest.nbytes)}, made from {manifest.name}")


def _no_bundle(path: Path) -> str:
    from roofline.bundle import bundle_cache
    from roofline.weights import sources

    if path.exists():
        return f"{path} is no bundle; `roofline list --json` has the directories of those in the cache"
    name = str(path)
    try:
        stored = sources.stored_path(name)
    except RooflineError:
        return f"{path}: there is no such directory, nor a model of this name"
    sought = stored and stored.resolve()
    places = [str(entry.path) for entry in bundle_cache.entries() if sought and entry.source == sought]
    bundles = f"its bundle is {' or '.join(places)}" if places else "no bundle of it is in the cache"
    return f"{name} is the name of a model, --verify takes the directory of a bundle: {bundles}"


def examine(measure: bool, threads: int | None, isa: str | None) -> JsonObject:
    """Everything doctor knows, as plain values."""
    import roofline
    from roofline.backends.cpu.roofs import ensure_roofs
    from roofline.backends.cpu.select import choose_isa, choose_threads, describe
    from roofline.bundle.weights_checks import outcomes
    from roofline.common import env, extensions
    from roofline.hardware import detect

    machine = detect.detect()
    return {
        "version": roofline.__version__,
        "machine": {**asdict(machine), "fingerprint": machine.fingerprint},
        "threads": asdict(choose_threads(threads)),
        "isa": asdict(choose_isa(isa)),
        "roofs": asdict(ensure_roofs(threads=threads, isa=isa, again=measure)),
        "kernels": describe(),
        "gpus": examine_gpus(),
        "weights": [asdict(outcome) for outcome in outcomes()],
        "extensions": [asdict(extension) for extension in extensions.load()],
        "environment": env.printable_values(),
    }


def _show(report: JsonObject) -> None:

    machine, roofs = report["machine"], report["roofs"]

    def size(count: int | None) -> str:
        return "not known" if count is None else human_bytes(count)

    cores = f"{machine['cores_online']} online, {machine['cores_allowed']} allowed"
    quota = "none" if machine["cpu_quota"] is None else f"{machine['cpu_quota']:.2f}"
    limit = "no limit" if machine["memory_limit"] is None else f"limit {human_bytes(machine['memory_limit'])}"
    caches = ", ".join(f"L{c['level']} {human_bytes(c['bytes'])}" for c in machine["caches"])
    balancing = {None: "not known", True: "on", False: "off"}[machine["numa_balancing"]]
    computes = (("int8", "int8_ops"), ("bf16", "bf16_flops"), ("f32", "f32_flops"))
    loaded = ", ".join(f"{one['name']} ({one['package']})" for one in report["extensions"])
    rows = [
        ("chip", f"{machine['chip']} ({machine['vendor']}, {machine['arch']})"),
        ("instruction sets", f"{', '.join(machine['isas'])}; in use: {_choice(report['isa'])}"),
        ("cores", f"{cores}, quota {quota}; threads: {_choice(report['threads'])}"),
        ("memory", f"{size(machine['memory_total'])}, {limit}, {size(machine['memory_available'])} available now"),
        ("caches", caches or "not known"),
        ("NUMA", f"{machine['numa_nodes']} node(s), balancing {balancing}"),
        ("huge pages", machine["huge_pages"] or "not known"),
        *((f"{name} roof", human_rate(roofs[field], "op")) for name, field in computes),
        ("read roofs", ", ".join(f"{human_bytes(b)}: {human_rate(rate, 'B')}" for b, rate in roofs["reads"])),
        ("measured", f"{roofs['measured']} with {roofs['threads']} threads, {roofs['isa']}; again: doctor --measure"),
        *((f"kernels: {name}", _text(value)) for name, value in report["kernels"].items()),
        *gpu_rows(report["gpus"]),
        *((f"weights: {Path(one['bundle']).name}", _weights_line(one)) for one in report["weights"]),
        ("extensions", loaded or "none"),
        *((name, value or "not set") for name, value in report["environment"].items()),
    ]
    from rich.markup import escape

    out = console()
    out.print(plain_table((), rows, show_header=False, padding=(0, 2, 0, 0)))
    mends = [f"{finding['cause']} Mend: {finding['remedy']}" for finding in report["gpus"]["findings"]]
    changed = [one["problem"] for one in report["weights"] if one["problem"]]
    busy = [note for note in [load_note(roofs.get("load", 0.0))] if note]
    for warning in (*machine["warnings"], *busy, *changed, *mends):
        out.print(f"[bold yellow]warning[/] {escape(warning)}")


def _weights_line(outcome: JsonObject) -> str:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(outcome["time"]))
    return f"{'CHANGED since they were written' if outcome['problem'] else 'as they were written'}, compared {when}"


def _choice(choice: JsonObject) -> str:
    return f"{choice['value']} ({choice['reason']})"


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_text(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(inner) for inner in value)
    return str(value)


def examine_gpus(root: Path = Path("/")) -> JsonObject:
    """The GPUs, and what keeps them from being used, as plain values. torch is not imported: its wheel is looked at.

    root: where /sys, /proc and /dev are.
    """
    from roofline.hardware.gpus import health as gpu_health
    from roofline.hardware.gpus import inventory as gpus
    from roofline.hardware.gpus import torch_wheel as wheel

    devices = gpus.detect(root, amdsmi=gpus.import_or_none("amdsmi"), pynvml=gpus.import_or_none("pynvml"))
    torch = wheel.installed()
    return {
        "devices": [_gpu_facts(device) for device in devices],
        "torch": None if torch is None else asdict(torch),
        "findings": [asdict(finding) for finding in gpu_health.findings(devices, torch, root)],
    }


def _gpu_facts(device: "Device") -> JsonObject:
    product = device.product
    facts = {**asdict(device), "id": device.id, "product": product and product.name, "usable": device.usable}
    try:
        chip = device.chip()
    except UnsupportedError as error:
        return {**facts, "chip": None, "status": "refused", "reason": error.reason}
    return {**facts, "chip": chip.name, "status": chip.status, "reason": chip.notes}


def gpu_rows(report: JsonObject) -> list[tuple[str, str]]:
    """The lines of doctor's table about GPUs: each with the kernels it uses or why none, then torch."""
    devices = [(device["id"], _gpu_line(device)) for device in report["devices"]] or [("GPUs", "none")]
    torch = report["torch"]
    built = "not installed" if torch is None else f"{torch['version']} ({torch['platform'] or 'platform not known'})"
    return [*devices, ("torch", built)]


def _gpu_line(device: JsonObject) -> str:
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
