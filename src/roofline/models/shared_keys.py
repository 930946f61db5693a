"""What Gemma 3n and 4 have in common: the last layers read the keys and values of earlier ones, scores are not scaled,
and each layer takes in a further embedding of its own.

Source: Gemma Team 2025 (Gemma 3n), and the configurations published with the weights.
"""

from dataclasses import dataclass, replace
from typing import Self

from roofline import ops
from roofline.common.errors import ConfigError
from roofline.models.config import ModelConfig
from roofline.models.family import ForwardBatch, LayerInputs
from roofline.models.local_rope import LocalRopeConfig
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Value


@dataclass(frozen=True)
class SharedKeysConfig(LocalRopeConfig):
    """sharing_layers: so many last ones read the keys and values of the last layer of their kind, with a window or
    without, before them; layer_width: of the embedding that each layer takes in, 0: there are none; layer_vocab: rows
    of its table; logit_cap: of logits, 0: none."""

    sharing_layers: int = 0
    layer_width: int = 0
    layer_vocab: int = 0
    logit_cap: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"sharing_layers": 0, "layer_width": 0, "logit_cap": 0.0, "layer_vocab": int(self.layer_width > 0)}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"model config: {name}={getattr(self, name)} is not at least {bound}")
        writers = max(0, self.layers - self.sharing_layers)
        alone = next((layer for layer in range(writers, self.layers) if self._writer(layer) is None), None)
        if alone is not None:
            reason = f"layer {alone} has no layer of its kind before the {self.sharing_layers} that share"
            raise ConfigError(f"model config: sharing_layers={self.sharing_layers}: {reason}")

    def _writer(self, layer: int) -> int | None:
        """The layer whose keys and values one of those that share reads."""
        slides, writers = self.window(layer) > 0, self.layers - self.sharing_layers
        return next((n for n in range(writers - 1, -1, -1) if (self.window(n) > 0) == slides), None)

    def shares(self, layer: int) -> bool:
        """Whether a layer reads the keys and values of another one."""
        return layer >= self.layers - self.sharing_layers

    def kv_source(self, layer: int) -> int:
        writer = self._writer(layer) if self.shares(layer) else None
        return layer if writer is None else writer

    @property
    def attention_scale(self) -> float:
        return 1.0

    def first(self, layers: int) -> Self:
        """Return the configuration of a model of which only the first so many layers are left."""
        sharing = max(0, layers - (self.layers - self.sharing_layers))
        return LocalRopeConfig.first(replace(self, sharing_layers=sharing), layers)


def layer_inputs_params(cfg: SharedKeysConfig) -> list[Param]:
    """The table of all layers' further embeddings side by side, and what makes some more of the first one."""
    width = cfg.layers * cfg.layer_width
    return [
        Param("layer_embed.weight", (cfg.layer_vocab, width), "replicate"),
        Param("layer_projection.weight", (width, cfg.width), "replicate"),
        Param("layer_projection_norm.weight", (cfg.layer_width,), "replicate"),
    ]


def layer_params(cfg: SharedKeysConfig) -> list[Param]:
    """What takes a layer's input in."""
    return [
        Param("layers.{layer}.input.gate.weight", (cfg.layer_width, cfg.width), "replicate"),
        Param("layers.{layer}.input.o.weight", (cfg.width, cfg.layer_width), "replicate"),
        Param("layers.{layer}.input_norm.weight", (cfg.width,), "replicate"),
    ]


def layer_inputs(cfg: SharedKeysConfig, w: Weights, batch: ForwardBatch, x: Value) -> LayerInputs:
    """What layers take in, [tokens, layers * layer_width]: half of the rows of a table, which are zeros for ids that it
    has not, half made of x, the embedding."""
    beyond = {"first": 0} if cfg.layer_vocab < cfg.vocab else {}
    rows = ops.scale(ops.embed(batch.ids, w.layer_embed.weight, **beyond), float(cfg.layer_width**0.5))
    context = ops.scale(ops.linear(x, w.layer_projection.weight), float(cfg.width**-0.5))
    context = ops.rms_norm(context, w.layer_projection_norm.weight, cfg.norm_eps, cfg.layers)
    return LayerInputs(ops.scale(context + rows, 0.5**0.5), cfg.layer_width)


def taken_in(cfg: SharedKeysConfig, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """What a layer adds to its rows x [tokens, width] of its input, by a gate that x makes."""
    assert batch.by_layer is not None, "embed has made it"
    gate = ops.linear(x, w.input.gate.weight)
    addition = ops.linear(ops.gelu_mul(gate, batch.by_layer.of(layer), tanh=True), w.input.o.weight)
    return ops.rms_norm(addition, w.input_norm.weight, cfg.norm_eps)


def attention(cfg: ModelConfig, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """Grouped-query attention; heads of q, k and v are normed, those of v without a weight. A layer without a matrix of
    values takes its keys before norm and rope for them."""
    table, shape, heads = cfg.rope_of(layer), cfg.kv_shape(layer), cfg.heads_of(layer)
    group, place = cfg.kv_group(layer), cfg.cache_index(layer)
    q = ops.rms_norm(ops.linear(x, w.q.weight), w.q_norm.weight, cfg.norm_eps, heads)
    q = ops.rope(q, batch.positions, table, heads)
    if cfg.attends(layer):
        k = ops.linear(x, w.k.weight)  # [tokens, kv_heads * head_dim]
        v = ops.rms_norm(ops.linear(x, w.v.weight) if hasattr(w, "v") else k, None, cfg.norm_eps, shape.kv_heads)
        k = ops.rms_norm(k, w.k_norm.weight, cfg.norm_eps, shape.kv_heads)
        k = ops.rope(k, batch.positions, table, shape.kv_heads)
        batch.keep(group, ops.kv_write(batch.cache_of(group), k, v, place))
    scale = cfg.attention_scale_of(layer)
    out = ops.attend(q, batch.cache_of(group), place, heads, scale, window=cfg.window(layer))
    return ops.linear(out, w.o.weight)
