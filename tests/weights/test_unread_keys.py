"""Keys of a config.json that nothing reads: of what transformers writes there are none, of anything else all."""

from pathlib import Path
from typing import Any

import pytest

from roofline.weights.config.unread_keys import unread_keys
from roofline.weights.families.table import MODEL_TYPES

PATH = Path("config.json")
SAME_AS = {"kimi_k2": "deepseek_v3"}  # files of a type that transformers knows by another name


@pytest.mark.parametrize("kind", list(MODEL_TYPES))
def test_all_that_transformers_writes_is_read_or_of_no_account(kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="what writes the files")
    like = {"num_experts_per_tok": 6} if kind in ("deepseek_v2", "dots1") else {}
    like |= {"n_routed_experts": 128, "n_shared_experts": 2} if kind == "dots1" else {}
    like |= {"head_dim": 128} if kind in ("glm4_moe", "glm4v_moe_text") else {}  # by default 21 dimensions would turn
    like |= {"layer_types": ["conv", "full_attention"] * 16} if kind == "lfm2_moe" else {}  # which has no default
    config: dict[str, Any] = transformers.AutoConfig.for_model(SAME_AS.get(kind, kind), **like).to_dict()
    config["model_type"] = kind
    assert unread_keys(PATH, config) == []
    assert unread_keys(PATH, config | {"cross_layer_share": 2, "nothing": None}) == ["cross_layer_share"]
