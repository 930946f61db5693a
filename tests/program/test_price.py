"""Prices against counting by hand, and against the sum over an explicit loop."""

from dataclasses import replace

import program_builders as builders
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roofline.backends.prices import PriceTable
from roofline.bundle.shape import shape_in
from roofline.models.registry import configure
from roofline.models.spec import expand
from roofline.ops import formats
from roofline.ops.batch import Batch, BatchLimits, Segment
from roofline.program import target
from roofline.program.compile import compile_program, stages
from roofline.program.ir import Instr
from roofline.program.overview import labels, overview
from roofline.program.passes.price import (
    Work,
    amount,
    arithmetic,
    arithmetic_roof,
    price,
    rate_of,
    seconds,
    segment_work,
    work_of,
)
from roofline.program.rates import ProgramSpeeds
from roofline.program.target import CPU, with_cache

MODEL = builders.build(builders.BASE, embed="Q8_0")
PROGRAM = compile_program(MODEL.family, MODEL.cfg, MODEL.tensors, CPU)


def test_decode_reads_every_weight_once_and_one_row_of_the_embedding() -> None:
    spent = amount(price(PROGRAM).total, Work(tokens=1, rows=1, context=100, pairs=100))
    file_bytes = sum(raw.size for raw in MODEL.raw.values())
    row = formats.get("Q8_0").nbytes((1, 64))
    assert spent.weight_bytes == file_bytes + row
    assert price(PROGRAM).weight_bytes == file_bytes
    # K and V of two layers, 2 kv heads of 16, bf16: 100 positions read, one written.
    assert spent.kv_bytes == 2 * (2 * 2 * 16) * 2 * 101
    int8 = compile_program(MODEL.family, MODEL.cfg, MODEL.tensors, with_cache(CPU, "int8"))
    # A byte an element, and a float scale for each head.
    assert amount(price(int8).total, Work(1, 1, 100, 100)).kv_bytes == 2 * (2 * 2 * (16 + 4)) * 101


def test_linear_flops_are_two_per_weight_and_token() -> None:
    cfg = MODEL.cfg
    matrices = [p for p in expand(MODEL.family.spec(cfg), cfg.layers) if len(p.shape) == 2]
    inner = sum(p.shape[0] * p.shape[1] for p in matrices if p.name.startswith("layers."))
    last = sum(p.shape[0] * p.shape[1] for p in matrices if p.name.startswith(f"layers.{cfg.layers - 1}."))
    qkv = cfg.width * (cfg.q_width + 2 * cfg.kv_width)
    linears = [c.flops for i, c in price(PROGRAM).instrs if i.op.startswith("linear")]
    assert sum(f.tokens for f in linears) == 2 * (inner - last + qkv)
    assert sum(f.rows for f in linears) == 2 * (last - qkv + cfg.vocab * cfg.width)


@given(st.integers(0, 200), st.integers(1, 100), st.integers(0, 60))
def test_segment_work_counts_what_attend_sees(first: int, tokens: int, window: int) -> None:
    seen = [[k for k in range(t + 1) if not window or k > t - window] for t in range(first, first + tokens)]
    keys = {k for ks in seen for k in ks}
    assert segment_work(first, tokens, window) == (len(keys), sum(len(ks) for ks in seen))
    assert segment_work(first, tokens) == segment_work(first, tokens, 0)


def test_work_of_a_batch_adds_its_segments() -> None:
    batch = Batch(BatchLimits(16, 4, 16, 16))
    batch.fill([Segment([1, 2, 3], 0, [0]), Segment([4], 20, [1, 2])], [2, 3])
    assert work_of(batch) == Work(tokens=4, rows=2, context=3 + 21, pairs=6 + 21)


class Roofs:
    int8_ops = bf16_flops = f32_flops = 1e9

    def read_bytes_per_s(self, working_set: int) -> float:
        return 1e9


def test_each_instruction_has_the_roof_of_its_arithmetic() -> None:
    floats = builders.build(builders.BASE, "BF16")
    of_floats = compile_program(floats.family, floats.cfg, floats.tensors, CPU)
    for program, roof, divisor in ((PROGRAM, "int8_ops", 1), (of_floats, "f32_flops", 1)):
        linears = [instr for instr in program.body if instr.op.startswith("linear")]
        assert {arithmetic(instr) for instr in linears[:-1]} == {(roof, divisor)}
    # A 15-bit operand is two of 8 bits.
    assert arithmetic(PROGRAM.body[-1]) == ("int8_ops", 2)
    assert {arithmetic(i) for i in PROGRAM.body if i.op == "attend"} == {("bf16_flops", 1)}
    assert {arithmetic(i) for i in PROGRAM.body if i.op == "embed"} == {("f32_flops", 1)}


class OfChip(Roofs):
    """Rates of every kind of product."""

    bf16_flops, f16_flops, f8_flops, int8_ops, f4_flops = 1e9, 2e9, 4e9, 3e9, 8e9


