"""Records of pairs and prompts in all forms, and the rows that are made of them."""

import re
from pathlib import Path
from typing import Any

import pytest

from roofline.bundle import load_text_of
from roofline.common.errors import ConfigError
from roofline.text.templates.template import ChatTemplate
from roofline.train.data.mds import Shards
from roofline.train.data.record_fields import RecordFields
from roofline.train.finetune.encode import Encoder
from roofline.train.finetune.prepare import Data, prepare
from roofline.train.finetune.samples import Chat, Continuation
from roofline.train.preference.pair_files import CHAT, pair, prompt
from roofline.train.preference.prepare import (
    PAIRS,
    PROMPTS,
    pair_item,
    preview,
    write_answered,
    write_pairs,
    write_prompts,
)
from roofline.train.preference.rewards import exact_match, right_answer
from tests.train import sft

USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in zip(("user", *["assistant"] * 2), "Qgb", strict=True)
)


def test_pairs_of_all_forms() -> None:
    chats: list[dict[str, Any]] = [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "Q", "chosen": [USER, GOOD], "rejected": [USER, BAD]},  # UltraFeedback: the prompt is in both
        {"question": "Q", "chosen": "g", "rejected": "b"},
    ]
    for record in chats:
        found = pair(record, "here", None)
        for sample, answer in ((found.chosen, GOOD), (found.rejected, BAD)):
            assert isinstance(sample, Chat)
            assert [dict(each) for each in sample.messages] == [USER, answer], record
            assert sample.answers == (1,)
    plain = {"prompt": "Q", "chosen": "g", "rejected": "b"}
    assert pair(plain, "here", None).chosen == Continuation("Q", "g")
    assert pair(plain, "here", CHAT) == pair(chats[3], "here", None)
    together = pair({"chosen": "Human: Hi Assistant: Hello", "rejected": "Human: Hi Assistant: Help"}, "here", None)
    assert together.rejected == Continuation("Human: Hi Assistant:", " Help")


def test_pairs_that_are_none() -> None:
    for record, message in [
        ({"prompt": "Q", "chosen": "g"}, "its keys are prompt, chosen"),
        ({"chosen": [USER, GOOD, USER, BAD], "rejected": [USER, GOOD]}, "are not to the same prompt"),
        ({"prompt": "Q", "chosen": 3, "rejected": "b"}, "chosen is the number 3, not a text"),
        ({"chosen": [USER], "rejected": [USER]}, "no message of an assistant"),
        ({"chosen": [USER, GOOD | {"weight": 0}], "rejected": [USER, BAD]}, "its answer has a weight of 0"),
    ]:
        with pytest.raises(ConfigError, match=f"here.*{message}"):
            pair(record, "here", None)


OTHER = {"role": "user", "content": "R"}
TURN = {"from": "human", "value": "R"}


@pytest.mark.parametrize(
    ("record", "chosen", "rejected"),
    [
        ({"chosen": [USER, GOOD], "rejected": [OTHER, BAD]}, "the user's message 'Q'", "the user's message 'R'"),
        ({"chosen": [USER, GOOD], "rejected": [TURN, BAD]}, "the user's message 'Q'", "the user's message 'R'"),
        ({"chosen": [USER, GOOD, OTHER, GOOD], "rejected": [USER, GOOD, USER, BAD]}, "user's message 'R'", "'Q'"),
        ({"prompt": [USER], "chosen": [GOOD, OTHER, GOOD], "rejected": [GOOD]}, "the user's message 'R'", "no message"),
        ({"chosen": [{"role": "system", "content": "s"}, USER, GOOD], "rejected": [USER, BAD]}, "system's", "'Q'"),
        ({"chosen": "Human: Q Assistant: g", "rejected": "Human: R Assistant: b"}, "'Q Assistant: g'", "'R Assistant"),
        ({"chosen": "Paris.", "rejected": "Rome."}, "'Paris.'", "'Rome.'"),
    ],
)
def test_answers_to_two_questions_are_no_pair(record: dict[str, Any], chosen: str, rejected: str) -> None:
    with pytest.raises(ConfigError, match=r"^here: the chosen and the rejected answer are not to the same") as refused:
        pair(record, "here", None)
    _, begins, other = re.split("chosen goes on with|rejected with", str(refused.value))
    assert chosen in begins
    assert rejected in other


def test_a_prompt_and_the_question_of_an_answer_are_one() -> None:
    noted = {"prompt": [USER | {"name": "n"}], "chosen": [USER, GOOD], "rejected": [BAD]}
    both = pair(noted, "here", None)
    assert [len(sample.messages) for sample in (both.chosen, both.rejected)] == [2, 2]  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="here: the prompt ends with the user's message 'Q', and an answer begins"):
        pair({"prompt": [USER], "chosen": [OTHER, GOOD], "rejected": [OTHER, BAD]}, "here", None)


