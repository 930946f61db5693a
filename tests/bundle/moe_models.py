"""Small random mixtures of experts as transformers writes them, and the same weights as a GGUF file."""

from pathlib import Path
from typing import Any

import numpy as np

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False}
# Model type -> transformers' name, architecture of GGUF files, the fields of its own.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", "llama", {"intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        *("Qwen2Moe", "qwen2moe"),
        {
            **{"intermediate_size": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96},
            **{"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False},
        },
    ),
    "qwen3_moe": (
        *("Qwen3Moe", "qwen3moe"),
        {
            **{"intermediate_size": 96, "moe_intermediate_size": 64, "num_experts": 20, "num_experts_per_tok": 4},
            "norm_topk_prob": True,
        },
    ),
    "gpt_oss": (
        *("GptOss", "gpt-oss"),
        {
            **{"intermediate_size": 96, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 20},
            **{"rope_parameters": {**YARN, "rope_theta": 150000.0}},
        },
    ),
}


def transformers_model(kind: str) -> Any:
    """With random weights; norms and biases too, so that none hides behind ones and zeros."""
    import torch
    import transformers

    name, _, fields = MODELS[kind]
    config = getattr(transformers, f"{name}Config")(**SIZES, **fields, attn_implementation="eager")
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.12 + ("norm" in key))
    return model


def write_gguf(path: Path, model: Any, kind: str, quantise: bool = False) -> Path:
    """The weights of a model of transformers in float32, named and laid out as converters do; quantise: matrices of the
    layers but the router's in Q4_0."""
    import gguf

    config, arch = model.config, MODELS[kind][1]
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(SIZES["head_dim"])
    writer.add_value_length(SIZES["head_dim"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    fields = MODELS[kind][2]
    writer.add_expert_count(fields.get("num_experts") or fields["num_local_experts"])
    writer.add_expert_used_count(config.num_experts_per_tok)
    if kind == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(YARN["factor"])
        writer.add_rope_scaling_orig_ctx_len(YARN["original_max_position_embeddings"])
    elif kind != "mixtral":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if kind == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    for name, values in gguf_tensors(model, kind):
        if quantise and name.endswith(".weight") and values.ndim > 1 and "ffn_gate_inp" not in name and "blk." in name:
            of_experts = kind == "gpt_oss" and "_exps" in name
            form = gguf.GGMLQuantizationType.MXFP4 if of_experts else gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor(name, gguf.quants.quantize(values, form), raw_dtype=form)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_GGUF = {
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"},
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    **{f"self_attn.{n}_proj": f"attn_{n}" for n in "qkv"},
    **{f"self_attn.{n}_norm": f"attn_{n}_norm" for n in "qk"},
    **{"self_attn.o_proj": "attn_output", "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp"},
    "mlp.router": "ffn_gate_inp",
    **{f"mlp.shared_expert.{n}_proj": f"ffn_{n}_shexp" for n in ("gate", "up", "down")},
}


def gguf_tensors(model: Any, kind: str) -> list[tuple[str, np.ndarray]]:
    """(name, float32 values) of each tensor."""
    tensors = []
    for key, tensor in model.state_dict().items():
        values = tensor.numpy().astype(np.float32)
        stem, _, suffix = key.rpartition(".")
        before = ""
        if key.startswith("model.layers."):
            _, _, layer, rest = key.split(".", 3)
            before, stem = f"blk.{layer}.", rest.rpartition(".")[0]
        if kind == "gpt_oss" and suffix in ("sinks", *_JOINED):
            tensors += [(f"{before}{name}", np.ascontiguousarray(part)) for name, part in _of_gpt_oss(suffix, values)]
            continue
        if stem == "mlp.experts":
            if suffix == "down_proj":
                tensors.append((f"{before}ffn_down_exps.weight", values))
                continue
            gate, up = np.split(values, 2, axis=1)
            tensors += [(f"{before}ffn_{name}_exps.weight", part) for name, part in (("gate", gate), ("up", up))]
            continue
        if kind == "mixtral" and stem in ("self_attn.q_proj", "self_attn.k_proj"):  # pairs side by side
            heads = values.shape[0] // SIZES["head_dim"]
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if stem == "mlp.shared_expert_gate":
            values = values[0]
        name = "post_attention_norm" if kind == "gpt_oss" and stem == "post_attention_layernorm" else _GGUF[stem]
        tensors.append((f"{before}{name}.{suffix}", np.ascontiguousarray(values)))
    return tensors


_JOINED = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


def _of_gpt_oss(part: str, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """(name, values) of the tensors that converters make of one that holds all experts, or of the sinks."""
    if part == "sinks":
        return [("attn_sinks.weight", values)]
    suffix = "bias" if part.endswith("_bias") else "weight"
    values = values if suffix == "bias" else values.swapaxes(1, 2)  # [experts, outputs, ...]
    if part.startswith("down"):
        return [(f"ffn_down_exps.{suffix}", values)]
    return [(f"ffn_{name}_exps.{suffix}", values[:, first::2]) for first, name in enumerate(("gate", "up"))]
