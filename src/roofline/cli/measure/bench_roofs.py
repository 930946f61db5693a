"""roofline bench roofs: what this machine can do at most, measured, kept, and checked again."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from roofline.cli.options import AsJson, Isa, Threads
from roofline.cli.output import console, plain_table, print_json
from roofline.common.json_types import JsonObject
from roofline.common.units import human_bytes, human_rate

if TYPE_CHECKING:
    from roofline.hardware.chips.products import Product
    from roofline.hardware.roofs import RoofCheck, Roofs


def command(threads: Threads = None, isa: Isa = None, as_json: AsJson = False) -> None:
    """Measure the roofs of this machine's CPU, or check those that are kept; print them beside its data sheet.

    Shares in results are of these figures. Kept ones are measured again shortly, and should agree within 5 %.
    """
    from roofline.backends.cpu.roofs import recheck_roofs
    from roofline.hardware.chips.products import find

    roofs, checks = recheck_roofs(threads=threads, isa=isa)
    product = find(roofs.chip)
    print_json(_record(roofs, checks, product), indent=1) if as_json else _show(roofs, checks, product)


def _record(roofs: "Roofs", checks: "list[RoofCheck]", product: "Product | None") -> JsonObject:
    return {
        "roofs": asdict(roofs),
        "checks": [{**asdict(check), "agrees": check.agrees} for check in checks],
        "data_sheet": None if product is None else {"product": product.name, **_sheet(product)},
    }


def _sheet(product: "Product") -> JsonObject:
    """The figures that the table has for the product, with their sources."""
    figures = {"bf16_flops": product.bf16, "bytes_per_s": product.bandwidth}
    return {name: None if figure is None else asdict(figure) for name, figure in figures.items()}


def _verdict(check: "RoofCheck") -> str:
    return "" if check.agrees else " (raised)" if check.now > check.kept else " (!)"


def _show(roofs: "Roofs", checks: "list[RoofCheck]", product: "Product | None") -> None:
    out = console(highlight=False, markup=False)
    out.print(f"{roofs.chip}, {roofs.threads} threads, {roofs.isa}; measured {roofs.measured}")
    now = {check.name: check for check in checks}
    largest = roofs.reads[-1][0]
    sheet = {
        "bf16": None if product is None else product.bf16,
        f"reads of {human_bytes(largest)}": None if product is None else product.bandwidth,
    }
    rates = [(name, rate, "op") for name, rate in roofs.computes]
    rates += [(f"reads of {human_bytes(size)}", rate, "B") for size, rate in roofs.reads]
    rows = []
    for name, rate, unit in rates:
        check, figure = now.get(name), sheet.get(name)
        rows.append(
            (
                name, human_rate(rate, unit),
                "-" if check is None else human_rate(check.now, unit) + _verdict(check),
                "-" if figure is None else human_rate(figure.value, unit),
            )
        )  # fmt: skip
    out.print(plain_table(("roof", "kept", "now", "data sheet"), rows))
    lower = [check.name for check in checks if not check.agrees and check.now < check.kept]
    if lower:
        out.print(
            f"(!) {', '.join(lower)}: more than 5 % below what this machine has reached. Other programs or a slower "
            "clock hold it back: wait until it is quiet before measuring."
        )
    if product is None:
        out.print(f"No data sheet: {roofs.chip} is not in the table of products, and no other chip's figures are used.")
    elif sources := dict.fromkeys(figure.source for figure in sheet.values() if figure is not None):
        out.print(f"data sheet of {product.name}: {'; '.join(sources)}")
