"""Small configurations that exercise each switch of each family, and what comes of them beside transformers.

A case is compared twice: the family's own text in float32 torch, as training and the reference run it, and the cpu
backend with its 16-bit cache. The last tokens are those that the cpu backend chooses, one step after the other; at
each of them the text in torch must choose as transformers does too. It alone chooses where the backend has no kernels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers

from roofline.backends.capacity import Capacity
from roofline.common.errors import UnsupportedError
from roofline.models.forward import forward, run
from roofline.models.registry import configure
from roofline.models.spec import check, expand, tree
from roofline.ops.batch import Batch, BatchLimits, Segment
from roofline.program import target
from roofline.program.compile import compile_program
from roofline.torch.checkpoint import checkpoint_of
from roofline.weights.checkpoint import Checkpoint
from roofline.weights.families.table import files_of
from roofline.weights.latent_form import latent_form
from roofline.weights.to_hf import hf_config
from tests.models.eager import LastStates, caches_of, eager_batch
from tests.models.wrapped_models import around, settle

PROMPT, GREEDY = 90, 64
# Where the steps begin that go over the chosen tokens once more in torch: sixteen of one token, then longer ones.
CUTS = (*range(17), 19, 24, 31, 47, GREEDY - 1)
STATE_PROMPT = 140  # of models with recurrent state: transformers computes it in chunks of 64 tokens
BASE: dict[str, Any] = {
    **{"family": "llama", "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 96},
    **{"norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": None, "rope_style": "half", "max_position": 1024},
    **{"tied": True, "attention_bias": False, "qk_norm": False, "sliding_window": None},
}
LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64.0}
UNCUT = YARN | {"truncate": False}
LLAMA3 = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64.0}
GEMMA2 = BASE | {"family": "gemma", "layers": 4, "head_dim": 32, "layer_windows": [9, 0, 9, 0], "query_scalar": 24.0}
GEMMA2 |= {"attention_cap": 5.0, "logit_cap": 3.0, "norm_eps": 1e-6}
GEMMA3 = GEMMA2 | {"qk_norm": True, "attention_cap": 0.0, "logit_cap": 0.0, "local_theta": 1e4, "rope_theta": 1e6}


@dataclass(frozen=True)
class Case:
    """kind: the model_type; switches: what of the family it exercises, for the table of models."""

    kind: str
    switches: str
    config: Mapping[str, Any]


CASES = {
    "llama": Case("llama", "grouped queries", BASE),
    "llama_heads_of_20": Case("llama", "heads of 20, which are no whole vectors", BASE | {"head_dim": 20}),
    "llama_bias": Case(
        "llama",
        "attention_bias with that of o, mlp_bias",
        BASE | {"attention_bias": True, "output_bias": True, "mlp_bias": True, "tied": False},
    ),
    "mistral": Case("mistral", "a window", BASE | {"sliding_window": 9, "tied": False}),
    "qwen2": Case("qwen2", "biases on q, k, v", BASE | {"family": "qwen", "attention_bias": True}),
    "qwen2_windows": Case(
        "qwen2",
        "windows by layer",
        BASE | {"family": "qwen", "attention_bias": True, "layers": 4, "layer_windows": [0, 0, 9, 9]},
    ),
    "qwen3": Case("qwen3", "norms of q and k", BASE | {"family": "qwen", "qk_norm": True, "head_dim": 32}),
    "gemma2": Case("gemma2", "post-norms, caps of scores and logits, windows by layer, query scale", GEMMA2),
    "gemma2_uncapped": Case(
        "gemma2",
        "without caps, one window",
        GEMMA2 | {"attention_cap": 0.0, "logit_cap": 0.0, "layer_windows": (), "sliding_window": 9},
    ),
    "gemma3": Case("gemma3_text", "norms of q and k, two thetas, windows by layer", GEMMA3),
    "gemma3_scaled": Case(
        "gemma3_text",
        "linear scaling of the global theta, head_dim 256",
        GEMMA3 | {"rope_scaling": LINEAR, "head_dim": 256, "heads": 2, "kv_heads": 1, "query_scalar": 256.0},
    ),
}
CASES |= {
    "phi3": Case("phi3", "fused q, k, v and gate, up; a window", BASE | {"family": "phi3", "sliding_window": 9}),
    "phi4_mini": Case("phi3", "partial rotary", BASE | {"family": "phi3", "rotary_dim": 12, "tied": True}),
    "smollm3": Case(
        "smollm3",
        "layers without rope",
        BASE | {"family": "smollm3", "layers": 4, "turning": [True, False, True, False]},
    ),
    "smollm3_windows": Case(
        "smollm3",
        "windows where there is no rope, biases",
        BASE
        | {"family": "smollm3", "layers": 3, "turning": [True, False, False], "layer_windows": [0, 9, 9]}
        | {"attention_bias": True, "output_bias": True, "mlp_bias": True},
    ),
    "granite": Case(
        "granite",
        "multipliers of embeddings, branches, scores and logits",
        BASE
        | {"family": "granite", "embedding_multiplier": 6.0, "residual_multiplier": 0.3}
        | {"attention_multiplier": 0.11, "logits_scaling": 1.7},
    ),
    "olmo2": Case(
        "olmo2", "post-norms alone, norms of q and k over all heads", BASE | {"family": "olmo2", "tied": False}
    ),
    "glm4": Case(
        "glm4",
        "post-norms, half of each head turned in neighbouring pairs, biases on q, k, v",
        BASE | {"family": "glm4", "rope_style": "interleaved", "rotary_dim": 8, "attention_bias": True, "tied": False},
    ),
    "olmo3": Case(
        "olmo3",
        "windows by layer, which turn without the YaRN of the others",
        BASE
        | {"family": "olmo2", "tied": False, "layers": 4, "layer_windows": [9, 9, 9, 0], "rope_scaling": YARN}
        | {"local_theta": 1e4},
    ),
    "olmo3_thetas": Case(
        "olmo3",
        "a window in all layers, another theta than that of layers without one",
        BASE | {"family": "olmo2", "sliding_window": 40, "local_theta": 3e4},
    ),
    "exaone4": Case(
        "exaone4",
        "post-norms alone, norms of q and k of each head, no window",
        BASE | {"family": "exaone4", "qk_norm": True, "turning": [True, True]},
    ),
    "exaone4_windows": Case(
        "exaone4",
        "windows by layer, no rope where there is none, the scaling of Llama 3.1",
        BASE
        | {"family": "exaone4", "qk_norm": True, "layers": 4, "layer_windows": [9, 9, 9, 0], "head_dim": 32}
        | {"turning": [True, True, True, False], "rope_scaling": LLAMA3, "tied": False},
    ),
    "exaone4_unturned": Case(
        "exaone4",
        "a window that no layer has, so that none turns",
        BASE | {"family": "exaone4", "qk_norm": True, "turning": [False, False], "kv_heads": 1},
    ),
    "hunyuan": Case(
        "hunyuan_v1_dense",
        "norms of q and k behind rope",
        BASE | {"family": "hunyuan", "qk_norm": True, "head_dim": 32},
    ),
    "hunyuan_biases": Case(
        "hunyuan_v1_dense",
        "biases of attention, one head of k",
        BASE
        | {"family": "hunyuan", "qk_norm": True, "kv_heads": 1, "tied": False}
        | {"attention_bias": True, "output_bias": True},
    ),
    "gemma": Case(
        "gemma", "GeGLU, embeddings by the root of the width, heads of 32", BASE | {"family": "gemma1", "head_dim": 32}
    ),
    "helium": Case(
        "helium",
        "neighbouring pairs turned, biases on q, k, v and in the MLP",
        BASE
        | {"family": "helium", "rope_style": "interleaved", "attention_bias": True, "mlp_bias": True, "tied": False},
    ),
    "seed_oss": Case("seed_oss", "biases on q, k, v", BASE | {"family": "seed_oss", "attention_bias": True}),
    "seed_oss_biases": Case(
        "seed_oss",
        "biases on o and in the MLP, none on q, k, v",
        BASE | {"family": "seed_oss", "output_bias": True, "mlp_bias": True, "tied": False},
    ),
    "ernie4_5": Case(
        "ernie4_5", "neighbouring pairs turned", BASE | {"family": "ernie4_5", "rope_style": "interleaved"}
    ),
    "ernie4_5_biases": Case(
        "ernie4_5",
        "use_bias, heads of 32",
        BASE
        | {"family": "ernie4_5", "rope_style": "interleaved", "head_dim": 32, "tied": False}
        | {"attention_bias": True, "output_bias": True, "mlp_bias": True},
    ),
    "gpt_oss": Case(
        "gpt_oss",
        "sinks, windows by layer, experts with biases and a clamped SwiGLU, YaRN between whole dimensions",
        BASE
        | {"family": "gpt_oss", "layers": 4, "layer_windows": [9, 0, 9, 0], "attention_bias": True, "output_bias": True}
        | {"experts": 4, "experts_per_token": 2, "swiglu_limit": 0.7, "rope_scaling": UNCUT, "tied": False},
    ),
}
SHARP = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32.0, "mscale": 1.0}
YARN_BOTH = YARN | {"mscale": 0.707, "mscale_all_dim": 1.2}
DEEPSEEK = BASE | {"family": "deepseek", "layers": 3, "kv_heads": 4, "head_dim": 32, "rotary_dim": 16, "tied": False}
DEEPSEEK |= {"rope_style": "interleaved", "kv_rank": 32, "value_dim": 24, "rope_scaling": YARN_BOTH}
DEEPSEEK |= {"ffn": 32, "experts": 6, "experts_per_token": 3, "renormalise": False, "shared_ffn": 64}
DEEPSEEK |= {"dense": [0], "dense_ffn": 96, "routed_scale": 2.5}
CASES |= {
    "deepseek_v2_lite": Case(
        "deepseek_v2",
        "attention over compressed keys and values, a dense layer before those of experts, shared experts and a factor "
        "of the others, YaRN that sharpens the softmax",
        DEEPSEEK | {"experts": 5, "experts_per_token": 2},  # none of which are nearly equal in the texts here
    ),
    "deepseek_v2": Case(
        "deepseek_v2",
        "compressed queries, experts in all layers",
        DEEPSEEK
        | {"q_rank": 48, "dense": [], "dense_ffn": 0, "rope_scaling": None, "experts": 5, "experts_per_token": 2},
    ),
    "deepseek_v2_groups": Case(
        "deepseek_v2",
        "experts of the best groups",
        DEEPSEEK | {"groups": 3, "kept_groups": 2, "group_score": "best", "rope_scaling": None},
    ),
}
YARN_ALIKE = YARN | {"mscale": 1.2, "mscale_all_dim": 1.2}
DEEPSEEK3 = DEEPSEEK | {"q_rank": 48, "score": "sigmoid", "choice_bias": True, "renormalise": True, "shared_ffn": 32}
DEEPSEEK3 |= {"groups": 3, "kept_groups": 2, "rope_scaling": YARN_ALIKE}
MISTRAL4 = DEEPSEEK | {"q_rank": 48, "renormalise": True, "dense": [], "dense_ffn": 0, "routed_scale": 1.0}
MISTRAL4 |= {"query_beta": 0.4, "query_context": 32, "shared_ffn": 32, "head_dim": 24, "rotary_dim": 8}
MISTRAL4 |= {"rope_scaling": SHARP | {"mscale_all_dim": 1.0}}
YOUTU = BASE | {"family": "youtu", "kv_heads": 4, "head_dim": 24, "rotary_dim": 8, "rope_style": "interleaved"}
YOUTU |= {"kv_rank": 32, "q_rank": 48, "value_dim": 16}
MINICPM3 = YOUTU | {"family": "minicpm3", "rope_style": "half", "embedding_multiplier": 12.0, "norm_eps": 1e-5}
MINICPM3 |= {"residual_multiplier": 1.4 / 2**0.5, "head_divisor": 0.25}
MINICPM3_LONG = MINICPM3 | {"q_rank": 0, "tied": False, "head_divisor": 1.6, "max_position": 1024}
MINICPM3_LONG |= {
    "rope_scaling": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64.0,
        "attention_factor": 1.2,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 1.5, 2.5, 4.0],
    }
}
CASES |= {
    "deepseek_v3": Case(  # with 4 experts a token, of which none is so near another that 16 bits of attention swap them
        "deepseek_v3",
        "sigmoids within groups of experts, a bias that chooses, YaRN",
        DEEPSEEK3 | {"experts_per_token": 4},
    ),
    "deepseek_v3_half": Case(
        "deepseek_v3",
        "queries that are not compressed, halves of a head turned, weights that do not add up to 1",
        DEEPSEEK3
        | {
            "q_rank": 0,
            "rope_style": "half",
            "renormalise": False,
            "groups": 1,
            "kept_groups": 1,
            "rope_scaling": None,
        },
    ),
    "glm4_moe_lite": Case(
        "glm4_moe_lite",
        "a dense layer between, values as wide as keys",
        DEEPSEEK3
        | {"groups": 1, "kept_groups": 1, "dense": [1], "value_dim": 32, "norm_eps": 1e-5, "rope_scaling": None},
    ),
    "mistral4": Case(
        "mistral4",
        "queries that grow with the position, a softmax within groups",
        MISTRAL4 | {"groups": 3, "kept_groups": 2},
    ),
    "youtu": Case("youtu", "DeepSeek's attention in Llama's layers", YOUTU),
    "minicpm3": Case(
        "minicpm3",
        "DeepSeek's attention with halves of a head turned, multipliers of embeddings, branches and the head",
        MINICPM3,
    ),
    "minicpm3_long": Case("minicpm3", "two sets of factors of the frequencies, no compressed queries", MINICPM3_LONG),
    "youtu_untied": Case(
        "youtu", "the same with queries that are not compressed", YOUTU | {"q_rank": 0, "tied": False}
    ),
}
MINISTRAL3 = BASE | {"family": "ministral3", "tied": False, "query_beta": 0.4, "query_context": 32}
MINISTRAL3 |= {"rope_scaling": SHARP | {"mscale_all_dim": 1.0}}
ARCEE = BASE | {"family": "arcee", "activation": "relu_squared", "tied": False}
CASES |= {
    "ministral3": Case("ministral3", "queries that grow with the position, YaRN", MINISTRAL3),
    "ministral3_plain": Case(
        "ministral3",
        "queries that grow with the position, without YaRN, in a window, tied",
        MINISTRAL3 | {"rope_scaling": None, "query_context": 24, "sliding_window": 40, "tied": True},
    ),
    "arcee": Case("arcee", "an MLP without a gate, relu squared", ARCEE),
    "arcee_bias": Case(
        "arcee",
        "biases of attention and MLP, another activation, YaRN",
        ARCEE
        | {"attention_bias": True, "output_bias": True, "mlp_bias": True, "activation": "gelu_tanh"}
        | {"rope_scaling": YARN_BOTH, "tied": True},
    ),
}
FACTORS = {
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.2],
    "long_factor": [1.0, 1.2, 2.0, 3.0, 5.0, 8.0, 9.0, 9.5],
}
LONGROPE = FACTORS | {"rope_type": "longrope", "original_max_position_embeddings": 64.0, "attention_factor": 1.2}
CASES |= {
    "phi3_long": Case(
        "phi3", "longrope, texts above the original context", BASE | {"family": "phi3", "rope_scaling": LONGROPE}
    ),
    "phi3_short": Case(
        "phi3",
        "longrope, the original context is served",
        BASE | {"family": "phi3", "rope_scaling": LONGROPE | {"original_max_position_embeddings": 1024.0}},
    ),
}
PLAIN = BASE | {"kv_heads": 4, "bias": True}
LEARNED = PLAIN | {"positions": "learned"}
NEOX = PLAIN | {"family": "gpt_neox", "attention_bias": True, "rotary_dim": 4, "tied": False, "parallel": True}
OPT = LEARNED | {"family": "opt", "activation": "relu", "norm_first": True, "last_norm": True, "embed_width": 0}
CASES |= {
    "gpt_neox": Case("gpt_neox", "attention beside the MLP, a quarter of each head turned, biases", NEOX),
    "gpt_neox_serial": Case(
        "gpt_neox",
        "the MLP behind attention, whole heads turned, no biases of attention, gelu by tanh, tied",
        NEOX
        | {"parallel": False, "rotary_dim": None, "attention_bias": False, "activation": "gelu_tanh", "tied": True},
    ),
    "gpt_neox_heads_of_18": Case(
        "gpt_neox", "heads of 18, four dimensions of which are turned", NEOX | {"width": 72, "head_dim": 18}
    ),
    "gpt2": Case("gpt2", "learned positions, gelu by tanh", LEARNED | {"family": "gpt2", "activation": "gelu_tanh"}),
    "gpt2_heads_of_12": Case(
        "gpt2", "heads of 12", LEARNED | {"family": "gpt2", "activation": "gelu_tanh", "width": 48, "head_dim": 12}
    ),
    "gpt2_relu": Case(
        "gpt2",
        "relu, a narrow MLP, a head of its own",
        LEARNED | {"family": "gpt2", "activation": "relu", "ffn": 96, "tied": False},
    ),
    "opt": Case("opt", "learned positions from the table's third row, relu", OPT),
    "opt_350m": Case(
        "opt",
        "norms behind attention and MLP, narrow embeddings",
        OPT | {"norm_first": False, "last_norm": False, "embed_width": 32},
    ),
    "opt_galactica": Case(
        "opt", "gelu, no biases, no last norm", OPT | {"activation": "gelu", "bias": False} | {"last_norm": False}
    ),
}
LINEAR_HEADS = {"key_heads": 2, "value_heads": 2, "key_dim": 16, "value_dim": 16, "taps": 4, "rotary_dim": 4}
HYBRID = BASE | LINEAR_HEADS | {"family": "qwen3_5", "layers": 4, "recurrent": [True, True, True, False]}
# Behind the rule, norms divide by the length of rows that may be near 0: 1e-6 would show the rounding before it.
HYBRID |= {"qk_norm": True, "norm_eps": 1e-4, "tied": False}
SHARED_EXPERT = {"ffn": 32, "experts": 6, "experts_per_token": 2, "shared_ffn": 48}
CASES |= {
    "qwen3_5": Case(
        "qwen3_5_text", "gated DeltaNet in three of four layers, gated attention, norms of q and k", HYBRID
    ),
    "qwen3_5_groups": Case(
        "qwen3_5_text",
        "two value heads for each key head, values wider than keys, biases of attention, whole heads turned, tied",
        HYBRID
        | {"value_heads": 4, "value_dim": 24, "recurrent": [True, False, False, True], "rotary_dim": None}
        | {"attention_bias": True, "output_bias": True, "tied": True},
    ),
    "qwen3_5_moe": Case(
        "qwen3_5_moe_text", "experts and a scaled shared one", HYBRID | SHARED_EXPERT | {"value_heads": 4}
    ),
    "qwen3_next": Case(
        "qwen3_next",
        "q, k, v and z of a key head in turn, two value heads for each, experts and a scaled shared one",
        HYBRID | SHARED_EXPERT | {"family": "qwen3_next", "value_heads": 4, "norm_eps": 1e-3},
    ),
    "qwen3_next_dense": Case(
        "qwen3_next",
        "no experts, as many value heads as key heads, attention first",
        HYBRID | {"family": "qwen3_next", "recurrent": [False, True, True, False]},
    ),
}
ROUTED = BASE | {"ffn": 32, "experts": 6, "experts_per_token": 2, "tied": False}
SIGMOID = ROUTED | {"score": "sigmoid", "choice_bias": True, "renormalise": True, "routed_scale": 2.5, "shared_ffn": 64}
SIGMOID |= {"dense": [0], "dense_ffn": 96}
CASES |= {
    "glm4_moe": Case(
        "glm4_moe",
        "sigmoids with a bias that chooses, a dense layer before those of experts, shared experts and a factor of the "
        "others, norms of q and k, half of each head turned, biases on q, k, v",
        SIGMOID
        | {"family": "glm4_moe", "rotary_dim": 8, "attention_bias": True, "qk_norm": True, "ffn": 24, "shared_ffn": 48},
    ),
    "glm4_moe_groups": Case(
        "glm4_moe",
        "groups of experts, whose weights do not add up to 1, whole heads turned, no dense layer",
        SIGMOID
        | {"family": "glm4_moe", "groups": 3, "kept_groups": 2, "renormalise": False, "dense": [], "dense_ffn": 0}
        | {"ffn": 48, "shared_ffn": 96},
    ),
    "dots1": Case(
        "dots1",
        "norms of q and k, one expert that all tokens go to",
        SIGMOID | {"family": "dots1", "qk_norm": True, "shared_ffn": 32, "kv_heads": 4},
    ),
    "dots1_windows": Case(
        "dots1",
        "a window in the last layers, biases of attention, groups",
        SIGMOID
        | {"family": "dots1", "qk_norm": True, "layer_windows": [0, 9], "groups": 2, "kept_groups": 1}
        | {"attention_bias": True, "output_bias": True},
    ),
    "olmoe": Case(
        "olmoe",
        "norms of q and k over all heads, softmax whose chosen do not add up to 1",
        ROUTED
        | {"family": "olmoe", "qk_norm": True, "wide_qk_norm": True, "renormalise": False, "kv_heads": 4, "ffn": 24},
    ),
    "olmoe_biases": Case(
        "olmoe",
        "weights that add up to 1, biases of attention, tied",
        ROUTED
        | {"family": "olmoe", "qk_norm": True, "wide_qk_norm": True, "tied": True}
        | {"attention_bias": True, "output_bias": True},
    ),
    "minimax_m2": Case(
        "minimax_m2",
        "norms of q and k over all heads, a part of each head turned, sigmoids with a bias that chooses",
        ROUTED
        | {"family": "minimax_m2", "qk_norm": True, "wide_qk_norm": True, "rotary_dim": 8, "head_dim": 32, "ffn": 40}
        | {"score": "sigmoid", "choice_bias": True, "renormalise": True},
    ),
    "ernie4_5_moe": Case(
        "ernie4_5_moe",
        "neighbouring pairs turned, softmax with a bias that chooses, a dense layer first, shared experts, tied",
        ROUTED
        | {"family": "ernie4_5_moe", "rope_style": "interleaved", "choice_bias": True, "shared_ffn": 64, "tied": True}
        | {"dense": [0], "dense_ffn": 128},
    ),
    "ernie4_5_moe_between": Case(
        "ernie4_5_moe",
        "dense layers between those of experts, none shared",
        ROUTED
        | {"family": "ernie4_5_moe", "rope_style": "interleaved", "choice_bias": True, "layers": 4}
        | {"dense": [0, 2], "dense_ffn": 96},
    ),
    "exaone_moe": Case(
        "exaone_moe",
        "windows by layer, no rope where there is none, norms of q and k, sigmoids with a bias that chooses",
        SIGMOID
        | {"family": "exaone_moe", "qk_norm": True, "layers": 4, "layer_windows": [9, 9, 9, 0]}
        | {"turning": [True, True, True, False], "dense": [0, 1]},
    ),
    "exaone_moe_between": Case(
        "exaone_moe",
        "a dense layer between those of experts, groups, layers that turn nothing",
        SIGMOID
        | {"family": "exaone_moe", "qk_norm": True, "turning": [False] * 3, "dense": [1], "groups": 2, "layers": 3}
        | {"renormalise": False},
    ),
    "mimo_v2_flash": Case(
        "mimo_v2_flash",
        "windows with sinks and twice the kv heads, another theta there, narrower values times a factor, a dense layer",
        SIGMOID
        | {"family": "mimo2", "kv_heads": 1, "window_kv_heads": 2, "head_dim": 24, "rotary_dim": 8, "value_dim": 16}
        | {"value_scale": 0.707, "local_theta": 1e3, "layers": 3, "layer_windows": [0, 9, 9], "shared_ffn": 0}
        | {"routed_scale": 1.0},
    ),
    "mimo_v2_flash_biases": Case(
        "mimo_v2_flash",
        "biases of q, k and v, groups of experts, values as wide as keys, windows in all layers but one, none dense",
        SIGMOID
        | {"family": "mimo2", "kv_heads": 2, "window_kv_heads": 4, "rotary_dim": 4, "value_dim": 16, "local_theta": 3e2}
        | {"attention_bias": True, "layer_windows": [9, 0], "groups": 3, "kept_groups": 2, "renormalise": False}
        | {"dense": [], "dense_ffn": 0, "shared_ffn": 0, "tied": True},
    ),
    "hy_v3": Case(
        "hy_v3",
        "norms of q and k, sigmoids with a bias that chooses, a dense layer, a shared expert",
        SIGMOID | {"family": "hy_v3", "qk_norm": True, "shared_ffn": 32},
    ),
    "hy_v3_biases": Case(
        "hy_v3",
        "biases of attention, a dense layer between those of experts, tied",
        SIGMOID
        | {"family": "hy_v3", "qk_norm": True, "dense": [1], "layers": 3, "tied": True}
        | {"attention_bias": True, "output_bias": True},
    ),
}
GRANITE = BASE | {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.11}
GRANITE |= {"logits_scaling": 1.7}
GRANITE_MOE = GRANITE | {"family": "granite_moe", "ffn": 32, "experts": 6, "experts_per_token": 3}
CASES |= {
    "granitemoe": Case("granitemoe", "experts between Granite's multipliers, tied", GRANITE_MOE),
    "granitemoeshared": Case(
        "granitemoeshared",
        "a shared expert beside them, biases of attention",
        GRANITE_MOE | {"shared_ffn": 48, "attention_bias": True, "output_bias": True, "tied": False},
    ),
}
LFM2 = BASE | {"family": "lfm2", "layers": 4, "recurrent": [True, True, False, True], "qk_norm": True, "taps": 3}
CHOSEN = {"ffn": 32, "experts": 6, "experts_per_token": 3, "score": "sigmoid", "choice_bias": True}
CASES |= {
    "lfm2": Case("lfm2", "short convolutions in three of four layers, norms of q and k", LFM2),
    "lfm2_biases": Case(
        "lfm2",
        "biases of the convolutions, over 4 tokens, attention first, a head of its own",
        LFM2 | {"taps": 4, "conv_bias": True, "recurrent": [False, True, True, False], "tied": False},
    ),
    "lfm2_moe": Case(
        "lfm2_moe",
        "experts chosen by sigmoids and a bias behind a dense layer",
        LFM2 | CHOSEN | {"dense": [0], "dense_ffn": 96},
    ),
    "lfm2_moe_scaled": Case(
        "lfm2_moe",
        "experts in all layers, without a bias that chooses them, weights as they are, times a factor",
        LFM2 | CHOSEN | {"choice_bias": False, "renormalise": False, "routed_scale": 1.7},
    ),
}
CASES |= {
    "hunyuan_moe": Case(
        "hunyuan_v1_moe",
        "norms of q and k behind rope, an expert that all tokens go to",
        ROUTED | {"family": "hunyuan_moe", "qk_norm": True, "ffn": 48, "shared_ffn": 48, "layers": 1},
    ),
    "hunyuan_moe_biases": Case(
        "hunyuan_v1_moe",
        "biases of attention, tied",
        ROUTED
        | {"family": "hunyuan_moe", "qk_norm": True, "shared_ffn": 32, "tied": True, "layers": 1}
        | {"attention_bias": True, "output_bias": True},
    ),
    "sarvam_moe": Case(
        "sarvam_moe",
        "q, k and v in one tensor, norms of q and k, sigmoids with a bias that chooses, a dense layer, a shared expert",
        SIGMOID | {"family": "bailing_moe", "qk_norm": True, "shared_ffn": 32},
    ),
    "sarvam_moe_groups": Case(
        "sarvam_moe",
        "half of each head turned, groups, no norms of q and k",
        SIGMOID
        | {"family": "bailing_moe", "rotary_dim": 8, "groups": 3, "kept_groups": 2, "dense": [], "dense_ffn": 0}
        | {"layers": 1},
    ),
    "flex_olmo": Case(
        "flex_olmo",
        "post-norms alone, norms of q and k over all heads, softmax whose chosen do not add up to 1",
        ROUTED | {"family": "flex_olmo", "qk_norm": True, "wide_qk_norm": True, "renormalise": False, "layers": 1},
    ),
}
# Of layers without a window a quarter of each head turns.
GEMMA4 = BASE | {"family": "gemma4", "layers": 4, "layer_windows": [9, 9, 9, 0], "qk_norm": True, "norm_eps": 1e-6}
GEMMA4 |= {"head_dim": 8, "global_head_dim": 16, "global_kv_heads": 2, "local_theta": 1e4, "rope_theta": 1e6}
GEMMA4 |= {"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.25}, "logit_cap": 3.0}
SHARING = {"layers": 5, "layer_windows": [9, 0, 9, 9, 0], "sharing_layers": 3, "wide_sharing": True}
SHARING |= {"layer_width": 32, "layer_vocab": 96}
ALONE = {"layers": 1, "layer_windows": [], "layer_width": 32, "layer_vocab": 96, "sharing_layers": 0}
BESIDE_EXPERTS = {"experts": 4, "experts_per_token": 3, "expert_ffn": 32}
CASES |= {
    "gemma4": Case(
        "gemma4_text",
        "heads by kind of layer, an embedding for each layer, layers that read the keys and values of others and have "
        "a wider MLP, a quarter of heads turned, capped logits",
        GEMMA4 | SHARING,
    ),
    "gemma4_alone": Case("gemma4_text", "one layer, with an embedding of its own", GEMMA4 | ALONE),
    "gemma4_dense": Case(
        "gemma4_text",
        "keys that are values too, fewer heads of them without a window, uncapped",
        GEMMA4 | {"keys_as_values": True, "global_kv_heads": 1, "logit_cap": 0.0},
    ),
    "gemma4_moe": Case(
        "gemma4_text",
        "experts beside the MLP, more heads of keys without a window, all of them turned, untied",
        GEMMA4 | BESIDE_EXPERTS | {"global_kv_heads": 4, "rope_scaling": None, "tied": False, "norm_eps": 1e-4},
    ),
}
GEMMA3N = BASE | {"family": "gemma3n", "layers": 4, "layer_windows": [9, 0, 9, 0], "qk_norm": True, "norm_eps": 1e-6}
GEMMA3N |= {"head_dim": 8, "local_theta": 1e4, "rope_theta": 1e6, "logit_cap": 3.0, "laurel_rank": 16, "streams": 4}
GEMMA3N |= {"layer_width": 32, "layer_vocab": 96, "sharing_layers": 2, "sparsity": [0.9, 0.0, 0.5, 0.0]}
CASES |= {
    "gemma3n": Case(
        "gemma3n_text",
        "four streams, a second way around attention, gates that are cut off, layers that read the keys of others",
        GEMMA3N,
    ),
    "gemma3n_alone": Case("gemma3n_text", "one layer", GEMMA3N | ALONE | {"sparsity": [0.9]}),
    "gemma3n_streams": Case(
        "gemma3n_text",
        "three streams of which the second is active and not scaled, MLPs of several widths, untied",
        GEMMA3N
        | {"streams": 3, "active": 1, "scales_active": False, "layer_ffns": [128, 96, 64, 64], "layer_vocab": 96}
        | {"sharing_layers": 0, "tied": False},
    ),
}
NOTHING_BUT_SCANS: dict[str, Any] = BASE | {
    **{"family": "mamba2", "heads": 0, "kv_heads": 0, "head_dim": 0, "ffn": 0, "positions": "none", "taps": 4},
    **{"recurrent": [True, True], "inner": 128, "states": 16, "conv_bias": True, "max_position": 1 << 20},
}
MAMBA2 = NOTHING_BUT_SCANS | {"scan_heads": 8, "groups": 1, "tied": False}
MAMBA = NOTHING_BUT_SCANS | {"family": "mamba", "rank": 4}
CASES |= {
    "mamba": Case("mamba", "the selective scan alone", MAMBA),
    "mamba_untied": Case(
        "mamba",
        "a head of its own, steps of more numbers, states of 10, three taps without a bias",
        MAMBA | {"tied": False, "rank": 7, "states": 10, "taps": 3, "conv_bias": False, "inner": 192},
    ),
    "falcon_mamba": Case(
        "falcon_mamba",
        "norms of B, C and steps, without weights",
        MAMBA | {"scan_norms": "plain", "scan_eps": 1e-3},
    ),
    "mamba2": Case("mamba2", "the selective scan alone, with a rate for each head", MAMBA2),
    "mamba2_groups": Case(
        "mamba2",
        "groups that share B and C and are normed by themselves, bounds of steps, no bias of the convolution",
        MAMBA2
        | {"groups": 4, "states": 20, "least_step": 0.5, "most_step": 0.8, "tied": True, "taps": 3, "conv_bias": False},
    ),
}
SCANS = {"inner": 128, "scan_heads": 8, "states": 16, "groups": 2, "taps": 4, "positions": "none", "norm_eps": 1e-4}
GRANITE_HYBRID = GRANITE | SCANS | {"family": "granite_hybrid", "layers": 4, "recurrent": [True, True, False, True]}
NEMOTRON = BASE | SCANS | {"family": "nemotron_h", "layers": 5, "recurrent": [True, False, False, True, False]}
NEMOTRON |= {"dense": [1], "dense_ffn": 96, "ffn": 96, "activation": "relu_squared", "tied": False}
NEMOTRON_MOE = NEMOTRON | {"ffn": 32, "experts": 6, "experts_per_token": 3, "shared_ffn": 48, "sparse": [2]}
NEMOTRON_MOE |= {"routed_scale": 1.7}
FALCON = BASE | SCANS | {"family": "falcon_h1", "positions": "rope", "recurrent": [True, True], "tied": False}
PARTS: dict[str, Any] = {"scan_norm": "behind", "embedding_multiplier": 2.5, "logits_multiplier": 0.7}
PARTS |= {"gate_multiplier": 0.8, "down_multiplier": 1.3, "key_multiplier": 0.6, "attention_in_multiplier": 0.9}
PARTS |= {"attention_out_multiplier": 1.2, "scan_in_multiplier": 0.7, "scan_out_multiplier": 1.4}
PARTS |= {"part_multipliers": [0.9, 1.1, 0.8, 0.7, 1.2]}
CASES |= {
    "granitemoehybrid": Case("granitemoehybrid", "Mamba-2 in three of four layers, no positions", GRANITE_HYBRID),
    "granitemoehybrid_turned": Case(
        "granitemoehybrid",
        "layers that turn, steps within bounds, channels of three widths, biases of attention, none of convolutions",
        GRANITE_HYBRID
        | {"positions": "rope", "inner": 192, "least_step": 0.05, "most_step": 0.9, "tied": False}
        | {"attention_bias": True, "output_bias": True, "conv_bias": False},
    ),
    "granitemoehybrid_experts": Case(
        "granitemoehybrid",
        "experts and a shared one beside them",
        GRANITE_HYBRID | {"ffn": 32, "experts": 6, "experts_per_token": 3, "shared_ffn": 48},
    ),
    "nemotron_h": Case(
        "nemotron_h", "layers of Mamba-2, an MLP of relu squared and attention without positions, by turns", NEMOTRON
    ),
    "nemotron_h_moe": Case(
        "nemotron_h",
        "experts without a gate chosen by sigmoids and a bias within groups, a shared one, a factor",
        NEMOTRON_MOE | {"expert_groups": 3, "kept_groups": 2},
    ),
    "nemotron_h_latent": Case(
        "nemotron_h",
        "experts in another width, no layers of an MLP",
        NEMOTRON_MOE | {"latent": 32, "dense": [], "dense_ffn": 0, "sparse": [1, 2]},
    ),
    "falcon_h1": Case("falcon_h1", "Mamba-2 beside attention in each layer", FALCON),
    "falcon_h1_multipliers": Case(
        "falcon_h1", "a multiplier of each part, groups normed behind the gate", FALCON | PARTS
    ),
    "falcon_h1_biases": Case(
        "falcon_h1",
        "groups normed before the gate, biases of attention and MLP, none of convolutions, tied",
        FALCON
        | {"scan_norm": "before", "attention_bias": True, "output_bias": True, "mlp_bias": True, "tied": True}
        | {"conv_bias": False},
    ),
}
JAMBA = BASE | {"family": "jamba", "layers": 4, "recurrent": [True, True, False, True], "positions": "none"}
JAMBA |= {"inner": 128, "states": 16, "rank": 4, "scan_norms": "weights", "tied": False}
JAMBA |= {"norm_eps": 1e-3, "scan_eps": 1e-3}
JAMBA_EXPERTS = JAMBA | {"experts": 6, "experts_per_token": 2, "renormalise": False, "dense": [0, 2], "dense_ffn": 128}
BAMBA = BASE | SCANS | {"family": "bamba", "layers": 4, "recurrent": [True, True, False, True], "positions": "rope"}
BAMBA |= {"rotary_dim": 8, "tied": False}
CASES |= {
    "jamba": Case(
        "jamba", "Mamba in three of four layers, norms of B, C and steps, experts in every second layer", JAMBA_EXPERTS
    ),
    "jamba_dense": Case(
        "jamba",
        "no experts, attention in every second layer, channels of three widths, no bias of convolutions, tied",
        JAMBA
        | {"recurrent": [True, False, True, False], "inner": 192, "rank": 7, "states": 10, "taps": 3}
        | {"conv_bias": False, "tied": True},
    ),
    "jamba_experts": Case(
        "jamba",
        "experts in all layers, one of four for each token",
        JAMBA_EXPERTS
        | {"layers": 2, "recurrent": [True, False], "dense": [], "dense_ffn": 0, "experts": 4, "experts_per_token": 1},
    ),
    "bamba": Case("bamba", "Mamba-2 in three of four layers, half of each head turned in the other", BAMBA),
    "bamba_biases": Case(
        "bamba",
        "whole heads turned, biases of attention and MLP, steps within bounds, none of convolutions, tied",
        BAMBA
        | {"rotary_dim": None, "attention_bias": True, "output_bias": True, "mlp_bias": True, "tied": True}
        | {"least_step": 0.05, "most_step": 0.9, "conv_bias": False},
    ),
}
HYPERCLOVA = {key: value for key, value in GRANITE.items() if key != "logits_scaling"} | {"family": "hyperclovax"}
EXAONE3 = BASE | {"family": "exaone", "tied": False}
CASES |= {
    "exaone": Case("exaone", "Llama's model with GPT-2's names of modules", EXAONE3),
    "exaone_biases": Case(
        "exaone",
        "biases of attention and MLP, the scaling of Llama 3.1, tied",
        EXAONE3 | {"attention_bias": True, "output_bias": True, "mlp_bias": True, "rope_scaling": LLAMA3, "tied": True},
    ),
    "vaultgemma": Case(
        "vaultgemma",
        "Gemma 2 without post-norms: caps of scores and logits, windows by layer, query scale",
        GEMMA2 | {"family": "vaultgemma"},
    ),
    "vaultgemma_uncapped": Case(
        "vaultgemma",
        "without caps, one window",
        GEMMA2
        | {"family": "vaultgemma", "attention_cap": 0.0, "logit_cap": 0.0, "layer_windows": (), "sliding_window": 9},
    ),
    "hyperclovax": Case(
        "hyperclovax",
        "multipliers of embeddings, branches, scores and logits, post-norms",
        HYPERCLOVA | {"logits_multiplier": 0.6, "tied": False},
    ),
    "hyperclovax_plain": Case(
        "hyperclovax",
        "no post-norms, biases of attention and MLP",
        HYPERCLOVA | {"post_norms": False, "attention_bias": True, "output_bias": True, "mlp_bias": True},
    ),
    "glm": Case(
        "glm",
        "half of each head turned in neighbouring pairs, biases on q, k, v",
        BASE | {"family": "glm", "rope_style": "interleaved", "rotary_dim": 8, "attention_bias": True, "tied": False},
    ),
    "glm_whole": Case(
        "glm", "whole heads turned, no biases, tied", BASE | {"family": "glm", "rope_style": "interleaved"}
    ),
    "ministral": Case(
        "ministral", "windows by layer", BASE | {"layers": 4, "layer_windows": [0, 9, 9, 9], "tied": False}
    ),
}
IN_QWEN_MOE = BASE | {"family": "qwen_moe", "qk_norm": True, "head_dim": 32, "ffn": 40, "tied": False}
IN_QWEN_MOE |= {"experts": 6, "experts_per_token": 3, "renormalise": True}
# Of models that read pictures too: kind is that of the whole, config that of the text part.
WRAPPED = {
    "gemma3_with_vision": Case("gemma3", "the text part of a model that reads pictures", GEMMA3),
    "gemma4_with_vision": Case("gemma4", "the text part of a model that reads pictures and hears", GEMMA4 | SHARING),
    "gemma4_unified": Case("gemma4_unified", "the same without towers", GEMMA4 | {"rope_theta": 1e5}),
    "mistral3": Case("mistral3", "the text part of a model that reads pictures", BASE | {"tied": False}),
    "mistral3_with_mistral4": Case("mistral3", "the same with Mistral 4's text part", MISTRAL4 | {"experts": 5}),
    "kimi_k25": Case(
        "kimi_k25",
        "the text part of a model that reads pictures",
        DEEPSEEK3 | {"groups": 1, "kept_groups": 1, "experts": 7},
    ),
    "llava": Case("llava", "the text part of a model that reads pictures", BASE | {"tied": False}),
    "qwen3_vl": Case(
        "qwen3_vl",
        "the text part: rope of three dimensions, in which positions of text are the same",
        BASE | {"family": "qwen", "qk_norm": True, "head_dim": 32, "rope_theta": 5e6},
    ),
    "qwen3_vl_moe": Case("qwen3_vl_moe", "the same with experts", IN_QWEN_MOE | {"rope_theta": 5e6}),
    "glm4v_moe": Case(
        "glm4v_moe",
        "the text part: rope of three dimensions in half of each head, sigmoids with a bias that chooses",
        SIGMOID | {"family": "glm4_moe", "rotary_dim": 8, "attention_bias": True, "ffn": 40, "shared_ffn": 80},
    ),
    "qwen3_5_with_vision": Case("qwen3_5", "the text part of a model that reads pictures", HYBRID | {"norm_eps": 1e-3}),
    "qwen3_5_moe_with_vision": Case(
        "qwen3_5_moe",
        "the same with experts",
        HYBRID | SHARED_EXPERT | {"value_heads": 4, "rope_theta": 1e7, "norm_eps": 1e-3},
    ),
}
ENCODER = LEARNED | {"family": "bert", "token_types": 2, "max_position": 200}
ENCODERS = {
    "bert": Case("bert", "learned positions, norms behind attention and MLP, gelu", ENCODER),
    "bert_tanh": Case(
        "bert", "gelu by tanh, one token type, norm_eps", ENCODER | {"activation": "gelu_tanh", "token_types": 1}
        | {"norm_eps": 1e-12},
    ),
    "bert_relu": Case("bert", "relu, head_dim 32", ENCODER | {"activation": "relu", "heads": 2, "kv_heads": 2}
        | {"head_dim": 32}),
    "roberta": Case("roberta", "positions from the table's third row", ENCODER | {"first_position": 2}),
    "roberta_silu": Case(
        "roberta", "silu, positions from the table's second row",
        ENCODER | {"first_position": 1, "activation": "silu", "token_types": 1},
    ),
}  # fmt: skip
LENGTHS = 1, 2, 17, 90, 200  # tokens of the texts; the last is the longest


@dataclass(frozen=True)
class Parity:
    """Largest difference of a logit of the prompt, in torch and on the cpu backend; how many of GREEDY tokens are those
    of transformers; of the others the largest distance of its two highest logits. cpu: None: it has no kernels of it.
    eager_later: the largest difference behind the prompt, in torch."""

    eager: float
    eager_later: float
    cpu: float | None
    eager_tokens: int
    cpu_tokens: int
    tie: float


def class_of(fields: Mapping[str, Any]) -> Any:
    """transformers' class for the fields of a config.json: of Mistral 4, which it has as a part of a model that reads
    pictures alone, the automatic ones know none."""
    if fields.get("architectures") == ["Mistral4ForCausalLM"]:
        loads = transformers.Mistral4ForCausalLM
        return SimpleNamespace(from_config=loads._from_config, from_pretrained=loads.from_pretrained)
    return transformers.AutoModelForCausalLM


def their_config(config: Mapping[str, Any], kind: str = "") -> Any:
    """transformers' configuration of a model. kind: its model_type, "": what is written for the configuration."""
    fields = hf_config(dict(config))
    written = str(fields.pop("model_type"))
    if config["family"] != "bert":
        fields |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    return transformers.AutoConfig.for_model(kind or written, **fields)


