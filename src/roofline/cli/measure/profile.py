"""roofline profile: what each op of a step takes, beside what it must move and compute."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.backends.options import DEFAULT_MODEL
from roofline.cli.measure.timed import TimedLoad
from roofline.cli.options import AsJson, ModelArgument
from roofline.cli.output import check_output, console, print_json, ruled_table
from roofline.common.options import Option
from roofline.common.units import human_bytes, human_count, human_rate, human_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from roofline.bench.profile.profile import OpTime, Profile

Contexts = Annotated[list[int] | None, Option("Profile decoding after this many tokens.", minimum=0)]
Prompts = Annotated[list[int] | None, Option("Profile a step of this many prompt tokens.", minimum=2)]


def command(
    load: TimedLoad,
    model: ModelArgument = DEFAULT_MODEL,
    decode: Contexts = None,
    prefill: Prompts = None,
    batch: Annotated[int, Option("Sequences in the step.", minimum=1)] = 1,
    as_json: AsJson = False,
    svg: Annotated[Path | None, Option("Draw the roofline picture into this file.")] = None,
) -> None:
    """Time every op of a step. Without --decode and --prefill: decoding after 8 and after 1024, and prefill of 512."""
    from roofline.bench.profile import profile

    steps = [profile.ProfiledStep(1, context, batch) for context in decode or ()]
    steps += [profile.ProfiledStep(tokens, 0, batch) for tokens in prefill or ()]
    if not steps:
        steps = [
            profile.ProfiledStep(1, 8, batch),
            profile.ProfiledStep(1, 1024, batch),
            profile.ProfiledStep(512, 0, batch),
        ]
    check_output(svg)
    profiled = profile.profile_model(model, steps, load)
    if as_json:
        print_json(profile.record(profiled), indent=1)
    else:
        _show(profiled.model, profiled.profiles)
        for name in ("device", "datasheet"):
            if name in profiled.chosen:
                print(f"{name}: {profiled.chosen[name]}")
    if svg is not None:
        from roofline.bench.profile.plot import draw
        from roofline.common.files import write_atomically

        title = f"{profiled.model.rpartition('/')[2]} on {profiled.profiles[0].roofs.chip}"
        write_atomically(svg, draw(profiled.profiles, title))
        if not as_json:
            print(f"drawn: {svg}")


def _show(model: str, profiles: "Sequence[Profile]") -> None:

    out = console()
    for profile in profiles:
        out.print(_table(f"{model.rpartition('/')[2]}: {profile.step.name}", profile))
        out.print(_footer(profile), highlight=False)
        out.print()


def _table(title: str, profile: "Profile") -> "Table":
    headings = ("op", "shape", "format", "us", "step", "bytes", "FLOPs", "roof", "bound")
    table = ruled_table(title, headings, left_aligned=("op", "format", "bound"))
    before = ""
    for row in profile.ops:
        if row.section != before:
            table.add_row(f"[bold]{row.section}")
        before = row.section
        table.add_row(*_cells(row, profile))
    read, flops = sum(row.read_bytes for row in profile.ops), sum(row.flops for row in profile.ops)
    unexplained = [("unexplained", profile.unexplained_seconds)]
    if not profile.on_device:
        unexplained.append(("clocks", profile.step_seconds - profile.timed_seconds))
    table.add_section()
    for name, seconds in unexplained:
        table.add_row(f"[dim]{name}", "", "", _us(seconds), f"{seconds / profile.step_seconds:.1%}")
    total = (_us(profile.step_seconds), "", human_bytes(read), human_count(flops), f"{profile.share:.1%}")
    table.add_row("[bold]the step", "", "", *total, "")
    return table


def _cells(row: "OpTime", profile: "Profile") -> list[str]:
    colour = {"memory": "cyan", "latency": "dim"}.get(row.bound, "yellow")
    moved = human_bytes(row.read_bytes) if row.read_bytes else ""
    share = f"{row.share:.1%}" if row.limit_seconds else ""
    times = [_us(row.seconds), f"{row.seconds / profile.step_seconds:.1%}"]
    return [row.op, row.shape, f"[dim]{row.format}", *times, moved, human_count(row.flops), share,
            f"[{colour}]{row.bound}"]  # fmt: skip


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}" if seconds < 1e-3 else f"{seconds * 1e6:,.0f}"


def _footer(profile: "Profile") -> str:
    from roofline.hardware.roofs import correction_note

    roofs = profile.roofs
    reads = human_rate(roofs.read_bytes_per_s(profile.working_set), "B")
    clocks = "they are timed on the device" if profile.on_device else f"clocks slow it by {profile.clock_cost:.1%}"
    lines = [
        f"the ops explain [bold]{profile.explained:.1%}[/] of the step; {clocks}; {profile.runs} runs",
        f"at the roofs {human_seconds(profile.limit_seconds)}: reads of {human_bytes(profile.working_set)} at {reads},",
        ", ".join(f"{name} {human_rate(rate, 'op')}" for name, rate in roofs.computes),
    ]
    if note := correction_note(roofs):
        lines.append(f"[bold yellow]warning[/] {note}")
    if profile.explained < 0.95:
        lines.append("[bold yellow]warning[/] something outside of the ops takes more than 5 % of the step")
    return "\n".join(lines)
