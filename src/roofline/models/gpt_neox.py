"""GPT-NeoX and Pythia: attention and MLP beside each other, of which a part of each head is turned.

Sources: Black et al. 2022, Biderman et al. 2023.
"""

from dataclasses import dataclass

from roofline import ops
from roofline.common.errors import UnsupportedError
from roofline.models import mpt
from roofline.models.config import ModelConfig
from roofline.models.family import ForwardBatch
from roofline.models.mpt import pair
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Value

embed, head = mpt.embed, mpt.head


@dataclass(frozen=True)
class Config(ModelConfig):
    """parallel: attention and MLP read the same residual stream, each through its own norm; else the MLP reads what
    attention was added to. attention_bias is of q, k, v and of the linear behind attention."""

    parallel: bool = True


def check(cfg: ModelConfig) -> None:
    """Raises UnsupportedError on what this family does not have."""
    if cfg.positions != "rope" or not cfg.bias or cfg.rms or cfg.gated:
        what = f"positions={cfg.positions!r}, bias={cfg.bias}, rms or gated in a gpt_neox model"
        raise UnsupportedError(what, "it turns q and k, has layer norms, biases and no gate", ["family mpt"])
    if cfg.qk_norm or cfg.window(0) or cfg.layer_windows or cfg.kv_heads != cfg.heads:
        what = "qk_norm, a window or grouped queries in a gpt_neox model"
        raise UnsupportedError(what, "its attention is plain", ["family llama"])


def spec(cfg: ModelConfig) -> tuple[Param, ...]:
    """The parameters, in the order of use."""
    width, q, kv = cfg.width, cfg.q_width, cfg.kv_width
    return (
        Param("embed.weight", (cfg.vocab, width), "vocab"),
        *pair("layers.{layer}.attn_norm", (width,), "replicate"),
        *pair("layers.{layer}.attn.qkv", (q + 2 * kv, width), "column", cfg.attention_bias, (q, kv, kv)),
        *pair("layers.{layer}.attn.o", (width, q), "row", cfg.attention_bias),
        *pair("layers.{layer}.mlp_norm", (width,), "replicate"),
        *mpt.mlp_params(cfg),
        *pair("final_norm", (width,), "replicate"),
        Param("head.weight", (cfg.vocab, width), "vocab", tied_to="embed.weight" if cfg.tied else None),
    )


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    attended = ops.add(x, mpt.attention(cfg, w.attn, mpt.norm(cfg, x, w.attn_norm), layer, batch))
    inner = mpt.norm(cfg, x if cfg.parallel else attended, w.mlp_norm)
    return ops.add(attended, mpt.mlp(cfg, w.mlp, inner))
