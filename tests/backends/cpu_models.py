"""Small random models for the cpu backend's tests."""

from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from roofline.backends.capacity import Capacity
from roofline.backends.checkpoint import Tensors
from roofline.backends.cpu.executable import CpuExecutable
from roofline.models import registry
from roofline.ops.batch import BatchLimits
from roofline.program import target
from roofline.program.compile import compile_program
from roofline.program.ir import Program
from roofline.weights.checkpoint import Checkpoint
from roofline.weights.random_weights import random_checkpoint

LLAMA: dict[str, Any] = {
    "family": "llama",
    "width": 256,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "ffn": 512,
    "vocab": 300,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_style": "half",
    "max_position": 2048,
    "tied": True,
    "attention_bias": False,
    "qk_norm": False,
    "sliding_window": None,
}
MPT: dict[str, Any] = {**LLAMA, "family": "mpt", "kv_heads": 4, "positions": "learned", "bias": True}
MIXTRAL: dict[str, Any] = {**LLAMA, "family": "mixtral", "ffn": 96, "experts": 8, "experts_per_token": 2}
GEMMA: dict[str, Any] = {**LLAMA, "family": "gemma", "layers": 3, "query_scalar": 50.0, "layer_windows": [40, 0, 40]}
GEMMA4: dict[str, Any] = {**LLAMA, "family": "gemma4", "layers": 3, "qk_norm": True, "layer_windows": [40, 40, 0]}
GEMMA4 |= {"global_head_dim": 96, "global_kv_heads": 2, "local_theta": 1e3, "logit_cap": 3.0}
GEMMA4 |= {"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.25}}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-interleaved": {**LLAMA, "rope_style": "interleaved", "tied": False},
    "mistral": {**LLAMA, "sliding_window": 40, "kv_heads": 1, "head_dim": 80, "heads": 4},
    "qwen2": {**LLAMA, "family": "qwen", "attention_bias": True},
    "qwen3": {**LLAMA, "family": "qwen", "qk_norm": True, "head_dim": 32, "heads": 8},
    "heads-of-20": {**LLAMA, "heads": 8, "head_dim": 20},
    "heads-of-36": {**LLAMA, "family": "qwen", "qk_norm": True, "heads": 8, "head_dim": 36, "sliding_window": 40},
    "heads-of-9": {**MPT, "width": 288, "heads": 32, "kv_heads": 32, "head_dim": 9, "positions": "alibi"},
    "mpt": MPT,
    "mpt-rope": {**MPT, "kv_heads": 2, "positions": "rope", "rms": True, "gated": True, "activation": "silu"},
    "mpt-geglu": {**MPT, "positions": "rope", "rms": True, "gated": True, "activation": "gelu_tanh"},
    "mpt-silu": {**MPT, "activation": "silu"},
    "mixtral": MIXTRAL,
    "qwen2-moe": {
        **{**MIXTRAL, "family": "qwen_moe", "attention_bias": True, "renormalise": False},
        **{"experts": 5, "experts_per_token": 3, "shared_ffn": 160},
    },
    "qwen3-moe": {**MIXTRAL, "family": "qwen_moe", "qk_norm": True, "experts": 20, "experts_per_token": 4},
    "mpt-alibi": {**MPT, "heads": 3, "kv_heads": 3, "head_dim": 128, "positions": "alibi", "bias": False},
    "gpt-oss": {
        **{**MIXTRAL, "family": "gpt_oss", "layers": 3, "layer_windows": [40, 0, 40], "attention_bias": True},
        **{"output_bias": True, "experts": 6, "experts_per_token": 3, "swiglu_limit": 0.7},
    },
    "deepseek": {
        **{**MIXTRAL, "family": "deepseek", "layers": 3, "kv_heads": 4, "rope_style": "interleaved", "rotary_dim": 32},
        **{"kv_rank": 96, "q_rank": 64, "value_dim": 48, "dense": [0], "dense_ffn": 160, "renormalise": False},
        **{"shared_ffn": 160, "routed_scale": 2.5, "tied": False},
    },
    "deepseek-latent": {
        **{**MIXTRAL, "family": "deepseek", "kv_heads": 8, "heads": 8, "rope_style": "interleaved", "rotary_dim": 32},
        **{"kv_rank": 96, "q_rank": 64, "value_dim": 48, "dense": [0], "dense_ffn": 160, "shared_ffn": 160},
        **{"score": "sigmoid", "choice_bias": True, "groups": 4, "kept_groups": 2, "tied": False, "latent": True},
    },
    "youtu-latent": {
        **{**LLAMA, "family": "youtu", "heads": 20, "kv_heads": 20, "head_dim": 72, "rotary_dim": 8, "kv_rank": 64},
        **{"value_dim": 72, "latent": True},
    },
    "routed-sigmoid": {
        **{**MIXTRAL, "family": "routed", "layers": 3, "dense": [1], "dense_ffn": 160, "score": "sigmoid"},
        **{"choice_bias": True, "groups": 4, "kept_groups": 2, "experts": 20, "experts_per_token": 5},
        **{
            "routed_scale": 2.5,
            "shared_ffn": 160,
            "qk_norm": True,
            "wide_qk_norm": True,
            "turning": [True, False, True],
        },
    },
    "routed-softmax": {
        **{**MIXTRAL, "family": "routed", "choice_bias": True, "renormalise": False, "experts": 6},
        **{"attention_bias": True, "output_bias": True, "rotary_dim": 32},
    },
    "olmo2": {**LLAMA, "family": "olmo2"},
    "olmo3": {**LLAMA, "family": "olmo2", "layer_windows": [40, 0], "local_theta": 1e3},
    "exaone4": {**LLAMA, "family": "exaone4", "qk_norm": True, "turning": [True, False], "layer_windows": [40, 0]},
    "hunyuan": {**LLAMA, "family": "hunyuan", "qk_norm": True, "head_dim": 32, "heads": 8},
    "smollm3": {**LLAMA, "family": "smollm3", "turning": [True, False]},
    "glm4": {**LLAMA, "family": "glm4", "rope_style": "interleaved", "rotary_dim": 32},
    "ministral3": {**LLAMA, "family": "ministral3", "query_beta": 0.4, "query_context": 24},
    "arcee": {**LLAMA, "family": "arcee", "activation": "relu_squared"},
    "ernie4_5": {
        **{**LLAMA, "family": "ernie4_5", "rope_style": "interleaved", "attention_bias": True, "output_bias": True},
        "mlp_bias": True,
    },
    "granite": {**LLAMA, "family": "granite", "residual_multiplier": 0.3, "logits_scaling": 2.0},
    "gpt_neox": {**MPT, "family": "gpt_neox", "positions": "rope", "rotary_dim": 16, "attention_bias": True},
    "opt": {**MPT, "family": "opt", "activation": "relu"},
    "opt-narrow": {
        **{**MPT, "family": "opt", "activation": "relu", "embed_width": 128},
        **{"norm_first": False, "last_norm": False},
    },
    "bert": {**MPT, "family": "bert", "token_types": 3, "first_position": 2},
    "gemma2": {**GEMMA, "attention_cap": 2.0, "logit_cap": 3.0},
    "gemma4": {
        **{**GEMMA4, "layers": 4, "layer_windows": [40, 0, 40, 0], "sharing_layers": 2, "wide_sharing": True},
        **{"layer_width": 32, "layer_vocab": 300},
    },
    "gemma4-moe": {
        **{**GEMMA4, "keys_as_values": True, "global_kv_heads": 1, "scales_layers": False},
        **{"experts": 6, "experts_per_token": 3, "expert_ffn": 96},
    },
    "gemma3n": {
        **{**LLAMA, "family": "gemma3n", "layers": 2, "layer_windows": [40, 0], "qk_norm": True, "local_theta": 1e3},
        **{"layer_width": 32, "layer_vocab": 200, "laurel_rank": 32, "sparsity": [0.9, 0.0], "logit_cap": 3.0},
    },
    "gemma3": {**GEMMA, "qk_norm": True, "head_dim": 256, "heads": 2, "kv_heads": 1, "local_theta": 1e3},
}


