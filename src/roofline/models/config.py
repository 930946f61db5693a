"""The configuration every family shares: what a model file says about its shape, checked once."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from roofline.common.errors import ConfigError
from roofline.common.names import did_you_mean
from roofline.ops.position_factors import PositionFactors
from roofline.ops.rope_tables import RopeTable
from roofline.ops.state import StateParts

POSITIONS = ("rope", "learned", "alibi", "none")
ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu", "relu_squared")
# Of the configurations of all families: fields with a value for each layer, and those that number layers.
_VALUES_OF_LAYERS = ("layer_windows", "recurrent", "turning", "layer_ffns", "sparsity")
_NUMBERS_OF_LAYERS = ("dense", "sparse")

Fact = TypeVar("Fact")


class KvShape(NamedTuple):
    """What a layer keeps of each token for attention: keys of so many heads, and values as wide as they; value_dim:
    not 0: no values, they are the last value_dim dimensions of the keys."""

    kv_heads: int
    head_dim: int
    value_dim: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder.

    width: of the residual stream; ffn: of the gated MLP; rope_theta, rope_scaling (Hugging Face's keys; None: none) and
    rope_style: see ops.rope_tables; max_position: context it was trained for; tied: the head is the embedding;
    attention_bias: q, k, v have biases; qk_norm: RMS norm of each q and k head; sliding_window: None: full attention;
    positions: "rope", "learned" (a row of a table is added to each embedding), "alibi" or "none"; bias: every linear
    layer and layer norm has one; output_bias, mlp_bias: the linear behind attention, those of the MLP have biases;
    rotary_dim: the first dimensions of a head that rope turns, None: all; layer_windows: the window of each layer, 0:
    full attention; empty: sliding_window is that of all.

    Of mpt, gpt2, gpt_neox, opt and arcee, as the other families have SwiGLU: activation: of the MLP or of its gate,
    "gelu" (exact), "gelu_tanh", "silu" or, without a gate, "relu", "relu_squared". Of mpt alone: rms: its norms are RMS
    norms, which have no bias; gated: its MLP has a gate.

    A family with more to say has a subclass named `Config` in its module, which `registry.configure` makes instead.
    What differs between layers is asked for by layer: `window`, `rope_of`, `query_factors`, `kv_shape`, `kv_source`,
    `heads_of`, `ffn_of`, `attention_scale_of`, `alike`. Layers of one `kv_shape` share a group of the cache.
    """

    encoder: ClassVar[bool] = False  # of a family whose tokens see the whole text, and which gives vectors alone

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
    output_bias: bool = False
    mlp_bias: bool = False
    rotary_dim: int | None = None
    layer_windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_position"):
            value = getattr(self, name)
            if name in self.absent:
                if value != 0:
                    raise ConfigError(f"model config: {name}={value!r} of what the model has not is not 0")
            elif not isinstance(value, int) or value < 1:
                raise ConfigError(f"model config: {name}={value!r} is not a whole number of at least 1")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ConfigError(f"model config: heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"model config: sliding_window={self.sliding_window} is not at least 1")
        if self.layer_windows and (len(self.layer_windows) != self.layers or min(self.layer_windows) < 0):
            reason = f"is not a number of at least 0 for each of {self.layers} layers"
            raise ConfigError(f"model config: layer_windows={list(self.layer_windows)} {reason}")
        if self.layer_windows and self.sliding_window is not None:
            raise ConfigError("model config: sliding_window beside layer_windows; one of them is too many")
        if self.rotary_dim is not None and not 0 < self.rotary_dim <= self.head_dim:
            raise ConfigError(f"model config: rotary_dim={self.rotary_dim} is not from 1 to head_dim={self.head_dim}")
        if not self.norm_eps > 0 or not self.rope_theta > 0:
            raise ConfigError(f"model config: norm_eps={self.norm_eps}, rope_theta={self.rope_theta} must be above 0")
        if self.positions not in POSITIONS:
            raise ConfigError(f"model config: positions={self.positions!r} is not one of {', '.join(POSITIONS)}")
        if self.activation not in ACTIVATIONS:
            raise ConfigError(f"model config: activation={self.activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if self.positions == "rope":
            _ = self.rope  # refuses the impossible

    @classmethod
    def of(cls, mapping: Mapping[str, Any]) -> Self:
        """Make a configuration of a mapping with these fields; lists, as JSON has them, become tuples.

        Raises ConfigError naming what is missing or unknown.
        """
        names = [f.name for f in fields(cls)]
        required = [f.name for f in fields(cls) if f.default is MISSING]
        for key in mapping:
            if key not in names:
                raise ConfigError(f"model config: unknown field {key!r}{did_you_mean(key, names)}")
        missing = [name for name in required if name not in mapping]
        if missing:
            raise ConfigError(f"model config: missing {', '.join(missing)}")
        values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in mapping.items()}
        return cls(**values)

    @property
    def rope(self) -> RopeTable:
        """The rotary table of every layer that has no other one."""
        dim, context = self.rotary_dim or self.head_dim, self.max_position
        return RopeTable.of(dim, self.rope_theta, self.rope_style, self.rope_scaling, context)

    def rope_of(self, layer: int) -> RopeTable | None:
        """The rotary table of a layer; None: it does not turn q and k."""
        return self.rope if self.positions == "rope" else None

    def window(self, layer: int) -> int:
        """How many keys a token of that layer sees, with its own; 0: all."""
        return self.layer_windows[layer] if self.layer_windows else self.sliding_window or 0

    @property
    def absent(self) -> tuple[str, ...]:
        """The sizes of parts that the model has not, which are 0: those of its heads, of its MLP."""
        return ()

    @property
    def wide_qk_norm(self) -> bool:
        """Whether qk_norm is over all heads of q, and of k, together."""
        return False

    @property
    def state_parts(self) -> StateParts:
        """What each layer with recurrent state keeps of a sequence; (): there are no such layers."""
        return ()

    def kv_shape(self, layer: int) -> KvShape:
        """The keys and values that a layer reads."""
        return KvShape(self.kv_heads, self.head_dim)

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: itself, or one before it that writes some of its kv_shape."""
        return layer

    def heads_of(self, layer: int) -> int:
        """How many heads of queries a layer has."""
        return self.heads

    def ffn_of(self, layer: int) -> int:
        """The inner width of a layer's MLP."""
        return self.ffn

    def attention_scale_of(self, layer: int) -> float:
        """What the scores of a layer are multiplied by."""
        return self.attention_scale

    def attends(self, layer: int) -> bool:
        """Whether a layer writes keys and values."""
        return self.kv_source(layer) == layer

    def keeps_state(self, layer: int) -> bool:
        """Whether a layer keeps recurrent state."""
        return False

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        """The shapes of what layers write, in the order of the first that does: the groups of the cache."""
        written = map(self.kv_shape, filter(self.attends, range(self.layers)))
        return tuple(dict.fromkeys(written)) or (self.kv_shape(0),)

    def kv_group(self, layer: int) -> int:
        """The number of the cache's group that a layer reads."""
        return self.kv_shapes.index(self.kv_shape(layer))

    def cache_index(self, layer: int) -> int:
        """The number of a layer, or of the one whose keys and values it reads, among those that write to its group."""
        shape, source = self.kv_shape(layer), self.kv_source(layer)
        return sum(self.kv_shape(before) == shape for before in filter(self.attends, range(source)))

    def state_index(self, layer: int) -> int:
        """The number of a layer among those that keep recurrent state."""
        return sum(map(self.keeps_state, range(layer)))

    def query_factors(self, layer: int) -> PositionFactors | None:
        """What the queries of a layer are multiplied by at each position; None: nothing."""
        return None

    def alike(self, layer: int) -> int:
        """The first layer that computes what this one does, with weights of its own."""

        def facts(number: int) -> tuple[object, ...]:
            stores = self.attends(number), self.keeps_state(number)
            sizes = self.kv_shape(number), self.heads_of(number), self.ffn_of(number), self.attention_scale_of(number)
            return self.window(number), self.rope_of(number), self.query_factors(number), *stores, *sizes

        layer_facts = facts(layer)
        return next(first for first in range(layer + 1) if facts(first) == layer_facts)

    def first(self, layers: int) -> Self:
        """Return the configuration of a model of which only the first so many layers are left."""
        cut: dict[str, Any] = {name: getattr(self, name)[:layers] for name in _VALUES_OF_LAYERS if hasattr(self, name)}
        for name in _NUMBERS_OF_LAYERS:
            if hasattr(self, name):
                cut[name] = tuple(layer for layer in getattr(self, name) if layer < layers)
        return replace(self, layers=layers, **cut)

    def layers_by(self, fact: Callable[[int], Fact]) -> dict[Fact, tuple[int, ...] | None]:
        """The layers of each value of a fact, in the order of the first; None where all have one: `layers` of Param."""
        numbers: dict[Fact, tuple[int, ...]] = {}
        for layer in range(self.layers):
            value = fact(layer)
            numbers[value] = (*numbers.get(value, ()), layer)
        return dict(numbers) if len(numbers) > 1 else dict.fromkeys(numbers)

    def writers_by(self, fact: Callable[[int], Fact]) -> dict[Fact, tuple[int, ...] | None]:
        """The same of layers that do not read the keys and values of another one."""
        by_value = self.layers_by(lambda layer: (self.kv_source(layer) == layer, fact(layer)))
        return {value: layers for (writes, value), layers in by_value.items() if writes}

    def q_width_of(self, layer: int) -> int:
        """Columns of a layer's queries."""
        return self.heads_of(layer) * self.kv_shape(layer).head_dim

    def kv_width_of(self, layer: int) -> int:
        """Columns of a layer's keys."""
        shape = self.kv_shape(layer)
        return shape.kv_heads * shape.head_dim

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5) if self.head_dim else 0.0
