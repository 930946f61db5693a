"""The real model's logits from the cpu backend against plain float32 arithmetic on the dequantised weights."""

import pydoc_data.topics
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the oracle runs on torch")
pytest.importorskip("roofline._native", reason="the C++ core is not built")

pytestmark = pytest.mark.e2e

POSITIONS = 2048
LENGTH = 512


@pytest.mark.slow
def test_logits_against_the_oracle(smollm2_path: Path) -> None:
    from roofline.bundle import load
    from roofline.models import registry
    from roofline.ops.batch import Segment
    from roofline.weights.checkpoint import open_checkpoint
    from tests.backends.oracle import oracle_logits

    model = load(str(smollm2_path), max_batch_tokens=LENGTH, max_running=LENGTH, max_model_len=LENGTH)
    assert model.tokenizer is not None
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in ("class", "try", "formatstrings", "compound", "function"))
    ids = model.tokenizer.encode(text, add_special=False)[:POSITIONS]
    assert len(ids) == POSITIONS
    checkpoint, family = open_checkpoint(smollm2_path), registry.get(model.config.family)
    cosines, agree = [], []
    for start in range(0, POSITIONS, LENGTH):
        part = ids[start : start + LENGTH]
        model.executable.batch.fill([Segment(part, 0, range(LENGTH // 16))], range(LENGTH))
        model.executable.forward()
        got = model.executable.logits()
        wanted = oracle_logits(family, model.config, checkpoint, part)
        dots = (got * wanted).sum(axis=1)
        cosines.append(dots / np.linalg.norm(got, axis=1) / np.linalg.norm(wanted, axis=1))
        agree.append(got.argmax(axis=1) == wanted.argmax(axis=1))
    cosine, top1 = np.concatenate(cosines), np.concatenate(agree)
    print(f"cosine: mean {cosine.mean():.6f}, least {cosine.min():.6f}; top-1 agreement {top1.mean():.4f}")
    assert cosine.mean() > 0.999
    assert top1.mean() > 0.97
