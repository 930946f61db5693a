"""LLM Foundry's finetuning loaders: samples are prepared in the run's folder, whatever process asks first."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.bundle import load_text_of  # noqa: E402
from roofline.common.errors import ConfigError  # noqa: E402
from roofline.train.config.data_sets import DatasetSection  # noqa: E402
from roofline.train.config.read import parse_config  # noqa: E402
from roofline.train.data.loader import Source  # noqa: E402
from roofline.train.data.mds import Shards  # noqa: E402
from roofline.train.finetune import plan  # noqa: E402
from roofline.train.finetune.loaders import data_of, prepare_all, prepared  # noqa: E402
from roofline.train.finetune.prepare import Data, prepare, read_prepared  # noqa: E402
from roofline.train.preference.prepare import PAIRS, write_pairs  # noqa: E402
from roofline.train.run.loop import train  # noqa: E402
from roofline.train.run_folder import read_lines  # noqa: E402
from tests.command_line import call_roofline  # noqa: E402
from tests.train import sft  # noqa: E402

FUNCTION = """
def of_numbers(record):
    return {"prompt": f"What is {record['n']}?", "response": " one" * record["n"]}
def wrong(record):
    return record["missing"]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, and a folder of files with two splits."""
    folder = tmp_path_factory.mktemp("foundry")
    sft.write_tokenizer(folder / "tokenizer")
    (folder / "data").mkdir()
    for split, count in (("train", 30), ("validation", 5)):
        sft.write_lines(folder / f"data/{split}.jsonl", [{"prompt": "one two", "response": " three"}] * count)
    sft.write_lines(folder / "numbers.jsonl", [{"n": n % 5 + 1} for n in range(20)])
    (folder / "own_functions.py").write_text(FUNCTION)
    return folder


def mapping(place: Path, run: Path, dataset: dict[str, Any], **changes: Any) -> dict[str, Any]:
    loader = {"name": "finetuning", "dataset": {"max_seq_len": 64, "decoder_only_format": True, **dataset}}
    return {
        "run_folder": str(run),
        "max_seq_len": 64,
        "model": {"name": "mpt_causal_lm", "d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": sft.VOCAB},
        "tokenizer": {"name": str(place / "tokenizer"), "kwargs": {"model_max_length": 64}},
        "train_loader": {**loader, "drop_last": True, "num_workers": 2},
        "optimizer": {"name": "decoupled_adamw", "lr": 1e-3},
        "max_duration": "2ba",
        "global_train_batch_size": 4,
        "precision": "fp32",
        "device": "cpu",
        "progress_bar": False,
        "probes": False,
        **changes,
    }


@pytest.mark.parametrize("ratio", [None, 1.0, 6.5, "auto"])
def test_a_configuration_of_llm_foundry_trains(place: Path, tmp_path: Path, ratio: Any) -> None:
    files = {"hf_name": "json", "hf_kwargs": {"data_dir": str(place / "data")}}
    held_out = {"name": "finetuning", "dataset": {**files, "split": "validation", "shuffle": False}}
    dataset = {**files, "split": "train", "shuffle": True, "allow_pad_trimming": False, "packing_ratio": ratio}
    made = mapping(place, tmp_path / "run", dataset, eval_loader=held_out, eval_interval="1ba")
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(made))
    done = call_roofline(["train", file])
    assert done.exit_code == 0, done.stderr
    about = read_prepared(tmp_path / "run/samples/train")
    packs = ratio in (6.5, "auto")
    assert about.train.samples == 30
    assert about.train.rows < 10 if packs else about.train.rows == 30
    lines = read_lines(tmp_path / "run/log.jsonl")
    assert (lines[0]["about"]["leak_proof"] is not None) == packs
    assert all(line["computed"] == 4 * 64 for line in lines if "loss" in line), "padding is computed, as the file says"
    assert [line["eval_tokens"] for line in lines if "eval_loss" in line] == [2 * 5] * 2, "three and the end, of each"
    again = call_roofline(["train", tmp_path / "run/config.json", "--set", f"run_folder={tmp_path}/again"])
    assert again.exit_code == 0, again.stderr
    losses = [
        [line["loss"] for line in read_lines(tmp_path / name / "log.jsonl") if "loss" in line]
        for name in ("run", "again")
    ]
    assert losses[0] == losses[1]


def test_records_go_through_a_function(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(place))
    dataset = {"hf_name": str(place / "numbers.jsonl"), "preprocessing_fn": "own_functions:of_numbers"}
    config = parse_config(mapping(place, tmp_path / "run", dataset))
    prepare_all(config)
    shards = Shards(tmp_path / "run/samples/train/train")
    rows = [shards[n] for n in range(len(shards))]
    assert sorted(int(row["trained"].sum()) for row in rows) == sorted(n % 5 + 2 for n in range(20))  # type: ignore[attr-defined]
    assert prepared(config).train_loader.dataset.local == str(tmp_path / "run/samples/train/train")
    changed = mapping(place, tmp_path / "run", {**dataset, "preprocessing_fn": "own_functions:wrong"})
    with pytest.raises(ConfigError, match="was prepared from other data"):
        prepare_all(parse_config(changed))
    with pytest.raises(ConfigError, match=r"numbers.jsonl: line 1: own_functions:wrong fails: KeyError: 'missing'"):
        prepare_all(parse_config(changed | {"run_folder": str(tmp_path / "other")}))
    sys.modules.pop("own_functions")


def test_prompts_may_be_trained_on(place: Path, tmp_path: Path) -> None:
    found = {}
    for prompts in ("none", "all"):
        dataset = {"hf_name": str(place / "data"), "target_prompts": prompts}
        config = parse_config(mapping(place, tmp_path / prompts, dataset))
        prepare_all(config)
        found[prompts] = read_prepared(tmp_path / prompts / "samples/train").train
    assert found["none"].trained == 2 * 30
    assert found["all"].trained == found["all"].real - 30


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"hf_name": "mosaicml/dolly_hhrlhf"}, "nothing is fetched from the hub: fetch it"),
        ({"hf_name": "json"}, "needs the files in hf_kwargs: data_files or data_dir"),
        ({"hf_name": "json", "hf_kwargs": {"data_files": "x.bin"}}, "x.bin: data is read from"),
        ({"hf_name": "json", "hf_kwargs": {"data_files": {"test": "x.jsonl"}}}, "has no split 'train': it has test"),
        (
            {"hf_name": "json", "preprocessing_fn": "nowhere:f", "hf_kwargs": {"data_files": "x.json"}},
            "cannot be imported",
        ),
    ],
)
def test_what_cannot_be_prepared_is_named(place: Path, tmp_path: Path, dataset: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(parse_config(mapping(place, tmp_path / "run", dataset)))


@pytest.mark.parametrize(
    ("dataset", "changes", "message"),
    [
        ({"hf_name": "x", "local": "y"}, {}, "name one of them"),
        ({"hf_name": "x", "preprocessing_fn": "f"}, {}, "preprocessing_fn"),
        ({"hf_name": "x"}, {"tokenizer": None}, "tokenizer.name is missing"),
        ({"local": "x"}, {"eval_loader": {"name": "text", "dataset": {"local": "x"}}}, "does not go with"),
    ],
)
def test_keys_that_contradict(place: Path, tmp_path: Path, dataset: Any, changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(mapping(place, tmp_path, dataset, **changes))
    texts = {"train_loader": {"name": "text", "dataset": {"local": "x", "packing_ratio": 2}}}
    with pytest.raises(ConfigError, match=r"dataset\.packing_ratio belongs to a loader whose name is finetuning"):
        parse_config(mapping(place, tmp_path, {}) | texts)


def test_files_may_be_named_one_by_one(place: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}))
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "c", "response": "d"}))
    for files in (
        f"{tmp_path}/*.jsonl",
        [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"],
        {"train": f"{tmp_path}/*.jsonl"},
    ):
        dataset = {"hf_name": "json", "hf_kwargs": {"data_files": files}}
        loader = parse_config(mapping(place, tmp_path, dataset)).train_loader
        assert data_of(loader, 64).files == [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]


def test_an_evaluation_may_be_labelled_train(place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = {"hf_name": str(place / "data/train.jsonl")}
    held_out = {"name": "finetuning", "label": "train", "dataset": {"hf_name": str(tmp_path / "other.jsonl")}}
    sft.write_lines(tmp_path / "other.jsonl", [{"prompt": "one", "response": " two", "url": "u"}] * 3)
    config = parse_config(mapping(place, tmp_path / "run", files, eval_loader=held_out, eval_interval="1ba"), "")
    prepare_all(config)
    assert "other.jsonl: not used: url (3 records)" in caplog.text
    caplog.clear()
    prepare_all(config)
    assert not caplog.text, "it is said once"
    done = prepared(config)
    assert read_prepared(tmp_path / "run/samples/train").records == 30
    (loader,) = done.evaluations.values()
    shards = Shards(Path(str(loader.dataset.local)))
    assert len(shards) == 3
    shards.close()


@pytest.mark.parametrize("ratio", [1.0, "auto"])
def test_durations_in_tokens_count_what_is_no_padding(place: Path, tmp_path: Path, ratio: Any) -> None:
    """As LLM Foundry counts: prompts, which are not trained on, count, and what fills up a row does not."""
    records = [{"prompt": "one two three", "response": " four" * (1 + n % 3)} for n in range(12)]
    dataset = {"hf_name": str(sft.write_lines(tmp_path / "d.jsonl", records)), "packing_ratio": ratio}
    made = mapping(place, tmp_path / "run", dataset, max_duration="200tok")
    train(parse_config(made | {"global_train_batch_size": 1}, ""))
    about = read_prepared(tmp_path / "run/samples/train").train
    assert about.trained < about.real < about.rows * 64
    lines = [line for line in read_lines(tmp_path / "run/log.jsonl") if "loss" in line]
    assert lines[-1]["tokens"] >= 200 > lines[-2]["tokens"], "the first step with which they are enough is the last"


def test_what_is_not_trained_on_is_told(place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "page.html").write_text("<html>")
    records = [{"prompt": "one", "response": " two" * 99}, {"prompt": "one" * 99, "response": " two"}]
    sft.write_lines(folder / "train.jsonl", [*records, {"prompt": "", "response": "two one"}])
    prepare_all(parse_config(mapping(place, tmp_path / "run", {"hf_name": str(folder)}), ""))
    assert [record.getMessage().removeprefix(f"{folder}: ") for record in caplog.records] == [
        "files that were not read, by their suffix: 1 file",
        "2 samples longer than 64 tokens: cut at the end",
        "1 sample without a target within 64 tokens: left out",
        "1 answer with no prompt before: the first token is not trained on",
    ]


@pytest.mark.parametrize("pairs", [False, True])
def test_the_lengths_of_rows_elsewhere_are_read_beside_them(pairs: bool, place: Path, tmp_path: Path) -> None:
    """Durations in tokens count the same rows alike, wherever they lie; no shard is fetched for it."""
    words = load_text_of(str(place / "tokenizer"))
    records = [{"question": "one" * n, "chosen": "a", "rejected": "b", "answer": "two"} for n in range(1, 40)]
    data = Data((sft.write_lines(tmp_path / "d.jsonl", records),), 64, form=f"{PAIRS} " if pairs else "question")
    prepare(data, tmp_path / "rows", *words, write_pairs if pairs else None)
    rows, cache = tmp_path / "rows/train", tmp_path / "cache"
    here = Source(DatasetSection(local=str(rows)), 64, documents=True, trained=True)
    elsewhere = Source(DatasetSection(remote=str(rows), local=str(cache)), 64, documents=True, trained=True)
    assert elsewhere.remote
    assert len(set(here.lengths.tolist())) > 1
    assert elsewhere.lengths.tolist() == here.lengths.tolist()
    assert elsewhere.tokens == here.tokens
    assert not list(cache.glob("*/*"))
    for content, message in [
        (None, "has no lengths.json: durations in tokens need the length of every row"),
        ("[3]", "lengths.json is damaged, or of other rows"),
        (json.dumps([True] * len(here)), "lengths.json is damaged, or of other rows"),
        ("[", "lengths.json is damaged: "),
        (json.dumps([65] * len(here)), "lengths.json is of other rows: it has one of 65 tokens, and max_seq_len is 64"),
    ]:
        (rows / "lengths.json").unlink() if content is None else (rows / "lengths.json").write_text(content)
        with pytest.raises(ConfigError, match=message):
            _ = Source(elsewhere.section, 64, documents=True, trained=True).tokens
    for source in (here, elsewhere):
        source.close()


def test_rows_elsewhere_are_as_long_as_their_lengths_say(place: Path, tmp_path: Path) -> None:
    words = load_text_of(str(place / "tokenizer"))
    records = [{"question": "one" * n, "answer": "two"} for n in range(1, 40)]
    prepare(Data((sft.write_lines(tmp_path / "d.jsonl", records),), 64, form="question"), tmp_path / "rows", *words)
    rows = tmp_path / "rows/train"
    lengths = json.loads((rows / "lengths.json").read_text())
    (rows / "lengths.json").write_text(json.dumps([*lengths[:1], lengths[1] - 1, *lengths[2:]]))
    section = DatasetSection(remote=str(rows), local=str(tmp_path / "cache"))
    source = Source(section, 64, documents=True, trained=True)
    assert source.rows([0, 1]).tokens.shape == (2, 64), "no duration is in tokens"
    assert source.tokens
    assert source.rows([0, 2]).tokens.shape == (2, 64)
    with pytest.raises(ConfigError, match=f"row 1 has {lengths[1]} tokens, and its lengths.json says {lengths[1] - 1}"):
        source.rows([0, 1])
    source.close()


def test_of_a_chat_the_last_answer_is_trained_on_as_in_llm_foundry(place: Path, tmp_path: Path) -> None:
    files = {"hf_name": str(place / "data/train.jsonl")}
    config = parse_config(mapping(place, tmp_path / "run", files), "")
    assert data_of(config.train_loader, 64).last_only
    config = parse_config(mapping(place, tmp_path / "run", files | {"target_responses": "all"}), "")
    assert not data_of(config.train_loader, 64).last_only


def test_settings_that_were_changed_into_no_yaml_are_written_anew(tmp_path: Path) -> None:
    """Or into some with a key twice, of a run that never began."""
    written = plan.write({"seed": 1, "max_duration": "1ba"}, tmp_path).read_text()
    for text in (written + "seed: 1\n", "a: [1\n", "- 1\n", ""):
        (tmp_path / plan.FILE).write_text(text)
        assert plan.write({"seed": 1, "max_duration": "1ba"}, tmp_path).read_text() == written
