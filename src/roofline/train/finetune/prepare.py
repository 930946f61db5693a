"""Turns data for fine-tuning into shards of rows, with part of the samples kept apart for evaluation."""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.common.files import write_atomically
from roofline.common.json_types import JsonObject
from roofline.train.data.mds import ShardWriter
from roofline.train.data.record_fields import RecordFields
from roofline.train.data.record_files import Record, data_files, records, skipped_files
from roofline.train.data.row_lengths import write_lengths
from roofline.train.finetune.encode import Counts, Encoded, Encoder
from roofline.train.finetune.forms import FORMS, read, recognise
from roofline.train.finetune.packing import pack
from roofline.train.finetune.samples import Chat, Continuation, Sample

if TYPE_CHECKING:
    from roofline.text.templates.template import ChatTemplate
    from roofline.text.tokenizers.tokenizer import Tokenizer

TRAIN, HELD_OUT = "train", "held-out"  # folders of shards, in that of the data
ABOUT, PROMPTS = "prepared.json", "held-out.jsonl"  # what was prepared; held-out prompts with their answers
MOST_PROMPTS = 200
ROW_MULTIPLE = 8  # of tokens, which kernels prefer
COLUMNS = {"tokens": "ndarray:uint32", "documents": "ndarray:uint32", "trained": "ndarray:uint8"}


@dataclass(frozen=True)
class Preprocess:
    """A function that makes another record of each; source: a text that changes with it."""

    name: str
    source: str
    function: Callable[[Any], object]


@dataclass(frozen=True)
class Data:
    """What is prepared.

    places: files and folders. split, form: None where they are to be told from them. length: most tokens of a row.
    least_rows: rows to make at least when samples are packed, by shorter rows where samples are short enough.
    share: of the samples, kept apart; seed: of which. drop: leave out samples longer than a row. preprocess: what is
    made of each record first. prompts: train on prompts, too. last_only: train on the last answer of a chat alone.
    evaluation: files and folders to evaluate on, of any form.
    """

    places: tuple[Path, ...]
    length: int
    split: str | None = None
    form: str | None = None
    pack: bool = True
    drop: bool = False
    share: float = 0.0
    seed: int = 17
    preprocess: Preprocess | None = None
    prompts: bool = False
    last_only: bool = False
    evaluation: tuple[Path, ...] = ()
    least_rows: int = 0

    def row_length(self, trained: Sequence[Encoded], held_out: Sequence[Encoded]) -> int:
        """Return the tokens of a row, no fewer than the longest sample has."""
        if not self.pack or not self.least_rows:
            return self.length
        longest = max(map(len, (*trained, *held_out)))
        share = sum(map(len, trained)) // self.least_rows // ROW_MULTIPLE * ROW_MULTIPLE
        return min(self.length, max(longest, share))

    @property
    def for_evaluation(self) -> "list[Data]":
        """What is kept apart beside the share."""
        return [Data((place,), self.length) for place in self.evaluation]

    @property
    def name(self) -> str:
        """The places, for messages."""
        return ", ".join(map(str, self.places))

    @property
    def skipped(self) -> list[str]:
        """Files in the folders that no reader takes."""
        places = (*self.places, *self.evaluation)
        return [path.name for place in places for path in skipped_files(place)]

    @property
    def files(self) -> list[Path]:
        """All files that are read, in order. Raises ConfigError."""
        own = [path for place in self.places for path in data_files(place, self.split)]
        return own + [path for each in self.for_evaluation for path in each.files]


@dataclass(frozen=True)
class Rows:
    """Rows that were written. real: their tokens; trained: how many of those are targets."""

    samples: int
    rows: int
    real: int
    trained: int


@dataclass(frozen=True)
class Prepared:
    """What `prepare` wrote. key: a digest of data, tokenizer, template and settings; records: read from the files;
    length: most tokens of a sample; row_length: most tokens of a row;
    longest: tokens of the longest sample; alike: pairs of two answers that are the same, which were left out; shared:
    samples kept apart that are trained on, too; unused: what no reader used, and in how many records; skipped: files of
    a folder that hold no data; others as `encode.Counts` has them. form: one, or several with commas."""

    key: str
    form: str
    records: int
    length: int
    row_length: int
    pack: bool
    longest: int
    split: int
    ended: int
    cut: int
    left_out: int
    train: Rows
    held_out: Rows | None = None
    files: list[str] = field(default_factory=list)
    alike: int = 0
    greeted: int = 0
    empty: int = 0
    unprompted: int = 0
    shared: int = 0
    unused: dict[str, int] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


Write = Callable[[Data, Path, Encoder, str], Prepared]  # writes shards into a folder; with the key of `Prepared`


