"""Tiles as text, the contest between torch's product and ours, and its record; kernels run in Triton's interpreter."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roofline.backends.gpu import tiles
from roofline.backends.gpu.tiles import Tile
from roofline.backends.gpu.tuning import linear as linear_tuning
from roofline.backends.gpu.tuning import measured_tiles as tuned_tiles
from roofline.backends.gpu.tuning.linear import TORCH, chosen, worth
from roofline.common.errors import ConfigError
from roofline.hardware.chips import chips
from roofline.hardware.tuning import store as tunings
from roofline.program.gemms import Gemm

torch = pytest.importorskip("torch")
CHIP = chips.get("sm_80")
GEMM = Gemm(2, 24, 96, "BF16", False)
NAMES = st.text("ABCDEFGHK_", min_size=1, max_size=8).filter(lambda name: name.isupper())
OPTIONS = st.dictionaries(
    st.text("abcdefg_", min_size=1, max_size=8).filter(lambda n: n not in ("warps", "stages") and not n.isupper()),
    st.integers() | st.booleans() | st.text("abc_12", max_size=5),
    max_size=3,
)
TILES = st.builds(
    Tile, st.integers(1, 16), st.integers(1, 8), st.dictionaries(NAMES, st.integers(1, 512), max_size=4), OPTIONS
)


@given(TILES)
def test_a_tile_comes_back(tile):
    assert tuned_tiles.parse(tuned_tiles.text(tile)) == tile


@pytest.mark.parametrize("words", ["", "BLOCK_M=16", "warps=4 stages", "warps=4 stages=2 M=x", "warps=0 stages=1"])
def test_what_is_no_tile_is_refused(words):
    with pytest.raises(ConfigError):
        tuned_tiles.parse(words)


def test_candidates_differ_in_one_thing_and_fit_the_chip():
    from roofline.backends.gpu.kernels.linear_float import table_tile

    for chip in chips.chips().values():
        for rows in (1, 200):
            base = table_tile(chip, rows, 4096)
            first, *others = tuned_tiles.near(base, chip, 2)
            assert first == base
            assert len(others) >= 3
            for tile in others:
                differing = {**tile.sizes, **tile.compiler()}.items() ^ {**base.sizes, **base.compiler()}.items()
                assert len(differing) == 2
                assert min(size for name, size in tile.sizes.items() if name != "FLIP") >= 16
                blocks = tile.sizes["BLOCK_M"] + tile.sizes["BLOCK_N"]
                assert 2 * blocks * tile.sizes["BLOCK_K"] * tile.stages <= chip.local_bytes


def test_the_setting_is_of_the_sources_and_the_compiler(monkeypatch):
    found = tuned_tiles.setting("NVIDIA H200")
    assert found == tuned_tiles.setting("NVIDIA H200")
    assert found.run != tuned_tiles.setting("NVIDIA H100").run
    assert found.build in found.run
    assert found.compiler in found.run
    monkeypatch.setattr(tuned_tiles, "_version", lambda package: "9.9")
    assert tuned_tiles.setting("NVIDIA H200").run != found.run


def trial(gemm=GEMM):
    return linear_tuning.Trial(gemm, CHIP, "cpu", cold_bytes=3 * 2 * gemm.out * gemm.width)


@pytest.mark.parametrize("gemm", [GEMM, Gemm(3, 16, 64, "F16", True)])
def test_every_candidate_gives_the_right_product(gemm):
    held = trial(gemm)
    assert len(held.candidates) >= 5
    assert held.dropped == {}
    assert tuned_tiles.parse(held.default) == tiles.choose("linear_float", CHIP, regime="decode")
    assert TORCH in held.candidates
    for contestant in (TORCH, held.default):
        assert held.seconds(contestant) > 0


def test_beyond_few_rows_the_library_is_what_has_to_be_beaten():
    held = trial(Gemm(17, 16, 64, "BF16", False))
    assert held.default == TORCH
    assert TORCH not in held.candidates


def test_a_wrong_tile_and_one_that_fails_take_no_part(monkeypatch):
    from roofline.backends.gpu.kernels import linear_float as module

    launch = module.linear_float

    def wrong(chip, x, w, bias, out, tile):
        if tile.warps == 4:
            raise RuntimeError("out of resource: shared memory\nmore")
        launch(chip, x, w, bias, out, tile=tile)
        if tile.sizes["BLOCK_N"] == 32:
            out[0, 0] += 10.0
        if tile.stages == 5:
            out[1, 1] = float("nan")

    monkeypatch.setattr(module, "linear_float", wrong)
    held = trial()
    reasons = sorted(held.dropped.values())
    assert reasons[0] == "RuntimeError: out of resource: shared memory"
    assert len(reasons) == 3
    assert all("wrong by" in reason for reason in reasons[1:])
    assert not set(held.dropped) & {held.default, *held.candidates}


def test_where_our_own_default_fails_the_library_is_it(monkeypatch):
    from roofline.backends.gpu.kernels import linear_float as module

    monkeypatch.setattr(module, "linear_float", lambda *_, tile: None)  # the result stays what it was: not a number
    held = trial()
    assert (held.default, held.candidates) == (TORCH, [])
    record = linear_tuning.tune(held, tuned_tiles.setting("NVIDIA H200"))
    assert (record.variant, record.reason) == (TORCH, "there is nothing to choose from")


def clock(speeds, noise=0.01):
    """Seconds of a contestant: 1, or as `speeds` says by a part of its text."""
    chance = random.Random(1)

    def seconds(contestant):
        factor = next((f for part, f in speeds.items() if part in contestant), 1.0)
        return 1e-5 * factor * (1 + noise * chance.random())

    return seconds


def test_a_faster_tile_wins_and_is_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path))
    setting = tuned_tiles.setting("NVIDIA H200")
    record = linear_tuning.tune(trial(), setting, seconds=clock({"stages=3": 0.8}))
    assert "stages=3" in record.variant
    assert record.figures["ratio"] == pytest.approx(0.8, rel=0.02)
    assert record.reason.startswith("faster by")
    store = tunings.Tunings("gpu", CHIP.name, "a GPU", {record.key: record})
    tunings.save(store)
    stored = tunings.load("gpu", CHIP.name)
    assert chosen(stored, GEMM, setting) == record.variant
    assert tuned_tiles.parse(record.variant).stages == 3
    assert chosen(stored, Gemm(4, 24, 96, "BF16", False), setting) is None
    assert chosen(stored, Gemm(2, 24, 96, "BF16", True), setting) is None
    assert chosen(stored, GEMM, tunings.Setting("kernels other", "other", "triton 4")) is None


def test_the_default_stays_unless_it_loses_by_more_than_the_noise():
    held, setting = trial(), tuned_tiles.setting("NVIDIA H200")
    assert linear_tuning.tune(held, setting, clock({"stages=3": 0.99}, noise=0.2)).variant == held.default
    assert linear_tuning.tune(held, setting, clock({TORCH: 0.5})).variant == TORCH
    slow = linear_tuning.tune(held, setting, clock({held.default: 0.5}))
    assert (slow.variant, slow.reason) == (held.default, "none of the candidates was faster")


def test_where_there_is_a_choice():
    assert worth(GEMM)
    assert not worth(Gemm(65, 24, 96, "BF16", False))
    assert not worth(Gemm(1, 24, 96, "Q4_0", False))


def test_what_was_chosen_is_what_runs(tmp_path, monkeypatch, caplog):
    from roofline.backends.gpu.kernels import linear_float as module
    from roofline.backends.gpu.runtime import matmul as products

    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA H200")
    assert linear_tuning.stored_choices(CHIP, 0, "bf16") == ({}, "never tuned")
    setting, tile = tuned_tiles.setting("NVIDIA H200"), Tile(1, 2, {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32})
    store = tunings.Tunings("gpu", CHIP.name, "a GPU")
    for rows, form, bias, variant in (
        (2, "BF16", False, TORCH), (2, "BF16", True, tuned_tiles.text(tile)), (2, "F16", False, TORCH),
        (40, "BF16", False, tuned_tiles.text(tile)), (9, "BF16", False, "a tile of another time"),
    ):  # fmt: skip
        gemm = Gemm(rows, 24, 96, form, bias)
        key = linear_tuning._key(gemm)
        record = tunings.TuningRecord(*key, setting, variant, TORCH, "", {}, "today")
        store.records[record.key] = record
    tunings.save(store)
    choices, _ = linear_tuning.stored_choices(CHIP, 0, "bf16")
    assert choices == {(2, 24, 96, False): None, (2, 24, 96, True): tile, (40, 24, 96, False): tile}
    other = {**choices, (2, 24, 96, True): Tile(2, 2, tile.sizes)}
    turned = dict(reversed(choices.items()))
    assert products.choices_text(turned) == products.choices_text(choices) != products.choices_text(other)
    ran = []
    monkeypatch.setattr(module, "linear_float", lambda *_, exact, one_tile, tile: ran.append(("ours", exact, tile)))
    monkeypatch.setattr(products, "library_product", lambda *_: ran.append(("library",)))
    w, bias = torch.zeros(24, 96), torch.zeros(24)
    for exact in (False, True):  # exact products have one tile, whatever is faster
        held = products.Products(CHIP, torch.bfloat16, exact, torch.zeros(0, dtype=torch.int32), choices)
        for rows, added in ((2, None), (2, bias), (40, None), (3, None), (41, None)):
            held._float(torch.zeros(rows, 96), w, added, torch.zeros(rows, 24))
    default = [("ours", False, None), ("library",)]
    assert ran[:5] == [("library",), ("ours", False, tile), ("ours", False, tile), *default]
    assert ran[5:] == [("ours", True, None)] * 5
    monkeypatch.setenv("ROOFLINE_TUNED", "off")
    assert linear_tuning.stored_choices(CHIP, 0, "bf16") == ({}, "ROOFLINE_TUNED=off")
    monkeypatch.setenv("ROOFLINE_TUNED", "on")
    assert "not used" not in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(linear_tuning.tuned_tiles, "_sources", lambda: "newer")
        assert linear_tuning.stored_choices(CHIP, 0, "bf16")[0] == {}
    assert "what was tuned is not used: measured with kernels" in caplog.text
    caplog.clear()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA H100")
    assert linear_tuning.stored_choices(CHIP, 0, "bf16")[1] == "never tuned on this device with these kernels"
    assert not caplog.text, "another device's"


def test_libraries_are_told_to_add_up_in_float32():
    from roofline.backends.gpu.runtime.libraries import sum_in_float32

    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    try:
        sum_in_float32()
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert not matmul.allow_fp16_reduced_precision_reduction
    finally:
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before