def test_all_answers_behind_the_first_one_that_differs_are_trained_on(words: Any) -> None:
    record = {"chosen": [USER, GOOD, OTHER, GOOD, USER, GOOD], "rejected": [USER, GOOD, OTHER, BAD]}
    both = pair(record, "here", None)
    assert (both.chosen.answers, both.rejected.answers) == ((3, 5), (3,))  # type: ignore[union-attr]
    data = Data((Path("p"),), 256, form=f"{PAIRS} ")
    chosen, rejected = pair_item(data, Encoder(*words, 256), record, "here").documents
    assert [words[0].decode(part.ids[part.trained]) for part in (chosen, rejected)] == ["gg", "b"]
    without_ends = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    without_ends += "{% if add_generation_prompt %}[assistant]{% endif %}"
    other = ChatTemplate(without_ends, bos_token="<s>", eos_token="</s>")
    with pytest.raises(ConfigError, match=r"^here: its chats differ in several answers, which the chat template"):
        pair_item(data, Encoder(words[0], other, 256), record, "here")


def test_prompts_of_all_forms() -> None:
    for record in ({"prompt": [USER]}, {"messages": [USER, GOOD]}, {"question": "Q", "answer": "g"}):
        found, form = prompt(record, "here", None)
        assert form == ("question" if "question" in record else "messages")
        assert isinstance(found, Chat)
        assert [dict(each) for each in found.messages] == [USER]
    assert prompt({"prompt": "Q"}, "here", None) == ("Q", "text")
    assert prompt({"prompt": "Q"}, "here", CHAT) == prompt({"question": "Q"}, "here", None)
    with pytest.raises(ConfigError, match="here has no prompt, question or messages: its keys are text"):
        prompt({"text": "x"}, "here", None)


@pytest.fixture
def words(tmp_path: Path) -> Any:
    return load_text_of(str(sft.write_tokenizer(tmp_path / "tokenizer")))


def rows(folder: Path) -> list[dict[str, Any]]:
    shards = Shards(folder)
    found = [shards[at] for at in range(len(shards))]
    shards.close()
    return found


def test_a_pair_is_two_documents_of_a_row_and_its_answers_are_targets(words: Any, tmp_path: Path) -> None:
    records = [{"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}] * 3
    records.append(
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD | {"content": "b" * 100}]}
    )  # is longer than a row
    data = Data((sft.write_lines(tmp_path / "p.jsonl", records),), 64, form=f"{PAIRS} ")
    prepared = prepare(data, tmp_path / "data", *words, write_pairs)
    assert (prepared.form, prepared.records, prepared.left_out, prepared.train.samples) == ("messages", 4, 1, 3)
    found = rows(tmp_path / "data/train")
    assert [len(row["documents"]) for row in found] == [4, 2]
    assert sum(len(row["tokens"]) for row in found) == prepared.train.real
    ids, first = found[0]["tokens"], int(found[0]["documents"][0])
    assert words[0].decode(ids[:first][found[0]["trained"][:first] == 1]) == "g"
    assert found[0]["trained"][:first].sum() == 2  # with the token that ends it
    behind = slice(first, first + int(found[0]["documents"][1]))
    assert words[0].decode(ids[behind][found[0]["trained"][behind] == 1]) == "b"
    single = Data(data.places, 64, form=f"{PAIRS} ", pack=False)
    prepare(single, tmp_path / "single", *words, write_pairs)
    assert [len(row["documents"]) for row in rows(tmp_path / "single/train")] == [2, 2, 2]


