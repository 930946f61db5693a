"""Qwen2, Qwen2.5 (biases on q, k, v) and Qwen3 (norms of q and k). Sources: Yang et al. 2024, 2025."""

from roofline.models import llama
from roofline.models.config import ModelConfig
from roofline.models.spec import Param

embed, block, head = llama.embed, llama.block, llama.head


def check(cfg: ModelConfig) -> None:
    """Raises UnsupportedError on what this family does not have."""
    llama.check_rope(cfg)


def spec(cfg: ModelConfig) -> tuple[Param, ...]:
    """Llama's table and, with qk_norm, a norm weight for one head of q and one of k."""
    return (*llama.spec(cfg), *(head_norms(cfg) if cfg.qk_norm else ()))


def head_norms(cfg: ModelConfig) -> list[Param]:
    """The norms of each head of q and of k."""

    def dim(layer: int) -> int:
        return cfg.kv_shape(layer).head_dim

    layers = {"q": cfg.layers_by(dim), "k": cfg.writers_by(dim)}
    places = [(f"layers.{{layer}}.attn.{n}_norm.weight", width, on) for n in "qk" for width, on in layers[n].items()]
    return [Param(name, (width,), "shared", layers=on) for name, width, on in places]
