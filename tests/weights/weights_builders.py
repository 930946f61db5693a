"""Small files made by hand, so that hostile ones differ from good ones in one field."""

import struct
from typing import Any

import numpy as np

from roofline.ops import formats

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
_LAYOUT = {U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q"}


def text(value: str | bytes) -> bytes:
    """A GGUF string."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, content: Any) -> bytes:
    """A GGUF value without its type; arrays are (element kind, list)."""
    if kind == STRING:
        return text(content)
    if kind == ARRAY:
        inner, items = content
        return struct.pack("<IQ", inner, len(items)) + b"".join(value(inner, item) for item in items)
    return struct.pack(_LAYOUT[kind], content)


class GGUFBuilder:
    """Writes a GGUF file from lists that a test may spoil first.

    Attributes: pairs of (key, kind, content); tensors as [name, shape (rows, cols), type number, offset, bytes].
    """

    def __init__(self) -> None:
        self.version = 3
        self.alignment = 32
        self.pairs: list[tuple[str, int, Any]] = []
        self.tensors: list[list[Any]] = []
        self.tensor_count: int | None = None
        self.pair_count: int | None = None

    def add(self, name: str, values: np.ndarray, form: str = "F32") -> None:
        row = formats.get(form)
        end = self.tensors[-1][3] + len(self.tensors[-1][4]) if self.tensors else 0
        offset = -(-end // self.alignment) * self.alignment
        self.tensors.append([name, values.shape, row.gguf_type, offset, row.quantize(values).tobytes()])

    def header(self) -> bytes:
        out = b"GGUF" + struct.pack(
            "<IQQ",
            self.version,
            len(self.tensors) if self.tensor_count is None else self.tensor_count,
            len(self.pairs) if self.pair_count is None else self.pair_count,
        )
        for key, kind, content in self.pairs:
            out += text(key) + struct.pack("<I", kind) + value(kind, content)
        for name, shape, kind, offset, _ in self.tensors:
            out += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            out += struct.pack("<IQ", kind, offset)
        return out

    def build(self) -> bytes:
        out = self.header()
        start = -(-len(out) // self.alignment) * self.alignment
        for _, _, _, offset, raw in self.tensors:
            out = out.ljust(start + offset, b"\0")[: start + offset] + raw
        return out


CONFIG = {
    "family": "llama",
    "width": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn": 96,
    "vocab": 50,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_style": "interleaved",
    "max_position": 512,
    "tied": True,
    "attention_bias": False,
    "qk_norm": False,
    "sliding_window": None,
}


def tiny_llama(form: str = "Q4_0") -> GGUFBuilder:
    """A complete two-layer model: configuration, vocabulary, tensors."""
    builder = GGUFBuilder()
    builder.pairs = [
        ("general.architecture", STRING, "llama"),
        ("llama.block_count", U32, 2),
        ("llama.context_length", U32, 512),
        ("llama.embedding_length", U32, 64),
        ("llama.feed_forward_length", U32, 96),
        ("llama.attention.head_count", U32, 4),
        ("llama.attention.head_count_kv", U32, 2),
        ("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, [f"token{i}" for i in range(50)])),
        ("tokenizer.ggml.token_type", ARRAY, (I32, [1] * 50)),
        ("tokenizer.ggml.add_bos_token", BOOL, 1),
    ]
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        vector = len(shape) == 1
        values = np.ones(shape, np.float32) if vector else rng.standard_normal(shape).astype(np.float32)
        builder.add(name, values, "F32" if vector else form)

    add("token_embd.weight", 50, 64)
    for i in range(2):
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{i}.{name}.weight", 64)
        for name, rows, cols in (
            *(("attn_q", 64, 64), ("attn_k", 32, 64), ("attn_v", 32, 64), ("attn_output", 64, 64)),
            *(("ffn_gate", 96, 64), ("ffn_up", 96, 64), ("ffn_down", 64, 96)),
        ):
            add(f"blk.{i}.{name}.weight", rows, cols)
    add("output_norm.weight", 64)
    return builder
