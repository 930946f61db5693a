"""Sampling on the device against the naive sampler: the same noise bits, the same ids, whatever is switched on."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from roofline.backends.reference import sampling as naive
from roofline.backends.sampling import MAX_LOGPROBS, SampleRows
from roofline.hardware.chips import chips

torch = pytest.importorskip("torch")
# What is drawn is a seed, which cannot be made simpler: shrinking it would run the interpreter for five minutes.
DRAWN = settings(max_examples=8, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))


def choose(logits, rows, chip="sm_90"):
    from roofline.backends.gpu.kernels.sample import sample

    return sample(chips.get(chip), torch.from_numpy(logits), rows).fetch()


def lists(random, count, vocab, most):
    """CSR lists of distinct ids: (starts, ids)."""
    each = [random.permutation(vocab)[: random.integers(0, min(most, vocab) + 1)] for _ in range(count)]
    return np.cumsum([0, *map(len, each)]).astype(np.int32), np.concatenate(each).astype(np.int32)


def random_rows(random, count, vocab, *, cut=True, adjust=True):
    """Rows with everything drawn: some switched off, some at their ends."""
    pick = lambda *values: random.choice(np.array(values), count)  # noqa: E731
    rows = SampleRows.greedy(count)
    rows.temperature = pick(0.0, 0.3, 1.0, 1.7).astype(np.float32)
    rows.seed = random.integers(0, 2**64, count, np.uint64)
    rows.sample_index = random.integers(0, 2**31 - 1, count, np.int32)
    rows.position = random.integers(0, 2**31 - 1, count, np.int32)
    rows.logprobs = pick(-1, 0, 3, MAX_LOGPROBS).astype(np.int32)
    if cut:
        rows.top_k = pick(0, 1, 3, vocab // 2, vocab, 2 * vocab).astype(np.int32)
        rows.top_p = pick(0.0, 0.01, 0.5, 0.9, 1.0, 1.0).astype(np.float32)
        rows.min_p = pick(0.0, 0.0, 0.05, 1.0).astype(np.float32)
    if adjust:
        rows.repetition = pick(1.0, 1.3, 0.8).astype(np.float32)
        rows.presence, rows.frequency = pick(0.0, 0.6).astype(np.float32), pick(0.0, 0.37).astype(np.float32)
        rows.hist_start, rows.hist_ids = lists(random, count, vocab, 70)
        rows.hist_counts = random.integers(0, 5, len(rows.hist_ids), np.int32)
        rows.bias_start, rows.bias_ids = lists(random, count, vocab, 9)
        rows.bias_values = random.choice(np.array([-np.inf, -2.5, 3.3], np.float32), len(rows.bias_ids))
        if random.integers(2):
            rows.mask = random.integers(0, 2**32, (count, -(-vocab // 32)), np.uint32)
    return rows


def same(got, want):
    assert got.ids.tolist() == want.ids.tolist()
    assert got.top_ids.tolist() == want.top_ids.tolist()
    for a, b in ((got.logprob, want.logprob), (got.top_logprobs, want.top_logprobs)):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@DRAWN
@given(
    data=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([1, 2, 31, 300, 1037]),
    levels=st.sampled_from([0, 3]),
    cut=st.booleans(),
    adjust=st.booleans(),
)
def test_ids_of_the_naive_sampler(data, vocab, levels, cut, adjust):
    random = np.random.default_rng(data)
    logits = (random.standard_normal((6, vocab)) * 3).astype(np.float32)
    if levels:  # many equal logits, both zeros among them
        logits = np.round(logits / levels) * np.float32(levels)
    rows = random_rows(random, 6, vocab, cut=cut, adjust=adjust)
    same(choose(logits, rows), naive.sample(logits, rows))


@DRAWN
@given(data=st.integers(0, 2**32 - 1), vocab=st.sampled_from([5, 300, 1037]))
def test_scores_have_the_bits_of_the_naive_ones(data, vocab):
    from roofline.backends.gpu.kernels.scores import scores
    from roofline.backends.gpu.kernels.settings import SampleSettings

    random = np.random.default_rng(data)
    logits = (random.standard_normal((4, vocab)) * 3).astype(np.float32)
    rows = random_rows(random, 4, vocab)
    got = scores(chips.get("sm_90"), torch.from_numpy(logits), SampleSettings.of(rows, "cpu")).numpy()
    for row, temperature in enumerate(rows.temperature):
        want = naive.penalised(logits[row], rows, row)
        np.testing.assert_array_equal(got[row], want / temperature if temperature else want)


@pytest.mark.parametrize("cut", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_vocabularies_of_several_splits(cut):
    random = np.random.default_rng(1)
    wide = (random.standard_normal((5, 20_100)) * 2).astype(np.float32)
    logits = wide[:, :20_011]  # rows that lie apart
    logits[:, 20_010] = 9.0  # the last id of the last split ties with the first of the first
    logits[0, 0] = 9.0
    logits[1, [3, 3 + 512]] = 10.0  # and within a split two that the same lane sees
    rows = random_rows(random, 5, 20_011, cut=cut, adjust=False)
    rows.temperature[:2] = 0.0
    got = choose(logits, rows, "gfx942")
    same(got, naive.sample(logits, rows))
    assert got.ids[:2].tolist() == [0, 3]


def test_noise_has_the_bits_of_the_reference_and_nearly_its_values(interpreted):
    import triton.language as tl

    from roofline.backends.gpu.kernels import noise

    @interpreted.jit
    def draw(words, bits, values, KEY: tl.constexpr, BITS: tl.constexpr, GUMBEL: tl.constexpr, BLOCK: tl.constexpr):
        id = tl.arange(0, BLOCK)
        key = KEY(tl.load(words), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3))
        tl.store(bits + id, BITS(key, id).to(tl.int32, bitcast=True))
        tl.store(values + id, GUMBEL(key, id))

    random = np.random.default_rng(3)
    for seed in (0, 2**64 - 1, *random.integers(0, 2**64, 6, np.uint64)):
        index, position = random.integers(0, 2**31 - 1, 2, np.int32)
        words = np.array([int(seed) & 0xFFFFFFFF, int(seed) >> 32, index, position], np.uint32).view(np.int32)
        bits, values = torch.zeros(4096, dtype=torch.int32), torch.full((4096,), float("nan"))
        functions = {"KEY": noise.noise_key, "BITS": noise.noise_bits, "GUMBEL": noise.gumbel}
        draw[(1,)](torch.from_numpy(words), bits, values, **functions, BLOCK=4096)
        key, ids = (int(seed), int(index), int(position)), np.arange(4096)
        assert np.array_equal(bits.numpy().view(np.uint32), naive.noise_bits(*key, ids))
        np.testing.assert_allclose(values.numpy(), naive.gumbel(*key, ids), rtol=2e-6, atol=1e-6)


def test_everything_banned_and_infinite_logits():
    logits = np.full((4, 40), -np.inf, np.float32)
    logits[2, 7] = np.inf
    logits[3, [9, 11]] = np.inf
    for temperature, top_p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.5)):
        rows = SampleRows.greedy(4)
        rows.temperature[:], rows.top_p[:] = temperature, top_p
        assert choose(logits, rows).ids.tolist() == [0, 0, 7, 9]


@pytest.mark.parametrize("masked", [False, True])
def test_a_row_with_nan_fails_alone(masked):
    logits = np.random.default_rng(0).standard_normal((3, 20_000)).astype(np.float32)
    logits[1, 17_000] = np.nan
    logits[1, 3] = np.inf
    rows = random_rows(np.random.default_rng(0), 3, 20_000, adjust=False)
    rows.logprobs[:] = 1
    if masked:
        rows.mask = np.zeros((3, 625), np.uint32)
        rows.mask[:, 0] = 0xFFFFFFFF  # the NaN is not among the allowed
    got, want = choose(logits, rows), naive.sample(logits, rows)
    assert got.ids.tolist() == [want.ids[0], -1, want.ids[2]]
    assert np.isnan(got.logprob[1])
    assert got.top_ids[1].tolist() == [-1] * MAX_LOGPROBS


def test_a_row_is_the_same_alone_and_in_company():
    random = np.random.default_rng(5)
    logits = (random.standard_normal((6, 300)) * 2).astype(np.float32)
    rows = random_rows(random, 6, 300, adjust=False)
    rows.top_k[2], rows.top_p[2], rows.min_p[2], rows.temperature[2] = 0, 1.0, 0.0, 1.0  # the fast path when alone
    together = choose(logits, rows)
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "sample_index", "position", "logprobs")
    for row in range(6):
        alone = replace(SampleRows.greedy(1), **{name: getattr(rows, name)[row : row + 1] for name in names})
        got = choose(logits[row : row + 1], alone)
        assert got.ids[0] == together.ids[row]
        assert np.array_equal(got.top_logprobs[0], together.top_logprobs[row], equal_nan=True)


def test_uniform_rows_are_cut_at_exact_counts():
    """Weights of 1 sum exactly: top_p 0.5 of ten equals is five of them, the lowest."""
    from roofline.backends.gpu.kernels.cutoff import cutoff
    from roofline.backends.gpu.kernels.settings import SampleSettings

    rows = SampleRows.greedy(4)
    rows.temperature[:] = 1.0
    rows.top_p[:], rows.top_k[:] = [0.5, 0.0, 1.0, 0.5], [0, 0, 3, 4]
    thresholds, lasts, _ = cutoff(chips.get("sm_90"), torch.full((4, 10), -2.25), SampleSettings.of(rows, "cpu"))
    assert thresholds.tolist() == [-2.25] * 4
    assert lasts.tolist() == [4, 0, 2, 1]


@pytest.mark.parametrize("listed", [True, False])
def test_cuts_of_lists_and_of_whole_rows(listed, monkeypatch, races):
    """Where few scores lie as high as a cut can, only these are searched; where many do, or top_k is large, all are.

    A list is written by all threads and read by all: each row's has one barrier.
    """
    from roofline.backends.gpu import tiles
    from roofline.backends.gpu.kernels import cutoff as module
    from roofline.backends.gpu.kernels.settings import SampleSettings

    tile = tiles.choose("cutoff", chips.get("sm_90"))
    monkeypatch.setattr(tiles, "choose", lambda *_, **facts: replace(tile, sizes={"BLOCK": 64}))
    whole, searched = module._cut, []
    monkeypatch.setattr(module, "_cut", lambda *given: searched.append(1) or whole(*given))
    random = np.random.default_rng(7)
    scores = (random.standard_normal((6, 300)) * (9 if listed else 0.01)).astype(np.float32)
    scores[:, 30:40] = -np.inf
    scores[:4] = np.round(scores[:4], 0 if listed else 2)  # with many equal ones
    rows = SampleRows.greedy(6)
    rows.temperature[:] = 1.0
    rows.top_k[:] = [3, 0, 9, 0, 40, 1] if listed else [200, 0, 65, 0, 299, 100]
    rows.top_p[:] = [1.0, 0.9, 0.7, 0.3, 0.99, 1.0]
    races.barriers = 0
    thresholds, lasts, _ = module.cutoff(chips.get("sm_90"), torch.from_numpy(scores), SampleSettings.of(rows, "cpu"))
    assert races.barriers == (6 if listed else 0)
    ids = np.arange(300)
    for row, (threshold, last) in enumerate(zip(thresholds.numpy(), lasts.numpy(), strict=True)):
        got = ids[(scores[row] > threshold) | ((scores[row] == threshold) & (ids <= last))]
        assert got.tolist() == naive.survivors(scores[row], int(rows.top_k[row]), rows.top_p[row], 0).tolist()
    assert bool(searched) != listed


def test_zeros_are_equal_whatever_their_sign():
    from roofline.backends.gpu.kernels.cutoff import cutoff
    from roofline.backends.gpu.kernels.settings import SampleSettings

    rows = SampleRows.greedy(2)
    rows.temperature[:], rows.top_k[:] = 1.0, [2, 3]
    scores = torch.tensor([[-0.0, 0.0, 0.0, -1.0], [0.0, -0.0, -0.0, 0.0]])
    thresholds, lasts, _ = cutoff(chips.get("sm_90"), scores, SampleSettings.of(rows, "cpu"))
    assert thresholds.tolist() == [0.0, 0.0]
    assert lasts.tolist() == [1, 2]
