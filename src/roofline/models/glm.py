"""GLM-4 (9B of 2024): Llama of whose heads a part is turned, gate and up in one matrix.

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
    """Llama's table with gate and up as one."""
    return (*(param for param in llama.spec(cfg) if ".mlp." not in param.name), *gate_up_params(cfg))


def block(cfg: ModelConfig, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    x = x + llama.attention(cfg, w.attn, ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps), layer, batch)
    return x + gate_up_mlp(w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))
