"""tokenizer.model and GGUF's "t5" against sentencepiece itself; bytes that are no model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import AWKWARD
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from roofline.bundle.text_side import text_of_folder
from roofline.common.errors import ConfigError, RooflineError, UnsupportedError
from roofline.text.streaming.stops import Detokenizer
from roofline.text.tokenizers.charsmap import CharacterMap
from roofline.text.tokenizers.from_gguf import from_gguf
from roofline.text.tokenizers.from_json import from_json
from roofline.text.tokenizers.from_model import read_model
from roofline.text.tokenizers.protobuf import message
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.text.tokenizers.vocabulary import Vocabulary

spm = pytest.importorskip("sentencepiece", reason="the reference of SentencePiece tokenizers")

TEXTS = [
    *(text for text in AWKWARD if "\0" not in text and "<unk>" not in text),
    "ﬁne ½ Ⅷ ㎏ ①②  ＦＵＬＬ  ﾊﾞ\u3000ideographic",
    "  two  spaces   inside  ",
    "½\u0301 ½\uff9e e\u0301\u0323 \u1100\u1161\u11a8 한",
    "it is <x>defined<x> by users",
    "   ",
    "<0x0A> and <0xZZ>",
    "</s> typed <s>",
]
ALPHABET = "aZé1½ .,'ﬁⅧ中한🙂①\u3000\u00a0\t\nﾊﾞ\u200b＜e\u0301\u0323\u1100\u1161"


def trained(folder: Path, **options: Any) -> Path:
    """A tiny model, for which the text of the tests is the whole world."""
    lines = [text.replace("\n", " ") for text in TEXTS for _ in range(5)]
    (folder / "text").write_text("\n".join(lines), encoding="utf-8")
    spm.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tokenizer"),
        hard_vocab_limit=False,
        character_coverage=0.98,
        minloglevel=2,
        **options,
    )
    return folder / "tokenizer.model"


MODELS: dict[str, dict[str, Any]] = {
    "T5": {"vocab_size": 300, "user_defined_symbols": ["<x>"]},
    "lower case": {"vocab_size": 300, "normalization_rule_name": "nmt_nfkc_cf", "user_defined_symbols": ["<x>"]},
    "Unigram with bytes": {"vocab_size": 560, "byte_fallback": True, "remove_extra_whitespaces": False},
    "Llama": {
        **{"vocab_size": 560, "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
        "remove_extra_whitespaces": False,
    },
    "Gemma": {
        **{"vocab_size": 560, "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
        **{"remove_extra_whitespaces": False, "add_dummy_prefix": False, "user_defined_symbols": ["<x>", "\n\n"]},
    },
    "BPE, normalized": {"vocab_size": 300, "model_type": "bpe", "normalization_rule_name": "nfkc"},
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("model"), **MODELS[request.param])


def ours_of(data: bytes) -> Tokenizer:
    read = read_model("tokenizer.model", data)
    parts = {**read.parts(), "tokens": list(read.pieces.tokens), "added": read.pieces.added()}
    return Tokenizer.of_file("tokenizer.model", Vocabulary(**parts))


def assert_equal(tokenizer: Tokenizer, ids: list[int], expected: list[int]) -> None:
    """The same ids; of Unigram two ways of equal score are equally good, and the library may take the other one."""
    scores = tokenizer.vocabulary.scores
    if ids != expected and scores:
        assert sum(scores[i] for i in ids) == pytest.approx(sum(scores[i] for i in expected), rel=1e-5)
        assert tokenizer.decode(ids) == tokenizer.decode(expected)
        return
    assert ids == expected


def metadata_of(data: bytes) -> dict[str, Any]:
    """What a converter writes into a GGUF file."""
    read = read_model("tokenizer.model", data)
    pieces = read.pieces
    return {
        "tokenizer.ggml.model": "t5" if read.kind == "Unigram" else "llama",
        "tokenizer.ggml.tokens": list(pieces.tokens),
        "tokenizer.ggml.scores": list(pieces.scores),
        "tokenizer.ggml.token_type": list(pieces.types),
        "tokenizer.ggml.unknown_token_id": pieces.unknown,
        "tokenizer.ggml.eos_token_id": read.eos,
        "tokenizer.ggml.add_space_prefix": pieces.prefix_space,
        "tokenizer.ggml.remove_extra_whitespaces": pieces.single_spaces,
        "tokenizer.ggml.precompiled_charsmap": list(pieces.charsmap),
    }


def test_ids_and_texts_are_those_of_sentencepiece(model: Path) -> None:
    reference = spm.SentencePieceProcessor(model_file=str(model))
    data = model.read_bytes()
    for tokenizer in (ours_of(data), from_gguf(metadata_of(data)), Tokenizer.from_bytes(ours_of(data).to_bytes())):
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special=False)
            if not ("<" in text and tokenizer.vocabulary.model == "Unigram"):  # cut where a user typed a token
                assert_equal(tokenizer, ids, reference.encode(text))
            spelt = reference.decode_ids(ids).replace("⁇", "<unk>")
            if reference.unk_id() not in ids:
                assert tokenizer.decode(ids) == spelt, text
            assert tokenizer.special_ids.isdisjoint(set(ids) - {reference.unk_id()})


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet=ALPHABET, max_size=24) | st.text(alphabet=st.characters(codec="utf-8"), max_size=12))
def test_any_text_is_encoded_as_sentencepiece_does(model: Path, text: str) -> None:
    if "\0" in text:
        return  # sentencepiece's own interface ends a text there
    key = str(model)
    if key not in CACHE:
        CACHE[key] = (spm.SentencePieceProcessor(model_file=key), ours_of(model.read_bytes()))
    reference, ours = CACHE[key]
    ids = ours.encode(text, add_special=False)
    if ids or not reference.encode(text):  # of a text that is all removed, sentencepiece leaves the space before it
        assert_equal(ours, ids, reference.encode(text))
    streamed = Detokenizer(ours)
    assert "".join(streamed.push([i]) for i in ids) + streamed.flush() == ours.decode(ids)


CACHE: dict[str, tuple[Any, Tokenizer]] = {}


def test_a_folder_of_llama_is_read_as_its_class_does(tmp_path: Path) -> None:
    trained(tmp_path, **MODELS["Llama"])
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "added_tokens_decoder": {"560": {"content": "<pad>", "special": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    size = spm.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model")).vocab_size()
    assert size == 560
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 560]}))
    ours, _ = text_of_folder(tmp_path)
    assert (ours.bos_id, ours.eos_ids, ours.add_bos, ours.vocab_size) == (1, (2, 560), True, 561)
    assert ours.encode("hi<pad>", add_special=True, parse_special=True)[-1] == 560
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "add_bos_token": False, "add_eos_token": True})
    )
    assert text_of_folder(tmp_path)[0].encode("", add_special=True) == [2]
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<more>": 561}))
    assert text_of_folder(tmp_path)[0].token_id("<more>") == 561
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<more>": 5}))
    with pytest.raises(ConfigError, match=r"'<more>' has the id 5 of"):
        text_of_folder(tmp_path)


def test_a_folder_of_t5_has_its_sentinels_and_its_end(tmp_path: Path) -> None:
    size = spm.SentencePieceProcessor(model_file=str(trained(tmp_path, **MODELS["T5"]))).vocab_size()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5TokenizerFast", "extra_ids": 3}))
    ours, _ = text_of_folder(tmp_path)
    assert [ours.token_id(f"<extra_id_{i}>") for i in range(3)] == [size + 2, size + 1, size]
    assert ours.encode("a <extra_id_0>", add_special=True, parse_special=True)[-2:] == [size + 2, ours.eos_ids[0]]
    assert not ours.add_bos


@pytest.mark.parametrize("name", ["XLMRobertaTokenizer", "CamembertTokenizer", ""])
def test_classes_whose_code_is_not_here_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    if name:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    with pytest.raises(
        UnsupportedError, match=rf"{name or 'without a tokenizer_class'}.*tokenizer\.json.*LlamaTokenizer"
    ):
        text_of_folder(tmp_path)


@pytest.mark.parametrize("kind", ["word", "char"])
def test_models_of_words_and_characters_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    data = trained(tmp_path, vocab_size=40, model_type=kind).read_bytes()
    with pytest.raises(UnsupportedError, match=f"a model of {kind}.*BPE"):
        read_model("tokenizer.model", data)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@pytest.mark.parametrize("name", ["T5", "lower case"])
def test_tokenizer_json_of_unigram_is_read_as_the_library_does(tmp_path: Path, name: str, scheme: str) -> None:
    read = read_model("m", trained(tmp_path, **MODELS[name]).read_bytes())
    built = LibraryTokenizer(
        models.Unigram(list(zip(read.pieces.tokens, read.pieces.scores, strict=True)), read.pieces.unknown, False)
    )
    built.normalizer = normalizers.Sequence(
        [normalizers.Precompiled(read.pieces.charsmap), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    built.decoder = decoders.Metaspace(prepend_scheme=scheme)
    built.add_special_tokens(["<unk>", "</s>"])
    ours = from_json(built.to_str().encode(), {"eos_token": "</s>"})
    for tokenizer in (ours, Tokenizer.from_bytes(ours.to_bytes())):
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special=False, parse_special=True)
            assert ids == built.encode(text, add_special_tokens=False).ids, text
            assert tokenizer.decode(ids) == built.decode(ids), text
            streamed = Detokenizer(tokenizer)
            assert "".join(streamed.push([i]) for i in ids) + streamed.flush() == built.decode(ids)


def test_a_piece_that_is_too_long_for_its_merges_is_refused() -> None:
    tokens = ["<unk>", "a", "a" * 1025]
    metadata = {
        **{"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [0.0] * 3},
        "tokenizer.ggml.token_type": [2, 1, 1],
    }
    with pytest.raises(ConfigError, match=r"m\.gguf: token 2 has 1025 characters, of 1024"):
        from_gguf(metadata, "m.gguf")


# --- bytes that are no model ----------------------------------------------------------------------------------------


def field(number: int, wire: int, data: bytes) -> bytes:
    return bytes([number << 3 | wire]) + (bytes([len(data)]) if wire == 2 else b"") + data


PIECE = field(1, 2, field(1, 2, b"<unk>") + field(3, 0, b"\2"))
NO_ENDS = field(2, 2, b"".join(bytes([key, 2]) + b"\xff" * 9 + b"\1" for key in (0xC8, 0xD0)))  # BOS and EOS are -1
BAD_MODELS = [
    (b"", "pieces: are missing"),
    (b"\0", "begins no field"),
    (b"\x0a\xff", "does not end"),
    (b"\x80" * 11, "does not end"),
    (b"\x0a\x05ab", "is cut off: field 1 has 5 bytes of which 2 are there"),
    (b"\x0b", "field 1 is of kind 3"),
    (b"\x08\x05", "pieces: is a number where text or a message stands"),
    (field(1, 2, b""), "piece 0: has no text"),
    (field(1, 2, field(1, 2, b"\xff")), "piece 0: is not UTF-8"),
    (field(1, 2, field(1, 0, b"\1")), "piece 0: is a number where"),
    (field(1, 2, field(1, 2, b"a") + field(2, 0, b"\1")), "piece 0: is not a number of 32 bits"),
    (field(1, 2, field(1, 2, b"a") + field(2, 5, b"\0\0\xc0\x7f")), "piece 0: is not a finite number"),
    (field(1, 2, field(1, 2, b"a") + field(3, 0, b"\x09")), "piece 0: has kind 9"),
    (field(1, 2, field(1, 2, b"a") + field(3, 2, b"\2")), "piece 0: is not a whole number"),
    (field(1, 2, field(1, 2, b"a")), "trainer_spec.40: the number 0 is not the id of the piece for unknown"),
    (PIECE + field(2, 2, b"\xc0\x02\x05"), "trainer_spec.40: the number 5 is no id"),
    (PIECE + NO_ENDS + field(3, 2, field(2, 2, b"abc")), "precompiled_charsmap: is not a compiled map"),
]


@pytest.mark.parametrize(("data", "reason"), BAD_MODELS)
def test_bytes_that_are_no_model_are_named(data: bytes, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        read_model("a/tokenizer.model", data)
    assert str(caught.value).startswith("a/tokenizer.model: ")


def refusal(read: Callable[[], object]) -> str | None:
    """Why something is refused; None where it is not."""
    try:
        read()
    except RooflineError as error:
        return str(error)
    return None


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=60) | st.binary(max_size=40).map(lambda more: PIECE + more))
def test_no_bytes_crash_the_readers(data: bytes) -> None:
    for read in (lambda: list(message("f", "m", memoryview(data))), lambda: read_model("f", data)):
        reason = refusal(read)
        assert reason is None or (reason.startswith("f: ") and len(reason) < 300)


@settings(max_examples=100, deadline=None)
@given(units=st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=8), texts=st.binary(max_size=8))
def test_no_map_of_characters_leads_astray(units: list[int], texts: bytes) -> None:
    trie = b"".join(unit.to_bytes(4, "little") for unit in units) * (256 // len(units) + 1)
    try:
        characters = CharacterMap(len(trie).to_bytes(4, "little") + trie + texts + b"\0")
    except ValueError:
        return
    for text in ("", "abc", "é中🙂", "a" * 2000):
        characters.map(text)


@pytest.mark.parametrize("shift", [0, 8])
@pytest.mark.parametrize("pair", [b"ab", b"\x01\x7f", b"\x7f\x01"])
def test_offsets_of_a_map_count_places_or_blocks_of_them(pair: bytes, shift: int) -> None:
    """A map of two characters together and of the first before a letter beyond ASCII; labels, values, far offsets."""

    def unit(label: int, offset: int, value: bool = False) -> int:
        return label | value << 8 | (shift == 8) << 9 | offset >> shift << 10

    trie = [0] * 2048
    trie[0] = unit(0, 256)
    first = 256 ^ pair[0]
    trie[first] = unit(pair[0], 768)
    second, letter = first ^ 768 ^ pair[1], first ^ 768 ^ 0xC3
    trie[second], trie[letter] = unit(pair[1], 1024, True), unit(0xC3, 512)
    trie[second ^ 1024] = 1 << 31 | 1
    last = letter ^ 512 ^ 0xA9
    trie[last] = unit(0xA9, 1024, True)
    trie[last ^ 1024] = 1 << 31 | 3
    data = b"".join(each.to_bytes(4, "little") for each in trie)
    characters = CharacterMap(len(data).to_bytes(4, "little") + data + b"\0x\0yz\0")
    assert characters.longest_text == 2
    a, b = pair.decode()
    assert characters.map(f"{a}-{a}{b}-{a}é-{a}{a}{b}{b}-ñ") == f"{a}-x-yz-{a}x{b}-ñ"


@pytest.mark.parametrize(
    "character",
    ["\x80", "\xe0", "\xe1", "\u07c0", "\u07ff", "\u0820", "\u4e20", "\uff60", "\uffa0", "\U00010020", "\U0010ffe0"],
)
def test_keys_of_a_map_stand_for_whole_characters(character: str) -> None:
    """The map has an a, and, as no model's has, a byte that begins a character and one within a character."""
    trie = [0] * 1024
    trie[0] = 256 << 10
    for byte, at in ((0x61, 1), (0xC3, 3), (0xA0, 5)):
        trie[256 ^ byte], trie[256 ^ byte ^ 512] = byte | 1 << 8 | 512 << 10, 1 << 31 | at
    data = (4096).to_bytes(4, "little") + b"".join(each.to_bytes(4, "little") for each in trie) + b"\0x\0y\0z\0"
    assert CharacterMap(data).map(f"a{character}a{character}{character}a") == f"x{character}x{character}{character}x"


