"""Small random models in which layers with recurrent state and layers of attention take turns, of a family of the
tests' own: it has what kernels must know, and no published model's names."""

import functools
import sys
from dataclasses import dataclass, replace
from typing import Any

from roofline import ops
from roofline.backends.capacity import Capacity
from roofline.backends.cpu.executable import CpuExecutable
from roofline.backends.reference.executable import ReferenceExecutable
from roofline.models import llama, registry
from roofline.models.config import ModelConfig
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights
from roofline.ops import formats
from roofline.ops.batch import BatchLimits
from roofline.ops.scan import scan_state
from roofline.ops.state import COLUMNS, MATRIX, StateParts
from roofline.ops.symbol import Value
from roofline.program import target
from roofline.program.compile import compile_program
from roofline.program.ir import Program
from roofline.weights.checkpoint import Checkpoint
from roofline.weights.random_weights import random_checkpoint
from tests.backends.cpu_models import packed, with_memory

FAMILY = "tests_hybrid"


@dataclass(frozen=True)
class Config(ModelConfig):
    """recurrent: of each layer, whether it keeps state; the others attend. shift: the convolution has a bias; beside:
    gate and up of the gates are one value; normed: what the gates scale is normed by heads first. scan: the selective
    scan takes the place of the delta rule, with heads of values and groups of key heads; normed with weights of each
    head's own. rates: a rate for each state of each of its heads, which have one channel."""

    recurrent: tuple[bool, ...] = ()
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 24
    taps: int = 4
    tiled: bool = False
    shift: bool = False
    normed: bool = True
    scan: bool = False
    rates: bool = False

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_parts(self) -> StateParts:
        matrix: tuple[int, ...] = (self.value_heads, self.key_dim, self.value_dim)
        if self.scan:
            width = self.value_heads * self.value_dim
            matrix = scan_state(width, self.value_heads, self.key_dim, self.rates)
        return ((COLUMNS, (self.taps - 1, self.channels)), (MATRIX, matrix))

    def attends(self, layer: int) -> bool:
        return not self.recurrent[layer]

    def keeps_state(self, layer: int) -> bool:
        return self.recurrent[layer]


embed, head, check = llama.embed, llama.head, llama.check


def spec(cfg: Config) -> tuple[Param, ...]:
    attending = [layer for layer in range(cfg.layers) if not cfg.recurrent[layer]]
    keeping = [layer for layer in range(cfg.layers) if cfg.recurrent[layer]]
    table = [replace(p, layers=attending) if ".attn." in p.name else p for p in llama.spec(cfg)]  # type: ignore[arg-type]
    values = cfg.value_heads * cfg.value_dim
    shapes: dict[str, tuple[int, ...]] = {
        "qkv": (cfg.channels, cfg.width),
        "z": (values, cfg.width),
        "a": (cfg.value_heads, cfg.width),
        "b": (cfg.value_heads, cfg.width),
        "conv": (cfg.channels, cfg.taps),
        "a_log": (cfg.value_heads, cfg.key_dim) if cfg.rates else (cfg.value_heads,),
        "dt_bias": (cfg.value_heads,),
        "norm": (values if cfg.scan else cfg.value_dim,),
        "o": (cfg.width, values),
    }
    if cfg.scan:
        shapes["d"] = (cfg.value_heads,)
        del shapes["b"]
    if cfg.shift:
        shapes["conv_shift"] = (cfg.channels,)
    names = {f"layers.{{layer}}.linear.{name}.weight": shape for name, shape in shapes.items()}
    gate = Param("layers.{layer}.attn.gate.weight", (cfg.q_width, cfg.width), "column", layers=attending)  # type: ignore[arg-type]
    linear = [Param(name, shape, "replicate", layers=keeping) for name, shape in names.items()]  # type: ignore[arg-type]
    return (*table, gate, *linear)


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    normed = ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps)
    if cfg.recurrent[layer]:
        x = x + linear_attention(cfg, w.linear, normed, layer, batch)
    else:
        gate = ops.linear(normed, w.attn.gate.weight)
        place = cfg.cache_index(layer)
        q, k, v = (ops.linear(normed, part.weight) for part in (w.attn.q, w.attn.k, w.attn.v))
        q = ops.rope(q, batch.positions, cfg.rope, cfg.heads)
        k = ops.rope(k, batch.positions, cfg.rope, cfg.kv_heads)
        batch.cache = ops.kv_write(batch.cache, k, v, place)
        seen = ops.attend(q, batch.cache, place, cfg.heads, cfg.attention_scale)
        x = x + ops.linear(ops.sigmoid_mul(gate, seen), w.attn.o.weight)
    return x + llama.mlp(w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))


