"""What is trained on under the templates of published models, beside the masks of TRL and of LLM Foundry.

`write_mask_numbers.py` wrote what those two train on. Both also train on what a template writes behind the token that a
server stops at, which no answer ever has; so theirs are compared up to that token.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from roofline.bundle.text_side import text_of_folder
from roofline.train.finetune.encode import Encoded, Encoder
from roofline.train.finetune.samples import chat
from tests.train.template_cases import CHATS, TOKENS, write_words

NUMBERS: dict[str, Any] = json.loads(Path(__file__).with_name("mask_numbers.json").read_text("utf-8"))["templates"]
# Their prompts open reasoning that they never write into a chat, so ours ends it before the answer.
REASONED = ("deepseekv3", "deepseek_r1_distill", "nemotron_3_nano")
# LLM Foundry refuses those, and templates that write earlier answers otherwise than the last one.
APART = {"qwen3", "phi3", "phi3_5", *REASONED}
# What ends a turn, where it is not what ends a text.
ENDS = {
    "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "phi3": "<|end|>",
    "phi3_5": "<|end|>",
    "glm4moe": "<|user|>",
}


def to_end(text: str, name: str) -> str:
    """A text up to the first token that a server stops at."""
    places = [text.index(end) + len(end) for end in TOKENS[name][1] if end in text]
    return text[: min(places)] if places else text


class ShownMasks:
    """The samples that a chat becomes under a template. spans: (text before, text that is trained on) of each answer"""

    def __init__(self, folder: Path, name: str, of: str) -> None:
        self.words, self.template = text_of_folder(write_words(folder, name, NUMBERS[name]["template"]))
        self.encoder = Encoder(self.words, self.template, 4096)
        self.sample = chat(CHATS[of], None, "x")
        self.parts = self.encoder.encode(self.sample, "x")
        self.spans = [span for part in self.parts for span in self.of_part(part)]

    def of_part(self, part: Encoded) -> list[tuple[str, str]]:
        """(text before, text that is trained on) of each stretch of a sample."""
        ids, trained = part.ids.tolist(), part.trained.tolist()
        starts = [at for at in range(1, len(ids)) if trained[at] and not trained[at - 1]]
        ends = [next((at for at in range(start, len(ids)) if not trained[at]), len(ids)) for start in starts]
        return [(self._text(ids[:start]), self._text(ids[start:end])) for start, end in zip(starts, ends, strict=True)]

    def _text(self, ids: list[int]) -> str:
        return self.words.decode(ids, skip_special=False)


@pytest.mark.parametrize("of", CHATS)
@pytest.mark.parametrize("name", TOKENS)
def test_an_answer_is_its_text_and_the_token_that_a_server_stops_at(tmp_path: Path, name: str, of: str) -> None:
    masks = ShownMasks(tmp_path, name, of)
    assert {masks.words.vocabulary.spelling(token) for token in masks.words.eos_ids} == set(TOKENS[name][1])
    assert len(masks.spans) == len(masks.sample.answers)
    for (before, answer), number in zip(masks.spans, masks.sample.answers, strict=True):
        served = masks.template.encode_chat(masks.words, masks.sample.messages[:number], add_generation_prompt=True)
        assert before.endswith(masks.words.decode(served, skip_special=False)), "what a server gives to the model"
        content = str(masks.sample.messages[number]["content"])
        text = answer.removesuffix(ENDS.get(name, TOKENS[name][1][0]))
        assert text != answer
        assert text.removeprefix("\n").removeprefix("<think>").lstrip("\n").removeprefix("</think>").strip() == content


@pytest.mark.parametrize("of", CHATS)
@pytest.mark.parametrize("name", [name for name in TOKENS if NUMBERS[name]["trl"] is not None])
def test_what_trl_trains_on_under_its_templates(tmp_path: Path, name: str, of: str) -> None:
    masks = ShownMasks(tmp_path, name, of)
    for (before, answer), theirs in zip(masks.spans, NUMBERS[name]["trl"][of], strict=True):
        theirs = to_end(theirs, name)
        if name in REASONED:
            assert before.rstrip().endswith("<think>")
            closed, answer = answer.split("</think>")
            assert (closed.strip(), answer[: len(answer) - len(answer.lstrip())]) in (("", "\n\n"), ("", ""))
            answer = answer.lstrip()
            before = (
                f"{before}<think></think>" if name == "nemotron_3_nano" else before.rstrip().removesuffix("<think>")
            )
        assert theirs.endswith(answer)
        extra = theirs.removesuffix(answer)  # the mark or the line that an answer begins behind, in some of theirs
        assert before.endswith(extra)
        assert extra in ("", "\n", "<｜Assistant｜>", "<think></think>")


@pytest.mark.parametrize("of", CHATS)
@pytest.mark.parametrize("name", TOKENS)
def test_what_llm_foundry_trains_on_and_counts(tmp_path: Path, name: str, of: str) -> None:
    masks, theirs = ShownMasks(tmp_path, name, of), NUMBERS[name]["foundry"][of]
    if theirs == "refused":
        assert name in APART
        assert of == "one" or len(masks.parts) == len(masks.spans), "ours makes a sample of each answer"
        return
    for (_, answer), response in zip(masks.spans, theirs["responses"], strict=True):
        assert answer == to_end(response, name) if name != "glm4moe" else answer == response + "<|user|>"
    (part,) = masks.parts
    (first,) = masks.encoder.encode(chat(CHATS[of][:2], None, "x"), "x")
    added = 2 if name == "glm4moe" else 0  # the ends that its template does not write
    assert len(part) + len(first) - added == theirs["total"], "all tokens but padding, whether trained on or not"


def test_a_call_of_a_tool_ends_with_the_mark_of_the_tools_turn(tmp_path: Path) -> None:
    """GLM's model calls a tool and stops at <|observation|>, which its template writes in front of the result."""
    masks = ShownMasks(tmp_path, "glm4moe", "one")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    (part,) = masks.encoder.encode(chat(turns, [{"type": "function", "function": {"name": "add"}}], "x"), "x")
    texts = [answer for _, answer in masks.of_part(part)]
    assert texts[0].endswith("</tool_call><|observation|>")
    assert texts[1].endswith("two<|user|>")
