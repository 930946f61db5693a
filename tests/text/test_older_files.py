"""vocab.json with merges.txt, and what is wrong in folders without tokenizer.json."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from text_samples import AWKWARD
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, pre_tokenizers, trainers

from roofline.bundle.text_side import text_of_folder
from roofline.common.errors import ConfigError, RooflineError, UnsupportedError
from roofline.text.tokenizers.vocabulary import byte_alphabet

SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]


@pytest.fixture(scope="module")
def byte_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vocab.json and merges.txt of a tiny byte-level BPE."""
    built = LibraryTokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=sorted(byte_alphabet()), special_tokens=SPECIALS, show_progress=False
    )
    built.train_from_iterator(AWKWARD * 3, trainer)
    folder = tmp_path_factory.mktemp("bytes")
    built.model.save(str(folder))
    return folder


def folder_with(source: Path, target: Path, config: dict[str, Any]) -> Path:
    for name in ("vocab.json", "merges.txt"):
        (target / name).write_bytes((source / name).read_bytes())
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


CLASSES: list[dict[str, Any]] = [
    {"tokenizer_class": "GPT2Tokenizer"},
    {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "bos_token": "</s>"},  # OPT
    {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
    {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>"},
    {"tokenizer_class": "RobertaTokenizer"},
]


@pytest.mark.parametrize("config", CLASSES)
def test_vocab_json_and_merges_give_the_ids_of_transformers(
    byte_files: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference of tokenizers")
    folder = folder_with(byte_files, tmp_path, config)
    ours, _ = text_of_folder(folder)
    reference = getattr(transformers, config["tokenizer_class"]).from_pretrained(str(folder))
    for text in AWKWARD:
        expected = reference.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text, add_special=False) == expected, text
        assert ours.decode(expected) == reference.decode(expected, skip_special_tokens=True), text


def test_what_the_classes_put_around_texts(byte_files: Path, tmp_path: Path) -> None:
    around = []
    for config in CLASSES:
        ours, _ = text_of_folder(folder_with(byte_files, tmp_path, config))
        around.append([ours.token_string(i) for i in ours.encode("", add_special=True)])
    assert around == [[], ["</s>"], [], [], ["<s>", "</s>"]]


def test_tokenizer_json_comes_first(byte_files: Path, byte_bpe_json: Path, tmp_path: Path) -> None:
    folder = folder_with(byte_files, tmp_path, {"tokenizer_class": "CLIPTokenizer"})
    with pytest.raises(UnsupportedError, match=r"merges\.txt: tokenizer_class 'CLIPTokenizer'.*GPT2Tokenizer"):
        text_of_folder(folder)
    (folder / "tokenizer.json").write_bytes((byte_bpe_json / "tokenizer.json").read_bytes())
    assert text_of_folder(folder)[0].token_id("<think>") is not None
    for name in ("tokenizer.json", "vocab.json"):
        (folder / name).unlink()
    with pytest.raises(ConfigError, match=r"there is no tokenizer\.json"):  # merges alone are no vocabulary
        text_of_folder(folder)


BAD: list[tuple[str, bytes, str]] = [
    ("merges.txt", b"\xff", "merges.txt: is not UTF-8"),
    ("merges.txt", b"#version: 0.2\na\n", "merges.txt: holds a line"),
    ("merges.txt", b"a b c\n", "merges.txt: holds a line"),
    ("merges.txt", b"no such\n", "do not fit together"),
    ("vocab.json", b"[]", "vocab.json"),
    ("vocab.json", b'{"a": -1}', r"vocab.json: vocab\.a: the number -1"),
    ("vocab.json", b'{"a": 99999999}', r"vocab.json: vocab\.a: the number 99999999"),
    ("vocab.json", b'{"a": "b"}', r"vocab\.a: is the string"),
    ("added_tokens.json", b'{"<x>": true}', r"added_tokens.json: <x>: is true"),
    ("added_tokens.json", b'{"<x>": 99999999}', r"added_tokens.json: <x>: the number"),
    ("tokenizer_config.json", b'{"tokenizer_class": 7}', "tokenizer_class: is the number 7"),
    (
        "tokenizer_config.json",
        b'{"tokenizer_class": "GPT2Tokenizer", "add_bos_token": true, "bos_token": "<lost>"}',
        "add_bos_token: is true.*no token is bos_token",
    ),
    (
        "tokenizer_config.json",
        b'{"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": {"x": {}}}',
        r"added_tokens_decoder\.x: is not the id",
    ),
    (
        "tokenizer_config.json",
        b'{"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": {"9": {}}}',
        r"added_tokens_decoder\.9\.content: is missing",
    ),
]


@pytest.mark.parametrize(("name", "data", "reason"), BAD)
def test_wrong_files_are_named(byte_files: Path, tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    folder = folder_with(byte_files, tmp_path, {"tokenizer_class": "GPT2Tokenizer"})
    (folder / name).write_bytes(data)
    with pytest.raises(ConfigError, match=reason) as caught:
        text_of_folder(folder)
    assert str(tmp_path) in str(caught.value)


def test_damaged_files_are_read_or_refused(byte_files: Path, tmp_path: Path) -> None:
    chance = random.Random(3)
    folder = folder_with(byte_files, tmp_path, {"tokenizer_class": "GPT2Tokenizer"})
    (folder / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\n[PAD]\n[MASK]\na\n##b\n")
    bert = json.dumps({"tokenizer_class": "BertTokenizer"})
    refused = 0
    for name in ("vocab.json", "merges.txt", "vocab.txt"):
        if name == "vocab.txt":
            (folder / "vocab.json").unlink()
            (folder / "tokenizer_config.json").write_text(bert)
        good = (folder / name).read_bytes()
        for _ in range(25):
            data = bytearray(good)
            for _ in range(chance.randrange(1, 4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            (folder / name).write_bytes(data)
            try:
                text_of_folder(folder)[0].encode("ab ab", add_special=True)
            except RooflineError:
                refused += 1
        (folder / name).write_bytes(good)
    assert refused > 10
