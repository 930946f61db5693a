"""A tiny chat model in a folder, and data of all forms, for the tests of fine-tuning."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from roofline.text.templates.template import CHATML
from roofline.text.tokenizers.from_json import from_json
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.text.tokenizers.vocabulary import byte_alphabet

SPECIALS = [
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "[INST]", "[/INST]", "<|begin_of_text|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|user|>", "<|assistant|>", "<|end|>"),
]
TEXT = ["user assistant system What is the capital of France? Paris. yes no maybe one two three four\n"] * 20
VOCAB = 384


def write_tokenizer(
    folder: Path,
    template: str | None = CHATML,
    specials: Sequence[str] = SPECIALS,
    settings: Mapping[str, Any] = MappingProxyType({"bos_token": "<s>", "eos_token": "</s>"}),
) -> Path:
    """tokenizer.json of a byte-level BPE, its settings with a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, initial_alphabet=sorted(byte_alphabet()), special_tokens=list(specials), show_progress=False
    )
    built.train_from_iterator(TEXT, trainer)
    built.save(str(folder / "tokenizer.json"))
    written = dict(settings) | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    return folder


@cache
def words(folder: Path) -> Tokenizer:
    return from_json(folder / "tokenizer.json", json.loads((folder / "tokenizer_config.json").read_text()))


def write_model(folder: Path, std: float = 0.1, **changes: object) -> Path:
    """A Llama of two layers with random weights, and the tokenizer. changes: of its canonical configuration."""
    import numpy as np

    from roofline.models import presets
    from roofline.models.registry import configure
    from roofline.models.spec import expand
    from roofline.weights.to_hf import write_folder

    shape = presets.preset("llama-3.2-1b") | {
        **{"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64, "vocab": VOCAB},
        **{"max_position": 512} | changes,
    }
    family, cfg = configure(shape)
    random = np.random.default_rng(0)
    rows = [
        (param.name, param.shape, (random.standard_normal(param.shape) * std + ("norm" in param.name)).astype("<f4"))
        for param in expand(family.spec(cfg), cfg.layers)
        if param.tied_to is None
    ]
    files = {path.name: path.read_bytes() for path in write_tokenizer(folder.with_name("tokenizer")).iterdir()}
    write_folder(folder, shape, ((n, s, values.view(np.uint8).reshape(-1)) for n, s, values in rows), "F32", files)
    return folder


def question(number: int) -> dict[str, Any]:
    """A chat whose answer follows from its question."""
    words = ("one", "two", "three", "four")
    messages = [
        {"role": "user", "content": f"What is {words[number % 4]}?"},
        {"role": "assistant", "content": words[(number + 1) % 4]},
    ]
    return {"messages": messages}


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path
