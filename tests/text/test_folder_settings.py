"""Special tokens and ends of folders: transformers reads the same of the files beside a tokenizer.json."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as LibraryTokenizer

from roofline.bundle.text_side import text_of_folder
from roofline.common.errors import ConfigError
from roofline.text.streaming.stops import Detokenizer
from roofline.text.tokenizers import folder_settings
from roofline.text.tokenizers.tokenizer import Tokenizer

TEXTS = [
    "hi",
    "<s>hi</s>",
    "a <|im_start|> b",
    "a<mask>b",
    "x[PAD]y",
    "<img> <|endoftext|>",
    "<x> \n z",
    "a <tool>  b",
]


def bytes_folder(folder: Path, *, post_processor: bool = False) -> Path:
    """256 byte tokens, then <s> 256, </s> 257 and <x> 258, which is not special; <mask> 259 only the model knows."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>", "<x>", "<mask>", "<|endoftext|>"]
    built = LibraryTokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    built.pre_tokenizer, built.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    built.add_special_tokens([AddedToken(text, normalized=False) for text in ("<s>", "</s>")])
    built.add_tokens([AddedToken("<x>", normalized=False)])
    if post_processor:
        built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    built.save(str(folder / "tokenizer.json"))
    return folder


def spaces_folder(folder: Path) -> Path:
    """SentencePiece's kind of BPE: <unk> 0, <s> 1, </s> 2, byte tokens, a visible space, runs of which are added."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abhixyz", "▁▁", "▁▁▁▁"]
    merges = [("▁", "▁"), ("▁▁", "▁▁")]
    ids = {token: i for i, token in enumerate(tokens)}
    built = LibraryTokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    built.normalizer = normalizers.Replace(" ", "▁")
    built.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    built.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    built.add_tokens([AddedToken(text, normalized=False) for text in ("▁▁", "▁▁▁▁", "<0x09>")])
    built.save(str(folder / "tokenizer.json"))
    return folder


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def described(content: str, **flags: bool) -> dict[str, Any]:
    usual = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    return {"content": content, **usual, **flags}


GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast"}
DECODER = {str(256 + i): described(text) for i, text in enumerate(("<s>", "</s>"))}
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
OLD_MAP = {"bos_token": "<s>", "eos_token": {**described("</s>")}}
CASES: dict[str, dict[str, Any]] = {
    "map_alone": {"tokenizer_config": GENERIC, "special_tokens_map": OLD_MAP},
    "map_over_config": {"tokenizer_config": {**GENERIC, "eos_token": "<x>"}, "special_tokens_map": OLD_MAP},
    "map_beside_a_decoder": {
        "tokenizer_config": {**GENERIC, "added_tokens_decoder": DECODER, "eos_token": "<s>"},
        "special_tokens_map": OLD_MAP,
    },
    "map_without_config": {"special_tokens_map": OLD_MAP},
    "tokens_in_config": {
        "tokenizer_config": {**GENERIC, "added_tokens_decoder": {**DECODER, "261": described("<|im_start|>")}}
    },
    "ids_that_differ": {
        "tokenizer_config": {**GENERIC, "added_tokens_decoder": {**DECODER, "400": described("<|im_start|>")}}
    },
    "flags_that_differ": {
        "tokenizer_config": {
            **GENERIC,
            "added_tokens_decoder": {
                **{"256": described("<s>"), "257": described("</s>", special=False)},
                "258": described("<x>", rstrip=True, lstrip=True),
            },
        }
    },
    "named_in_decoder": {
        "tokenizer_config": {
            **{**GENERIC, "eos_token": "<|im_start|>"},
            "added_tokens_decoder": {**DECODER, "261": described("<|im_start|>", special=False)},
        }
    },
    "named_in_tokenizer_json": {"tokenizer_config": {**GENERIC, "eos_token": "<x>"}},
    "added_tokens": {
        "tokenizer_config": GENERIC,
        "special_tokens_map": {"eos_token": "<|im_start|>", "additional_special_tokens": ["<img>"]},
        "added_tokens": {"<|im_start|>": 262, "[PAD]": 261, "<tool>": 263, "<x>": 258},
    },
    "added_tokens_beside_a_decoder": {
        "tokenizer_config": {**GENERIC, "added_tokens_decoder": DECODER},
        "added_tokens": {"<|im_start|>": 261},
    },
    "switches": {"tokenizer_config": {**GENERIC, **NAMES, "add_bos_token": True, "add_eos_token": True}},
    "switch_of_a_class": {
        "tokenizer_config": {"tokenizer_class": "GPT2Tokenizer", **NAMES, "add_bos_token": True},
    },
    "pad_that_nobody_has": {"tokenizer_config": {**GENERIC, **NAMES, "pad_token": "[PAD]"}},
    "mask_of_the_model": {"tokenizer_config": {**GENERIC, "mask_token": "<mask>", "bos_token": None}},
    "extra_by_name": {"tokenizer_config": {**GENERIC, "extra_special_tokens": {"image_token": "<img>"}}},
    "extra_in_a_list": {"tokenizer_config": {**GENERIC, "extra_special_tokens": ["<img>", "<tool>"]}},
    "a_name_of_its_own": {"tokenizer_config": {**GENERIC, "image_token": "<img>", "eoi_token": "<tool>"}},
    "defaults_of_a_class": {"tokenizer_config": {"tokenizer_class": "GPT2TokenizerFast"}},
    "no_default_over_null": {"tokenizer_config": {"tokenizer_class": "GPT2Tokenizer", "bos_token": None}},
    "class_that_a_family_never_has": {
        "tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"},
        "config": {"model_type": "ernie4_5"},
    },
    "class_by_family": {"tokenizer_config": {}, "config": {"model_type": "gpt2"}},
}


def check(folder: Path) -> Tokenizer:
    """Our tokenizer of a folder, once it is transformers'."""
    transformers = pytest.importorskip("transformers", reason="the reference of special tokens")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(str(folder)), text_of_folder(folder)[0]
    assert ours.bos_id == theirs.bos_token_id
    assert ours.eos_ids[:1] == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    added = theirs.added_tokens_decoder
    assert {token.id: token.content for token in ours.vocabulary.added} == {i: str(added[i]) for i in added}
    assert ours.special_ids == {token for token in added if not theirs.decode([token], skip_special_tokens=True)}
    for text in TEXTS:
        ids = theirs(text).input_ids
        assert ours.encode(text, add_special=True, parse_special=True) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids), text
        stream = Detokenizer(ours)
        assert "".join([*(stream.push([i]) for i in ids), stream.flush()]) == ours.decode(ids)
    return ours


