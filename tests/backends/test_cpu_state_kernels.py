"""Kernels of ops with recurrent state: each instruction set against the declared order, to the bit."""

from typing import Any

import numpy as np
import pytest

native = pytest.importorskip("roofline._native", reason="the C++ core is not built")
torch = pytest.importorskip("torch", reason="the orders are written in torch")

from roofline.backends.reference import orders, state_orders  # noqa: E402
from roofline.ops.state import COLUMNS, MATRIX  # noqa: E402
from tests.models.eager import LastStates  # noqa: E402

kernels, ISAS = native.kernels, native.isas()
EMPTY = np.zeros(0, np.float32)


def reals(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


class Head:
    """The delta rule of one head over `tokens` tokens."""

    def __init__(self, tokens: int, key_dim: int, value_dim: int, seed: int = 1) -> None:
        self.tokens, self.key_dim, self.value_dim = tokens, key_dim, value_dim
        self.q, self.k = (reals(tokens, key_dim, seed=seed + i) for i in range(2))
        self.v = reals(tokens, value_dim, seed=seed + 2)
        self.a, self.b = (reals(tokens, seed=seed + 3 + i, scale=3.0) for i in range(2))
        self.a_log, self.dt_bias = np.float32(0.7), np.float32(-0.4)

    def compute(self, isa: str, start: int = 0, stop: int | None = None, **slots: Any) -> np.ndarray:
        """o of tokens start..stop; slots: source, target, save and save_after."""
        part = slice(start, stop)
        y = np.full((len(self.a[part]), self.value_dim), np.nan, np.float32)
        rest = {"source": EMPTY, "target": EMPTY, "save": EMPTY, "save_after": 0, **slots}
        rows = {name: getattr(self, name)[part].copy() for name in ("q", "k", "v", "a", "b")}
        kernels.delta_rule(isa, **rows, a_log=self.a_log, dt_bias=self.dt_bias, eps=1e-6, **rest, y=y)
        return y

    def room(self) -> np.ndarray:
        """A slot with something stale in it."""
        return np.full((self.key_dim, self.value_dim), np.nan, np.float32)

    def by_order(self) -> tuple[np.ndarray, np.ndarray]:
        """o and the last state, as the order is written."""
        store = LastStates({MATRIX: (1, self.key_dim, self.value_dim)}).step([(0, self.tokens)], ["one"])
        qkv = torch.from_numpy(np.concatenate([self.q, self.k, self.v], axis=1))
        gates = tuple(torch.from_numpy(part.reshape(-1, 1)) for part in (self.a, self.b))
        rates = tuple(torch.tensor([value]) for value in (self.a_log, self.dt_bias))
        o, after = state_orders.delta_rule_tokens(qkv, (*gates, *rates), store, 0, (1, 1), self.key_dim, 1e-6)
        return o.numpy(), after.tensors[0, MATRIX, "one"].numpy()[0]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (20, 7), (1, 1), (33, 90), (64, 128)])
def test_delta_rule_is_its_order(isa: str, key_dim: int, value_dim: int) -> None:
    head = Head(9, key_dim, value_dim)
    state = head.room()
    o = head.compute(isa, target=state)
    wanted, matrix = head.by_order()
    assert same(o, wanted)
    assert same(state, matrix)


@pytest.mark.parametrize("isa", ISAS)
def test_the_delta_rule_does_not_depend_on_how_a_sequence_is_cut(isa: str) -> None:
    head = Head(300, 48, 72)  # longer than two stretches of tokens whose keys are made ready at once
    last = head.room()
    whole = head.compute(isa, target=last)
    if isa != "portable":
        assert same(whole, head.compute("portable"))
    for chunk in (1, 7, 64, 128, 129):
        slots = [head.room(), head.room()]
        parts = []
        for number, start in enumerate(range(0, head.tokens, chunk)):
            source = slots[0] if start else EMPTY
            target = slots[0] if number % 3 else slots[1]  # in place, or into another slot
            parts.append(head.compute(isa, start, start + chunk, source=source, target=target))
            if target is slots[1]:
                slots.reverse()
        assert same(np.concatenate(parts), whole), chunk
        assert same(slots[0], last), chunk


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("after", [1, 127, 128, 129, 200])
def test_state_saved_in_passing_is_that_of_stopping_there(isa: str, after: int) -> None:
    head = Head(200, 16, 40)
    stopped, saved, last, passed = (head.room() for _ in range(4))
    whole = head.compute(isa, target=last)
    head.compute(isa, 0, after, target=stopped)
    assert same(head.compute(isa, target=passed, save=saved, save_after=after), whole)
    assert same(saved, stopped)
    assert same(passed, last)
    head.compute(isa, save=saved, save_after=after)  # nobody wants the last
    assert same(saved, stopped)


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_no_number_stays_visible_in_its_head(isa: str) -> None:
    for name in ("q", "k", "v", "a", "b"):
        head = Head(4, 16, 20)
        getattr(head, name)[1] = np.nan
        o = head.compute(isa)
        assert np.isfinite(o[0]).all(), name
        assert np.isnan(o[1]).all(), name
    for value in (np.inf, -np.inf, 1e30, -1e30):  # gates have limits: everything stays, or nothing
        head = Head(4, 16, 20)
        head.a[1], head.b[2] = value, value
        assert np.isfinite(head.compute(isa)).all(), value


