"""FLOPs of a token beside what others publish, and beside the products of a model, counted one by one."""

import math
from typing import Any

import pytest

from roofline.models import presets
from roofline.models.registry import configure
from roofline.models.spec import expand
from roofline.train.model.form import ParameterForm
from roofline.train.report.flops import CONVENTIONS, mean_keys, per_token

# LLM Foundry's README of its benchmarks: size -> parameters, FLOPs of a token (rounded to four places).
FOUNDRY = {
    "125m": (125_311_488, 9.784e8),
    "350m": (355_985_408, 2.740e9),
    "760m": (760_470_528, 5.469e9),
    "1b": (1_315_950_592, 9.104e9),
    "3b": (2_651_837_440, 1.792e10),
    "7b": (6_658_859_008, 4.317e10),
    "13b": (12_853_954_560, 8.216e10),
    "30b": (29_975_214_080, 1.883e11),
    "70b": (64_862_437_376, 4.053e11),
}
# Rows of the same tables: size, tokens of a row, activation checkpointing, device, tokens/s of a GPU, model FLOP/s of a
# GPU, MFU and HFU in percent.
ROWS = [
    ("125m", 2048, False, "A100", 142_830, 1.397395e14, 44.79, 44.79),
    ("125m", 65536, False, "A100", 20_368, 1.688979e14, 54.13, 54.13),
    ("350m", 2048, False, "A100", 58_782, 1.610589e14, 51.62, 51.62),
    ("760m", 65536, True, "A100", 4_143, 1.414636e14, 45.34, 60.45),
    ("1b", 2048, False, "A100", 20_513, 1.867501e14, 59.86, 59.86),
    ("1b", 2048, False, "H100", 45_455, 4.138134e14, 41.82, 41.82),
    ("3b", 512, False, "H100", 27_965, 4.583697e14, 46.32, 46.32),
    ("7b", 2048, False, "A100", 4_641, 2.003836e14, 64.23, 64.23),
    ("7b", 8192, True, "H100", 6_935, 3.674893e14, 37.14, 49.52),
    ("13b", 1024, True, "A100", 2_330, 1.855662e14, 59.48, 79.3),
    ("30b", 2048, True, "A100", 916, 1.725420e14, 55.3, 73.74),
    ("70b", 2048, True, "H100", 1_039, 4.212583e14, 42.57, 56.76),
]
PEAKS = {"A100": 312e12, "H100": 989.4e12}


def mpt(size: str, length: int = 2048) -> dict[str, Any]:
    return presets.preset(f"mpt-{size}") | {"max_position": length}


@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=pytest.mark.slow) if size in ("30b", "70b") else size for size in FOUNDRY]
)
def test_the_table_of_llm_foundry(size: str) -> None:
    parameters, flops = FOUNDRY[size]
    assert presets.parameter_count(mpt(size)) == parameters
    found = per_token(mpt(size), 2048)["foundry"]
    assert found.model == pytest.approx(flops, rel=5e-4)
    assert found.model == 6 * parameters + 12 * mpt(size)["layers"] * mpt(size)["width"] * 2048
    assert found.hardware == found.model


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=pytest.mark.slow) if row[0] == "70b" else row for row in ROWS],
    ids=lambda row: f"{row[0]}-{row[1]}-{row[3]}",
)
def test_rows_of_llm_foundry_follow_from_tokens_per_second(row: Any) -> None:
    """Each figure within the rounding of the tokens per second, and of the percent."""
    size, length, again, device, rate, flops, mfu, hfu = row
    found = per_token(mpt(size, length), length, "full" if again else None)["foundry"]
    assert rate * found.model == pytest.approx(flops, rel=1 / rate)
    assert 100 * rate * found.model / PEAKS[device] == pytest.approx(mfu, rel=1 / rate + 3e-4)
    assert 100 * rate * found.hardware / PEAKS[device] == pytest.approx(hfu, rel=1 / rate + 3e-4)


