"""`Vocabulary`: everything that a tokenizer is built from, as plain data."""

import base64
import gc
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from roofline.common.errors import ConfigError
from roofline.common.fields import Fields, describe, shorten

if TYPE_CHECKING:
    import tokenizers
    from tokenizers import models

JsonObject = Mapping[str, Any]  # of a file: tokenizer.json, or the metadata of a GGUF file; checked where it is read
MAX_ID = 1 << 24  # more tokens than any model has rows
# tokenizer.json with nothing in it: the pipeline is parsed by the library, the model is set afterwards (5x faster)
_SKELETON = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}

# Ends of a turn or a text in the chat formats of the families; a file often names just one as its EOS.
END_TOKENS = frozenset(
    {
        "<|im_end|>",  # ChatML: Qwen, SmolLM2
        "<|eot_id|>",  # Llama 3
        "<|eom_id|>",  # Llama 3, tool calls
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|end|>",  # Phi 3
        "<|eot|>",  # Llama 4
        "<|return|>",  # Harmony
        "<end_of_turn>",  # Gemma
        "<|end_of_turn|>",
        "<|END_OF_TURN_TOKEN|>",  # Command R
        "<turn|>",  # Gemma 4
        "<|tool_response>",
        "<end_of_utterance>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",  # Kimi K2
        "[EOS]",
        "[e~[",  # MiniMax M2
        "<|call|>",  # Harmony, Solar Open: a call of a tool
        "<|calls|>",
        "<|flush|>",
        "<｜end▁of▁sentence｜>",  # DeepSeek
    }
)
# Where a file has these, <|end|> ends one message of several, and the answer goes on.
_HARMONY = (frozenset({"<|return|>", "<|call|>"}), frozenset({"<|calls|>", "<|flush|>"}))
ModelKind = Literal["BPE", "Unigram", "WordPiece", "WordLevel"]
MODEL_KINDS: tuple[ModelKind, ...] = ("BPE", "Unigram", "WordPiece", "WordLevel")


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched in the text before any splitting. ``special`` ones never come from plain text."""

    id: int
    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """Everything that a `Tokenizer` is built from.

    Attributes:
        model: one of MODEL_KINDS.
        tokens: the model's own spelling of each id; ids without one hold "".
        options: keyword arguments of the library's model (``byte_fallback``, ``ignore_merges``...).
        lefts, rights: the merges of BPE, best first.
        scores: log probabilities of Unigram, by id; those of BPE with `leftmost`.
        leftmost: of merges whose results have equal scores the leftmost goes first, which no order of merges says.
        pipeline: ``normalizer``, ``pre_tokenizer`` and ``decoder`` as tokenizer.json writes them.
        charsmap: in base64, SentencePiece's map of characters, which goes before the normalizer; "" without.
        added: added tokens, in the order of their ids; those the model does not spell come after its own ids.
        byte_level: spelt in GPT-2's byte alphabet; otherwise in SentencePiece's (``▁`` and ``<0x0A>``).
        continues: where tokens are words and the spaces between them are not spelt (WordPiece, WordLevel): the sign
            before a token that goes on with a word, such as ``##``, "" without one; None: tokens spell their spaces.
        joins_signs: decoding such words leaves out the space before a full stop or a comma.
        strip_space: decoding drops one leading space of a text (SentencePiece's dummy prefix, words).
        prefix, suffix: ids that ``add_special`` puts around a text.
    """

    model: ModelKind
    tokens: Sequence[str]
    options: JsonObject = field(default_factory=dict)
    lefts: Sequence[str] = ()
    rights: Sequence[str] = ()
    scores: Sequence[float] = ()
    leftmost: bool = False
    pipeline: JsonObject = field(default_factory=dict)
    charsmap: str = ""
    added: Sequence[AddedToken] = ()
    byte_level: bool = True
    continues: str | None = None
    joins_signs: bool = False
    strip_space: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    def within(self, rows: int) -> "Vocabulary":
        """What of it has ids for which a model of so many rows has one."""
        if self.size <= rows:
            return self
        unused = frozenset(self.tokens[rows:])
        pairs = [
            pair for pair in zip(self.lefts, self.rights, strict=True) if unused.isdisjoint((*pair, "".join(pair)))
        ]
        return replace(
            self,
            tokens=self.tokens[:rows],
            scores=self.scores[:rows],
            lefts=[pair[0] for pair in pairs],
            rights=[pair[1] for pair in pairs],
            added=[token for token in self.added if token.id < rows],
            bos_id=None if self.bos_id is None or self.bos_id >= rows else self.bos_id,
            eos_ids=tuple(i for i in self.eos_ids if i < rows),
            prefix=tuple(i for i in self.prefix if i < rows),
            suffix=tuple(i for i in self.suffix if i < rows),
        )

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max(len(self.tokens), max((token.id + 1 for token in self.added), default=0))

    def spelling(self, token_id: int) -> str | None:
        """The content of an id, None when it has none."""
        for token in self.added:
            if token.id == token_id:
                return token.content
        return (self.tokens[token_id] or None) if 0 <= token_id < len(self.tokens) else None

    def build_model(self) -> "models.Model":
        """The library's model. Raises ConfigError when vocabulary and merges do not fit together."""
        from tokenizers import models

        with _no_garbage_collection(), library_errors("the tokenizer's vocabulary and merges do not fit together"):
            if self.model == "Unigram":
                return models.Unigram(list(zip(self.tokens, self.scores, strict=True)), **self.options)
            ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
            ids.pop("", None)
            if self.model in ("WordPiece", "WordLevel") and self.options["unk_token"] not in ids:
                raise ConfigError("it has no such token")  # which the library says when a text first needs it
            if self.model == "WordPiece":
                return models.WordPiece(ids, **self.options)
            if self.model == "WordLevel":
                return models.WordLevel(ids, **self.options)
            if self.leftmost:  # each piece comes as it is
                return models.BPE(vocab=ids, merges=[], ignore_merges=True, **self.options)
            merges = list(zip(self.lefts, self.rights, strict=True))
            return models.BPE(vocab=ids, merges=merges, **self.options)

    def assemble(self, model: "models.Model", pipeline: JsonObject) -> "tokenizers.Tokenizer":
        """A tokenizer of the library around `model`, which several tokenizers share (the library counts references).

        Raises ConfigError when the pipeline is not understood, or an added token cannot get its id.
        """
        import tokenizers

        from roofline.text.tokenizers.steps import checked_steps

        for part in pipeline:
            checked_steps(Fields("tokenizer", pipeline), part)
        with library_errors("normalizer, pre-tokenizer or decoder cannot be built"):
            built = tokenizers.Tokenizer.from_str(json.dumps({**_SKELETON, **pipeline}))
        if self.charsmap:
            _put_first(built, self.charsmap)
        if self.leftmost:
            _merge_leftmost(built, self)
        built.model = model
        for special, run in groupby(self.added, key=lambda token: token.special):
            add = built.add_special_tokens if special else built.add_tokens
            with library_errors("its added tokens cannot be built"):
                add([_library_token(token) for token in run])
        for token in self.added:
            if built.token_to_id(token.content) != token.id:
                raise ConfigError(
                    f"added token {token.content!r} has id {token.id} in the file, "
                    f"but its place in the vocabulary is {built.token_to_id(token.content)}"
                )
        return built


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn what the library raises into a ConfigError: bare Exceptions, and its panics, which are not even those."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{what}: {shorten(str(error))}") from error


