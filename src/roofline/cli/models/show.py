"""roofline show: one layer of a model on one screen, each op beside what it must move and compute."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from roofline.cli.options import AsJson, KvCacheDtype
from roofline.cli.output import console, print_json, print_table, ruled_table
from roofline.cli.parser import Argument
from roofline.common.errors import ConfigError
from roofline.common.options import Option
from roofline.common.units import human_bytes, human_count, human_rate, human_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from roofline.hardware.roofs import Roofs
    from roofline.models.config import ModelConfig
    from roofline.program.ir import Program
    from roofline.program.overview import OpRow, Overview
    from roofline.program.target import Target


def command(
    model: Annotated[
        str,
        Argument("A name from `roofline list`, a path (of a bundle too), preset:NAME. Default: the default model."),
    ] = "",
    tokens: Annotated[int, Option("Query tokens of the step: 1 is decoding.", minimum=1)] = 1,
    context: Annotated[int, Option("Tokens already in the cache.", minimum=0)] = 1024,
    kv_cache_dtype: KvCacheDtype = "auto",
    after: Annotated[str, Option("Print the program's text after this pass instead.", flags=("--pass",))] = "",
    as_json: AsJson = False,
) -> None:
    """Show one layer: op, shape, format, bytes, operations, microseconds at this machine's measured roof, share."""

    from roofline.backends.capacity import host_kv_dtype
    from roofline.backends.cpu.roofs import stored_roofs
    from roofline.program.compile import stage_names
    from roofline.program.overview import overview
    from roofline.program.passes.price import mixture, price, step_work
    from roofline.program.target import CPU, with_cache
    from roofline.program.text import print_program
    from roofline.weights.sources import DEFAULT_MODEL

    if after and after not in stage_names():
        raise ConfigError(f"there is no pass {after!r}: the passes are {', '.join(stage_names())}")
    name = model or DEFAULT_MODEL
    _, programs = compile_stages(name, with_cache(CPU, host_kv_dtype(kv_cache_dtype)))
    if after:
        print(print_program(programs[after]), end="")
        return
    planned = programs["plan"]
    work = step_work(tokens, 1, [(context, tokens)], price(planned).windows, mixture(planned))
    roofs = stored_roofs()
    view = overview(programs["plan"], work, roofs)
    if as_json:
        print_json({"model": name, "work": asdict(work), "roofs": roofs and asdict(roofs), **asdict(view)}, indent=1)
        return
    out = console()
    step = "decode 1 token" if tokens == 1 else f"prefill {tokens:,} tokens"
    table = _table(view, f"{name.rpartition('/')[2]}: {step} after {context:,} in the cache")
    print_table(out, table, dispensable=("shape", "format", "FLOPs", "of the bytes", "of the step"))
    out.print(_footer(view, roofs), highlight=False)


def compile_stages(
    model: str, target: "Target", weights: str | None = None
) -> "tuple[ModelConfig, dict[str, Program]]":
    """A model's configuration, and its Program after each pass. weights: of a preset; nobody reads them here."""
    from pathlib import Path

    from roofline.bundle.reader import is_bundle, open_bundle
    from roofline.models.registry import configure
    from roofline.program.compile import stages
    from roofline.weights import sources
    from roofline.weights.checkpoint import open_checkpoint
    from roofline.weights.random_weights import PRESET, preset_checkpoint

    if is_bundle(Path(model)):
        manifest = open_bundle(Path(model)).manifest
        family, config = configure(manifest.config)
        return config, dict(stages(family, config, manifest.tensor_infos, target))
    preset = model.startswith(PRESET)
    checkpoint = preset_checkpoint(model, weights or "random:0") if preset else open_checkpoint(sources.resolve(model))
    family, config = configure(checkpoint.config)
    return config, dict(stages(family, config, checkpoint.tensors, target))


def _table(view: "Overview", title: str) -> "Table":
    share = ["of the bytes"] if view.seconds is None else ["us", "of the step"]
    headings = ("op", "shape", "format", "bytes", "FLOPs", *share)
    table = ruled_table(title, headings, left_aligned=("op", "format", share[-1]), padding=1)
    before = ""
    for row in view.rows:
        if row.section not in (before, row.op):
            table.add_row(f"[bold]{row.section}" + (f" of {view.layers}" if row.section == "layer 0" else ""))
        before = row.section
        table.add_row(*_cells(row, view))
    return table


def _cells(row: "OpRow", view: "Overview") -> list[str]:
    spent_us = []
    if view.seconds is not None and row.seconds is not None:
        share, spent_us = row.seconds * row.times / view.seconds, [f"{row.seconds * 1e6:,.1f}"]
    else:
        share = row.read_bytes * row.times / max(1, view.spent.weight_bytes + view.spent.kv_bytes)
    colour = "yellow" if row.bound == "compute" else "cyan"
    name = f" {row.op}" if row.shape else f"[bold]{row.section}[/]: {row.op}"
    sizes = human_bytes(row.read_bytes) if row.read_bytes else "", human_count(row.spent.flops)
    return [name, row.shape, f"[dim]{row.format}", *sizes, *spent_us, f"[{colour}]{_bar(share)}[/]{share:6.1%}"]


def _bar(share: float, width: int = 6) -> str:
    """A bar of eighths of a character."""
    full, eighths = divmod(round(share * width * 8), 8)
    return f"{'█' * full + (' ▏▎▍▌▋▊▉'[eighths] if eighths else ''):<{width}}"


def _footer(view: "Overview", roofs: "Roofs | None") -> str:
    from roofline.hardware.roofs import load_note

    total = view.spent
    moved = f"[bold]{human_bytes(total.weight_bytes)}[/] of weights, [bold]{human_bytes(total.kv_bytes)}[/] of KV"
    first = f"a step: {moved}, {human_count(total.flops)}FLOP"
    if roofs is None or view.seconds is None:
        return f"{first}\nno roofs are measured on this machine yet: [bold]roofline doctor[/] measures them"
    reads = human_rate(roofs.read_bytes_per_s(view.weight_bytes + total.kv_bytes), "B")
    rates = ", ".join(f"{name} {human_rate(rate, 'op' if name == 'int8' else 'FLOP')}" for name, rate in roofs.computes)
    note = load_note(roofs.load)
    return (
        f"{first}; at the roof [bold]{human_seconds(view.seconds)}[/]\n"
        f"roofs: [cyan]reads {reads}[/], [yellow]{rates}[/]" + (f"\n{note}" if note else "")
    )
