"""Models that llama.cpp's converter makes GGUF files of, and what of them its files, and llama.cpp, do not have.

A model is a row of CONVERTED: a canonical configuration of which transformers makes the model.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from bundle_models import byte_alphabet

from roofline.models.registry import configure
from roofline.ops.rope_tables import frequencies
from tests.models.parity_cases import (
    BASE,
    CASES,
    EXAONE3,
    FACTORS,
    GEMMA3,
    GEMMA3N,
    GEMMA4,
    JAMBA,
    LEARNED,
    LINEAR,
    NEOX,
)
from tests.weights.gguf_families import GGUF_CASES, MPT

VOCAB = 320
GELU = 5e-3  # llama.cpp takes gelu from a table in float16, and by tanh


@dataclass(frozen=True)
class ConvertedRow:
    """config: canonical; unsaid: fields of it that the converter's files do not say, and what they are read as;
    uncomputed: fields that they do say, and what llama.cpp computes instead; published: keys of config.json that
    transformers 5 does not write; most: difference of llama.cpp's logits, as a part of their standard deviation."""

    config: Mapping[str, Any]
    unsaid: Mapping[str, Any] = field(default_factory=dict)
    uncomputed: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, Any] = field(default_factory=dict)
    most: float = 1e-5


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64.0}
YARN_RAMP = YARN | {"beta_fast": 24.0, "beta_slow": 2.0}
WINDOWLESS = {"sliding_window": None}
PHI3_LONG = FACTORS | {"rope_type": "longrope", "original_max_position_embeddings": 64.0}
PHI3_LONG |= {"attention_factor": float(np.sqrt(1 + np.log(16) / np.log(64)))}  # as transformers derives it
MIXTURE = BASE | {"experts": 8, "experts_per_token": 2, "tied": False}
QWEN = BASE | {"family": "qwen"}
CUT = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64.0}  # to whole dimensions
WIDE_GPT2 = LEARNED | {"family": "gpt2", "activation": "gelu_tanh", "ffn": 256}  # the converter knows no other width
GEMMA3_BY_SIX = GEMMA3 | {"query_scalar": 32.0, "layers": 6, "layer_windows": [9, 9, 9, 9, 9, 0]}
# llama.cpp knows one rank, one width of layers' inputs and one cap, and cuts off the gates of the first ten layers, by
# the deviation of a sample, which is nearly that of all where there are many.
GEMMA3N_AS_PUBLISHED = GEMMA3N | {"layers": 6, "layer_windows": [9, 9, 9, 9, 0, 9], "ffn": 8192, "sparsity": [0.95] * 6}
GEMMA3N_AS_PUBLISHED |= {"sharing_layers": 0, "laurel_rank": 64, "layer_width": 256, "logit_cap": 30.0}
GEMMA3N_AS_PUBLISHED |= {"layer_vocab": VOCAB}

EXACT_ROWS = {"norm_eps": 1e-6}  # by which llama.cpp norms compressed rows, too; transformers always by this
SIGMOIDS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
LONG = {"max_position": 1 << 20}  # what the converter writes of models without positions