def theirs(config: Mapping[str, Any]) -> Any:
    """transformers' model with random weights; norms and biases too, so that none hides behind ones and zeros."""
    built = their_config(config)
    torch.manual_seed(0)
    model = class_of(hf_config(dict(config))).from_config(built, attn_implementation="eager").float().eval()
    less = files_of(config["family"]).NAMES.norms_less
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "norm" in name or ".ln_" in name or name.endswith("scale")
            lacks = less * (norm and "linear_attn" not in name)
            parameter.copy_(torch.randn_like(parameter) * 0.1 + ((norm and "bias" not in name) - lacks))
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):  # which chooses experts
                buffer.copy_(torch.randn_like(buffer) * 0.1)
            if name.endswith("layer_scalar"):  # which files hold, though nothing trains it
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    if config["family"] in ("gemma4", "gemma3n"):
        settle(model)
    return model


def ours(source: Checkpoint) -> tuple[Any, Any, dict[str, Any]]:
    """Family, configuration and parameters of a checkpoint as torch tensors."""
    family, cfg = configure(source.config)
    table = [param for param in expand(family.spec(cfg), cfg.layers) if param.tied_to is None]
    parameters = {param.name: torch.from_numpy(source.parameter(param).copy()) for param in table}
    check(table, {name: tuple(p.shape) for name, p in parameters.items()})
    return family, cfg, parameters


