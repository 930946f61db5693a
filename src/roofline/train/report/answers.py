"""What a model answered before and after a run, and where to chat with either: its file, and its part of the page."""

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from roofline.common.errors import ConfigError
from roofline.common.files import write_atomically
from roofline.common.json_types import JsonMapping
from roofline.train.run_folder import ANSWERS

SHOWN = 12  # answers on the page, the first: to choose among them would flatter one of the models
Count = tuple[int, int]  # of how many


@dataclass(frozen=True)
class HeldOutAnswer:
    """A held-out prompt with the answer that the data have, and what the model said. None: not asked yet."""

    prompt: str
    expected: str
    before: str | None = None
    after: str | None = None

    def exact(self, text: str | None) -> bool:
        """Whether an answer is that of the data, but for space around it."""
        return text is not None and text.strip() == self.expected.strip()


@dataclass(frozen=True)
class HeldOutAnswers:
    """The answers of a run, from the model as it was and as it became.

    before, after: what a server calls the two. command: starts that server; address: where it is then. system: the
    system prompt that all samples have, with which chats begin.
    """

    before: str
    after: str
    command: str
    address: str
    system: str = ""
    rows: tuple[HeldOutAnswer, ...] = ()

    def count(self, texts: Sequence[str | None]) -> Count | None:
        """How many of these answers, one for each row, are exact; None if the model was not asked yet."""
        answered = [(row, text) for row, text in zip(self.rows, texts, strict=True) if text is not None]
        return (sum(row.exact(text) for row, text in answered), len(answered)) if answered else None

    @property
    def is_waiting(self) -> bool:
        """Whether the model, asked before the run, is still to be asked after it."""
        return self.exact_before is not None and self.exact_after is None

    @property
    def exact_before(self) -> Count | None:
        return self.count([row.before for row in self.rows])

    @property
    def exact_after(self) -> Count | None:
        return self.count([row.after for row in self.rows])


def write_answers(answers: HeldOutAnswers, folder: Path) -> None:
    """Write them into a run's folder, from where its page reads them."""
    write_atomically(folder / ANSWERS, json.dumps(asdict(answers), indent=1) + "\n")


def read_answers(folder: Path) -> HeldOutAnswers | None:
    """Those of a run's folder, None where it has none. Raises ConfigError."""
    path = folder / ANSWERS
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text("utf-8"))
        rows = tuple(HeldOutAnswer(**row) for row in values.pop("rows"))
        return HeldOutAnswers(**values, rows=rows)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is no file of answers: remove it, and run the command again ({error})") from error


def held_out_rewards(lines: Iterable[JsonMapping]) -> tuple[float | None, float | None]:
    """The mean rewards that a log has of greedy answers to held-out prompts: before the first step, and the last."""
    rewards = [(line["step"], line["reward"]) for line in lines if "eval_loss" in line and "reward" in line]
    before = next((reward for step, reward in rewards if step == 0), None)
    return before, rewards[-1][1] if rewards and rewards[-1][0] else None


def answer_tiles(
    answers: HeldOutAnswers | None, rewards: tuple[float | None, float | None] | None
) -> list[tuple[str, str]]:
    """The figures of the top of the page. rewards: before and after, where they and not exact answers count."""
    if rewards is not None:
        labelled = zip(("reward before", "reward after"), rewards, strict=True)
        return [(name, f"{reward:.3f}") for name, reward in labelled if reward is not None]
    if answers is None:
        return []
    counts = {"exact before": answers.exact_before, "exact after": answers.exact_after}
    return [(name, f"{count[0]:,} of {count[1]:,}") for name, count in counts.items() if count is not None]


def chat_links(answers: HeldOutAnswers | None) -> str:
    """A link to chat with each of the two models, and the command that serves them."""
    if answers is None:
        return ""
    links = "".join(_anchor(answers, name) for name in (answers.before, answers.after))
    command = html.escape(answers.command)
    return (
        f'<section><div class="links">{links}</div><p>The links open once this runs:</p><pre>{command}</pre></section>'
    )


def link(answers: HeldOutAnswers, name: str) -> str:
    """The address of a chat with a model."""
    system = f"&system={quote(answers.system, safe='')}" if answers.system else ""
    return f"{answers.address}/?model={quote(name, safe='')}{system}"


def _anchor(answers: HeldOutAnswers, name: str) -> str:
    return f'<a href="{html.escape(link(answers, name))}">Chat with {html.escape(name)}</a>'


def side_by_side(answers: HeldOutAnswers | None, rewarded: bool) -> str:
    """The answers beside each other, and beside those of the data. rewarded: whether one is as in the data is not what
    counts, so it is not marked."""
    if answers is None:
        return ""
    answered = [row for row in answers.rows if row.before is not None or row.after is not None]
    if not answered:
        return ""
    heads = ("held-out prompt", f"before: {answers.before}", f"after: {answers.after}", "answer of the data")
    titles = "".join(f"<th>{html.escape(title)}</th>" for title in heads)
    body = "".join(
        f"<tr><td>{_text(row.prompt)}</td>{_cell(row, row.before, rewarded)}{_cell(row, row.after, rewarded)}"
        f"<td>{_text(row.expected)}</td></tr>"
        for row in answered[:SHOWN]
    )
    left_out = f"<p>The first {SHOWN} of {len(answered):,}.</p>" if len(answered) > SHOWN else ""
    return (
        f'<section><h2>Answers before and after</h2>{left_out}<div class="wide"><table class="answers">'
        f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _cell(row: HeldOutAnswer, text: str | None, rewarded: bool) -> str:
    if text is None:
        return '<td class="none">not asked yet</td>'
    exact = "" if rewarded else f' class="{"exact" if row.exact(text) else "other"}"'
    return f"<td{exact}>{_text(text)}</td>"


def _text(text: str) -> str:
    return f"<div>{html.escape(text)}</div>"
