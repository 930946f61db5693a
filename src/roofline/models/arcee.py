"""Arcee's AFM: Llama whose MLP has no gate and squares what relu leaves. Sources: the configurations published with the
weights; So et al. 2021 for the activation."""

from roofline import ops
from roofline.common.errors import UnsupportedError
from roofline.models import llama, mpt
from roofline.models.config import ModelConfig
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Value

embed, head = llama.embed, llama.head


def check(cfg: ModelConfig) -> None:
    """Raises UnsupportedError on what this family does not have."""
    if cfg.qk_norm or cfg.positions != "rope":
        what = f"qk_norm={cfg.qk_norm}, positions={cfg.positions!r} in an arcee model"
        raise UnsupportedError(what, "it turns q and k, without a norm of theirs", ["family qwen", "family mpt"])
    if cfg.rms or cfg.gated or cfg.bias:
        reason = "its norms are RMS norms and its MLP has no gate; biases are of attention or the MLP"
        raise UnsupportedError("rms, gated or bias in an arcee model", reason, ["attention_bias", "mlp_bias"])


def spec(cfg: ModelConfig) -> tuple[Param, ...]:
    """The parameters, in the order of use."""
    return tuple(param for param in llama.spec(cfg) if ".mlp.gate." not in param.name)


def block(cfg: ModelConfig, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    x = x + llama.attention(cfg, w.attn, ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps), layer, batch)
    return x + mpt.mlp(cfg, w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))
