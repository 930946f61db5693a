"""The kernels of selective_scan: each instruction set against the declared order, to the bit."""

import math
from typing import Any

import numpy as np
import pytest

native = pytest.importorskip("roofline._native", reason="the C++ core is not built")
torch = pytest.importorskip("torch", reason="the orders are written in torch")

from roofline.backends.reference import state_orders  # noqa: E402
from roofline.ops.scan import scan_state  # noqa: E402
from roofline.ops.state import MATRIX  # noqa: E402
from tests.models.eager import LastStates  # noqa: E402

kernels, ISAS = native.kernels, native.isas()
EMPTY = np.zeros(0, np.float32)
SHAPES = [(1, 1, False), (7, 40, False), (128, 64, False), (3, 1, True), (16, 50, True)]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


class Scan:
    """One head of `columns` channels, or (rates) so many heads of one, over `tokens` tokens."""

    def __init__(self, tokens: int, states: int, columns: int, rates: bool) -> None:
        draw = np.random.default_rng(5)

        def reals(*shape: int, scale: float = 1.0) -> np.ndarray:
            return (draw.standard_normal(shape) * scale).astype(np.float32)

        self.states, self.columns, self.rates = states, columns, rates
        heads = columns if rates else 1
        self.x, self.b, self.c = reals(tokens, columns), reals(tokens, states), reals(tokens, states)
        self.dt = reals(tokens, heads, scale=3.0)
        self.a_log = reals(heads, states) if rates else reals(heads)
        self.dt_bias, self.d = reals(heads), reals(heads)

    def compute(self, isa: str, start: int = 0, stop: int | None = None, **slots: Any) -> np.ndarray:
        """y of tokens start..stop; slots: source, target, save and save_after, and bounds of a step."""
        rows = {name: getattr(self, name)[start:stop].ravel().copy() for name in ("x", "b", "c", "dt")}
        y = np.full((len(self.x[start:stop]), self.columns), np.nan, np.float32)
        rest = {"source": EMPTY, "target": EMPTY, "save": EMPTY, "save_after": 0, "least": 0.0, "most": math.inf}
        weights = {"a_log": self.a_log.T.ravel(), "dt_bias": self.dt_bias, "d": self.d}
        kernels.selective_scan(isa, **rows, **weights, **(rest | slots), y=y, states=self.states)
        return y

    def room(self) -> np.ndarray:
        """A slot with something stale in it."""
        return np.full((self.states, self.columns), np.nan, np.float32)

    def by_order(self, limits: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
        """y and the last state, as the order is written."""
        heads = self.columns if self.rates else 1
        store = LastStates({MATRIX: scan_state(self.columns, heads, self.states, self.rates)})
        store = store.step([(0, len(self.x))], ["one"])
        xbc, dt = torch.from_numpy(np.concatenate([self.x, self.b, self.c], axis=1)), torch.from_numpy(self.dt)
        a_log, dt_bias, d = (torch.from_numpy(w) for w in (self.a_log, self.dt_bias, self.d))
        y, after = state_orders.selective_scan_tokens(xbc, dt, (a_log, dt_bias, d), store, 0, (self.states, 1), limits)
        return y.numpy(), after.tensors[0, MATRIX, "one"].numpy().reshape(self.states, self.columns)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("states", "columns", "rates"), SHAPES)
@pytest.mark.parametrize("limits", [(0.0, math.inf), (0.25, 2.0)])
def test_selective_scan_is_its_order(
    isa: str, states: int, columns: int, rates: bool, limits: tuple[float, float]
) -> None:
    scan = Scan(20, states, columns, rates)
    state = scan.room()
    y = scan.compute(isa, target=state, least=limits[0], most=limits[1])
    wanted, last = scan.by_order(limits)
    assert same(y, wanted)
    assert same(state, last)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rates", [False, True])
def test_the_scan_does_not_depend_on_how_a_sequence_is_cut(isa: str, rates: bool) -> None:
    scan = Scan(50, 20, 72, rates)
    last = scan.room()
    whole = scan.compute(isa, target=last)
    for chunk in (1, 7, 33):
        slots, parts = [scan.room(), scan.room()], []
        for number, start in enumerate(range(0, 50, chunk)):
            source = slots[0] if start else EMPTY
            target = slots[0] if number % 3 else slots[1]  # in place, or into another slot
            parts.append(scan.compute(isa, start, start + chunk, source=source, target=target))
            if target is slots[1]:
                slots.reverse()
        assert same(np.concatenate(parts), whole), chunk
        assert same(slots[0], last), chunk


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rates", [False, True])
def test_state_saved_in_passing_is_that_of_stopping_there(isa: str, rates: bool) -> None:
    scan = Scan(30, 16, 40, rates)
    for after in (1, 16, 17, 30):
        stopped, saved, last, passed = (scan.room() for _ in range(4))
        whole = scan.compute(isa, target=last)
        scan.compute(isa, 0, after, target=stopped)
        assert same(scan.compute(isa, target=passed, save=saved, save_after=after), whole)
        assert same(saved, stopped)
        assert same(passed, last)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rates", [False, True])
def test_what_is_no_number_stays_visible(isa: str, rates: bool) -> None:
    for name in ("x", "b", "c", "dt"):
        scan = Scan(4, 16, 20, rates)
        getattr(scan, name)[1] = np.nan
        y = scan.compute(isa, least=0.1, most=1.0)
        assert np.isfinite(y[0]).all(), name
        assert np.isnan(y[1]).all(), name
