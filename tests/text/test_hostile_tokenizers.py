"""Tokenizer files that are wrong or meant badly: one error that names file and key, soon and in little memory."""

import copy
import json
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models

from roofline.bundle.text_side import text_of_folder
from roofline.common.errors import ConfigError, RooflineError, UnsupportedError
from roofline.text.tokenizers.binary_file import from_bytes, to_bytes
from roofline.text.tokenizers.from_gguf import from_gguf
from roofline.text.tokenizers.from_json import from_json
from roofline.text.tokenizers.patterns import PatternError, least_length
from roofline.text.tokenizers.pretokenizers import PATTERNS
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.text.tokenizers.vocabulary import AddedToken, Vocabulary

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
WRONG = [None, True, False, "x", "", 7, -1, 1 << 70, 1e9, 0.5, [], ["x"], [1], {}, {"x": 1}]


def library_json(**parts: Any) -> bytes:
    """A tokenizer.json of a few tokens, with parts replaced."""
    built = LibraryTokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    data = json.loads(built.to_str())
    data["model"] |= parts.pop("model", {})
    return json.dumps({**data, "decoder": BYTE_LEVEL, **parts}).encode()


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def replace(kind: str, pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


GROWS = {"type": "Sequence", "normalizers": [replace("String", "a", "a" * 9)] * 9}
DEEP: dict[str, Any] = {"type": "NFC"}
for _ in range(20):
    DEEP = {"type": "Sequence", "normalizers": [DEEP]}


@pytest.mark.parametrize(
    ("parts", "key"),
    [
        ({"model": {"continuing_subword_prefix": "x"}}, "model.continuing_subword_prefix"),
        ({"model": {"continuing_subword_prefix": "##"}}, "model.continuing_subword_prefix"),
        ({"model": {"end_of_word_suffix": "</w>"}}, "model.end_of_word_suffix"),
        ({"model": {"vocab": {"a": 0, "b": 1_000_000_000}, "merges": []}}, "model.vocab.b"),
        ({"model": {"vocab": {"a": 0, "b": -1}, "merges": []}}, "model.vocab.b"),
        ({"model": {"type": "Unigram", "vocab": [["a", 0.5]], "unk_id": 3}}, "model.unk_id"),
        ({"model": {"type": "Unigram", "vocab": [["a", 0.5]], "unk_id": None}}, "tokenizer.json: .*unk_id"),
        ({"model": {"unk_token": "?"}, "decoder": replace("String", "▁", " ")}, "tokenizer.json: .*Unk token"),
        *(
            (
                {"model": {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [merge]}},
                r"model.merges\[0\]: is .*, not two tokens",
            )
            for merge in (["a", 1], [1, "b"], ["a"], ["a", "b", "c"], "ab", 7)
        ),
        ({"normalizer": replace("String", "", "x")}, "normalizer.pattern.String: is empty"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [replace("String", "a", "a" * 9)] * 9}},
            r"normalizers\[\d",
        ),
        ({"normalizer": replace("Regex", "(a+)+$", "x")}, "normalizer.pattern.Regex"),
        ({"normalizer": replace("Regex", "a*", "x" * 600)}, "characters of one"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 600}}, "characters of one"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "normalizer.precompiled_charsmap"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA////"}}, "precompiled_charsmap"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 300}}, "more than 256 steps"),
        ({"normalizer": DEEP}, "nested deeper"),
        ({"pre_tokenizer": split("(a+)+$")}, "pre_tokenizer.pattern.Regex"),
        ({"pre_tokenizer": split("((a{1000}){1000}){1000}")}, "pre_tokenizer.pattern.Regex"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "FixedLength"),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "", "split": True}}, "pre_tokenizer.replacement"),
        ({"pre_tokenizer": {**split("a"), "behavior": "Anyhow"}}, "pre_tokenizer.behavior.*Isolated"),
        ({"post_processor": {"type": "Sequence"}}, "post_processor.processors: is missing"),
        ({"post_processor": {"type": "BertProcessing", "sep": ["b", 1], "cls": ["a", 99]}}, "99, which is put around"),
        ({"post_processor": {"type": "Twofold"}}, "Twofold"),
    ],
)
def test_what_the_library_must_not_see_is_refused(parts: dict[str, Any], key: str, capfd: Any) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=key) as caught:
        from_json(library_json(**parts), {})
    assert "tokenizer.json" in str(caught.value)
    assert "panicked" not in capfd.readouterr().err  # the library was not asked


