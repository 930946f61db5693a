"""What `roofline info` prints for people: ASCII alone, in tables that a narrow terminal breaks but never cuts."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from roofline.cli.output import console, plain_table, print_table
from roofline.common.units import human_bytes, human_count, human_rate, human_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from roofline.backends.fit import Fit
    from roofline.cli.models.info_report import InfoReport
    from roofline.weights.config.unfamiliar import Unfamiliar

_KINDS = {
    "preset": "a shape of the catalogue, without weights",
    "configuration": "a configuration, without weights",
    "bundle": "a bundle",
    "gguf": "a GGUF file",
    "safetensors": "safetensors",
}
# Fields of configurations in the order they are told in; other fields follow under their own names.
_FIELDS = {
    "family": "family",
    "layers": "layers",
    "width": "width",
    "heads": "heads",
    "kv_heads": "kv heads",
    "head_dim": "head dim",
    "ffn": "ffn",
    "vocab": "vocabulary",
    "max_position": "trained context",
    "rope_theta": "rope theta",
    "rope_scaling": "rope scaling",
    "sliding_window": "window",
}


def show(report: "InfoReport") -> None:
    """Print a report."""
    out = console()
    out.print(f"[bold]{report.shape.name}[/]: {_KINDS[report.shape.kind]}", highlight=False)
    for note in report.shape.notes:
        out.print(note, highlight=False, markup=False)
    out.print(_facts(_architecture(report)))
    out.print()
    out.print(_facts(_parameters(report)))
    out.print()
    print_table(out, _weights_table(report), dispensable=("bits", "bytes"))
    if any(row.bytes is None for row in report.takes):
        out.print("-: its rows are no whole number of the format's blocks", highlight=False)
    out.print()
    print_table(out, _cache_table(report), dispensable=("bytes",))
    if state := report.summary.state_bytes:
        out.print(f"beside it {human_bytes(state)} of recurrent state for each sequence, however long", highlight=False)
    if latent := _latent_bytes(report):
        ours = report.summary.kv_bytes("bf16")
        out.print(
            f"here the cache holds keys and values of every head; their latent rows (MLA), which others keep, would "
            f"take {human_bytes(latent)} a token in bf16, {ours / latent:.1f} times less",
            highlight=False,
        )
    if windowed := _windowed_bytes(report):
        ours = report.summary.kv_bytes("bf16") * report.context
        out.print(
            f"the cache holds every token for all layers; those with a window read its last ones alone, and others "
            f"that keep no more would take {human_bytes(windowed)} in bf16 for {report.context:,} tokens, "
            f"{ours / windowed:.1f} times less",
            highlight=False,
        )
    if report.fit is not None:
        _show_fit(out, report, report.fit)


def _facts(rows: "Iterable[tuple[str, str]]") -> "Table":
    """Names beside what there is to say of them."""
    return plain_table(("", ""), rows, figures=(), show_header=False, padding=(0, 2, 0, 0))


def _architecture(report: "InfoReport") -> list[tuple[str, str]]:
    config, summary = dict(report.shape.config), report.summary
    rows = [(label, _value(config.pop(key))) for key, label in _FIELDS.items() if config.get(key) is not None]
    if summary.experts:
        rows.append(("experts", f"{summary.experts}, {summary.top} a token"))
        config = {key: value for key, value in config.items() if not key.startswith("experts")}
    rest = {key: value for key, value in config.items() if value not in (None, False, "", [], {})}
    rows += [(key.replace("_", " "), _value(value)) for key, value in rest.items()]
    return [*rows, ("ops", ", ".join(summary.ops))]


def _value(value: object) -> str:
    """A field's value in words."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value(part)}" for key, part in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() else f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _parameters(report: "InfoReport") -> list[tuple[str, str]]:
    summary = report.summary
    rows = [("parameters", f"{summary.parameters:,}")]
    if summary.active != summary.parameters:
        rows.append(("active a token", f"{summary.active:,}"))
    tied = "which the head multiplies with too" if summary.tied else "the head has its own"
    rows.append(("embedding", f"{summary.embedding:,}, {tied}"))
    flops = f"{human_count(summary.token_flops)}FLOP"
    if summary.pair_flops:
        flops += f", {human_count(summary.pair_flops)}FLOP for each it attends to"
    rows.append(("a token takes", flops))
    if report.ends is not None:
        rows.append(("answers end at", ", ".join(f"{text} ({i})" for i, text in report.ends.items()) or "no token"))
    if report.shape.source:
        rows.append(("source", report.shape.source))
    return rows


