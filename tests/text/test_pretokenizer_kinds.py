"""The pre-tokenizers of GGUF files: pieces of each pattern, the same for large texts in time linear in their size."""

import re
import time
from pathlib import Path

import pytest

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.fields import Fields
from roofline.text.tokenizers.from_gguf import from_gguf
from roofline.text.tokenizers.pretokenizers import (
    ADDS_BOS,
    IGNORE_MERGES,
    NFC,
    PATTERNS,
    VISIBLE_SPACES,
    byte_level_pipeline,
)
from roofline.text.tokenizers.steps import checked_steps
from roofline.text.tokenizers.vocabulary import Vocabulary, byte_alphabet

ALPHABET = byte_alphabet()


def pieces_of(kind: str, text: str) -> list[str]:
    pipeline = byte_level_pipeline(kind)
    checked_steps(Fields("pipeline", pipeline), "pre_tokenizer")
    built = Vocabulary("BPE", sorted(byte_alphabet()), pipeline=pipeline)
    library = built.assemble(built.build_model(), pipeline)
    pieces = [bytes(map(ALPHABET.__getitem__, p)) for p, _ in library.pre_tokenizer.pre_tokenize_str(text)]
    assert b"".join(pieces).decode() == text
    return [piece.decode("utf-8", "replace") for piece in pieces]


@pytest.mark.parametrize(
    ("kind", "text", "pieces"),
    [
        # Combining marks belong to their letters, and words begin anew at capitals.
        ("tekken", "camelCase Sé\u0301s", ["camel", "Case", " Sé\u0301s"]),
        ("gpt-4o", "camelCase Sé\u0301s it's", ["camel", "Case", " Sé\u0301s", " it's"]),
        ("gpt-4o", "1234 a/b\n/", ["123", "4", " a", "/b", "\n", "/"]),
        ("minimax-m2", "HTTPServer's", ["HTTPServer's"]),
        ("youtu", "aB12中文ㄅ한글、x", ["a", "B", "1", "2", "中文", "ㄅ", "한글", "、", "x"]),
        ("kimi-k2", "中文abC 1234/\n", ["中文", "ab", "C", " ", "123", "4", "/\n"]),
        ("tiny_aya", "1234567 1234abc", ["1", "234", "567", " ", "123", "4", "abc"]),
        ("afmoe", "1234567 12ab中文", ["1", "234", "567", " ", "12", "ab", "中文"]),
        ("superbpe", "a 1234567 b", ["a ", "1", "234", "567", " b"]),
        ("exaone-moe", "two words, x\u0301 y", ["two words", ",", " x\u0301 y"]),
        ("bailingmoe", "it'S 12\n\n", ["it", "'S", " ", "1", "2", "\n\n"]),
        ("seed-coder", "a; \n b", ["a", ";", " \n", " b"]),
        ("ufakzeka", "Ali'nin it's", ["Ali", "'nin", " it", "'s"]),
        ("minicpm5", "a12345", ["a", "123", "45"]),
        ("laguna", "a\n\n b", ["a", "\n\n", " b"]),
        ("spark2_5", "a!\n\nb1234", ["a", "!", "\n", "\n", "b", "1", "2", "3", "4"]),
        ("jais-2", "a" + " " * 7 + "b", ["a", " " * 4, " " * 2, " b"]),
        ("jais-2", "a" + " " * 1021 + "b", ["a", *(" " * 2**power for power in range(9, 1, -1)), " b"]),
        ("chameleon", "x IMGIMGABZ 12!\n", ["x", " ", "IMGIMGABZ", " ", "1", "2", "!", "\n"]),
        ("deepseek-coder", "a\u2028 b", ["a", "\u2028", " b"]),
        ("mellum", "a12", ["a", "12"]),
        ("mellum2", "a12", ["a", "1", "2"]),
        ("exaone4", "a 12", ["a", " 12"]),
    ],
)
def test_pieces_of_a_kind(kind: str, text: str, pieces: list[str]) -> None:
    assert pieces_of(kind, text) == pieces


@pytest.mark.parametrize("patterns", sorted(set(PATTERNS.values())))
def test_each_pattern_takes_time_linear_in_the_text(patterns: tuple[str, ...]) -> None:
    kind = next(name for name, known in PATTERNS.items() if known == patterns)
    for text in ("1", " ", "\n", "a", "A", "\u0301", "!", "1½", " \n", "aA", "a '"):
        began = time.process_time()
        pieces_of(kind, text * 5_000 + "x")
        assert time.process_time() - began < 2, text  # the square of this would take minutes


def test_the_table_of_the_documents_has_every_kind() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/tokenizers.md").read_text("utf-8")
    rows = page[page.index("## Pre-tokenizers") :].split("\n")
    listed = [kind for row in rows if row.startswith("| `") for kind in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert sorted(listed) == sorted([*PATTERNS, *VISIBLE_SPACES])


def test_sets_of_kinds_name_kinds() -> None:
    for names in (ADDS_BOS, IGNORE_MERGES, NFC):
        assert names <= PATTERNS.keys() | VISIBLE_SPACES
    assert not VISIBLE_SPACES & PATTERNS.keys()


SPACES = {
    "tokenizer.ggml.tokens": ["<pad>", "<eos>", "<bos>", "▁", "a", "b", "\n", "▁a", "ab", "▁▁", "<0xC3>", "<0xA9>"],
    "tokenizer.ggml.merges": ["▁ a", "a b", "▁ ▁"],
    "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 6, 6],
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
}


@pytest.mark.parametrize("kind", [{"model": "gemma4"}, {"model": "gpt2", "pre": "gemma4"}])
def test_gemma_4_has_merges_and_visible_spaces(kind: dict[str, str]) -> None:
    built = from_gguf({**SPACES, **{f"tokenizer.ggml.{key}": value for key, value in kind.items()}})
    assert built.encode(" ab  a\né", add_special=False) == [7, 5, 3, 7, 6, 10, 11]
    assert built.decode(built.encode(" ab  a\né", add_special=False)) == " ab  a\né"
    assert built.encode("", add_special=True) == ([2] if kind["model"] == "gemma4" else [])


def test_the_left_token_of_a_merge_may_begin_with_a_space() -> None:
    merged = {**BYTES, "tokenizer.ggml.tokens": ["a", "b", " a", " ab"], "tokenizer.ggml.merges": [" a b"]}
    assert from_gguf({**merged, "tokenizer.ggml.token_type": [1] * 4}).vocabulary.lefts == [" a"]


# --- special tokens -------------------------------------------------------------------------------------------------

BYTES = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "[x]", "<unused0>"],
    "tokenizer.ggml.token_type": [1, 1, 4, 3, 3, 3, 4, 5],
    "tokenizer.ggml.merges": [],
}


