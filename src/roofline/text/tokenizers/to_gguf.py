"""A tokenizer as the key-value pairs of a GGUF file: the inverse of `from_gguf`, and checked against it."""

from collections.abc import Mapping
from dataclasses import replace

from roofline.common.errors import UnsupportedError
from roofline.text.tokenizers.from_gguf import from_gguf, takes_spaces_behind
from roofline.text.tokenizers.pretokenizers import kind_of_pipeline
from roofline.text.tokenizers.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from roofline.text.tokenizers.tokenizer import SPACE, Tokenizer
from roofline.text.tokenizers.vocabulary import END_TOKENS, AddedToken, Vocabulary

_ENDS = ("eos", "eot", "eom")
# What both tokenizers must make the same ids of: scripts, digits, spaces, ends of lines, contractions, no characters.
_PROBES = (
    "Hello world, it's 12345 o'clock; we'll see 3.14159!",
    "  two  spaces\tand a tab\n\nand lines\r\n   indented",
    "Straße, naïve café — “quotes” … Ελληνικά, русский, 日本語の文章、한국어, العربية, हिन्दी",
    "def f(x):\n    return x**2  # comment\n<tag attr='1'/> & {json: [1, 2]}",
    "e\u0301 \u00e9 \U0001f600\U0001f468\u200d\U0001f469 \u0000\u0007 \u200b",
    "AbCdEF ABCdef 1st 2ND x2y ''s 'S I'LL DON'T _under_score_",
    f"if x:\n{' ' * 8}y\n{' ' * 35}z{' ' * 70}\n\n\n\t\t\t end   ",
)


def to_gguf(tokenizer: Tokenizer, rows: int, chat_template: str | None, name: str = "") -> dict[str, object]:
    """The keys `tokenizer.*`.

    Args:
        rows: of the model's embedding; ids without a token get a filler, as llama.cpp wants a token for each, and
            tokens without a row are left out.
        chat_template: Jinja, None where the model has none.
        name: the file's ``general.name``, by which llama.cpp knows the white space that some tokens take.

    Raises UnsupportedError for a tokenizer that a GGUF file cannot express, naming what.
    """
    vocabulary = _always_prefixed(tokenizer.vocabulary.within(rows))
    if vocabulary is not tokenizer.vocabulary:
        tokenizer = Tokenizer(vocabulary)
    if vocabulary.model != "BPE":
        raise _refused(f"a {vocabulary.model} model", "its normalisation cannot be written")
    for token in vocabulary.added:
        _check_conditions(token, name)
    within = "tokenizer.ggml."
    kind = _byte_level(vocabulary) if vocabulary.byte_level else _sentencepiece(vocabulary, rows)
    values: dict[str, object] = {f"{within}{key}": value for key, value in kind.items()}
    tokens, types = _tokens(vocabulary, rows)
    values |= {f"{within}tokens": tokens, f"{within}token_type": types}
    if not vocabulary.leftmost:  # there the scores alone say which merge comes first
        values[f"{within}merges"] = [f"{a} {b}" for a, b in zip(vocabulary.lefts, vocabulary.rights, strict=True)]
    values |= {f"{within}{key}": value for key, value in _around(vocabulary).items()}
    if chat_template is not None:
        values["tokenizer.chat_template"] = chat_template
    check_same(tokenizer, from_gguf({**values, "general.name": name}), "a GGUF file", space=" ")
    return values


def splits_otherwise(tokenizer: Tokenizer) -> list[str]:
    """What a GGUF file of a tokenizer does otherwise than the tokenizer, in words."""
    if _always_prefixed(tokenizer.vocabulary) is tokenizer.vocabulary:
        return []
    what = "a GGUF file has a space put before every text and behind every special token, as SentencePiece has"
    return [f"{what}: this tokenizer puts none before a text that begins with one, which gets other ids there"]


def _always_prefixed(vocabulary: Vocabulary) -> Vocabulary:
    """The vocabulary with the space before a text put there as SentencePiece does, where it is put there by a step
    Metaspace, as Llama's class in transformers 5 writes it: not before a text that begins with a space."""
    step = vocabulary.pipeline.get("pre_tokenizer")
    if vocabulary.byte_level or not isinstance(step, Mapping) or step.get("type") != "Metaspace":
        return vocabulary
    scheme = step.get("prepend_scheme", "always")
    if scheme == "first":
        reason = "the space goes before a text alone, and in a GGUF file behind every special token, too, or nowhere"
        raise _refused("a step Metaspace with prepend_scheme first", reason)
    if scheme != "always" or step.get("split", True) or vocabulary.pipeline.get("normalizer") is not None:
        return vocabulary
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, spaces]}
    return replace(vocabulary, pipeline={**vocabulary.pipeline, "normalizer": steps, "pre_tokenizer": None})


