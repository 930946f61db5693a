"""Small random checkpoints of each quantisation method, written as the method's own tools write them.

Each writer gives the tensors of a matrix [rows, columns] and the float32 values that the tools' own formula makes of
them, computed here element by element from codes, scales and zero points, with no code of ours in between.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WIDTH, FFN, VOCAB, LAYERS = 128, 192, 56, 1
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": FFN, "vocab_size": VOCAB, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (64, WIDTH), "self_attn.v_proj": (64, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH), "mlp.gate_proj": (FFN, WIDTH), "mlp.up_proj": (FFN, WIDTH),
    "mlp.down_proj": (WIDTH, FFN),
}  # fmt: skip
Q = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, Any]  # name -> torch tensor
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Codes:
    """Random codes, scales and zero points of a matrix, and its values (code - zero) * scale."""

    def __init__(
        self, shape: tuple[int, int], rng: np.random.Generator, group: int, *, bits: int = 4, zeros: bool = True,
        scale: Any = "float16", order: bool = False,
    ) -> None:  # fmt: skip
        import torch

        rows, columns = shape
        group = columns if group == -1 else group
        self.rows, self.columns, self.groups = rows, columns, columns // group
        self.code = rng.integers(0, 1 << bits, shape)
        self.zero = (
            rng.integers(0, 1 << bits, (rows, self.groups)) if zeros else np.full((rows, self.groups), 1 << (bits - 1))
        )
        plain = rng.uniform(0.4, 1, (rows, self.groups)) * 2.0 ** (-2 - bits)
        self.scale = torch.from_numpy(plain).to(getattr(torch, scale))
        self.group_of = np.arange(columns) // group
        if order:
            self.group_of = rng.permutation(self.group_of)

    @property
    def values(self) -> np.ndarray:
        """float32 [rows, columns], exact."""
        scale = np.broadcast_to(self.scale.double().numpy(), self.zero.shape)[:, self.group_of]
        return ((self.code - self.zero[:, self.group_of]) * scale).astype(np.float32)


def words(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Any:
    """int32 [n, m * bits / 32] of codes [n, m]: code i of a word is that of column order[i]."""
    import torch

    per = 32 // bits
    out = np.zeros((codes.shape[0], codes.shape[1] // per), np.uint64)
    for i in range(per):
        out |= codes[:, (order or range(per))[i] :: per].astype(np.uint64) << np.uint64(bits * i)
    return torch.from_numpy(out.astype(np.uint32).view(np.int32))


def gptq(codes: Codes, bits: int = 4, plus_one: bool = True) -> Tensors:
    zeros = codes.zero.T  # [groups, rows]
    stored = words(zeros, bits).numpy().view(np.uint32)
    if plus_one:  # as GPTQModel: one is taken off each code of a word, borrowing from code to code
        stored = stored - np.uint32(0x11111111 if bits == 4 else 0x01010101)
    import torch

    return {
        ".qweight": words(codes.code, bits).T.contiguous(),
        ".qzeros": torch.from_numpy(stored.view(np.int32)),
        ".scales": codes.scale.T.contiguous(),
        ".g_idx": torch.from_numpy(codes.group_of.astype(np.int32)),
    }


def awq(codes: Codes) -> Tensors:
    return {
        ".qweight": words(codes.code.T, 4, AWQ_ORDER),
        ".qzeros": words(codes.zero.T, 4, AWQ_ORDER),
        ".scales": codes.scale.T.contiguous(),
    }


def packed(codes: Codes, bits: int = 4, zeros: bool = False, g_idx: bool = False) -> Tensors:
    import torch

    out = {
        ".weight_packed": words(codes.code, bits),
        ".weight_scale": codes.scale,
        ".weight_shape": torch.tensor([codes.rows, codes.columns]),
    }
    if zeros and len(codes.scale.shape) == 1:  # of the matrix: not packed
        out[".weight_zero_point"] = torch.from_numpy((codes.zero[0] - (1 << (bits - 1))).astype(np.int8))
    elif zeros:
        out[".weight_zero_point"] = words(codes.zero.T, bits).T.contiguous()
    if g_idx:
        out[".weight_g_idx"] = torch.from_numpy(codes.group_of.astype(np.int32))
    return out


def of_matrix(shape: tuple[int, int], rng: np.random.Generator, **options: Any) -> Codes:
    """Codes with one scale, and one zero point, for all."""
    codes = Codes(shape, rng, -1, **options)
    codes.zero[:] = codes.zero[0]
    codes.scale = codes.scale[0]
    return codes


def int8(codes: Codes) -> Tensors:
    import torch

    return {".weight": torch.from_numpy((codes.code - 128).astype(np.int8)), ".weight_scale": codes.scale}


def compressed(form: str, bits: int, group: int, symmetric: bool = True, **weights: Any) -> dict[str, Any]:
    """A quantization_config as LLM Compressor writes it. group: 0: by channel."""
    args = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel",
        "group_size": group or None, "dynamic": False, "observer": "minmax", "observer_kwargs": {},
        "block_structure": None, "actorder": None, **weights,
    }  # fmt: skip
    group_0: dict[str, Any] = {"targets": ["Linear"], "weights": args, "output_activations": None}
    group_0["input_activations"] = (
        {**args, "strategy": "token", "group_size": None, "dynamic": True} if form == "int-quantized" else None
    )
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "kv_cache_scheme": None,
        "quantization_status": "compressed", "global_compression_ratio": 1.5, "version": "0.13.0",
        "sparsity_config": {}, "transform_config": {},
        "config_groups": {"group_0": group_0},
    }  # fmt: skip


def gptq_config(group: int, **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": 4, "group_size": group, "sym": True, "desc_act": False, "damp_percent": 0.01,
        "static_groups": False, "true_sequential": True, "lm_head": False, "checkpoint_format": "gptq", **changes,
    }  # fmt: skip


def awq_config(group: int, **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None, **changes,
    }  # fmt: skip


# kind -> (quantization_config, codes of a matrix, its tensors, the format it is read as)
Maker = Callable[[tuple[int, int], np.random.Generator], Codes]
KINDS: dict[str, tuple[dict[str, Any], Maker, Callable[[Codes], Tensors], str]] = {}
for _group in (32, 64, -1):
    KINDS[f"gptq sym {_group}"] = (
        gptq_config(_group), lambda s, r, g=_group: Codes(s, r, g, zeros=False), gptq, "Q4_0",
    )  # fmt: skip
    KINDS[f"gptq {_group}"] = (gptq_config(_group, sym=False), lambda s, r, g=_group: Codes(s, r, g), gptq, "INT4")
    KINDS[f"awq {_group}"] = (awq_config(_group), lambda s, r, g=_group: Codes(s, r, g), awq, "INT4")
KINDS |= {
    "gptq v2": (
        gptq_config(32, sym=False, checkpoint_format="gptq_v2"),
        lambda s, r: Codes(s, r, 32),
        lambda c: gptq(c, plus_one=False),
        "INT4",
    ),
    "gptq bf16": (gptq_config(32), lambda s, r: Codes(s, r, 32, zeros=False, scale="bfloat16"), gptq, "INT4"),
    "gptq 8 bits": (
        gptq_config(32, bits=8), lambda s, r: Codes(s, r, 32, bits=8, zeros=False), lambda c: gptq(c, 8), "Q8_0",
    ),
    "gptq 8 bits asym": (
        gptq_config(32, bits=8, sym=False), lambda s, r: Codes(s, r, 32, bits=8), lambda c: gptq(c, 8), "F32",
    ),
    "gptq act-order": (
        gptq_config(32, desc_act=True, sym=False), lambda s, r: Codes(s, r, 32, order=True), gptq, "F32",
    ),
    "gptq act-order, fixed groups": (
        gptq_config(32, desc_act=True, static_groups=True), lambda s, r: Codes(s, r, 32, zeros=False), gptq, "Q4_0",
    ),
    "gptq groups of 16": (gptq_config(16), lambda s, r: Codes(s, r, 16, zeros=False), gptq, "F32"),
    "pack-quantized": (
        compressed("pack-quantized", 4, 32),
        lambda s, r: Codes(s, r, 32, zeros=False, scale="bfloat16"),
        packed,
        "INT4",
    ),
    "pack-quantized f16": (
        compressed("pack-quantized", 4, 64), lambda s, r: Codes(s, r, 64, zeros=False), packed, "Q4_0",
    ),
    "pack-quantized asym": (
        compressed("pack-quantized", 4, 32, symmetric=False, zp_dtype="torch.int8"),
        lambda s, r: Codes(s, r, 32, scale="bfloat16"),
        lambda c: packed(c, zeros=True),
        "INT4",
    ),
    "pack-quantized channel": (
        compressed("pack-quantized", 4, 0), lambda s, r: Codes(s, r, -1, zeros=False, scale="float32"), packed, "INT4",
    ),
    "pack-quantized act-order": (
        compressed("pack-quantized", 4, 32, actorder="group"),
        lambda s, r: Codes(s, r, 32, zeros=False, scale="bfloat16", order=True),
        lambda c: packed(c, g_idx=True),
        "F32",
    ),
    "pack-quantized 8 bits": (
        compressed("pack-quantized", 8, 32),
        lambda s, r: Codes(s, r, 32, bits=8, zeros=False, scale="bfloat16"),
        lambda c: packed(c, 8),
        "INT8",
    ),
    "pack-quantized 8 bits by tensor, asym": (
        compressed("pack-quantized", 8, 0, symmetric=False, strategy="tensor"),
        lambda s, r: of_matrix(s, r, bits=8, scale="bfloat16"),
        lambda c: packed(c, 8, zeros=True),
        "F32",
    ),
    "pack-quantized by tensor, asym": (
        compressed("pack-quantized", 4, 0, symmetric=False, strategy="tensor"),
        lambda s, r: of_matrix(s, r, scale="bfloat16"),
        lambda c: packed(c, zeros=True),
        "INT4",
    ),
    "pack-quantized 8 bits by tensor": (
        compressed("pack-quantized", 8, 0, strategy="tensor"),
        lambda s, r: of_matrix(s, r, bits=8, zeros=False, scale="bfloat16"),
        lambda c: packed(c, 8),
        "INT8",
    ),
    "int-quantized by tensor, asym": (
        compressed("int-quantized", 8, 0, symmetric=False, strategy="tensor"),
        lambda s, r: of_matrix(s, r, bits=8, scale="bfloat16"),
        lambda c: int8(c) | {".weight_zero_point": packed(c, 8, zeros=True)[".weight_zero_point"]},
        "F32",
    ),
    "int-quantized": (
        compressed("int-quantized", 8, 0),
        lambda s, r: Codes(s, r, -1, bits=8, zeros=False, scale="bfloat16"),
        int8,
        "INT8",
    ),
    "int-quantized f16": (
        compressed("int-quantized", 8, 0), lambda s, r: Codes(s, r, -1, bits=8, zeros=False), int8, "Q8_0",
    ),
}  # fmt: skip


def tensors_of(kind: str, seed: int = 0) -> tuple[Tensors, dict[str, np.ndarray]]:
    """(tensors of a file, float32 values of the quantised matrices by Hugging Face's name)."""
    _, make, write, _ = KINDS[kind]
    rng = np.random.default_rng(seed)
    stored, values = plain_tensors(rng), {}
    for layer in range(LAYERS):
        for part, shape in SHAPES.items():
            codes = make(shape, rng)
            stored |= {f"model.layers.{layer}.{part}{end}": tensor for end, tensor in write(codes).items()}
            values[f"model.layers.{layer}.{part}.weight"] = codes.values
    return stored, values


def plain_tensors(rng: np.random.Generator) -> Tensors:
    """What is not quantised."""
    import torch

    stored = {"model.embed_tokens.weight": torch.from_numpy(rng.standard_normal((VOCAB, WIDTH))).bfloat16()}
    stored["model.norm.weight"] = torch.ones(WIDTH)
    for layer in range(LAYERS):
        for name in ("input_layernorm", "post_attention_layernorm"):
            stored[f"model.layers.{layer}.{name}.weight"] = torch.ones(WIDTH)
    return stored


def written(folder: Path, kind: str, changes: Tensors | None = None, **settings: Any) -> Path:
    """A model's folder. changes: tensors by name, None to leave one out; settings: of quantization_config."""
    return write(folder, tensors_of(kind)[0] | (changes or {}), {**KINDS[kind][0], **settings})


def write(folder: Path, stored: Tensors, quantization: Any) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    save_file({n: t for n, t in stored.items() if t is not None}, folder / "model.safetensors")
    config = CONFIG if quantization is None else {**CONFIG, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
