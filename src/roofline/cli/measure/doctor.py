"""roofline doctor: what this machine is, what it can do at best, which kernels were chosen and why, and its GPUs."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from roofline.cli.options import AsJson, Isa, Threads
from roofline.cli.output import Record, print_json
from roofline.common.options import Option


def command(
    as_json: AsJson = False,
    measure: Annotated[bool, Option("Measure the roofs again (about 4 s).")] = False,
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
    from roofline.bundle.reader import verify
    from roofline.common.units import human_bytes

    manifest = verify(path).manifest
    if as_json:
        facts = {"bundle": str(path), "id": manifest.id, "bytes": manifest.nbytes, "source": dict(manifest.source)}
        print_json(facts)
    else:
        print(f"{path}: whole, {len(manifest.files)} files, {human_bytes(manifest.nbytes)}, made from {manifest.name}")


def examine(measure: bool, threads: int | None, isa: str | None) -> Record:
    """Everything doctor knows, as plain values."""
    import roofline
    from roofline.backends import cpu
    from roofline.backends.cpu.roofs import ensure_roofs
    from roofline.backends.cpu.select import choose_isa, choose_threads
    from roofline.cli.measure import doctor_gpus
    from roofline.common import env, extensions
    from roofline.hardware import detect

    machine = detect.detect()
    return {
        "version": roofline.__version__,
        "machine": {**asdict(machine), "fingerprint": machine.fingerprint},
        "threads": asdict(choose_threads(threads)),
        "isa": asdict(choose_isa(isa)),
        "roofs": asdict(ensure_roofs(threads=threads, isa=isa, again=measure)),
        "kernels": cpu.describe(),
        "gpus": doctor_gpus.examine(),
        "extensions": [asdict(extension) for extension in extensions.load()],
        "environment": env.printable_values(),
    }


def _show(report: Record) -> None:
    from rich.console import Console
    from rich.table import Table

    from roofline.cli.measure import doctor_gpus
    from roofline.common.units import human_bytes, human_rate

    machine, roofs = report["machine"], report["roofs"]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))

    def size(count: int | None) -> str:
        return "not known" if count is None else human_bytes(count)

    table.add_row("chip", f"{machine['chip']} ({machine['vendor']}, {machine['arch']})")
    table.add_row("instruction sets", f"{', '.join(machine['isas'])}; in use: {_choice(report['isa'])}")
    quota = "none" if machine["cpu_quota"] is None else f"{machine['cpu_quota']:.2f}"
    table.add_row(
        "cores",
        f"{machine['cores_online']} online, {machine['cores_allowed']} allowed, quota {quota}; "
        f"threads: {_choice(report['threads'])}",
    )
    limit = "no limit" if machine["memory_limit"] is None else f"limit {human_bytes(machine['memory_limit'])}"
    table.add_row(
        "memory", f"{size(machine['memory_total'])}, {limit}, {size(machine['memory_available'])} available now"
    )
    caches = ", ".join(f"L{c['level']} {human_bytes(c['bytes'])}" for c in machine["caches"])
    table.add_row("caches", caches or "not known")
    table.add_row("NUMA", f"{machine['numa_nodes']} node(s), balancing {_on_off(machine['numa_balancing'])}")
    table.add_row("huge pages", machine["huge_pages"] or "not known")
    for name, field in (("int8", "int8_ops"), ("bf16", "bf16_flops"), ("f32", "f32_flops")):
        table.add_row(f"{name} roof", human_rate(roofs[field], "op"))
    reads = ", ".join(f"{human_bytes(b)}: {human_rate(rate, 'B')}" for b, rate in roofs["reads"])
    table.add_row("read roofs", reads)
    table.add_row("measured", f"{roofs['measured']} with {roofs['threads']} threads, {roofs['isa']}")
    for name, value in report["kernels"].items():
        table.add_row(f"kernels: {name}", _text(value))
    for name, text in doctor_gpus.rows(report["gpus"]):
        table.add_row(name, text)
    loaded = ", ".join(f"{one['name']} ({one['package']})" for one in report["extensions"])
    table.add_row("extensions", loaded or "none")
    for name, value in report["environment"].items():
        table.add_row(name, value or "not set")
    console = Console()
    console.print(table)
    mends = [f"{finding['cause']} Mend: {finding['remedy']}" for finding in report["gpus"]["findings"]]
    for warning in (*machine["warnings"], *mends):
        console.print(f"[bold yellow]warning[/] {warning}")


def _choice(choice: Record) -> str:
    return f"{choice['value']} ({choice['reason']})"


def _on_off(value: bool | None) -> str:
    return {None: "not known", True: "on", False: "off"}[value]


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_text(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(inner) for inner in value)
    return str(value)
