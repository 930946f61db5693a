"""Weight formats of GGUF files that GPUs have no kernels for: others stand in for some, and the rest is refused."""

import gpu_models
import numpy as np
import pytest

from roofline.backends.gpu.pack import STAND_INS, stand_in
from roofline.backends.gpu.program import compile_for_gpu
from roofline.backends.options import LoadOptions
from roofline.common.errors import UnsupportedError
from roofline.hardware.chips import chips
from roofline.models.config import ModelConfig
from roofline.ops import formats
from roofline.weights.random_weights import random_checkpoint


@pytest.mark.parametrize("name", ["Q5_0", "IQ4_NL", "MXFP4"])
def test_what_stands_in_has_the_same_values(name):
    raw = formats.get(name).quantize(np.random.default_rng(3).standard_normal((16, 64)).astype(np.float32))
    other = formats.get(STAND_INS[name]).dequantize(stand_in(raw, name), (16, 64))
    assert np.array_equal(other, formats.get(name).dequantize(raw, (16, 64)))


@pytest.mark.parametrize(("exponent", "fits"), [(104, True), (103, False), (143, True), (144, False)])
def test_exponents_that_half_precision_does_not_hold_are_refused(exponent, fits):
    raw = np.full(17, 0x21, np.uint8)
    raw[0] = exponent
    if fits:
        assert stand_in(raw, "MXFP4").shape == (34,)
        return
    with pytest.raises(UnsupportedError, match=r"format MXFP4 on a GPU.*float16"):
        stand_in(raw, "MXFP4")


def test_formats_without_kernels_are_refused_by_the_names_of_the_file():
    source = random_checkpoint({**gpu_models.LLAMA}, seed=3, form="Q5_1")
    with pytest.raises(UnsupportedError, match=r"weights of Q5_1 on a GPU.*the cpu backend.*Q4_K"):
        compile_for_gpu(source, ModelConfig.of(source.config), LoadOptions(backend="gpu"), chips.get("sm_90"))
