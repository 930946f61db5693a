"""Writes run.html: the curves, the configuration and the card of a run on one self-contained page."""

import html
import json
import math
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from roofline.common.files import write_atomically
from roofline.common.json_types import JsonMapping
from roofline.common.units import human_bytes, human_seconds
from roofline.train.config.flatten import flatten
from roofline.train.preference.rewards import EXACT
from roofline.train.report import cards
from roofline.train.report.answers import (
    HeldOutAnswers,
    answer_tiles,
    chat_links,
    held_out_rewards,
    read_answers,
    side_by_side,
)
from roofline.train.report.flops import usual
from roofline.train.run_folder import CARD, CONFIG, LOG, PAGE, RESULTS, read_lines

POINTS = 1500  # of a curve; with more steps each point is the mean of several
# The last, and those of OBJECTIVES that an evaluation has, also as "eval_loss LABEL".
CURVES = ("loss", "lr", "grad_norm", "tokens_per_s", "eval_loss")
OBJECTIVES = ("accuracy", "reward", "reward_chosen", "reward_rejected", "apart")  # of runs with one
Row = tuple[str, ...]


def write(folder: Path) -> None:
    """Write the page into a run's folder, from its log, its card, its configuration, and its answers if it has any."""
    card, config = (json.loads((folder / name).read_text()) for name in (CARD, CONFIG))
    has_result = any((folder / name).exists() for name in RESULTS)
    write_atomically(folder / PAGE, page(read_lines(folder / LOG), card, config, read_answers(folder), has_result))


def page(
    lines: Sequence[JsonMapping],
    card: JsonMapping,
    config: JsonMapping,
    answers: HeldOutAnswers | None = None,
    has_result: bool = True,
) -> str:
    """Return the text of the page, from the lines of the log, the card and the configuration.

    answers: before and after. has_result: whether there is a folder to serve, without which no command serves it.
    """
    name = str(card["run"])
    device, model = card["device"], card["model"]
    about = [model["name"], f"{model['parameters']:,} parameters", f"{card['devices']} x {device['name']}"]
    about += [card["precision"], _state(lines, card), card["written"]]
    rewards = held_out_rewards(lines) if _rewards(config) else None
    template = Template((files("roofline.train.report") / "page.html").read_text("utf-8"))
    return template.safe_substitute(
        title=html.escape(name),
        about=html.escape(" · ".join(about)),
        taken="<p>Dashed lines: the run was stopped there and taken up again.</p>" if _resume_steps(lines) else "",
        progress=_progress(lines, card),
        tiles="".join(_tile(*tile) for tile in [*answer_tiles(answers, rewards), *_tiles(lines, card)]),
        chat=chat_links(answers) if has_result or not _was_stopped(card) else "",
        answers=side_by_side(answers, rewards is not None),
        tables="".join([*_tables(card), *_samples(lines)]),
        configuration=_table(
            [
                (key, json.dumps(value) if isinstance(value, list) else str(value))
                for key, value in flatten(config)
                if value is not None
            ]
        ),
        data=_script_json(
            {
                "series": _series(lines),
                "taken": _resume_steps(lines),
                "written": card["written"],
                "live": not _has_ended(card) or (answers is not None and answers.is_waiting and not _was_stopped(card)),
            }
        ),
    )


def _rewards(config: JsonMapping) -> bool:
    """Whether a function of the user's says how good an answer is."""
    section = config.get("grpo")
    return section is not None and section["reward"] != EXACT


def _was_stopped(card: JsonMapping) -> bool:
    return bool(card.get("stopped"))  # cards of earlier versions have no such key


def _has_ended(card: JsonMapping) -> bool:
    return bool(card["done"]) or _was_stopped(card)


def _steps(lines: Sequence[JsonMapping]) -> tuple[int, int]:
    """Return the number of the last step, and how many the run has."""
    steps = next((line["about"]["steps"] for line in reversed(lines) if "about" in line), 0)
    return next((line["step"] for line in reversed(lines) if "loss" in line), 0), steps


def _state(lines: Sequence[JsonMapping], card: JsonMapping) -> str:
    """Return in words how far the run is."""
    if card["done"]:
        return "finished"
    at, steps = _steps(lines)
    return f"stopped after step {at:,} of {steps:,}" if _was_stopped(card) else "under way"


def _progress(lines: Sequence[JsonMapping], card: JsonMapping) -> str:
    """A bar with the time that is left, while the run is under way."""
    at, steps = _steps(lines)
    if _has_ended(card) or not steps:
        return ""
    time_left = human_seconds((steps - at) * card["speed"]["step_seconds"]["p50"])
    return f'<progress max="{steps}" value="{at}"></progress><p>step {at:,} of {steps:,}, {time_left} left</p>'


def _series(lines: Iterable[JsonMapping]) -> dict[str, list[list[float]]]:
    """The [step, value] points of each curve."""
    curves: dict[str, list[list[float]]] = {name: [] for name in CURVES}
    for line in lines:
        held_out = "eval_" if "eval_loss" in line else ""
        for name, key in [*zip(CURVES, CURVES, strict=True), *((held_out + name, name) for name in OBJECTIVES)]:
            if isinstance(line.get(key), int | float):
                label = f" {line['label']}" if "label" in line else ""
                curves.setdefault(name + label, []).append([line["step"], line[key]])
    return {name: _means(points) for name, points in curves.items()}


def _means(points: list[list[float]]) -> list[list[float]]:
    """At most POINTS points: means over neighbours, each at the last of its steps."""
    stride = math.ceil(len(points) / POINTS) or 1
    groups = (points[start : start + stride] for start in range(0, len(points), stride))
    means = ((group[-1][0], sum(value for _, value in group) / len(group)) for group in groups)
    return [[step, float(f"{value:.6g}")] for step, value in means]


