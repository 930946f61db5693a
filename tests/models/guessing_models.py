"""Small models of transformers with a layer that guesses further tokens, `transformers.modeling_layers.MtpModel`, as
the judge, and their files as they are published."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from tests.models.parity_cases import theirs

# Names of transformers' layer -> those of published files, within `mtp`.
_TOP = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}


@dataclass
class GuessingModel:
    """model: transformers' model; layer: its MtpModel of one layer, which shares its embedding and head."""

    model: Any
    layer: Any

    def published(self) -> dict[str, torch.Tensor]:
        """The tensors of the layer under the names of published files."""
        tensors = {}
        text = self.model.config.get_text_config()
        within = "" if "qwen" in text.model_type else f"model.layers.{text.num_hidden_layers}"
        for name, tensor in self.layer.layers[0].state_dict().items():
            part, _, rest = name.partition(".")
            theirs_name = f"mtp.{_TOP[part]}.{rest}" if part in _TOP else f"mtp.layers.0.{rest}"
            if within:  # counted on behind the model's
                module = {"post_norm": "shared_head.norm", "mtp_block": ""}.get(part, part)
                theirs_name = ".".join(filter(None, (within, module, rest)))
            tensors[theirs_name] = tensor.contiguous().clone()
        return tensors

    def save(self, folder: Path) -> Path:
        """Write a folder as it is published, with the layer beside the model."""
        self.model.save_pretrained(folder)
        file = folder / "model.safetensors"
        save_file(load_file(file) | self.published(), file, metadata={"format": "pt"})
        return folder

    def hidden(self, ids: list[int]) -> torch.Tensor:
        """The rows that the head reads, [1, tokens, width]."""
        with torch.no_grad():
            rows: torch.Tensor = self.model.get_decoder()(input_ids=torch.tensor([ids])).last_hidden_state
        return rows

    def guesses(self, ids: list[int], count: int) -> tuple[list[int], list[np.ndarray]]:
        """The `count` likeliest ids that the layer gives to follow ids, one after the other, each with its logits. In
        front of the first token's row stand zeros, as llama.cpp has it."""
        rows = self.hidden(ids[:-1] or ids)[:, : len(ids) - 1]
        rows = torch.cat([torch.zeros(1, 1, rows.shape[2]), rows], dim=1)
        ids, logits = list(ids), []
        first = len(ids)
        for _ in range(count):
            with torch.no_grad():
                made = self.layer.forward_layer(
                    0, rows, torch.arange(len(ids))[None], None, input_ids=torch.tensor([ids])
                )
                logits.append(self.layer.shared_head(made)[0, -1].numpy())
            rows = torch.cat([rows, made[:, -1:]], dim=1)
            ids.append(int(logits[-1].argmax()))
        return ids[first:], logits


def guessing_model(config: Mapping[str, Any], seed: int = 0) -> GuessingModel:
    """A model of a canonical configuration and its layer, with random weights."""
    model = theirs(config)
    text = model.config.get_text_config()
    text.num_mtp_layers, text.mtp_layer_types = 1, ["full_attention"]
    torch.manual_seed(seed)
    layer = MtpModel(model, 1)
    norm, config_of = type(model.get_decoder().norm), layer.config
    for name in ("enorm", "hnorm", "post_norm"):  # transformers takes the class of whatever norm a layer has first
        setattr(layer.layers[0], name, norm(config_of.hidden_size, eps=config_of.rms_norm_eps))
    layer.eval()
    for name, tensor in layer.layers.named_parameters():
        with torch.no_grad():
            tensor.normal_(0.0, 0.2 if "norm" in name else tensor.shape[-1] ** -0.5)
    return GuessingModel(model, layer)