def check_same(tokenizer: Tokenizer, read: Tokenizer, place: str, space: str = SPACE) -> None:
    """Raise UnsupportedError unless a tokenizer that was read back from a place does as the one that was written.

    space: what stands in texts for the visible space of ordinary tokens.
    """
    added = tokenizer.vocabulary.added[:64]
    plain = tokenizer.vocabulary.byte_level
    texts = (t.content if t.special or plain else t.content.replace(SPACE, space) for t in added)
    specials = "".join(f"{text} x" for text in texts)
    for text in (*_PROBES, specials):
        for parse in (False, True):
            before = tokenizer.encode(text, add_special=True, parse_special=parse)
            after = read.encode(text, add_special=True, parse_special=parse)
            if before != after:
                at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
                reason = f"it would split {text[:40]!r} differently, from token {at} on"
                raise UnsupportedError(f"this tokenizer in {place}", reason)
    if set(tokenizer.eos_ids) != set(read.eos_ids):
        reason = f"the ends {sorted(tokenizer.eos_ids)} would be read back as {sorted(read.eos_ids)}"
        raise UnsupportedError(f"this tokenizer in {place}", reason)


def _refused(what: str, reason: str) -> UnsupportedError:
    return UnsupportedError(f"{what} of a tokenizer in a GGUF file", reason)


def _check_conditions(token: AddedToken, name: str) -> None:
    """Raise UnsupportedError for a token with conditions on what stands around it, but for those of Phi-3."""
    if token.lstrip or token.single_word:
        raise _refused(f"token {token.content!r}", "the conditions on what stands around it have no key")
    if token.rstrip and not takes_spaces_behind(name, token.content):
        reason = "that it takes the white space behind it has no key: llama.cpp knows it of Phi-3 alone, by the name"
        remedy = 'a folder with "phi-3" in its name, if the model is one'
        raise UnsupportedError(f"token {token.content!r} of a tokenizer in a GGUF file", reason, (remedy,))


def _byte_level(vocabulary: Vocabulary) -> dict[str, object]:
    ignore_merges = bool(vocabulary.options.get("ignore_merges"))
    kind = kind_of_pipeline(vocabulary.pipeline, ignore_merges)
    if kind is None:
        raise _refused("the splitting rule", "no name (tokenizer.ggml.pre) that we know stands for it")
    return {"model": "gpt2", "pre": kind}


def _sentencepiece(vocabulary: Vocabulary, rows: int) -> dict[str, object]:
    if vocabulary.leftmost:
        scores = [*vocabulary.scores, *[0.0] * (rows - len(vocabulary.scores))]
    else:
        scores = _scores(vocabulary, rows)
    normalizer = str(vocabulary.pipeline.get("normalizer")) + str(vocabulary.pipeline.get("pre_tokenizer"))
    prefixed = "Prepend" in normalizer or ("Metaspace" in normalizer and "'never'" not in normalizer)
    return {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": prefixed}


def _scores(vocabulary: Vocabulary, rows: int) -> list[float]:
    """llama.cpp merges by the score of the result: the first merge that makes a token says its place.

    What no merge makes comes last: llama.cpp would make it all the same, of two tokens that happen to spell it.
    """
    place: dict[str, int] = {}
    for left, right in zip(vocabulary.lefts, vocabulary.rights, strict=True):
        place.setdefault(left + right, len(place) + 1)
    last = len(place) + 1
    scores = [-float(place.get(token, last)) for token in vocabulary.tokens]
    return [*scores, *[-float(last)] * (rows - len(scores))]


def _tokens(vocabulary: Vocabulary, count: int) -> tuple[list[str], list[int]]:
    tokens = [*vocabulary.tokens, *[""] * (count - len(vocabulary.tokens))]
    types = [NORMAL] * count
    unknown = vocabulary.options.get("unk_token")
    for i, token in enumerate(tokens):
        if not vocabulary.byte_level and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[i] = BYTE
        elif token and token == unknown:
            types[i] = UNKNOWN
    merged = {left + right for left, right in zip(vocabulary.lefts, vocabulary.rights, strict=True)}
    for i, token in enumerate(tokens):  # one that ends answers in other files and is not special here
        if token in END_TOKENS and token not in merged:
            types[i] = UNUSED
    for added in vocabulary.added:
        tokens[added.id] = added.content
        # Of a text without visible spaces merges alone make such a token, as Gemma's runs of spaces.
        is_merged = not vocabulary.byte_level and SPACE in added.content and added.content in merged
        if is_merged and not added.special and not added.normalized:
            continue
        if types[added.id] != UNKNOWN:
            types[added.id] = CONTROL if added.special else USER_DEFINED
    for i, token in enumerate(tokens):
        if not token:
            tokens[i], types[i] = f"[PAD{i}]", UNUSED
    return tokens, types


def _around(vocabulary: Vocabulary) -> dict[str, object]:
    """The ids of the ends, and what is put around a text."""
    values: dict[str, object] = {}
    if vocabulary.bos_id is not None:
        values["bos_token_id"] = vocabulary.bos_id
    values |= {f"{name}_token_id": i for name, i in zip(_ENDS, vocabulary.eos_ids, strict=False)}
    unknown = vocabulary.options.get("unk_token")
    if unknown is not None and unknown in vocabulary.tokens:
        values["unknown_token_id"] = list(vocabulary.tokens).index(str(unknown))
    bos, eos = vocabulary.bos_id, vocabulary.eos_ids[0] if vocabulary.eos_ids else None
    for name, ids, own in (("bos", vocabulary.prefix, bos), ("eos", vocabulary.suffix, eos)):
        if tuple(ids) not in ((), (own,)):
            raise _refused(f"{list(ids)} around each text", f"only the token {name} can be put there")
        values[f"add_{name}_token"] = bool(ids)
    return values
