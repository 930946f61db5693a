"""Of SentencePiece's merges with equal scores the leftmost goes first, in GGUF files as in tokenizer.model."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.text.tokenizers.from_gguf import from_gguf
from roofline.text.tokenizers.leftmost import has_equal_scores
from roofline.text.tokenizers.to_gguf import to_gguf
from roofline.text.tokenizers.tokenizer import Tokenizer

BEGINNING = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
TYPES = [2, 3, 3, *[6] * 256]
PIECES = {"▁": 0.0, "a": 0.0, "b": 0.0, "c": 0.0, "cb": -1.0, "ba": -1.0, "ab": -1.0, "▁a": -2.0, "aa": -2.0}
PIECES |= {"aab": -2.0, "abc": -1.0, "cba": -3.0, "aaaa": -3.0, "▁ab": -3.0}


def metadata(pieces: dict[str, float]) -> dict[str, Any]:
    within = "tokenizer.ggml."
    return {
        f"{within}model": "llama",
        f"{within}tokens": [*BEGINNING, *pieces],
        f"{within}scores": [*[0.0] * len(BEGINNING), *pieces.values()],
        f"{within}token_type": [*TYPES, *[1] * len(pieces)],
        f"{within}add_space_prefix": False,
        f"{within}add_bos_token": False,
    }


def spelt(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_string(i) for i in tokenizer.encode(text, add_special=False)]


def test_all_scores_equal() -> None:
    tokenizer = from_gguf(metadata(dict.fromkeys(("▁", "a", "b", "c", "cb", "ba"), -1000.0)))
    assert spelt(tokenizer, "cba") == ["cb", "a"]  # llama-cpp-python 0.3.36
    assert spelt(tokenizer, "acbbaé") == ["a", "cb", "ba", "<0xC3>", "<0xA9>"]


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return from_gguf(metadata(PIECES))


@pytest.fixture(scope="module")
def reference() -> Any:
    spm = pytest.importorskip("sentencepiece", reason="the reference of SentencePiece tokenizers")
    pytest.importorskip("google.protobuf", reason="the reference's model is written with it")
    from sentencepiece import sentencepiece_model_pb2 as forms

    model = forms.ModelProto()
    for i, token in enumerate((*BEGINNING, *PIECES)):
        kind = TYPES[i] if i < len(TYPES) else 1
        model.pieces.add(piece=token, score=PIECES.get(token, 0.0), type=kind)
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = 2, True
    model.normalizer_spec.add_dummy_prefix = model.normalizer_spec.remove_extra_whitespaces = False
    return spm.SentencePieceProcessor(model_proto=model.SerializeToString())


@given(st.text("abc x<>/s", max_size=24))
@settings(max_examples=150, deadline=None)
def test_any_text_is_taken_apart_as_sentencepiece_does(ours: Tokenizer, reference: Any, text: str) -> None:
    ids = reference.encode(text)
    assert ours.encode(text, add_special=False) == ids
    assert ours.decode(ids) == text


def test_a_bundle_and_a_gguf_file_have_the_same_order(ours: Tokenizer) -> None:
    stored = Tokenizer.from_bytes(ours.to_bytes())
    written = from_gguf(to_gguf(ours, 280, None))
    for text in ("cba", "aab aaaab abcba", "abcbacbab"):
        assert stored.encode(text, add_special=False) == ours.encode(text, add_special=False)
        assert written.encode(text, add_special=False) == ours.encode(text, add_special=False)


def test_runs_of_one_character_need_no_order_of_places() -> None:
    """Llama's own vocabulary has runs of spaces with equal scores: its merges are left to the library."""
    runs = {"▁" * size: -1e9 for size in (2, 4, 8)}
    assert not has_equal_scores(runs, runs)
    assert not has_equal_scores(("ab", "cd"), {"ab": -1.0, "cd": -2.0})
    assert has_equal_scores((*runs, "▁a"), {**runs, "▁a": -1e9})
    pieces = {"▁": 0.0, "a": 0.0, **runs}
    assert not from_gguf(metadata(pieces)).vocabulary.leftmost
    assert spelt(from_gguf(metadata(pieces)), " " * 15) == ["▁" * size for size in (8, 4, 2, 1)]
