"""Attention kernels that transformers can be told to use, by the names that a technique has."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Technique -> the one kernel of torch's scaled_dot_product_attention that it may use; xformers has its own.
SDPA = {"sdpa": "EFFICIENT_ATTENTION", "flash": "FLASH_ATTENTION"}
PREFIX = "roofline_"


def register(technique: str) -> str:
    """Teach transformers the attention of "sdpa", "flash" or "xformers"; the `attn_implementation` to ask for.

    A kernel that cannot take what it is given raises RuntimeError: no other takes its place silently.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = f"{PREFIX}{technique}"
    ALL_ATTENTION_FUNCTIONS.register(name, xformers_attention if technique == "xformers" else sdpa_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return name


def sdpa_attention(
    module: Any, query: "Tensor", key: "Tensor", value: "Tensor", attention_mask: "Tensor | None", **options: Any
) -> "tuple[Tensor, None]":
    """torch's scaled_dot_product_attention, with whichever kernels it is allowed at the time.

    query [batch, heads, queries, head_dim], key and value [batch, kv_heads, keys, head_dim]: kv heads are repeated,
    since not every kernel takes grouped ones. Returns [batch, queries, heads, head_dim] and no weights.
    """
    from torch.nn import functional

    key, value = _repeated(module, key), _repeated(module, value)
    causal = attention_mask is None and query.shape[2] > 1
    scale = options.get("scaling")
    out = functional.scaled_dot_product_attention(query, key, value, attention_mask, is_causal=causal, scale=scale)
    return out.transpose(1, 2).contiguous(), None


def xformers_attention(
    module: Any, query: "Tensor", key: "Tensor", value: "Tensor", attention_mask: "Tensor | None", **options: Any
) -> "tuple[Tensor, None]":
    """xformers.ops.memory_efficient_attention; shapes as of `sdpa_attention`. Source: Lefaudeux et al. 2022, xFormers;
    Rabe and Staats 2021, Self-attention does not need O(n^2) memory."""
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    batch, heads, queries, _ = query.shape
    bias: Any = LowerTriangularMask() if attention_mask is None and queries > 1 else None
    if attention_mask is not None:  # True: to be seen
        bias = query.new_zeros(batch, heads, queries, key.shape[2])
        bias.masked_fill_(attention_mask[..., : key.shape[2]].logical_not(), float("-inf"))
    turned = (x.transpose(1, 2) for x in (query, _repeated(module, key), _repeated(module, value)))
    return memory_efficient_attention(*turned, attn_bias=bias, scale=options.get("scaling")), None


def _repeated(module: Any, x: "Tensor") -> "Tensor":
    """[batch, kv_heads, keys, head_dim] -> [batch, heads, keys, head_dim]."""
    groups = getattr(module, "num_key_value_groups", 1)
    if groups == 1:
        return x
    batch, heads, keys, dim = x.shape
    return x[:, :, None].expand(batch, heads, groups, keys, dim).reshape(batch, heads * groups, keys, dim)