def test_pairs_whose_answers_are_the_same_are_left_out(words: Any, tmp_path: Path) -> None:
    same: list[dict[str, Any]] = [
        {"chosen": [USER, GOOD], "rejected": [USER, GOOD]},
        {"chosen": [USER, GOOD, USER], "rejected": [USER, GOOD]},  # what follows the last answer is not read
        {"question": "Q", "chosen": "g", "rejected": "g"},
        {"prompt": "Q", "chosen": "g", "rejected": "g"},
    ]
    good = {"question": "Q", "chosen": "g", "rejected": "b"}
    data = Data((sft.write_lines(tmp_path / "p.jsonl", [*same, good, good]),), 64, form=f"{PAIRS} ", share=0.5)
    prepared = prepare(data, tmp_path / "data", *words, write_pairs)
    assert prepared.held_out is not None
    assert (prepared.records, prepared.alike, prepared.left_out) == (6, 4, 0)
    assert (prepared.train.samples, prepared.held_out.samples) == (1, 1)
    assert prepared.form == "messages, question, text"
    none = Data((sft.write_lines(tmp_path / "s.jsonl", same),), 64, form=f"{PAIRS} ")
    with pytest.raises(ConfigError, match=r"s.jsonl: in all pairs the chosen and the rejected answer are the same"):
        prepare(none, tmp_path / "none", *words, write_pairs)
    shown = list(preview(none, Encoder(*words, 64), 1, False, pair_item))
    assert len(shown) == 1, "what is left out is not shown as trained on"
    assert shown[0].endswith(" tokens, left out: both answers are the same")
    long = {"question": "Q", "chosen": "g" * 40, "rejected": "b" * 40}
    sft.write_lines(tmp_path / "s.jsonl", [long, good])
    shown = list(preview(none, Encoder(*words, 64), 2, False, pair_item))
    assert shown[0].endswith(" tokens, left out: a row has 64 (--max-seq-len)")
    assert shown[1].endswith(" tokens")
    assert [line.count("[[") for line in shown] == [0, 0, 1, 1]
    sft.write_lines(tmp_path / "s.jsonl", [{"question": "Q" * 100, "chosen": "g", "rejected": "b"}])
    (alone,) = preview(none, Encoder(*words, 64, drop=True), 1, False, pair_item)
    assert alone.endswith(": left out: it does not fit into a row of 64 tokens (--max-seq-len)")


def test_a_prompt_that_both_answers_repeat_is_there_once() -> None:
    repeated = {"prompt": "What is x?", "chosen": "What is x? One.", "rejected": "What is x? Two."}
    fields = RecordFields(repeated)
    answers = pair(fields, "here", None)
    assert answers.chosen == Continuation("What is x?", " One.")
    assert answers.rejected == Continuation("What is x?", " Two.")
    assert fields.unused == ["the prompt that both answers repeat"]
    chats = pair(repeated, "here", CHAT)
    assert isinstance(chats.chosen, Chat)
    assert [message["content"] for message in chats.chosen.messages] == ["What is x?", "One."]
    once = {"prompt": "x", "chosen": "x is one", "rejected": "two"}  # an answer that begins so
    assert pair(once, "here", None).chosen == Continuation("x", "x is one")
    with pytest.raises(ConfigError, match="an answer is the prompt and nothing else"):
        pair(repeated | {"chosen": "What is x?"}, "here", None)


def test_a_prompt_is_a_row_that_ends_where_the_model_answers(words: Any, tmp_path: Path) -> None:
    records = [{"question": "Q", "answer": "g", "level": 3}, {"question": "Q" * 200}]
    data = Data((sft.write_lines(tmp_path / "p.jsonl", records),), 96, form=f"{PROMPTS}-16 ", pack=False)
    prepared = prepare(data, tmp_path / "data", *words, write_prompts)
    assert (prepared.form, prepared.left_out, prepared.train.trained) == ("question", 1, 0)
    (row,) = rows(tmp_path / "data/train")
    assert row["record"] == records[0]
    assert row["tokens"].tolist() == words[1].encode_chat(words[0], [USER])
    assert not row["trained"].any()


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Q", "chosen": [GOOD], "rejected": [BAD]},
        {"question": "Q", "chosen": [GOOD], "rejected": [BAD]},
        {"instruction": "Q", "input": "", "chosen": "g", "rejected": "b"},
        {"input": "Q", "chosen": "g", "rejected": "b"},
        {"conversations": [{"from": "human", "value": "Q"}], "chosen": [GOOD], "rejected": [BAD]},
        {"conversations": [{"from": "human", "value": "Q"}], "chosen": {"from": "gpt", "value": "g"}, "rejected": BAD},
        {"prompt": [USER], "chosen": "g", "rejected": "b"},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
)
@pytest.mark.parametrize("system", [{}, {"system": "s"}])
def test_the_prompt_of_a_pair_comes_before_both_answers(record: dict[str, Any], system: dict[str, str]) -> None:
    fields = RecordFields(record | system)
    both = pair(fields, "here", None)
    before = [{"role": "system", "content": "s"}] if system else []
    for sample, answer in ((both.chosen, GOOD), (both.rejected, BAD)):
        assert isinstance(sample, Chat)
        assert [dict(message) for message in sample.messages] == [*before, USER, answer]
        assert sample.answers == (len(before) + 1,)
    assert fields.unused == []