@pytest.mark.parametrize("name", CASES)
def test_the_files_are_read_as_transformers_does(name: str, tmp_path: Path) -> None:
    write(bytes_folder(tmp_path), {"config": {}, **CASES[name]})
    check(tmp_path)


def test_a_special_token_of_the_map_is_the_end(tmp_path: Path) -> None:
    write(bytes_folder(tmp_path), CASES["map_alone"])
    ours = text_of_folder(tmp_path)[0]
    assert (ours.bos_id, ours.eos_ids) == (256, (257,))


@pytest.mark.parametrize("switch", ["add_bos_token", "add_eos_token"])
def test_the_post_processor_alone_puts_ids_around_a_text(switch: str, tmp_path: Path) -> None:
    for value in (True, False):
        write(bytes_folder(tmp_path, post_processor=True), {"tokenizer_config": {**GENERIC, **NAMES, switch: value}})
        assert check(tmp_path).encode("", add_special=True) == [256]


def test_runs_of_spaces_that_are_tokens_are_written_as_spaces(tmp_path: Path) -> None:
    write(spaces_folder(tmp_path), {"tokenizer_config": {**GENERIC, "bos_token": "<s>", "eos_token": "</s>"}})
    ours = check(tmp_path)
    ids = ours.encode("a    b  x\t", add_special=False)
    assert [ours.token_string(i) for i in ids if ours.token_string(i).startswith("▁")] == ["▁▁▁▁", "▁▁"]
    assert ours.decode(ids) == "a    b  x\t"
    assert ours.token_bytes(3 + 9) == b"\t"


def test_gemmas_class_has_a_mask_where_the_vocabulary_has_one(tmp_path: Path) -> None:
    folder = spaces_folder(tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["vocab"] |= {text: len(data["model"]["vocab"]) + i for i, text in enumerate(("<bos>", "<eos>"))}
    (folder / "tokenizer.json").write_text(json.dumps(data | {"added_tokens": data["added_tokens"][:3]}))
    write(folder, {"tokenizer_config": {"tokenizer_class": "GemmaTokenizer"}})
    ours = text_of_folder(folder)[0]
    assert [ours.token_string(i) for i in (ours.bos_id or 0, *ours.eos_ids)] == ["<bos>", "<eos>"]
    assert {ours.token_string(i) for i in ours.special_ids} == {"<unk>", "<s>", "</s>", "<bos>", "<eos>"}


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"config": {"eos_token_id": [7, 258]}}, (257, 7, 258)),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [258]}}, (257, 258)),
        ({"config": {"eos_token_id": 7}, "generation_config": {}}, (257,)),
    ],
)
def test_ends_of_config_json_count_without_a_generation_config(
    files: dict[str, Any], ends: tuple[int, ...], tmp_path: Path
) -> None:
    write(bytes_folder(tmp_path), {"tokenizer_config": {**GENERIC, **NAMES}, **files})
    assert text_of_folder(tmp_path)[0].eos_ids == ends


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"special_tokens_map": {"eos_token": 7}}, r"special_tokens_map\.json: eos_token: is the number 7"),
        ({"special_tokens_map": {"eos_token": {"lstrip": True}}}, r"eos_token\.content: is missing"),
        ({"added_tokens": {"<y>": "7"}}, r"added_tokens\.json: <y>: is the string '7', not a whole number"),
        ({"added_tokens": {"<y>": -1}}, r"added_tokens\.json: <y>: the number -1 is no id"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {}}}}, r"added_tokens_decoder\.x: is not the id"),
        ({"tokenizer_config": {"added_tokens_decoder": {"1": {"content": ""}}}}, r"1\.content: is empty"),
        ({"config": {"eos_token_id": "7"}}, r"config\.json: eos_token_id: is the string '7'"),
        ({"tokenizer_config": {"extra_special_tokens": 3}}, r"extra_special_tokens: is the number 3, not a list"),
    ],
)
def test_values_of_wrong_types_are_named(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(bytes_folder(tmp_path), files)
    with pytest.raises(ConfigError, match=message):
        text_of_folder(tmp_path)


def test_ends_of_a_model_that_reads_more_than_text_may_stand_in_its_text_part(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for outside, inside, expected in (([1, 106], 3, [1, 106]), (None, 3, 3), (None, None, None)):
        path.write_text(json.dumps({"eos_token_id": outside, "text_config": {"eos_token_id": inside}}))
        assert folder_settings.read_settings({"config.json": path})["eos_token_id"] == expected
    path.write_text(json.dumps({"text_config": {"eos_token_id": "a"}}))
    with pytest.raises(ConfigError, match=r"text_config\.eos_token_id"):
        folder_settings.read_settings({"config.json": path})
