"""Named shapes have the published number of parameters, to the unit."""

import pytest

from roofline.common.errors import ConfigError
from roofline.models import presets

# The benchmark form's counts are those of LLM Foundry's tables, Llama's those of the published weights.
COUNTS = {
    "mpt-125m": 125_311_488,
    "mpt-350m": 355_985_408,
    "mpt-760m": 760_470_528,
    "mpt-1b": 1_315_950_592,
    "mpt-3b": 2_651_837_440,
    "mpt-7b": 6_658_859_008,
    "mpt-13b": 12_853_954_560,
    "mpt-30b": 29_975_214_080,
    "mpt-70b": 64_862_437_376,
    "mpt-7b-alibi": 6_649_286_656,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_a_preset_has_the_published_number_of_parameters(name: str, count: int) -> None:
    assert presets.parameter_count(presets.preset(name)) == count


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_is_a_model_of_ours(name: str) -> None:
    assert presets.parameter_count(presets.preset(name)) > 1e8


def test_an_unknown_preset_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="mpt-125m"):
        presets.preset("mpt-125")
