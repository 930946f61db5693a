"""Samples in parts: how prompts are encoded and bounded, which rows are computed, where answers end."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import ConfigError  # noqa: E402
from roofline.train.config.observers import WrittenSamplesSection  # noqa: E402
from roofline.train.parallel.processes import World  # noqa: E402
from roofline.train.run.samples import RunSamples  # noqa: E402

BEGIN, END = 90, 91


class Tokenizer:
    """An id for each letter, behind the one that texts begin with; "|" is the end as a special token."""

    eos_ids = (END,)

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        ids = [END if letter == "|" and parse_special else ord(letter) - 97 for letter in text]
        return [BEGIN] * add_special + ids


def of(prompts: tuple[str, ...] = ("a",), length: int = 10, **section: Any) -> RunSamples:
    made = RunSamples.__new__(RunSamples)
    made.section = WrittenSamplesSection(prompts=prompts, interval="1ba", **section)
    made.run = SimpleNamespace(config=SimpleNamespace(max_seq_len=length), world=World())  # type: ignore[assignment]
    made._tokenizer, made._ends = Tokenizer(), [END]  # type: ignore[assignment]
    return made


def test_prompts_begin_as_texts_do_and_may_hold_special_tokens() -> None:
    assert of(("abc", "a|"), max_new_tokens=6)._encoded() == ([[BEGIN, 0, 1, 2], [BEGIN, 0, END]], [END])


@pytest.mark.parametrize(("length", "room"), [(9, 3), (6, 0), (3, 0)])
def test_a_prompt_leaves_room_for_its_answer(length: int, room: int) -> None:
    with pytest.raises(ConfigError, match=rf"'abc' has 4 tokens; there is room for 1 to {room}, which is max_seq_len"):
        of(("a", "abc") if room else ("abc",), length, max_new_tokens=6)._encoded()


def test_a_prompt_of_no_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **_: [])
    with pytest.raises(ConfigError, match="'a' has 0 tokens; there is room for 1 to 4"):
        of(max_new_tokens=6)._encoded()


def test_rows_that_have_ended_are_computed_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows: the first one ends at once, the second one after a token, the last one not at all."""
    computed: list[list[list[int]]] = []
    chosen = iter([[END, 5, 6], [END, 7], [8], [9]])
    made = of(max_new_tokens=4)
    monkeypatch.setattr(made, "_logits", computed.append)
    monkeypatch.setattr(made, "_choose", lambda logits, random: next(chosen))
    assert made._answers([[1], [2], [3]], torch.Generator()) == [[], [5], [6, 7, 8, 9]]
    assert computed == [[[1], [2], [3]], [[2, 5], [3, 6]], [[3, 6, 7]], [[3, 6, 7, 8]]]
    chosen, made = iter([[END]]), of(max_new_tokens=4)
    monkeypatch.setattr(made, "_logits", lambda rows: None)
    monkeypatch.setattr(made, "_choose", lambda logits, random: next(chosen))
    assert made._answers([[1]], torch.Generator()) == [[]], "nothing is computed when all have ended"


@pytest.mark.parametrize(
    ("section", "tokens"),
    [({}, 50), ({"top_k": 3}, 3), ({"top_k": 0}, 200), ({"top_k": 500}, 200)],
)
def test_so_many_of_the_likeliest_may_be_drawn(section: dict[str, Any], tokens: int) -> None:
    """Of 200 tokens with nearly the same probability."""
    logits = (-1e-6 * torch.arange(200.0)).expand(20_000, 200)
    drawn = set(of(do_sample=True, **section)._choose(logits, torch.Generator().manual_seed(1)))
    assert drawn == set(range(tokens))


def test_the_likeliest_is_taken_unless_asked_to_draw() -> None:
    logits = torch.tensor([[0.1, 0.3, 0.2], [0.5, 0.3, 0.2]])
    assert of()._choose(logits, torch.Generator()) == [1, 0]
