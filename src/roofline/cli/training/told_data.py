"""What a command says of the data that it prepared, before it trains on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roofline.common.units import counted
from roofline.train.data.record_fields import unused_words

if TYPE_CHECKING:
    from roofline.train.finetune.prepare import Data, Prepared

_SHOWN = 5  # names of files
UNTEMPLATED = ("completion", "icl", "text")  # forms of data


@dataclass(frozen=True)
class Kind:
    """What rows hold, for people.

    noun: what one of them is called; forms: what each form of the data is, by its name; misfit: why one is left out;
    answers: that are sampled to each, 0: the data have them.
    """

    noun: str
    forms: Mapping[str, str]
    misfit: str
    answers: int = 0


def told(data: "Data", prepared: "Prepared", kind: Kind, steps: int, batch: int) -> list[str]:
    """What was prepared, in words. batch: rows of a step."""
    forms = " and ".join(kind.forms.get(name, name) for name in prepared.form.split(", "))
    lines = [f"{data.name}: {counted(prepared.records, 'record')}, read as {forms}", _rows(prepared, kind, batch)]
    if prepared.held_out is not None:
        lines.append(f"{_these(prepared.held_out.samples, kind.noun, 'is', 'are')} kept apart for evaluation")
    if prepared.cut:
        what = "left out" if data.drop else f"cut; the longest has {prepared.longest:,} tokens"
        longer = f"{_these(prepared.cut, kind.noun, 'is', 'are')} longer than a row"
        lines.append(f"{longer} and {'was' if prepared.cut == 1 else 'were'} {what}: --max-seq-len raises the limit")
    left_out = prepared.left_out - (prepared.cut if data.drop else 0)
    if left_out > 0:
        lines.append(f"{_these(left_out, kind.noun, 'was', 'were')} left out: {kind.misfit}")
    if prepared.alike:
        reason = "the chosen and the rejected answer are the same"
        lines.append(f"{_these(prepared.alike, kind.noun, 'was', 'were')} left out: {reason}")
    if prepared.split:
        parts = f"{_these(prepared.split, 'chat', 'was', 'were')} taken apart, an answer each"
        lines.append(f"{parts}: the template writes earlier answers otherwise, or with no end behind them")
    if prepared.ended:
        lines.append(f"{counted(prepared.ended, 'answer')} got an end token, which the template does not write")
    epochs = f"{steps * batch / prepared.train.rows:.2g} epochs"
    lines.append(f"{counted(steps, 'step')} of {counted(batch, 'row')}, {epochs}")
    if prepared.greeted:
        lines.append(
            f"{_these(prepared.greeted, 'chat', 'begins', 'begin')} with the assistant: that message is read, but not "
            "trained on, as the template writes no prompt before it"
        )
    if prepared.unprompted:
        those = _these(prepared.unprompted, "answer", "has", "have")
        lines.append(f"{those} no prompt: the first token is not trained on, as no token comes before it")
    if prepared.empty:
        lines.append(told_of_empty(prepared.empty))
    if prepared.shared:
        those = _these(prepared.shared, kind.noun, "is", "are")
        lines.append(
            f"{those} both kept apart and trained on, token for token: the loss on such is not one of new data"
        )
    lines += told_of_unused(prepared.unused, prepared.skipped, "handed to the reward" if kind.answers else "not used")
    return lines


def told_of_empty(count: int) -> str:
    """That answers are empty, and what is trained of such."""
    have = "has no text: of it" if count == 1 else "have no text: of such"
    return f"{counted(count, 'answer')} {have} the end token alone is trained on (weight 0 leaves an answer out)"


def told_of_unused(unused: Mapping[str, int], skipped: Sequence[str], how: str = "not used") -> list[str]:
    """Keys of records that no reader asked for, with what becomes of them, and files that hold no data."""
    lines = [f"{how}: {unused_words(unused)}"] if unused else []
    if skipped:
        some = ", ".join(skipped[:_SHOWN]) + (", ..." if len(skipped) > _SHOWN else "")
        lines.append(f"{_these(len(skipped), 'file', 'was', 'were')} not read, by their suffix: {some}")
    return lines


def told_of_model(prepared: "Prepared", limit: int, is_default: bool) -> list[str]:
    """What the model makes of the data otherwise than a user may expect. limit: tokens of a row, as --max-seq-len says;
    is_default: the model has no chat template of its own."""
    lines = []
    if prepared.length < limit:
        above = f"--max-seq-len {limit} is above the model's context"
        lines.append(f"{above}, {prepared.length:,} tokens, which is used")
    if is_default and not {*prepared.form.split(", ")} <= {*UNTEMPLATED}:
        lines.append("the model has no chat template: chats are written in ChatML, as `roofline serve` writes them")
    if not is_default and "completion" in prepared.form.split(", "):
        without = "the model has a chat template, which these samples are trained without, so a chat asks it otherwise"
        lines.append(f"{without}: --format instruct makes chats of them")
    return lines


def _rows(prepared: "Prepared", kind: Kind, batch: int) -> str:
    train = prepared.train
    if kind.answers:
        each = f"{kind.answers} answers to each of {batch} in a step"
        return f"{counted(train.samples, kind.noun)} of {train.real:,} tokens together, {each}"
    rows = f"{counted(train.rows, 'row')} of {'' if prepared.pack else 'at most '}{prepared.row_length:,} tokens"
    padding = (
        f", {1 - train.real / (train.rows * prepared.row_length):.1%} padding" if prepared.pack else "; not packed"
    )
    trained = f"{train.real:,} tokens, {train.trained:,} of them trained on"
    return f"{counted(train.samples, kind.noun)} in {rows}: {trained}{padding}"


def _these(count: int, noun: str, singular: str, plural: str) -> str:
    """The number, what is counted, and the verb that goes with it."""
    return f"{counted(count, noun)} {singular if count == 1 else plural}"
