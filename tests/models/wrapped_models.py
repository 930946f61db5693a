"""Small models of transformers that read pictures too, with random weights, and the same under the names of before."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers

from roofline.weights.to_hf import hf_config

VOCAB = 96
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 256}
SHAPE |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
SIGLIP |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
PIXTRAL = SIGLIP | {"model_type": "pixtral", "head_dim": 16}
CLIP = SIGLIP | {"model_type": "clip_vision_model"}
QWEN_VISION = {"hidden_size": 32, "intermediate_size": 32, "depth": 2, "num_heads": 2, "out_hidden_size": 64}
QWEN_VISION |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
PLAIN_VISION = {key: value for key, value in QWEN_VISION.items() if key != "deepstack_visual_indexes"}
HYBRID = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "rms_norm_eps": 1e-4}
HYBRID |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
HYBRID_ROPE = QWEN_ROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}
HYBRID_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
HYBRID_EXPERTS |= {"shared_expert_intermediate_size": 40, "rope_parameters": HYBRID_ROPE}
LATENT = {"num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16}
LATENT |= {"qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 1}
LATENT |= {"topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
KIMI_VISION = {"model_type": "kimi_k25_vision", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
KIMI_VISION |= {"intermediate_size": 32, "pos_emb_height": 4, "pos_emb_width": 4, "patch_size": 14}
GLM_VISION = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
GLM_VISION |= {"image_size": 28, "patch_size": 14}
GLM_EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "attention_bias": True}
GLM_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
IMAGE_ID = 90
# model_type -> the config.json of a small model
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": SHAPE | {"model_type": "gemma3_text", "sliding_window": 9, "query_pre_attn_scalar": 24},
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 4,
        **{"image_token_index": IMAGE_ID, "boi_token_index": 91, "eoi_token_index": 92},
    },
    "mistral3": {
        "text_config": SHAPE | {"model_type": "mistral", "sliding_window": None, "rms_norm_eps": 1e-5},
        "vision_config": PIXTRAL,
        "image_token_index": IMAGE_ID,
        "tie_word_embeddings": False,
    },
    "kimi_k25": {
        "text_config": SHAPE | LATENT | {"model_type": "deepseek_v3"},
        "vision_config": KIMI_VISION,
        **{"image_token_id": IMAGE_ID, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93},
        **{"tie_word_embeddings": False, "projection_hidden_size": 32},
    },
    "llava": {
        "text_config": SHAPE | {"model_type": "llama"},
        "vision_config": CLIP,
        "image_token_index": IMAGE_ID,
    },
    "qwen3_vl": {
        "text_config": SHAPE | {"model_type": "qwen3_vl_text", "rope_parameters": QWEN_ROPE},
        "vision_config": QWEN_VISION | {"model_type": "qwen3_vl_vision"},
        **{"image_token_id": IMAGE_ID, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93},
        "tie_word_embeddings": True,
    },
    "qwen3_vl_moe": {
        "text_config": SHAPE | EXPERTS | {"model_type": "qwen3_vl_moe_text", "rope_parameters": QWEN_ROPE},
        "vision_config": QWEN_VISION | {"model_type": "qwen3_vl_moe_vision"},
        **{"image_token_id": IMAGE_ID, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93},
        "tie_word_embeddings": False,
    },
    "glm4v_moe": {
        "text_config": SHAPE | GLM_EXPERTS | {"model_type": "glm4v_moe_text", "rope_parameters": GLM_ROPE},
        "vision_config": GLM_VISION | {"model_type": "glm4v_moe_vision"},
        **{"image_token_id": IMAGE_ID, "video_token_id": 91, "image_start_token_id": 92, "image_end_token_id": 93},
        **{"video_start_token_id": 94, "video_end_token_id": 95, "tie_word_embeddings": False},
    },
    "qwen3_5": {
        "text_config": SHAPE | HYBRID | {"model_type": "qwen3_5_text", "rope_parameters": HYBRID_ROPE},
        "vision_config": PLAIN_VISION | {"model_type": "qwen3_5_vision"},
        **{"image_token_id": IMAGE_ID, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93},
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe": {
        "text_config": SHAPE | HYBRID | HYBRID_EXPERTS | {"model_type": "qwen3_5_moe_text"},
        "vision_config": PLAIN_VISION | {"model_type": "qwen3_5_moe_vision"},
        **{"image_token_id": IMAGE_ID, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93},
        "tie_word_embeddings": False,
    },
}


def wrapped(kind: str, changes: Mapping[str, Any] | None = None, text: Mapping[str, Any] | None = None) -> Any:
    """A model with random weights. changes: other values of its configuration; text: of its text part's."""
    fields = CONFIGS[kind] | dict(changes or {})
    fields["text_config"] = fields["text_config"] | dict(text or {})
    built = transformers.AutoConfig.for_model(kind, **fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(built, attn_implementation="eager").float().eval()
    less = float(kind == "gemma3" or kind.startswith("qwen3_5"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "norm" in name and "bias" not in name
            lacks = less * (norm and "linear_attn" not in name and "visual" not in name)
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (norm and 1.0) - lacks)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    return model


def around(kind: str, config: Mapping[str, Any]) -> Any:
    """The same around a text part of a canonical configuration."""
    fields = hf_config(dict(config))
    del fields["architectures"]
    if fields["model_type"] != "mistral4":  # else the text part is of the type that the whole mostly has
        del fields["model_type"]
    if kind.startswith("qwen3_"):
        half = (config.get("rotary_dim") or config["head_dim"]) // 2
        sections = {"mrope_section": [half // 2, half // 4, half - half // 2 - half // 4], "mrope_interleaved": True}
        fields["rope_parameters"] = {**fields["rope_parameters"], **sections}
    if kind == "glm4v_moe":
        half = (config.get("rotary_dim") or config["head_dim"]) // 2
        fields["rope_parameters"]["mrope_section"] = [half // 2, half // 4, half - half // 2 - half // 4]
    changes = {key: VOCAB + 100 for key in CONFIGS[kind] if "_token_i" in key}  # no id of a prompt here is for pictures
    return wrapped(kind, changes | {"tie_word_embeddings": config["tied"]}, fields)


def older_name(name: str) -> str:
    """What a tensor was called before transformers 5: the text model, with its head, was a model of its own."""
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    name = name.removeprefix("model.")
    return name.replace("language_model.", "language_model.model.", 1) if name.startswith("language_model.") else name


def logits_of(model: Any, ids: list[int]) -> Any:
    """float32 [len(ids), vocab] of a text, as transformers computes them."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()
