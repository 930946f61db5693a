"""Sampling the naive way, one row at a time in numpy: what every backend's `sample` must choose.

The meaning is that of backends/sampling.py. Noise is a counter-based generator: each (seed, sample index, position, id)
has its own 32 bits, whatever else is sampled beside it.
"""

import numpy as np

from roofline.backends.sampling import MAX_LOGPROBS, Sampled, SampleRows

_MASK64 = (1 << 64) - 1


def sample(logits: np.ndarray, rows: SampleRows) -> Sampled:
    """One id for each row of float32 logits [rows, vocab]; -1 for a row that holds NaN."""
    ids = np.zeros(rows.rows, np.int32)
    logprob = np.full(rows.rows, np.nan, np.float32)
    top_ids = np.full((rows.rows, MAX_LOGPROBS), -1, np.int32)
    top_logprobs = np.full((rows.rows, MAX_LOGPROBS), np.nan, np.float32)
    for row in range(rows.rows):
        raw = logits[row].astype(np.float32)
        if np.isnan(raw).any():
            ids[row] = -1
            continue
        ids[row] = choose(raw, rows, row)
        count = int(rows.logprobs[row])
        if count >= 0:
            all_logprobs = log_softmax(raw)
            logprob[row] = all_logprobs[ids[row]]
            best = np.lexsort((np.arange(raw.size), -raw))[:count]
            top_ids[row, : len(best)], top_logprobs[row, : len(best)] = best, all_logprobs[best]
    return Sampled(ids, logprob, top_ids, top_logprobs)


def choose(raw: np.ndarray, rows: SampleRows, row: int) -> int:
    """The id that one row takes."""
    scores = penalised(raw, rows, row)
    temperature = rows.temperature[row]
    if temperature == 0:
        return int(np.argmax(scores))  # the first of the largest: the lowest id
    scores = (scores / temperature).astype(np.float32)
    ids = survivors(scores, int(rows.top_k[row]), float(rows.top_p[row]), float(rows.min_p[row]))
    noise = gumbel(int(rows.seed[row]), int(rows.sample_index[row]), int(rows.position[row]), ids)
    return int(ids[np.argmax(scores[ids] + noise)])


def penalised(raw: np.ndarray, rows: SampleRows, row: int) -> np.ndarray:
    """Bias and mask, then the repetition penalty, then presence and frequency penalties; float32 [vocab]."""
    scores = raw.copy()
    start, stop = rows.bias_start[row], rows.bias_start[row + 1]
    np.add.at(scores, rows.bias_ids[start:stop], rows.bias_values[start:stop])
    if rows.mask is not None:
        at = np.arange(scores.size)
        allowed = rows.mask[row, at >> 5] >> (at & 31).astype(np.uint32) & 1
        scores[allowed == 0] = -np.inf
    start, stop = rows.hist_start[row], rows.hist_start[row + 1]
    ids, counts = rows.hist_ids[start:stop], rows.hist_counts[start:stop]
    counted = scores[ids]
    counted = np.where(counted > 0, counted / rows.repetition[row], counted * rows.repetition[row])
    drop = rows.frequency[row] * counts.astype(np.float32) + rows.presence[row] * (counts > 0).astype(np.float32)
    scores[ids] = (counted - drop).astype(np.float32)
    return scores


def survivors(scores: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Ids, ascending, that top-k, then top-p, then min-p leave; at least one.

    Weights are exp(score - largest) in float32. Top-p keeps the smallest prefix of (score falling, id rising) whose
    float64 sum reaches top_p of the sum of all that top-k left; min-p keeps weights of at least min_p.
    """
    order = np.lexsort((np.arange(scores.size), -scores))
    if 0 < top_k < order.size:
        order = order[:top_k]
    with np.errstate(invalid="ignore"):  # every id banned: -inf - -inf
        weights = np.exp(scores[order] - scores[order[0]])
    weights[0] = 1.0
    if top_p < 1:
        sums = np.cumsum(weights.astype(np.float64))
        order = order[: int(np.searchsorted(sums, top_p * sums[-1], side="left")) + 1]
    if min_p > 0:
        order = order[weights[: order.size] >= np.float32(min_p)]
    return np.sort(order)


def log_softmax(raw: np.ndarray) -> np.ndarray:
    """float32 log-probabilities, summed in float64."""
    wide = raw.astype(np.float64)
    peak = wide.max()
    return (wide - peak - np.log(np.exp(wide - peak).sum())).astype(np.float32)


def gumbel(seed: int, sample_index: int, position: int, ids: np.ndarray) -> np.ndarray:
    """float32 Gumbel noise of each id: -log(E), E = -log(1 - u) with a correction for what 1 - u rounds away."""
    bits = noise_bits(seed, sample_index, position, ids)
    one = np.float32(1)
    u = bits.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    y = np.maximum(one - u, np.float32(2.0**-25))
    exponential = -(np.log(y) + ((one - y) - u) / y)
    return -np.log(exponential)


def noise_bits(seed: int, sample_index: int, position: int, ids: np.ndarray) -> np.ndarray:
    """uint32 bits of each id: a 64-bit key from (seed, sample index, position) by splitmix64 (Steele et al. 2014), then
    two rounds of a 32-bit mixer over the id."""
    counter = (sample_index & 0xFFFFFFFF) << 32 | (position & 0xFFFFFFFF)
    key = splitmix64(seed + 0x9E3779B97F4A7C15 * (1 + counter))
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    with np.errstate(over="ignore"):
        return _mix(_mix(ids.astype(np.uint32) ^ low) + high)


def splitmix64(z: int) -> int:
    """The finaliser of splitmix64."""
    z &= _MASK64
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK64
    return z ^ z >> 31


def _mix(h: np.ndarray) -> np.ndarray:
    h = h ^ h >> np.uint32(16)
    h = h * np.uint32(0x21F0AAAD)
    h = h ^ h >> np.uint32(15)
    h = h * np.uint32(0x735A2D97)
    return h ^ h >> np.uint32(15)
