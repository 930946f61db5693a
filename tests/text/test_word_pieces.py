"""WordPiece and WordLevel: ids and texts are those of transformers and of the library, from each file that has them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import AWKWARD
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as LibraryTokenizer

from roofline.bundle.text_side import text_of_folder
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.text.streaming.stops import Detokenizer
from roofline.text.tokenizers.from_gguf import from_gguf
from roofline.text.tokenizers.from_json import from_json
from roofline.text.tokenizers.tokenizer import Tokenizer

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [
    *AWKWARD,
    "The cat isn't here, is it? No! Don't.",
    "Crème BRÛLÉE naïve Ångström e\u0301",
    "[CLS] typed [SEP] and [MASK]",
    "unaffable " + "x" * 120 + " end",
    "中文words混合 한국어",
    "\x00\x01 control\x7f \ufffd",
]


@pytest.fixture(scope="module")
def words() -> list[str]:
    """The lines of a vocab.txt that is trained on the spot."""
    built = LibraryTokenizer(models.WordPiece(unk_token="[UNK]"))
    built.normalizer = normalizers.BertNormalizer(lowercase=True)
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=700, special_tokens=SPECIALS, show_progress=False)
    built.train_from_iterator([t for t in TEXTS for _ in range(3)], trainer)
    ids = built.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def write_bert(folder: Path, words: list[str], **config: Any) -> Path:
    """A folder as older ones are, without tokenizer.json."""
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **config}))
    return folder


CASES = [
    {},
    {"do_lower_case": False},
    {"do_lower_case": False, "strip_accents": True},
    {"do_lower_case": True, "strip_accents": False, "tokenize_chinese_chars": False},
]


@pytest.mark.parametrize("config", CASES)
def test_vocab_txt_gives_the_ids_of_transformers(tmp_path: Path, words: list[str], config: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference of tokenizers")
    path = write_bert(tmp_path / "bert", words, **config)
    ours, _ = text_of_folder(path)
    reference = transformers.BertTokenizer.from_pretrained(str(path))
    for text in TEXTS:
        expected = reference.encode(text, add_special_tokens=True, split_special_tokens=True)
        assert ours.encode(text, add_special=True) == expected, text
        assert ours.decode(expected) == reference.decode(expected, skip_special_tokens=True), text
        assert ours.decode(expected, skip_special=False) == reference.decode(expected), text
        parsed = reference.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special=False, parse_special=True) == parsed, text


def gguf_metadata(words: list[str]) -> dict[str, Any]:
    """What a converter writes: a visible space before a word's first token, and ## nowhere."""
    types = [3 if word in SPECIALS else 1 for word in words]
    spelt = [w if w in SPECIALS else w[2:] if w.startswith("##") else f"▁{w}" for w in words]
    named = {"bos": "[CLS]", "seperator": "[SEP]", "unknown": "[UNK]", "padding": "[PAD]", "mask": "[MASK]"}
    ids = {f"tokenizer.ggml.{key}_token_id": words.index(word) for key, word in named.items()}
    return {"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": spelt, "tokenizer.ggml.token_type": types, **ids}