def test_fields_of_a_message_have_their_kinds_and_sizes() -> None:
    data = field(1, 0, b"\x96\1") + field(2, 1, bytes(range(8))) + field(3, 2, b"abc") + field(4, 5, b"\1\2\3\4")
    told = [value if isinstance(value, int) else bytes(value) for _, value in message("f", "m", memoryview(data))]
    assert told == [150, bytes(range(8)), b"abc", b"\1\2\3\4"]
    with pytest.raises(ConfigError, match="is cut off: field 2 has 8 bytes of which 7 are there"):
        list(message("f", "m", memoryview(field(2, 1, bytes(7)))))


@pytest.mark.parametrize(("at", "good"), [(1, True), (2, False), (3, True), (4, False)])
def test_texts_of_a_map_begin_at_a_character(at: int, good: bool) -> None:
    trie = [0] * 1024
    trie[0], trie[256 ^ 97], trie[256 ^ 97 ^ 512] = 256 << 10, 97 | 1 << 8 | 512 << 10, 1 << 31 | at
    data = (4096).to_bytes(4, "little") + b"".join(each.to_bytes(4, "little") for each in trie) + b"\0\xc3\xa9\0"
    if good:
        assert CharacterMap(data).map("xa") == ("xé" if at == 1 else "x")
    else:
        with pytest.raises(ValueError, match=f"a text at byte {at} of 4"):
            CharacterMap(data)


def test_ids_of_begin_and_end_are_read_where_the_trainer_says_them() -> None:
    pieces = PIECE + b"".join(field(1, 2, field(1, 2, text)) for text in (b"a", b"b", b"c"))
    ids = field(2, 2, b"\xc8\x02\x03\xd0\x02\x02")
    assert [(read.bos, read.eos) for read in (read_model("m", pieces), read_model("m", pieces + ids))] == [
        (1, 2),
        (3, 2),
    ]


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(at=st.floats(0, 1), value=st.integers(0, 255))
def test_a_changed_byte_of_a_model_is_read_or_refused(model: Path, at: float, value: int) -> None:
    data = bytearray(model.read_bytes())
    data[int(at * (len(data) - 1))] = value
    reason = refusal(lambda: [ours_of(bytes(data)).encode(text, add_special=False) for text in TEXTS[:2]])
    assert reason is None or "tokenizer" in reason


@pytest.mark.slow
def test_a_million_characters_take_seconds(model: Path) -> None:
    tokenizer = ours_of(model.read_bytes())
    for text in ("x" * 300_000, "½" * 100_000, " " * 300_000):
        tokenizer.encode(text, add_special=False)
