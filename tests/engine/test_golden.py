"""Golden prompts: which ids and positions are compared, and what divergence and agreement are."""

import math

import numpy as np
import pytest

from roofline.engine.golden import LEAST_AGREEMENT, MOST_KL, GoldenComparison, compare_row, golden_prompts, summarize


def encode(text: str, *, add_special: bool) -> list[int]:
    assert add_special, "a model sees its prompts as they are sent by clients"
    return list(text.encode())


def test_prompts_are_cut_to_the_context_and_their_last_position_is_compared() -> None:
    prompts = golden_prompts(encode, 1000)
    assert [len(prompt.ids) for prompt in prompts] == [32] * 4
    assert {prompt.positions for prompt in prompts} == {(3, 7, 11, 15, 19, 23, 27, 31)}
    for longest in (1, 5, 31):
        for prompt in golden_prompts(encode, longest):
            assert len(prompt.ids) == longest
            assert prompt.positions[-1] == longest - 1
            assert sorted(set(prompt.positions)) == list(prompt.positions)
            assert prompt.positions[0] >= 0


def test_a_text_without_ids_is_left_out() -> None:
    assert golden_prompts(lambda text, *, add_special: [], 1000) == []


def test_divergence_and_agreement_of_known_probabilities() -> None:
    half, quarter = math.log(0.5), math.log(0.25)
    right = np.array([[half, quarter, quarter], [half, quarter, quarter]], np.float32)
    ours = np.array([[half + 7, quarter + 7, quarter + 7], [quarter, half, quarter]], np.float32)
    compared = summarize([compare_row(*pair) for pair in zip(right, ours, strict=True)])
    second = 0.5 * math.log(2) - 0.25 * math.log(2)  # sum of p log(p / q)
    assert compared.kl == pytest.approx(second / 2, abs=1e-6)
    assert (compared.agreement, compared.positions) == (0.5, 2)
    assert summarize([compare_row(row, row) for row in right]) == GoldenComparison(0.0, 1.0, 2)


def test_a_divergence_that_is_no_number_is_beyond_every_threshold() -> None:
    assert summarize([(0.0, True), (math.nan, True)]) == GoldenComparison(math.inf, 1.0, 2)
    assert summarize([(-1e-9, True), (0.0, True)]) == GoldenComparison(0.0, 1.0, 2), "rounded below zero"


def test_both_thresholds_count() -> None:
    assert GoldenComparison(MOST_KL, LEAST_AGREEMENT, 32).within
    assert not GoldenComparison(MOST_KL * 1.01, 1.0, 32).within
    assert not GoldenComparison(0.0, LEAST_AGREEMENT - 0.01, 32).within
    assert not GoldenComparison(math.nan, 1.0, 32).within
