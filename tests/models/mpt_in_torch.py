"""MPT with LLM Foundry's switches written out in plain torch: one function, no module of ours."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _norm(w: dict[str, Tensor], name: str, x: Tensor, rms: bool) -> Tensor:
    weight = w[f"{name}.weight"]
    if rms:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    return F.layer_norm(x, weight.shape, weight, w.get(f"{name}.bias"), 1e-5)


def _turn(x: Tensor, theta: float, factor: float) -> Tensor:
    """x [heads, length, dim]: each pair (x[i], x[i + dim / 2]) as a complex number, turned."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[1]) / factor, theta ** (-torch.arange(half) / half))
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def logits(w: dict[str, Tensor], ids: Tensor, config: dict[str, Any]) -> Tensor:
    """[length, vocab] of one sequence. w: LLM Foundry's names; config: LLM Foundry's keys, without defaults."""
    attention, ffn = config["attn_config"], config.get("ffn_config", {})
    heads, width, length = config["n_heads"], config["d_model"], len(ids)
    grouped = {"grouped_query_attention": attention.get("kv_n_heads"), "multiquery_attention": 1}
    kv_heads, dim = grouped.get(attention.get("attn_type", ""), heads), width // heads
    rms, act = "rmsnorm" in config.get("norm_type", ""), dict(ffn.get("ffn_act_fn", {"name": "gelu"}))
    function = getattr(F, act.pop("name"))

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def split(x: Tensor) -> Tensor:
        return x.view(length, -1, dim).transpose(0, 1)

    x = w["transformer.wte.weight"][ids]
    if "transformer.wpe.weight" in w:
        x = x + w["transformer.wpe.weight"][:length]
    for layer in range(config["n_layers"]):
        at = f"transformer.blocks.{layer}"
        qkv = linear(f"{at}.attn.Wqkv", _norm(w, f"{at}.norm_1", x, rms))
        q, k, v = (split(part) for part in qkv.split([width, kv_heads * dim, kv_heads * dim], -1))
        if attention.get("rope"):
            theta, factor = attention.get("rope_theta", 1e4), attention.get("rope_hf_config", {}).get("factor", 1.0)
            q, k = _turn(q, theta, factor), _turn(k, theta, factor)
        k, v = (part.repeat_interleave(heads // kv_heads, 0) for part in (k, v))
        scores = q @ k.transpose(1, 2) / dim**0.5
        if attention.get("alibi"):
            slopes = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)
            scores = scores + slopes[:, None, None] * (torch.arange(length) - length + 1)
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        x = x + linear(f"{at}.attn.out_proj", (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, width))
        inner = _norm(w, f"{at}.norm_2", x, rms)
        if ffn.get("ffn_type") == "mptglu":
            inner = function(linear(f"{at}.ffn.gate", inner), **act) * linear(f"{at}.ffn.up_proj", inner)
        else:
            inner = function(linear(f"{at}.ffn.up_proj", inner), **act)
        x = x + linear(f"{at}.ffn.down_proj", inner)
    return _norm(w, "transformer.norm_f", x, rms) @ w.get("lm_head.weight", w["transformer.wte.weight"]).T
