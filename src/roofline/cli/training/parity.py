"""roofline parity: whether two training runs are the same run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roofline.cli.options import AsJson

if TYPE_CHECKING:
    from roofline.train.parity.findings import Parity
    from roofline.train.parity.layers import Layers

Folder = Annotated[Path, typer.Argument(help="A run's folder, with the log.jsonl that training writes.")]


def command(
    a: Folder,
    b: Folder,
    repeat: Annotated[
        list[Path] | None, typer.Option("--repeat", help="Another run of A's setting, for the noise; may be repeated.")
    ] = None,
    margin: Annotated[
        float,
        typer.Option(
            "--margin", help="Nats by which mean losses may differ and be the same: 0.01 is 1 % of perplexity."
        ),
    ] = 0.01,
    handover: Annotated[
        list[int] | None,
        typer.Option(
            "--handover", help="A step after which a run changed hands, beside relay.json's; may be repeated."
        ),
    ] = None,
    as_json: AsJson = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Draw both runs and their difference: an SVG file.")
    ] = None,
) -> None:
    """Say whether runs A and B are identical, equivalent, drifting or different, or that they do not tell.

    Exits with 0 where they are identical or equivalent, else with 1.
    """
    from roofline.train.parity.compare import compare
    from roofline.train.parity.recorded_run import read

    runs = read(a), read(b)
    found = compare(*runs, [read(folder) for folder in repeat or []], margin, handover or [])
    if out is not None:
        from roofline.common.files import write_atomically
        from roofline.train.parity.plot import draw

        write_atomically(out, draw(*runs, found))
    if as_json:
        import json

        print(json.dumps(found.plain(), indent=1))
    else:
        _show(found)
        if out is not None:
            print(f"drawn in {out}")
    raise typer.Exit(0 if found.equal else 1)


def _show(found: "Parity") -> None:
    print(f"{found.verdict}: {found.why}")
    rows = [("A", found.a), ("B", found.b), ("steps", f"{found.steps:,} in common, {found.first:,} to {found.last:,}")]
    if found.samples is not None and found.samples.step is None:
        rows.append(("samples", f"the same in the same order in all {found.samples.steps:,} steps that both took"))
    if found.loss is not None:
        loss = found.loss
        rows += [
            ("loss, B - A", f"{loss.mean.mean:+.2g} nats on average, standard error {loss.mean.error:.2g}"),
            ("", f"{loss.quarter.mean:+.2g} over the last quarter, standard error {loss.quarter.error:.2g}"),
            ("", f"sd {loss.sd:.2g}, at most {loss.largest:.2g} (step {loss.at:,})"),
            ("", f"without its sign {loss.early:.2g} in the first quarter, {loss.late:.2g} in the last"),
        ]
    if found.norm is not None:
        rows.append(("gradient norm", f"{_percent(found.norm.mean)} (standard error {found.norm.error:.2%})"))
    if found.noise is not None:
        noise = found.noise
        text = f"sd {noise.sd:.2g}, 95 % within {noise.quantile:.2g}, means {noise.mean:.2g} apart"
        rows.append(("repeats", f"{text} ({noise.pairs} pair{'s' if noise.pairs > 1 else ''})"))
    for at in found.handovers:
        jump = "not judged" if at.jump is None else f"{at.jump.jump:+.2g} +- {at.jump.error:.2g} (p = {at.jump.p:.2g})"
        rows.append((f"step {at.step:,}", f"hand-over{' to ' + at.name if at.name else ''}: {jump}"))
    if found.layers is not None:
        rows.append((f"layers, step {found.layers.step:,}", _layers(found.layers)))
    rows += [(f"joint, step {joint.layers.step:,}", f"{joint.run}: {_layers(joint.layers)}") for joint in found.joints]
    rows += [("setting", f"{key}: {one} and {two}") for key, one, two in found.settings]
    rows += [("note", note) for note in found.notes]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"  {name:<{width}}  {text}")


def _percent(mean: float) -> str:
    import math

    return f"{math.expm1(mean):+.2%} on average"


def _layers(layers: "Layers") -> str:
    named = layers.activation or (layers.gradient and f"the gradient of {layers.gradient}")
    first = "not judged"
    if layers.judged:
        beyond = "repeats" if layers.by_repeats else "rounding"
        first = f"{named} is the first to differ" if named else f"none differs beyond {beyond}"
    sizes = []
    for kind, each in (("activations", layers.activations), ("gradients", layers.gradients)):
        most = max(each, key=lambda layer: layer.difference)
        sizes.append(
            f"{kind} by up to {most.difference:.1g} ({most.name})" if most.difference else f"{kind} not at all"
        )
    return f"{first}; {', '.join(sizes)}"