class OfWideProducts(Roofs):
    """A chip that widens narrower numbers, and whose products of bytes are slower than those of bf16."""

    f8_flops = f4_flops = f16_flops = None
    int8_ops = 0.5e9


@pytest.mark.parametrize(
    ("form", "kind", "rate"),
    [
        ("E4M3", "fp8", 4e9),
        ("F16", "f16", 2e9),
        ("BF16", "bf16", 1e9),
        ("Q8_0", "int8", 3e9),
        ("INT8", "int8", 3e9),
        ("Q4_K_M", "int8", 3e9),  # with matrices of Q6_K
        ("MXFP4", "fp4", 8e9),
    ],
)
def test_products_on_a_gpu_have_the_roof_of_what_they_multiply(form: str, kind: str, rate: float) -> None:
    shape = shape_in("llama-3.2-1b", form)
    rows = "f16" if form == "F16" else "bf16"
    program = compile_program(*configure(shape.config), shape.tensors, target.gpu(rows))
    assert arithmetic_roof(program, OfChip()) == (kind, rate)
    assert arithmetic_roof(program, OfWideProducts()) == ("bf16", 1e9)
    attends = [
        one for (instr, _), one in zip(price(program).instrs, price(program).rates, strict=True) if instr.op == "attend"
    ]
    assert set(attends) == {(f"{rows}_flops", 1)}
    prefill, slower = (ProgramSpeeds(program, roofs).prefill(4096).seconds for roofs in (OfChip(), OfWideProducts()))
    assert prefill < slower if rate > 1e9 else prefill == slower
    table = PriceTable.of(program)
    assert {tuple(one) for one in table.rates} == set(price(program).rates)


def test_four_bit_floats_are_multiplied_as_the_widest_that_a_chip_has_fastest() -> None:
    """Their codes are 8-bit floats too, and twice a code is an integer: the fastest of these, else bf16."""

    class Narrower(OfChip):
        f4_flops = None

    class Integers(Narrower):
        f8_flops = None

    assert [rate_of(roofs, "f4_flops") for roofs in (OfChip(), Narrower(), Integers())] == [8e9, 4e9, 3e9]
    assert rate_of(Integers(), "f8_flops") == 1e9, "8-bit floats are no integers"


class Uneven(Roofs):
    """Roofs of one another apart."""

    int8_ops, bf16_flops, f32_flops = 4e9, 2e9, 1e9

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def read_bytes_per_s(self, working_set: int) -> float:
        assert working_set == price(PROGRAM).weight_bytes + amount(price(PROGRAM).total, WORK).kv_bytes
        return self.rate


WORK = Work(tokens=3, rows=1, context=50, pairs=120)


@pytest.mark.parametrize(("rate", "bound"), [(1e3, "memory"), (1e15, "compute")])
def test_time_is_the_longer_of_arithmetic_and_reads(rate: float, bound: str) -> None:
    roofs = Uneven(rate)
    want = 0.0
    for instr, cost in price(PROGRAM).instrs:
        spent, (roof, divisor) = amount(cost, WORK), arithmetic(instr)
        computing = spent.flops * divisor / getattr(roofs, roof)
        want += max(computing, (spent.weight_bytes + spent.kv_bytes) / rate)
    view = overview(PROGRAM, WORK, roofs)
    assert view.seconds == pytest.approx(want)
    assert (view.layers, view.weight_bytes) == (2, price(PROGRAM).weight_bytes)
    assert view.spent == amount(price(PROGRAM).total, WORK)
    for row in view.rows:
        assert row.read_bytes == row.spent.weight_bytes + row.spent.kv_bytes
        if row.section != "last layer" and row.read_bytes and row.spent.flops:
            assert row.bound == bound, row


def test_what_the_last_layer_does_for_wanted_rows_is_one_row() -> None:
    view = overview(PROGRAM, WORK, Uneven(1e6))
    sections = list(dict.fromkeys(row.section for row in view.rows))
    assert sections == ["embed", "layer 0", "last layer", "head"]
    (last,) = (row for row in view.rows if row.section == "last layer")
    parts = [
        (
            amount(cost, WORK),
            seconds(instr, amount(cost, WORK), Uneven(1e6), price(PROGRAM).weight_bytes + view.spent.kv_bytes),
        )
        for (instr, cost), label in zip(price(PROGRAM).instrs, labels(PROGRAM), strict=True)
        if label.section == "last layer"
    ]
    assert len(parts) > 4
    assert last.seconds == pytest.approx(sum(time for _, time in parts))
    for name in ("flops", "weight_bytes", "act_bytes"):
        assert getattr(last.spent, name) == sum(getattr(spent, name) for spent, _ in parts)
    # Two layers do what stands before that; the norm, linear and attention of both are of one kind.
    assert {row.times for row in view.rows if row.section == "layer 0" and row.op == "attend"} == {2}
    assert [row.times for row in view.rows if row.section != "layer 0"] == [1] * (
        len(view.rows) - sum(row.section == "layer 0" for row in view.rows)
    )


