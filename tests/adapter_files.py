"""LoRA adapters in PEFT's files, written for tests."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from roofline.ops.adapters import AdapterMatrix
from roofline.weights.families.shared.tensor_names import without_expert
from roofline.weights.files.mapped import TensorInfo

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": "all-linear", "fan_in_fan_out": False}
CONFIG |= {"bias": "none", "use_rslora": False, "use_dora": False, "modules_to_save": None, "task_type": "CAUSAL_LM"}


def shapes(config: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Module of a Llama -> (outputs, inputs) of its weight."""
    width, ffn = config["hidden_size"], config["intermediate_size"]
    kv = width // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {
        **{"self_attn.q_proj": (width, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width)},
        **{"self_attn.o_proj": (width, width), "mlp.gate_proj": (ffn, width), "mlp.up_proj": (ffn, width)},
        "mlp.down_proj": (width, ffn),
    }
    return {f"model.layers.{i}.{n}": s for i in range(config["num_hidden_layers"]) for n, s in layer.items()}


def matrices(config: Mapping[str, int], seed: int, rank: int = 4) -> dict[str, np.ndarray]:
    """Random A and B, under PEFT's names, for every linear layer of a Llama."""
    generator, made = np.random.default_rng(seed), {}
    for module, (outputs, inputs) in shapes(config).items():
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = 0.3 * generator.standard_normal(shape)
            made[f"base_model.model.{module}.lora_{part}.weight"] = values.astype(np.float32)
    return made


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """float32 tensors, without the library."""
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(v.tobytes() for v in tensors.values()))


def write_adapter(folder: Path, tensors: Mapping[str, np.ndarray], **config: object) -> str:
    """The folder, with both files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    return str(folder)


def for_checkpoint(tensors: Mapping[str, TensorInfo], seed: int = 1, experts: int = 1) -> list[AdapterMatrix]:
    """Random matrices of rank 3 for those of a checkpoint's layers, of experts for each; not for routers and for
    convolutions.

    experts: how many lie one below the other, where the checkpoint has them in one tensor.
    """
    generator, made = np.random.default_rng(seed), []
    for name, info in tensors.items():
        unadapted = any(part in name for part in (".router.", ".shared.scale", ".linear.conv."))
        if len(info.shape) != 2 or not name.startswith("layers.") or unadapted:
            continue
        stacked = ".mlp.experts." in name and without_expert(name)[1] == ""
        for number in range(experts if stacked else 1):
            each = name.replace(".experts.", f".experts.{number}.") if stacked else name
            rows = info.shape[0] // (experts if stacked else 1)
            a, b = (0.2 * generator.standard_normal((3, size)) for size in (info.shape[1], rows))
            made.append(AdapterMatrix(each, a.astype(np.float32), b.astype(np.float32), 0.75))
    return made
