"""The core's sampler against the naive numpy one: same noise bits, same choices."""

import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

native = pytest.importorskip("roofline._native", reason="the C++ core is not built")
sys.path.insert(0, str(Path(__file__).parent))

from cpu_models import checkpoint, executable  # noqa: E402

from roofline.backends.reference import sampling as naive  # noqa: E402
from roofline.backends.sampling import SampleRows  # noqa: E402
from roofline.ops.batch import Segment  # noqa: E402

VOCAB = 300


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    source = checkpoint("llama", "Q8_0")
    return {isa: executable(source, isa=isa) for isa in native.isas()}


def logits(model: Any, values: np.ndarray) -> None:
    """Put logits [rows, VOCAB] where the last step's lie."""
    rows = len(values)
    model.batch.fill([Segment([1] * rows, 0, range(-(-rows // 16)))], range(rows))
    model.forward()
    model.logits()[:] = values


def rows_of(count: int, **fields: Any) -> SampleRows:
    rows = SampleRows.greedy(count)
    for name, value in fields.items():
        array = getattr(rows, name)
        array[:] = value
    rows.position[:] = np.arange(count) + 7
    return rows


def csr(rows: SampleRows, lists: list[list[int]], counts: list[list[int]]) -> None:
    rows.hist_start = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    rows.hist_ids = np.array(list(chain.from_iterable(lists)), np.int32)
    rows.hist_counts = np.array(list(chain.from_iterable(counts)), np.int32)


def test_greedy_takes_the_largest_and_the_lowest_of_equals(models: dict[str, Any]) -> None:
    values = np.random.default_rng(0).standard_normal((4, VOCAB)).astype(np.float32)
    values[1, [40, 7, 299]] = 9.0
    values[2, :] = -3.0
    values[3, 299] = 50.0
    for model in models.values():
        logits(model, values)
        assert model.sample(rows_of(4)).ids.tolist() == [int(values[0].argmax()), 7, 0, 299]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, (1 << 64) - 1),
    index=st.integers(0, 20),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 200, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    data=st.integers(0, 1 << 20),
)
def test_sampled_like_the_naive_one(
    models: dict[str, Any], seed: int, index: int, temperature: float, top_k: int, top_p: float, min_p: float, data: int
) -> None:
    values = (np.random.default_rng(data).standard_normal((6, VOCAB)) * 3).astype(np.float32)
    rows = rows_of(
        6,
        temperature=np.float32(temperature),
        top_k=top_k,
        top_p=np.float32(top_p),
        min_p=np.float32(min_p),
        seed=np.uint64(seed),
        sample_index=index,
    )
    wanted = naive.sample(values, rows).ids.tolist()
    chosen = {}
    for isa, model in models.items():
        logits(model, values)
        chosen[isa] = model.sample(rows).ids.tolist()
        for row, (got, want) in enumerate(zip(chosen[isa], wanted, strict=True)):
            if got != want:  # only where two scores are closer than float32 logarithms are
                scores = values[row] / np.float32(temperature) + naive.gumbel(seed, index, row + 7, np.arange(VOCAB))
                assert abs(scores[got] - scores[want]) < 1e-4
    assert len({tuple(ids) for ids in chosen.values()}) == 1


@settings(max_examples=40, deadline=None)
@given(
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    presence=st.sampled_from([0.0, 0.6, -0.5]),
    frequency=st.sampled_from([0.0, 0.4, -0.3]),
    data=st.integers(0, 1 << 20),
)
def test_penalties_bias_and_masks(
    models: dict[str, Any], repetition: float, presence: float, frequency: float, data: int
) -> None:
    rng = np.random.default_rng(data)
    values = rng.standard_normal((3, VOCAB)).astype(np.float32)
    rows = rows_of(3, repetition=repetition, presence=presence, frequency=frequency)
    lists = [rng.choice(VOCAB, n, replace=False).tolist() for n in (0, 5, 60)]
    csr(rows, lists, [rng.integers(0, 4, len(ids)).tolist() for ids in lists])
    rows.bias_start = np.array([0, 2, 2, 5], np.int32)
    rows.bias_ids = rng.choice(VOCAB, 5, replace=False).astype(np.int32)
    rows.bias_values = np.array([5.0, -np.inf, 100.0, -1.0, -np.inf], np.float32)
    rows.mask = rng.integers(0, 1 << 32, (3, -(-VOCAB // 32)), dtype=np.uint32)
    words = rng.integers(0, 3, rows.mask.shape)  # as many that allow nothing, or everything
    rows.mask = np.where(words == 1, 0, np.where(words == 2, 0xFFFFFFFF, rows.mask)).astype(np.uint32)
    rows.mask[:, 0] |= 1
    wanted = naive.sample(values, rows).ids.tolist()
    for model in models.values():
        logits(model, values)
        assert model.sample(rows).ids.tolist() == wanted


@settings(max_examples=40, deadline=None)
@given(
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    allowed=st.sampled_from([0.02, 0.5, 0.98]),
    data=st.integers(0, 1 << 20),
)
def test_choosing_refused_ids_anew_is_choosing_with_masks_at_once(
    models: dict[str, Any], temperature: float, repetition: float, allowed: float, data: int
) -> None:
    rng = np.random.default_rng(data)
    values = (rng.standard_normal((5, VOCAB)) * 2).round(1).astype(np.float32)  # some are equal
    rows = rows_of(5, temperature=np.float32(temperature), repetition=repetition, seed=np.uint64(data), frequency=0.3)
    lists = [rng.choice(VOCAB, n, replace=False).tolist() for n in (0, 5, 60, 0, 9)]
    csr(rows, lists, [rng.integers(0, 4, len(ids)).tolist() for ids in lists])
    rows.bias_start = np.array([0, 2, 2, 3, 3, 3], np.int32)
    rows.bias_ids, rows.bias_values = np.array([4, 9, 8], np.int32), np.array([5.0, -np.inf, 2.0], np.float32)
    rows.logprobs[:] = [2, 0, -1, 3, 1]
    bits = rng.random((5, 32 * -(-VOCAB // 32))) < allowed  # [rows, ids]
    bits[:, 50] = True
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    for model in models.values():
        logits(model, values)
        rows.mask = masks
        at_once = [each.copy() for each in vars(model.sample(rows)).values()]
        rows.mask = None
        free = model.sample(rows).ids
        refused = np.flatnonzero(~bits[np.arange(5), free]).astype(np.int32)
        rows.mask = np.where(np.isin(np.arange(5), refused)[:, None], masks, 0).astype(np.uint32)
        again = vars(model.sample_again(rows, refused)).values()
        asked = rows.logprobs[:, None] > np.arange(at_once[2].shape[1])  # what no row asked for is not written
        assert (again := list(again))[0].tolist() == at_once[0].tolist()
        assert again[1][rows.logprobs >= 0].tolist() == at_once[1][rows.logprobs >= 0].tolist()
        assert all((new[asked] == old[asked]).all() for new, old in zip(again[2:], at_once[2:], strict=True))
        with pytest.raises(ValueError, match="no such logit row"):
            model.sample_again(rows, np.array([5], np.int32))


def test_logprobs_are_of_the_raw_logits(models: dict[str, Any]) -> None:
    values = (np.random.default_rng(5).standard_normal((3, VOCAB)) * 4).astype(np.float32)
    rows = rows_of(3, temperature=np.float32(0.7), repetition=1.5)
    rows.logprobs[:] = [-1, 0, 20]
    wanted = naive.log_softmax(values[2])
    outs = []
    for model in models.values():
        logits(model, values)
        out = model.sample(rows)
        assert abs(out.logprob[2] - wanted[out.ids[2]]) < 1e-5
        order = np.argsort(-values[2], kind="stable")[:20]
        assert out.top_ids[2].tolist() == order.tolist()
        np.testing.assert_allclose(out.top_logprobs[2], wanted[order], atol=1e-5)
        outs.append((out.logprob[1:].tobytes(), out.top_logprobs[2].tobytes()))
    assert len(set(outs)) == 1


def test_nan_logits_give_no_id(models: dict[str, Any]) -> None:
    values = np.zeros((2, VOCAB), np.float32)
    values[1, 123] = np.nan
    for model in models.values():
        for temperature in (0.0, 1.0):
            logits(model, values)
            ids = model.sample(rows_of(2, temperature=np.float32(temperature))).ids.tolist()
            assert ids[0] >= 0
            assert ids[1] == -1


def test_noise_is_gumbel(models: dict[str, Any]) -> None:
    """Equal logits: every id is drawn as often as chance has it (chi square over 300 ids, 12,000 draws)."""
    model = next(iter(models.values()))
    counts = np.zeros(VOCAB)
    for start in range(0, 12000, 200):
        logits(model, np.zeros((200, VOCAB), np.float32))
        rows = rows_of(200, temperature=1.0, seed=np.uint64(99))
        rows.position[:] = np.arange(start, start + 200)
        counts += np.bincount(model.sample(rows).ids, minlength=VOCAB)
    expected = 12000 / VOCAB
    assert ((counts - expected) ** 2 / expected).sum() < 299 + 5 * np.sqrt(2 * 299)
