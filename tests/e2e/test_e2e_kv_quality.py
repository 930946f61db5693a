"""The gate of the 8-bit KV cache: behind a long context the real model says what it says with the bf16 cache."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("roofline._native", reason="the C++ core is not built")

from roofline.bundle import LoadedModel, load
from roofline.ops.batch import Segment

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOKENS, FIRST, CHUNK = 1900, 1000, 50  # positions FIRST.. are compared, CHUNK of them a step


def text() -> str:
    """The reference of the Python language, about 2,000 tokens of it: it comes with every Python."""
    from pydoc_data.topics import topics

    return "".join(topics[name] for name in ("class", "try", "naming", "with", "yield"))


def rows(model: LoadedModel, ids: list[int]) -> Iterator[np.ndarray]:
    """float64 log-probabilities [CHUNK, vocab] of positions FIRST.., a step at a time."""
    batch, pages = model.executable.batch, list(range(-(-TOKENS // 16)))
    for start in range(0, TOKENS, CHUNK):
        batch.fill([Segment(ids[start : start + CHUNK], start, pages)], range(CHUNK if start >= FIRST else 0))
        model.executable.forward()
        if start >= FIRST:
            x = model.executable.logits().astype(np.float64)
            x -= x.max(axis=1, keepdims=True)
            yield x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def test_int8_behind_a_long_context(smollm2_path: Path) -> None:
    options = {"max_model_len": 2048, "cache_tokens": 2048}
    bf16, int8 = (load(str(smollm2_path), kv_cache_dtype=kv, **options) for kv in ("bf16", "int8"))
    assert bf16.tokenizer is not None
    ids = bf16.tokenizer.encode(text(), add_special=True)[:TOKENS]
    assert len(ids) == TOKENS
    divergence, same, gain, at = 0.0, 0, 0.0, FIRST
    for p, q in zip(rows(bf16, ids), rows(int8, ids), strict=True):
        divergence += float((np.exp(p) * (p - q)).sum())
        same += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
        count = min(CHUNK, TOKENS - 1 - at)  # the last position has no next token here
        following = np.array(ids[at + 1 : at + 1 + count])
        gain += float((p[np.arange(count), following] - q[np.arange(count), following]).sum())
        at += CHUNK
    compared = TOKENS - FIRST
    divergence, same_share, perplexity = divergence / compared, same / compared, float(np.exp(gain / (compared - 1)))
    print(f"mean KL {divergence:.2e}, top-1 {same_share:.2%}, perplexity ratio {perplexity:.5f}")
    assert divergence < 2e-3
    assert same_share > 0.98
    assert abs(perplexity - 1) < 0.005
