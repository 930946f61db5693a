"""What tokenizers are read from: tokenizer.json, the metadata of GGUF files, our own fast form; what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from text_samples import AWKWARD, SPECIAL_TEXTS
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.text.tokenizers.from_gguf import from_gguf
from roofline.text.tokenizers.from_json import from_json
from roofline.text.tokenizers.sentencepiece import merges_from_scores
from roofline.text.tokenizers.tokenizer import Tokenizer

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def library_json(**parts: Any) -> bytes:
    """A tokenizer.json of a few tokens, with parts replaced."""
    built = LibraryTokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    data = json.loads(built.to_str())
    return json.dumps({**data, "decoder": BYTE_LEVEL, **parts}).encode()


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
    assert from_json(raw, {"bos_token": "<s>", "add_bos_token": False}).encode("", add_special=True) == [6]
    assert from_json(raw, {"eos_token": "</s>", "add_eos_token": True}).encode("", add_special=True) == [6]


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


def test_unknown_kinds_are_refused_with_the_known() -> None:
    tokens = {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": []}
    with pytest.raises(UnsupportedError, match=r"nonsense.*qwen2.*smollm"):
        from_gguf({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "nonsense", **tokens})
    with pytest.raises(UnsupportedError, match=r"rwkv.*gpt2, llama"):
        from_gguf({"tokenizer.ggml.model": "rwkv", **tokens})


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
    with pytest.raises(UnsupportedError, match=r"Unheard.*WordPiece"):
        from_json(library_json(model={"type": "Unheard", "vocab": {}}), {})
    with pytest.raises(UnsupportedError, match="decoder"):
        from_json(library_json(decoder={"type": "CTC"}), {})
    with pytest.raises(ConfigError, match="merges"):
        from_json(library_json(model={"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}), {})
    with pytest.raises(UnsupportedError, match=r"normalizer\.type = 'Nonsense'.*NFC"):
        from_json(library_json(normalizer={"type": "Nonsense"}), {})
    entry = {"id": 77, "content": "<x>", "special": True, "lstrip": False, "rstrip": False}
    with pytest.raises(ConfigError, match="<x>"):
        from_json(library_json(added_tokens=[{**entry, "single_word": False, "normalized": False}]), {})


def test_merges_of_sentencepiece_are_in_the_order_of_their_scores() -> None:
    tokens = ["a", "b", "c", "ab", "abc", "bc", "<ab>"]
    equal = [("ab", "c"), ("a", "bc"), ("a", "b"), ("b", "c")]  # then the longest left part, then the longest right one
    assert merges_from_scores(tokens, [1] * 7, [0.0] * 7) == equal
    assert merges_from_scores(tokens, [1] * 7, [0.0, 0.0, 0.0, -1.0, -2.0, 0.5, 0.0]) == [
        ("b", "c"),
        ("a", "b"),
        ("ab", "c"),
        ("a", "bc"),
    ]
    for never in (2, 3, 6):  # unknown, control and byte
        assert merges_from_scores(tokens, [1, 1, 1, never, 1, 1, 1], [0.0] * 7) == [("a", "bc"), ("b", "c")]
    assert merges_from_scores(tokens, [1, 1, 1, 4, 1, 1, 1], [0.0] * 7) == equal
