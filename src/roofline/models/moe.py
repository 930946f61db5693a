"""Mixtures of experts: Mixtral, Qwen2-MoE (a shared expert beside them), Qwen3-MoE (norms of q and k).

Sources: Jiang et al. 2024, Yang et al. 2024, 2025.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from roofline import ops
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models import llama, qwen
from roofline.models.config import ModelConfig
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Value

MOST_EXPERTS, MOST_CHOSEN = 4096, 256

embed, head = llama.embed, llama.head


@dataclass(frozen=True)
class Config(ModelConfig):
    """ffn is of each expert. experts: of a layer; experts_per_token: how many of them a token goes to; renormalise:
    their weights add up to 1; shared_ffn: of the expert that every token goes to; 0: none; scales_shared: whether a
    sigmoid scales what that one gives.
    """

    scales_shared: ClassVar[bool] = True
    needs_experts: ClassVar[bool] = True  # False: of a family whose layers may have an MLP of ffn instead
    experts: int = 0
    experts_per_token: int = 0
    renormalise: bool = True
    shared_ffn: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.experts and not self.needs_experts:
            if self.experts_per_token or self.shared_ffn:
                raise ConfigError("model config: experts_per_token or shared_ffn in a model without experts")
            return
        if not 1 <= self.experts <= MOST_EXPERTS:
            raise ConfigError(f"model config: experts={self.experts} is not from 1 to {MOST_EXPERTS}")
        if not 1 <= self.experts_per_token <= min(self.experts, MOST_CHOSEN):
            max_chosen = min(self.experts, MOST_CHOSEN)
            raise ConfigError(f"model config: experts_per_token={self.experts_per_token} is not from 1 to {max_chosen}")
        if self.shared_ffn < 0:
            raise ConfigError(f"model config: shared_ffn={self.shared_ffn} is below 0")


def check(cfg: Config) -> None:
    """Raises UnsupportedError on what this family does not have."""
    llama.check_rope(cfg)
    if cfg.output_bias or cfg.mlp_bias:
        what = f"output_bias={cfg.output_bias}, mlp_bias={cfg.mlp_bias} in a {cfg.family} model"
        raise UnsupportedError(what, "only its q, k and v can have biases")


def spec(cfg: Config) -> tuple[Param, ...]:
    """Qwen's table with a router and experts where the MLP was."""
    table = []
    for param in qwen.spec(cfg):
        if not param.name.startswith("layers.{layer}.mlp."):
            table.append(param)
        elif param.name == "layers.{layer}.mlp.gate.weight":
            table += expert_params(cfg)
    return tuple(table)


def expert_params(cfg: Config) -> list[Param]:
    """The router of a layer, the expert that every token goes to where there is one, and the others."""
    into, out = (cfg.experts * cfg.ffn, cfg.width), (cfg.experts * cfg.width, cfg.ffn)
    within = "layers.{layer}.mlp"
    table = [Param(f"{within}.router.weight", (cfg.experts, cfg.width), "replicate")]
    if cfg.shared_ffn:
        rows = cfg.shared_ffn
        table += [Param(f"{within}.shared.{n}.weight", (rows, cfg.width), "column") for n in ("gate", "up")]
        table.append(Param(f"{within}.shared.down.weight", (cfg.width, rows), "row"))
        if cfg.scales_shared:
            table.append(Param(f"{within}.shared.scale.weight", (1, cfg.width), "replicate"))
    table += [Param(f"{within}.experts.{n}.weight", into, "expert_column", experts=cfg.experts) for n in ("gate", "up")]
    return [*table, Param(f"{within}.experts.down.weight", out, "expert_row", experts=cfg.experts)]


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    x = x + llama.attention(cfg, w.attn, ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps), layer, batch)
    return x + mlp(cfg, w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))


def choose(cfg: Config, w: Weights, x: Value) -> tuple[Value, Value]:
    """Weights and numbers of the experts that each token goes to."""
    chances, ids = ops.route(ops.linear(x, w.router.weight), cfg.experts_per_token, cfg.renormalise)
    return chances, ids


def mlp(
    cfg: Config,
    w: Weights,
    x: Value,
    routed_scale: float = 1.0,
    choose: Callable[[Any, Weights, Value], tuple[Value, Value]] = choose,
) -> Value:
    """SwiGLU of the experts that the router chooses, times a factor, and of the shared one. All products of x stand
    before those of what they give: backends keep the integers that they make of a value until the next one's are made.
    """
    chances, ids = choose(cfg, w, x)
    gates = ops.expert_linear(x, ids, w.experts.gate.weight, cfg.experts)  # [tokens, top * ffn]
    ups = ops.expert_linear(x, ids, w.experts.up.weight, cfg.experts)
    mid = ops.silu_mul(gates, ups)
    shared = chance = None
    if cfg.shared_ffn:
        shared = ops.silu_mul(ops.linear(x, w.shared.gate.weight), ops.linear(x, w.shared.up.weight))
        chance = ops.linear(x, w.shared.scale.weight) if cfg.scales_shared else None  # [tokens, 1]
    out = ops.combine(ops.expert_linear(mid, ids, w.experts.down.weight, cfg.experts), chances)
    if routed_scale != 1.0:
        out = ops.scale(out, routed_scale)
    if shared is None:
        return out
    beside = ops.linear(shared, w.shared.down.weight)
    return out + (beside if chance is None else ops.sigmoid_scale(beside, chance))
