"""Jamba: Mamba in most layers, attention without positions in the others, and experts in place of some MLPs.

Sources: Lieber et al. 2024 (Jamba), and the configurations published with the weights of Jamba 1.5.
"""

from dataclasses import dataclass
from typing import ClassVar

from roofline import ops
from roofline.common.errors import UnsupportedError
from roofline.models import llama, mamba, qwen, routed
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights, hybrid_table
from roofline.ops.symbol import Value

embed, head = llama.embed, llama.head


@dataclass(frozen=True)
class Config(mamba.MambaConfig, routed.Config):
    """experts: 0 where each layer has an MLP of ffn; dense: the layers that have one of dense_ffn beside others with
    experts."""

    needs_experts: ClassVar[bool] = False

    @property
    def absent(self) -> tuple[str, ...]:
        return ()  # `check` refuses a model without attention

    def alike(self, layer: int) -> int:
        """The first layer that computes what this one does, with weights of its own."""
        kinds = [(self.recurrent[i], i in self.dense) for i in range(layer + 1)]
        return kinds.index(kinds[layer])


def check(cfg: Config) -> None:
    """Raises UnsupportedError on what this family does not have."""
    if cfg.positions != "none" or cfg.qk_norm or cfg.sliding_window or cfg.layer_windows:
        feature = f"positions, qk_norm or a window in a {cfg.family} model"
        raise UnsupportedError(feature, "its attention sees everything, and has no positions and no norms")
    if cfg.attention_bias or cfg.output_bias or cfg.mlp_bias:
        raise UnsupportedError(f"a bias in a {cfg.family} model", "only its convolutions and steps have some")
    if all(cfg.recurrent):
        raise UnsupportedError(f"a {cfg.family} model without attention", "we serve those with a layer of it")


def spec(cfg: Config) -> tuple[Param, ...]:
    """The parameters, in the order of use."""
    table = routed.spec(cfg) if cfg.experts else qwen.spec(cfg)
    return hybrid_table(table, cfg.recurrent, mamba.mixer_params(cfg))


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache, or its state into batch.state."""
    normed = ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps)
    if cfg.recurrent[layer]:
        x = x + mamba.mixer(cfg, w.ssm, normed, layer, batch)
    else:
        x = x + llama.attention(cfg, w.attn, normed, layer, batch)
    normed = ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps)
    return x + (routed.mlp(cfg, w.mlp, normed, layer) if cfg.experts else llama.mlp(w.mlp, normed))
