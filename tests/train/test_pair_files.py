"""Records of pairs and prompts in all forms, and the rows that are made of them."""

from pathlib import Path
from typing import Any

import pytest

from roofline.bundle import load_text_of
from roofline.common.errors import ConfigError
from roofline.train.data.mds import Shards
from roofline.train.finetune.encode import Encoder
from roofline.train.finetune.prepare import Data, prepare
from roofline.train.finetune.samples import Chat, Continuation
from roofline.train.preference.pair_files import CHAT, pair, prompt
from roofline.train.preference.prepare import PAIRS, PROMPTS, pair_item, preview, write_pairs, write_prompts
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
    ]:
        with pytest.raises(ConfigError, match=f"here.*{message}"):
            pair(record, "here", None)


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
    assert shown[0].endswith(" tokens, left out: both answers are the same")


def test_a_prompt_is_a_row_that_ends_where_the_model_answers(words: Any, tmp_path: Path) -> None:
    records = [{"question": "Q", "answer": "g", "level": 3}, {"question": "Q" * 200}]
    data = Data((sft.write_lines(tmp_path / "p.jsonl", records),), 96, form=f"{PROMPTS}-16 ", pack=False)
    prepared = prepare(data, tmp_path / "data", *words, write_prompts)
    assert (prepared.form, prepared.left_out, prepared.train.trained) == ("question", 1, 0)
    (row,) = rows(tmp_path / "data/train")
    assert row["record"] == records[0]
    assert row["tokens"].tolist() == words[1].encode_chat(words[0], [USER])
    assert not row["trained"].any()
