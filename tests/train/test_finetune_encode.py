"""Samples to ids: what is trained on is what the model would write, behind the ids that a server would give to it."""

import json
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roofline.common.errors import CapacityError, ConfigError
from roofline.text.templates.template import CHATML, ChatTemplate
from roofline.text.tokenizers.from_json import from_json
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.train.finetune import encode
from roofline.train.finetune.encode import Encoded, Encoder
from roofline.train.finetune.packing import pack
from roofline.train.finetune.samples import Chat, Continuation, Message, Text, chat
from roofline.train.finetune.show import marked
from tests.train import sft

sys.path.insert(0, str(Path(__file__).parents[1] / "text"))  # test folders are no packages

from chat_templates import LLAMA3, MISTRAL, PHI, QWEN3

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "qwen3": QWEN3, "phi": PHI}
CHATS: dict[str, list[Message]] = {
    "one": [{"role": "user", "content": "What is one?"}, {"role": "assistant", "content": "two"}],
    "spaces": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\n  b\n"}],
    "turns": [
        {"role": "user", "content": "What is one?"},
        {"role": "assistant", "content": "two <|im_end|> é日"},
        {"role": "user", "content": "And <|im_start|> two?"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Welcome"},
    ],
}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sft.words(sft.write_tokenizer(tmp_path_factory.mktemp("words")))


def encoder(words: Tokenizer, template: str = CHATML, length: int = 4096, **options: Any) -> Encoder:
    return Encoder(words, ChatTemplate(template, bos_token="<s>", eos_token="</s>"), length, **options)


def runs(part: Encoded) -> list[tuple[int, int]]:
    """(start, end) of each stretch that is trained on."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], part.trained, [False]]).astype(int)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


@pytest.mark.parametrize(("name", "of"), [*product(TEMPLATES, CHATS)])
def test_answers_stand_behind_what_a_server_gives(words: Tokenizer, name: str, of: str) -> None:
    encoding = encoder(words, TEMPLATES[name])
    sample = chat(CHATS[of], None, "x")
    parts = encoding.encode(sample, "x")
    spans = [(part, start, end) for part in parts for start, end in runs(part)]
    assert len(spans) == len(sample.answers)
    for (part, start, end), number in zip(spans, sample.answers, strict=True):
        prompt = encoding.template.encode_chat(words, sample.messages[:number], add_generation_prompt=True)
        assert part.ids[:start].tolist() == prompt
        answer = words.decode(part.ids[start:end].tolist(), skip_special=False)
        content = str(sample.messages[number]["content"])
        assert content.strip() in answer
        around = "".join(answer.replace(content.strip(), "", 1).split())
        assert around in (*sft.SPECIALS, "<think></think><|im_end|>"), "nothing but the end mark is trained beside it"
        assert int(part.ids[end - 1]) in words.eos_ids, "the model learns to end"
    whole = encoding.template.encode_chat(words, sample.messages, add_generation_prompt=False)
    last = parts[-1].ids.tolist()
    assert last[: len(whole)] == whole
    assert len(last) - len(whole) == (1 if encoding.counts.ended else 0)


def test_reasoning_that_is_left_out_of_earlier_turns_makes_a_sample_of_each_answer(words: Tokenizer) -> None:
    turns = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "two", "reasoning_content": "It follows."},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "three", "reasoning_content": "As before."},
    ]
    encoding = encoder(words, QWEN3)
    parts = encoding.encode(chat(turns, None, "x"), "x")
    assert encoding.counts.split == 1
    texts = [words.decode(part.ids[part.trained].tolist(), skip_special=False) for part in parts]
    assert texts == [
        "<think>\nIt follows.\n</think>\n\ntwo<|im_end|>",
        "<think>\nAs before.\n</think>\n\nthree<|im_end|>",
    ]


def test_a_template_that_writes_the_prompt_otherwise_is_refused(words: Tokenizer) -> None:
    template = (
        "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(ConfigError, match="does not write a chat up to its answer"):
        encoder(words, template).encode(chat(CHATS["one"], None, "x"), "x")


GREETED: list[Message] = [
    {"role": "assistant", "content": "Welcome"},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "two"},
]
DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}<|im_start|>system\nBe.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_greeting_that_no_prompt_comes_before_is_context(words: Tokenizer) -> None:
    encoding = encoder(words, DEFAULT_SYSTEM)
    (part,) = encoding.encode(chat(GREETED, None, "x"), "x")
    shown = marked(words, part, colour=False)
    assert "assistant\nWelcome<|im_end|>" in shown
    assert shown.endswith("assistant\n[[two<|im_end|>]]\n")
    assert encoding.counts.greeted == 1
    with pytest.raises(ConfigError, match=r"d\.jsonl: line 5: the chat begins with the assistant.* put the user's"):
        encoding.encode(chat(GREETED[:1], None, "x"), "d.jsonl: line 5")
    plain = encoder(words)  # writes a prompt for it, so it is an answer as others are
    (part,) = plain.encode(chat(GREETED, None, "x"), "x")
    assert marked(words, part, colour=False).count("[[") == 2
    assert plain.counts.greeted == 0


def test_what_a_template_writes_otherwise_is_named_with_the_record(words: Tokenizer) -> None:
    template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"^d\.jsonl: line 9: the chat template does not write .* cannot be told"):
        encoder(words, template).encode(chat(CHATS["one"], None, "x"), "d.jsonl: line 9")


# The end of a turn is the mark that the next one begins with, as in GLM's template.
NEXT_ENDS = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def test_the_mark_of_the_next_turn_ends_an_answer_where_a_server_stops_at_it(tmp_path: Path) -> None:
    folder = sft.write_tokenizer(tmp_path, NEXT_ENDS)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "eos_token_id": None}))
    settings = {"eos_token": "</s>", "eos_token_id": [sft.SPECIALS.index("</s>"), sft.SPECIALS.index("<|user|>")]}
    stops = from_json(folder / "tokenizer.json", settings)
    assert {stops.vocabulary.spelling(token) for token in stops.eos_ids} >= {"</s>", "<|user|>"}
    (part,) = encoder(stops, NEXT_ENDS).encode(chat(CHATS["turns"][:4], None, "x"), "x")
    shown = marked(stops, part, colour=False)
    assert shown.endswith("[[two <|im_end|> é日<|user|>]]\nAnd <|im_start|> two?<|assistant|>\n[[three<|user|>]]")


def test_answers_that_nothing_ends_are_samples_of_their_own(words: Tokenizer) -> None:
    encoding = encoder(words, NEXT_ENDS)  # a server does not stop at <|user|> here
    parts = encoding.encode(chat(CHATS["turns"][:4], None, "x"), "x")
    assert [marked(words, part, colour=False).partition("[[")[2] for part in parts] == [
        "two <|im_end|> é日</s>]]",
        "three</s>]]",
    ]
    assert (encoding.counts.split, encoding.counts.ended) == (1, 2)


def test_nothing_is_trained_on_behind_the_first_end(words: Tokenizer) -> None:
    """Phi 3 writes its end of a turn, and an end of the text behind the last one: a server stops at the first."""
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
    )
    (part,) = encoder(words, template).encode(chat(CHATS["one"], None, "x"), "x")
    assert (
        marked(words, part, colour=False)
        == "<|user|>\nWhat is one?<|end|>\n<|assistant|>\n[[two<|end|>]]\n<|endoftext|>"
    )


def test_brackets_of_a_text_are_no_marks(words: Tokenizer) -> None:
    sample = chat([{"role": "user", "content": "a[[0]]"}, {"role": "assistant", "content": "two"}], None, "x")
    (part,) = encoder(words).encode(sample, "x")
    assert "a[[0]]<|im_end|>\n<|im_start|>assistant\n<<<two<|im_end|>>>>" in marked(words, part, colour=False)


def test_what_a_template_does_not_write_of_an_answer_is_refused_or_counted(words: Tokenizer) -> None:
    turns: list[Message] = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]},
    ]
    template = "{% if tools %}{% endif %}{# <tool_call> #}" + CHATML
    encoding = encoder(words, template)
    with pytest.raises(
        ConfigError, match=r"^x: the chat template does not write calls of tools, as here of add: write"
    ):
        encoding.encode(chat(turns, None, "x"), "x")
    plain = encoder(words)
    for key in ("reasoning_content", "thinking"):
        plain.encode(chat([turns[0], {"role": "assistant", "content": "two", key: "It follows."}], None, "x"), "x")
    assert plain.counts.unreasoned == 2
    plain.encode(
        chat([turns[0], {"role": "assistant", "content": "It follows.", "thinking": "It follows."}], None, "x"), "x"
    )
    assert plain.counts.unreasoned == 2


R1 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}{% else %}<|assistant|>"
    "{{ m['content'].split('</think>')[-1] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("answer", "trained"),
    [
        ({"content": "two"}, "\n</think>\n\ntwo<|end|>"),
        ({"content": "two", "reasoning_content": "It follows.\n"}, "It follows.\n</think>\n\ntwo<|end|>"),
        ({"content": "<think>\nIt follows.\n</think>two"}, "It follows.\n</think>\n\ntwo<|end|>"),
    ],
)
def test_reasoning_that_a_prompt_opens_is_closed_before_the_answer(
    words: Tokenizer, answer: dict[str, str], trained: str
) -> None:
    """As DeepSeek-R1's template does, which drops the reasoning of every message."""
    turns: list[Message] = [{"role": "user", "content": "one?"}, {"role": "assistant", **answer}]
    encoding = encoder(words, R1)
    for part in encoding.encode(chat([*turns, *turns], None, "x"), "x"):
        at = int(part.trained.argmax())
        assert words.decode(part.ids[at:].tolist(), skip_special=False) == trained
    prompt = encoding.template.encode_chat(words, turns[:1], add_generation_prompt=True)
    (part,) = encoding.encode(chat(turns, None, "x"), "x")
    assert part.ids[: int(part.trained.argmax())].tolist() == prompt


def test_answers_without_a_text_are_counted(words: Tokenizer) -> None:
    asked, call = {"role": "user", "content": "one?"}, {"function": {"name": "add", "arguments": "{}"}}
    encoding = encoder(words)
    for answer, count in [
        ({"content": "two"}, 0),
        ({"content": " \n"}, 1),
        ({"content": "", "weight": 0}, 1),
        ({"content": "", "reasoning_content": "It follows."}, 1),
        ({"content": None, "tool_calls": [call]}, 1),
        ({"content": ""}, 2),
    ]:
        turns = [asked, {"role": "assistant"} | answer, asked, {"role": "assistant", "content": "two"}]
        encoding.encode(chat(turns, None, "x"), "x")
        assert encoding.counts.empty == count, answer


def test_answers_that_nothing_comes_before_are_counted(words: Tokenizer) -> None:
    encoding = encoder(words)
    (alone,) = encoding.encode(Continuation("", "two one"), "x")
    assert encoding.counts.unprompted == (0 if words.vocabulary.prefix else 1)
    assert alone.trained.tolist() == [False] + [True] * (len(alone) - 1)
    encoding.encode(Continuation("one", " two"), "x")
    assert encoding.counts.unprompted == (0 if words.vocabulary.prefix else 1)


def test_a_template_that_refuses_is_named_with_the_record(words: Tokenizer) -> None:
    template = "{{ raise_exception('no system messages') }}"
    with pytest.raises(ConfigError, match=r"data\.jsonl: line 3: the chat template: no system messages"):
        encoder(words, template).encode(chat(CHATS["one"], None, "x"), "data.jsonl: line 3")


def test_an_end_is_added_where_the_template_writes_none(words: Tokenizer) -> None:
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"  # noqa: E501
    encoding = encoder(words, template)
    part = encoding.encode(chat(CHATS["one"], None, "x"), "x")[0]
    assert encoding.counts.ended == 1
    assert marked(words, part, colour=False) == "user: What is one?\nassistant: [[two</s>]]"


def test_tools_are_told_to_models_whose_template_knows_none(words: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    turns = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    part = encoder(words).encode(chat(turns, [tool], "x"), "x")[0]
    text = marked(words, part, colour=False)
    several = encoder(words).encode(chat([*turns[:3], turns[2], *turns[3:]], [tool], "x"), "x")[0]
    joined = "2\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>"
    assert marked(words, several, colour=False) == text.replace("2\n</tool_response><|im_end|>", joined)
    assert text.startswith("<|im_start|>system\nYou can call these functions")
    assert '[[<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>]]' in text
    assert text.endswith("assistant\n[[two<|im_end|>]]\n")
    coloured = marked(words, part, colour=True)
    assert "\x1b[30;42m" in coloured
    import re

    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == re.sub(r"\[\[|\]\]", "", text)


@pytest.mark.parametrize("prompt", ["What is one? ", "What is one?", ""])
def test_a_completion_begins_where_the_prompt_ends(words: Tokenizer, prompt: str) -> None:
    part = encoder(words).encode(Continuation(prompt, "two é"), "x")[0]
    at = int(part.trained.argmax())
    assert words.decode(part.ids[at:].tolist(), skip_special=False) == "two é</s>" if prompt else True
    assert part.ids[:at].tolist() == words.encode(prompt, add_special=False) or not prompt
    assert bool(part.trained[at:].all())
    assert not part.trained[:at].any()


def test_long_samples_are_cut_or_left_out(words: Tokenizer) -> None:
    long = chat([{"role": "user", "content": "one " * 30}, {"role": "assistant", "content": "two " * 30}], None, "x")
    late = chat([{"role": "user", "content": "one " * 90}, {"role": "assistant", "content": "two"}], None, "x")
    cutting = encoder(words, length=64)
    assert [len(part) for part in cutting.encode(long, "x")] == [64]
    assert cutting.encode(late, "x") == []
    assert (cutting.counts.cut, cutting.counts.left_out) == (2, 1)
    assert cutting.counts.longest > 100
    dropping = encoder(words, length=64, drop=True)
    assert dropping.encode(long, "x") == dropping.encode(late, "x") == []
    assert (dropping.counts.cut, dropping.counts.left_out) == (2, 2)
    text = Text("one two three " * 40)
    parts = encoder(words, length=64).encode(text, "x")
    ids = [token for part in parts for token in part.ids.tolist()]
    assert ids == [*words.encode(text.text, add_special=False), words.eos_ids[0]]
    assert all(part.trained.tolist() == [False] + [True] * (len(part) - 1) for part in parts)


def test_models_that_cannot_chat_are_refused_by_name(tmp_path: Path) -> None:
    from roofline.bundle.text_side import text_of_folder

    folder = sft.write_tokenizer(tmp_path, template=None)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_start|>", "<|start|>"))
    words, template = text_of_folder(folder)
    with pytest.raises(ConfigError, match="x: the model has no chat template"):
        Encoder(words, template, 64).encode(chat(CHATS["one"], None, "x"), "x")
    assert Encoder(words, template, 64).encode(Continuation("a", "b"), "x")


@pytest.mark.parametrize("seed", range(5))
def test_packing_fits_and_wastes_little(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 101, 400).tolist()
    rows = pack(lengths, 100)
    assert sorted(number for row in rows for number in row) == list(range(400))
    assert max(sum(lengths[n] for n in row) for row in rows) <= 100
    assert rows == pack(lengths, 100)
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // 100) + 1, "the bound of best fit decreasing, against the best"
    assert pack([], 10) == []
    assert pack([10, 10], 10) == [[0], [1]]


def test_packing_takes_the_tightest_row() -> None:
    assert pack([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]
    assert pack([7, 6, 3, 4], 10) == [[0, 2], [1, 3]]


def test_chats_are_a_kind_of_sample() -> None:
    assert Chat(({"role": "user", "content": "x"},)).answers == ()


MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m['content'] }}"
    "<|im_end|>{% endgeneration %}\n{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("of", ["one", "spaces", "turns"])
def test_the_mask_is_that_of_transformers_where_a_template_marks_answers_itself(tmp_path: Path, of: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference of masks")
    folder = sft.write_tokenizer(tmp_path, MARKED)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    turns = [{**turn, "content": str(turn["content"]).replace("<|im_", "<")} for turn in CHATS[of]]  # it trusts texts
    expected = reference.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    (part,) = encoder(sft.words(folder), MARKED).encode(chat(turns, None, "x"), "x")
    assert part.ids.tolist() == expected["input_ids"]
    assert part.trained.tolist() == [bool(each) for each in expected["assistant_masks"]]


@pytest.mark.parametrize(
    "sample", [Text("one two " * 8), Continuation("one " * 8, "two " * 8), chat(CHATS["turns"], None, "x")]
)
def test_a_sample_whose_tokens_do_not_fit_into_memory_is_refused(
    words: Tokenizer, sample: Text | Continuation | Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "LARGE", 32)
    monkeypatch.setattr(encode, "detect", lambda: SimpleNamespace(memory_available=1000))
    message = r"^f: line 3: a text of \d+ characters needs [\d,]+ bytes, 1,000 are available\. Divide it"
    with pytest.raises(CapacityError, match=message):
        encoder(words).encode(sample, "f: line 3")
    monkeypatch.setattr(encode, "detect", lambda: SimpleNamespace(memory_available=1 << 20))
    assert encoder(words).encode(sample, "f: line 3")