class Eager:
    """A family's text on torch tensors, one sequence, step after step."""

    def __init__(self, source: Checkpoint) -> None:
        self.family, self.cfg, self.parameters = ours(source)
        self.caches, self.at = caches_of(self.cfg), 0
        self.state = LastStates(dict(self.cfg.state_parts))

    def step(self, ids: list[int]) -> np.ndarray:
        """float32 [len(ids), vocab]."""
        batch = Batch(BatchLimits(len(ids), 1, len(ids), 64))
        batch.fill([Segment(ids, self.at, range(16))], range(len(ids)))
        filled = eager_batch(batch, self.caches, [0], self.state)
        with torch.no_grad():
            logits = forward(self.family, self.cfg, self.parameters, filled)
        self.caches = [filled.cache, *filled.further]
        self.state, self.at = filled.state, self.at + len(ids)
        return logits.numpy()


class OnCpu:
    """The cpu backend, one sequence, step after step."""

    def __init__(self, source: Checkpoint, tokens: int = PROMPT) -> None:
        from roofline._native import isas
        from tests.backends.cpu_models import packed

        source = latent_form(source, latent=True)  # as a model is loaded on this backend
        family, cfg = configure(source.config)
        program = compile_program(family, cfg, source.tensors, target.CPU)
        limits = BatchLimits(tokens=tokens, segments=1, rows=tokens, pages=16, state_slots=1 if cfg.state_parts else 0)
        capacity = Capacity(limits, min(cfg.max_position, 256), 16)
        self.model = packed(program, source, capacity, isa=isas()[0], threads=1)
        self.at = 0

    def step(self, ids: list[int]) -> np.ndarray:
        """float32 [len(ids), vocab]."""
        self.model.batch.fill([Segment(ids, self.at, range(16))], range(len(ids)))
        self.model.forward()
        self.at += len(ids)
        return self.model.logits().copy()


