"""Weight formats that GPUs have no kernels for."""

import gpu_models
import pytest

from roofline.backends.gpu.program import compile_for_gpu
from roofline.backends.options import LoadOptions
from roofline.common.errors import UnsupportedError
from roofline.hardware.chips import chips
from roofline.models.config import ModelConfig
from roofline.weights.random_weights import random_checkpoint


def test_formats_without_kernels_are_refused_by_the_names_of_the_file():
    source = random_checkpoint({**gpu_models.LLAMA}, seed=3, form="MXFP4")
    with pytest.raises(UnsupportedError, match=r"weights of MXFP4 on a GPU.*the cpu backend.*Q4_K"):
        compile_for_gpu(source, ModelConfig.of(source.config), LoadOptions(backend="gpu"), chips.get("sm_90"))
