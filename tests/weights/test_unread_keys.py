"""Keys of a config.json that nothing reads: of what transformers writes there are none, of anything else all."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from roofline.common.errors import RooflineError
from roofline.weights.config.hf import from_hf
from roofline.weights.config.unread_keys import unread_keys
from roofline.weights.families.table import MODEL_TYPES

PATH = Path("config.json")
SAME_AS = {"kimi_k2": "deepseek_v3"}  # files of a type that transformers knows by another name


def config_of(kind: str) -> dict[str, Any]:
    """Return the config.json of a type with transformers' defaults."""
    transformers = pytest.importorskip("transformers", reason="what writes the files")
    like = {"num_experts_per_tok": 6} if kind in ("deepseek_v2", "dots1") else {}
    like |= {"n_routed_experts": 128, "n_shared_experts": 2} if kind == "dots1" else {}
    like |= {"head_dim": 128} if kind in ("glm4_moe", "glm4v_moe_text") else {}  # by default 21 dimensions would turn
    like |= {"layer_types": ["conv", "full_attention"] * 16} if kind == "lfm2_moe" else {}  # which has no default
    config: dict[str, Any] = transformers.AutoConfig.for_model(SAME_AS.get(kind, kind), **like).to_dict()
    return config | {"model_type": kind}


@pytest.mark.parametrize("kind", list(MODEL_TYPES))
def test_all_that_transformers_writes_is_read_or_of_no_account(kind: str) -> None:
    config = config_of(kind)
    assert unread_keys(PATH, config) == []
    assert unread_keys(PATH, config | {"cross_layer_share": 2, "nothing": None}) == ["cross_layer_share"]


@pytest.mark.parametrize("kind", list(MODEL_TYPES))
@pytest.mark.parametrize(
    "value", [10**400, 1 << 63, 1 << 40, -(1 << 63)], ids=["beyond floats", "63", "40", "negative"]
)
def test_numbers_that_are_no_sizes_are_refused_or_read_in_little_memory(kind: str, value: int) -> None:
    config = config_of(kind)
    for key, usual in config.items():
        if type(usual) is int:
            with suppress(RooflineError):  # nothing else: no OverflowError, and no list of so many layers
                from_hf(PATH, config | {key: value})
