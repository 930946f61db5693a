"""Tokenizers against transformers, sentencepiece and their own promises."""

import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import AWKWARD, SPECIAL_TEXTS

from roofline.common.errors import RequestError
from roofline.text.tokenizers.cover import cover_of
from roofline.text.tokenizers.density import Density, density_of
from roofline.text.tokenizers.pretokenizers import PATTERNS, byte_level_pipeline
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.text.tokenizers.vocabulary import AddedToken, Vocabulary, byte_alphabet

WORDS = [
    "the",
    " the",
    " cat",
    "  ",
    "\n",
    "1",
    "12",
    " 1",
    "▁",
    "é",
    "<think>",
    "internationalization",
    "a" * 9,
    "####",
]
# SmolLM2's vocabulary has no token for these bytes; like transformers, we encode them as nothing. (It also lacks
# 0xF1 and 0xF2, which begin planes of Unicode that hold no characters yet.)
SMOLLM2_LACKS = "\x04\x06\x13\x14\x16\x1d"


@pytest.mark.parametrize("text", [*AWKWARD, *SPECIAL_TEXTS, "a <think> b</think>c", "[INST] x [/INST]"])
def test_json_ids_are_those_of_transformers(byte_bpe: Tokenizer, byte_bpe_hf: Any, text: str) -> None:
    split = byte_bpe_hf.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert byte_bpe.encode(text, add_special=False) == split
    parsed = byte_bpe.encode(text, add_special=False, parse_special=True)
    assert parsed == byte_bpe_hf.encode(text, add_special_tokens=False)
    assert byte_bpe.decode(split, skip_special=False) == text
    assert byte_bpe.decode(parsed) == byte_bpe_hf.decode(parsed, skip_special_tokens=True)


def test_plain_added_tokens_are_found_in_plain_text(byte_bpe: Tokenizer) -> None:
    think = byte_bpe.token_id("<think>")
    assert think is not None
    assert byte_bpe.encode("a<think>", add_special=False)[-1] == think


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs", "Cn"], exclude_characters=SMOLLM2_LACKS), max_size=60))
def test_any_text_survives_smollm2(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text, add_special=False)
    assert smollm2.special_ids.isdisjoint(ids)
    assert smollm2.decode(ids) == text
    assert b"".join(map(smollm2.token_bytes, ids)) == text.encode()


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.sampled_from("<|im_startend>[/INST] \n"), max_size=40))
def test_plain_text_never_gives_special_ids(byte_bpe: Tokenizer, text: str) -> None:
    ids = byte_bpe.encode(text, add_special=False)
    assert byte_bpe.special_ids.isdisjoint(ids)
    assert byte_bpe.decode(ids) == text


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40))
def test_sentencepiece_ids_are_those_of_sentencepiece(
    sentencepiece: Tokenizer, sentencepiece_model: Any, text: str
) -> None:
    ids = sentencepiece.encode(text, add_special=False)
    assert ids == sentencepiece_model.encode(text)
    assert sentencepiece.decode(ids) == text.replace("▁", " ")


@pytest.mark.parametrize("text", [*AWKWARD, " x", "  two", "<s> is </s> text <0x0A>"])
def test_sentencepiece_on_awkward_text(sentencepiece: Tokenizer, sentencepiece_model: Any, text: str) -> None:
    if "\0" in text:
        pytest.skip("sentencepiece's own interface ends a text at a zero byte")
    assert sentencepiece.encode(text, add_special=False) == sentencepiece_model.encode(text)


@pytest.mark.parametrize("text", [t for t in AWKWARD if not t.startswith(" ")])
def test_sentencepiece_ids_are_those_of_transformers(
    sentencepiece: Tokenizer, sentencepiece_metadata: dict[str, Any], text: str
) -> None:
    # On a leading space transformers' LlamaTokenizer leaves sentencepiece's rule, which we keep.
    transformers = pytest.importorskip("transformers", reason="the reference of tokenizers")
    vocabulary = {token: i for i, token in enumerate(sentencepiece_metadata["tokenizer.ggml.tokens"])}
    merges = list(zip(sentencepiece.vocabulary.lefts, sentencepiece.vocabulary.rights, strict=True))
    reference = transformers.LlamaTokenizer(vocab=vocabulary, merges=merges)
    expected = reference.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert sentencepiece.encode(text, add_special=False) == expected


