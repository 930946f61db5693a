"""OPT: learned positions whose table begins two rows early, relu, norms before or behind attention and MLP, and of one
size embeddings narrower than the layers. Source: Zhang et al. 2022, and the published weights."""

from dataclasses import dataclass

from roofline import ops
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models import llama, mpt
from roofline.models.config import ModelConfig
from roofline.models.family import ForwardBatch
from roofline.models.mpt import pair
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Value

POSITIONS_BEFORE = 2  # rows of the table of positions before that of position 0


@dataclass(frozen=True)
class Config(ModelConfig):
    """norm_first: norms stand before attention and MLP, else behind the sums with them; last_norm: there is one before
    the head; embed_width: of embeddings and head, 0: width. Norms have biases; bias is of the linear layers."""

    norm_first: bool = True
    last_norm: bool = True
    embed_width: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embed_width < 0:
            raise ConfigError(f"model config: embed_width={self.embed_width} is not at least 0")

    @property
    def projected(self) -> bool:
        """Whether embeddings have another width than the layers."""
        return self.embed_width not in (0, self.width)


def check(cfg: Config) -> None:
    """Raises UnsupportedError on what this family does not have."""
    if cfg.positions != "learned" or cfg.rms or cfg.gated:
        what = f"positions={cfg.positions!r}, rms or gated in an opt model"
        raise UnsupportedError(what, "it has learned positions, layer norms and no gate", ["family mpt"])
    if cfg.last_norm and not cfg.norm_first:
        reason = "norms that stand behind attention and MLP are the last of them"
        raise UnsupportedError("last_norm without norm_first in an opt model", reason, ["last_norm=False"])
    if cfg.qk_norm or cfg.window(0) or cfg.layer_windows or cfg.attention_bias or cfg.kv_heads != cfg.heads:
        what = "qk_norm, a window, grouped queries or attention_bias in an opt model"
        raise UnsupportedError(what, "its attention is plain, and its biases are everywhere or nowhere", ["bias"])


def spec(cfg: Config) -> tuple[Param, ...]:
    """The parameters, in the order of use."""
    width, narrow = cfg.width, cfg.embed_width or cfg.width
    project = [
        Param(f"project_{n}.weight", s, "replicate") for n, s in (("in", (width, narrow)), ("out", (narrow, width)))
    ]
    return (
        Param("embed.weight", (cfg.vocab, narrow), "vocab"),
        *(project[:1] if cfg.projected else ()),
        Param("positions.weight", (cfg.max_position + POSITIONS_BEFORE, width), "replicate"),
        *pair("layers.{layer}.attn_norm", (width,), "replicate"),
        *(row for n in "qkv" for row in pair(f"layers.{{layer}}.attn.{n}", (width, width), "column", cfg.bias)),
        *pair("layers.{layer}.attn.o", (width, width), "row", cfg.bias),
        *pair("layers.{layer}.mlp_norm", (width,), "replicate"),
        *mpt.mlp_params(cfg),
        *(pair("final_norm", (width,), "replicate") if cfg.last_norm else ()),
        *(project[1:] if cfg.projected else ()),
        Param("head.weight", (cfg.vocab, narrow), "vocab", tied_to="embed.weight" if cfg.tied else None),
    )


def embed(cfg: Config, w: Weights, batch: ForwardBatch) -> Value:
    """ids [tokens] -> x [tokens, width]."""
    x = ops.embed(batch.ids, w.embed.weight)
    x = ops.linear(x, w.project_in.weight) if cfg.projected else x
    return ops.add(x, ops.embed(batch.positions, w.positions.weight, first=-POSITIONS_BEFORE))


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    inner = mpt.norm(cfg, x, w.attn_norm) if cfg.norm_first else x
    x = x + llama.attention(cfg, w.attn, inner, layer, batch)
    x = x if cfg.norm_first else mpt.norm(cfg, x, w.attn_norm)
    x = x + mpt.mlp(cfg, w.mlp, mpt.norm(cfg, x, w.mlp_norm) if cfg.norm_first else x)
    return x if cfg.norm_first else mpt.norm(cfg, x, w.mlp_norm)


def head(cfg: Config, w: Weights, x: Value, batch: ForwardBatch) -> Value:
    """x [tokens, width] -> logits [rows, vocab] of the rows that want them."""
    x = ops.take_rows(x, batch.logit_rows)
    x = mpt.norm(cfg, x, w.final_norm) if cfg.last_norm else x
    return ops.linear(ops.linear(x, w.project_out.weight) if cfg.projected else x, w.head.weight)