@cache
def checkpoint(model: str, form: str) -> Checkpoint:
    """The same one for each test, which keeps what it has made of its tensors."""
    return with_memory(random_checkpoint(MODELS[model], seed=3, form=form))


def with_memory(source: Checkpoint) -> Checkpoint:
    """The checkpoint with the bytes of a tensor made once, and read only."""

    @cache
    def read(name: str) -> np.ndarray:
        values = source.bytes_of(name)
        values.flags.writeable = False
        return values

    return replace(source, bytes_of=read)


@cache
def program_of(source: Checkpoint, kv_dtype: str) -> Program:
    """A checkpoint's program for the cpu backend."""
    config = registry.config_of(source.config)
    return compile_program(registry.get(config.family), config, source.tensors, target.with_cache(target.CPU, kv_dtype))


def packed(program: Program, source: Tensors, capacity: Capacity, **options: Any) -> CpuExecutable:
    """The program on the cpu backend, of weights whose hash nobody asks for. options: isa, threads, group."""
    identity: Future[str] = Future()
    identity.set_result("7e57" * 16)
    return CpuExecutable.from_program(program, source, capacity, weights_hash=identity, **options)


def executable(
    source: Checkpoint,
    *,
    isa: str,
    threads: int = 2,
    tokens: int = 256,
    pages: int = 64,
    keep_values: bool = False,
    kv_dtype: str = "bf16",
) -> CpuExecutable:
    """keep_values: every value keeps its own place in the arena, so that all can be read after a step."""
    program = program_of(source, kv_dtype)
    if keep_values:
        rest = [v.name for i in program.body for v in i.outputs if v.name not in program.outputs]
        program = replace(program, outputs=(*program.outputs, *rest))
    capacity = Capacity(BatchLimits(tokens=tokens, segments=16, rows=tokens, pages=16 * 64), 1024, pages)
    return packed(program, source, capacity, isa=isa, threads=threads)