def encoder_of(config: Mapping[str, Any], kind: str = "") -> Any:
    """transformers' encoder with random weights. kind: its model_type, "": what is written for the configuration."""
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(their_config(config, kind), attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + ("LayerNorm.weight" in name))
    return model


def measure_encoder(config: Mapping[str, Any], source: Checkpoint | None = None) -> tuple[float, float]:
    """The largest difference of a hidden value, in torch and on the cpu backend, over texts of LENGTHS. source: the
    weights from a file."""
    model = encoder_of(config)
    source = source or checkpoint_of(model)
    differences: list[tuple[float, float]] = []
    on_cpu = OnCpu(source, tokens=max(LENGTHS)).model.headless()
    for length in LENGTHS:
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(
            3, config["vocab"], (length,), generator=generator
        ).tolist()  # RoBERTa does not count padding
        with torch.no_grad():
            expected = model(torch.tensor([ids])).last_hidden_state[0].numpy()
        assert expected.std() > 0.1
        on_cpu.batch.fill([Segment(ids, 0, range(16))], range(length))
        on_cpu.forward()
        rows = _hidden(source, ids), on_cpu.logits()
        eager, cpu = (float(np.abs(each - expected).max()) for each in rows)
        differences.append((eager, cpu))
    return max(each[0] for each in differences), max(each[1] for each in differences)