def test_sentencepiece_bytes_and_ends(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.add_bos
    assert sentencepiece.encode("x", add_special=True)[0] == sentencepiece.bos_id == 1
    assert sentencepiece.eos_ids == (2,)
    newline = sentencepiece.token_id("<0x0A>")
    assert newline is not None
    assert sentencepiece.token_bytes(newline) == b"\n"
    with_special = sentencepiece.encode("</s>hi", add_special=False, parse_special=True)
    assert with_special[0] == 2


@pytest.mark.parametrize("kind", sorted(PATTERNS))
def test_every_splitting_rule_builds_and_loses_nothing(kind: str) -> None:
    tokenizer = Tokenizer(Vocabulary("BPE", sorted(byte_alphabet()), pipeline=byte_level_pipeline(kind)))
    for text in AWKWARD:
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == (
            nfc(text) if kind in {"qwen2", "deepseek-r1-qwen", "qwen35", "megrez", "f2llmv2"} else text
        )


def nfc(text: str) -> str:
    """Qwen's tokenizers normalise."""
    import unicodedata

    return unicodedata.normalize("NFC", text)


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [
        ("gpt-2", ["I", "'m", "Ġ123456", "Ġfoo", "_", "bar", "ĊĊ"]),
        ("smollm", ["I", "'m", "Ġ", "1", "2", "3", "4", "5", "6", "Ġfoo", "_", "bar", "ĊĊ"]),
        ("llama-bpe", ["I", "'m", "Ġ", "123", "456", "Ġfoo", "_bar", "ĊĊ"]),
        ("qwen2", ["I", "'m", "Ġ", "1", "2", "3", "4", "5", "6", "Ġfoo", "_bar", "ĊĊ"]),
        ("tekken", ["I", "'m", "Ġ", "1", "2", "3", "4", "5", "6", "Ġfoo", "_bar", "ĊĊ"]),
        ("deepseek-llm", ["I", "'", "m", "Ġ", "123456", "Ġfoo", "_", "bar", "Ċ", "Ċ"]),
    ],
)
def test_splitting_rules(kind: str, pieces: list[str]) -> None:
    built = Vocabulary("BPE", sorted(byte_alphabet()), pipeline=byte_level_pipeline(kind))
    library = built.assemble(built.build_model(), built.pipeline)
    assert [piece for piece, _ in library.pre_tokenizer.pre_tokenize_str("I'm 123456 foo_bar\n\n")] == pieces


