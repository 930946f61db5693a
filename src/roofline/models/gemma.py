"""Gemma 2 and 3: norms before and behind attention and MLP, layers that see a window, capped scores and logits.

Sources: Gemma Team 2024 (Gemma 2) and 2025 (Gemma 3), and the configurations published with the weights.
"""

from dataclasses import dataclass

from roofline import ops
from roofline.common.errors import ConfigError
from roofline.models import llama, qwen
from roofline.models.config import ModelConfig
from roofline.models.family import ForwardBatch
from roofline.models.local_rope import LocalRopeConfig
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Value


@dataclass(frozen=True)
class Config(LocalRopeConfig):
    """query_scalar: queries are multiplied by its inverse root; attention_cap, logit_cap: of scores and of logits, 0:
    none."""

    query_scalar: float = 0.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.query_scalar > 0 or self.attention_cap < 0 or self.logit_cap < 0:
            caps = f"attention_cap={self.attention_cap}, logit_cap={self.logit_cap} must not be below 0"
            raise ConfigError(f"model config: query_scalar={self.query_scalar} must be above 0, {caps}")

    @property
    def attention_scale(self) -> float:
        return float(self.query_scalar**-0.5)


def check(cfg: ModelConfig) -> None:
    """Raises UnsupportedError on what this family does not have."""
    llama.check_rope(cfg)


def spec(cfg: ModelConfig) -> tuple[Param, ...]:
    """Qwen's table, and a norm behind attention and one behind the MLP."""
    behind = [Param(f"layers.{{layer}}.{n}_post_norm.weight", (cfg.width,), "replicate") for n in ("attn", "mlp")]
    return (*qwen.spec(cfg), *behind)


def embed(cfg: ModelConfig, w: Weights, batch: ForwardBatch) -> Value:
    """ids [tokens] -> x [tokens, width], scaled by the root of the width."""
    return ops.scale(llama.embed(cfg, w, batch), float(cfg.width**0.5))


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    normed = ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps)
    attended = llama.attention(cfg, w.attn, normed, layer, batch, cfg.attention_cap)
    x = x + ops.rms_norm(attended, w.attn_post_norm.weight, cfg.norm_eps)
    inner = mlp(w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))
    return x + ops.rms_norm(inner, w.mlp_post_norm.weight, cfg.norm_eps)


def mlp(w: Weights, x: Value) -> Value:
    """GeGLU, by the tanh form of GELU."""
    gate, up = ops.linear(x, w.gate.weight, w.gate.bias), ops.linear(x, w.up.weight, w.up.bias)
    return ops.linear(ops.gelu_mul(gate, up, tanh=True), w.down.weight, w.down.bias)


def head(cfg: Config, w: Weights, x: Value, batch: ForwardBatch) -> Value:
    """x [tokens, width] -> logits [rows, vocab] of the rows that want them."""
    logits = llama.head(cfg, w, x, batch)
    return ops.soft_cap(logits, cfg.logit_cap) if cfg.logit_cap else logits