def checked_id(fields: Fields, key: str, token_id: int, count: int) -> int:
    """The id itself. Raises ConfigError unless it is one of `count`."""
    if not 0 <= token_id < count:
        fields.refuse(key, f"{describe(token_id)} is no id from 0 to {count - 1}")
    return token_id


def added_token(entry: Fields, count: int) -> AddedToken:
    """The token that an object of a file describes, its id below `count`. Raises ConfigError naming file and key."""
    flags = {f.name: entry.need(f.name, bool) for f in fields_of(AddedToken) if f.name not in ("id", "content")}
    return AddedToken(checked_id(entry, "id", entry.need("id", int), count), entry.need("content", str), **flags)


def end_ids(file_ids: Iterable[int | None], added: Iterable[AddedToken]) -> tuple[int, ...]:
    """The ids that a file lists as ends, in its order, then those of its special tokens that END_TOKENS has."""
    ids = [token_id for token_id in file_ids if token_id is not None]
    ids_by_content = {token.content: token.id for token in added if token.special and token.content in END_TOKENS}
    if any(tokens <= ids_by_content.keys() for tokens in _HARMONY):
        ids_by_content.pop("<|end|>", None)
    ids += ids_by_content.values()
    return tuple(dict.fromkeys(ids))


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable spelling of the 256 bytes: character -> byte (Radford et al. 2019, released encoder)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = sorted(set(range(256)) - set(printable))
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return alphabet


def _put_first(built: "tokenizers.Tokenizer", charsmap: str) -> None:
    """Let a text go through a map of characters before anything else. Raises ConfigError where it is none."""
    from tokenizers import normalizers

    from roofline.text.tokenizers.charsmap import CharacterMap

    try:
        characters = CharacterMap(base64.b64decode(charsmap, validate=True))
    except ValueError as error:
        raise ConfigError(f"its charsmap is not a compiled map of characters: {error}") from error
    first = normalizers.Normalizer.custom(characters)
    built.normalizer = normalizers.Sequence([first, built.normalizer] if built.normalizer else [first])


def _merge_leftmost(built: "tokenizers.Tokenizer", vocabulary: Vocabulary) -> None:
    """Let the pre-tokenizer merge, by scores."""
    from tokenizers import pre_tokenizers

    from roofline.text.tokenizers.leftmost import LeftmostMerges

    results = {left + right for left, right in zip(vocabulary.lefts, vocabulary.rights, strict=True)}
    scores = {
        token: score for token, score in zip(vocabulary.tokens, vocabulary.scores, strict=True) if token in results
    }
    built.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(LeftmostMerges(scores))


def _library_token(token: AddedToken) -> "tokenizers.AddedToken":
    import tokenizers

    options = dict(vars(token))
    del options["id"]
    return tokenizers.AddedToken(options.pop("content"), **options)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