def test_half_a_surrogate_pair_is_refused(byte_bpe: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate") as caught:
        byte_bpe.encode("a\ud800b", add_special=False)
    assert (caught.value.status, caught.value.code) == (400, "invalid_unicode")


def test_ids_outside_the_vocabulary_are_empty(byte_bpe: Tokenizer) -> None:
    assert byte_bpe.decode([byte_bpe.vocab_size, byte_bpe.vocab_size + 5, -1]) == ""


def vocabulary_with(*added: AddedToken) -> Tokenizer:
    """Bytes and some added tokens."""
    return Tokenizer(Vocabulary("BPE", sorted(byte_alphabet()), pipeline=byte_level_pipeline("gpt-2"), added=added))


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_marked_text_treats_flags_as_the_library_does(flag: str) -> None:
    tokenizer = vocabulary_with(AddedToken(256, "<x>", special=True, **{flag: True}))
    for text in ("a <x> b", "a<x>b", "<x>", "  <x>\n <x> ", "é<x>_"):
        parsed = tokenizer.encode(text, add_special=False, parse_special=True)
        # the last "<x>" is a user's, which sends the text through the piecewise way
        marked = tokenizer.encode_marked(text + "! <x>", b"\1" * (len(text) + 1) + bytes(4))
        assert marked == parsed + tokenizer.encode("! <x>", add_special=False)


def test_only_the_first_piece_has_the_space_that_a_text_begins_with() -> None:
    tokens = ["<", "s", ">", "a", "▁", "▁a"]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    vocabulary = Vocabulary(
        "BPE", tokens, lefts=["▁"], rights=["a"], pipeline={"pre_tokenizer": metaspace, "decoder": metaspace},
        added=[AddedToken(6, "<s>", special=True)], byte_level=False,
    )  # fmt: skip
    tokenizer = Tokenizer(vocabulary)
    # The first <s> is the template's, the second one a user's.
    assert tokenizer.encode_marked("a<s>a<s>a", b"\1" * 5 + bytes(4)) == [5, 6, 3, 0, 1, 2, 3]
    assert tokenizer.encode_marked("<s>a<s>a", b"\1" * 4 + bytes(4)) == [6, 3, 0, 1, 2, 3]


def test_merges_that_spell_a_special_token_do_not_make_it() -> None:
    tokens = [*sorted(byte_alphabet()), "s>", "<s>", "a<"]
    added = [AddedToken(tokens.index("<s>"), "<s>", special=True)]
    lefts, rights = ["s", "<", "a"], [">", "s>", "<"]
    split_nothing = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    pipeline = {**byte_level_pipeline("gpt-2"), "pre_tokenizer": split_nothing}
    tokenizer = Tokenizer(Vocabulary("BPE", tokens, lefts=lefts, rights=rights, pipeline=pipeline, added=added))
    for text in ("<s>", "a<s>b<s><s>", "<<s>>"):
        ids = tokenizer.encode(text, add_special=False)
        assert tokenizer.special_ids.isdisjoint(ids)
        assert tokenizer.decode(ids) == text
        assert tokenizer.special_ids.isdisjoint(tokenizer.encode_marked(text, bytes(len(text))))


def test_a_token_found_after_normalization_is_not_a_users_to_write() -> None:
    added = [AddedToken(256, "<é>", special=True, normalized=True)]
    pipeline = {**byte_level_pipeline("gpt-2"), "normalizer": {"type": "NFC"}}
    tokenizer = Tokenizer(Vocabulary("BPE", sorted(byte_alphabet()), pipeline=pipeline, added=added))
    text = "<e\u0301>"
    assert tokenizer.encode(text, add_special=False, parse_special=True) == [256]
    assert 256 not in tokenizer.encode_marked(text, bytes(4))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["<s>", "[INST]", "<", "s>", " a", "\n", "<|im_", "end|>"]), st.booleans())))
def test_marked_text_parses_only_trusted_tokens(byte_bpe: Tokenizer, pieces: list[tuple[str, bool]]) -> None:
    text = "".join(piece for piece, _ in pieces)
    mask = b"".join(bytes([trusted]) * len(piece) for piece, trusted in pieces)
    ids = byte_bpe.encode_marked(text, mask)
    assert byte_bpe.decode(ids, skip_special=False) == text
    at = 0
    for token_id in ids:
        length = len(byte_bpe.token_bytes(token_id).decode())
        assert token_id not in byte_bpe.special_ids or all(mask[at : at + length])
        at += length
    if all(mask):
        assert ids == byte_bpe.encode(text, add_special=False, parse_special=True)
    if not any(mask):
        assert ids == byte_bpe.encode(text, add_special=False)


@pytest.mark.parametrize("name", ["smollm2", "byte_bpe"])
@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.text(alphabet="a \x04é🙂\n"))
def test_no_text_has_fewer_tokens_than_its_size_says(name: str, request: Any, text: str) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    density = tokenizer.density
    assert density is not None
    assert density.least_tokens(text) <= len(tokenizer.encode(text, add_special=False))
    longest = max((tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)), key=len)
    assert density.most == len(longest)


@pytest.mark.parametrize("name", ["smollm2", "byte_bpe", "sentencepiece"])
@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.text(alphabet="a \x04é🙂\n▁1") | st.lists(st.sampled_from(WORDS)).map("".join))
def test_no_text_has_fewer_tokens_than_it_takes_to_cover_it(name: str, request: Any, text: str) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    assert tokenizer.cover is not None
    assert not tokenizer.cover.exceeds(text, len(tokenizer.encode(text, add_special=False)))


