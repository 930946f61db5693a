"""Kernels with recurrent state beside the ops' references, and that no cut of a text changes a bit."""

from functools import partial

import numpy as np
import pytest

from roofline import ops
from roofline.hardware.chips import chips
from roofline.ops.batch import NO_SLOT, STATE_FIELDS, Batch, BatchLimits, Segment, StateMove

torch = pytest.importorskip("torch")
CHIP = chips.get("sm_90")
SLOTS = 6


def fields_of(segments):
    """The fields on the device of a step, and how many tokens it has."""
    from roofline.backends.gpu.kernels.causal_conv import StateFields

    batch = Batch(BatchLimits(tokens=64, segments=8, rows=8, pages=64, state_slots=SLOTS))
    batch.fill(segments, [0])
    names = {"header": 16, "seg_start": len(segments) + 1} | dict.fromkeys(
        ("context_len", *STATE_FIELDS), len(segments)
    )
    return StateFields(**{name: torch.from_numpy(getattr(batch, name)[:n].copy()) for name, n in names.items()})


def pages(tokens):
    return list(range(-(-tokens // 16)))


class Scan:
    """What a text of the tests is made of for the selective scan, and its results by the reference in float64: four
    heads in two groups, or 37 channels with a rate for each of their states."""

    def __init__(self, tokens: int, dtype: str, rates: bool) -> None:
        self.heads, self.width, self.states, self.groups = (37, 37, 5, 1) if rates else (4, 80, 20, 2)
        self.xbc = torch.randn(tokens, self.width + 2 * self.groups * self.states).to(getattr(torch, dtype))
        self.dt = torch.randn(tokens, self.heads).to(getattr(torch, dtype))
        shape = (self.heads, self.states) if rates else (self.heads,)
        self.weights = torch.randn(shape), torch.randn(self.heads), torch.randn(self.heads)
        self.sizes = {"states": self.states, "groups": self.groups, "least": 0.2, "most": 1.5}

    def want(self) -> "torch.Tensor":
        from roofline.ops.state_rows import StateRows

        wide = self.xbc.double(), self.dt.double(), StateRows(1, len(self.xbc))
        out, _ = ops.selective_scan(*wide, *(w.double() for w in self.weights), layer=0, **self.sizes)
        return out


class Rows:
    """What a text of the tests is made of, and its results by the references, which add up in float32."""

    def __init__(self, tokens: int, dtype: str, key_heads: int = 2, value_heads: int = 4, tiled: bool = False) -> None:
        torch.manual_seed(3)
        self.tokens, self.channels = tokens, 37
        self.x = torch.randn(tokens, self.channels).to(getattr(torch, dtype))
        self.w, self.bias = torch.randn(self.channels, 4), torch.randn(self.channels)
        self.heads = {"key_heads": key_heads, "value_heads": value_heads, "key_dim": 20, "tiled": tiled}
        self.value_dim = 40
        width = 2 * key_heads * 20 + value_heads * self.value_dim
        self.qkv = torch.randn(tokens, width).to(getattr(torch, dtype))
        self.a, self.b = torch.randn(2, tokens, value_heads).to(getattr(torch, dtype))
        self.a_log, self.dt_bias = torch.randn(2, value_heads)
        self.scans = {rates: Scan(tokens, dtype, rates) for rates in (False, True)}

    def conv(self, silu: bool) -> "torch.Tensor":
        from roofline.ops.state_rows import StateRows

        out, _ = ops.causal_conv(
            self.x.double(), StateRows(1, self.tokens), self.w.double(), self.bias.double(), layer=0, silu=silu
        )
        return out

    def delta(self) -> "torch.Tensor":
        from roofline.ops.state_rows import StateRows

        gates = self.a_log.double(), self.dt_bias.double()
        wide = self.qkv.double(), self.a.double(), self.b.double()
        out, _ = ops.delta_rule(*wide, StateRows(1, self.tokens), *gates, layer=0, **self.heads)
        return out


def conv(rows, states, segments, start, stop, silu=True):
    from roofline.backends.gpu.kernels.causal_conv import causal_conv

    out = torch.full((stop - start, rows.channels), float("nan"))
    causal_conv(CHIP, fields_of(segments), rows.x[start:stop], states, rows.w, rows.bias, silu=silu, out=out)
    return out


def delta(rows, states, segments, start, stop):
    from roofline.backends.gpu.kernels.delta_rule import DeltaHeads, delta_rule

    out = torch.full((stop - start, rows.heads["value_heads"] * rows.value_dim), float("nan"))
    gates = rows.a[start:stop], rows.b[start:stop], rows.a_log, rows.dt_bias
    delta_rule(CHIP, fields_of(segments), rows.qkv[start:stop], gates, states, DeltaHeads(**rows.heads), out=out)
    return out


def scan(rows, states, segments, start, stop, rates=False):
    from roofline.backends.gpu.kernels.selective_scan import ScanSizes, selective_scan

    text = rows.scans[rates]
    out = torch.full((stop - start, text.width), float("nan"))
    parts = text.xbc[start:stop], text.dt[start:stop]
    selective_scan(CHIP, fields_of(segments), *parts, text.weights, states, ScanSizes(**text.sizes), out=out)
    return out


def slots_of(width):
    return torch.full((SLOTS, 2, width + 3), float("nan"))[:, 1, 1 : width + 1]  # slots that lie apart


KERNELS = {
    "conv": (conv, 3 * 37),
    "delta": (delta, 4 * 20 * 40),
    "scan": (scan, 20 * 80),
    "rates": (partial(scan, rates=True), 5 * 37),
}


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_convolution_is_the_references(dtype, silu):
    rows = Rows(11, dtype)
    got = conv(rows, slots_of(3 * 37), [Segment(range(11), 0, pages(11), state=StateMove(target=2))], 0, 11, silu)
    assert torch.allclose(got.double(), rows.conv(silu), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_delta_rule_is_the_references(dtype, tiled):
    rows = Rows(11, dtype, tiled=tiled)
    got = delta(rows, slots_of(4 * 20 * 40), [Segment(range(11), 0, pages(11), state=StateMove(target=2))], 0, 11)
    assert torch.allclose(got.double(), rows.delta(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rates", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_selective_scan_is_the_references(dtype, rates):
    rows = Rows(11, dtype)
    text = rows.scans[rates]
    states = slots_of(text.states * text.width)
    got = scan(rows, states, [Segment(range(11), 0, pages(11), state=StateMove(target=2))], 0, 11, rates)
    assert torch.allclose(got.double(), text.want(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rates", [False, True])
def test_steps_of_a_scan_far_from_zero_stay_finite(rates):
    rows = Rows(6, "float32")
    text = rows.scans[rates]
    text.dt, text.sizes = 100.0 * text.dt, {"states": text.states, "groups": text.groups}
    states = slots_of(text.states * text.width)
    got = scan(rows, states, [Segment(range(6), 0, pages(6), state=StateMove(target=2))], 0, 6, rates)
    assert torch.allclose(got.double(), text.want(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", ["xbc", "dt"])
def test_what_is_no_number_stays_none_in_a_scan(part):
    """A bound takes no NaN's place; heads whose rows have none are untouched."""
    rows = Rows(6, "float32")
    text = rows.scans[False]
    whole = scan(rows, slots_of(1600), [Segment(range(6), 0, pages(6), state=StateMove(target=2))], 0, 6)
    getattr(text, part)[3, 0] = float("nan")  # of the first head
    got = scan(rows, slots_of(1600), [Segment(range(6), 0, pages(6), state=StateMove(target=2))], 0, 6)
    assert torch.equal(got[:3], whole[:3])
    assert torch.equal(got[:, 20:], whole[:, 20:])
    assert got[3:, 0].isnan().all()
    assert got[3:, 1:20].isnan().all() == (part == "dt")


def test_gates_far_from_zero_stay_finite():
    rows = Rows(6, "float32")
    rows.a, rows.b = 100.0 * rows.a, 100.0 * rows.b
    got = delta(rows, slots_of(4 * 20 * 40), [Segment(range(6), 0, pages(6), state=StateMove(target=2))], 0, 6)
    assert torch.allclose(got.double(), rows.delta(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("cut", [1, *(pytest.param(cut, marks=pytest.mark.slow) for cut in (2, 5)), 10])
def test_no_cut_of_a_text_changes_a_bit(kernel, cut):
    """The state behind the cut lies in another slot, in the same one, and was saved in passing."""
    compute, width = KERNELS[kernel]
    rows, ids = Rows(11, "bfloat16"), range(11)
    states = slots_of(width)
    move = StateMove(target=2, save_at=cut, save_to=4)
    whole = compute(rows, states, [Segment(ids, 0, pages(11), state=move)], 0, 11)
    first = compute(rows, states, [Segment(ids[:cut], 0, pages(cut), state=StateMove(target=1))], 0, cut)
    assert torch.equal(first, whole[:cut])
    assert torch.equal(states[1], states[4])
    for source, target in ((4, 4), (1, 5), (1, 1)):
        rest = compute(rows, states, [Segment(ids[cut:], cut, pages(11), state=StateMove(source, target))], cut, 11)
        assert torch.equal(rest, whole[cut:])
        assert torch.equal(states[target], states[2])
    assert states[[0, 3]].isnan().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_company_changes_no_bit(kernel):
    """Two texts, of which one begins and one goes on, and a segment that a captured step has and no text."""
    compute, width = KERNELS[kernel]
    rows, ids = Rows(11, "float32"), range(11)
    states = slots_of(width)
    whole = compute(rows, states, [Segment(ids, 0, pages(11), state=StateMove(target=0))], 0, 11)
    compute(rows, states, [Segment(ids[:4], 0, pages(4), state=StateMove(target=1))], 0, 4)
    compute(rows, states, [Segment(ids[4:5], 4, pages(5), state=StateMove(1, NO_SLOT))], 4, 5)  # nobody needs it behind
    beside = [
        Segment(ids[4:], 4, pages(11), state=StateMove(1, 2)),
        Segment(ids[:4], 0, pages(4), state=StateMove(target=3)),
    ]
    order = [*range(4, 11), *range(4)]
    for text, names in ((rows, ("x", "qkv", "a", "b")), *((text, ("xbc", "dt")) for text in rows.scans.values())):
        for name in names:
            setattr(text, name, getattr(text, name)[order])
    got = compute(rows, states, beside, 0, 11)
    assert torch.equal(got, whole[order])
    assert torch.equal(states[2], states[0])
    assert np.isfinite(states[3].numpy()).all()


def test_a_padded_step_keeps_no_state_and_reads_none():
    """A captured step has more segments and rows than the one that it is run for."""
    from roofline.backends.gpu.runtime.step import DeviceFields, StepSizes

    batch = Batch(BatchLimits(tokens=8, segments=4, rows=4, pages=16, state_slots=SLOTS))
    for name in STATE_FIELDS:
        getattr(batch, name)[:] = 5  # of an earlier step
    batch.fill([Segment([1], 0, [0], state=StateMove(target=2))], [0])
    fields, sizes = DeviceFields(batch, "cpu"), StepSizes(4, 4, 4, 1, 16)
    fields.pad(sizes)
    fields.upload()
    of_step = fields.of(sizes)
    assert of_step["state_out"].tolist() == [2, NO_SLOT, NO_SLOT, NO_SLOT]
    assert of_step["state_in"].tolist() == [NO_SLOT] * 4
    assert of_step["save_to"].tolist() == [NO_SLOT] * 4
