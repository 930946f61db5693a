"""GLM-4 (0414): Gemma's places of norms, heads of which a part is turned, gate and up in one matrix.

Sources: GLM Team 2024, and the configurations published with the weights.
"""

from roofline import ops
from roofline.models import llama
from roofline.models.config import ModelConfig
from roofline.models.family import ForwardBatch
from roofline.models.phi3 import gate_up_mlp, gate_up_params
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Value

check, embed, head = llama.check, llama.embed, llama.head


def spec(cfg: ModelConfig) -> tuple[Param, ...]:
    """Llama's table with gate and up as one, and a norm behind attention and one behind the MLP."""
    other_params = [param for param in llama.spec(cfg) if ".mlp." not in param.name]
    behind = [Param(f"layers.{{layer}}.{n}_post_norm.weight", (cfg.width,), "replicate") for n in ("attn", "mlp")]
    return (*other_params, *gate_up_params(cfg), *behind)


def block(cfg: ModelConfig, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    attended = llama.attention(cfg, w.attn, ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps), layer, batch)
    x = x + ops.rms_norm(attended, w.attn_post_norm.weight, cfg.norm_eps)
    inner = gate_up_mlp(w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))
    return x + ops.rms_norm(inner, w.mlp_post_norm.weight, cfg.norm_eps)
