"""VaultGemma: Gemma 2 without the norms behind attention and MLP. Source: the configuration published with the weights
of VaultGemma 1B."""

from roofline import ops
from roofline.models import gemma, llama, qwen
from roofline.models.family import ForwardBatch
from roofline.models.spec import Weights
from roofline.ops.symbol import Value

Config = gemma.Config
check, spec, embed, head = llama.check, qwen.spec, gemma.embed, gemma.head


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    normed = ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps)
    x = x + llama.attention(cfg, w.attn, normed, layer, batch, cfg.attention_cap)
    return x + gemma.mlp(w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))
