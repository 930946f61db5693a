"""roofline parity: whether two training runs are the same run."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.cli.options import AsJson
from roofline.cli.output import print_json
from roofline.cli.parser import Argument
from roofline.common.options import Option

if TYPE_CHECKING:
    from roofline.train.parity.findings import Parity
    from roofline.train.parity.layers import Layers

Folder = Annotated[Path, Argument("A run's folder, with the log.jsonl that training writes.")]


def command(
    a: Folder,
    b: Folder,
    repeat: Annotated[list[Path] | None, Option("Another run of A's setting, for the noise.")] = None,
    margin: Annotated[
        float, Option("Nats by which mean losses may differ and be the same: 0.01 is 1 % of perplexity.")
    ] = 0.01,
    handover: Annotated[
        list[int] | None, Option("A step after which a run changed hands, beside relay.json's.")
    ] = None,
    as_json: AsJson = False,
    out: Annotated[
        Path | None, Option("Draw both runs and their difference: an SVG file.", flags=("--out", "-o"))
    ] = None,
) -> int:
    """Say whether runs A and B are identical, equivalent, drifting or different, or that they do not tell.

    Exits with 0 where they are identical or equivalent, else with 1.
    """
    from roofline.train.parity.compare import compare
    from roofline.train.parity.recorded_run import read_run

    runs = read_run(a), read_run(b)
    findings = compare(*runs, [read_run(folder) for folder in repeat or []], margin, handover or [])
    if out is not None:
        from roofline.common.files import write_atomically
        from roofline.train.parity.plot import draw

        write_atomically(out, draw(*runs, findings))
    if as_json:
        print_json(findings.plain(), indent=1)
    else:
        _show(findings)
        if out is not None:
            print(f"drawn in {out}")
    return 0 if findings.equal else 1


def _show(findings: "Parity") -> None:
    print(f"{findings.verdict}: {findings.why}")
    rows = [
        ("A", findings.a),
        ("B", findings.b),
        ("steps", f"{findings.steps:,} in common, {findings.first:,} to {findings.last:,}"),
    ]
    if findings.samples is not None and findings.samples.step is None:
        rows.append(("samples", f"the same in the same order in all {findings.samples.steps:,} steps that both took"))
    if findings.loss is not None:
        loss = findings.loss
        rows += [
            ("loss, B - A", f"{loss.mean.mean:+.2g} nats on average, standard error {loss.mean.error:.2g}"),
            ("", f"{loss.quarter.mean:+.2g} over the last quarter, standard error {loss.quarter.error:.2g}"),
            ("", f"sd {loss.sd:.2g}, at most {loss.largest:.2g} (step {loss.at:,})"),
            ("", f"without its sign {loss.early:.2g} in the first quarter, {loss.late:.2g} in the last"),
        ]
    if findings.norm is not None:
        norm = findings.norm
        text = f"{math.expm1(norm.mean):+.2%} on average (standard error {norm.error:.2%})"
        rows.append(("gradient norm", text))
    if findings.noise is not None:
        noise = findings.noise
        text = f"sd {noise.sd:.2g}, 95 % within {noise.quantile:.2g}, means {noise.mean:.2g} apart"
        rows.append(("repeats", f"{text} ({noise.pairs} pair{'s' if noise.pairs > 1 else ''})"))
    for at in findings.handovers:
        jump = "not judged" if at.jump is None else f"{at.jump.jump:+.2g} +- {at.jump.error:.2g} (p = {at.jump.p:.2g})"
        rows.append((f"step {at.step:,}", f"hand-over{' to ' + at.name if at.name else ''}: {jump}"))
    if findings.layers is not None:
        rows.append((f"layers, step {findings.layers.step:,}", _layers(findings.layers)))
    rows += [
        (f"joint, step {joint.layers.step:,}", f"{joint.run}: {_layers(joint.layers)}") for joint in findings.joints
    ]
    rows += [("setting", f"{key}: {one} and {two}") for key, one, two in findings.settings]
    rows += [("note", note) for note in findings.notes]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"  {name:<{width}}  {text}")


def _layers(layers: "Layers") -> str:
    layer = layers.activation or (layers.gradient and f"the gradient of {layers.gradient}")
    first = "not judged"
    if layers.judged:
        beyond = "repeats" if layers.by_repeats else "rounding"
        first = f"{layer} is the first to differ" if layer else f"none differs beyond {beyond}"
    sizes = []
    for kind, changes in (("activations", layers.activations), ("gradients", layers.gradients)):
        worst = max(changes, key=lambda layer: layer.difference)
        sizes.append(
            f"{kind} by up to {worst.difference:.1g} ({worst.name})" if worst.difference else f"{kind} not at all"
        )
    return f"{first}; {', '.join(sizes)}"
