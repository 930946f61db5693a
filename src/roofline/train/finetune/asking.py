"""What comes before an answer, in records that have it under several keys: a system message, context, earlier turns."""

from collections.abc import Iterable

from roofline.common.errors import ConfigError
from roofline.common.fields import describe
from roofline.train.data.record_fields import RecordFields
from roofline.train.finetune.samples import Message, role_of, text

_INSTRUCTION = "instruction"  # Alpaca's key, whose input goes below it


def first_key(record: RecordFields, *keys: str) -> str:
    """The first of several keys under which a record has something, else the first that it has, be it null, or the
    first of all."""
    ways = (lambda key: record.peek(key), lambda key: record.peek(key) is not None, lambda key: key in record)
    return next((key for fits in ways for key in keys if fits(key)), keys[0])


def tools_in(record: RecordFields) -> object:
    """The tools of a record, as it has them."""
    return record.get(first_key(record, "tools", "functions"))


def with_system(turns: object, record: RecordFields, where: str) -> object:
    """The messages with the record's own system message in front. Raises ConfigError where they begin with another."""
    system = _system(record, where)
    if not system or not isinstance(turns, list):
        return turns
    if not turns or role_of(turns[0]) != "system":
        return [{"role": "system", "content": system}, *turns]
    if turns[0].get("content", turns[0].get("value")) != system:
        raise ConfigError(f"{where}: system is another text than that of the first message: remove one of the two")
    return turns


def note_repeated(record: RecordFields, messages: Iterable[Message]) -> None:
    """Count a prompt that stands beside a chat as used where it is the text of one of its messages."""
    for key in ("prompt", "question"):
        if any(message["content"] == record.peek(key) for message in messages):
            record.get(key)


def question_messages(record: RecordFields, key: str, where: str) -> list[Message]:
    """The messages before the answer of a record that asks under a key: the user's turn has the record's context above
    a question, and its input below an instruction. Raises ConfigError where something else belongs to the prompt."""
    words = text(record, key, where)
    if key == _INSTRUCTION:
        further = _passage(record, ("input", "context"), where)
        prompt = f"{words}\n\n{further}" if further.strip() else words
    else:
        further = _passage(record, ("context", "contexts"), where)
        prompt = f"{further}\n\n{words}" if further.strip() and further.strip() not in words else words
    system = _system(record, where)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages += _history(record, where)
    messages.append({"role": "user", "content": prompt})
    tools_in(record)  # which all callers read
    record.refuse_conditions(where, prompt, f"write it into {key}, or remove it")
    return messages


def _system(record: RecordFields, where: str) -> str:
    return text(record, first_key(record, "system", "system_prompt"), where, empty=True)


def _passage(record: RecordFields, keys: tuple[str, ...], where: str) -> str:
    """The text under the first of the keys that has one, or several with an empty line between each."""
    key = first_key(record, *keys)
    value = record.get(key)
    if not isinstance(value, list):
        return text(record, key, where, empty=True)
    if not all(isinstance(part, str) for part in value):
        raise ConfigError(f"{where}: {key} is {describe(value)} of other things than texts")
    return "\n\n".join(value)


def _history(record: RecordFields, where: str) -> list[Message]:
    history = record.get("history") or []
    if not isinstance(history, list):
        raise ConfigError(f"{where}: history is {describe(history)}, not a list of a question and an answer each")
    return [{"role": role, "content": part} for pair in history for role, part in _pair(pair, where)]


def _pair(pair: object, where: str) -> list[tuple[str, object]]:
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        raise ConfigError(f"{where}: history is no list of a question and an answer each")
    return list(zip(("user", "assistant"), pair, strict=True))
