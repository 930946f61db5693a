"""Nemotron-H and Nemotron 3: each layer is one of Mamba-2, attention without positions, an MLP or experts, none of the
latter two with a gate.

Sources: NVIDIA 2025 (Nemotron-H), and the configurations published with the weights.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from roofline import ops
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models import llama, mamba2, moe, mpt
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Value

embed, head = llama.embed, llama.head


@dataclass(frozen=True)
class Config(moe.Config, mamba2.Mamba2Config):
    """recurrent: the layers of Mamba-2; dense: those that are an MLP of dense_ffn; sparse: those that are experts of
    ffn; the others attend. latent: the width in which experts compute, 0: that of the model. Experts are chosen by
    sigmoids and a bias: expert_groups, kept_groups, routed_scale: see ops.experts.route."""

    scales_shared: ClassVar[bool] = False
    needs_experts: ClassVar[bool] = False
    dense: tuple[int, ...] = ()
    dense_ffn: int = 0
    sparse: tuple[int, ...] = ()
    latent: int = 0
    expert_groups: int = 1
    kept_groups: int = 1
    routed_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dense and self.dense_ffn < 1:
            raise ConfigError(f"model config: dense_ffn={self.dense_ffn} is not the width of an MLP")
        group = self.experts // self.expert_groups if self.expert_groups > 0 else 0
        if self.experts and (group * self.expert_groups != self.experts or (self.expert_groups > 1 and group < 2)):
            raise ConfigError(f"model config: expert_groups={self.expert_groups} do not divide {self.experts} experts")
        if not 1 <= self.kept_groups <= self.expert_groups or self.experts_per_token > self.kept_groups * group:
            what = f"kept_groups={self.kept_groups} of {self.expert_groups}"
            raise ConfigError(f"model config: {what} do not have {self.experts_per_token} experts")
        if not self.routed_scale > 0:
            raise ConfigError(f"model config: routed_scale={self.routed_scale} is not above 0")
        kinds = [*self.scans, *self.dense, *self.sparse]
        if len(set(kinds)) < len(kinds) or any(not 0 <= layer < self.layers for layer in kinds):
            raise ConfigError(f"model config: {kinds} are not layers of {self.layers} that are of one kind each")
        if (self.sparse and not self.experts) or self.latent < 0:
            what = f"sparse={list(self.sparse)}, latent={self.latent}"
            raise ConfigError(f"model config: {what} do not fit {self.experts} experts")

    def attends(self, layer: int) -> bool:
        return not self.recurrent[layer] and layer not in (*self.dense, *self.sparse)

    def alike(self, layer: int) -> int:
        """The first layer that computes what this one does, with weights of its own."""
        kinds = [(self.recurrent[i], i in self.dense, i in self.sparse) for i in range(layer + 1)]
        return kinds.index(kinds[layer])


def check(cfg: Config) -> None:
    """Raises UnsupportedError on what this family does not have."""
    if cfg.positions != "none" or cfg.qk_norm or cfg.sliding_window or cfg.layer_windows or cfg.attention_bias:
        feature = f"positions, qk_norm, a window or biases of attention in a {cfg.family} model"
        raise UnsupportedError(feature, "its attention sees everything, and has no positions, norms or biases")
    if cfg.experts and cfg.mlp_bias:
        raise UnsupportedError(f"mlp_bias beside experts in a {cfg.family} model", "its experts have no biases")
    if not any(map(cfg.attends, range(cfg.layers))):
        raise UnsupportedError(f"a {cfg.family} model without attention", "we serve those with a layer of it")


def spec(cfg: Config) -> tuple[Param, ...]:
    """The parameters, in the order of use."""
    attending = tuple(filter(cfg.attends, range(cfg.layers)))
    attention = [replace(p, layers=attending) for p in llama.spec(cfg) if p.name.startswith("layers.{layer}.attn.")]
    plain = llama.mlp_params(replace(cfg, ffn=cfg.dense_ffn)) if cfg.dense else ()
    dense = [replace(param, layers=cfg.dense) for param in plain if ".mlp.gate." not in param.name]
    sparse = [replace(param, layers=cfg.sparse) for param in (expert_params(cfg) if cfg.sparse else ())]
    return mamba2.around(cfg, [*mamba2.mixer_params(cfg), *attention, *dense, *sparse])


def expert_params(cfg: Config) -> list[Param]:
    """The router of a layer, what is before and behind the experts, the expert that every token goes to, and they."""
    within, wide = "layers.{layer}.mlp", cfg.latent or cfg.width
    table = [Param(f"{within}.router.weight", (cfg.experts, cfg.width), "replicate")]
    table.append(Param(f"{within}.choice.bias", (cfg.experts,), "replicate", fixed=True))
    if cfg.latent:
        table.append(Param(f"{within}.latent_in.weight", (cfg.latent, cfg.width), "replicate"))
        table.append(Param(f"{within}.latent_out.weight", (cfg.width, cfg.latent), "replicate"))
    if cfg.shared_ffn:
        table.append(Param(f"{within}.shared.up.weight", (cfg.shared_ffn, cfg.width), "column"))
        table.append(Param(f"{within}.shared.down.weight", (cfg.width, cfg.shared_ffn), "row"))
    up, down = (cfg.experts * cfg.ffn, wide), (cfg.experts * wide, cfg.ffn)
    table.append(Param(f"{within}.experts.up.weight", up, "expert_column", experts=cfg.experts))
    return [*table, Param(f"{within}.experts.down.weight", down, "expert_row", experts=cfg.experts)]


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache, or its state into batch.state."""
    normed = ops.rms_norm(x, w.norm.weight, cfg.norm_eps)
    if cfg.recurrent[layer]:
        return x + mamba2.mixer(cfg, w.ssm, normed, layer, batch)
    if layer in cfg.dense:
        return x + mpt.mlp(cfg, w.mlp, normed)
    if layer in cfg.sparse:
        return x + experts(cfg, w.mlp, normed)
    return x + llama.attention(cfg, w.attn, normed, layer, batch)


def experts(cfg: Config, w: Weights, x: Value) -> Value:
    """The experts that the router chooses, and the shared one. All products of x stand before those of what they give:
    backends keep the integers that they make of a value until the next one's are made."""
    chances, ids = ops.route(
        ops.linear(x, w.router.weight),
        cfg.experts_per_token,
        cfg.renormalise,
        w.choice.bias,
        score="sigmoid",
        groups=cfg.expert_groups,
        kept_groups=cfg.kept_groups,
        scale=cfg.routed_scale,
    )
    shared = mpt.activated(cfg, ops.linear(x, w.shared.up.weight)) if cfg.shared_ffn else None
    inner = ops.linear(x, w.latent_in.weight) if cfg.latent else x
    mid = mpt.activated(cfg, ops.expert_linear(inner, ids, w.experts.up.weight, cfg.experts))
    out = ops.combine(ops.expert_linear(mid, ids, w.experts.down.weight, cfg.experts), chances)
    if cfg.latent:
        out = ops.linear(out, w.latent_out.weight)
    return out if shared is None else out + ops.linear(shared, w.shared.down.weight)
