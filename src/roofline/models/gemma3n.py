"""Gemma 3n (text): several streams of rows beside each other, of which a layer computes one and predicts the others
(AltUp), a second way around attention of low rank (LAuReL), and gates of which most are cut off.

The rows between layers are the streams side by side. Sources: Gemma Team 2025, and the configurations published with
the weights; AltUp: Baykal et al. 2023; LAuReL: Menghani et al. 2024.
"""

from dataclasses import dataclass
from functools import reduce
from statistics import NormalDist

from roofline import ops
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models import gemma, llama
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
from roofline.ops.symbol import Value


@dataclass(frozen=True)
class Config(SharedKeysConfig):
    """streams: of rows; active: the number of the one that layers compute; scales_active: a layer's input is gated by
    that stream times a number for each column; laurel_rank: of the second way around attention; layer_ffns: the inner
    width of each layer's MLP, (): ffn is that of all; sparsity: of each layer, the part of its gates that is cut off,
    were they normally distributed; 0: none."""

    streams: int = 4
    active: int = 0
    scales_active: bool = True
    laurel_rank: int = 64
    layer_ffns: tuple[int, ...] = ()
    sparsity: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in {"streams": 2, "active": 0, "laurel_rank": 1, "layer_width": 1}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"model config: {name}={getattr(self, name)} is not at least {least}")
        if self.active >= self.streams:
            raise ConfigError(f"model config: active={self.active} of {self.streams} streams")
        for name, values in {"layer_ffns": self.layer_ffns, "sparsity": self.sparsity}.items():
            if values and len(values) != self.layers:
                raise ConfigError(f"model config: {name} has {len(values)} values for {self.layers} layers")
        if any(not 0 <= part < 1 for part in self.sparsity) or any(ffn < 1 for ffn in self.layer_ffns):
            raise ConfigError(f"model config: sparsity={list(self.sparsity)}, layer_ffns={list(self.layer_ffns)}")

    def ffn_of(self, layer: int) -> int:
        return self.layer_ffns[layer] if self.layer_ffns else self.ffn

    def deviations(self, layer: int) -> float | None:
        """How many standard deviations above their mean the gates of a layer are cut off; None: nowhere."""
        part = self.sparsity[layer] if self.sparsity else 0.0
        return NormalDist().inv_cdf(part) if part else None

    def alike(self, layer: int) -> int:
        """The first layer that computes what this one does, with weights of its own."""
        facts = [(SharedKeysConfig.alike(self, n), self.deviations(n)) for n in range(layer + 1)]
        return facts.index(facts[layer])


def check(cfg: Config) -> None:
    """Raises UnsupportedError on what this family does not have."""
    llama.check_rope(cfg)
    llama.check_biases(cfg)
    if not cfg.qk_norm:
        raise UnsupportedError(f"a {cfg.family} model without qk_norm", "its heads of q, k and v are normed")


def spec(cfg: Config) -> tuple[Param, ...]:
    """Gemma's table, what is of all layers behind the embedding, and the streams."""
    table: list[Param] = []
    numbers = range(cfg.streams - 1)
    for param in gemma.spec(cfg):
        table.append(param)
        if param.name == "embed.weight":
            table += layer_inputs_params(cfg)
            table += [Param(f"stream_in.{n}.weight", (cfg.width, cfg.width), "replicate") for n in numbers]
    table += [Param(f"stream_out.{n}.weight", (cfg.width, cfg.width), "replicate") for n in numbers]
    return (*table, *layer_params(cfg), *stream_params(cfg))


def stream_params(cfg: Config) -> list[Param]:
    """What a layer predicts and corrects streams by, and its second way around attention."""
    n, width, rank = cfg.streams, cfg.width, cfg.laurel_rank
    shapes: dict[str, tuple[int, ...]] = {
        "altup.prediction": (n * n, n),
        "altup.correction": (n, n),
        "altup.router": (n, width),
        "altup.router_norm": (width,),
        **({"altup.scale": (width,)} if cfg.scales_active else {}),
        "laurel.left": (rank, width),
        "laurel.right": (width, rank),
        "laurel_norm": (width,),
    }
    return [Param(f"layers.{{layer}}.{name}.weight", shape, "replicate") for name, shape in shapes.items()]


