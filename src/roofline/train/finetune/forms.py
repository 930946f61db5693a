"""The forms that data sets for fine-tuning have: which one a record is of, told from its keys, and how it is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from roofline.common.errors import ConfigError
from roofline.train.finetune.files import Record
from roofline.train.finetune.samples import Chat, Continuation, Sample, Text, chat, question, text

Fields = Mapping[str, object]


@dataclass(frozen=True)
class Form:
    """about: what it is, for people. fits: whether a record has its keys. read: the sample of a record that stands at
    `where`; raises ConfigError."""

    about: str
    fits: Callable[[Fields], bool]
    read: Callable[[Fields, str], Sample]


def _has(*keys: str) -> Callable[[Fields], bool]:
    return lambda record: all(record.get(key) is not None for key in keys)


def _any(record: Fields, *keys: str) -> str:
    """The first of several keys that a record has, or the last."""
    return next((key for key in keys if record.get(key) is not None), keys[-1])


def _messages(record: Fields, where: str) -> Chat:
    return chat(record.get("messages"), record.get("tools", record.get("functions")), where)


def _sharegpt(record: Fields, where: str) -> Chat:
    turns = record.get(_any(record, "conversations", "conversation"))
    system = record.get("system")
    if isinstance(turns, list) and isinstance(system, str) and system:
        turns = [{"role": "system", "content": system}, *turns]
    return chat(turns, record.get("tools"), where)


def _alpaca(record: Fields, where: str) -> Chat:
    """The input goes below the instruction. A system message and earlier turns are read where there are some."""
    further = text(record, _any(record, "input", "context"), where, empty=True)
    prompt = text(record, "instruction", where) + (f"\n\n{further}" if further.strip() else "")
    answer = text(record, _any(record, "output", "response"), where)
    sample = question(prompt, answer, text(record, "system", where, empty=True))
    history = record.get("history")
    if not isinstance(history, list) or not history:
        return sample
    earlier = [{"role": role, "content": part} for pair in history for role, part in _pair(pair, where)]
    at = len(sample.messages) - 2
    return chat([*sample.messages[:at], *earlier, *sample.messages[at:]], None, where)


def _pair(pair: object, where: str) -> list[tuple[str, object]]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise ConfigError(f"{where}: history is no list of a question and an answer each")
    return list(zip(("user", "assistant"), pair, strict=True))


def _completion(record: Fields, where: str) -> Sample:
    key = _any(record, "completion", "response")
    prompt, answer = record.get("prompt"), record.get(key)
    if isinstance(prompt, list) and isinstance(answer, list):  # TRL's conversational form
        return chat([*prompt, *answer], record.get("tools"), where, last_only=True)
    return Continuation(text(record, "prompt", where, empty=True), text(record, key, where))


def _instruct(record: Fields, where: str) -> Chat:
    answer = text(record, _any(record, "completion", "response"), where)
    return question(text(record, "prompt", where), answer, text(record, "system", where, empty=True))


def _question(record: Fields, where: str) -> Chat:
    return question(text(record, "question", where), text(record, "answer", where))


PUBMEDQA_TASK = "Answer with yes, no or maybe, then explain."


def _pubmedqa(record: Fields, where: str) -> Chat:
    """Of the published JSON, or of the rows of the data set that was made of it."""
    if "QUESTION" in record:
        query, contexts = text(record, "QUESTION", where), record.get("CONTEXTS")
        answer = text(record, "LONG_ANSWER", where, empty=True)
    else:
        inner = record.get("context")
        query, contexts = text(record, "question", where), inner.get("contexts") if isinstance(inner, Mapping) else None
        answer = text(record, "long_answer", where, empty=True)
    if not isinstance(contexts, list) or not all(isinstance(each, str) for each in contexts):
        raise ConfigError(f"{where}: the contexts are no list of texts")
    decision = text(record, "final_decision", where)
    prompt = "\n\n".join([*contexts, query, PUBMEDQA_TASK])
    return question(prompt, f"{decision}. {answer}".strip())


def _icl(record: Fields, where: str) -> Continuation:
    """LLM Foundry's tasks for evaluation: the right answer goes on from the context or the question."""
    prompt = text(record, _any(record, "context", "query"), where)
    choices = record.get("choices")
    if isinstance(choices, list):
        gold = record.get("gold")
        if not isinstance(gold, int) or not 0 <= gold < len(choices) or not isinstance(choices[gold], str):
            raise ConfigError(f"{where}: gold is not the place of a text among the choices")
        answer = choices[gold]
    else:
        answer = text(record, _any(record, "continuation", "answer"), where)
    apart = "" if prompt[-1:].isspace() or answer[:1].isspace() else " "
    return Continuation(prompt, apart + answer)


def _is_icl(record: Fields) -> bool:
    return any(_has(*keys)(record) for keys in (("context", "continuation"), ("query", "choices", "gold"))) or (
        _has("context", "answer")(record) and isinstance(record["context"], str) and "question" not in record
    )


def _is_pubmedqa(record: Fields) -> bool:
    return _has("QUESTION", "CONTEXTS", "final_decision")(record) or (
        _has("question", "context", "final_decision")(record) and isinstance(record["context"], Mapping)
    )


FORMS: dict[str, Form] = {  # the first that fits is taken
    "messages": Form("chats as OpenAI's API has them", _has("messages"), _messages),
    "sharegpt": Form(
        "ShareGPT's conversations", lambda r: _has("conversations")(r) or _has("conversation")(r), _sharegpt
    ),
    "pubmedqa": Form("PubMedQA", _is_pubmedqa, _pubmedqa),
    "alpaca": Form(
        "Alpaca's instructions", lambda r: "instruction" in r and ("output" in r or "response" in r), _alpaca
    ),
    "completion": Form(
        "prompts with completions, as text without the chat template",
        lambda r: "prompt" in r and ("completion" in r or "response" in r),
        _completion,
    ),
    "instruct": Form("prompts with answers, as chats", lambda r: False, _instruct),
    "question": Form("questions with answers, as chats", _has("question", "answer"), _question),
    "icl": Form("LLM Foundry's in-context tasks", _is_icl, _icl),
    "text": Form("plain texts", _has("text"), lambda record, where: Text(text(record, "text", where))),
}


def recognise(record: Record, where: str) -> str:
    """The name of the form that a record is of. Raises ConfigError."""
    if isinstance(record, str):
        return "text"
    name = next((name for name, form in FORMS.items() if form.fits(record)), None)
    if name is not None:
        return name
    keys = ", ".join(f"{key!r}{' (empty)' * (value is None)}" for key, value in record.items()) or "none"
    if "chosen" in record and "rejected" in record:
        raise ConfigError(f"{where} is a pair of a chosen and a rejected answer, which `roofline prefer` trains on")
    raise ConfigError(f"{where} has the keys {keys}, which are of no form that is known; --format names one")


def read(record: Record, where: str, form: str, told_from: str = "") -> Sample:
    """The sample of a record of that form. Raises ConfigError.

    told_from: the record that the form was told from, "" where it was named.
    """
    if isinstance(record, str) and form == "text":
        return Text(record)
    try:
        if isinstance(record, str):
            raise ConfigError(f"{where} is a text file" + ("" if told_from else f", --format is {form}"))
        return FORMS[form].read(record, where)
    except ConfigError as error:
        if not told_from or (not isinstance(record, str) and FORMS[form].fits(record)):
            raise
        told = f"the form of all records was told from {told_from}: {FORMS[form].about}"
        raise ConfigError(f"{error}; {told} (--format {form}); --format names another") from None
