"""Tokenizers written as GGUF metadata and as tokenizer.json do what the original does, or are refused by name."""

import json
from typing import Any

import pytest

from roofline.common.errors import UnsupportedError
from roofline.text.tokenizers.from_gguf import from_gguf
from roofline.text.tokenizers.from_json import from_json
from roofline.text.tokenizers.pretokenizers import PATTERNS, byte_level_pipeline, kind_of_pipeline
from roofline.text.tokenizers.to_gguf import splits_otherwise, to_gguf
from roofline.text.tokenizers.to_json import to_json
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.text.tokenizers.vocabulary import byte_alphabet

SETTINGS = {"bos_token": "<s>", "eos_token": "</s>"}
TEXT = "it's a test: the end, 12345 <s>x</s>\n\n  naïve"


def _special(at: int) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": at + i, "content": text, **flags} for i, text in enumerate(("<s>", "</s>"))]


def _around(begin: int, *, ends: bool = False) -> dict[str, Any]:
    """A post-processor that puts the first special token before each text, and the second one behind it."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    first, last = ({"SpecialToken": {"id": name, "type_id": 0}} for name in ("<s>", "</s>"))
    single = [first, text, *([last] if ends else [])]
    tokens = {name: {"id": name, "ids": [begin + i], "tokens": [name]} for i, name in enumerate(("<s>", "</s>"))}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, text], "special_tokens": tokens}


def _byte_level(kind: str = "qwen2") -> dict[str, Any]:
    letters = [character for character, _ in sorted(byte_alphabet().items(), key=lambda pair: pair[1])]
    pairs = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "2")]
    tokens = [*letters, *(a + b for a, b in pairs)]
    ignore_merges = {"ignore_merges": kind == "llama-bpe"}
    return {
        "added_tokens": _special(len(tokens)),
        "post_processor": _around(len(tokens)),
        **byte_level_pipeline(kind),
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": pairs, **ignore_merges},
    }


def _sentencepiece(*more: str) -> dict[str, Any]:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "t", "h", "e", "th", "the", "▁the", "s", *more]
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    decoders = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]
    decoders += [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    model = {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "unk_token": "<unk>", "fuse_unk": True}
    model |= {"merges": [("t", "h"), ("th", "e"), ("▁", "the")], "byte_fallback": True}
    return {
        "added_tokens": _special(len(tokens)),
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": _around(len(tokens)),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _tokenizer(data: dict[str, Any]) -> Tokenizer:
    return from_json(json.dumps(data).encode(), SETTINGS)


def _same(first: Tokenizer, second: Tokenizer) -> None:
    for parse in (False, True):
        ids = first.encode(TEXT, add_special=True, parse_special=parse)
        assert ids == second.encode(TEXT, add_special=True, parse_special=parse)
    assert first.eos_ids == second.eos_ids
    assert first.bos_id == second.bos_id
    assert first.decode(ids) == second.decode(ids)


@pytest.mark.parametrize("data", [_byte_level(), _byte_level("llama-bpe"), _byte_level("smollm"), _sentencepiece()])
def test_both_ways(data):
    original = _tokenizer(data)
    values = to_gguf(original, 310, "{{ messages }}")
    assert len(values["tokenizer.ggml.tokens"]) == 310
    assert values["tokenizer.chat_template"] == "{{ messages }}"
    assert values["tokenizer.ggml.token_type"][original.vocab_size - 2 :][:4] == [3, 3, 5, 5]
    read = from_gguf(values)
    _same(original, read)
    files = to_json(read, "{{ messages }}", {"temperature": 0.5})
    settings = json.loads(files["tokenizer_config.json"]) | json.loads(files["generation_config.json"])
    assert settings["chat_template"] == "{{ messages }}"
    assert settings["temperature"] == 0.5
    _same(original, from_json(files["tokenizer.json"], settings))


def _with_metaspace(**options: Any) -> dict[str, Any]:
    step = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False} | options
    return _sentencepiece() | {"normalizer": None, "pre_tokenizer": step}


def test_a_space_that_texts_beginning_with_one_do_not_get_is_told():
    """Llama's class of transformers 5 writes such a step. What it does to a text that begins so has no key."""
    original = _tokenizer(_with_metaspace())
    read = from_gguf(to_gguf(original, 310, None))
    _same(original, read)
    behind = "<s> the"
    ids = [tokenizer.encode(behind, add_special=False, parse_special=True) for tokenizer in (original, read)]
    assert [len(each) for each in ids] == [2, 3], "SentencePiece's space is one more"
    (note,) = splits_otherwise(original)
    assert "this tokenizer puts none before a text that begins with one" in note
    assert splits_otherwise(_tokenizer(_sentencepiece())) == []
    with pytest.raises(
        UnsupportedError, match=r"Metaspace with prepend_scheme first .* behind every special token, too"
    ):
        to_gguf(_tokenizer(_with_metaspace(prepend_scheme="first")), 310, None)
    with pytest.raises(UnsupportedError, match="it would split"):
        to_gguf(_tokenizer(_with_metaspace(split=True)), 310, None)


