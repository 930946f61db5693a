"""What GGUF files of compressed attention say of the softmax beside a scaling of rope."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the cases are models of transformers")

from roofline.common.errors import UnsupportedError
from roofline.weights.config.gguf import from_gguf
from roofline.weights.config.to_gguf import to_gguf
from tests.models.parity_cases import CASES

SHAPES = {"embed.weight": (96, 64), "head.weight": (96, 64)}


def scaling_of(metadata: dict[str, Any], kind: str) -> Any:
    return from_gguf(Path("m.gguf"), metadata | {"deepseek2.rope.scaling.type": kind}, SHAPES, None)["rope_scaling"]


def test_a_sharpened_softmax_is_read_beside_yarn_alone() -> None:
    """llama.cpp sharpens it beside any scaling; the models that have the key have YaRN."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.2}
    yarn |= {"mscale_all_dim": 1.2}
    metadata, _ = to_gguf(dict(CASES["deepseek_v2"].config) | {"rope_scaling": yarn}, SHAPES)
    assert scaling_of(metadata, "yarn")["mscale_all_dim"] == 1.2
    with pytest.raises(UnsupportedError, match="yarn_log_multiplier beside linear scaling of rope"):
        scaling_of(metadata, "linear")
    assert scaling_of(metadata, "none") is None
