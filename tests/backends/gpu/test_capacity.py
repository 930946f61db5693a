"""What fits where: placements keep to their bounds, refusals name what would fit, predictions keep to theirs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.backends.gpu.memory.capacity import Budget, place, spread, step_seconds
from roofline.backends.gpu.memory.requirements import Needs, cheaper, needs_of
from roofline.common.errors import CapacityError, ConfigError, UnsupportedError
from roofline.hardware.gpus.device import Device
from roofline.ops.batch import BatchLimits

GIB = 1 << 30
LIMITS = BatchLimits(tokens=512, segments=64, rows=64, pages=4096)


@pytest.fixture(scope="module")
def llama7b():
    """Llama-2-7B's Program, bfloat16, from its shape alone."""
    from roofline.models.presets import preset
    from roofline.models.registry import configure
    from roofline.program.compile import compile_program
    from roofline.program.target import CPU
    from roofline.weights.random_weights import random_checkpoint

    config = preset("llama-2-7b")
    family, cfg = configure(config)
    return compile_program(family, cfg, random_checkpoint(config, 0).tensors, CPU)


def small(**changes):
    given = {"layers": (100,) * 8, "ends": 50, "token": 1, "workspace": 30, "kv_heads": 4}
    return Needs(**{**given, **changes})


def test_the_needs_of_a_known_model(llama7b):
    """6.738e9 parameters in bfloat16 with norms in float32; 2 * 32 layers * 4096 * 2 bytes a token."""
    needs = needs_of(llama7b, LIMITS, extra=7)
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert sum(needs.layers) == 2 * matrices + 32 * 2 * 4 * 4096
    assert needs.ends == 2 * 2 * 32000 * 4096 + 4 * 4096
    assert needs.token == 524288
    assert needs.workspace == 7 + needs_of(llama7b, LIMITS).workspace
    assert needs.workspace > 4 * 64 * 32000  # the logits at least
    assert needs_of(llama7b, LIMITS, kv_format="int8").token == 2 * 32 * 32 * (128 + 4)
    quantised = needs_of(llama7b, LIMITS, weight_format="Q4_0")
    assert quantised.weights - 65 * 4 * 4096 == (matrices + 2 * 32000 * 4096) * 18 // 32
    with pytest.raises(UnsupportedError):
        needs_of(llama7b, LIMITS, weight_format="Q99")


def test_two_models_share_a_device():
    """Weights and caches of both fill it, with one number of tokens; ranks divide ours, and not what lies beside it."""
    ours, guesser = small(token=8), Needs((10,) * 4, 5, 3, 7, 1)
    both = ours.sharing_device_with(guesser)
    assert both.total(0) == ours.total(0) + guesser.total(0)
    for room in (1500, 1800, 5555):
        pages = place(both, Budget("card", room), least_tokens=16).pages
        left = room - ours.total(16 * pages) - guesser.total(16 * pages)
        assert 0 <= left < 16 * (8 + 3)
    assert both.over(2).token == 8 // 2 + 3
    assert both.over(2).others == 52
    with pytest.raises(CapacityError, match=r"what else is to lie there 52 B") as caught:
        place(both, Budget("card", 900), least_tokens=16)
    assert caught.value.needed == both.total(16)


def test_a_7b_model_on_cards_people_have(llama7b):
    needs = needs_of(llama7b, LIMITS)
    big = place(needs, Budget("80 GiB", 80 * GIB), least_tokens=4096)
    assert big.hosted == ()
    assert (big.pages + 1) * 16 * needs.token > 80 * GIB - needs.total(0) >= big.pages * 16 * needs.token
    card = Budget("12 GiB", 12 * GIB, host=64 * GIB, link=25e9, bandwidth=400e9, devices=2)
    options = cheaper(llama7b, LIMITS, caches={"fp8": "e4m3fn"})
    assert list(options) == ["kv_cache_dtype=fp8", "the weights in 4 bits (Q4_0)"]
    with pytest.raises(CapacityError) as caught:
        place(needs, card, least_tokens=4096, alternatives=options)
    assert caught.value.needed == needs.total(4096)
    assert caught.value.available == 12 * GIB
    assert "Q4_0" in caught.value.remedy
    assert "fp8" not in caught.value.remedy  # the weights alone are too large
    assert "tensor parallel over 2 devices" in caught.value.remedy
    assert "a context" not in caught.value.remedy
    offloaded = place(needs, card, least_tokens=4096, offload="auto")
    assert f"offload of {len(offloaded.hosted)} of 32 layers" in caught.value.remedy
    assert offloaded.seconds > len(offloaded.hosted) * needs.layers[0] / 25e9 * 0.99  # the link is the limit


