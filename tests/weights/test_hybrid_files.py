"""Named shapes of hybrids, which leave out what is a default, are written into files of both kinds and read back."""

from pathlib import Path

import pytest

from roofline.models.presets import preset
from roofline.models.registry import configure
from roofline.weights.config.hf import from_hf
from roofline.weights.config.to_gguf import to_gguf
from roofline.weights.names import parameter_shapes
from roofline.weights.to_hf import hf_config

SHAPES = ("lfm2-350m", "lfm2-8b-a1b", "granite-3.0-1b-a400m", "granite-4.0-h-350m", "granite-4.0-h-tiny")
SHAPES += ("jamba-v0.1", "jamba-1.5-large", "bamba-9b")
SHAPES += ("nemotron-nano-9b-v2", "nemotron-3-nano-30b-a3b", "falcon-h1-0.5b")


@pytest.mark.parametrize("name", SHAPES)
def test_a_named_shape_is_read_back_from_its_files(name: str) -> None:
    config = preset(name)
    assert configure(from_hf(Path("config.json"), hf_config(config)))[1] == configure(config)[1]
    metadata, tensors = to_gguf(config, parameter_shapes(config))  # which compares what it wrote
    assert metadata["general.architecture"]
    assert not tensors
