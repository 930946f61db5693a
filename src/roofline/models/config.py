"""The configuration every family shares: what a model file says about its shape, checked once."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from roofline.common.errors import ConfigError
from roofline.common.names import did_you_mean
from roofline.ops.rope_tables import RopeTable

POSITIONS = ("rope", "learned", "alibi")
ACTIVATIONS = ("gelu", "gelu_tanh", "silu")


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder.

    width: of the residual stream; ffn: of the gated MLP; rope_theta, rope_scaling (Hugging Face's keys; None: none) and
    rope_style: see ops.rope_tables; max_position: context it was trained for; tied: the head is the embedding;
    attention_bias: q, k, v have biases; qk_norm: RMS norm of each q and k head; sliding_window: None: full attention;
    positions: "rope", "learned" (a row of a table is added to each embedding) or "alibi"; bias: every linear layer and
    layer norm has one.

    Of mpt alone, as the other families have RMS norms and SwiGLU: rms: its norms are RMS norms, which have no bias;
    gated: its MLP has a gate; activation: of the MLP or of its gate, "gelu" (exact), "gelu_tanh" or "silu".
    """

    family: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    rope_style: str
    max_position: int
    tied: bool
    attention_bias: bool
    qk_norm: bool
    sliding_window: int | None
    positions: str = "rope"
    bias: bool = False
    rms: bool = False
    gated: bool = False
    activation: str = "gelu"

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_position"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"model config: {name}={value!r} is not a whole number of at least 1")
        if self.heads % self.kv_heads:
            raise ConfigError(f"model config: heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"model config: sliding_window={self.sliding_window} is not at least 1")
        if not self.norm_eps > 0 or not self.rope_theta > 0:
            raise ConfigError(f"model config: norm_eps={self.norm_eps}, rope_theta={self.rope_theta} must be above 0")
        if self.positions not in POSITIONS:
            raise ConfigError(f"model config: positions={self.positions!r} is not one of {', '.join(POSITIONS)}")
        if self.activation not in ACTIVATIONS:
            raise ConfigError(f"model config: activation={self.activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if self.positions == "rope":
            _ = self.rope  # refuses the impossible

    @classmethod
    def of(cls, mapping: Mapping[str, Any]) -> "ModelConfig":
        """From a mapping with these fields. Raises ConfigError naming what is missing or unknown."""
        names = [f.name for f in fields(cls)]
        required = [f.name for f in fields(cls) if f.default is MISSING]
        for key in mapping:
            if key not in names:
                raise ConfigError(f"model config: unknown field {key!r}{did_you_mean(key, names)}")
        missing = [name for name in required if name not in mapping]
        if missing:
            raise ConfigError(f"model config: missing {', '.join(missing)}")
        return cls(**mapping)

    @property
    def rope(self) -> RopeTable:
        """The rotary table of every layer."""
        return RopeTable.of(self.head_dim, self.rope_theta, self.rope_style, self.rope_scaling)

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)
