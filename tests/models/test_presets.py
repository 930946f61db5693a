"""Named shapes have the published number of parameters, to the unit."""

import pytest

from roofline.common.errors import ConfigError
from roofline.models import presets

# Of papers, model cards and indexes of weights, beside what presets.toml says of the same models.
COUNTS = {
    "mpt-7b": 6_658_859_008,
    "mpt-7b-alibi": 6_649_286_656,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "codellama-34b": 33_743_970_304,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-large-2407": 122_610_069_504,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "phi-4": 14_659_507_200,
    "smollm3-3b": 3_075_098_624,
    "olmo-2-7b": 7_298_617_344,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "pythia-70m": 70_426_624,
    "pythia-2.8b": 2_775_208_960,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-66b": 65_719_701_504,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-8b": 8_190_735_360,
    "smollm2-1.7b": 1_711_376_384,
    "olmoe-1b-7b": 6_919_161_856,
    "exaone-4-1.2b": 1_279_391_488,
    "solar-open-100b": 102_651_799_552,
    "ministral-3-3b": 3_429_006_336,
}
# What comparisons of chips are published of.
MEASURED = ("mpt-1b", "mpt-13b", "llama-2-7b", "llama-2-13b", "llama-2-70b", "mistral-7b-v0.1", "codellama-34b")
MEASURED += ("llama-3-8b", "llama-3-70b", "llama-3.1-70b", "llama-3.1-405b", "mistral-large-2407", "mixtral-8x7b")


@pytest.mark.parametrize(("name", "preset"), presets.presets().items())
def test_the_arithmetic_gives_the_published_number(name: str, preset: presets.ModelPreset) -> None:
    assert presets.parameter_count(preset.config) == preset.parameters
    assert preset.name == name
    assert preset.source


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_the_table_says_what_is_published(name: str, count: int) -> None:
    assert presets.presets()[name].parameters == count


def test_models_of_well_known_measurements_are_there() -> None:
    assert set(MEASURED) <= set(presets.names())


def test_a_configuration_that_was_handed_out_can_be_changed() -> None:
    presets.preset("llama-2-7b")["layers"] = 1
    assert presets.preset("llama-2-7b")["layers"] == 32


def test_scaled_positions_are_those_of_each_generation() -> None:
    factors = {name: presets.preset(name)["rope_scaling"] for name in ("llama-3-8b", "llama-3.1-8b", "llama-3.2-1b")}
    assert factors["llama-3-8b"] is None
    assert (factors["llama-3.1-8b"]["factor"], factors["llama-3.2-1b"]["factor"]) == (8.0, 32.0)
    assert presets.preset("mistral-7b-v0.1")["sliding_window"] == 4096
    assert presets.preset("mistral-7b-v0.2")["sliding_window"] is None


def test_lists_begin_in_the_table_and_repeat_over_the_layers() -> None:
    windows = presets.preset("gemma-3-1b")["layer_windows"]
    assert len(windows) == 26
    assert [layer for layer, window in enumerate(windows) if window == 0] == [5, 11, 17, 23]
    assert set(windows) == {0, 512}
    assert presets.preset("qwen3.5-0.8b")["recurrent"] == [True, True, True, False] * 6
    assert presets.preset("smollm3-3b")["turning"][-5:] == [False, True, True, True, False]


def test_an_unknown_preset_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="mpt-125m"):
        presets.preset("mpt-125")
