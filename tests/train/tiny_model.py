"""A small random Llama with a tokenizer, in a folder of Hugging Face's files."""

from pathlib import Path
from typing import Any

import torch

from roofline.models import presets
from roofline.train.config.schema import InitSection
from roofline.train.data.learn_vocabulary import learn
from roofline.train.model.init import initialize
from roofline.train.model.modules import Model
from roofline.weights.to_hf import write_folder

SHAPE: dict[str, Any] = presets.preset("smollm2-135m") | {
    **{"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64, "max_position": 128},
}
TEXTS = ["how many letters are in this word", "a better answer is a short one", "yes", "no"]


def write_model(folder: Path, std: float = 0.1) -> Path:
    """Write the model; its vocabulary are the bytes and a few words."""
    vocab = learn(TEXTS, folder / "tokenizer", 290)
    model = Model(SHAPE | {"vocab": vocab}, "cpu")
    initialize(model, 3, InitSection(name="baseline_", init_std=std))
    files = {path.name: path.read_bytes() for path in (folder / "tokenizer").iterdir()}
    rows = (
        (param.name, tuple(tensor.shape), tensor.detach().view(torch.uint8).numpy().reshape(-1))
        for _, param, tensor in model.canonical()
    )
    write_folder(folder / "model", SHAPE | {"vocab": vocab}, rows, "F32", files)
    return folder / "model"
