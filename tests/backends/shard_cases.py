"""Models and steps for the tests of ranks."""

import numpy as np
import program_builders as builders

from roofline.ops.batch import NO_SLOT, BatchLimits, Segment, StateMove

LIMITS = BatchLimits(tokens=64, segments=8, rows=64, pages=64, state_slots=8)
IDS = [int(i) for i in np.random.default_rng(3).integers(0, 96, 40)]
WHOLE = [([Segment(IDS, 0, [5, 2, 9])], list(range(40)))]
FIRST, SECOND = (StateMove(NO_SLOT, slot) for slot in (5, 2))  # where the state of two sequences begins and goes on
FIRST_ON, SECOND_ON = (StateMove(slot, slot) for slot in (5, 2))
CHUNKS = [  # the same rows in pieces, beside other sequences; one step wants no logits
    ([Segment(IDS[:17], 0, [4, 11], state=FIRST)], list(range(17))),
    ([Segment(IDS[:5], 0, [8], state=SECOND)], []),
    (
        [Segment(IDS[5:7], 5, [8], state=SECOND_ON), Segment(IDS[17:39], 17, [4, 11, 6], state=FIRST_ON)],
        list(range(2, 24)),
    ),
    ([Segment(IDS[39:], 39, [4, 11, 6], state=FIRST_ON), Segment([3], 7, [8], state=SECOND_ON)], [0]),
]
MODELS = {
    "llama": builders.BASE | {"head_dim": 32},
    "qwen3": builders.QWEN3,
    "qwen2": builders.QWEN2,
    "mistral": builders.MISTRAL | {"kv_heads": 1},
    "groups of three": builders.BASE | {"heads": 9, "kv_heads": 3, "head_dim": 32, "ffn": 192},
    "mpt": builders.MPT,
    "mpt-rope": builders.MPT | {"kv_heads": 2, "positions": "rope", "rms": True, "gated": True, "activation": "silu"},
    "gpt_neox": builders.MPT | {"family": "gpt_neox", "positions": "rope", "rotary_dim": 8, "attention_bias": True},
    "opt": builders.MPT
    | {"family": "opt", "activation": "relu", "embed_width": 32, "norm_first": False, "last_norm": False},
    "alibi": builders.MPT_ALIBI | {"heads": 6, "kv_heads": 6, "ffn": 320},
}
_MIXTURE = builders.BASE | {"ffn": 96, "experts": 5, "experts_per_token": 2, "tied": False}
_SMALL_MIXTURE = {"family": "mixtral", "layers": 1}
_LATENT = {"kv_heads": 4, "head_dim": 32, "rotary_dim": 16, "rope_style": "interleaved", "kv_rank": 32, "value_dim": 24}
# A case or more of every family; those of MODELS are computed by other tests too.
FAMILIES = {
    "phi3": builders.BASE | {"family": "phi3", "sliding_window": 9},
    "phi3 uneven": builders.BASE | {"family": "phi3", "ffn": 96, "kv_heads": 1, "layers": 1},
    "hyperclovax": builders.BASE | {"family": "hyperclovax", "residual_multiplier": 0.5, "layers": 1},
    "vaultgemma": builders.BASE
    | {"family": "vaultgemma", "query_scalar": 24.0, "attention_cap": 5.0, "logit_cap": 3.0, "layers": 1},
    "glm": builders.BASE | {"family": "glm", "rope_style": "interleaved", "rotary_dim": 8, "layers": 1},
    "glm4": builders.BASE | {"family": "glm4", "rope_style": "interleaved", "rotary_dim": 8, "attention_bias": True},
    "gemma": builders.BASE
    | {"family": "gemma", "query_scalar": 24.0, "attention_cap": 5.0, "logit_cap": 3.0, "layer_windows": [9, 0]},
    "gemma, one kv head": builders.BASE
    | {"family": "gemma", "query_scalar": 24.0, "qk_norm": True, "local_theta": 1e4, "kv_heads": 1}
    | {"layer_windows": [9, 0]},
    "qwen3, one kv head": builders.QWEN3 | {"kv_heads": 1, "layers": 1},
    "smollm3": builders.BASE | {"family": "smollm3", "turning": [True, False]},
    "ministral3": builders.BASE | {"family": "ministral3", "query_beta": 0.4, "query_context": 8, "kv_heads": 1},
    "arcee": builders.BASE | {"family": "arcee", "activation": "relu_squared", "layers": 1},
    "granite": builders.BASE | {"family": "granite", "residual_multiplier": 0.3, "logits_scaling": 1.7, "layers": 1},
    "granite_moe": _MIXTURE
    | {"family": "granite_moe", "residual_multiplier": 0.3, "logits_scaling": 1.7, "shared_ffn": 160, "layers": 1},
    "seed_oss": builders.BASE
    | {"family": "seed_oss", "attention_bias": True, "output_bias": True, "mlp_bias": True, "layers": 1},
    "ernie4_5": builders.BASE | {"family": "ernie4_5", "rope_style": "interleaved", "layers": 1},
    "exaone4": builders.BASE
    | {"family": "exaone4", "qk_norm": True, "turning": [True, False], "layer_windows": [9, 0]},
    "hunyuan": builders.BASE | {"family": "hunyuan", "qk_norm": True, "kv_heads": 2, "layers": 1},
    "gpt2": builders.MPT | {"family": "gpt2", "activation": "gelu_tanh", "layers": 1},
    "bert": builders.MPT | {"family": "bert", "token_types": 2, "layers": 1},
    "mixtral": _MIXTURE | _SMALL_MIXTURE,
    "qwen_moe": _MIXTURE | {"family": "qwen_moe", "attention_bias": True, "renormalise": False, "shared_ffn": 160},
    "routed": _MIXTURE
    | {"family": "routed", "score": "sigmoid", "choice_bias": True, "groups": 3, "kept_groups": 2, "experts": 6}
    | {"dense": [0], "dense_ffn": 96, "shared_ffn": 160, "routed_scale": 2.5},
    "hunyuan_moe": _MIXTURE | {"family": "hunyuan_moe", "qk_norm": True, "shared_ffn": 96, "layers": 1},
    "gemma4": builders.BASE  # scores are not scaled: wide heads and many layers would show the rounding before them
    | {"family": "gemma4", "qk_norm": True, "layers": 2, "global_head_dim": 16, "global_kv_heads": 2}
    | {"sharing_layers": 1, "layer_width": 32, "layer_vocab": 96, "scales_layers": False},
    "gemma4, experts": _MIXTURE
    | {"family": "gemma4", "qk_norm": True, "layer_windows": [9, 0], "local_theta": 1e4, "expert_ffn": 96}
    | {"global_head_dim": 32, "global_kv_heads": 2, "keys_as_values": True},
    "gemma3n": builders.BASE
    | {"family": "gemma3n", "qk_norm": True, "layer_windows": [9, 0], "local_theta": 1e4, "laurel_rank": 32}
    | {"layer_width": 32, "layer_vocab": 96},
    "gemma1": builders.BASE | {"family": "gemma1", "kv_heads": 1, "layers": 1},
    # Four value heads of 16 are two blocks of Q8_0; their key heads and those of attention are two.
    "qwen3_5": builders.HYBRID | {"value_dim": 16},
    "qwen3_5 tiled": builders.HYBRID | {"value_heads": 6, "tiled": True, "attention_bias": True},
    "qwen3_5 with more experts": _MIXTURE
    | {"family": "qwen3_5", "recurrent": [True, False], "rotary_dim": 8, "qk_norm": True, "shared_ffn": 160}
    | {"key_heads": 3, "value_heads": 6, "key_dim": 16, "value_dim": 8},
    "lfm2": builders.BASE | {"family": "lfm2", "qk_norm": True, "recurrent": [True, False], "width": 96},
    "lfm2, a convolution last": builders.BASE
    | {"family": "lfm2", "qk_norm": True, "recurrent": [False, True], "width": 96},
    "lfm2, experts": _MIXTURE
    | {"family": "lfm2", "qk_norm": True, "recurrent": [False, True], "width": 96, "score": "sigmoid"}
    | {"choice_bias": True, "dense": [0], "dense_ffn": 96},
    "gpt_oss": _MIXTURE
    | {"family": "gpt_oss", "layer_windows": [9, 0], "attention_bias": True, "output_bias": True, "swiglu_limit": 0.7},
}
FAMILIES |= {
    "deepseek": _MIXTURE | _LATENT | {"family": "deepseek", "shared_ffn": 96, "routed_scale": 2.5},
    "deepseek-latent": _MIXTURE | _LATENT | {"family": "deepseek", "shared_ffn": 96, "q_rank": 32, "latent": True},
    "mimo2": _MIXTURE
    | {
        "family": "mimo2",
        "window_kv_heads": 4,
        "head_dim": 32,
        "value_dim": 24,
        "layer_windows": [9, 0],
        "choice_bias": True,
    },
    "youtu": builders.BASE | _LATENT | {"family": "youtu"},
    "minicpm3": builders.BASE | _LATENT | {"family": "minicpm3", "residual_multiplier": 0.5, "latent": True},
}
_SCANS = {"inner": 128, "scan_heads": 8, "states": 16, "positions": "none"}
_ONLY_SCANS = builders.BASE | {"heads": 0, "kv_heads": 0, "head_dim": 0, "ffn": 0, "positions": "none", "inner": 128}
_ONLY_SCANS |= {"recurrent": [True] * builders.BASE["layers"], "states": 8}
_FALCON = builders.BASE | _SCANS | {"family": "falcon_h1", "recurrent": [True, True], "positions": "rope"}
FAMILIES |= {
    "mamba": _ONLY_SCANS | {"family": "mamba", "rank": 4},
    "mamba, plain norms": _ONLY_SCANS | {"family": "mamba", "rank": 4, "scan_norms": "plain", "conv_bias": False},
    "mamba, norms": _ONLY_SCANS
    | {"family": "mamba", "rank": 4, "scan_norms": "weights", "layers": 1}
    | {"recurrent": [True]},
    "mamba2": _ONLY_SCANS | {"family": "mamba2", "scan_heads": 6, "inner": 96},
    "mamba2, groups": _ONLY_SCANS | {"family": "mamba2", "scan_heads": 8, "groups": 4},
    "mamba2, two groups": _ONLY_SCANS | {"family": "mamba2", "scan_heads": 8, "groups": 2},
    "granite_hybrid": builders.BASE | _SCANS | {"family": "granite_hybrid", "recurrent": [True, False]},
    "granite_hybrid, experts": _MIXTURE | _SCANS | {"family": "granite_hybrid", "recurrent": [False, True]},
    "nemotron_h": _MIXTURE
    | _SCANS
    | {"family": "nemotron_h", "layers": 4, "recurrent": [True, False, False, False]}
    | {"groups": 4, "dense": [1], "dense_ffn": 96, "sparse": [2], "activation": "relu_squared", "latent": 32},
    "nemotron_h, a scan last": builders.BASE
    | _SCANS
    | {"family": "nemotron_h", "layers": 3, "recurrent": [False, False, True], "dense": [1], "dense_ffn": 96},
    "jamba": builders.BASE
    | {"family": "jamba", "inner": 128, "states": 16, "rank": 4, "positions": "none", "recurrent": [True, False]},
    "bamba": builders.BASE | _SCANS | {"family": "bamba", "recurrent": [True, False], "positions": "rope"},
    "falcon_h1": _FALCON,
    "falcon_h1, parts": _FALCON
    | {"part_multipliers": [0.5, 0.7, 1.5, 0.8, 1.2], "scan_norm": "behind", "groups": 2, "scan_in_multiplier": 1.1},
    "falcon_h1, norm before": _FALCON
    | {"scan_norm": "before", "groups": 1, "part_multipliers": [0.5, 0.7, 1.5, 0.8, 1.2]},
}
# Families that no pass divides, by their names in docs/how-to/parallel.md.
REFUSED = {
    "OLMo 2": builders.BASE | {"family": "olmo2", "tied": False},
    "OLMo 3": builders.BASE | {"family": "olmo2", "tied": False, "layer_windows": [9, 0], "local_theta": 1e4},
    "FlexOlmo": _MIXTURE | {"family": "flex_olmo", "qk_norm": True, "wide_qk_norm": True, "layers": 1},
}
# Likewise, of families that are divided otherwise.
REFUSED_FORMS = {
    "OLMoE and MiniMax-M2": _MIXTURE | {"family": "olmoe", "qk_norm": True, "wide_qk_norm": True},
}


def build(name: str, form: str) -> builders.Model:
    """A model of that name with all matrices in one format."""
    return builders.build((MODELS | FAMILIES)[name], form)
