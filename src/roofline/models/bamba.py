"""Bamba: Mamba-2 in most layers, attention that turns a part of each head in the others, an MLP in all.

Source: the configurations published with the weights of Bamba-9B.
"""

from dataclasses import dataclass

from roofline import ops
from roofline.common.errors import UnsupportedError
from roofline.models import llama, mamba2
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights, hybrid_table
from roofline.ops.symbol import Value

embed, head = llama.embed, llama.head


@dataclass(frozen=True)
class Config(mamba2.Mamba2Config):
    """Nothing of its own."""

    @property
    def absent(self) -> tuple[str, ...]:
        return ()  # `check` refuses a model without attention


def check(cfg: Config) -> None:
    """Raises UnsupportedError on what this family does not have."""
    llama.check(cfg)
    if cfg.sliding_window or cfg.layer_windows:
        raise UnsupportedError(f"a window in a {cfg.family} model", "its attention sees everything")
    if all(cfg.recurrent):
        raise UnsupportedError(f"a {cfg.family} model without attention", "we serve those with a layer of it")


def spec(cfg: Config) -> tuple[Param, ...]:
    """The parameters, in the order of use."""
    return hybrid_table(llama.spec(cfg), cfg.recurrent, mamba2.mixer_params(cfg))


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache, or its state into batch.state."""
    normed = ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps)
    if cfg.recurrent[layer]:
        x = x + mamba2.mixer(cfg, w.ssm, normed, layer, batch)
    else:
        x = x + llama.attention(cfg, w.attn, normed, layer, batch)
    return x + llama.mlp(w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))