def test_what_a_pair_does_not_use_is_refused_or_named() -> None:
    for record, message in [
        ({"chosen": [GOOD], "rejected": [BAD]}, "no prompt comes before the answers"),
        ({"prompt": "", "chosen": [GOOD], "rejected": [BAD]}, "no prompt comes before the answers"),
        ({"prompt": "Q", "system": "s", "chosen": "g", "rejected": "b"}, "system would not be read"),
        ({"question": "Q", "choices": ["x"], "chosen": "g", "rejected": "b"}, "choices would not be read"),
        ({"prompt": [USER], "images": ["x"], "chosen": [GOOD], "rejected": [BAD]}, "images would not be read"),
        ({"prompt": [USER], "chosen": [], "rejected": [BAD]}, "chosen has no message"),
    ]:
        with pytest.raises(ConfigError, match=f"here.*{message}"):
            pair(record, "here", None)
    used = RecordFields({"prompt": "Q", "chosen": [USER, GOOD], "rejected": [USER, BAD], "score": 3.5})
    pair(used, "here", None)
    assert used.unused == ["score"]
    other = RecordFields({"prompt": "Another", "chosen": [USER, GOOD], "rejected": [USER, BAD]})
    pair(other, "here", None)
    assert other.unused == ["prompt"], "the chats have another prompt than this text"


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "g"}], "answer": "g"},
        {"conversations": [{"from": "human", "value": "Q"}], "answer": "g"},
        {"instruction": "Q", "output": "g"},
        {"messages": [], "prompt": [USER]},
    ],
)
def test_a_prompt_ends_before_the_answer(record: dict[str, Any]) -> None:
    words, _ = prompt(record, "here", None)
    assert isinstance(words, Chat)
    assert [dict(message) for message in words.messages] == [USER]


def test_the_context_of_a_prompt_stands_in_it() -> None:
    words, _ = prompt({"question": "Q", "context": "c", "system": "s", "answer": "g"}, "here", None)
    assert isinstance(words, Chat)
    assert [message["content"] for message in words.messages] == ["s", "c\n\nQ"]
    for record, message in [
        ({"prompt": [], "answer": "x"}, "the prompt has no message"),
        ({"prompt": [GOOD], "answer": "x"}, "the prompt has no message"),
        ({"prompt": "Q", "context": "c"}, "context would not be read"),
    ]:
        with pytest.raises(ConfigError, match=f"here: {message}"):
            prompt(record, "here", None)


def test_what_was_not_used_is_counted(words: Any, tmp_path: Path) -> None:
    good = {"question": "Q", "chosen": "g", "rejected": "b", "url": "u"}
    data = Data((sft.write_lines(tmp_path / "p.jsonl", [good, good]),), 64, form=f"{PAIRS} ", share=0.5)
    prepared = prepare(data, tmp_path / "data", *words, write_pairs)
    assert (prepared.unused, prepared.shared) == ({"url": 2}, 1)
    shown = list(preview(data, Encoder(*words, 64), 2, False, pair_item))
    assert shown[-1] == "--- not used: url (2 records)"


def test_prompts_that_are_to_be_answered_exactly(words: Any, tmp_path: Path) -> None:
    data = Data((sft.write_lines(tmp_path / "p.jsonl", [{"question": "Q", "answer": 3}]),), 96, form=f"{PROMPTS}-16 ")
    assert prepare(data, tmp_path / "data", *words, write_answered).records == 1
    sft.write_lines(tmp_path / "p.jsonl", [{"question": "Q", "answer": 3}, {"question": "Q", "answer": True}])
    with pytest.raises(ConfigError, match=r"p.jsonl: line 2: reward=exact_match: a prompt has no right answer"):
        prepare(data, tmp_path / "other", *words, write_answered)
    assert prepare(data, tmp_path / "plain", *words, write_prompts).records == 2


def test_a_template_that_refuses_a_prompt_is_named_with_the_record(tmp_path: Path) -> None:
    folder = sft.write_tokenizer(tmp_path / "strict", "{{ raise_exception('no system messages') }}")
    data = Data((sft.write_lines(tmp_path / "p.jsonl", [{"question": "Q"}]),), 96, form=f"{PROMPTS}-16 ")
    with pytest.raises(ConfigError, match=r"p.jsonl: line 1: the chat template: no system messages"):
        prepare(data, tmp_path / "data", *load_text_of(str(folder)), write_prompts)


@pytest.mark.parametrize(
    ("answer", "text"),
    [(1, "1"), (0, "0"), (-2.5, "-2.5"), (42.0, "42"), ("x", "x"), (True, None), (None, None), (["x"], None)],
)
def test_right_answers_that_are_numbers(answer: Any, text: str | None) -> None:
    assert right_answer({"answer": answer}) == text
    assert text is None or exact_match(f" {text}\n", {"answer": answer}) == 1