def _weights_table(report: "InfoReport") -> "Table":
    """What the file has, then what a file of each format would take."""
    summary = report.summary
    rows = []
    if report.shape.has_weights or len(summary.stored) > 1:
        where = "here" if report.shape.has_weights else "published"
        stored = [(where, summary.bytes)] if len(summary.stored) > 1 else []
        rows += [_size_row(name, size, summary.parameters) for name, size in stored]
        rows += [_size_row(f"{where}, {row.format}", row.bytes, row.parameters) for row in summary.stored]
    rows += [_size_row(row.format, row.bytes, summary.parameters) for row in report.takes]
    headings = ("weights", "bytes", "size", "bits")
    return _right(plain_table(headings, rows, figures=headings[1:], padding=(0, 2, 0, 0)))


def _size_row(name: str, size: int | None, parameters: int) -> tuple[str, str, str, str]:
    if size is None:
        return name, "-", "-", "-"
    return name, f"{size:,}", human_bytes(size), f"{8 * size / parameters:.2f}"


def _cache_table(report: "InfoReport") -> "Table":
    from roofline.cli.models.info_report import CACHE_FORMATS

    sizes = {form: report.summary.kv_bytes(form) for form in CACHE_FORMATS}
    rows = [(form, f"{size:,}", human_bytes(size), human_bytes(size * report.context)) for form, size in sizes.items()]
    headings = ("cache", "bytes", "a token", f"{report.context:,} tokens")
    return _right(plain_table(headings, rows, figures=headings[1:], padding=(0, 2, 0, 0)))


def _latent_bytes(report: "InfoReport") -> int:
    """Bytes of a token's latent rows and rotated keys in bf16, over all layers; 0 of models without them, and
    where our cache holds them."""
    config = report.shape.config
    rank, rotated = None if config.get("latent") else config.get("kv_rank"), config.get("rotary_dim")
    return 2 * report.summary.layers * (int(rank) + int(rotated)) if rank and rotated else 0


def _windowed_bytes(report: "InfoReport") -> int:
    """Bytes in bf16 of the tokens that layers read at the report's context; 0 where no window leaves any out."""
    from roofline.models.registry import config_of
    from roofline.program.ir import KvGroup

    cfg = config_of(report.shape.config)
    total = 0
    for layer in filter(cfg.attends, range(cfg.layers)):
        sizes = KvGroup(layers=1, window=0, format="bf16", **cfg.kv_shape(layer)._asdict())
        total += sizes.token_bytes * min(cfg.window(layer) or report.context, report.context)
    return total if total < report.summary.kv_bytes("bf16") * report.context else 0


def _right(table: "Table") -> "Table":
    """Figures at the right of their columns."""
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _show_fit(out: "Console", report: "InfoReport", fit: "Fit") -> None:
    form = f" in {report.dtype}" if report.dtype else ""
    devices = f"{fit.devices} x {fit.place}" if fit.devices > 1 else f"on {fit.place}"
    out.print(f"\n[bold]{devices}[/]: {report.shape.name}{form}", highlight=False)
    rows = [
        ("memory", f"{human_bytes(fit.memory)}{_of_what(fit)}"),
        ("weights", human_bytes(fit.weights)),
        ("workspace", human_bytes(fit.workspace)),
        ("cache", f"{fit.kv_format}, {human_bytes(fit.token_bytes)} a token"),
        ("room for", _room(report, fit)),
    ]
    if fit.slots and fit.fits:
        slots = f"{fit.slots:,} slots of {human_bytes(fit.slot_bytes)} for sequences and snapshots"
        rows.append(("state", f"{slots}, {human_bytes(fit.slots * fit.slot_bytes)}"))
    if fit.limit:
        rows.append(("no more devices", fit.limit))
    if report.no_kernels:
        rows.append(("no kernels", report.no_kernels))
    if fit.lacking:
        rows.append(("no kernels", f"for {', '.join(fit.lacking)}: the gpu backend does not run this model yet"))
    out.print(_facts(rows))
    if fit.rates:
        out.print()
        print_table(out, _rates_table(fit), dispensable=("FLOPs", "reads", "a step"))
    for line in _footnotes(report, fit):
        out.print(line, highlight=False)


