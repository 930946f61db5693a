"""The words of a verdict: what is said of the first layer that differs, and of each limit from both sides."""

import dataclasses
import math
from typing import Any

import pytest

from roofline.train.parity.findings import Parity
from roofline.train.parity.layers import Layer, Layers
from roofline.train.parity.verdict import _layer

FAR = Layer("layer 3", 0.25, 0.125, 0.5, 0.0625, True)
LONGER = Layer("layer 3", 0.125, 0.125, -0.5, 0.0625, True)
UNJUDGED = Layer("layer 3", 0.125, 0.125, 0.5, None, True)
OTHER = Layer("layer 2", 9.0, 1.0, 9.0, None, False)


def said(layer: Layer, kind: str = "activation", by_repeats: bool = False) -> str | None:
    kinds = {"activations": (OTHER, layer), "gradients": (OTHER,), "activation": layer.name, "gradient": None}
    if kind == "gradient":
        kinds = {"activations": (OTHER,), "gradients": (OTHER, layer), "activation": None, "gradient": layer.name}
    return _layer(Layers(step=7, judged=True, by_repeats=by_repeats, **kinds))  # type: ignore[arg-type]


@pytest.mark.parametrize(("by_repeats", "cause"), [(True, "repeats"), (False, "rounding")])
def test_what_explains_less_is_named(by_repeats: bool, cause: str) -> None:
    assert said(FAR, by_repeats=by_repeats) == (
        f"layer 3 is the first tensor to differ: by 0.25 of its size, where {cause} explains 0.12; nothing before it "
        "does"
    )
    assert said(LONGER, by_repeats=by_repeats) == (
        f"layer 3 is the first tensor to differ: its length is -0.5 longer or shorter, where {cause} explains 0.062; "
        "nothing before it does"
    )


def test_a_length_that_is_not_judged_is_not_said() -> None:
    assert "by 0.12 of its size" in str(said(UNJUDGED))


def test_gradients_are_said_from_the_loss_backward() -> None:
    assert said(FAR, "gradient") == (
        "layer 3 has the first gradient to differ, from the loss backward: by 0.25 of its size, where rounding "
        "explains 0.12; nothing above it does"
    )


def test_where_no_layer_is_named_nothing_is_said() -> None:
    assert _layer(Layers(7, True, False, (FAR,), (FAR,), None, None)) is None


def test_findings_are_plain_json_with_null_for_what_is_not_finite() -> None:
    values: dict[str, Any] = {field.name: None for field in dataclasses.fields(Parity)}
    values |= {"verdict": "identical", "margin": 0.25, "steps": 3, "notes": ("a",)}
    values["settings"] = (("lr", 0.5, math.inf), ("eps", math.nan, {"deep": [-math.inf, 1.0]}))
    plain = Parity(**values).plain()
    assert {key: plain[key] for key in ("verdict", "margin", "steps", "notes", "equal", "loss")} == {
        "verdict": "identical",
        "margin": 0.25,
        "steps": 3,
        "notes": ["a"],
        "equal": True,
        "loss": None,
    }
    assert plain["settings"] == [["lr", 0.5, None], ["eps", None, {"deep": [None, 1.0]}]]
