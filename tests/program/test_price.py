"""Prices against counting by hand, and against the sum over an explicit loop."""

import program_builders as builders
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roofline.models.spec import expand
from roofline.ops import formats
from roofline.ops.batch import Batch, BatchLimits, Segment
from roofline.program.compile import compile_program
from roofline.program.overview import overview
from roofline.program.passes.price import Work, amount, price, segment_work, work_of
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


def test_work_of_a_batch_adds_its_segments() -> None:
    batch = Batch(BatchLimits(16, 4, 16, 16))
    batch.fill([Segment([1, 2, 3], 0, [0]), Segment([4], 20, [1, 2])], [2, 3])
    assert work_of(batch) == Work(tokens=4, rows=2, context=3 + 21, pairs=6 + 21)


class Roofs:
    int8_ops = bf16_flops = f32_flops = 1e9

    def read_bytes_per_s(self, working_set: int) -> float:
        return 1e9


@pytest.mark.parametrize("tokens", [1, 64])
def test_overview_of_one_layer_adds_up_to_the_step(tokens: int) -> None:
    view = overview(PROGRAM, Work(tokens, 1, *segment_work(50, tokens)), Roofs())
    assert [row.section for row in view.rows][:2] == ["embed", "layer 0"]
    assert view.rows[-1].section == "head"
    assert sum(row.seconds * row.times for row in view.rows) == pytest.approx(view.seconds)
    assert sum(row.read_bytes * row.times for row in view.rows) == view.spent.weight_bytes + view.spent.kv_bytes
    assert overview(PROGRAM, Work(1, 1, 1, 1), None).seconds is None
