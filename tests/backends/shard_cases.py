"""Models and steps for the tests of ranks."""

import numpy as np
import program_builders as builders

from roofline.ops.batch import BatchLimits, Segment

LIMITS = BatchLimits(tokens=64, segments=8, rows=64, pages=64)
IDS = [int(i) for i in np.random.default_rng(3).integers(0, 96, 40)]
WHOLE = [([Segment(IDS, 0, [5, 2, 9])], list(range(40)))]
CHUNKS = [  # the same rows in pieces, beside other sequences; one step wants no logits
    ([Segment(IDS[:17], 0, [4, 11])], list(range(17))),
    ([Segment(IDS[:5], 0, [8])], []),
    ([Segment(IDS[5:7], 5, [8]), Segment(IDS[17:39], 17, [4, 11, 6])], list(range(2, 24))),
    ([Segment(IDS[39:], 39, [4, 11, 6]), Segment([3], 7, [8])], [0]),
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


def build(name: str, form: str) -> builders.Model:
    """A model of that name with all matrices in one format."""
    return builders.build(MODELS[name], form)
