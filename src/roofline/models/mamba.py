"""Mamba and Falcon Mamba: layers of nothing but the selective scan, with a rate for each state of each channel.

Source: Gu and Dao 2023.
"""

from dataclasses import dataclass

from roofline import ops
from roofline.common.errors import ConfigError
from roofline.models import llama, mamba2
from roofline.models.family import ForwardBatch
from roofline.models.scan_config import ScanConfig
from roofline.models.spec import Param, Weights
from roofline.ops.scan import scan_state
from roofline.ops.state import COLUMNS, MATRIX, StateParts
from roofline.ops.symbol import Value

embed, head, check = llama.embed, llama.head, mamba2.check


@dataclass(frozen=True)
class MambaConfig(ScanConfig):
    """rank: numbers that a token's steps are made of; scan_norms: "" none, "plain" B, C and these numbers are normed,
    "weights" each with weights of its own; scan_eps: of these norms."""

    rank: int = 0
    scan_norms: str = ""
    scan_eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1 or self.scan_norms not in ("", "plain", "weights") or not self.scan_eps > 0:
            what = f"rank={self.rank}, scan_norms={self.scan_norms!r}, scan_eps={self.scan_eps}"
            raise ConfigError(f"model config: {what}: no such scan")

    @property
    def state_parts(self) -> StateParts:
        values = scan_state(self.inner, self.inner, self.states, by_state=True)
        return ((COLUMNS, (self.taps - 1, self.inner)), (MATRIX, values)) if any(self.recurrent) else ()


@dataclass(frozen=True)
class Config(MambaConfig):
    """Of a model whose layers are all scans, and have no MLP."""

    @property
    def absent(self) -> tuple[str, ...]:
        return (*super().absent, "ffn")


def spec(cfg: Config) -> tuple[Param, ...]:
    """The parameters, in the order of use."""
    return mamba2.around(cfg, mixer_params(cfg))


def mixer_params(cfg: MambaConfig) -> list[Param]:
    """The parameters of a layer of Mamba."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        **{f"{name}.weight": ((cfg.inner, cfg.width), "column") for name in ("x", "z")},
        "conv.weight": ((cfg.inner, cfg.taps), "column"),
        **({"conv.bias": ((cfg.inner,), "column")} if cfg.conv_bias else {}),
        "rank.weight": ((cfg.rank, cfg.inner), "row"),
        "bc.weight": ((2 * cfg.states, cfg.inner), "row"),
        "dt.weight": ((cfg.inner, cfg.rank), "column"),
        "a_log.weight": ((cfg.inner, cfg.states), "column"),
        **{f"{name}.weight": ((cfg.inner,), "column") for name in ("dt_bias", "d")},
        "o.weight": ((cfg.width, cfg.inner), "row"),
    }
    if cfg.scan_norms == "weights":
        widths = {"rank_norm": cfg.rank, "b_norm": cfg.states, "c_norm": cfg.states}
        shapes |= {f"{name}.weight": ((width,), "replicate") for name, width in widths.items()}
    return [
        Param(f"layers.{{layer}}.ssm.{name}", shape, split, layers=cfg.scans)
        for name, (shape, split) in shapes.items()
        if cfg.scans
    ]


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's state goes into batch.state."""
    return x + mixer(cfg, w.ssm, ops.rms_norm(x, w.norm.weight, cfg.norm_eps), layer, batch)


def mixer(cfg: MambaConfig, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """A short convolution, the selective scan with steps, B and C made of its result, and a gate."""
    place = cfg.state_index(layer)
    x, z = ops.linear(x, w.x.weight), ops.linear(x, w.z.weight)
    x, batch.state = ops.causal_conv(x, batch.state, w.conv.weight, w.conv.bias, layer=place, silu=True)
    rank, bc = with_norms(cfg, w, ops.linear(x, w.rank.weight), ops.linear(x, w.bc.weight))
    xbc, dt = ops.join_heads(x, bc, 1), ops.linear(rank, w.dt.weight)
    weights = w.a_log.weight, w.dt_bias.weight, w.d.weight
    y, batch.state = ops.selective_scan(xbc, dt, batch.state, *weights, layer=place, states=cfg.states)
    return ops.linear(ops.silu_mul(z, y), w.o.weight)


def with_norms(cfg: MambaConfig, w: Weights, rank: Value, bc: Value) -> tuple[Value, Value]:
    """What steps are made of [tokens, rank], and B and C [tokens, 2 * states]; normed where the model does that."""
    if cfg.scan_norms == "plain":
        return ops.rms_norm(rank, None, cfg.scan_eps), ops.rms_norm(bc, None, cfg.scan_eps, 2)
    if cfg.scan_norms == "weights":
        b, c = ops.cut_heads(bc, 1, 0, cfg.states), ops.cut_heads(bc, 1, cfg.states, 2 * cfg.states)
        b, c = (ops.rms_norm(part, by.weight, cfg.scan_eps) for part, by in ((b, w.b_norm), (c, w.c_norm)))
        return ops.rms_norm(rank, w.rank_norm.weight, cfg.scan_eps), ops.join_heads(b, c, 1)
    return rank, bc
