"""Reads pairs of answers, and prompts that answers are sampled to, from the records of data sets."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roofline.common.errors import ConfigError
from roofline.common.fields import describe
from roofline.train.finetune.files import Record
from roofline.train.finetune.samples import Chat, Continuation, Sample, chat, question, text, tools_of

CHAT = "instruct"  # the form in which a prompt that is a string is a user's message; else it is text
PAIR_FORMS = {
    "messages": "pairs of chats",
    "question": "questions with two answers, as chats",
    "text": f"prompts with two answers, as text without the chat template (--format {CHAT}: as chats)",
}
PROMPT_FORMS = {
    "messages": "chats",
    "question": "questions, as chats",
    "text": f"prompts, as text without the chat template (--format {CHAT}: as chats)",
}


@dataclass(frozen=True)
class Pair:
    """Two answers to the same prompt. form: one of PAIR_FORMS."""

    chosen: Sample
    rejected: Sample
    form: str


def pair(record: Record, where: str, form: str | None) -> Pair:
    """The pair of a record with the keys chosen and rejected: texts, or lists of messages, which may begin with the
    prompt; or else with the prompt under prompt or question. Raises ConfigError."""
    if isinstance(record, str) or "chosen" not in record or "rejected" not in record:
        raise ConfigError(f"{where} has no chosen and rejected answer: {_keys(record)}")
    answers = record["chosen"], record["rejected"]
    if all(isinstance(each, list) for each in answers):
        prompt = record.get("prompt")
        before = prompt if isinstance(prompt, list) else []
        turns = [[*before, *_messages(each)] for each in answers]
        chosen, rejected = (_last(each, record, where) for each in turns)
        shared = _shared(*turns)
        if chosen != rejected and min(chosen.answers[-1], rejected.answers[-1]) < shared:
            raise ConfigError(f"{where}: the chosen and the rejected answer are not to the same prompt")
        return Pair(chosen, rejected, "messages")
    if record.get("question") is not None or form == CHAT:
        words, system = _question_of(record, where), text(record, "system", where, empty=True)
        chosen, rejected = (question(words, text(record, key, where), system) for key in ("chosen", "rejected"))
        return Pair(chosen, rejected, "question")
    prompt = text(record, "prompt", where, empty=True)
    chosen_text, rejected_text = (text(record, key, where) for key in ("chosen", "rejected"))
    if not prompt:
        prompt = _shared_text(chosen_text, rejected_text)
        chosen_text, rejected_text = chosen_text[len(prompt) :], rejected_text[len(prompt) :]
    return Pair(Continuation(prompt, chosen_text), Continuation(prompt, rejected_text), "text")


def prompt(record: Record, where: str, form: str | None) -> tuple[Chat | str, str]:
    """The prompt of a record, messages up to where the model answers or a text to go on from, and its form, one of
    PROMPT_FORMS. Raises ConfigError."""
    if isinstance(record, str):
        raise ConfigError(f"{where} is a text file, and no record with a prompt")
    turns = record.get("messages") or record.get("prompt")
    if isinstance(turns, list):
        if isinstance(turns[-1], Mapping) and turns[-1].get("role") == "assistant":
            turns = turns[:-1]
        # `chat` wants an answer to train on; this one is taken off again.
        read = chat([*turns, {"role": "assistant", "content": ""}], record.get("tools"), where)
        return Chat(read.messages[:-1], read.tools), "messages"
    if record.get("question") is not None or form == CHAT:
        words = question(_question_of(record, where), "", text(record, "system", where, empty=True))
        return Chat(words.messages[:-1]), "question"
    if not isinstance(record.get("prompt"), str):
        raise ConfigError(f"{where} has no prompt, question or messages: {_keys(record)}")
    return text(record, "prompt", where), "text"


def _question_of(record: Mapping[str, object], where: str) -> str:
    return text(record, "question" if record.get("question") is not None else "prompt", where)


def _messages(turns: object) -> list[object]:
    return turns if isinstance(turns, list) else []


def _shared(chosen: Sequence[object], rejected: Sequence[object]) -> int:
    """How many messages, or characters, both begin with."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))


def _last(turns: list[object], record: Mapping[str, object], where: str) -> Chat:
    """The chat, trained on in its last answer."""
    sample = chat(turns, record.get("tools"), where, last_only=True)
    return Chat(sample.messages, tools_of(record.get("tools"), where), sample.answers)


def _shared_text(chosen: str, rejected: str) -> str:
    """What both texts begin with, up to the end of a word."""
    words = re.match(r"(?s).*\s", chosen[: _shared(chosen, rejected)])
    return words.group().rstrip() if words else ""


def _keys(record: Record) -> str:
    return f"it is {describe(record)}" if isinstance(record, str) else f"its keys are {', '.join(record) or 'none'}"