def test_ends_are_all_that_a_file_names_and_the_families_use() -> None:
    built = from_gguf({**BYTES, "tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 1})
    assert built.eos_ids == (0, 1, 2, 4, 5), "<|end|> ends a message of several where there is <|call|>"
    assert 2 in built.special_ids, "an end is a control symbol, though the file says user-defined"
    assert built.special_ids == {2, 3, 4, 5}
    assert built.encode("[x]", add_special=False) == [6], "what users defined is found in plain text"
    without = {**BYTES, "tokenizer.ggml.tokens": ["a", "b", "<|im_end|>", "<|end|>", "c", "d", "e", "f"]}
    assert from_gguf(without).eos_ids == (2, 3)


def test_an_end_that_is_an_ordinary_piece_of_text_ends_nothing() -> None:
    """A vocabulary that learned "<EOT>" from texts makes it by merging; no special token comes about so."""
    pieces = {"tokenizer.ggml.tokens": ["<", "EOT>", "<EOT>"], "tokenizer.ggml.token_type": [1, 1, 1]}
    merged = {**BYTES, **pieces, "tokenizer.ggml.merges": ["< EOT>"]}
    assert (from_gguf(merged).eos_ids, from_gguf(merged).special_ids) == ((), set())
    assert from_gguf({**merged, "tokenizer.ggml.merges": []}).eos_ids == (2,), "files that call special tokens ordinary"
    for kind in (3, 4):
        assert from_gguf({**merged, "tokenizer.ggml.token_type": [1, 1, kind]}).eos_ids == (2,)
    assert from_gguf({**merged, "tokenizer.ggml.eos_token_id": 2}).eos_ids == (2,), "what the file names is an end"
    scored = {**merged, "tokenizer.ggml.model": "llama", "tokenizer.ggml.eos_token_id": 2}
    scored |= {"tokenizer.ggml.token_type": [1] * 4, "tokenizer.ggml.scores": [-1.0, -2.0, -3.0, -4.0]}
    del scored["tokenizer.ggml.merges"]
    assert from_gguf({**scored, "tokenizer.ggml.tokens": ["<", "EOT>", "</s>", "<EOT>"]}).eos_ids == (2,)
    assert from_gguf({**scored, "tokenizer.ggml.tokens": ["<", "E", "</s>", "<EOT>"]}).eos_ids == (2, 3)


def test_a_switch_without_its_token_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"add_bos_token: is true, but tokenizer\.ggml\.bos_token_id is missing"):
        from_gguf({**BYTES, "tokenizer.ggml.add_bos_token": True})
    with pytest.raises(ConfigError, match=r"add_eos_token: is true, but tokenizer\.ggml\.eos_token_id is missing"):
        from_gguf({**BYTES, "tokenizer.ggml.add_eos_token": True})


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("rwkv", "tree of bytes"),
        ("plamo2", "suffixes"),
        ("whitespace", "spaces"),
        ("hybriddna", "DNA"),
        ("none", "none is"),
    ],
)
def test_kinds_that_are_no_steps_of_ours_are_refused_by_name(kind: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"tokenizer\.ggml\.model = '{kind}' is not supported: .*{reason}"):
        from_gguf({**BYTES, "tokenizer.ggml.model": kind})


def test_the_bos_that_a_template_writes_is_the_only_one() -> None:
    from roofline.bundle.text_side import with_template
    from roofline.server.text_side import TextSide

    tokens = [*sorted(byte_alphabet()), "<s>"]
    built = from_gguf(
        {
            **{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.tokens": tokens},
            **{"tokenizer.ggml.token_type": [1] * 256 + [3], "tokenizer.ggml.merges": []},
            "tokenizer.ggml.bos_token_id": 256,
        }
    )
    side = TextSide(*with_template(built, "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"))
    assert side.encode_chat([{"role": "user", "content": "<s>a"}]).count(256) == 1
    assert side.encode("<s>a").count(256) == 1


def test_visible_spaces_that_a_file_has_as_spaces_are_merged() -> None:
    """As converters write a tokenizer.json of SentencePiece's kind with runs of spaces among its added tokens, where
    bytes are tokens like others."""
    tokens = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "hi", "  ", "    "]
    kinds = [3, *[1] * 260, 4, 4]
    tokenizer = from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "granite-embed-multi-311m",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.merges": ["▁ ▁", "▁▁ ▁▁", "h i"],
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.add_bos_token": False,
        }
    )
    ids = tokenizer.encode("hi      hié", add_special=False)
    assert [tokens[at] for at in ids] == ["hi", "    ", "  ", "hi", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "hi      hié"
