"""Falcon-H1: Mamba-2 and attention side by side in each layer, and a multiplier for each part of both.

Sources: Zuo et al. 2025 (Falcon-H1), and the configurations published with the weights.
"""

from dataclasses import dataclass

from roofline import ops
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models import granite, llama, mamba2, qwen
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights
from roofline.ops.rope_tables import RopeTable
from roofline.ops.symbol import Value

MULTIPLIERS = ("embedding", "logits", "gate", "down", "key", "attention_in", "attention_out", "scan_in", "scan_out")
_PARTS = 5  # of what the first matrix of a scan gives: gate, x, B, C, steps


@dataclass(frozen=True)
class Config(mamba2.Mamba2Config):
    """scan_norm: what the scan gives is normed by groups, "behind" its gate or "before" it, or not: "none";
    part_multipliers: of its gate, x, B, C and its steps; the others: of what their names say, key of k, gate and down
    of the MLP."""

    scan_norm: str = "none"
    part_multipliers: tuple[float, ...] = (1.0,) * _PARTS
    embedding_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    scan_in_multiplier: float = 1.0
    scan_out_multiplier: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scan_norm not in ("behind", "before", "none"):
            raise ConfigError(f"model config: scan_norm={self.scan_norm!r} is not one of behind, before, none")
        if len(self.part_multipliers) != _PARTS:
            raise ConfigError(f"model config: part_multipliers has {len(self.part_multipliers)} values, not {_PARTS}")
        if not all(self.recurrent):
            raise ConfigError("model config: recurrent is not true for each layer")

    @property
    def absent(self) -> tuple[str, ...]:
        return ()

    @property
    def attention_scale(self) -> float:
        return super().attention_scale * self.key_multiplier

    def attends(self, layer: int) -> bool:
        return True

    def rope_of(self, layer: int) -> RopeTable | None:
        return self.rope


def check(cfg: Config) -> None:
    """Raises UnsupportedError on what this family does not have."""
    llama.check_rope(cfg)
    if cfg.qk_norm or cfg.sliding_window or cfg.layer_windows:
        feature = f"qk_norm or a window in a {cfg.family} model"
        raise UnsupportedError(feature, "its attention sees everything and has no norms")


def spec(cfg: Config) -> tuple[Param, ...]:
    """The parameters, in the order of use."""
    table: list[Param] = []
    for param in qwen.spec(cfg):
        table.append(param)
        if param.name == "layers.{layer}.attn_norm.weight":
            table += mamba2.mixer_params(cfg, normed=cfg.scan_norm != "none")
    return tuple(table)


def embed(cfg: Config, w: Weights, batch: ForwardBatch) -> Value:
    """ids [tokens] -> x [tokens, width]."""
    return granite.times(llama.embed(cfg, w, batch), cfg.embedding_multiplier)


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache, its state into batch.state. All products
    of the normed x stand before those of what they give: backends keep the integers that they make of a value until the
    next one's are made."""
    normed = ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps)
    z, steps, xbc = scan_inputs(cfg, w.ssm, normed)
    before = granite.times(normed, cfg.attention_in_multiplier)
    attended = granite.times(llama.attention(cfg, w.attn, before, layer, batch), cfg.attention_out_multiplier)
    scanned = granite.times(scan(cfg, w.ssm, z, steps, xbc, layer, batch), cfg.scan_out_multiplier)
    x = x + (attended + scanned)
    return x + mlp(cfg, w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))


def scan_inputs(cfg: Config, w: Weights, x: Value) -> tuple[Value, Value, Value]:
    """x [tokens, width] -> gate [tokens, inner], steps [tokens, scan_heads], and x, B and C [tokens, channels]."""
    of_gate, of_x, of_b, of_c, of_steps = (cfg.scan_in_multiplier * part for part in cfg.part_multipliers)
    z = granite.times(ops.linear(x, w.z.weight), of_gate)
    steps = granite.times(ops.linear(x, w.dt.weight), of_steps)
    xbc: Value = ops.linear(x, w.xbc.weight)
    if of_x == of_b == of_c:
        xbc = granite.times(xbc, of_x)
    else:
        edges = (0, cfg.inner, cfg.inner + cfg.groups * cfg.states, cfg.channels)
        parts = [
            granite.times(ops.cut_heads(xbc, 1, edges[i], edges[i + 1]), factor)
            for i, factor in enumerate((of_x, of_b, of_c))
        ]
        xbc = ops.join_heads(parts[0], ops.join_heads(parts[1], parts[2], 1), 1)
    return z, steps, xbc


def scan(cfg: Config, w: Weights, z: Value, steps: Value, xbc: Value, layer: int, batch: ForwardBatch) -> Value:
    """Mamba-2 on its gate, steps, and x, B and C: [tokens, width]."""
    y = mamba2.scanned(cfg, w, xbc, steps, layer, batch)
    if cfg.scan_norm == "before":
        y = ops.silu_mul(z, ops.rms_norm(y, w.norm.weight, cfg.norm_eps, cfg.groups))
    else:
        y = mamba2.gated_norm(cfg, w, z, y) if cfg.scan_norm == "behind" else ops.silu_mul(z, y)
    return ops.linear(y, w.o.weight)


def mlp(cfg: Config, w: Weights, x: Value) -> Value:
    """SwiGLU, whose gate and result are multiplied."""
    gate = granite.times(ops.linear(x, w.gate.weight, w.gate.bias), cfg.gate_multiplier)
    inner = ops.silu_mul(gate, ops.linear(x, w.up.weight, w.up.bias))
    return granite.times(ops.linear(inner, w.down.weight, w.down.bias), cfg.down_multiplier)


def head(cfg: Config, w: Weights, x: Value, batch: ForwardBatch) -> Value:
    """x [tokens, width] -> logits [rows, vocab] of the rows that want them."""
    return granite.times(llama.head(cfg, w, x, batch), cfg.logits_multiplier)
