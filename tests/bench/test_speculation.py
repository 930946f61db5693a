"""The rows of speculation: what is recorded, and that an id that differs ends the bench."""

from dataclasses import replace

import pytest

from roofline.bench import speculation
from roofline.common.errors import ConfigError, RooflineError
from roofline.engine.events import Event
from roofline.engine.params import SamplingParams
from roofline.engine.stats import EngineStats


class Engine:
    """Gives 13 ids, `width` a step after the first one; each answer's ids may be changed by `spoil`."""

    def __init__(self, width=1, spoil=None):
        self.width, self.spoil, self.left, self.turns = width, spoil, 0, 0
        self.counted = EngineStats()

    @property
    def has_work(self):
        return self.left > 0

    def submit(self, prompt, params, eos_ids):
        assert (list(prompt), eos_ids) == ([5, 6], (2,))
        self.left, self.turns = 13, self.turns + 1

    def step(self):
        count = 1 if self.left == 13 else min(self.width, self.left)
        ids = [100 - self.left + i for i in range(count)]
        if self.spoil == self.turns:
            ids[0] = 0
        self.left -= count
        self.counted.steps += 1
        self.counted.decode_tokens += count if self.left < 12 else 0
        if self.width > 1 and count > 1:
            self.counted.draft_tokens += self.width
            self.counted.accepted_tokens += count - 1
        return [Event("r", 0, ids, finish_reason=None if self.left else "length")]

    def stats(self):
        return replace(self.counted)


def compare(plain, guessing):
    return speculation.compare(plain, guessing, [5, 6], SamplingParams(), (2,))


def test_a_row_holds_both_in_turn():
    row = compare(Engine(), Engine(width=4))
    assert (row["prompt_tokens"], row["tokens"], row["ids_equal"]) == (2, 13, True)
    assert len(row["tok_s"]) == len(row["without_tok_s"]) == speculation.REPEATS
    assert (row["drafted"], row["accepted"], row["acceptance"]) == (3 * 4 * 5, 9 * 5, 0.75)
    assert row["tokens_per_step"] == 4.0
    assert row["ratio"] > 0


def test_without_drafts_there_is_no_acceptance():
    assert compare(Engine(), Engine())["acceptance"] is None


@pytest.mark.parametrize("spoil", [1, 3])
def test_an_id_that_differs_ends_the_bench(spoil):
    with pytest.raises(RooflineError, match="changed the ids"):
        compare(Engine(), Engine(width=4, spoil=spoil))


def test_texts_are_natural_and_small():
    texts = speculation.texts()
    assert set(texts) == {"summary", "edit", "chat"}
    assert all(20 < len(text) < 2500 for text in texts.values())
    assert len(speculation.row_names()) == 6


def test_rows_are_never_mixed_with_the_others():
    from roofline.bench import workloads

    assert not set(speculation.row_names()) & set(workloads.WORKLOADS)
    with pytest.raises(ConfigError, match="speculate_edit_greedy"):
        speculation.bench_speculation("unused", "ngram", rows=["prefill"])
