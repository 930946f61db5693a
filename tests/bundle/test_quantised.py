"""Quantised checkpoints of Hugging Face as whole models: logits on each backend against the dequantised model's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the reference runs on torch")
pytest.importorskip("safetensors.torch", reason="it writes the files")
native = pytest.importorskip("roofline._native", reason="the C++ core is not built")

from roofline.backends.cpu.truth import check_kernels  # noqa: E402
from roofline.models.registry import configure  # noqa: E402
from roofline.ops.batch import Segment  # noqa: E402
from roofline.weights.checkpoint import Checkpoint, open_checkpoint  # noqa: E402
from tests.backends.cpu_models import executable  # noqa: E402
from tests.backends.oracle import oracle_logits  # noqa: E402
from tests.weights import quantised_models as models  # noqa: E402
from tests.weights.test_quantised import NF4, nf4_tensors  # noqa: E402

IDS = list(range(3, 23))


def cpu_logits(checkpoint: Checkpoint) -> np.ndarray:
    """float32 [len(IDS), vocab]: the prompt, then a token alone, as decoding does."""
    run = executable(checkpoint, isa=native.isas()[0], tokens=32)
    check_kernels(run, checkpoint)
    parts = []
    for start, stop in ((0, len(IDS) - 1), (len(IDS) - 1, len(IDS))):
        run.batch.fill([Segment(IDS[start:stop], start, range(2))], range(stop - start))
        run.forward()
        parts.append(run.logits().copy())
    return np.concatenate(parts)


def wide(checkpoint: Checkpoint) -> Checkpoint:
    """The dequantised model: every tensor float32."""
    from dataclasses import replace

    tensors = {
        name: replace(info, format="F32", nbytes=4 * int(np.prod(info.shape)))
        for name, info in checkpoint.tensors.items()
    }
    return replace(
        checkpoint, tensors=tensors, bytes_of=lambda name: checkpoint.dequantize(name).view(np.uint8).reshape(-1)
    )


def compare(checkpoint: Checkpoint, exact: bool) -> None:
    ours = cpu_logits(checkpoint)
    dequantised = wide(checkpoint)
    family, cfg = configure(checkpoint.config)
    tensors: Any = checkpoint
    assert np.array_equal(oracle_logits(family, cfg, tensors, IDS), oracle_logits(family, cfg, dequantised, IDS))
    if exact:  # multiplied with the same float rows, in the same order
        assert ours.tobytes() == cpu_logits(dequantised).tobytes()
    want = oracle_logits(family, cfg, dequantised, IDS)
    error = np.abs(ours - want).max() / np.abs(want).max()
    assert error < 0.03, error  # activations of 8 bits, a cache of bf16
    assert (ours.argmax(axis=1) == want.argmax(axis=1)).mean() > 0.8


@pytest.mark.parametrize(
    "kind", ["gptq sym 64", "gptq 32", "gptq act-order", "awq -1", "pack-quantized", "int-quantized"]
)
def test_logits_are_those_of_the_dequantised_model(kind: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(models.written(tmp_path, kind))
    compare(checkpoint, exact=checkpoint.tensors["layers.0.attn.q.weight"].format == "F32")


def test_logits_of_nf4_are_those_of_the_dequantised_model_bit_for_bit(tmp_path: Path) -> None:
    stored, _ = nf4_tensors(double=True)
    compare(open_checkpoint(models.write(tmp_path, stored, NF4)), exact=True)
