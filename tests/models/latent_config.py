"""A small config.json of DeepSeek-V2, and the bytes of a token that a cache of it takes in 16 bits in either form."""

DEEPSEEK = {
    "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 96, "hidden_size": 64,
    "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "kv_lora_rank": 64, "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "first_k_dense_replace": 1, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "hidden_act": "silu", "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
# Layers, bytes of a number, columns of a token and layer: of a compressed row; of keys and of values of all heads.
ROW_BYTES = 2 * 2 * (64 + 16)
EXPANDED_BYTES = 2 * 2 * (2 * 4 * (32 + 16))
