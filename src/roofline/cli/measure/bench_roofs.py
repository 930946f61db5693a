"""roofline bench roofs: what this machine can do at most, measured, kept, and checked again."""

from dataclasses import asdict, dataclass
from math import isfinite
from typing import TYPE_CHECKING, Annotated

from roofline.cli.options import AsJson, Isa, Threads
from roofline.cli.output import console, plain_table, print_json, print_table
from roofline.common.errors import UnsupportedError
from roofline.common.json_types import JsonObject
from roofline.common.options import Option
from roofline.common.units import human_bytes, human_rate
from roofline.hardware.roofs import load_note

if TYPE_CHECKING:
    from roofline.hardware.chips.products import Product
    from roofline.hardware.roofs import RoofCheck, Roofs


@dataclass(frozen=True)
class Measured:
    """The roofs of one device, how they compare with those that were kept, and the product that it is."""

    name: str
    roofs: "Roofs"
    checks: "list[RoofCheck]"
    product: "Product | None"


def command(
    device: Annotated[str, Option("cpu, or GPUs: gpu for all that torch can use, MI300X, amd:0, nvidia, ...")] = "cpu",
    threads: Threads = None,
    isa: Isa = None,
    as_json: AsJson = False,
) -> None:
    """Measure the roofs of this machine, or check those that are kept; print them beside the data sheet.

    Shares in results are of these figures. Kept ones are measured again shortly, and should agree within 5 %.
    """
    measured = [_of_cpu(threads, isa)] if device == "cpu" else _of_gpus(device)
    if as_json:
        print_json({"devices": [_record(device) for device in measured]}, indent=1)
        return
    for each in measured:
        _show(each)


def _of_cpu(threads: int | None, isa: str | None) -> Measured:
    from roofline.backends.cpu.roofs import recheck_roofs
    from roofline.hardware.chips.products import find

    roofs, checks = recheck_roofs(threads=threads, isa=isa)
    return Measured(f"{roofs.chip}, {roofs.threads} threads, {roofs.isa}", roofs, checks, find(roofs.chip))


def _of_gpus(names: str) -> list[Measured]:
    """Raises UnsupportedError and ConfigError where torch can use none of that name, or one has too little memory."""
    from roofline.backends.gpu.devices import choose
    from roofline.backends.gpu.measure.roofs import recheck_op_roofs
    from roofline.hardware.chips.products import find

    measured = []
    for device in choose(None if names == "gpu" else names):
        rechecked = recheck_op_roofs(f"cuda:{device.torch}", device.name)
        if rechecked is None:
            raise UnsupportedError(f"measuring {device.title}", "its memory is full", ("end what uses it",))
        measured.append(Measured(device.title, *rechecked, find(device.name, device.units)))
    if not measured:
        raise UnsupportedError(
            "bench roofs of GPUs", "torch can use none here; `roofline doctor` says why", ("--device cpu",)
        )
    return measured


def _record(measured: Measured) -> JsonObject:
    product, sheet = measured.product, _sheet(measured.product)
    return {
        "name": measured.name,
        "roofs": asdict(measured.roofs),
        "checks": [{**asdict(check), "agrees": check.agrees} for check in measured.checks],
        "data_sheet": None if product is None else {"product": product.name, **sheet},
    }


def _sheet(product: "Product | None") -> dict[str, float | None]:
    """What one device of the product, one die of a package, reaches by its data sheet, as far as the table knows."""
    from roofline.hardware.chips.products import sheet_roofs

    roofs = None if product is None else sheet_roofs(product)
    if roofs is None:
        return {"bf16_flops": None, "bytes_per_s": None}
    return {"bf16_flops": roofs.bf16_flops if isfinite(roofs.bf16_flops) else None, "bytes_per_s": roofs.bytes_per_s}


def _verdict(check: "RoofCheck") -> str:
    return "" if check.agrees else " (raised)" if check.now > check.kept else " (!)"


def _show(measured: Measured) -> None:
    out = console(highlight=False, markup=False)
    roofs, product, sheet = measured.roofs, measured.product, _sheet(measured.product)
    out.print(f"{measured.name}; measured {roofs.measured}")
    now = {check.name: check for check in measured.checks}
    figures = {"bf16": sheet["bf16_flops"], f"reads of {human_bytes(roofs.reads[-1][0])}": sheet["bytes_per_s"]}
    rates = [(name, rate, "op") for name, rate in roofs.computes]
    rates += [(f"reads of {human_bytes(size)}", rate, "B") for size, rate in roofs.reads]
    rows = []
    for name, rate, unit in rates:
        check, figure = now.get(name), figures.get(name)
        rows.append(
            (
                name, human_rate(rate, unit),
                "-" if check is None else human_rate(check.now, unit) + _verdict(check),
                "-" if figure is None else human_rate(figure, unit),
            )
        )  # fmt: skip
    print_table(out, plain_table(("roof", "kept", "now", "data sheet"), rows))
    if note := load_note(roofs.load):
        out.print(note)
    lower = [check.name for check in measured.checks if not check.agrees and check.now < check.kept]
    if lower:
        out.print(
            f"(!) {', '.join(lower)}: more than 5 % below what this device has reached. Other programs or a slower "
            "clock hold it back: wait until it is quiet before measuring."
        )
    if product is None:
        out.print(f"No data sheet: {roofs.chip} is not in the table of products, and no other chip's figures are used.")
    else:
        sources = dict.fromkeys(figure.source for figure in (product.bf16, product.bandwidth) if figure is not None)
        out.print(f"data sheet of {product.name}: {'; '.join(sources) or 'no figure is sure'}")
