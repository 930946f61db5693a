"""Mixtures whose experts are chosen by scores: GLM-4.5, dots.llm1, MiniMax-M2, ERNIE 4.5, OLMoE, EXAONE-MoE, Solar, HY.

A router's scores are sigmoids or a softmax; a bias that only chooses, groups of experts and a factor may be added. Some
layers may have a plain MLP. Source: DeepSeek-AI 2024 (DeepSeek-V3), whose router these models have, and their own
configurations as published with the weights.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from roofline import ops
from roofline.common.errors import ConfigError
from roofline.models import llama, moe, qwen
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights
from roofline.ops.experts import GROUP_SCORES
from roofline.ops.rope_tables import RopeTable
from roofline.ops.symbol import Value

embed, head = llama.embed, llama.head


@dataclass(frozen=True)
class Config(moe.Config):
    """score, groups, kept_groups, group_score, routed_scale: see ops.experts.route; choice_bias: whether there is a
    bias that chooses experts; dense: the layers that have an MLP of dense_ffn and no experts; wide_qk_norm: norms are
    over all heads of q, and of k, together; turning: for each layer whether it turns q and k, (): all do."""

    scales_shared: ClassVar[bool] = False
    score: str = "softmax"
    choice_bias: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_score: str = "best_two"
    routed_scale: float = 1.0
    dense: tuple[int, ...] = ()
    dense_ffn: int = 0
    wide_qk_norm: bool = False
    turning: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(not 0 <= layer < self.layers for layer in self.dense) or (self.dense and self.dense_ffn < 1):
            what = f"dense={list(self.dense)}, dense_ffn={self.dense_ffn}"
            raise ConfigError(f"model config: {what} are not layers of {self.layers} and the width of their MLP")
        if self.turning and len(self.turning) != self.layers:
            reason = f"has no value for each of {self.layers} layers"
            raise ConfigError(f"model config: turning={list(self.turning)} {reason}")
        if self.groups < 1 or self.experts % self.groups or not 1 <= self.kept_groups <= self.groups:
            what = f"groups={self.groups}, kept_groups={self.kept_groups}"
            raise ConfigError(f"model config: {what} do not divide {self.experts} experts")
        if self.groups > 1 and self.experts // self.groups < 2:
            raise ConfigError(f"model config: groups={self.groups} leave one expert in a group, which has no best two")
        if self.experts_per_token > self.experts // self.groups * self.kept_groups:
            what = f"experts_per_token={self.experts_per_token}"
            raise ConfigError(f"model config: {what} are more than {self.kept_groups} of {self.groups} groups have")
        if self.group_score not in GROUP_SCORES:
            raise ConfigError(f"model config: group_score={self.group_score!r} is not one of {', '.join(GROUP_SCORES)}")
        if not self.routed_scale > 0:
            raise ConfigError(f"model config: routed_scale={self.routed_scale} is not above 0")

    def rope_of(self, layer: int) -> RopeTable | None:
        return super().rope_of(layer) if not self.turning or self.turning[layer] else None

    def alike(self, layer: int) -> int:
        """The first layer that computes what this one does, with weights of its own."""
        facts = [(self.window(i), self.rope_of(i), i in self.dense) for i in range(layer + 1)]
        return facts.index(facts[layer])


def check(cfg: Config) -> None:
    """Raises UnsupportedError on what this family does not have."""
    llama.check_rope(cfg)


def guessing(cfg: Config) -> Config:
    """The configuration of a layer that guesses (`models.mtp`): it has experts."""
    one: Config = replace(cfg, layers=1, dense=(), layer_windows=cfg.layer_windows[-1:], turning=cfg.turning[-1:])
    return one


def spec(cfg: Config) -> tuple[Param, ...]:
    """Qwen's table with a router and experts where the MLP was, but for dense layers."""
    sparse = tuple(layer for layer in range(cfg.layers) if layer not in cfg.dense)
    dense = [replace(param, layers=cfg.dense) for param in llama.mlp_params(replace(cfg, ffn=max(1, cfg.dense_ffn)))]
    experts = [replace(param, layers=sparse) for param in moe.expert_params(cfg)]
    if cfg.choice_bias:
        bias = Param("layers.{layer}.mlp.choice.bias", (cfg.experts,), "replicate", layers=sparse, fixed=True)
        experts.insert(1, bias)
    table: list[Param] = []
    for param in qwen.spec(cfg):
        if param.name == "layers.{layer}.mlp.gate.weight":
            table += [*(dense if cfg.dense else ()), *(experts if sparse else ())]
        elif param.name.startswith("layers.{layer}.attn.") and "_norm" in param.name and cfg.wide_qk_norm:
            width = cfg.q_width if ".q_norm" in param.name else cfg.kv_width
            table.append(replace(param, shape=(width,), split="replicate"))
        elif not param.name.startswith("layers.{layer}.mlp."):
            table.append(param)
    return tuple(table)


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    x = x + llama.attention(cfg, w.attn, ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps), layer, batch)
    return x + mlp(cfg, w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps), layer)


def mlp(cfg: Config, w: Weights, x: Value, layer: int) -> Value:
    """The MLP of a layer, or the experts that it chooses."""
    return llama.mlp(w, x) if layer in cfg.dense else moe.mlp(cfg, w, x, choose=choose)


def choose(cfg: Config, w: Weights, x: Value) -> tuple[Value, Value]:
    """Weights and numbers of the experts that each token goes to."""
    chances, ids = ops.route(
        ops.linear(x, w.router.weight),
        cfg.experts_per_token,
        cfg.renormalise,
        w.choice.bias if cfg.choice_bias else None,
        score=cfg.score,
        groups=cfg.groups,
        kept_groups=cfg.kept_groups,
        group_score=cfg.group_score,
        scale=cfg.routed_scale,
    )
    return chances, ids