def _hidden(source: Checkpoint, ids: list[int]) -> np.ndarray:
    """float32 [len(ids), width]: what the head reads, of a family's text on torch tensors."""
    family, cfg, parameters = ours(source)
    batch = Batch(BatchLimits(len(ids), 1, len(ids), 64))
    batch.fill([Segment(ids, 0, range(16))], range(len(ids)))
    weights = tree(expand(family.spec(cfg), cfg.layers), parameters)
    with torch.no_grad():
        rows = run(family, cfg, weights, eager_batch(batch, caches_of(cfg), [0]), call_head=_rows)
    return rows.numpy()  # type: ignore[no-any-return]


def _rows(head: Any, cfg: Any, w: Any, x: Any, batch: Any) -> Any:
    return x[batch.logit_rows]


def on_cpu(source: Checkpoint, tokens: int) -> OnCpu | None:
    """The cpu backend; None where it says that it has no kernels of recurrent state."""
    try:
        return OnCpu(source, tokens)
    except UnsupportedError as refusal:
        if "recurrent" in source.config and any(op in str(refusal) for op in ("'causal_conv'", "'sigmoid_mul'")):
            return None
        raise


def measure(config: Mapping[str, Any], wrapper: str = "", model: Any = None) -> Parity:
    """A configuration's model with random weights, beside transformers'. wrapper: the model_type of the model whose
    text part it is, "": it is a model of its own. model: that of transformers where it has been made."""
    model = model or (around(wrapper, config) if wrapper else theirs(config))
    source = checkpoint_of(model)
    prompt = STATE_PROMPT if "recurrent" in config else PROMPT
    ids = torch.randint(0, config["vocab"], (prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    assert expected.std() > 0.1
    runners = [runner for runner in (Eager(source), on_cpu(source, prompt)) if runner is not None]
    first = [runner.step(ids) for runner in runners]
    chosen = [int(first[-1][-1].argmax())]
    rows = [first[-1][-1:]]
    while len(chosen) < GREEDY:
        rows.append(runners[-1].step(chosen[-1:]))
        chosen.append(int(rows[-1][0].argmax()))
    with torch.no_grad():
        after = model(torch.tensor([ids + chosen[:-1]])).logits[0].numpy()[prompt - 1 :]
    equal, tie = _agreement(rows, after)
    again = rows
    if len(runners) > 1:
        again = [first[0][-1:], *(runners[0].step(chosen[start:stop]) for start, stop in pairwise(CUTS))]
    return Parity(
        eager=float(np.abs(first[0] - expected).max()),
        eager_later=float(np.abs(np.concatenate(again) - after).max()),
        cpu=float(np.abs(first[1] - expected).max()) if len(runners) > 1 else None,
        eager_tokens=_agreement(again, after)[0],
        cpu_tokens=equal if len(runners) > 1 else 0,
        tie=tie if len(runners) > 1 else 0.0,
    )


def _agreement(rows: list[np.ndarray], after: np.ndarray) -> tuple[int, float]:
    """How many of the likeliest tokens of `rows` are those of `after`, float32 [tokens, vocab] each, and how far below
    its highest logit the others lie there at most."""
    chosen = np.concatenate(rows).argmax(-1)
    lost = after.max(-1) - after[np.arange(len(after)), chosen]
    return int((after.argmax(-1) == chosen).sum()), float(lost.max())
