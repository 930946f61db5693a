"""HyperCLOVA X: Granite with norms behind attention and MLP. Source: the configuration published with the weights of
HyperCLOVA X SEED Think 14B."""

from dataclasses import dataclass

from roofline import ops
from roofline.common.errors import ConfigError
from roofline.models import granite, llama
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Value

check, embed = granite.check, granite.embed


@dataclass(frozen=True)
class Config(granite.Config):
    """post_norms: whether there are those norms; logits_multiplier: of logits, which nothing divides."""

    post_norms: bool = True
    logits_multiplier: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.logits_multiplier > 0 or self.logits_scaling != 1:
            what = f"logits_multiplier={self.logits_multiplier}, logits_scaling={self.logits_scaling}"
            raise ConfigError(f"model config: {what}: the first must be above 0, the second 1")


def spec(cfg: Config) -> tuple[Param, ...]:
    """Llama's table, and a norm behind attention and one behind the MLP."""
    names = ("attn", "mlp") if cfg.post_norms else ()
    behind = [Param(f"layers.{{layer}}.{name}_post_norm.weight", (cfg.width,), "replicate") for name in names]
    return (*llama.spec(cfg), *behind)


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    out = llama.attention(cfg, w.attn, ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps), layer, batch)
    if cfg.post_norms:
        out = ops.rms_norm(out, w.attn_post_norm.weight, cfg.norm_eps)
    x = x + granite.times(out, cfg.residual_multiplier)
    out = llama.mlp(w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))
    if cfg.post_norms:
        out = ops.rms_norm(out, w.mlp_post_norm.weight, cfg.norm_eps)
    return x + granite.times(out, cfg.residual_multiplier)


def head(cfg: Config, w: Weights, x: Value, batch: ForwardBatch) -> Value:
    """x [tokens, width] -> logits [rows, vocab] of the rows that want them."""
    return granite.times(llama.head(cfg, w, x, batch), cfg.logits_multiplier)
