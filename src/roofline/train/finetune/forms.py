"""The forms that data sets for fine-tuning have: which one a record is of, told from its keys, and how it is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from roofline.common.errors import ConfigError
from roofline.common.fields import describe
from roofline.train.data.record_fields import MEDIA, RecordFields
from roofline.train.data.record_files import Record
from roofline.train.finetune.asking import first_key, note_repeated, question_messages, tools_in, with_system
from roofline.train.finetune.sample_weights import refuse_untrained
from roofline.train.finetune.samples import Chat, Continuation, Sample, Text, chat, question, text, tools_of

Fields = Mapping[str, object]


@dataclass(frozen=True)
class Form:
    """about: what it is, for people. fits: whether a record has its keys. read: the sample of a record that stands at
    `where`; raises ConfigError."""

    about: str
    fits: Callable[[Fields], bool]
    read: Callable[[RecordFields, str], Sample]


def _has(*keys: str) -> Callable[[Fields], bool]:
    return lambda record: all(record.get(key) is not None for key in keys)


AS_CHAT = "--format instruct makes a chat of prompt and answer, and reads it"
NO_MEDIA = "images and audio are not trained on"


def _messages(record: RecordFields, where: str) -> Chat:
    return _conversation(_turns(record, "messages", where), record, where)


def _sharegpt(record: RecordFields, where: str) -> Chat:
    return _conversation(_turns(record, first_key(record, "conversations", "conversation"), where), record, where)


def _turns(record: RecordFields, key: str, where: str) -> list[object]:
    """The messages under a key. Raises ConfigError where there are none."""
    turns = record.get(key)
    if key not in record:
        raise ConfigError(f"{where}: there is no {key}: give the record one, or remove it")
    if not isinstance(turns, list):
        raise ConfigError(f"{where}: {key} is {describe(turns)}, not a list")
    return turns


def _conversation(turns: object, record: RecordFields, where: str, last_only: bool = False) -> Chat:
    sample = chat(with_system(turns, record, where), tools_in(record), where, last_only, record.remarks)
    record.refuse_conditions(where, "", NO_MEDIA, MEDIA)
    note_repeated(record, sample.messages)
    return sample


def _alpaca(record: RecordFields, where: str) -> Chat:
    return _question_chat(record, "instruction", first_key(record, "output", "response"), where)


def _question_chat(record: RecordFields, key: str, answer: str, where: str) -> Chat:
    """The chat of a record that asks under a key and answers under another."""
    messages = question_messages(record, key, where)
    messages = [*messages, {"role": "assistant", "content": text(record, answer, where)}]
    answers = tuple(at for at, message in enumerate(messages) if message["role"] == "assistant")
    return Chat(tuple(messages), tools_of(tools_in(record), where), answers)


def _completion(record: RecordFields, where: str) -> Sample:
    key = first_key(record, "completion", "response")
    prompt, answer = record.get("prompt"), record.get(key)
    if isinstance(prompt, list) and isinstance(answer, list):  # TRL's conversational form
        return _conversation([*prompt, *answer], record, where, last_only=True)
    sample = Continuation(text(record, "prompt", where, empty=True), text(record, key, where))
    record.refuse_conditions(where, sample.prompt, f"write it into the prompt, or remove it; {AS_CHAT}")
    return sample


def _instruct(record: RecordFields, where: str) -> Chat:
    return _question_chat(record, "prompt", first_key(record, "completion", "response"), where)


def _question(record: RecordFields, where: str) -> Chat:
    return _question_chat(record, "question", first_key(record, "answer", "response"), where)


PUBMEDQA_TASK = "Answer with yes, no or maybe, then explain."


def _pubmedqa(record: RecordFields, where: str) -> Chat:
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
    record.refuse_conditions(where, prompt, "PubMedQA has nothing of the kind; remove it")
    return question(prompt, f"{decision}. {answer}".strip())


def _icl(record: RecordFields, where: str) -> Continuation:
    """LLM Foundry's tasks for evaluation: the right answer goes on from the context or the question."""
    key = first_key(record, "context", "query")
    prompt = text(record, key, where)
    choices = record.get("choices")
    if isinstance(choices, list):
        gold = record.get("gold")
        if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(choices):
            places = f"a whole number from 0 to {len(choices) - 1}" if choices else "a place: there are none"
            raise ConfigError(f"{where}: gold is {describe(gold)}, and the place of a choice is {places}")
        for number, choice in enumerate(choices):
            if not isinstance(choice, str):
                raise ConfigError(f"{where}: choice {number} is {describe(choice)}, not a text")
        answer = choices[gold]
    else:
        answer = text(record, first_key(record, "continuation", "answer"), where)
    record.refuse_conditions(where, prompt, f"write it into {key}, or remove it")
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
    "question": Form(
        "questions with answers, as chats",
        lambda r: _has("question", "answer")(r) or _has("question", "response")(r),
        _question,
    ),
    "icl": Form("LLM Foundry's in-context tasks", _is_icl, _icl),
    "text": Form("plain texts", _has("text"), lambda record, where: Text(text(record, "text", where))),
}


KTO_KEYS = ("label", "kto_tag")  # TRL's name and LLaMA-Factory's


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

    record: of `RecordFields`, where the caller wants to know which keys were not used. told_from: the record that the
    form was told from, "" where it was named.
    """
    if isinstance(record, str) and form == "text":
        return Text(record)
    try:
        if isinstance(record, str):
            raise ConfigError(f"{where} is a text file" + ("" if told_from else f", --format is {form}"))
        fields = RecordFields.of_record(record)
        sample = FORMS[form].read(fields, where)
        if form != "text":
            _refuse_labels(fields, where)
        refuse_untrained(fields, where)
        return sample
    except ConfigError as error:
        if not told_from or (not isinstance(record, str) and FORMS[form].fits(record)):
            raise
        told = f"the form of all records was told from {told_from}: {FORMS[form].about}"
        raise ConfigError(f"{error}; {told} (--format {form}); --format names another") from None


def _refuse_labels(record: RecordFields, where: str) -> None:
    """Raises ConfigError for a record of KTO, which says of an answer whether it is a good one."""
    for key in KTO_KEYS:
        label = record.peek(key)
        if isinstance(label, bool) or str(label).strip().lower() in ("true", "false", "0", "1"):
            raise ConfigError(
                f"{where}: {key} is {str(label).lower()}, as in data for KTO, whose answers with false or 0 are bad "
                "ones that would be trained on: keep the records with true or 1, and remove the key"
            )