def test_an_apu_takes_more_than_the_vram_it_reports(llama7b):
    needs = needs_of(llama7b, LIMITS)
    deck = Budget("APU", 1 * GIB, shared=15 * GIB)
    placed = place(needs, deck, least_tokens=2048, tokens=2048)
    assert placed.hosted == ()
    assert placed.beyond == placed.used - GIB == needs.total(2048) - GIB
    with pytest.raises(CapacityError, match="a context of at most"):
        place(needs, deck, least_tokens=65536)


def test_budgets_of_devices():
    apu = Device("amd", name="AMD Custom APU", arch="gfx1151", memory=512 << 20, shared=12 * GIB, unified=True)
    budget = Budget.of(apu, host=GIB)
    assert (budget.memory, budget.shared, budget.room, budget.host) == (512 << 20, 12 * GIB, apu.usable, GIB)
    assert Budget.of(apu, free=GIB // 4).room == GIB // 4 + 12 * GIB
    card = Device("nvidia", name="NVIDIA H200", arch="sm_90", units=132, memory=141 * 10**9, shared=GIB)
    assert Budget.of(card).room == 141 * 10**9
    assert Budget.of(card).bandwidth == card.product.bandwidth.value > 4e12
    assert Budget.of(card, free=7).room == 7
    with pytest.raises(UnsupportedError, match="how much memory"):
        Budget.of(Device("amd"))


sizes = st.integers(1, 200)
needs_strategy = st.builds(
    Needs,
    layers=st.lists(sizes, min_size=1, max_size=12).map(tuple),
    ends=sizes,
    token=st.integers(1, 3),
    workspace=sizes,
    kv_heads=st.integers(1, 4),
).map(lambda n: Needs(n.layers, n.ends, n.token * n.kv_heads, n.workspace, n.kv_heads))
budgets = st.builds(
    Budget,
    name=st.just("d"),
    memory=st.integers(1, 3000),
    shared=st.sampled_from([0, 500]),
    host=st.integers(0, 3000),
    link=st.sampled_from([0.0, 1e2]),
    bandwidth=st.sampled_from([0.0, 1e3]),
    devices=st.integers(1, 4),
)


def occupied(needs, placed):
    moved = sum(needs.layers[i] for i in placed.hosted)
    buffers = min(2, len(placed.hosted)) * max((needs.layers[i] for i in placed.hosted), default=0)
    return needs.weights - moved + buffers + needs.workspace + placed.pages * 16 * needs.token


def check_refusal(error, needs, budget, least, tokens, offload):
    """Its numbers and each option that it names."""
    assert error.needed > error.available
    if offload == 0:
        assert error.needed == needs.total(-(-max(least, tokens or 0, 1) // 16) * 16)
    if "offload of" in error.remedy:
        count = len(place(needs, budget, least_tokens=least, tokens=tokens, offload="auto").hosted)
        assert f"offload of {count} of" in error.remedy
    elif offload != "auto":
        with pytest.raises(CapacityError):
            place(needs, budget, least_tokens=least, tokens=tokens, offload="auto")
    if "a context of at most" in error.remedy:
        most = int(error.remedy.partition("at most ")[2].partition(" tokens")[0].replace(",", ""))
        place(needs, budget, least_tokens=most, offload=offload)
        with pytest.raises(CapacityError):
            place(needs, budget, least_tokens=most + 1, offload=offload)


@settings(max_examples=400, deadline=None)
@given(needs_strategy, budgets, st.integers(0, 300), st.sampled_from([None, 40, 640]), st.sampled_from([0, 1, "auto"]))
def test_a_placement_keeps_to_its_bounds_and_a_refusal_is_true(needs, budget, least, tokens, offload):
    try:
        placed = place(needs, budget, least_tokens=least, tokens=tokens, offload=offload)
    except CapacityError as error:
        check_refusal(error, needs, budget, least, tokens, offload)
        return
    assert placed.used == occupied(needs, placed) <= budget.room
    assert placed.beyond == max(0, placed.used - budget.memory)
    assert sum(needs.layers[i] for i in placed.hosted) <= budget.host
    assert placed.pages * 16 >= max(least, tokens or 0, 1)
    assert placed.resident + sum(needs.layers[i] for i in placed.hosted) == needs.weights
    if tokens is None:
        assert occupied(needs, placed) + 16 * needs.token > budget.room
    if offload == "auto" and placed.hosted:  # no fewer would do
        with pytest.raises(CapacityError):
            place(needs, budget, least_tokens=least, tokens=tokens, offload=len(placed.hosted) - 1)
    assert (placed.seconds is None) == (not budget.bandwidth or bool(placed.hosted and not budget.link))


def test_alternatives_are_named_where_they_fit_and_left_out_where_not():
    budget = Budget("d", 700)
    options = {"half": small(layers=(50,) * 8), "most": small(layers=(90,) * 8)}
    with pytest.raises(CapacityError) as caught:
        place(small(), budget, least_tokens=16, alternatives=options)
    assert caught.value.remedy == "What fits: half."
    with pytest.raises(CapacityError, match="smaller model"):
        place(small(), Budget("d", 10), least_tokens=16)


def test_too_little_host_memory_is_said_as_such():
    with pytest.raises(CapacityError, match="4 layers on the host needs 512 bytes of host memory, 300"):
        place(small(), Budget("d", 5000, host=300), least_tokens=16, offload=4)


@pytest.mark.parametrize("offload", [-1, 9])
def test_layers_that_are_not_there_cannot_be_offloaded(offload):
    with pytest.raises(ConfigError, match="8 layers"):
        place(small(), Budget("d", 5000, host=5000), least_tokens=16, offload=offload)


def test_uneven_heads_are_planned_for_the_fullest_device():
    needs = small(kv_heads=3, token=30).over(2)
    assert needs.token == 20
    assert needs.layers == (50,) * 8
    assert needs.ends == 25


@given(st.integers(1, 60).flatmap(lambda layers: st.tuples(st.integers(0, layers), st.just(layers))))
def test_spread_layers_are_distinct_and_even(case):
    count, layers = case
    chosen = spread(count, layers)
    assert len(set(chosen)) == len(chosen) == count
    assert all(0 <= i < layers for i in chosen)
    gaps = {(b - a) % layers for a, b in zip(chosen, (*chosen[1:], *chosen[:1]), strict=True)} if count > 1 else {0}
    assert max(gaps) - min(gaps) <= 1


times = st.floats(0.01, 10)


@settings(max_examples=200, deadline=None)
@given(st.lists(times, min_size=1, max_size=8), st.data(), st.integers(1, 3))
def test_a_step_takes_at_least_the_slower_engine_and_at_most_both(compute, data, buffers):
    layers = st.integers(0, len(compute) - 1)
    copies = data.draw(st.dictionaries(layers, times))
    seconds = step_seconds(compute, copies, buffers)
    if len(copies) <= buffers:
        assert seconds == sum(compute)
        return
    both = sum(compute) + sum(copies.values())
    assert max(sum(compute), sum(copies.values())) * (1 - 1e-9) <= seconds <= both * (1 + 1e-9)
    if buffers == 1:  # a copy waits for its buffer's reader, so hosted layers hide behind resident ones alone
        assert seconds >= (sum(copies.values()) + sum(compute[i] for i in copies)) * (1 - 1e-9)
    assert step_seconds(compute, copies, buffers + 1) <= seconds * (1 + 1e-9)


def test_known_schedules():
    even = dict.fromkeys(range(4), 1.0)
    assert step_seconds([1.0] * 4, even, 2) == pytest.approx(4.0)  # each copy behind a layer
    assert step_seconds([1.0] * 4, even, 1) == pytest.approx(8.0)
    assert step_seconds([0.5] * 4, even, 2) == pytest.approx(4.0)  # the link is the limit
    assert step_seconds([1.0] * 4, {1: 2.0, 3: 2.0}, 1) == pytest.approx(6.0)
