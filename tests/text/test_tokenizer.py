"""Tokenizers against transformers, sentencepiece and their own promises."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import AWKWARD, SPECIAL_TEXTS
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models

from roofline.common.errors import ConfigError, RequestError, UnsupportedError
from roofline.text.tokenizers.from_gguf import from_gguf
from roofline.text.tokenizers.from_json import from_json
from roofline.text.tokenizers.pretokenizers import PATTERNS, byte_level_pipeline
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.text.tokenizers.vocabulary import AddedToken, Vocabulary, byte_alphabet

# SmolLM2's vocabulary has no token for these bytes; like transformers, we encode them as nothing. (It also lacks
# 0xF1 and 0xF2, which begin planes of Unicode that hold no characters yet.)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SMOLLM2_LACKS = "\x04\x06\x13\x14\x16\x1d"


def library_json(**parts: Any) -> bytes:
    """A tokenizer.json of a few tokens, with parts replaced."""
    built = LibraryTokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    data = json.loads(built.to_str())
    return json.dumps({**data, "decoder": BYTE_LEVEL, **parts}).encode()


@pytest.mark.parametrize("text", AWKWARD + SPECIAL_TEXTS)
def test_smollm2_ids_are_those_of_transformers(smollm2: Tokenizer, smollm2_hf: Any, text: str) -> None:
    expected = smollm2_hf.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert smollm2.encode(text, add_special=False) == expected
    assert smollm2.encode(text, add_special=False, parse_special=True) == smollm2_hf.encode(
        text, add_special_tokens=False
    )
    assert smollm2.encode(text, add_special=True) == smollm2_hf.encode(text, split_special_tokens=True)
    assert smollm2.decode(expected, skip_special=False) == text


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


@pytest.mark.parametrize("text", [*AWKWARD, "</s> hi", "a</s>b"])
def test_metaspace_json_is_read_as_the_library_does(sentencepiece: Tokenizer, text: str) -> None:
    library = sentencepiece.vocabulary.assemble(
        sentencepiece.vocabulary.build_model(),
        {
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
            "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        },
    )
    ours = from_json(library.to_str().encode(), {"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    assert ours.strip_space
    assert not ours.add_bos
    assert (
        ours.encode(text, add_special=False, parse_special=True) == library.encode(text, add_special_tokens=False).ids
    )


def test_ends_of_generation(smollm2: Tokenizer, byte_bpe: Tokenizer) -> None:
    assert smollm2.bos_id == 1
    assert not smollm2.add_bos
    assert smollm2.eos_ids == (2, 0)  # <|im_end|> by the file, <|endoftext|> by its name
    names = [byte_bpe.token_bytes(i).decode() for i in byte_bpe.eos_ids]
    assert names[0] == "</s>"
    assert set(names) == {"</s>", "<|eot_id|>", "<|im_end|>", "<|endoftext|>"}


def test_generation_config_adds_ends_and_post_processor_adds_bos(byte_bpe_json: Path) -> None:
    data = json.loads((byte_bpe_json / "tokenizer.json").read_text())
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [6], "tokens": ["<s>"]}},
    }
    raw = json.dumps(data).encode()
    tokenizer = from_json(raw, {"eos_token_id": [9, 7]})
    assert tokenizer.eos_ids[:2] == (9, 7)
    assert tokenizer.add_bos
    assert tokenizer.encode("a", add_special=True) == LibraryTokenizer.from_str(raw.decode()).encode("a").ids
    assert from_json(raw, {"bos_token": "<s>", "add_bos_token": False}).encode("", add_special=True) == []
    assert from_json(raw, {"eos_token": "</s>", "add_eos_token": True}).encode("", add_special=True) == [6, 7]


@pytest.mark.parametrize("name", ["smollm2", "byte_bpe", "sentencepiece"])
def test_the_fast_form_is_the_same_tokenizer(request: pytest.FixtureRequest, name: str) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    again = Tokenizer.from_bytes(tokenizer.to_bytes())
    assert again.to_bytes() == tokenizer.to_bytes()
    assert (again.bos_id, again.eos_ids, again.add_bos) == (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos)
    for text in AWKWARD + SPECIAL_TEXTS:
        for parse in (False, True):
            ids = tokenizer.encode(text, add_special=True, parse_special=parse)
            assert again.encode(text, add_special=True, parse_special=parse) == ids
            assert again.decode(ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("cut", [0, 3, 9, 12, 400, -1])
def test_a_damaged_fast_form_is_refused(byte_bpe: Tokenizer, cut: int) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        Tokenizer.from_bytes(byte_bpe.to_bytes()[:cut])


@pytest.mark.parametrize("kind", sorted(PATTERNS))
def test_every_splitting_rule_builds_and_loses_nothing(kind: str) -> None:
    tokenizer = Tokenizer(Vocabulary("BPE", sorted(byte_alphabet()), pipeline=byte_level_pipeline(kind)))
    for text in AWKWARD:
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == (
            text if kind not in {"qwen2", "deepseek-r1-qwen", "qwen35", "megrez"} else nfc(text)
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


def test_unknown_kinds_are_refused_with_the_known() -> None:
    tokens = {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": []}
    with pytest.raises(UnsupportedError, match=r"nonsense.*qwen2.*smollm"):
        from_gguf({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "nonsense", **tokens})
    with pytest.raises(UnsupportedError, match=r"bert.*gpt2, llama"):
        from_gguf({"tokenizer.ggml.model": "bert", **tokens})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": 7}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["nospace"]}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["no such"]}, "merges"),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.eos_token_id": 99}, "tokenizer.ggml.eos_token_id"),
    ],
)
def test_bad_metadata_is_named(change: dict[str, Any], named: str) -> None:
    good = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    assert from_gguf(good).encode("ab", add_special=False) == [2]
    with pytest.raises(ConfigError, match=named):
        from_gguf({key: value for key, value in {**good, **change}.items() if value is not None})


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'{"model": 3}', b"[" * 100_000, b'{"model": {}, "added_tokens": [{}]}']
)
def test_bad_json_is_refused(raw: bytes) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        from_json(raw, {})


def test_unsupported_json_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="WordPiece"):
        from_json(library_json(model={"type": "WordPiece", "vocab": {}}), {})
    with pytest.raises(UnsupportedError, match="decoder"):
        from_json(library_json(decoder={"type": "CTC"}), {})
    with pytest.raises(ConfigError, match="merges"):
        from_json(library_json(model={"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}), {})
    with pytest.raises(ConfigError, match="decoder"):
        from_json(library_json(normalizer={"type": "Nonsense"}), {})
    entry = {"id": 77, "content": "<x>", "special": True, "lstrip": False, "rstrip": False}
    with pytest.raises(ConfigError, match="<x>"):
        from_json(library_json(added_tokens=[{**entry, "single_word": False, "normalized": False}]), {})


def test_half_a_surrogate_pair_is_refused(byte_bpe: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        byte_bpe.encode("a\ud800b", add_special=False)


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


def test_merges_that_spell_a_special_token_do_not_make_it() -> None:
    tokens = [*sorted(byte_alphabet()), "s>", "<s>", "a<"]
    added = [AddedToken(tokens.index("<s>"), "<s>", special=True)]
    lefts, rights = ["s", "<", "a"], [">", "s>", "<"]
    pipeline = {**byte_level_pipeline("gpt-2"), "pre_tokenizer": {**BYTE_LEVEL, "use_regex": False}}
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
