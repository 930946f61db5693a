"""Which matrices a calibration says nothing of, and why."""

from collections.abc import Mapping

import numpy as np

from roofline.weights.families.shared.tensor_names import layer_part
from roofline.weights.quantise.file_form import CalibratedForm
from roofline.weights.quantise.rounding import searches_scales
from roofline.weights.quantise.tensors import is_quantised

_UNTRIED = "{form} has no scales to search for"
_GUESSING = "the layer that guesses further tokens is not run"
_EMBEDDING = "rows of embeddings, which no input is multiplied with"
_OTHERWISE = "multiplied with nothing that was measured"


def uncalibrated(form: CalibratedForm, kinds: Mapping[str, str]) -> list[str]:
    """Return a line on the matrices that were rounded without calibration, with the reasons; none where all were with.

    kinds: canonical name -> format that it is written in.
    """
    matrices = without = total = 0
    values: dict[str, int] = {}  # reason -> weights
    for name, info in form.checkpoint.tensors.items():
        if len(info.shape) < 2 or not is_quantised(kinds[name]):
            continue
        size = int(np.prod(info.shape))
        unread = _unread_parts(form, name)
        count, missing = len(unread), int(unread.sum())
        reason = form.calibration.reasons.get(name, "")
        if not searches_scales(kinds[name]) and name not in form.scaled:
            missing, reason = count, _UNTRIED.format(form=kinds[name])
        matrices, total, without = matrices + count, total + size, without + missing
        if missing:
            reason = reason or _reason(form, name)
            values[reason] = values.get(reason, 0) + size * missing // count
    if not without:
        return []
    share = 100 * sum(values.values()) / total
    reasons = "; ".join(f"{100 * size / total:.1f} %: {reason}" for reason, size in values.items())
    line = f"{without:,} of {matrices:,} matrices ({share:.1f} % of the weights) were rounded without calibration"
    return [f"{line}: {reasons}"]


def _unread_parts(form: CalibratedForm, name: str) -> np.ndarray:
    """bool [matrices]: of which of the matrices in a tensor nothing was measured."""
    if name in form.scaled:
        return np.zeros(1, bool)
    importance = form.calibration.importance.get(name)
    if importance is None:
        return np.ones(1, bool)
    return (np.atleast_2d(importance) == 1).all(axis=1) if importance.ndim > 1 else np.zeros(1, bool)


def _reason(form: CalibratedForm, name: str) -> str:
    layer = layer_part(name)[0]
    if layer and int(layer.split(".")[1]) >= form.checkpoint.config["layers"]:
        return _GUESSING
    return _EMBEDDING if "embed" in name else _OTHERWISE