def linear_attention(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    place = cfg.state_index(layer)
    qkv, z, a = (ops.linear(x, part.weight) for part in (w.qkv, w.z, w.a))
    bias = w.conv_shift.weight if cfg.shift else None
    qkv, batch.state = ops.causal_conv(qkv, batch.state, w.conv.weight, bias, layer=place, silu=not cfg.shift)
    if cfg.scan:
        weights = w.a_log.weight, w.dt_bias.weight, w.d.weight
        sizes = {"states": cfg.key_dim, "groups": cfg.key_heads, "least": 0.01, "most": 3.0}
        out, batch.state = ops.selective_scan(qkv, a, batch.state, *weights, layer=place, **sizes)
        normed = ops.rms_norm(ops.silu_mul(z, out), w.norm.weight, cfg.norm_eps, cfg.key_heads)
        return ops.linear(normed, w.o.weight)
    b = ops.linear(x, w.b.weight)
    heads = {"key_heads": cfg.key_heads, "value_heads": cfg.value_heads, "tiled": cfg.tiled}
    out, batch.state = ops.delta_rule(
        qkv, a, b, batch.state, w.a_log.weight, w.dt_bias.weight, layer=place, key_dim=cfg.key_dim, **heads
    )
    if cfg.normed:
        out = ops.silu_mul(z, ops.rms_norm(out, w.norm.weight, cfg.norm_eps, cfg.value_heads))
    else:
        out = ops.rms_norm(ops.mul(z, out), w.norm.weight, cfg.norm_eps, cfg.value_heads)
    return ops.linear(out, w.o.weight)


BASE: dict[str, Any] = {
    "family": FAMILY,
    "width": 64,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn": 96,
    "vocab": 200,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_style": "half",
    "max_position": 1024,
    "tied": True,
    "attention_bias": False,
    "qk_norm": False,
    "sliding_window": None,
    "recurrent": [True, True, False, True],
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": BASE,
    "shifted": {**BASE, "shift": True, "normed": False, "key_dim": 20, "value_dim": 40, "taps": 2, "tiled": True},
    "one-head": {**BASE, "key_heads": 1, "value_heads": 1, "value_dim": 160, "taps": 3, "layers": 2}
    | {"recurrent": [False, True]},
    "scan": {**BASE, "scan": True, "layers": 2, "recurrent": [True, False]},
    "rates": {**BASE, "scan": True, "rates": True, "layers": 2, "recurrent": [False, True]}
    | {"key_heads": 1, "value_heads": 96, "value_dim": 1},
}
_QWEN: dict[str, Any] = {
    **{**BASE, "family": "qwen3_5", "qk_norm": True, "rotary_dim": 8, "recurrent": [True, True, True, False]},
    **{"key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 24, "taps": 4, "tiled": True},
}
PUBLISHED: dict[str, dict[str, Any]] = {  # of families that there are
    "qwen3.5": _QWEN,
    "scans alone": {
        **{**BASE, "family": "mamba2", "heads": 0, "kv_heads": 0, "head_dim": 0, "ffn": 0, "positions": "none"},
        **{"layers": 2, "recurrent": [True, True], "inner": 96, "states": 20, "scan_heads": 4, "groups": 2},
    },
    "qwen3-next": {
        **{**_QWEN, "family": "qwen3_next", "tiled": False, "tied": False},
        **{"experts": 6, "experts_per_token": 2, "shared_ffn": 32},
    },
}
if FAMILY not in registry._FAMILIES:
    registry.register(FAMILY, sys.modules[__name__])


def checkpoint(model: str, form: str = "F32", **fields: Any) -> Checkpoint:
    """Random weights; matrices whose rows are no whole blocks of the format stay F32. fields: what is other than the
    model's."""
    plain = random_checkpoint({**MODELS, **PUBLISHED}[model] | fields, seed=3, form="F32")
    kind = formats.get(form)
    tensors = {
        name: replace(info, format=form, nbytes=kind.nbytes(info.shape))
        if len(info.shape) == 2 and info.shape[1] % kind.block == 0
        else info
        for name, info in plain.tensors.items()
    }

    def read(name: str) -> Any:
        values = formats.get("F32").dequantize(plain.read(name), tensors[name].shape)
        return formats.get(tensors[name].format).quantize(values)

    return with_memory(replace(plain, tensors=tensors, bytes_of=read))


def limits(tokens: int = 96, slots: int = 8) -> BatchLimits:
    return BatchLimits(tokens=tokens, segments=8, rows=tokens, pages=8 * 64, state_slots=slots)


@functools.cache
def compiled(source: Checkpoint, kept: bool = False) -> Program:
    """kept: every value keeps its own place in the arena, so that all can be read after a step."""
    family, config = registry.configure(source.config)
    program = compile_program(family, config, source.tensors, target.CPU)
    if kept:
        names = [v.name for i in program.body for v in i.outputs if v.name not in program.outputs]
        program = replace(program, outputs=(*program.outputs, *names))
    return program


def executable(
    source: Checkpoint, isa: str, threads: int = 2, tokens: int = 96, slots: int = 8, kept: bool = False
) -> CpuExecutable:
    capacity = Capacity(limits(tokens, slots), 1024, 64)
    return packed(compiled(source, kept), source, capacity, isa=isa, threads=threads)


def reference(source: Checkpoint) -> ReferenceExecutable:
    """The same Program in the CPU's orders, on torch."""
    return ReferenceExecutable(
        program=compiled(source), read=source.read, limits=limits(), num_pages=64, max_context=1024
    )