def test_an_end_of_other_files_that_is_a_plain_token_ends_nothing():
    """Gemma's first tokenizer.json has <end_of_turn> in its vocabulary and not among its special tokens."""
    original = _tokenizer(_sentencepiece("<end_of_turn>"))
    values = to_gguf(original, 310, None)
    place = values["tokenizer.ggml.tokens"].index("<end_of_turn>")
    assert values["tokenizer.ggml.token_type"][place] == 5
    read = from_gguf(values)
    _same(original, read)
    text = "the<end_of_turn>"
    ids = [tokenizer.encode(text, add_special=True, parse_special=True) for tokenizer in (original, read)]
    assert ids[0] == ids[1]


def test_the_end_may_stand_behind_each_text():
    data = _byte_level()
    data["post_processor"] = _around(data["added_tokens"][0]["id"], ends=True)
    original = _tokenizer(data)
    assert original.encode("the", add_special=True)[-1] == original.eos_ids[0]
    values = to_gguf(original, 310, None)
    assert (values["tokenizer.ggml.add_bos_token"], values["tokenizer.ggml.add_eos_token"]) == (True, True)
    _same(original, from_gguf(values))


def test_scores_say_the_places_of_merges():
    """What no merge makes comes after all merges: letters, and pieces that others may happen to spell."""
    values = to_gguf(_tokenizer(_sentencepiece()), 310, None)
    tokens, scores = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.scores"]
    assert len(scores) == len(tokens)
    places = {"th": -1.0, "the": -2.0, "▁the": -3.0}
    assert scores == [places.get(token, -4.0) for token in tokens]


