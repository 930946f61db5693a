"""BERT, RoBERTa and XLM-RoBERTa: encoders, whose hidden rows are the vectors of texts. Attention sees both ways, norms
stand behind attention and MLP, and every linear layer has a bias. Sources: Devlin et al. 2018, Liu et al. 2019, Conneau
et al. 2019.

Every Program ends with logits, so these are given the product with the word embeddings, which masked-language models
have, too. Nothing asks for it: an encoder gives vectors alone, from the rows that it would read.
"""

from dataclasses import dataclass
from typing import ClassVar

from roofline import ops
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models import llama, mpt
from roofline.models.config import ModelConfig
from roofline.models.family import ForwardBatch
from roofline.models.mpt import pair
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Value


@dataclass(frozen=True)
class Config(ModelConfig):
    """token_types: rows of their table, of which texts that stand alone have the first; first_position: rows of the
    table of positions before that of position 0, of RoBERTa one more than its padding id."""

    encoder: ClassVar[bool] = True

    token_types: int = 2
    first_position: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token_types < 1 or self.first_position < 0:
            values = f"token_types={self.token_types}, first_position={self.first_position}"
            raise ConfigError(f"model config: {values} must be at least 1 and 0")


def check(cfg: Config) -> None:
    """Raises UnsupportedError on what this family does not have."""
    if cfg.positions != "learned" or cfg.rms or cfg.gated or not cfg.bias or not cfg.tied:
        what = f"positions={cfg.positions!r}, rms, gated, bias=False or tied=False in a bert model"
        raise UnsupportedError(what, "it has learned positions, layer norms, biases and no gate", ["family mpt"])
    if cfg.qk_norm or cfg.window(0) or cfg.layer_windows or cfg.attention_bias or cfg.kv_heads != cfg.heads:
        what = "qk_norm, a window, grouped queries or attention_bias in a bert model"
        raise UnsupportedError(what, "its attention is plain, and its biases are everywhere", ["bias"])


def spec(cfg: Config) -> tuple[Param, ...]:
    """The parameters, in the order of use."""
    width = cfg.width
    return (
        Param("embed.weight", (cfg.vocab, width), "vocab"),
        Param("types.weight", (cfg.token_types, width), "replicate"),
        Param("positions.weight", (cfg.max_position + cfg.first_position, width), "replicate"),
        *pair("embed_norm", (width,), "replicate"),
        *(row for n in "qkv" for row in pair(f"layers.{{layer}}.attn.{n}", (width, width), "column")),
        *pair("layers.{layer}.attn.o", (width, width), "row"),
        *pair("layers.{layer}.attn_norm", (width,), "replicate"),
        *mpt.mlp_params(cfg),
        *pair("layers.{layer}.mlp_norm", (width,), "replicate"),
        Param("head.weight", (cfg.vocab, width), "vocab", tied_to="embed.weight"),
    )


def embed(cfg: Config, w: Weights, batch: ForwardBatch) -> Value:
    """ids [tokens] -> x [tokens, width]."""
    x = ops.add(ops.embed(batch.ids, w.embed.weight), ops.embed(batch.ids, w.types.weight, one_row=True))
    first = -cfg.first_position or None
    x = ops.add(x, ops.embed(batch.positions, w.positions.weight, first=first))
    return mpt.norm(cfg, x, w.embed_norm)


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    x = mpt.norm(cfg, x + llama.attention(cfg, w.attn, x, layer, batch, causal=False), w.attn_norm)
    return mpt.norm(cfg, x + mpt.mlp(cfg, w.mlp, x), w.mlp_norm)


def head(cfg: Config, w: Weights, x: Value, batch: ForwardBatch) -> Value:
    """x [tokens, width] -> products with the word embeddings [rows, vocab] of the rows that want them."""
    return ops.linear(ops.take_rows(x, batch.logit_rows), w.head.weight)
