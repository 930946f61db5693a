"""Tokenizers for the tests of the room: SmolLM2's, and tiny ones trained on the spot."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from roofline.text.tokenizers.from_gguf import from_gguf
from roofline.text.tokenizers.from_json import from_json
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.text.tokenizers.vocabulary import byte_alphabet
from roofline.weights.files.gguf import GGUFFile

sys.path.insert(0, str(Path(__file__).parent))  # test folders are no packages, and text_samples lies beside the tests

from text_samples import AWKWARD


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_path: Path) -> dict[str, Any]:
    """SmolLM2's key-value pairs, which tests/weights/test_gguf.py compares with those that the gguf package reads."""
    return dict(GGUFFile(smollm2_path).metadata)


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: dict[str, Any]) -> Tokenizer:
    """SmolLM2's tokenizer, ours."""
    return from_gguf(smollm2_metadata)


@pytest.fixture(scope="session")
def smollm2_hf(smollm2_path: Path) -> Any:
    """SmolLM2's tokenizer, transformers', with the pre-tokenizer of SmolLM2's own tokenizer.json.

    Reading the GGUF file, transformers passes over ``tokenizer.ggml.pre`` and forgets that digits stand alone.
    """
    transformers = pytest.importorskip("transformers", reason="the reference of tokenizers and templates")
    reference = transformers.AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return reference


CHAT_SPECIALS = [
    *("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|im_start|>", "<|im_end|>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>", "<|endoftext|>"),
]


@pytest.fixture(scope="session")
def byte_bpe_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny byte-level BPE with the special tokens of many chat formats, and a plain added token."""
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=sorted(byte_alphabet()), special_tokens=CHAT_SPECIALS, show_progress=False
    )
    built.train_from_iterator(AWKWARD * 3, trainer)
    built.add_tokens([tokenizers.AddedToken("<think>", normalized=False), tokenizers.AddedToken("</think>")])
    folder = tmp_path_factory.mktemp("byte_bpe")
    built.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def byte_bpe(byte_bpe_json: Path) -> Tokenizer:
    """The tiny tokenizer, ours."""
    return from_json(
        byte_bpe_json / "tokenizer.json", json.loads((byte_bpe_json / "tokenizer_config.json").read_text())
    )


@pytest.fixture(scope="session")
def byte_bpe_hf(byte_bpe_json: Path) -> Any:
    """The tiny tokenizer, transformers'."""
    transformers = pytest.importorskip("transformers", reason="the reference of tokenizers and templates")
    return transformers.PreTrainedTokenizerFast.from_pretrained(str(byte_bpe_json))


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny SentencePiece BPE model with byte fallback, as Llama 2's: its processor."""
    spm = pytest.importorskip("sentencepiece", reason="the reference of SentencePiece tokenizers")
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "text").write_text("\n".join(t for t in AWKWARD for _ in range(5) if "\x00" not in t), encoding="utf-8")
    spm.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tiny"),
        vocab_size=560,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        minloglevel=2,
    )
    return spm.SentencePieceProcessor(model_file=str(folder / "tiny.model"))


@pytest.fixture(scope="session")
def sentencepiece_metadata(sentencepiece_model: Any) -> dict[str, Any]:
    """What a converter writes into a GGUF file for the tiny model."""
    model = sentencepiece_model
    ids = range(model.vocab_size())
    kinds = [2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in ids]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_metadata: dict[str, Any]) -> Tokenizer:
    """The tiny SentencePiece tokenizer, ours."""
    return from_gguf(sentencepiece_metadata)