def test_unknown_text_and_runs_of_spaces_among_added_tokens():
    data = _sentencepiece("▁▁")
    spaces = data["model"]["vocab"]["▁▁"]
    data["model"]["merges"] = [("▁", "▁"), *data["model"]["merges"]]
    unknown = {**data["added_tokens"][0], "id": 0, "content": "<unk>"}
    data["added_tokens"] = [
        unknown,
        {**unknown, "id": spaces, "content": "▁▁", "special": False},
        *data["added_tokens"],
    ]
    data["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    data["decoder"]["decoders"].pop()
    original = _tokenizer(data)
    values = to_gguf(original, 310, None)
    assert values["tokenizer.ggml.token_type"][0] == 2
    # Merges make it. llama.cpp would write a user-defined token as it is, and put its prefix behind it.
    assert (values["tokenizer.ggml.tokens"][spaces], values["tokenizer.ggml.token_type"][spaces]) == ("▁▁", 1)
    read = from_gguf(values)
    for text in (TEXT, "<unk> x <unk>", "the   the    h"):
        for parse in (False, True):
            ids = original.encode(text, add_special=True, parse_special=parse)
            assert read.encode(text, add_special=True, parse_special=parse) == ids
            assert read.decode(ids) == original.decode(ids)
    assert read.encode("<unk>", add_special=False, parse_special=True) == [0]
    assert read.encode("<unk>", add_special=False)[0] != 0
    assert read.decode([0, 1 + ord("t")]) == "t"


def test_tokens_without_a_row_are_left_out():
    data = _sentencepiece()
    size = data["added_tokens"][-1]["id"] + 1
    data["added_tokens"] += [{**data["added_tokens"][0], "id": size, "content": "<image>"}]
    values = to_gguf(_tokenizer(data), size, None)
    assert len(values["tokenizer.ggml.tokens"]) == len(values["tokenizer.ggml.scores"]) == size
    assert "<image>" not in values["tokenizer.ggml.tokens"]
    _same(_tokenizer(_sentencepiece()), from_gguf(values))


def test_white_space_behind_tokens_is_written_as_llama_cpp_knows_it():
    """Of Phi-3 alone, by the model's name."""
    data = _sentencepiece()
    data["added_tokens"][0]["content"] = "<|user|>"
    data["post_processor"] = None
    for token in data["added_tokens"]:
        token["rstrip"] = True
    original = _tokenizer(data)
    values = to_gguf(original, 310, None, "my-Phi-3-mini")
    for name in ("Phi-3 mini", "phi3"):
        read = from_gguf({**values, "general.name": name})
        for text in ("<|user|>\nthe</s> \n the", "the <|user|>  "):
            for parse in (False, True):
                ids = original.encode(text, add_special=False, parse_special=parse)
                assert read.encode(text, add_special=False, parse_special=parse) == ids
    with pytest.raises(UnsupportedError, match=r"token '<\|user\|>'.*white space behind it has no key.*\"phi-3\""):
        to_gguf(original, 310, None, "mine")
    data["added_tokens"][0]["content"] = "<s>"  # whose white space llama.cpp leaves
    with pytest.raises(UnsupportedError, match=r"token '<s>'.*white space behind"):
        to_gguf(_tokenizer(data), 310, None, "phi-3")


def test_masks_take_the_white_space_before_them():
    values = to_gguf(_tokenizer(_sentencepiece()), 310, None)
    tokens = list(values["tokenizer.ggml.tokens"])
    tokens[tokens.index("<s>")] = "<mask>"
    values |= {"tokenizer.ggml.tokens": tokens}
    for names in ({"tokenizer.ggml.pre": "jina-v2-de"}, {"general.architecture": "nomic-bert-moe"}):
        read = from_gguf({**values, **names})
        assert [token.content for token in read.vocabulary.added if token.lstrip] == ["<mask>"]
    assert not any(token.lstrip for token in from_gguf(values).vocabulary.added)


def test_names_of_splitting_rules():
    assert to_gguf(_tokenizer(_byte_level("llama-bpe")), 302, None)["tokenizer.ggml.pre"] == "llama-bpe"
    digits = {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
    ]}  # fmt: skip
    assert kind_of_pipeline({"normalizer": None, "pre_tokenizer": digits}, False) == "smollm"
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    rule = PATTERNS["deepseek-v3"]
    written = [pattern.replace(r"\r", "\r").replace(r"\n", "\n").replace(r"\"", '"') for pattern in rule]
    assert written[-1] != rule[-1]  # as DeepSeek's own file has it
    steps = [*({**split, "pattern": {"Regex": pattern}} for pattern in written), digits["pretokenizers"][1]]
    steps[-1] = {**steps[-1], "use_regex": False}
    assert kind_of_pipeline({"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}, False) == "deepseek-v3"
    for kind in PATTERNS:
        found = kind_of_pipeline(byte_level_pipeline(kind), kind in ("llama-bpe", "tekken"))
        assert found is None or PATTERNS[found] == PATTERNS[kind]


def test_what_cannot_be_written_is_refused_by_name():
    data = _byte_level()
    data["added_tokens"][0]["lstrip"] = True
    with pytest.raises(UnsupportedError, match=r"token '<s>'.*stands around"):
        to_gguf(_tokenizer(data), 302, None)
    data = _byte_level()
    data["normalizer"] = {"type": "Lowercase"}
    with pytest.raises(UnsupportedError, match="splitting rule"):
        to_gguf(_tokenizer(data), 302, None)
    data = _sentencepiece()
    data["normalizer"]["normalizers"].insert(0, {"type": "Replace", "pattern": {"String": "two"}, "content": "2"})
    with pytest.raises(UnsupportedError, match=r"split .* differently"):
        to_gguf(_tokenizer(data), 302, None)