def _of_what(fit: "Fit") -> str:
    if fit.stages > 1:
        return f" a device; each has some of the layers (--pp {fit.stages})"
    if fit.dies > 1:
        return f" a device, of which a package has {fit.dies}"
    return " a device" if fit.devices > 1 else ""


def _room(report: "InfoReport", fit: "Fit") -> str:
    if not fit.fits:
        needed = human_bytes(fit.weights + fit.workspace)
        instead = f"; would fit by their size: {', '.join(report.other_formats)}" if report.other_formats else ""
        return f"nothing: weights and workspace take {needed}{instead}"
    sequences = f"{fit.sequences:,} sequence{'s' * (fit.sequences != 1)} of {fit.context:,}"
    return f"{fit.cache_tokens:,} tokens: {sequences}; the longest context is {fit.longest:,}"


def _rates_table(fit: "Fit") -> "Table":
    rows = []
    for rate in fit.rates:
        step = f"decode {rate.sequences}" if rate.step == "decode" else f"prefill {rate.tokens:,}"
        reads = human_bytes(rate.weight_bytes + rate.kv_bytes)
        cells = (f"{rate.tokens_per_s:,.1f}", human_seconds(rate.seconds), rate.bound, reads)
        rows.append((step, *cells, human_count(rate.flops)))
    headings = ("at most", "tokens/s", "a step", "bound", "reads", "FLOPs")
    return _right(plain_table(headings, rows, figures=(*headings[1:],), padding=(0, 2, 0, 0)))


def _footnotes(report: "InfoReport", fit: "Fit") -> Iterable[str]:
    """What sizes and rates mean, what the rates are divided by, and what they do not count."""
    from roofline.hardware.chips.products import SheetRoofs
    from roofline.hardware.roofs import load_note

    for name, other in fit.held_in.items():
        yield f"{name} is held as {other} there, which its kernels read: sizes and reads are of that"
    if fit.roofs is None:
        yield "no roofs are known: " + (
            "its table has no bandwidth" if report.no_kernels else "roofline doctor measures them"
        )
        return
    if not fit.rates:
        return
    several = fit.devices > 1
    reads = human_rate(fit.roofs.read_bytes_per_s(fit.weights), "B")
    flops = human_rate(fit.operations, "op") if math.isfinite(fit.operations) else "not in the table"
    if isinstance(fit.roofs, SheetRoofs):
        sources = "; ".join(fit.roofs.sources)
        yield f"roofs{' of a device' * several}: reads {reads}, {fit.arithmetic} {flops} ({sources})"
        link = fit.rates[0].link_bytes
        exchanged = f", {human_bytes(link)} a token from other devices" if link else ""
        yield f"not counted: arithmetic outside matrix products, launches{exchanged}"
    else:
        yield f"roofs: reads {reads}, {fit.arithmetic} {flops}, measured on this machine {fit.roofs.measured}"
        if note := load_note(fit.roofs.load):
            yield note
    if report.summary.experts:
        yield "experts are read as if tokens chose them evenly and independently of each other"


def tell(strange: "Unfamiliar") -> None:
    """Print what there is to say of a file of another architecture."""
    out = console()
    out.print(f"{strange.path}: no family of ours has {strange.key} {strange.name!r}", highlight=False, markup=False)
    new = ", ".join(f"{key} = {value}" for key, value in strange.new_keys.items())
    rows = [
        ("nearest", f"{strange.nearest}, by the keys of its files" if strange.nearest else "none of ours"),
        ("new keys", new or "none"),
        *((f"op {op}", f"is here ({', '.join(keys)})") for op, keys in strange.ops.items()),
        *((what, f"no op of ours ({', '.join(keys)})") for what, keys in strange.lacking.items()),
    ]
    out.print(_facts(rows))
    out.print(
        "from its keys alone, which may not say all; how to add a family: docs/how-to/add-a-family.md", highlight=False
    )
