"""Gemma 4 (text): layers with and without a window have heads of their own, the last layers read the keys and values of
earlier ones, each layer takes in a further embedding of its own, and experts may stand beside the MLP.

Sources: the configurations published with the weights; per-layer embeddings: Gemma Team 2025 (Gemma 3n).
"""

from dataclasses import dataclass, replace

from roofline import ops
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models import gemma, llama, moe
from roofline.models.config import KvShape
from roofline.models.family import ForwardBatch
from roofline.models.shared_keys import (
    SharedKeysConfig,
    attention,
    layer_inputs,
    layer_inputs_params,
    layer_params,
    taken_in,
)
from roofline.models.spec import Param, Weights
from roofline.ops.rope_tables import RopeTable
from roofline.ops.symbol import Value

head = gemma.head


@dataclass(frozen=True)
class Config(SharedKeysConfig):
    """head_dim, kv_heads are of layers with a window.

    global_head_dim, global_kv_heads: of the others; keys_as_values: the others have no matrix of values; wide_sharing:
    layers that share have an MLP twice as wide; scales_layers: what a layer gives is multiplied by a number of its own;
    experts: of each layer beside its MLP, 0: none; expert_ffn: their width.
    """

    global_head_dim: int = 0
    global_kv_heads: int = 0
    keys_as_values: bool = False
    wide_sharing: bool = False
    scales_layers: bool = True
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, bound in {"global_head_dim": 1, "global_kv_heads": 1, "expert_ffn": int(self.experts > 0)}.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"model config: {name}={getattr(self, name)} is not at least {bound}")
        if self.heads % self.global_kv_heads:
            raise ConfigError(f"model config: heads={self.heads} is not a multiple of global_kv_heads")
        if self.experts and not 1 <= self.experts_per_token <= min(self.experts, moe.MOST_CHOSEN):
            raise ConfigError(f"model config: experts_per_token={self.experts_per_token} of {self.experts} experts")

    def kv_shape(self, layer: int) -> KvShape:
        if self.window(layer):
            return KvShape(self.kv_heads, self.head_dim)
        return KvShape(self.global_kv_heads, self.global_head_dim)

    def ffn_of(self, layer: int) -> int:
        return self.ffn * (2 if self.wide_sharing and self.shares(layer) else 1)

    def has_values(self, layer: int) -> bool:
        """Whether a layer that writes has a matrix of values; else they are its keys before norm and rope."""
        return not self.keys_as_values or self.window(layer) > 0

    def rope_of(self, layer: int) -> RopeTable | None:
        if self.window(layer):
            return super().rope_of(layer)
        return RopeTable.of(
            self.global_head_dim, self.rope_theta, self.rope_style, self.rope_scaling, self.max_position
        )


def check(cfg: Config) -> None:
    """Raises UnsupportedError on what this family does not have."""
    llama.check_rope(cfg)
    llama.check_biases(cfg)
    if not cfg.qk_norm:
        raise UnsupportedError(f"a {cfg.family} model without qk_norm", "its heads of q, k and v are normed")


def spec(cfg: Config) -> tuple[Param, ...]:
    """Gemma's table; what is of all layers stands behind the embedding."""
    with_values = {layer for layer in range(cfg.layers) if cfg.has_values(layer)}
    table: list[Param] = []
    for param in gemma.spec(cfg):
        if ".attn.v." in param.name:
            param = replace(param, layers=tuple(with_values.intersection(param.layers or range(cfg.layers))))
        if param.layers != ():
            table.append(param)
        if param.name == "embed.weight":
            table += layer_inputs_params(cfg) if cfg.layer_width else ()
    table += [*(expert_params(cfg) if cfg.experts else ()), *(layer_params(cfg) if cfg.layer_width else ())]
    return (*table, *([Param("layers.{layer}.scalar.weight", (1,), "replicate")] if cfg.scales_layers else ()))


def expert_params(cfg: Config) -> list[Param]:
    """The router, the experts and the norms around them."""
    experts, ffn, within = cfg.experts, cfg.expert_ffn, "layers.{layer}.mlp"
    into, out = (experts * ffn, cfg.width), (experts * cfg.width, ffn)
    norms = ("dense_norm", "experts_norm", "experts_post_norm")
    return [
        Param(f"{within}.router_norm.weight", (cfg.width,), "replicate"),
        Param(f"{within}.router.weight", (experts, cfg.width), "replicate"),
        Param(f"{within}.expert_scale.weight", (experts,), "replicate"),
        *(Param(f"{within}.experts.{n}.weight", into, "expert_column", experts=experts) for n in ("gate", "up")),
        Param(f"{within}.experts.down.weight", out, "expert_row", experts=experts),
        *(Param(f"{within}.{name}.weight", (cfg.width,), "replicate") for name in norms),
    ]


def embed(cfg: Config, w: Weights, batch: ForwardBatch) -> Value:
    """ids [tokens] -> x [tokens, width], scaled by the root of the width; what each layer takes in is left in batch."""
    x = gemma.embed(cfg, w, batch)
    if cfg.layer_width:
        batch.by_layer = layer_inputs(cfg, w, batch, x)
    return x


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch's cache."""
    attended = attention(cfg, w.attn, ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps), layer, batch)
    x = x + ops.rms_norm(attended, w.attn_post_norm.weight, cfg.norm_eps)
    inner = gemma.mlp(w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))
    if cfg.experts:
        inner = ops.rms_norm(inner, w.mlp.dense_norm.weight, cfg.norm_eps) + routed(cfg, w.mlp, x)
    x = x + ops.rms_norm(inner, w.mlp_post_norm.weight, cfg.norm_eps)
    x = x + taken_in(cfg, w, x, layer, batch) if cfg.layer_width else x
    return ops.scale_columns(x, w.scalar.weight) if cfg.scales_layers else x


def routed(cfg: Config, w: Weights, x: Value) -> Value:
    """GeGLU of the experts that a token goes to. Their router reads x by a norm of its own, and each expert has a
    factor beside its chance."""
    norm = ops.scale(ops.rms_norm(x, w.router_norm.weight, cfg.norm_eps), float(cfg.width**-0.5))
    chances, ids = ops.route(ops.linear(norm, w.router.weight), cfg.experts_per_token)
    chances = ops.expert_scale(chances, ids, w.expert_scale.weight, cfg.experts)
    inner = ops.rms_norm(x, w.experts_norm.weight, cfg.norm_eps)
    gates = ops.expert_linear(inner, ids, w.experts.gate.weight, cfg.experts)  # [tokens, top * ffn]
    ups = ops.expert_linear(inner, ids, w.experts.up.weight, cfg.experts)
    mid = ops.gelu_mul(gates, ups, tanh=True)
    out = ops.combine(ops.expert_linear(mid, ids, w.experts.down.weight, cfg.experts), chances)
    return ops.rms_norm(out, w.experts_post_norm.weight, cfg.norm_eps)