@pytest.mark.parametrize("lowercase", [True, False])
def test_a_gguf_file_gives_the_ids_of_vocab_txt(tmp_path: Path, words: list[str], lowercase: bool) -> None:
    expected, _ = text_of_folder(write_bert(tmp_path / "bert", words, do_lower_case=lowercase))
    metadata = gguf_metadata(words)
    if not lowercase:
        metadata["tokenizer.ggml.normalizer.lowercase"] = False
    ours = from_gguf(metadata)
    for text in TEXTS:
        ids = ours.encode(text, add_special=True)
        assert ids == expected.encode(text, add_special=True), text
        assert ours.decode(ids) == expected.decode(ids)
    assert ours.encode("a", add_special=True)[0] == words.index("[CLS]")
    metadata |= {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_sep_token": False}
    assert from_gguf(metadata).encode("", add_special=True) == []
    del metadata["tokenizer.ggml.unknown_token_id"]
    with pytest.raises(ConfigError, match=r"unknown_token_id: is missing"):
        from_gguf({**metadata, "tokenizer.ggml.tokens": words[:50], "tokenizer.ggml.token_type": [1] * 50})


def library_word_piece(words: list[str], cleanup: bool = True) -> LibraryTokenizer:
    """What a tokenizer.json of BERT says."""
    built = LibraryTokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    built.normalizer = normalizers.BertNormalizer(lowercase=True)
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece(prefix="##", cleanup=cleanup)
    built.add_special_tokens([AddedToken(word, special=True) for word in SPECIALS])
    return built


@pytest.mark.parametrize("cleanup", [True, False])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_tokenizer_json_of_word_pieces_in_any_portions(words: list[str], cleanup: bool, data: st.DataObject) -> None:
    library = library_word_piece(words, cleanup)
    library.encode_special_tokens = True  # what a user typed is text
    ours = from_json(library.to_str().encode(), {})
    text = data.draw(st.text(alphabet="aé Catn'st.,!?-中\n[]", max_size=30) | st.sampled_from(TEXTS))
    ids = ours.encode(text, add_special=False)
    assert ids == library.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids) == library.decode(ids)
    again = Tokenizer.from_bytes(ours.to_bytes())
    assert again.encode(text, add_special=False) == ids
    streamed, parts, at = Detokenizer(again), [], 0
    while at < len(ids):
        size = data.draw(st.integers(1, 3))
        parts.append(streamed.push(ids[at : at + size]))
        at += size
    assert "".join(parts) + streamed.flush() == library.decode(ids)


def test_words_without_a_decoder_have_a_space_between_them() -> None:
    built = LibraryTokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2, ",": 3}, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    ours = from_json(built.to_str().encode(), {})
    assert ours.encode("the cat, the dog", add_special=False) == [1, 2, 3, 1, 0]
    assert ours.decode([1, 2, 3, 1, 0]) == built.decode([1, 2, 3, 1, 0]) == "the cat , the [UNK]"
    assert Tokenizer.from_bytes(ours.to_bytes()).decode([2, 3]) == "cat ,"
    assert ours.density is None  # one [UNK] stands for a word of any length


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_input_chars_per_word": 0}, r"max_input_chars_per_word: is the number 0"),
        ({"max_input_chars_per_word": 257}, r"max_input_chars_per_word: is the number 257"),
        ({"unk_token": None}, r"model\.unk_token: is null"),
        ({"unk_token": "[LOST]"}, r"tokenizer\.json: .*\[LOST\]"),
        ({"vocab": {"a": -1}}, r"model\.vocab\.a"),
        ({"continuing_subword_prefix": 7}, r"model\.continuing_subword_prefix"),
    ],
)
def test_word_pieces_that_are_refused(words: list[str], change: dict[str, Any], reason: str) -> None:
    data = json.loads(library_word_piece(words).to_str())
    data["model"] |= change
    data["added_tokens"] = []
    with pytest.raises(ConfigError, match=reason):
        from_json(json.dumps(data).encode(), {})


def test_a_decoder_of_word_pieces_stands_alone(words: list[str]) -> None:
    data = json.loads(library_word_piece(words).to_str())
    data["decoder"] = {"type": "Sequence", "decoders": [data["decoder"], {"type": "Fuse"}]}
    with pytest.raises(UnsupportedError, match="decoder"):
        from_json(json.dumps(data).encode(), {})
    data["decoder"] = {"type": "WordPiece", "prefix": "##"}
    with pytest.raises(ConfigError, match=r"decoder\.cleanup: is missing"):
        from_json(json.dumps(data).encode(), {})


def test_a_long_word_takes_no_time(words: list[str]) -> None:
    ours = from_json(library_word_piece(words).to_str().encode(), {})
    assert len(ours.encode("x" * 1_000_000, add_special=False)) == 1
    assert len(ours.encode(("x" * 90 + " ") * 500, add_special=False)) >= 500