def samples(data: Data, unused: Counter[str] | None = None) -> Iterator[tuple[str, str, Sample]]:
    """(where it stands, its form, the sample) of each record. unused: gets what of the records is not read. Raises
    ConfigError, UnsupportedError."""
    if data.form is not None and data.form not in FORMS:
        raise ConfigError(f"--format {data.form} is none of {', '.join(FORMS)}")
    form, told_from = data.form, ""
    for place in data.places:
        for where, record in records(place, data.split):
            record = _preprocessed(data.preprocess, record, where)
            if form is None:
                form, told_from = recognise(record, where), where
            if isinstance(record, str):
                yield where, form, read(record, where, form, told_from)
                continue
            fields = RecordFields.of_record(record)
            sample = read(fields, where, form, told_from)
            if unused is not None:
                unused.update(fields.unused)
            yield where, form, sample
    if form is None:
        raise ConfigError(f"{data.name} holds no record: name a file or folder of samples")


def _preprocessed(preprocess: Preprocess | None, record: Record, where: str) -> Record:
    if preprocess is None:
        return record
    try:
        result = preprocess.function(dict(record) if isinstance(record, RecordFields) else record)
    except Exception as error:
        raise ConfigError(f"{where}: {preprocess.name} fails: {type(error).__name__}: {error}") from error
    if not isinstance(result, Mapping):
        raise ConfigError(f"{where}: {preprocess.name} returns a {type(result).__name__}, not a mapping")
    fields = RecordFields(dict(result))
    fields.remarks |= record.remarks if isinstance(record, RecordFields) else set()
    return fields


def prepare(
    data: Data,
    folder: Path,
    tokenizer: "Tokenizer",
    template: "ChatTemplate",
    write: "Write | None" = None,
    progress: Callable[[int], None] = lambda records: None,
    may_replace: bool = False,
) -> Prepared:
    """Write the shards of `data` into a folder, or return what is there of the same data and settings.

    write: of other data than samples; progress: called with the number of samples so far; may_replace: what was
    prepared otherwise, or by another version. Raises ConfigError, also where the folder holds something else.
    """
    key = _key(data, tokenizer, template)
    if (folder / ABOUT).is_file():
        if may_replace and (version := _other_version(_record(folder))):
            log.get("train").warning("%s was prepared by %s of Roofline and is prepared anew", folder, version)
        elif (earlier := read_prepared(folder)).key == key:
            return earlier
        elif not may_replace:
            raise ConfigError(
                f"{folder} was prepared from other data, with other settings or for another tokenizer: name another "
                "folder with --out, or remove it"
            )
    elif folder.exists():
        raise ConfigError(f"{folder} is there and was not prepared for fine-tuning: name another folder with --out")
    partial_folder = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir(parents=True)
    encoder = Encoder(
        tokenizer, template, length=data.length, drop=data.drop, prompts=data.prompts, last_only=data.last_only
    )
    prepared = (write or partial(_write, progress=progress))(data, partial_folder, encoder, key)
    write_atomically(partial_folder / ABOUT, json.dumps(asdict(prepared), indent=1) + "\n")
    if folder.exists():
        shutil.rmtree(folder)
    partial_folder.rename(folder)
    return prepared


def read_prepared(folder: Path) -> Prepared:
    """Read what `prepare` wrote about a folder. Raises ConfigError."""
    about = _record(folder)
    if version := _other_version(about):
        raise ConfigError(
            f"{folder} was prepared by {version} of Roofline, with which a run that has begun goes on: use that one, "
            "name another folder with --out, or remove it to have the data prepared anew"
        )
    try:
        parts = {name: None if about[name] is None else Rows(**about[name]) for name in ("train", "held_out")}
        return Prepared(**about | parts)
    except (TypeError, KeyError) as error:
        raise _damaged(folder, error) from error


def _record(folder: Path) -> dict[str, Any]:
    """The record that `prepare` left in a folder, unchecked. Raises ConfigError."""
    try:
        about = json.loads((folder / ABOUT).read_text())
    except (OSError, ValueError) as error:
        raise _damaged(folder, error) from error
    if not isinstance(about, dict):
        raise _damaged(folder, "it is no object")
    return about


def _other_version(about: Mapping[str, object]) -> str:
    """Which version left a record whose fields are not those of this one, in words; "" where they are."""
    known = fields(Prepared)
    needed = {each.name for each in known if each.default is MISSING and each.default_factory is MISSING}
    if not {"key", "train"} <= about.keys():  # which every version has
        return ""
    if about.keys() - {each.name for each in known}:
        return "a later version"
    return "an earlier version" if needed - about.keys() else ""


def _damaged(folder: Path, cause: object) -> ConfigError:
    return ConfigError(f"{folder / ABOUT} is missing or damaged: {cause}: remove {folder} to have it prepared anew")


