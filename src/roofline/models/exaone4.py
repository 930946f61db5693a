"""EXAONE 4: norms behind attention and MLP and none before them, norms of each head of q and k; where there are layers
with a window, those without one turn nothing.

Source: LG AI Research 2025.
"""

from roofline.models import llama, olmo2, qwen, smollm3
from roofline.models.config import ModelConfig
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Value

Config, check, embed, head = smollm3.Config, qwen.check, llama.embed, llama.head


def spec(cfg: ModelConfig) -> tuple[Param, ...]:
    """Llama's table with its norms elsewhere, and a norm weight for one head of q and one of k."""
    return (*olmo2.post_normed(llama.spec(cfg), cfg), *qwen.head_norms(cfg))


def block(cfg: ModelConfig, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    return olmo2.add_parts(cfg, w, x, llama.attention(cfg, w.attn, x, layer, batch))