def _resume_steps(lines: Iterable[JsonMapping]) -> list[int]:
    """The steps at which the run was resumed."""
    return sorted({line["about"]["step"] for line in lines if "about" in line and line["about"]["step"]})


def _tiles(lines: Sequence[JsonMapping], card: JsonMapping) -> list[tuple[str, str]]:
    steps = [line for line in lines if line.get("loss") is not None]
    evaluations = {line.get("label"): line["eval_loss"] for line in lines if line.get("eval_loss") is not None}
    convention, memory = usual(card["flops"]), card["memory"]["measured"]
    mfu = card["flops"][convention]["mfu"]
    tiles = [("steps", f"{steps[-1]['step']:,}"), ("loss", f"{steps[-1]['loss']:.4f}")] if steps else []
    tiles += [(f"held-out loss{f', {label}' if label else ''}", f"{loss:.4f}") for label, loss in evaluations.items()]
    tiles.append(("tokens/s", f"{card['speed']['tokens_per_s']:,.0f}"))
    if mfu is not None:
        tiles.append((f"MFU ({convention})", f"{mfu:.1%}"))
    elif card["roof"] is not None and card["roof"]["share"] is not None:
        tiles.append(("of the matmul roof", f"{card['roof']['share']:.1%}"))
    return [*tiles, *([("peak memory", human_bytes(memory))] if memory is not None else [])]


def _tile(name: str, value: str) -> str:
    return f"<div><span>{html.escape(name)}</span><b>{html.escape(value)}</b></div>"


def _tables(card: JsonMapping) -> list[str]:
    speed, memory, peak, roof = card["speed"], card["memory"], card["peak"], card["roof"]
    first, last = speed["steps"]
    p50, p95 = (human_seconds(speed["step_seconds"][name]) for name in ("p50", "p95"))
    against = f"{peak['flops'] / 1e12:,.1f} TFLOP/s, {peak['source']}" if peak else f"no MFU: {card['no_peak']}"
    rows = [
        ("steps that count", f"{first:,} to {last:,}, the {speed['left_out']['steps']} before left out"),
        ("tokens/s/device", f"{speed['tokens_per_s_per_device']:,.1f}"),
        ("step, p50 and p95", f"{p50}, {p95}"),
        ("waiting for data", f"{speed['wait_share']:.1%} of steps' time"),
        ("batch", f"{card['global_batch']:,} rows of {card['seq_len']:,} tokens, {card['microbatch']} at a time"),
        ("checkpointing, compile", f"{card['checkpointing'] or 'none'}, {'yes' if card['compile'] else 'no'}"),
        ("peak", against),
    ]
    if roof:
        slower = "" if roof["share"] is not None else f"; {cards.TOO_LOW}"
        rows.append(("measured roof", f"{roof['flops'] / 1e9:,.0f} GFLOP/s, {roof['measured']}{slower}"))
    rows += [(name, str(value)) for name, value in card["versions"].items() if value is not None]
    if card.get("ended_by"):
        rows.append(("ended by", card["ended_by"]))
    rows.append(("again", card["command"]))
    return [
        f"<section><h2>Card</h2>{_table(rows)}</section>",
        f"<div><section><h2>FLOPs by convention</h2>{_utilization(card)}</section>"
        f"<section><h2>Memory of a process</h2>{_memory(memory)}</section></div>",
    ]


def _samples(lines: Sequence[JsonMapping]) -> list[str]:
    """The last texts that the model wrote, if the run has any."""
    last = next((line for line in reversed(lines) if "samples" in line), None)
    if last is None:
        return []
    rows = [(sample["prompt"], sample["text"]) for sample in last["samples"]]
    return [f"<section><h2>Samples of step {last['step']:,}</h2>{_table(rows)}</section>"]


def _utilization(card: JsonMapping) -> str:
    rows = []
    for name, flops in card["flops"].items():
        shares = ("-" if flops[key] is None else f"{flops[key]:.1%}" for key in ("mfu", "hfu"))
        rows.append((name, f"{flops['model_flops_per_token']:.4g}", f"{flops['tflops_per_device']:.4g}", *shares))
    notes = "".join(f"<p>{html.escape(name)}: {html.escape(text)}</p>" for name, text in card["conventions"].items())
    return f'{_table(rows, ("", "FLOP/token", "TFLOP/s/device", "MFU", "HFU"))}<div class="notes">{notes}</div>'


def _memory(memory: JsonMapping) -> str:
    predicted, measured = memory["predicted"], memory["measured"]
    rows: list[Row] = [("measured", "-" if measured is None else human_bytes(measured))]
    if predicted is not None:
        rows.append(("predicted", human_bytes(predicted["total"])))
        rows += [(f"· {name}", human_bytes(size)) for name, size in predicted["parts"].items()]
    return _table(rows, ("", memory["measured_as"]))


def _table(rows: Iterable[Row], head: Row = ()) -> str:
    titles = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join(
        f"<tr><th>{html.escape(name)}</th>{''.join(f'<td>{html.escape(value)}</td>' for value in values)}</tr>"
        for name, *values in rows
    )
    kind = ' class="numbers"' if head else ""
    above = f"<thead><tr>{titles}</tr></thead>" if head else ""
    return f'<div class="wide"><table{kind}>{above}<tbody>{body}</tbody></table></div>'


def _script_json(value: JsonMapping) -> str:
    """JSON that cannot end the script element that contains it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
