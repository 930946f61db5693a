"""The scale of losses in float16: when it is halved and doubled, and between which limits."""

import pytest

pytest.importorskip("torch", reason="training is torch")

from roofline.train.run.gradients import Scaler


def test_a_scale_doubles_after_2000_good_steps_in_a_row() -> None:
    scaler = Scaler()
    for turn in range(2):
        for _ in range(1999):
            scaler.settle(True)
        assert scaler.scale == 2.0 ** (16 + turn)
        scaler.settle(True)
        assert scaler.scale == 2.0 ** (17 + turn)
    scaler.settle(False)
    assert (scaler.scale, scaler.good) == (2.0**17, 0)
    for _ in range(1999):
        scaler.settle(True)
    assert scaler.scale == 2.0**17


@pytest.mark.parametrize(
    ("scale", "is_finite", "expected"),
    [(2.0, False, 1.0), (1.0, False, 1.0), (2.0**23, True, 2.0**24), (2.0**24, True, 2.0**24)],
)
def test_a_scale_has_limits(scale: float, is_finite: bool, expected: float) -> None:
    scaler = Scaler(scale, 1999)
    scaler.settle(is_finite)
    assert scaler.scale == expected