def embed(cfg: Config, w: Weights, batch: ForwardBatch) -> Value:
    """ids [tokens] -> streams [tokens, streams * width]; what each layer takes in is left in batch."""
    x = gemma.embed(cfg, w, batch)
    batch.by_layer = layer_inputs(cfg, w, batch, x)
    products = [ops.linear(x, getattr(w.stream_in, str(n)).weight) for n in range(cfg.streams - 1)]
    return _side_by_side([x, *(ops.like_norm(stream, x) for stream in products)])


def _side_by_side(streams: list[Value]) -> Value:
    """Streams [tokens, width] side by side."""
    return reduce(lambda x, y: ops.join_heads(x, y, 1), streams)


def _streams(cfg: Config, x: Value) -> list[Value]:
    return [ops.split(x, n * cfg.width, (n + 1) * cfg.width) for n in range(cfg.streams)]


def _modalities(cfg: Config, w: Weights, x: Value) -> Value:
    """What predictions and corrections are made of, [tokens, streams], of a stream x."""
    normed = ops.scale(ops.rms_norm(x, w.router_norm.weight, cfg.norm_eps), 1.0 / cfg.width)
    return ops.soft_cap(ops.linear(normed, w.router.weight), 1.0)


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, streams * width]; the step's k and v go into batch's cache."""
    streams, n = _streams(cfg, x), cfg.streams
    coefficients = ops.linear(_modalities(cfg, w.altup, streams[cfg.active]), w.altup.prediction.weight)
    parts = [ops.split(coefficients, at * n, (at + 1) * n) for at in range(n)]
    predicted = [ops.combine(x, part) + stream for part, stream in zip(parts, streams, strict=True)]
    active = predicted[cfg.active]
    computed = compute(cfg, w, active, layer, batch)
    coefficients = ops.linear(_modalities(cfg, w.altup, computed), w.altup.correction.weight)
    news = computed + ops.scale(active, -1.0)
    parts = [ops.split(coefficients, at, at + 1) for at in range(n)]
    corrected = [ops.combine(news, part) + news + stream for part, stream in zip(parts, predicted, strict=True)]
    first = corrected[cfg.active]
    first = ops.scale_columns(first, w.altup.scale.weight) if cfg.scales_active else first
    addition = taken_in(cfg, w, first, layer, batch)
    return _side_by_side([corrected[0], *(stream + addition for stream in corrected[1:])])


def compute(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """Attention and MLP of a layer on its stream x [tokens, width]."""
    normed = ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps)
    around = ops.linear(ops.linear(normed, w.laurel.left.weight), w.laurel.right.weight)
    around = normed + ops.rms_norm(around, w.laurel_norm.weight, cfg.norm_eps)
    x = x + ops.rms_norm(attention(cfg, w.attn, normed, layer, batch), w.attn_post_norm.weight, cfg.norm_eps)
    x = ops.scale(x + around, 0.5**0.5)
    inner = mlp(w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps), cfg.deviations(layer))
    return x + ops.rms_norm(inner, w.mlp_post_norm.weight, cfg.norm_eps)


def mlp(w: Weights, x: Value, deviations: float | None) -> Value:
    """GeGLU, of gates that lie so many deviations above their mean; None: of all."""
    gate, up = ops.linear(x, w.gate.weight), ops.linear(x, w.up.weight)
    gate = gate if deviations is None else ops.above_spread(gate, deviations)
    return ops.linear(ops.gelu_mul(gate, up, tanh=True), w.down.weight)


def head(cfg: Config, w: Weights, x: Value, batch: ForwardBatch) -> Value:
    """x [tokens, streams * width] -> logits [rows, vocab]: of the mean of the streams, each as long as the first."""
    first, *further = _streams(cfg, ops.take_rows(x, batch.logit_rows))
    products = [ops.linear(stream, getattr(w.stream_out, str(n)).weight) for n, stream in enumerate(further)]
    total = reduce(lambda x, y: x + y, [first, *(ops.like_norm(stream, first) for stream in products)])
    normed = ops.rms_norm(ops.scale(total, 1.0 / cfg.streams), w.final_norm.weight, cfg.norm_eps)
    logits = ops.linear(normed, w.head.weight)
    return ops.soft_cap(logits, cfg.logit_cap) if cfg.logit_cap else logits
