"""`Tokenizer`: text to ids and back, on the `tokenizers` library and, for short texts, without it."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError, RequestError
from roofline.text.tokenizers.density import Density, density_of
from roofline.text.tokenizers.vocabulary import AddedToken, JsonObject, Vocabulary, byte_alphabet, library_errors
from roofline.text.tokenizers.words import word_text

if TYPE_CHECKING:
    import tokenizers

    from roofline.text.tokenizers.cover import Cover
    from roofline.text.tokenizers.short_text import ShortTextEncoder

SPACE = "▁"  # SentencePiece's visible space
_PROBE = "a 1\n\0\U0010fffd"  # among them what no vocabulary has, for which some need a token of its own
LARGE_TEXT = 1 << 14  # characters, which take milliseconds
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Text to ids and back.

    Built by `from_json`, `from_gguf` or `Tokenizer.from_bytes`; safe to use from several threads.

    Attributes:
        vocab_size: one more than the largest id (a model's embedding may have more rows, or fewer).
        bos_id: id of the beginning-of-text token, None without one.
        eos_ids: every id that ends a generation.
        add_bos: whether ``encode(add_special=True)`` begins with `bos_id`.
    """

    def __init__(
        self, vocabulary: Vocabulary, short_text: "ShortTextEncoder | None" = None, *, complete: bool = True
    ) -> None:
        """short_text: encodes short texts until the library's tables are built. With complete=False they are built
        when they are first needed, or by `complete`."""
        self.vocabulary = vocabulary
        self._short_text = short_text
        self.vocab_size = vocabulary.size
        self.bos_id, self.eos_ids = vocabulary.bos_id, vocabulary.eos_ids
        self.add_bos = vocabulary.bos_id is not None and vocabulary.bos_id in vocabulary.prefix
        self.strip_space = vocabulary.strip_space
        self.special_ids = frozenset(token.id for token in vocabulary.added if token.special)
        self._added = {token.id: token for token in vocabulary.added}
        self._alphabet = byte_alphabet()
        self._bytes: dict[int, bytes] = {}
        self._ordinary = [token.content for token in vocabulary.added if not token.special]
        if complete:
            self.complete()

    @classmethod
    def of_file(cls, path: Path | str, vocabulary: Vocabulary) -> "Tokenizer":
        """The tokenizer of a file, which errors name; what no file may contain is tried out first.

        Raises ConfigError where the library cannot build it, or not encode every text with it.
        """
        try:
            for token_id in (*vocabulary.prefix, *vocabulary.suffix):
                if token_id >= vocabulary.size:
                    raise ConfigError(f"{token_id}, which is put around texts, is none of {vocabulary.size} tokens")
            tokenizer = cls(vocabulary)
            tokenizer.encode(_PROBE, add_special=False)
        except ConfigError as error:
            unknown = vocabulary.options.get("unk_token")
            lost = unknown is not None and unknown not in vocabulary.tokens
            raise ConfigError(f"{path}: {f'unk_token {unknown!r}: ' if lost else ''}{error}") from error
        return tokenizer

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> "Tokenizer":
        """Reads the fast form that `to_bytes` wrote; `complete` is left to the caller.

        Raises ConfigError when it is damaged; so may the first use that reads more of it.
        """
        from roofline.text.tokenizers.binary_file import from_bytes

        return cls(*from_bytes(data), complete=False)

    @property
    def has_short_text_encoder(self) -> bool:
        """Whether short plain texts can be encoded without the library's tables."""
        return self._short_text is not None

    def to_bytes(self) -> bytes:
        """The fast form, for a bundle."""
        from roofline.text.tokenizers.binary_file import to_bytes

        return to_bytes(self.vocabulary)

    @cached_property
    def density(self) -> Density | None:
        """How much text a token stands for at the most; None where that has no bound."""
        return density_of(self.vocabulary)

    @cached_property
    def cover(self) -> "Cover | None":
        """What tells that a text has too many tokens; None where nothing does. Built in a second, when first needed."""
        from roofline.text.tokenizers.cover import cover_of

        if self.density is None:
            return None
        return cover_of(self.vocabulary, self.density, (self._spell(token_id) for token_id in range(self.vocab_size)))

    def limit_ends(self, rows: int) -> None:
        """Forget the ends of answers for which a model of so many rows has none."""
        ends = tuple(token_id for token_id in self.eos_ids if token_id < rows)
        if ends != self.eos_ids:
            self.vocabulary = replace(self.vocabulary, eos_ids=ends)
            self.eos_ids = ends

    def complete(self) -> None:
        """Build the library's tables now (tens of milliseconds), so that no later call has to."""
        _ = self._parsing, self._plain

    def encode(self, text: str, *, add_special: bool, parse_special: bool = False) -> list[int]:
        """The ids of `text`.

        Args:
            add_special: put the tokenizer's own prefix (BOS) and suffix around it.
            parse_special: read special tokens in the text as such; otherwise their text is plain text.
        Raises:
            RequestError: the text holds half a surrogate pair, which no encoding can carry.
        """
        ids = self._encode(self._parsing, text) if parse_special else self._encode_short(text)
        if ids is None:
            ids = self._encode_plain(self._plain, text)
        return [*self.vocabulary.prefix, *ids, *self.vocabulary.suffix] if add_special else ids

    def encode_marked(self, text: str, trusted: bytes) -> list[int]:
        """The ids of `text` where a special token counts only if all its characters are trusted.

        trusted: one byte a character, 1 where the character may be part of a special token.
        """
        matches = list(self._special_pattern.finditer(text))
        short_ids = self._encode_short_marked(text, trusted, matches)
        if short_ids is not None:
            return short_ids
        if all(0 not in trusted[match.start() : match.end()] for match in matches):
            parsed = self._encode(self._parsing, text)
            expected = [self._specials[match[0]].id for match in matches]
            # They differ where the library matches normalized text, or a token has conditions: then piece by piece
            if [token_id for token_id in parsed if token_id in self.special_ids] == expected:
                return parsed
        ids: list[int] = []
        at = 0
        for start, end, token in self._trusted_specials(text, trusted):
            ids += self._encode_piece(text[at:start], at, before=token)
            ids.append(token.id)
            at = end + (len(text) - end - len(text[end:].lstrip()) if token.rstrip else 0)
        return ids + self._encode_piece(text[at:], at, before=None)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`: their bytes as UTF-8, U+FFFD where they are none, less SentencePiece's first space."""
        skipped = self.special_ids if skip_special else frozenset()
        data = b"".join([self.token_bytes(token_id) for token_id in ids if token_id not in skipped])
        if self.strip_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id outside the vocabulary (a padded row of the embedding)."""
        spelling = self._bytes.get(token_id)
        if spelling is None:
            spelling = self._bytes[token_id] = self._spell(token_id) if 0 <= token_id < self.vocab_size else b""
        return spelling

    def token_string(self, token_id: int) -> str:
        """How the vocabulary writes a token, say "Ġthe"; empty for an id outside of it."""
        if token_id in self._added:
            return self._added[token_id].content
        return self.vocabulary.tokens[token_id] if 0 <= token_id < len(self.vocabulary.tokens) else ""

    def special_spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Where the text of special tokens stands in `text`: (start, end) in characters."""
        return (match.span() for match in self._special_pattern.finditer(text))

    def token_id(self, content: str) -> int | None:
        """The id of a token by its content, None when there is none."""
        return self._parsing.token_to_id(content)

    def _spell(self, token_id: int) -> bytes:
        if self.vocabulary.continues is not None:
            text = word_text(self.token_string(token_id), self.vocabulary.continues, self.vocabulary.joins_signs)
            return text.encode("utf-8")
        token = self.token_string(token_id)
        if self.vocabulary.byte_level:
            if token_id not in self._added and all(c in self._alphabet for c in token):
                return bytes(map(self._alphabet.__getitem__, token))
            return token.encode("utf-8")
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode("utf-8")

    @cached_property
    def _parsing(self) -> "tokenizers.Tokenizer":
        """The library's tokenizer, which reads special tokens as such."""
        parsing = self.vocabulary.assemble(self.vocabulary.build_model(), self.vocabulary.pipeline)
        self._short_text = None
        return parsing

    @cached_property
    def _plain(self) -> "tokenizers.Tokenizer":
        return self._without_specials(self.vocabulary.pipeline)

    def _encode_short(self, text: str) -> list[int] | None:
        """Ids of a text in which nothing is special, None where the library must encode it."""
        encoder = self._short_text
        if encoder is None or any(content in text for content in self._ordinary):
            return None
        ids = encoder.encode(text)
        return ids if ids is not None and self.special_ids.isdisjoint(ids) else None

    def _encode_short_marked(self, text: str, trusted: bytes, matches: list[re.Match[str]]) -> list[int] | None:
        """`encode_marked` where every special token in the text counts, piece by piece between them."""
        if self._short_text is None or any(0 in trusted[match.start() : match.end()] for match in matches):
            return None
        ids: list[int] = []
        at = 0
        for match in matches:
            piece = self._encode_short(text[at : match.start()])
            if piece is None:
                return None
            ids += [*piece, self._specials[match[0]].id]
            at = match.end()
        piece = self._encode_short(text[at:])
        return None if piece is None else ids + piece

    def _encode(self, view: "tokenizers.Tokenizer", text: str) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(400, "invalid_unicode", f"half a surrogate pair in the text: {error.reason}") from error
        with library_errors("the tokenizer cannot encode this text"):
            text = str.__str__(text)  # the library would take a subclass apart differently
            if len(text) < LARGE_TEXT:
                return view.encode(text, add_special_tokens=False).ids
            # Only the library's batches leave the interpreter to other threads meanwhile.
            return view.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _encode_plain(self, view: "tokenizers.Tokenizer", text: str) -> list[int]:
        """Ids without special ones, even of a vocabulary whose merges spell a special token."""
        ids = self._encode(view, text)
        if self.special_ids.isdisjoint(ids):
            return ids
        pieces = []
        at = 0
        for match in self._special_pattern.finditer(text):  # a token cannot come from a piece that lacks its text
            pieces.append(text[at : match.start() + 1])
            at = match.start() + 1
        first, *rest = [*pieces, text[at:]]
        ids = self._encode(view, first)
        for piece in rest:
            ids += self._encode(self._continuing, piece)
        return ids

    @cached_property
    def _specials(self) -> dict[str, AddedToken]:
        return {token.content: token for token in self.vocabulary.added if token.special}

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        contents = sorted(self._specials, key=len, reverse=True)  # of those at one place the longest
        return re.compile("|".join(map(re.escape, contents)) if contents else r"(?!)")

    @cached_property
    def _continuing(self) -> "tokenizers.Tokenizer":
        """`_plain` for text that is not the beginning: a Metaspace that prefixes only the first piece prefixes none."""
        return self._without_specials({key: _never_first(part) for key, part in self.vocabulary.pipeline.items()})

    def _without_specials(self, pipeline: JsonObject) -> "tokenizers.Tokenizer":
        """Another view of the model: the library's switch for special tokens is no argument but a property."""
        view = self.vocabulary.assemble(self._parsing.model, pipeline)
        view.encode_special_tokens = True
        return view

    def _trusted_specials(self, text: str, trusted: bytes) -> Iterable[tuple[int, int, AddedToken]]:
        for run in re.finditer(rb"\x01+", trusted):
            for match in self._special_pattern.finditer(text, run.start(), run.end()):
                token = self._specials[match[0]]
                around = text[max(match.start() - 1, 0) : match.start()], text[match.end() : match.end() + 1]
                if not (token.single_word and any(c.isalnum() or c == "_" for c in around)):
                    yield match.start(), match.end(), token

    def _encode_piece(self, piece: str, at: int, before: AddedToken | None) -> list[int]:
        """Ids of the plain text between two special tokens: `at` is its offset, `before` the token that follows it."""
        if before is not None and before.lstrip:
            piece = piece.rstrip()
        return self._encode_plain(self._plain if at == 0 else self._continuing, piece) if piece else []


def _never_first(pipeline: object) -> object:
    """The pipeline with ``prepend_scheme`` "first" turned into "never"."""
    if isinstance(pipeline, Mapping):
        return {
            key: "never" if key == "prepend_scheme" and value == "first" else _never_first(value)
            for key, value in pipeline.items()
        }
    if isinstance(pipeline, Sequence) and not isinstance(pipeline, str):
        return [_never_first(value) for value in pipeline]
    return pipeline