def test_gates_are_close_to_torch() -> None:
    x = torch.cat([torch.linspace(-30, 30, 6001), torch.tensor([-100.0, 100.0, 0.0, -17.3, 1e30, -1e30])])
    wide = torch.nn.functional.softplus(x.double(), threshold=1e9)
    error = (state_orders.softplus_exp2(x).double() - wide).abs() / wide.clamp(min=1e-30)
    assert float(error.max()) < 2e-6  # at -30, from the rounding of 30 log2(e)
    assert float(error[3000 - 400 : 3000 + 400].max()) < 4e-7
    assert torch.allclose(state_orders.sigmoid_exp2(x), torch.sigmoid(x), rtol=2e-6, atol=1e-36)


def convolve(isa: str, x: np.ndarray, w: np.ndarray, bias: np.ndarray, before: np.ndarray, silu: bool) -> np.ndarray:
    y = np.full_like(x, np.nan)
    kernels.causal_conv(isa, x.copy(), w.T.copy(), bias, before, silu, y, x.shape[1])
    return y


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("channels", "taps"), [(5, 2), (16, 3), (200, 4), (130, 16)])
@pytest.mark.parametrize("plain", [True, False])
def test_causal_conv_is_its_order(isa: str, channels: int, taps: int, plain: bool) -> None:
    x, w = reals(19, channels), reals(channels, taps, seed=1)
    bias = EMPTY if plain else reals(channels, seed=2)
    store = LastStates({COLUMNS: (taps - 1, channels)}).step([(0, 19)], ["one"])
    shift = None if plain else torch.from_numpy(bias)
    wanted, _ = state_orders.causal_conv_taps(torch.from_numpy(x), store, torch.from_numpy(w), shift, 0, not plain)
    whole = convolve(isa, x, w, bias, EMPTY, not plain)
    assert same(whole, wanted.numpy())
    for cut in (1, 2, 5):
        rows = np.concatenate([np.zeros((taps - 1, channels), np.float32), x])
        before = rows[cut : cut + taps - 1].copy()
        assert same(convolve(isa, x[cut:], w, bias, before, not plain), whole[cut:])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("count", [1, 16, 45])
def test_mul_and_sigmoid_mul_are_their_orders(isa: str, count: int) -> None:
    x, y, out = reals(count, scale=20.0), reals(count, seed=1), np.empty(count, np.float32)
    kernels.mul(isa, x, y, out)
    assert same(out, x * y)
    kernels.sigmoid_mul(isa, x, y, out)
    assert same(out, state_orders.sigmoid_mul_exp2(torch.from_numpy(x), torch.from_numpy(y)).numpy())
    x[0] = np.nan
    kernels.sigmoid_mul(isa, x, y, out)
    assert np.isnan(out[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("count", [1, 16, 45, 200])
def test_norms_of_gemma_are_their_orders(isa: str, count: int) -> None:
    x, y, out = reals(count, scale=3.0), reals(count, seed=1), np.empty(count, np.float32)
    row, other = torch.from_numpy(x)[None], torch.from_numpy(y)[None]
    kernels.rms_norm(isa, x, EMPTY, 1e-6, out)
    assert same(out, orders.rms_norm_lanes16(row, None, 1e-6, 1)[0].numpy())
    for a, b in ((x, y), (np.float32(1e-5) * x, y)):  # the second is shorter than what is divided by
        kernels.like_norm(isa, a, b, out)
        assert same(out, orders.like_norm_lanes16(torch.from_numpy(a)[None], other)[0].numpy())
    for z in (-0.5, 1.6448536):
        kernels.above_spread(isa, x, z, out)
        assert same(out, orders.above_spread_lanes16(row, z)[0].numpy())
