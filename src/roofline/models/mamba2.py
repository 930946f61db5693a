"""Mamba-2: layers of nothing but the selective scan, with a rate for each head. Source: Dao and Gu 2024."""

from dataclasses import dataclass

from roofline import ops
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models import llama
from roofline.models.family import ForwardBatch
from roofline.models.scan_config import ScanConfig
from roofline.models.spec import Param, Weights
from roofline.ops.scan import scan_state
from roofline.ops.state import COLUMNS, MATRIX, StateParts
from roofline.ops.symbol import Value

embed, head = llama.embed, llama.head


@dataclass(frozen=True)
class Mamba2Config(ScanConfig):
    """scan_heads: equal parts of `inner`, each with a rate of its own; groups: of heads, which share B and C;
    least_step, most_step: bounds of a step, None: none."""

    scan_heads: int = 0
    groups: int = 1
    least_step: float = 0.0
    most_step: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.groups <= self.scan_heads <= self.inner:
            sizes = f"groups={self.groups}, scan_heads={self.scan_heads}, inner={self.inner}"
            raise ConfigError(f"model config: {sizes} do not ascend from 1")
        if self.inner % self.scan_heads or self.scan_heads % self.groups:
            raise ConfigError(f"model config: inner={self.inner} or groups={self.groups} do not fit the scan_heads")
        if self.least_step < 0 or (self.most_step is not None and self.most_step < self.least_step):
            raise ConfigError(f"model config: no step is between {self.least_step} and {self.most_step}")

    @property
    def channels(self) -> int:
        """Of the convolution: x, and B and C of all groups."""
        return self.inner + 2 * self.groups * self.states

    @property
    def state_parts(self) -> StateParts:
        values = scan_state(self.inner, self.scan_heads, self.states, by_state=False)
        return ((COLUMNS, (self.taps - 1, self.channels)), (MATRIX, values)) if any(self.recurrent) else ()


@dataclass(frozen=True)
class Config(Mamba2Config):
    """Of a model whose layers are all scans, and have no MLP."""

    @property
    def absent(self) -> tuple[str, ...]:
        return (*super().absent, "ffn")


def check(cfg: ScanConfig) -> None:
    """Raises UnsupportedError on what this family does not have."""
    if cfg.positions != "none" or not all(cfg.recurrent):
        raise UnsupportedError(f"attention in a {cfg.family} model", "its layers are all scans")


def spec(cfg: Config) -> tuple[Param, ...]:
    """The parameters, in the order of use."""
    return around(cfg, mixer_params(cfg))


def around(cfg: ScanConfig, mixer: list[Param]) -> tuple[Param, ...]:
    """The parameters of a model whose layers are a norm and these."""
    return (
        Param("embed.weight", (cfg.vocab, cfg.width), "vocab"),
        Param("layers.{layer}.norm.weight", (cfg.width,), "replicate"),
        *mixer,
        Param("final_norm.weight", (cfg.width,), "replicate"),
        Param("head.weight", (cfg.vocab, cfg.width), "vocab", tied_to="embed.weight" if cfg.tied else None),
    )


def mixer_params(cfg: Mamba2Config, normed: bool = True) -> list[Param]:
    """The parameters of a layer of Mamba-2; normed: what its gate scales is normed."""
    parts = (cfg.inner, cfg.groups * cfg.states, cfg.groups * cfg.states)
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "z.weight": ((cfg.inner, cfg.width), "column"),
        "xbc.weight": ((cfg.channels, cfg.width), "column"),
        "dt.weight": ((cfg.scan_heads, cfg.width), "column"),
    }
    shapes["conv.weight"] = (cfg.channels, cfg.taps), "column"
    if cfg.conv_bias:
        shapes["conv.bias"] = (cfg.channels,), "column"
    shapes |= {f"{name}.weight": ((cfg.scan_heads,), "column") for name in ("a_log", "dt_bias", "d")}
    if normed:
        shapes["norm.weight"] = (cfg.inner,), "column"
    shapes["o.weight"] = (cfg.width, cfg.inner), "row"
    return [
        Param(
            f"layers.{{layer}}.ssm.{name}",
            shape,
            split,
            parts=parts if name.partition(".")[0] in ("xbc", "conv") else (),
            layers=cfg.scans,
        )
        for name, (shape, split) in shapes.items()
        if cfg.scans
    ]


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's state goes into batch.state."""
    return x + mixer(cfg, w.ssm, ops.rms_norm(x, w.norm.weight, cfg.norm_eps), layer, batch)


def mixer(cfg: Mamba2Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """A short convolution of x, B and C, the selective scan, a gate, and a norm of each group behind it."""
    z = ops.linear(x, w.z.weight)
    xbc, dt = ops.linear(x, w.xbc.weight), ops.linear(x, w.dt.weight)
    return ops.linear(gated_norm(cfg, w, z, scanned(cfg, w, xbc, dt, layer, batch)), w.o.weight)


def scanned(cfg: Mamba2Config, w: Weights, xbc: Value, dt: Value, layer: int, batch: ForwardBatch) -> Value:
    """What the scan makes of x, B and C [tokens, channels] and steps [tokens, scan_heads]: [tokens, inner]."""
    place, most = cfg.state_index(layer), {} if cfg.most_step is None else {"most": cfg.most_step}
    xbc, batch.state = ops.causal_conv(xbc, batch.state, w.conv.weight, w.conv.bias, layer=place, silu=True)
    y, batch.state = ops.selective_scan(
        *(xbc, dt, batch.state, w.a_log.weight, w.dt_bias.weight, w.d.weight),
        layer=place,
        states=cfg.states,
        groups=cfg.groups,
        least=cfg.least_step,
        **most,
    )
    return y


def gated_norm(cfg: Mamba2Config, w: Weights, z: Value, y: Value) -> Value:
    """y * silu(z), then normed by groups, each with weights of its own."""
    return ops.rms_norm(ops.silu_mul(z, y), w.norm.weight, cfg.norm_eps, cfg.groups)