def _write(data: Data, folder: Path, encoder: Encoder, key: str, progress: Callable[[int], None]) -> Prepared:
    forms, encoded, originals, counted = list[str](), list[list[Encoded]](), list[Sample](), list[int]()
    unused = Counter[str]()
    for each in (data, *data.for_evaluation):
        for where, form, sample in samples(each, unused):
            forms.append(form)
            encoded.append(encoder.encode(sample, where))
            originals.append(sample)
            progress(len(forms))
        counted.append(len(forms))
    count = counted[0]
    apart = kept_apart(count, data.share, data.seed) | {*range(count, len(forms))}
    groups = {TRAIN: [i for i in range(count) if i not in apart], HELD_OUT: sorted(apart)}
    parts = {name: [part for number in numbers for part in encoded[number]] for name, numbers in groups.items()}
    row_length = data.row_length(*parts.values()) if parts[TRAIN] else data.length
    written = {
        name: _rows(folder / name, members, row_length if data.pack else None)
        for name, members in parts.items()
        if members
    }
    if TRAIN not in written:
        raise ConfigError(f"{data.name}: no sample has a target within {data.length} tokens: raise --max-seq-len")
    if HELD_OUT in written:
        write_questions(folder, [originals[number] for number in groups[HELD_OUT] if encoded[number]])
    counts = encoder.counts
    return Prepared(
        key,
        form=forms[0],
        records=count,
        length=data.length,
        row_length=row_length,
        pack=data.pack,
        longest=counts.longest,
        split=counts.split,
        ended=counts.ended,
        cut=counts.cut,
        left_out=counts.left_out,
        train=written[TRAIN],
        held_out=written.get(HELD_OUT),
        files=[str(path) for path in data.files],
        greeted=counts.greeted,
        empty=counts.empty,
        unprompted=counts.unprompted,
        shared=shared_samples(*([encoded[number] for number in numbers] for numbers in groups.values())),
        unused=dict(unused) | unreasoned(counts),
        skipped=data.skipped,
    )


def unreasoned(counts: Counts) -> dict[str, int]:
    """What a chat template does not write of answers, as `Prepared.unused` has it."""
    reason = "reasoning that the chat template does not write"
    return {reason: counts.unreasoned} if counts.unreasoned else {}


def shared_samples(trained: Sequence[Sequence[Encoded]], held_out: Sequence[Sequence[Encoded]]) -> int:
    """How many samples that are kept apart are trained on, too, token for token."""
    keys = {_digest(parts) for parts in trained}
    return sum(bool(parts) and _digest(parts) in keys for parts in held_out)


def _digest(parts: Sequence[Encoded]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.ids.tobytes() + part.trained.tobytes() + b"|")
    return digest.digest()


def kept_apart(count: int, share: float, seed: int) -> set[int]:
    """The samples that are kept apart: at least one, if any are."""
    few = min(count - 1, max(1, round(share * count))) if share and count > 1 else 0
    keys = np.random.Philox(key=[seed, count]).random_raw(count)
    return set(np.argsort(keys, kind="stable")[:few].tolist())


def _rows(folder: Path, parts: Sequence[Encoded], row_length: int | None) -> Rows:
    """Write samples as rows, packed into `row_length` tokens or each in a row of its own (None)."""
    rows = pack([len(part) for part in parts], row_length) if row_length else [[n] for n in range(len(parts))]
    with ShardWriter(folder, COLUMNS, hashes=("sha256",)) as writer:
        for numbers in rows:
            members = [parts[number] for number in numbers]
            writer.write(
                {
                    "tokens": np.concatenate([member.ids for member in members]),
                    "documents": np.array([len(member) for member in members], np.uint32),
                    "trained": np.concatenate([member.trained for member in members]).astype(np.uint8),
                }
            )
    write_lengths(folder, [sum(len(parts[number]) for number in numbers) for numbers in rows])
    real, trained = sum(map(len, parts)), sum(int(part.trained.sum()) for part in parts)
    return Rows(len(parts), len(rows), real, trained)


def write_questions(folder: Path, held_out: Sequence[Sample]) -> None:
    """Write held-out prompts with their answers, for whom wants to ask the model; plain texts have none."""
    lines = [line for sample in held_out[:MOST_PROMPTS] if (line := _prompt(sample)) is not None]
    write_atomically(folder / PROMPTS, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def read_prompts(folder: Path, most: int) -> list[JsonObject]:
    """Held-out prompts with their answers, from a folder that `prepare` wrote: `messages` or `prompt`, and `answer`."""
    path = folder / PROMPTS
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:  # str.splitlines ends a line at U+2028 and the like, which JSON may hold
        return [json.loads(line) for line in islice(file, most)]


def _prompt(sample: Sample) -> JsonObject | None:
    if isinstance(sample, Chat):
        last = sample.answers[-1]
        line: JsonObject = {"messages": list(sample.messages[:last]), "answer": sample.messages[last]["content"]}
        return line | ({"tools": list(sample.tools)} if sample.tools else {})
    return {"prompt": sample.prompt, "answer": sample.completion} if isinstance(sample, Continuation) else None


def _key(data: Data, tokenizer: "Tokenizer", template: "ChatTemplate") -> str:
    """A digest of everything that the rows follow from."""
    settings = {k: v for k, v in vars(data).items() if k not in ("places", "preprocess", "evaluation")}
    settings["preprocess"] = data.preprocess.source if data.preprocess else None
    settings["evaluation"] = len(data.evaluation)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(tokenizer.to_bytes())
    digest.update(template.source.encode())
    for path in data.files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
