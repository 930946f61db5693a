"""Writes pairs of answers, or prompts, as shards of rows, as `finetune.prepare` does with samples."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from roofline.common.errors import ConfigError, RequestError
from roofline.common.json_types import JsonObject
from roofline.train.data.mds import ShardWriter
from roofline.train.data.record_fields import RecordFields, unused_words
from roofline.train.data.record_files import Record, records
from roofline.train.data.row_lengths import write_lengths
from roofline.train.finetune.encode import Encoded, Encoder
from roofline.train.finetune.packing import pack
from roofline.train.finetune.prepare import (
    COLUMNS,
    HELD_OUT,
    TRAIN,
    Data,
    Prepared,
    Rows,
    kept_apart,
    shared_samples,
    unreasoned,
    write_questions,
)
from roofline.train.finetune.samples import Chat, Continuation, Sample
from roofline.train.finetune.show import marked
from roofline.train.preference.pair_files import pair, prompt
from roofline.train.preference.rewards import ANSWERS, EXACT, right_answer

PAIRS, PROMPTS = "pairs", "prompts"  # in place of the form of samples; behind prompts the longest answer: prompts-128
DIVIDED = (
    "its chats differ in several answers, which the chat template does not write in one text as the model gives them: "
    "end both chats with the first answer that differs"
)
Documents = Sequence[Encoded]


@dataclass(frozen=True)
class Item:
    """What stands together in a row. form: of the record; documents: none where one of them is longer than a row.
    question: a sample with a right answer; record: of a prompt, for its reward; unused: keys of the record that the
    documents have nothing of."""

    form: str
    documents: Documents
    question: Sample | None = None
    record: JsonObject | None = None
    unused: Collection[str] = ()

    def __len__(self) -> int:
        return sum(map(len, self.documents))

    def fits(self, length: int) -> bool:
        """Whether it is within a row of so many tokens."""
        return 0 < len(self) <= length

    @property
    def alike(self) -> bool:
        """Whether its two answers are the same, so that there is nothing to prefer."""
        return len(self.documents) == 2 and np.array_equal(self.documents[0].ids, self.documents[1].ids)


ItemOf = Callable[[Data, Encoder, Record, str], Item]  # of a record that stands somewhere


def write_pairs(data: Data, folder: Path, encoder: Encoder, key: str) -> Prepared:
    """Write pairs; those that do not fit into a row together, or whose answers are the same, are left out."""
    return _write(data, folder, encoder, key, pair_item)


def pair_item(data: Data, encoder: Encoder, record: Record, where: str) -> Item:
    """The pair of a record."""
    fields = _noted(record)
    answers = pair(fields, where, _form(data))
    parts = [encoder.encode(sample, where) for sample in (answers.chosen, answers.rejected)]
    if max(map(len, parts)) > 1:
        raise ConfigError(f"{where}: {DIVIDED}")
    documents = [part[0] for part in parts] if all(parts) else []
    return Item(answers.form, documents, answers.chosen, unused=_unused(fields))


def _noted(record: Record) -> RecordFields | str:
    return record if isinstance(record, str) else RecordFields.of_record(record)


def _unused(record: RecordFields | str) -> Collection[str]:
    return () if isinstance(record, str) else record.unused


def write_prompts(data: Data, folder: Path, encoder: Encoder, key: str) -> Prepared:
    """Write prompts; those that leave no room for an answer are left out."""
    return _write(data, folder, encoder, key, prompt_item)


def write_answered(data: Data, folder: Path, encoder: Encoder, key: str) -> Prepared:
    """Write prompts as `write_prompts` does, each of which has a right answer."""
    return _write(data, folder, encoder, key, answered_item)


def answered_item(data: Data, encoder: Encoder, record: Record, where: str) -> Item:
    """The prompt of a record. Raises ConfigError where the record has no right answer for it."""
    item = prompt_item(data, encoder, record, where)
    if isinstance(record, str) or right_answer(record) is None:
        keys = ", ".join(ANSWERS)
        raise ConfigError(f"{where}: reward={EXACT}: a prompt has no right answer under {keys}, a text or a number")
    return item


def prompt_item(data: Data, encoder: Encoder, record: Record, where: str) -> Item:
    """The prompt of a record; without a document if there is no room for an answer behind it."""
    fields = _noted(record)
    words, form = prompt(fields, where, _form(data))
    try:
        ids = np.array(_prompt_ids(words, encoder), np.uint32)
    except RequestError as error:
        raise ConfigError(f"{where}: {error}") from error
    kind = (data.form or "").partition(" ")[0]
    if not 2 <= len(ids) <= data.length - int(kind.rpartition("-")[2]):
        return Item(form, [])
    assert not isinstance(record, str)
    document = Encoded(ids, np.zeros(len(ids), bool))
    plain = json.loads(json.dumps(dict(record), default=str))
    return Item(form, [document], _question(words, right_answer(record)), plain, _unused(fields))


def preview(data: Data, encoder: Encoder, count: int, colour: bool, item_of: ItemOf) -> Iterator[str]:
    """The first records as the model reads them, with what is trained on. Raises ConfigError where there is none."""
    lines = ((where, record) for place in data.places for where, record in records(place, data.split))
    first = list(islice(lines, count))
    if not first:
        raise ConfigError(f"{data.name} holds no record: name a file or folder of samples")
    unused = Counter[str]()
    for where, record in first:
        item = item_of(data, encoder, record, where)
        kept = item.fits(data.length) and not item.alike
        yield f"--- {where} ({item.form}): {_told_size(item, data.length)}"
        yield from (marked(encoder.tokenizer, part, colour) for part in item.documents if kept)
        unused.update(item.unused if item.record is None else ())  # a reward is handed all of a prompt's record
    if unused:
        yield f"--- not used: {unused_words(unused)}"


def _told_size(item: Item, length: int) -> str:
    """How many tokens an item has, and why it is left out, where it is."""
    if not item.documents:
        return f"left out: it does not fit into a row of {length:,} tokens (--max-seq-len)"
    if not item.fits(length):
        return f"{len(item):,} tokens, left out: a row has {length:,} (--max-seq-len)"
    return f"{len(item):,} tokens" + (", left out: both answers are the same" if item.alike else "")


def _prompt_ids(words: Chat | str, encoder: Encoder) -> list[int]:
    if isinstance(words, str):
        return encoder.tokenizer.encode(words, add_special=True)
    return encoder.template.encode_chat(encoder.tokenizer, words.messages, tools=words.tools or None)


def _question(words: Chat | str, answer: str | None) -> Sample | None:
    """The prompt with its right answer, if there is one."""
    if answer is None or isinstance(words, str):
        return None if answer is None else Continuation(str(words), answer)
    message = {"role": "assistant", "content": answer}
    return Chat((*words.messages, message), words.tools, (len(words.messages),))


def _form(data: Data) -> str | None:
    """What --format said, which stands behind the kind of data."""
    return (data.form or "").partition(" ")[2] or None


def _write(data: Data, folder: Path, encoder: Encoder, key: str, item_of: ItemOf) -> Prepared:
    lines = ((where, record) for place in data.places for where, record in records(place, data.split))
    read = [item_of(data, encoder, record, where) for where, record in lines]
    if not read:
        raise ConfigError(f"{data.name} holds no record: name a file or folder of samples")
    fitting = [item for item in read if item.fits(data.length)]
    usable = [item for item in fitting if not item.alike]
    if not fitting:
        raise ConfigError(f"{data.name}: nothing fits into {data.length} tokens: raise --max-seq-len")
    if not usable:
        which = "all pairs" if len(fitting) == len(read) else f"all pairs that fit into {data.length} tokens"
        reason = "the chosen and the rejected answer are the same: nothing is preferred"
        raise ConfigError(f"{data.name}: in {which} {reason}")
    apart = kept_apart(len(usable), data.share, data.seed)
    groups = {TRAIN: [i for i in range(len(usable)) if i not in apart], HELD_OUT: sorted(apart)}
    written = {
        name: _rows(folder / name, [usable[number] for number in numbers], data)
        for name, numbers in groups.items()
        if numbers
    }
    if HELD_OUT in written:
        questions = [usable[number].question for number in groups[HELD_OUT]]
        write_questions(folder, [question for question in questions if question is not None])
    return Prepared(
        key,
        form=", ".join(dict.fromkeys(item.form for item in read)),
        records=len(read),
        length=data.length,
        row_length=data.length,
        pack=data.pack,
        longest=max(map(len, read)),
        split=0,
        ended=encoder.counts.ended,
        cut=0,
        left_out=len(read) - len(fitting),
        train=written[TRAIN],
        held_out=written.get(HELD_OUT),
        files=[str(path) for path in data.files],
        alike=len(fitting) - len(usable),
        greeted=encoder.counts.greeted,
        empty=encoder.counts.empty,
        shared=shared_samples(*([usable[number].documents for number in numbers] for numbers in groups.values())),
        unused=dict(Counter(name for item in read for name in item.unused)) | unreasoned(encoder.counts),
        skipped=data.skipped,
    )


def _rows(folder: Path, items: Sequence[Item], data: Data) -> Rows:
    """Write items, several to a row if they are packed."""
    rows = pack([len(item) for item in items], data.length) if data.pack else [[n] for n in range(len(items))]
    has_record = items[0].record is not None
    with ShardWriter(folder, COLUMNS | ({"record": "json"} if has_record else {}), hashes=("sha256",)) as writer:
        for numbers in rows:
            documents = [document for number in numbers for document in items[number].documents]
            sample: dict[str, object] = {
                "tokens": np.concatenate([document.ids for document in documents]),
                "documents": np.array([len(document) for document in documents], np.uint32),
                "trained": np.concatenate([document.trained for document in documents]).astype(np.uint8),
            }
            writer.write(sample | ({"record": items[numbers[0]].record} if has_record else {}))
    write_lengths(folder, [sum(len(items[number]) for number in numbers) for numbers in rows])
    trained = sum(int(document.trained.sum()) for item in items for document in item.documents)
    return Rows(len(items), len(rows), sum(map(len, items)), trained)
