"""Reads pairs of answers, and prompts that answers are sampled to, from the records of data sets."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from roofline.common.errors import ConfigError
from roofline.common.fields import describe, shorten
from roofline.train.data.record_fields import MEDIA, RecordFields
from roofline.train.data.record_files import Record
from roofline.train.finetune.asking import note_repeated, question_messages, tools_in, with_system
from roofline.train.finetune.forms import AS_CHAT, NO_MEDIA
from roofline.train.finetune.sample_weights import refuse_untrained
from roofline.train.finetune.samples import Chat, Continuation, Sample, chat, role_of, text, tools_of

_TURN = re.compile(r"\b(Human|Assistant):")  # marks of turns in texts, as Anthropic's HH has them
CHAT = "instruct"  # the form in which a prompt that is a string is a user's message; else it is text
_TURNS = ("messages", "prompt", "conversations", "conversation")  # that have a prompt's messages
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
    """The pair of a record with the keys chosen and rejected: texts, messages, or lists of messages, which may begin
    with the prompt; or else with the prompt under prompt, conversations, question or instruction. Raises ConfigError.
    """
    if isinstance(record, str) or "chosen" not in record or "rejected" not in record:
        raise ConfigError(f"{where} has no chosen and rejected answer: {_keys(record)}")
    fields = RecordFields.of_record(record)
    refuse_untrained(fields, where)
    before = _turns_of(fields, _TURNS[1:]) or []
    if before or not any(isinstance(fields.get(key), str) for key in ("chosen", "rejected")):
        return _pair_of_chats(fields, before, where)
    key = _asks_under(fields, form)
    if key is not None:
        words = question_messages(fields, key, where)
        texts = _answers(fields, text(fields, key, where), where, as_messages=True)
        answers = [{"role": "assistant", "content": answer} for answer in texts]
        tools = tools_of(tools_in(fields), where)
        chosen, rejected = (Chat((*words, answer), tools, (len(words),)) for answer in answers)
        return Pair(chosen, rejected, "question")
    prompt = text(fields, "prompt", where, empty=True)
    chosen_text, rejected_text = _answers(fields, prompt, where)
    if not prompt:
        prompt = _shared_text(chosen_text, rejected_text)
        chosen_text, rejected_text = chosen_text[len(prompt) :], rejected_text[len(prompt) :]
        if not prompt or _TURN.findall(prompt)[-1:] == ["Human"]:
            raise _other_questions(chosen_text, rejected_text, where)
    fields.refuse_conditions(where, prompt, f"write it into the prompt, or remove it; {AS_CHAT}")
    return Pair(Continuation(prompt, chosen_text), Continuation(prompt, rejected_text), "text")


def _answers(record: RecordFields, prompt: str, where: str, as_messages: bool = False) -> tuple[str, str]:
    """The two answers that are texts, without the prompt where both repeat it in front, as messages may."""
    chosen, rejected = (text(record, key, where) for key in ("chosen", "rejected"))
    if not prompt.strip() or not (chosen.startswith(prompt) and rejected.startswith(prompt)):
        return chosen, rejected
    record.remarks.add("the prompt that both answers repeat")
    behind = chosen[len(prompt) :], rejected[len(prompt) :]
    if not all(answer.strip() for answer in behind):
        raise ConfigError(f"{where}: an answer is the prompt and nothing else: give it a text, or remove the record")
    return (behind[0].lstrip(), behind[1].lstrip()) if as_messages else behind


def _pair_of_chats(record: RecordFields, before: list[object], where: str) -> Pair:
    """The pair of two answers that are messages, or whole chats."""
    turns = [_answer_turns(record, key, where) for key in ("chosen", "rejected")]
    chats = [_behind(before, answer, where) for answer in turns]
    if not before and any(role_of(answer[0]) == "assistant" for answer in turns):
        key = _asks_under(record, CHAT if record.peek("prompt") else None)
        if key is None:
            raise ConfigError(f"{where}: no prompt comes before the answers: {_keys(record)}")
        chats = [[*question_messages(record, key, where), *answer] for answer in turns]
    chosen, rejected = (_answered(messages, record, where) for messages in chats)
    shared = _shared(chosen.messages, rejected.messages)
    if chosen.messages != rejected.messages:
        following = [each.messages[shared : shared + 1] for each in (chosen, rejected)]
        if not all(messages and messages[0]["role"] == "assistant" for messages in following):
            raise _other_questions(following[0], following[1], where)
    chosen, rejected = (_from(each, shared) for each in (chosen, rejected))
    note_repeated(record, chosen.messages)  # UltraFeedback has the prompt beside the chats, too
    return Pair(chosen, rejected, "messages")


def prompt(record: Record, where: str, form: str | None) -> tuple[Chat | str, str]:
    """The prompt of a record, messages up to where the model answers or a text to go on from, and its form, one of
    PROMPT_FORMS. Raises ConfigError."""
    if isinstance(record, str):
        raise ConfigError(f"{where} is a text file, and no record with a prompt")
    fields = RecordFields.of_record(record)
    turns = _turns_of(fields, _TURNS)
    if turns is not None:
        if turns and role_of(turns[-1]) == "assistant":
            turns = turns[:-1]
        if not turns:
            raise ConfigError(f"{where}: the prompt has no message")
        # `chat` wants an answer to train on; this one is taken off again.
        stand_in = {"role": "assistant", "content": ""}
        words = chat([*_with_system(turns, fields, where), stand_in], tools_in(fields), where, True, fields.remarks)
        return Chat(words.messages[:-1], words.tools), "messages"
    key = _asks_under(fields, form)
    if key is not None:
        messages = question_messages(fields, key, where)
        return Chat(tuple(messages), tools_of(tools_in(fields), where)), "question"
    if not isinstance(fields.get("prompt"), str):
        raise ConfigError(f"{where} has no prompt, question or messages: {_keys(record)}")
    words_of_text = text(fields, "prompt", where)
    fields.refuse_conditions(where, words_of_text, f"write it into the prompt, or remove it; {AS_CHAT}")
    return words_of_text, "text"


def _asks_under(record: RecordFields, form: str | None) -> str | None:
    """The key of a text that is a user's message; None where the prompt is a text to go on from."""
    # Distilabel's sets ask under `input`; below an instruction, or beside a prompt, it is something else.
    alone = ("input",) if record.peek("prompt") is None else ()
    keys = ("question", "instruction", *alone, *(("prompt",) if form == CHAT else ()))
    return next((key for key in keys if record.peek(key) is not None), "prompt" if form == CHAT else None)