@pytest.mark.parametrize("tokens", [1, 64])
def test_overview_of_one_layer_adds_up_to_the_step(tokens: int) -> None:
    view = overview(PROGRAM, Work(tokens, 1, *segment_work(50, tokens)), Roofs())
    assert [row.section for row in view.rows][:2] == ["embed", "layer 0"]
    assert view.rows[-1].section == "head"
    assert sum(row.seconds * row.times for row in view.rows) == pytest.approx(view.seconds)
    assert sum(row.read_bytes * row.times for row in view.rows) == view.spent.weight_bytes + view.spent.kv_bytes
    assert overview(PROGRAM, Work(1, 1, 1, 1), None).seconds is None


def test_rows_say_where_they_stand_and_what_they_read() -> None:
    programs = dict(stages(MODEL.family, MODEL.cfg, MODEL.tensors, CPU))
    plan, traced = ([tuple(vars(label).values()) for label in labels(programs[name])] for name in ("plan", "trace"))
    assert plan[:7] == [
        ("embed", "embed", "96 × 64", "Q8_0"),
        ("layer 0", "norm_quantize", "64", "q8g32"),
        ("layer 0", "linear", "64 → 128", "Q4_1"),
        ("layer 0", "rope_kv_write", "4/2 × 16", "bf16"),
        ("layer 0", "attend", "4/2 × 16", "bf16"),
        ("layer 0", "quantize_rows", "64", "q8g32"),
        ("layer 0", "linear_add", "64 → 64", "Q4_1"),
    ]
    assert [label[0] for label in plan[11:]] == ["layer 1"] * 4 + ["last layer"] * 8 + ["head"] * 2
    # Nothing is narrowed yet: what is left of the last layer is the head's.
    assert [label[0] for label in traced[-4:]] == ["layer 1"] + ["head"] * 3
    assert ("layer 0", "kv_write", "32", "f32") in traced
    assert ("layer 0", "linear", "128 → 64", "Q4_1") in traced


def test_attention_stands_in_the_first_layer_that_has_some() -> None:
    model = builders.build(builders.HYBRID, "Q8_0")
    rows = overview(compile_program(model.family, model.cfg, model.tensors, CPU), WORK, None).rows
    assert [row.section for row in rows if row.op == "attend"] == ["layer 1"]
    assert [row.section for row in rows if row.op == "delta_rule"] == ["layer 0"]


def test_formats_are_named_with_what_they_are_packed_as(monkeypatch: pytest.MonkeyPatch) -> None:
    eight = formats.get("Q8_0")
    monkeypatch.setattr(formats, "FORMATS", dict(formats.FORMATS))
    formats.register(replace(eight, name="Z8", gguf_type=-1, packed_as="Q8_0", convert=lambda blocks: blocks))
    model = builders.build(builders.BASE, "Q8_0", k="Z8")
    program = compile_program(model.family, model.cfg, model.tensors, CPU)
    assert next(label for label in labels(program) if label.op == "linear").format == "Q8_0+Z8 as Q8_0"


def test_what_takes_no_time_has_no_bound() -> None:
    floats = builders.build(builders.BASE, "BF16")
    merged = dict(stages(floats.family, floats.cfg, floats.tensors, CPU))["merge"]
    views = [row for row in overview(merged, WORK, Roofs()).rows if row.op == "split"]
    assert views
    assert {(row.seconds, row.bound) for row in views} == {(0.0, "")}
    assert [row.times for row in views] == [2, 2, 2]  # three in each of two layers
    unknown = overview(PROGRAM, WORK, None).rows
    assert {row.seconds for row in unknown} == {None}
    assert {row.bound for row in unknown if row.section != "last layer"} == {""}


@pytest.mark.parametrize(
    ("op", "attrs", "roof", "divisor"),
    [
        ("linear", {"order": "q8g32"}, "int8_ops", 1),
        ("linear", {"order": "q15g32"}, "int8_ops", 2),
        ("linear", {"order": "any"}, "bf16_flops", 1),
        ("linear", {"order": "tile"}, "bf16_flops", 1),
        ("linear", {"order": "f32"}, "f32_flops", 1),
        ("attend", {"order": "pages64.int8"}, "bf16_flops", 1),
        ("attend", {"order": "splits256"}, "bf16_flops", 1),
        ("rms_norm", {"order": "q8g32"}, "f32_flops", 1),  # no product
        ("rms_norm", {}, "f32_flops", 1),
    ],
)
def test_an_order_says_which_units_compute(op: str, attrs: dict[str, str], roof: str, divisor: int) -> None:
    assert arithmetic(Instr(op, (), (), attrs, ())) == (roof, divisor)