def test_torchtitan_leaves_out_what_is_only_looked_up() -> None:
    untied, tied = presets.preset("llama-3-8b"), presets.preset("llama-3.2-1b")
    attention = 12 * 32 * 32 * 128 * 8192
    assert per_token(untied, 8192)["torchtitan"].model == 6 * (8_030_261_248 - 128256 * 4096) + attention
    attention = 12 * 16 * 32 * 64 * 2048
    assert per_token(tied, 2048)["torchtitan"].model == 6 * 1_235_814_400 + attention
    learned = per_token(mpt("125m"), 2048)["torchtitan"].model  # its table of positions is no product either
    assert learned == 6 * (125_311_488 - 2048 * 768) + 12 * 12 * 768 * 2048


def test_a_token_meets_the_experts_that_are_chosen_for_it() -> None:
    """Mixtral's shape: two of eight experts, each of three matrices, in every layer."""
    config = presets.preset("mixtral-8x7b")
    idle = config["layers"] * (8 - 2) * 3 * config["width"] * config["ffn"]
    attention = 12 * config["layers"] * config["width"] * 512
    assert per_token(config, 512)["foundry"].model == 6 * (presets.parameter_count(config) - idle) + attention


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("window", [0, 1, 3, 100])
def test_mean_keys(length: int, window: int) -> None:
    seen = [min(i + 1, window or length) for i in range(length)]
    assert mean_keys(length, window) == pytest.approx(sum(seen) / length)


def test_matmul_counts_each_product_once() -> None:
    """Llama 3.2 1B by hand: grouped heads make k and v narrow, and leave the scores as many."""
    config, length = presets.preset("llama-3.2-1b"), 2048
    width, ffn, heads, kv, dim, layers, vocab = 2048, 8192, 32, 8, 64, 16, 128256
    linear = layers * (2 * width * heads * dim + 2 * width * kv * dim + 3 * width * ffn)
    pairs = layers * 4 * heads * dim * (length + 1) / 2
    model = 6 * (linear + vocab * width) + 3 * pairs
    found = per_token(config, length)["matmul"]
    assert found.model == pytest.approx(model)
    assert found.hardware == pytest.approx(model + pairs / 2)
    again = per_token(config, length, "full")["matmul"]
    assert again.model == found.model
    assert again.hardware == pytest.approx(found.hardware + 2 * linear + pairs)  # the head is not computed again
    assert per_token(config, length, "selective")["matmul"] == found


def test_a_mask_hides_keys_that_are_computed_all_the_same() -> None:
    plain, hidden = (per_token(presets.preset("llama-3.2-1b"), 512, documents=d)["matmul"] for d in (False, True))
    assert plain.model == hidden.model
    pairs = 16 * 4 * 32 * 64
    assert hidden.hardware - plain.hardware == pytest.approx(3.5 * pairs * (512 - 513 / 2))
    window = presets.preset("llama-3.2-1b") | {"sliding_window": 64, "family": "mistral"}
    seen = per_token(window, 512)["matmul"]
    assert plain.model - seen.model == pytest.approx(3 * pairs * (513 / 2 - mean_keys(512, 64)))
    assert seen.hardware == pytest.approx(hidden.hardware)


def test_every_convention_says_what_it_is() -> None:
    assert set(per_token(mpt("125m"), 16)) == set(CONVENTIONS)


def test_an_adapter_counts_four_times_what_is_frozen_and_six_times_what_is_trained() -> None:
    shape = presets.preset("llama-3.2-1b")
    plain = per_token(shape, 1024)
    forms = {}
    family, cfg = configure(shape)
    for param in expand(family.spec(cfg), cfg.layers):
        if param.tied_to is not None:
            continue
        rank = 16 if len(param.shape) == 2 and param.name.startswith("layers.") else 0
        forms[param.name] = ParameterForm(param.shape, "BF16", len(param.shape) == 2, rank=rank)
    adapted = per_token(shape, 1024, forms=forms)
    frozen = sum(math.prod(form.shape) for form in forms.values())
    trained = sum(math.prod(each) for form in forms.values() for each in form.trained.values())
    attention = 12 * shape["layers"] * shape["heads"] * shape["head_dim"] * 1024
    assert set(adapted) == {"lora", "matmul"}
    assert adapted["lora"].model == pytest.approx(4 * frozen + 6 * trained + attention)
    assert adapted["matmul"].model < plain["matmul"].model