@pytest.fixture
def little_memory() -> Iterator[None]:
    """An allocation of gigabytes fails."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.usefixtures("little_memory")
def test_an_id_of_a_thousand_million_asks_for_no_memory() -> None:
    entry = {"id": 1_000_000_000, "content": "<x>", "special": True, "lstrip": False, "rstrip": False}
    with pytest.raises(ConfigError, match=r"tokenizer\.json: added_tokens\[0\]\.id: the number 1000000000 is no id"):
        from_json(library_json(added_tokens=[{**entry, "single_word": False, "normalized": False}]), {})


HALF = "\ud800"  # of a surrogate pair: JSON can write it, no encoding of text can


def test_half_a_surrogate_pair_is_no_token() -> None:
    flags = dict.fromkeys(("special", "lstrip", "rstrip", "single_word", "normalized"), False)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: added_tokens\[0\]\.content: holds half a surrogate pair"):
        from_json(library_json(added_tokens=[{"id": 3, "content": HALF, **flags}]), {})
    with pytest.raises(ConfigError, match="vocabulary and merges do not fit together"):
        from_json(library_json(model={"vocab": {"a": 0, "b": 1, HALF: 2}, "merges": []}), {})
    added = (AddedToken(1, HALF, special=True),)
    with pytest.raises(ConfigError, match="its added tokens cannot be built"):
        Tokenizer(Vocabulary("BPE", ["a"], added=added)).complete()


def test_a_panic_of_the_library_is_an_error_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that gets past the checks: the library panics once it has tried ten million ways."""
    monkeypatch.setattr("roofline.text.tokenizers.steps.least_length", lambda pattern: 1)
    tokenizer = from_json(library_json(pre_tokenizer=split("(a+)+$")), {})
    with pytest.raises(ConfigError, match=r"cannot encode this text: .*retry-limit"):
        tokenizer.encode("a" * 40 + "b", add_special=False)


SAFE = [
    *(pattern for patterns in PATTERNS.values() for pattern in patterns),
    *(r"(?=(\d{3})+(?!\d))", r"\d{1,3}(?=(?:\d{3})*\b)", r"\p{N}{1,3}+", r"[^\r\n\p{L}\p{N}]?+\p{L}+| ?[^\s]++[\r\n]*"),
    *(r"[\p{L}&&[^\p{Han}]]+(?i:'s|'t)?|\s+", r"[]a]+", r"(?<=\d)(?=\d)", r"\x{2581}+", "(?:ab|cd)+x", " {2,}", ""),
]
UNSAFE = [
    *("(a+)+$", "(a|a)*b", "(a|aa)+$", "(a?){30}a{30}", "a*a*a*a*a*b", "(?:(?:a*)*)*b", "(?=(a+)+b)", "(a{9}){999}"),
    *("(x", "x)", "[a", "a{99999999}", "(" * 99 + ")" * 99, "x" * 20_000, r"(a)\1", r"(?<n>a)\g<n>", "(?x: a)", r"\X"),
]


@pytest.mark.parametrize("pattern", SAFE)
def test_patterns_of_models_are_searched_with(pattern: str) -> None:
    assert least_length(pattern) <= 12
    built = from_json(library_json(pre_tokenizer=split(pattern)), {}) if pattern else None
    assert built is None or built.encode("ab 12 " * 200, add_special=False)


@pytest.mark.parametrize("pattern", UNSAFE)
def test_patterns_that_may_search_for_ever_are_not(pattern: str) -> None:
    with pytest.raises(PatternError):
        least_length(pattern)


@pytest.mark.parametrize("kind", ["BertProcessing", "RobertaProcessing"])
def test_processing_of_bert_and_roberta_puts_its_tokens_around(kind: str) -> None:
    step = {"type": kind, "sep": ["b", 1], "cls": ["a", 0]}
    step |= {"trim_offsets": True, "add_prefix_space": False} if kind == "RobertaProcessing" else {}
    raw = library_json(post_processor={"type": "Sequence", "processors": [BYTE_LEVEL, step]})
    expected = LibraryTokenizer.from_str(raw.decode()).encode("ab").ids
    assert from_json(raw, {}).encode("ab", add_special=True) == expected == [0, 2, 1]