CONVERTED = {
    "deepseek_v2": ConvertedRow(
        GGUF_CASES["deepseek_v2"].config | EXACT_ROWS | {"q_rank": 48}, published={"scoring_func": "softmax"}
    ),
    "deepseek_v3": ConvertedRow(CASES["deepseek_v3"].config | EXACT_ROWS, published=SIGMOIDS),
    "glm4_moe_lite": ConvertedRow(CASES["glm4_moe_lite"].config | EXACT_ROWS | {"dense": [0]}, published=SIGMOIDS),
    "youtu": ConvertedRow(CASES["youtu"].config | EXACT_ROWS),
    "minicpm3": ConvertedRow(CASES["minicpm3"].config | EXACT_ROWS),
    "llama": ConvertedRow(BASE),
    "llama_heads_of_20": ConvertedRow(CASES["llama_heads_of_20"].config),
    "llama_bias": ConvertedRow(CASES["llama_bias"].config),
    "llama_linear": ConvertedRow(BASE | {"rope_scaling": LINEAR}),
    "llama_llama3": ConvertedRow(BASE | {"rope_scaling": LLAMA3, "rope_theta": 5e5}),
    "llama_yarn": ConvertedRow(BASE | {"rope_scaling": YARN}),
    "mistral": ConvertedRow(CASES["mistral"].config, unsaid=WINDOWLESS),
    "ministral3": ConvertedRow(CASES["ministral3"].config),
    "arcee": ConvertedRow(CASES["arcee"].config),
    "seed_oss": ConvertedRow(CASES["seed_oss"].config),
    "ernie4_5": ConvertedRow(CASES["ernie4_5"].config),
    "olmo3": ConvertedRow(CASES["olmo3"].config),
    "granitemoe": ConvertedRow(CASES["granitemoe"].config),
    "granitemoeshared": ConvertedRow(CASES["granitemoeshared"].config),
    "mamba": ConvertedRow(CASES["mamba"].config),
    "falcon_mamba": ConvertedRow(CASES["falcon_mamba"].config | {"scan_eps": 1e-5}),
    "mamba2": ConvertedRow(CASES["mamba2"].config | {"groups": 4}),
    "nemotron_h_moe": ConvertedRow(GGUF_CASES["nemotron_h_moe"].config | LONG),
    "glm": ConvertedRow(CASES["glm"].config, published={"seq_length": 1024, "layernorm_epsilon": 1e-5}),
    "exaone": ConvertedRow(
        EXAONE3 | {"rope_scaling": LLAMA3},
        published={"activation_function": "silu", "architectures": ["ExaoneForCausalLM"]},
    ),
    "jamba": ConvertedRow(CASES["jamba"].config | {"layers": 2, "recurrent": [False, True], "dense": [0]}),
    "jamba_dense": ConvertedRow(JAMBA | {"layers": 2, "recurrent": [True, False]}),
    "bamba": ConvertedRow(CASES["bamba"].config | {"rotary_dim": None}),
    "falcon_h1": ConvertedRow(CASES["falcon_h1"].config | {"scan_norm": "behind"}),
    "lfm2": ConvertedRow(CASES["lfm2"].config),
    "lfm2_moe": ConvertedRow(CASES["lfm2_moe"].config),
    "exaone4": ConvertedRow(CASES["exaone4"].config),
    "hunyuan": ConvertedRow(CASES["hunyuan"].config),
    "gemma": ConvertedRow(CASES["gemma"].config, most=GELU),
    "mixtral": ConvertedRow(MIXTURE | {"family": "mixtral", "rope_theta": 1e6}),
    "qwen2": ConvertedRow(CASES["qwen2"].config),
    "qwen2_yarn": ConvertedRow(
        QWEN | {"attention_bias": True, "tied": False, "rope_scaling": YARN_RAMP},
        uncomputed={"rope_scaling": YARN},
    ),
    "qwen3": ConvertedRow(CASES["qwen3"].config),
    "qwen3_yarn": ConvertedRow(QWEN | {"qk_norm": True, "rope_theta": 1e6, "rope_scaling": YARN}),
    "qwen2_moe": ConvertedRow(
        MIXTURE | {"family": "qwen_moe", "attention_bias": True, "renormalise": False, "shared_ffn": 96, "ffn": 32}
    ),
    "qwen3_moe": ConvertedRow(MIXTURE | {"family": "qwen_moe", "qk_norm": True, "renormalise": True, "ffn": 64}),
    "gemma2": ConvertedRow(GGUF_CASES["gemma2"].config, most=GELU),
    "gemma3": ConvertedRow(GEMMA3_BY_SIX, most=GELU),
    "gemma4": ConvertedRow(GGUF_CASES["gemma4"].config | {"layer_vocab": VOCAB}, most=GELU),
    "gemma4_dense": ConvertedRow(GGUF_CASES["gemma4_dense"].config, most=GELU),
    "gemma4_moe": ConvertedRow(CASES["gemma4_moe"].config | {"rope_scaling": GEMMA4["rope_scaling"]}, most=GELU),
    "gemma3n": ConvertedRow(GEMMA3N_AS_PUBLISHED, most=2 * GELU),
    "gemma3_scaled": ConvertedRow(GEMMA3_BY_SIX | {"rope_scaling": LINEAR}, most=GELU),
    "phi3": ConvertedRow(CASES["phi3"].config, uncomputed=WINDOWLESS),
    "phi3_long": ConvertedRow(BASE | {"family": "phi3", "rope_scaling": PHI3_LONG}),
    "phi4_mini": ConvertedRow(CASES["phi4_mini"].config),
    "smollm3": ConvertedRow(GGUF_CASES["smollm3"].config),
    "granite": ConvertedRow(CASES["granite"].config),
    "glm4": ConvertedRow(CASES["glm4"].config),
    "olmo2": ConvertedRow(CASES["olmo2"].config),
    "glm4_moe": ConvertedRow(CASES["glm4_moe"].config),
    "glm4_moe_groups": ConvertedRow(CASES["glm4_moe_groups"].config),
    "dots1": ConvertedRow(CASES["dots1"].config, published={"scoring_func": "sigmoid"}),
    "olmoe": ConvertedRow(CASES["olmoe"].config),
    "minimax_m2": ConvertedRow(CASES["minimax_m2"].config),
    "ernie4_5_moe": ConvertedRow(CASES["ernie4_5_moe"].config),
    "exaone_moe": ConvertedRow(CASES["exaone_moe"].config, published={"scoring_func": "sigmoid"}),
    "hunyuan_moe": ConvertedRow(CASES["hunyuan_moe"].config),
    "hy_v3": ConvertedRow(CASES["hy_v3"].config),
    "sarvam_moe": ConvertedRow(
        CASES["sarvam_moe"].config,
        published={"score_function": "sigmoid", "architectures": ["BailingMoeV2ForCausalLM"], "num_experts": 6}
        | {"num_shared_experts": 1},
    ),
    "gpt_oss": ConvertedRow(CASES["gpt_oss"].config | {"swiglu_limit": 7.0}, uncomputed={"rope_scaling": CUT}),
    "gpt_neox": ConvertedRow(NEOX | {"activation": "gelu"}, published={"rotary_pct": 0.25}, most=GELU),
    "gpt_neox_serial": ConvertedRow(
        NEOX | {"parallel": False, "rotary_dim": 8}, published={"rotary_pct": 0.5}, most=GELU
    ),
    "gpt2": ConvertedRow(WIDE_GPT2, published={"n_ctx": 1024}, most=GELU),
    "mpt": ConvertedRow(MPT, published={"architectures": ["MPTForCausalLM"]}, most=GELU),
}


