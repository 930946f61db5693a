"""Naive sampling: each control by its meaning, the noise by its statistics and its independence from the batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roofline.backends.reference.sampling import gumbel, log_softmax, noise_bits, sample, splitmix64, survivors
from roofline.backends.sampling import SampleRows


def rows_of(count: int, **fields: float) -> SampleRows:
    rows = SampleRows.greedy(count)
    for name, value in fields.items():
        getattr(rows, name)[:] = value
    return rows


def csr(rows: SampleRows, kind: str, ids: list[int], values: list[float]) -> SampleRows:
    """One row's history ("hist") or bias."""
    setattr(rows, f"{kind}_start", np.array([0, len(ids)], np.int32))
    setattr(rows, f"{kind}_ids", np.array(ids, np.int32))
    if kind == "hist":
        rows.hist_counts = np.array(values, np.int32)
    else:
        rows.bias_values = np.array(values, np.float32)
    return rows


def logits(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert sample(logits(1, 3, 3, 2), rows_of(1)).ids.tolist() == [1]


def test_bias_bans_and_masks() -> None:
    assert sample(logits(1, 3, 2), csr(rows_of(1), "bias", [1], [-np.inf])).ids.tolist() == [2]
    assert sample(logits(1, 3, 2), csr(rows_of(1), "bias", [0], [2.5])).ids.tolist() == [0]
    rows = rows_of(1)
    rows.mask = np.array([[0b101, 0b1]], np.uint32)
    wide = np.zeros((1, 40), np.float32)
    wide[0, [1, 32, 33]] = [9, 5, 8]
    assert sample(wide, rows).ids.tolist() == [32]


def test_repetition_divides_positives_and_multiplies_negatives_of_prompt_and_output() -> None:
    rows = csr(rows_of(1, repetition=2.0), "hist", [0, 1], [0, 3])
    assert sample(logits(4, -1, 2.5), rows).ids.tolist() == [2]
    assert sample(logits(-9, -1, -1.5), rows).ids.tolist() == [2]


def test_presence_and_frequency_count_generated_ids_only() -> None:
    prompt_only = csr(rows_of(1, presence=5.0, frequency=5.0), "hist", [0], [0])
    assert sample(logits(3, 2), prompt_only).ids.tolist() == [0]
    assert sample(logits(3, 2), csr(rows_of(1, presence=1.5), "hist", [0], [1])).ids.tolist() == [1]
    assert sample(logits(3, 2), csr(rows_of(1, frequency=0.4), "hist", [0], [3])).ids.tolist() == [1]


def test_top_k_keeps_the_lowest_ids_at_the_border() -> None:
    scores = np.array([1, 5, 2, 2, 2, 0], np.float32)
    assert survivors(scores, 3, 1.0, 0.0).tolist() == [1, 2, 3]


def test_top_p_and_min_p() -> None:
    scores = np.log(np.array([0.5, 0.2, 0.2, 0.1], np.float32))
    assert survivors(scores, 0, 0.69, 0.0).tolist() == [0, 1]
    assert survivors(scores, 0, 0.71, 0.0).tolist() == [0, 1, 2]
    assert survivors(scores, 0, 0.0, 0.0).tolist() == [0]
    assert survivors(scores, 0, 1.0, 0.3).tolist() == [0, 1, 2]
    assert survivors(scores, 0, 1.0, 0.5).tolist() == [0]


@given(st.integers(0, 5), st.floats(0, 1), st.floats(0, 1), st.lists(st.floats(-30, 30), min_size=1, max_size=20))
def test_somebody_always_survives(top_k: int, top_p: float, min_p: float, values: list[float]) -> None:
    scores = np.array(values, np.float32)
    kept = survivors(scores, top_k, top_p, min_p)
    assert kept.size >= 1
    assert int(np.argmax(scores)) in kept
    assert kept.size <= (top_k or scores.size)


def test_noise_has_the_written_bits() -> None:
    """splitmix64's first output for seed 0 (its published test vector), and one noise value computed by hand."""
    assert splitmix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF

    def mix(h: int) -> int:
        h ^= h >> 16
        h = h * 0x21F0AAAD & 0xFFFFFFFF
        h ^= h >> 15
        h = h * 0x735A2D97 & 0xFFFFFFFF
        return h ^ h >> 15

    key = splitmix64((7 + 0x9E3779B97F4A7C15 * (1 + (2 << 32 | 11))) % 2**64)
    bits = mix((mix(123 ^ key & 0xFFFFFFFF) + (key >> 32)) & 0xFFFFFFFF)
    assert noise_bits(7, 2, 11, np.array([123])).tolist() == [bits]


def test_samples_follow_the_softmax() -> None:
    scores = np.array([0.0, 1.0, 2.0, -1.0], np.float32)
    draws = 20_000
    rows = rows_of(draws, temperature=1.0)
    rows.position = np.arange(draws, dtype=np.int32)
    counts = np.bincount(sample(np.tile(scores, (draws, 1)), rows).ids, minlength=4)
    expected = np.exp(log_softmax(scores)) * draws
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # chi-squared, 3 degrees of freedom, p = 0.001


def test_gumbel_noise_has_its_mean_and_no_infinities() -> None:
    noise = gumbel(1, 0, 0, np.arange(200_000))
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.02)
    assert not np.array_equal(noise[:9], gumbel(2, 0, 0, np.arange(9)))
    assert not np.array_equal(noise[:9], gumbel(1, 1, 0, np.arange(9)))


def test_a_row_draws_the_same_alone_and_in_company() -> None:
    random = np.random.default_rng(0)
    scores = random.standard_normal((8, 50)).astype(np.float32)
    rows = rows_of(8, temperature=0.8, top_k=20, top_p=0.9)
    rows.seed = np.arange(8, dtype=np.uint64)
    together = sample(scores, rows).ids
    alone = rows_of(1, temperature=0.8, top_k=20, top_p=0.9)
    alone.seed = np.array([5], np.uint64)
    assert sample(scores[5:6], alone).ids[0] == together[5]


def test_logprobs_are_of_the_raw_logits() -> None:
    rows = csr(rows_of(1, logprobs=2), "bias", [2], [100.0])
    out = sample(logits(1, 3, 2, 3), rows)
    raw = log_softmax(np.array([1, 3, 2, 3], np.float32))
    assert out.ids.tolist() == [2]
    assert out.logprob[0] == raw[2]
    assert out.top_ids[0, :3].tolist() == [1, 3, -1]
    assert out.top_logprobs[0, 0] == raw[1]
    assert np.isnan(sample(logits(1, 2), rows_of(1)).logprob[0])


def test_a_row_with_nan_gives_no_id() -> None:
    values = np.array([[1, 3, 2], [1, np.nan, 2], [3, 1, np.inf]], np.float32)
    got = sample(values, rows_of(3, logprobs=1))
    assert got.ids.tolist() == [1, -1, 2]
    assert np.isnan(got.logprob[1])
    assert got.top_ids[:, 0].tolist() == [1, -1, 2]