# --- every value of the wrong type ----------------------------------------------------------------------------------

ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [4], "tokens": ["<s>"]}},
}
BYTES: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [{"id": 4, "content": "<s>", **ADDED}, {"id": 5, "content": "</s>", **ADDED}],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, replace("Regex", " {2,}", " ")]},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(r"\p{N}"), BYTE_LEVEL]},
    "post_processor": {"type": "Sequence", "processors": [BYTE_LEVEL, TEMPLATE]},
    "decoder": BYTE_LEVEL,
    "model": {
        **{"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "fuse_unk": False},
        **{"end_of_word_suffix": "", "byte_fallback": False, "ignore_merges": False},
        **{"vocab": {"a": 0, "b": 1, "c": 2, "ab": 3}, "merges": ["a b"]},
    },
}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
PIECES: dict[str, Any] = {
    "added_tokens": [{"id": 0, "content": "<unk>", **ADDED}],
    "normalizer": {"type": "Prepend", "prepend": "▁"},
    "pre_tokenizer": METASPACE,
    "post_processor": {"type": "RobertaProcessing", "sep": ["a", 1], "cls": ["a", 1], "trim_offsets": True},
    "decoder": {"type": "Sequence", "decoders": [replace("String", "▁", " "), {"type": "Fuse"}, STRIP]},
    "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]], "byte_fallback": False},
}
SETTINGS: dict[str, Any] = {
    **{"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True, "add_eos_token": False},
    **{"chat_template": [{"name": "default", "template": "{{ messages }}"}], "model_max_length": 512},
}
GENERATION: dict[str, Any] = {"eos_token_id": [5], "temperature": 0.6, "do_sample": True}


def mutants(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every place in a value with everything of another type that may stand there, and huge and negative numbers."""
    for wrong in WRONG:
        numbers = isinstance(value, int | float) and isinstance(wrong, int | float)
        if path and (type(wrong) is not type(value) or (numbers and abs(wrong) > 1e6)):
            yield path, wrong
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from mutants(inner, (*path, key))


def planted(value: Any, path: tuple[Any, ...], wrong: Any) -> Any:
    value = copy.deepcopy(value)
    at = value
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = wrong
    return value


FILES = {"tokenizer.json": BYTES, "tokenizer_config.json": SETTINGS, "generation_config.json": GENERATION}
# The keys of which nothing is read, here or of what is inside; and those of which null, or none inside, is a value.
UNREAD = {"version", "truncation", "padding", "dropout", "pair", "type_id", "tokens", "model_max_length", "do_sample"}
UNREAD |= {"temperature", "name"}


def _words(tokenizer: Tokenizer) -> tuple[Any, ...]:
    texts = [tokenizer.encode(text, add_special=True, parse_special=True) for text in ("ab  c<s>", "1a")]
    return *texts, tokenizer.bos_id, tokenizer.eos_ids, tokenizer.decode([0, 1], skip_special=False)


def _check(name: str, path: tuple[Any, ...], wrong: Any, load: Callable[[], Any], good: Any) -> bool:
    """Whether a mutant was refused; it may load only where it says nothing new."""
    place = f"{name}: {path} = {wrong!r}"
    try:
        loaded = load()
    except RooflineError as error:
        message = str(error)
        assert name in message, (place, message)
        assert any(str(key) in message for key in path), (place, message)
        assert len(message) < 700, (place, message)
        return True
    except BaseException as error:
        raise AssertionError(f"{place} raised {type(error).__name__}: {error}") from error
    harmless = wrong in (None, "", [], {}) or UNREAD & set(path)
    harmless = harmless or (path == ("eos_token_id",) and wrong in (7, [1]))  # one id, or several
    harmless = harmless or (path in (("bos_token",), ("eos_token",)) and wrong == "x")  # a token that is added
    assert harmless or loaded == good, place
    return False


@pytest.mark.parametrize("name", FILES)
def test_wrong_types_in_hugging_face_files_are_named(name: str, tmp_path: Path) -> None:
    for file, value in FILES.items():
        (tmp_path / file).write_text(json.dumps(value))
    good = _words(text_of_folder(tmp_path)[0])
    places = list(mutants(FILES[name]))
    refused = 0
    for path, wrong in random.Random(15).sample(places, min(len(places), 900)):
        (tmp_path / name).write_text(json.dumps(planted(FILES[name], path, wrong)))
        refused += _check(name, path, wrong, lambda: _words(text_of_folder(tmp_path)[0]), good)
    assert refused > len(WRONG)


def test_wrong_types_in_a_tokenizer_of_pieces_are_named() -> None:
    good, refused = _words(from_json(json.dumps(PIECES).encode(), {})), 0
    places = list(mutants(PIECES))
    for path, wrong in random.Random(16).sample(places, min(len(places), 900)):
        raw = json.dumps(planted(PIECES, path, wrong)).encode()
        refused += _check("tokenizer.json", path, wrong, lambda raw=raw: _words(from_json(raw, {})), good)
    assert refused > 300


WORDS: dict[str, Any] = {
    "added_tokens": [{"id": 0, "content": "[UNK]", **ADDED}],
    "normalizer": {
        **{"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None},
        "lowercase": True,
    },
    "pre_tokenizer": {"type": "BertPreTokenizer"},
    "post_processor": {"type": "BertProcessing", "sep": ["a", 1], "cls": ["a", 1]},
    "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    "model": {
        **{"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"},
        **{"max_input_chars_per_word": 100, "vocab": {"[UNK]": 0, "a": 1, "##b": 2}},
    },
}
OPTIONAL = {"max_input_chars_per_word", "continuing_subword_prefix"}  # null stands for what these say here, too


def test_wrong_types_in_a_tokenizer_of_words_are_named() -> None:
    good, refused = _words(from_json(json.dumps(WORDS).encode(), {})), 0
    for path, wrong in mutants(WORDS):
        if path == ("normalizer", "strip_accents") or (wrong is None and path[-1] in OPTIONAL):
            continue
        raw = json.dumps(planted(WORDS, path, wrong)).encode()
        refused += _check("tokenizer.json", path, wrong, lambda raw=raw: _words(from_json(raw, {})), good)
    assert refused > 200


GGUF: dict[str, Any] = {
    **{
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab", "<s>"],
        "merges": ["a b"],
        "token_type": [1, 1, 1, 3],
    },
    **{"bos_token_id": 3, "eos_token_id": 3, "unknown_token_id": 0, "add_bos_token": True, "add_eos_token": False},
}
GGUF_PIECES: dict[str, Any] = {
    **{"model": "llama", "tokens": ["<unk>", "▁", "a"], "scores": [0.0, -1.0, -2.0], "token_type": [2, 1, 1]},
    **{"unknown_token_id": 0, "add_space_prefix": True, "add_bos_token": False},
}


GGUF_UNIGRAM: dict[str, Any] = {
    **{"model": "t5", "tokens": ["<unk>", "</s>", "▁", "a", "<s>"], "scores": [0.0, 0.0, -1.0, -2.0, 0.0]},
    **{"token_type": [2, 3, 1, 1, 3], "eos_token_id": 1, "unknown_token_id": 0, "add_space_prefix": True},
    **{"remove_extra_whitespaces": True, "add_eos_token": True, "precompiled_charsmap": []},
}
GGUF_WORDS: dict[str, Any] = {
    **{"model": "bert", "tokens": ["[UNK]", "[CLS]", "[SEP]", "▁ab", "c", "<s>"], "token_type": [3, 3, 3, 1, 1, 3]},
    **{"unknown_token_id": 0, "bos_token_id": 1, "seperator_token_id": 2, "eos_token_id": 2, "add_sep_token": True},
    **{"normalizer.lowercase": True, "normalizer.strip_accents": True, "add_bos_token": True},
}
KINDS = {"bytes": GGUF, "pieces": GGUF_PIECES, "unigram": GGUF_UNIGRAM, "words": GGUF_WORDS}


@pytest.mark.parametrize("good", KINDS.values(), ids=KINDS.keys())
def test_wrong_types_in_gguf_metadata_are_named(good: dict[str, Any]) -> None:
    def load(values: dict[str, Any]) -> Any:
        return _words(from_gguf({f"tokenizer.ggml.{key}": value for key, value in values.items()}, "model.gguf"))

    refused = 0
    for path, wrong in mutants(good):
        if wrong is None or isinstance(wrong, dict):  # a GGUF file has neither
            continue
        values = planted(good, path, wrong)
        refused += _check("model.gguf", path, wrong, lambda values=values: load(values), load(good))
    assert refused > 100


def test_wrong_types_in_a_stored_tokenizer_are_refused() -> None:
    data = to_bytes(from_json(json.dumps(BYTES).encode(), SETTINGS).vocabulary)
    end = 11 + int.from_bytes(data[7:11], "little")
    header = json.loads(data[11:end])
    places = list(mutants(header))
    for path, wrong in random.Random(17).sample(places, min(len(places), 500)):
        packed = json.dumps(planted(header, path, wrong)).encode()
        mutant = data[:7] + len(packed).to_bytes(4, "little") + packed + data[end:]
        try:
            vocabulary, encoder = from_bytes(mutant)
            Tokenizer(vocabulary, encoder).encode("ab", add_special=False)
        except RooflineError:
            continue
        except BaseException as error:
            raise AssertionError(f"{path} = {wrong!r} raised {type(error).__name__}: {error}") from error
