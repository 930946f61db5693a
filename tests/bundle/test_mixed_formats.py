"""Weights of one layer in several formats: what the cpu backend makes of q, k and v that no single product makes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the reference runs in torch")
pytest.importorskip("transformers", reason="the configurations stand beside its models")

from roofline.bundle import load
from roofline.common.errors import UnsupportedError
from roofline.ops import formats
from roofline.ops.batch import Segment
from roofline.weights.checkpoint import Checkpoint
from roofline.weights.random_weights import random_checkpoint
from tests.models.parity_cases import CASES

# Products of floats and of integers read two kinds of rows, so that two of the three may be made together.
MIXES = [("BF16", "BF16", "Q8_0"), ("Q4_0", "Q8_0", "F16"), ("BF16", "Q8_0", "BF16"), ("F16", "Q4_0", "Q6_K")]
# gemma3_scaled has one head of k, so that its norm covers all of it; that of olmo2's covers all heads of both.
FAMILIES = ("llama", "llama_bias", "qwen3", "olmo2", "glm4", "granite", "gemma3", "gemma3_scaled")
FAMILIES += ("exaone4_windows", "hunyuan_biases")


def logits(source: Checkpoint, **options: Any) -> np.ndarray:
    loaded = load(source, cache_tokens=64, max_model_len=64, text=False, **options)
    loaded.executable.batch.fill([Segment([1, 5, 9, 90, 31], 0, range(4))], range(5))
    loaded.executable.forward()
    values = loaded.executable.logits().copy()
    loaded.executable.close()
    return values


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", FAMILIES)
def test_q_k_and_v_in_several_formats(name: str, mix: tuple[str, str, str]) -> None:
    config = dict(CASES[name].config) | ({"width": 256} if "Q6_K" in mix else {})
    made = random_checkpoint(config, 0)
    tensors = dict(made.tensors)
    for layer in range(config["layers"]):
        for part, form in zip("qkv", mix, strict=True):
            info = tensors[f"layers.{layer}.attn.{part}.weight"]
            tensors[info.name] = replace(info, format=form, nbytes=formats.get(form).nbytes(info.shape))
    kept = {each: formats.get(info.format).quantize(made.dequantize(each)) for each, info in tensors.items()}
    source = replace(made, tensors=tensors, bytes_of=kept.__getitem__)
    ours, expected = logits(source, backend="cpu", threads=1), logits(source, backend="reference", arithmetic="plain")
    assert np.abs(ours - expected).max() < 0.05 * expected.std()


def test_experts_of_a_layer_in_formats_that_no_product_reads_are_named() -> None:
    """Some in blocks of integers, some in floats: one product goes over all experts of a layer."""
    config = {**CASES["llama"].config, "family": "mixtral", "experts": 4, "experts_per_token": 2}
    made = random_checkpoint(config, 0)
    tensors = dict(made.tensors)
    for name in [each for each in tensors if ".experts." in each]:
        info, (before, part) = tensors.pop(name), name.split(".experts.")
        shape = (info.shape[0] // 4, info.shape[1])
        for number in range(4):
            form = "F16" if number == 2 and name == "layers.1.mlp.experts.down.weight" else "Q4_0"
            one = f"{before}.experts.{number}.{part}"
            tensors[one] = replace(info, name=one, shape=shape, format=form, nbytes=formats.get(form).nbytes(shape))
    source = replace(made, tensors=tensors, path=Path("/models/mixture"))
    one, remedy = r"layers\.1\.mlp\.experts\.2\.down\.weight", "Use instead: .*`roofline quantize`"
    with pytest.raises(UnsupportedError, match=rf"^/models/mixture: .* {one} are in F16, .* in Q4_0\. {remedy}"):
        load(source, text=False, backend="cpu")
