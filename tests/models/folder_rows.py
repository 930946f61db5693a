"""Logits, or hidden rows of encoders, that a folder of files gives with transformers and with us."""

import json
from pathlib import Path

import numpy as np
import torch
import transformers

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.weights.checkpoint import open_checkpoint
from tests.models.parity_cases import Eager, _hidden, class_of

IDS = list(range(3, 83))


def their_rows(folder: Path, is_encoder: bool = False) -> np.ndarray | None:
    """The logits, or hidden rows, of transformers; None where it does not load the folder or guesses a tensor."""
    kind = transformers.AutoModel if is_encoder else class_of(json.loads((folder / "config.json").read_text()))
    try:
        options = {"output_loading_info": True, "attn_implementation": "eager", "dtype": torch.float32}
        model, notes = kind.from_pretrained(folder, **options)
        if any("pooler" not in name for name in notes["missing_keys"]):
            return None
        with torch.no_grad():
            out = model.eval()(torch.tensor([IDS]))
    except Exception:  # of whatever type: what it refuses is no model to compare with
        return None
    rows: np.ndarray = (out.last_hidden_state if is_encoder else out.logits)[0].numpy()
    return rows


def our_rows(folder: Path, is_encoder: bool = False) -> np.ndarray | None:
    """The same of ours; None where we refuse the folder."""
    try:
        checkpoint = open_checkpoint(folder)
    except (ConfigError, UnsupportedError):
        return None
    return _hidden(checkpoint, IDS) if is_encoder else Eager(checkpoint).step(IDS)