def _turns_of(record: RecordFields, keys: Sequence[str]) -> list[object] | None:
    """The messages of a prompt, under the first of the keys that has some; None where none has a list."""
    lists = [key for key in keys if isinstance(record.peek(key), list)]
    key = next((key for key in lists if record.peek(key)), lists[0] if lists else None)
    turns = record.get(key) if key is not None else None
    return turns if isinstance(turns, list) else None


def _with_system(turns: list[object], record: RecordFields, where: str) -> list[object]:
    with_own = with_system(turns, record, where)
    return with_own if isinstance(with_own, list) else turns


def _answer_turns(record: RecordFields, key: str, where: str) -> list[object]:
    """The messages under a key, which may be one message, or the text of one."""
    value = record.get(key)
    if isinstance(value, str):
        return [{"role": "assistant", "content": text(record, key, where)}]
    if isinstance(value, list):
        if not value:
            raise ConfigError(f"{where}: {key} has no message")
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {key} is {describe(value)}, not a text or messages")
    return [value]


def _behind(before: list[object], turns: list[object], where: str) -> list[object]:
    """The messages behind those of the prompt, which they may begin with. Raises ConfigError where they begin with
    another question."""
    if [_words(turn) for turn in turns[: len(before)]] == [_words(turn) for turn in before]:
        return [*before, *turns[len(before) :]]
    if before and role_of(before[-1]) == role_of(turns[0]) == "user":
        asked, other = (shorten(_words(turn)[1]) for turn in (before[-1], turns[0]))
        raise ConfigError(
            f"{where}: the prompt ends with the user's message {asked!r}, and an answer begins with the user's message "
            f"{other!r}: two questions, of which one is to be removed"
        )
    return [*before, *turns]


def _words(turn: object) -> tuple[str | None, str]:
    """The role of a message and its content, without what else it has."""
    content = turn.get("content", turn.get("value")) if isinstance(turn, Mapping) else turn
    return role_of(turn), str(content)


def _shared(chosen: Sequence[object], rejected: Sequence[object]) -> int:
    """How many messages, or characters, both begin with."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))


def _answered(turns: list[object], record: RecordFields, where: str) -> Chat:
    """The chat, up to its last answer."""
    sample = chat(_with_system(turns, record, where), tools_in(record), where, remarks=record.remarks)
    record.refuse_conditions(where, "", NO_MEDIA, MEDIA)
    return sample


def _from(sample: Chat, shared: int) -> Chat:
    """The chat, trained on in its answers behind the `shared` messages; where all are shared, in the last one."""
    answers = tuple(number for number in sample.answers if number >= shared)
    return replace(sample, answers=answers or sample.answers[-1:])


def _other_questions(chosen: object, rejected: object, where: str) -> ConfigError:
    """The error of a pair that has no common prompt, with what its two sides go on with where they begin to differ."""
    begin, other = (_beginning(side) for side in (chosen, rejected))
    return ConfigError(
        f"{where}: the chosen and the rejected answer are not to the same prompt: chosen goes on with {begin}, "
        f"rejected with {other}; a pair is two answers to one question"
    )


def _beginning(side: object) -> str:
    if isinstance(side, str):
        return repr(shorten(side.strip()))
    message = next(iter(side), None) if isinstance(side, Sequence) else None
    if not isinstance(message, Mapping):
        return "no message"
    return f"the {message['role']}'s message {shorten(str(message['content']))!r}"


def _shared_text(chosen: str, rejected: str) -> str:
    """What both texts begin with, up to the end of a word."""
    words = re.match(r"(?s).*\s", chosen[: _shared(chosen, rejected)])
    return words.group().rstrip() if words else ""


def _keys(record: Record) -> str:
    return f"it is {describe(record)}" if isinstance(record, str) else f"its keys are {', '.join(record) or 'none'}"
