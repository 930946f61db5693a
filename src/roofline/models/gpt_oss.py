"""gpt-oss: attention sinks, layers that see a window in turn with layers that see everything, experts with biases and a
clamped SwiGLU.

Source: OpenAI 2025, and the configurations published with the weights.
"""

from dataclasses import dataclass

from roofline import ops
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models import llama, moe
from roofline.models.config import ModelConfig
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Value

embed, head = llama.embed, llama.head


@dataclass(frozen=True)
class Config(moe.Config):
    """swiglu_limit: gates are cut off above it, ups beyond it on both sides."""

    swiglu_limit: float = 7.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.swiglu_limit > 0:
            raise ConfigError(f"model config: swiglu_limit={self.swiglu_limit} is not above 0")


def check(cfg: ModelConfig) -> None:
    """Raises UnsupportedError on what this family does not have."""
    llama.check_rope(cfg)
    if cfg.mlp_bias or cfg.qk_norm:
        what = f"mlp_bias={cfg.mlp_bias}, qk_norm={cfg.qk_norm} in a {cfg.family} model"
        raise UnsupportedError(what, "its experts always have biases, and its q and k no norms")
    if getattr(cfg, "shared_ffn", 0) or not getattr(cfg, "renormalise", True):
        what = f"shared_ffn or renormalise=False in a {cfg.family} model"
        raise UnsupportedError(what, "its weights are of the chosen experts alone", ["family qwen_moe"])


def spec(cfg: Config) -> tuple[Param, ...]:
    """Llama's table with a router and experts, both with biases, where the MLP was, and a sink for each head."""
    table = []
    for param in llama.spec(cfg):
        if not param.name.startswith("layers.{layer}.mlp."):
            table.append(param)
        elif param.name == "layers.{layer}.mlp.gate.weight":
            table += _experts(cfg)
        if param.name == "layers.{layer}.attn.v.weight":
            table.append(Param("layers.{layer}.attn.sinks.weight", (cfg.heads,), "replicate"))
    return tuple(table)


def _experts(cfg: Config) -> list[Param]:
    within, table = "layers.{layer}.mlp", []
    for param in moe.expert_params(cfg):
        table.append(param)
        rows = cfg.experts if param.name == f"{within}.router.weight" else param.shape[0]
        split = "replicate" if param.split == "expert_row" else param.split
        table.append(Param(f"{param.name.removesuffix('weight')}bias", (rows,), split))
    return table


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    normed = ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps)
    x = x + llama.attention(cfg, w.attn, normed, layer, batch, sinks=w.attn.sinks.weight)
    return x + mlp(cfg, w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))


def mlp(cfg: Config, w: Weights, x: Value) -> Value:
    """The experts that the router chooses; all products of x stand before those of what they give, as in moe.mlp."""
    logits = ops.linear(x, w.router.weight, w.router.bias)  # [tokens, experts]
    chances, ids = ops.route(logits, cfg.experts_per_token)
    gates = ops.expert_linear(x, ids, w.experts.gate.weight, cfg.experts)  # [tokens, top * ffn]
    ups = ops.expert_linear(x, ids, w.experts.up.weight, cfg.experts)
    gates = ops.expert_bias(gates, ids, w.experts.gate.bias, cfg.experts)
    ups = ops.expert_bias(ups, ids, w.experts.up.bias, cfg.experts)
    mid = ops.clamped_swiglu(gates, ups, cfg.swiglu_limit)
    out = ops.expert_linear(mid, ids, w.experts.down.weight, cfg.experts)  # [tokens, top * width]
    return ops.combine(ops.expert_bias(out, ids, w.experts.down.bias, cfg.experts), chances)