def test_a_text_that_surely_has_too_many_tokens_is_known_without_encoding_it(smollm2: Tokenizer) -> None:
    digits, words = "1234567890" * 10_000, "the cat sat on a mat. " * 10_000
    assert smollm2.cover is not None
    assert smollm2.cover.exceeds(digits, 99_999), "each digit is a token"
    assert not smollm2.cover.exceeds(digits, 100_000)
    tokens = len(smollm2.encode(words, add_special=False))
    assert smollm2.cover.exceeds(words, tokens // 3)


COVERED = [
    ({}, True),
    *[({"normalizer": {"type": kind}}, True) for kind in ("NFC", "NFD", "NFKC", "NFKD", "ByteLevel")],
    ({"normalizer": {"type": "Prepend", "prepend": "▁"}}, True),
    ({"normalizer": {"type": "Prepend", "prepend": "ab"}}, False),
    ({"normalizer": {"type": "Lowercase"}}, False),
    ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}}, True),
    ({"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "▁"}}, False),
    ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "bb"}}, False),
]


@pytest.mark.parametrize(("pipeline", "covered"), COVERED)
def test_a_normalizer_that_may_change_a_text_tells_nothing(pipeline: Any, covered: bool) -> None:
    assert (cover_of(Vocabulary("BPE", ["a"], pipeline=pipeline), Density(1), [b"a"]) is not None) == covered


def test_a_text_that_the_normalizer_would_shorten_is_not_judged() -> None:
    cover = cover_of(Vocabulary("BPE", ["a"], pipeline={"normalizer": {"type": "NFC"}}), Density(1), [b"a"])
    assert cover is not None
    assert cover.exceeds("aaaa", 3)
    assert not cover.exceeds("a\u0301" * 9, 3)


NFC = {"type": "NFC"}
SHRINKING = [
    ({}, 3),
    ({"normalizer": NFC}, 9),
    *[({"normalizer": {"type": kind}}, 3 * times) for kind, times in (("NFD", 3), ("NFKC", 12), ("NFKD", 4))],
    ({"normalizer": {"type": "ByteLevel"}}, 3),
    ({"normalizer": {"type": "Prepend", "prepend": "ab"}}, 3),
    ({"normalizer": {"type": "Sequence", "normalizers": [NFC, {"type": "Lowercase"}]}}, 27),
    ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}}, 3),
    ({"normalizer": {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}}, 9),
    ({"normalizer": {"type": "Replace", "pattern": {"String": "ab"}, "content": "c"}}, None),
    ({"normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "aa"}}, None),
    ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": False}}, None),
    ({"pre_tokenizer": {"type": "WhitespaceSplit"}}, None),
    ({"pre_tokenizer": {"type": "Split", "pattern": {"String": "a"}, "behavior": "Removed", "invert": False}}, None),
    ({"pre_tokenizer": {"type": "Split", "pattern": {"String": "a"}, "behavior": "Isolated", "invert": False}}, 3),
]


@pytest.mark.parametrize(("pipeline", "most"), SHRINKING)
def test_what_may_shorten_a_text_counts_for_its_least_tokens(pipeline: Any, most: int | None) -> None:
    density = density_of(Vocabulary("BPE", ["a", "b", "aab"], pipeline=pipeline))
    assert (density.most if density is not None else None) == most


def test_the_longest_token_is_that_of_the_alphabet_it_is_spelt_in() -> None:
    bytes_of_text = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = Vocabulary("Unigram", [*bytes_of_text, "▁▁▁"], {"byte_fallback": True}, byte_level=False)
    assert density_of(pieces) == Density(9)
    assert density_of(Vocabulary("Unigram", [*bytes_of_text, "▁▁▁"], byte_level=False)) is None  # one <unk> for any run
    assert density_of(Vocabulary("Unigram", bytes_of_text[1:], {"byte_fallback": True}, byte_level=False)) is None
    added = AddedToken(3, "<|a token|>", special=True)
    assert (density_of(Vocabulary("BPE", ["a"], added=[added])) or Density(0)).most == 11
    assert density_of(Vocabulary("BPE", ["a"], added=[replace(added, lstrip=True)])) is None


def test_other_threads_go_on_while_a_long_text_is_encoded(byte_bpe: Tokenizer) -> None:
    text, ended, ticks = "0123456789" * 30_000, threading.Event(), 0
    byte_bpe.complete()

    def tick() -> None:
        nonlocal ticks
        while not ended.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    ids = byte_bpe.encode(text, add_special=False)
    ended.set()
    thread.join()
    assert byte_bpe.decode(ids) == text
    assert ticks >= 10