def tokenizer_json() -> dict[str, Any]:
    """Every byte a token and a merge, and special tokens for all other rows, among them those of glm4."""
    special = ["<s>", "</s>", "<|endoftext|>", "<|user|>", *(f"<|{at}|>" for at in range(261, VOCAB))]
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": 257 + at, "content": text, **flags} for at, text in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": bytes_of,
        "post_processor": None,
        "decoder": bytes_of,
        "model": {
            "type": "BPE",
            "vocab": {token: at for at, token in enumerate([*byte_alphabet(), "hi"])},
            "merges": [["h", "i"]],
        },
    }


def save(folder: Path, model: Any, published: Mapping[str, Any]) -> Path:
    """Write a model of transformers and its tokenizer into a folder, as published ones are; return the folder."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)  # with ids of a larger vocabulary
    fields = json.loads((folder / "config.json").read_text()) | published
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def different(read: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """What two canonical configurations have otherwise, but for numbers that a file rounds to float32, the order of
    rows, and how a scaling that gives the same frequencies is written."""
    (_, one), (_, other) = configure(read), configure(expected)
    (ours, our_factor), (theirs, their_factor) = (
        frequencies(each.rope) if each.head_dim else (np.zeros(0), 1.0) for each in (one, other)
    )
    same_rope = ours.shape == theirs.shape and np.allclose(ours, theirs, rtol=1e-6, atol=0)
    same_rope = same_rope and bool(np.isclose(our_factor, their_factor, rtol=1e-6))
    skipped = {"rope_style", *(("rope_scaling",) if same_rope else ())}
    return [
        f"{name}: {getattr(one, name)!r}, not {value!r}"
        for name, value in vars(other).items()
        if name not in skipped and not _alike(getattr(one, name), value)
    ]


def _alike(read: object, value: object) -> bool:
    if isinstance(read, float) and isinstance(value, float):
        return bool(np.isclose(read, value, rtol=1e-6, atol=0))
    return read == value
