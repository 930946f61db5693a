"""Any quantization_config and any shapes of a quantised matrix: its exact values, or an error of ours that says why."""

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.weights.files.mapped import TensorInfo
from roofline.weights.quantised.method import QuantisedMatrix, TensorFiles
from roofline.weights.quantised.methods import check_config
from tests.weights import quantised_models as models
from tests.weights.test_quantised import NF4

torch = pytest.importorskip("torch")

CONFIGS = [config for config, *_ in models.KINDS.values()] + [NF4]
VALUES = (
    st.none() | st.booleans() | st.integers(-2, 130) | st.floats(allow_nan=True) | st.text(max_size=4)
    | st.sampled_from(["gptq", "awq", "gptq_v2", "group", "channel", "int", "float", "pack-quantized", [128, 128], {}])
    | st.lists(st.integers(0, 3), max_size=2)
    | st.dictionaries(st.sampled_from(["weights", "x"]), st.integers(), max_size=2)
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_configuration_is_read_or_refused(data: st.DataObject) -> None:
    """A sound configuration of which some keys are changed, left out or added."""
    config = json.loads(json.dumps(data.draw(st.sampled_from(CONFIGS))))
    tables = [config]
    if "config_groups" in config:
        tables += [config["config_groups"]["group_0"], config["config_groups"]["group_0"]["weights"]]
    table = data.draw(st.sampled_from(tables))
    key = data.draw(st.sampled_from([*sorted(table), "new_key"]))
    if data.draw(st.booleans()) and key in table:
        del table[key]
    else:
        table[key] = data.draw(VALUES)
    with contextlib.suppress(UnsupportedError):
        check_config(Path("config.json"), config)
        assert table.get("new_key") is None  # what is read has no key that nobody knows


class Memory:
    """Tensors in memory, as the readers of files give them."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        kinds = {"int32": "I32", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "int64": "I64", "int8": "I8"}
        flat = {n: torch.empty(t.numel(), dtype=t.dtype).copy_(t.reshape(-1)) for n, t in tensors.items()}
        self._arrays = {n: t.view(torch.uint8).numpy() for n, t in flat.items()}
        self.tensors = {
            n: TensorInfo(n, kinds[str(t.dtype).removeprefix("torch.")], tuple(t.shape), t.nbytes)
            for n, t in tensors.items()
        }

    def read(self, name: str) -> np.ndarray:
        return self._arrays[name]


SIZES = st.sampled_from([1, 7, 8, 16, 32, 33, 64, 96, 128, 160, 192])


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_any_shape_is_read_exactly_or_refused(data: st.DataObject) -> None:
    from roofline.ops import formats

    kind = data.draw(st.sampled_from(sorted(models.KINDS)))
    config, make, write, _ = models.KINDS[kind]
    rows, columns = data.draw(SIZES), data.draw(SIZES)
    try:
        codes = make((rows, columns), np.random.default_rng(0))
        tensors = {f"m{end}": tensor for end, tensor in write(codes).items()}
    except (ValueError, IndexError, ZeroDivisionError):
        return  # its own tools write no such matrix
    changed = data.draw(st.sampled_from(["", "", *sorted(tensors)]))
    if changed:
        old = tensors[changed]
        shape = data.draw(st.lists(st.sampled_from([0, 1, 4, 8, 16, 128, 192]), max_size=3))
        tensors[changed] = torch.ones(shape, dtype=data.draw(st.sampled_from([old.dtype, torch.float32, torch.int32])))
    same = not changed or (tensors[changed].shape == old.shape and torch.equal(tensors[changed], old))
    source = Memory(tensors)
    try:
        made: list[QuantisedMatrix] = list(check_config(Path("c"), config).parameters(TensorFiles(Path("m"), source)))
        for parameter in made:
            values = formats.get(parameter.format).dequantize(parameter.make(), parameter.shape)
            assert parameter.info.nbytes <= 64 * (sum(info.nbytes for info in source.tensors.values()) + 64)
            if same:
                assert parameter.shape == (rows, columns)
                assert np.array_equal(values, codes.values)
    except (ConfigError, UnsupportedError):
        return
    assert made or changed


def test_the_fuzz_reads_sound_ones() -> None:
    """So that refusing everything would not pass: every kind is read in its own shape."""
    for config, make, write, _ in models.KINDS.values():
        codes = make((32, 64), np.random.default_rng(0))
        source = Memory({f"m{end}": tensor for end, tensor in write(codes).items()})
        with tempfile.TemporaryDirectory() as folder:
            (parameter,) = check_config(Path(folder), config).parameters(TensorFiles(Path(folder), source))
        assert parameter.shape == (32, 64)
