"""Samples and Hugging Face folders while a run trains: what they hold, when, and what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.bundle import load_text_of  # noqa: E402
from roofline.common.errors import ConfigError  # noqa: E402
from roofline.train.checkpoint import hf_folders  # noqa: E402
from roofline.train.checkpoint.export import export  # noqa: E402
from roofline.train.config.duration import DurationUnits  # noqa: E402
from roofline.train.config.read import parse_config  # noqa: E402
from roofline.train.data.learn_vocabulary import learn  # noqa: E402
from roofline.train.model.build import load  # noqa: E402
from roofline.train.model.modules import Model  # noqa: E402
from roofline.train.parallel.processes import World  # noqa: E402
from roofline.train.report.console import Console  # noqa: E402
from roofline.train.run import samples  # noqa: E402
from roofline.train.run.loop import train  # noqa: E402
from roofline.train.storage.local import LocalStore  # noqa: E402
from roofline.weights.checkpoint import open_checkpoint  # noqa: E402
from tests.train.small import config, digest, log_of, mapping, stored, write_rows  # noqa: E402

PROMPTS = ["to be", "fox"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 270 ids."""
    folder = tmp_path_factory.mktemp("words")
    learn(["to be or not to be, that is the question of the quick fox"], folder, 270)
    return folder


def settings(root: Path, words: Path, name: str, **callbacks: Any) -> Any:
    data = root / "data" if (root / "data").exists() else write_rows(root / "data", 30)
    changes: dict[str, Any] = {"model__vocab_size": 280, "tokenizer": {"name": str(words)}, "optimizer__lr": 0.03}
    changes |= {"max_duration": "5ba", "save_interval": "5ba"}
    return mapping(data, root / name, callbacks=callbacks, **changes)


def samples_of(folder: Path) -> dict[int, list[str]]:
    lines = [line for line in log_of(folder) if "samples" in line]
    assert all([each["prompt"] for each in line["samples"]] == PROMPTS for line in lines)
    return {line["step"]: [each["text"] for each in line["samples"]] for line in lines}


def likeliest(folder: Path, words: Path, count: int) -> list[str]:
    """What an exported model says, token by token, one prompt at a time."""
    source, tokenizer = open_checkpoint(folder), load_text_of(str(words))[0]
    shape = json.loads((folder.parents[2] / "config.json").read_text())["max_seq_len"]
    assert shape == 16
    model = Model(source.config, "cpu")
    load(model, source)
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt, add_special=True)
        for _ in range(count):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        texts.append(tokenizer.decode(ids[-count:]))
    return texts


def test_samples_are_what_the_weights_of_their_step_say(tmp_path: Path, words: Path) -> None:
    section = {"prompts": PROMPTS, "interval": "2ba", "max_new_tokens": 5}
    folders = {"save_folder": str(tmp_path / "run" / "hf"), "save_interval": "2ba"}
    plain = train(parse_config(settings(tmp_path, words, "plain")))
    done = train(parse_config(settings(tmp_path, words, "run", generate_callback=section, hf_checkpointer=folders)))
    texts = samples_of(done.folder)
    assert list(texts) == [2, 4, 5]
    for step, found in texts.items():
        assert found == likeliest(tmp_path / "run" / "hf" / "huggingface" / f"ba{step}", words, 5), step
    assert "<h2>Samples of step 5</h2>" in (done.folder / "run.html").read_text()
    weights = [digest(stored(folder / "checkpoints"), "") for folder in (plain.folder, done.folder)]
    assert weights[0] == weights[1], "training goes on as without them"


def test_draws_repeat_and_depend_on_the_step(tmp_path: Path, words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = {"prompts": PROMPTS, "interval": "1ba", "max_new_tokens": 8, "do_sample": True, "temperature": 1.5}
    section |= {"top_k": 0, "batch_size": 1}
    texts = []
    for name, more in (("one", {}), ("two", {}), ("narrow", {"top_p": 1e-6})):
        made = config_of(settings(tmp_path, words, name, generate=section | more) | {"optimizer": SLOW})
        texts.append(samples_of(train(made, Console(made).show).folder))
    assert texts[0] == texts[1]
    assert len({text[0] for text in texts[0].values()}) == 5
    assert texts[2] != texts[0], "a nucleus of the likeliest alone"
    assert len({text[0] for text in texts[2].values()}) == 1
    assert '"to be" -> ' in capsys.readouterr().err


SLOW = {"name": "adamw", "lr": 1e-9}


def config_of(mapping: dict[str, Any]) -> Any:
    return parse_config(mapping)


def test_choices_follow_their_limits() -> None:
    """Counts of many draws from three tokens of known probabilities."""

    def shares(**section: Any) -> list[float]:
        chooser = samples.RunSamples.__new__(samples.RunSamples)
        chooser.section = samples.WrittenSamplesSection(prompts=("a",), interval="1ba", do_sample=True, **section)
        logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(20_000, 3)
        ids = chooser._choose(logits, torch.Generator().manual_seed(1))
        return [ids.count(token) / len(ids) for token in range(3)]

    assert shares() == pytest.approx([0.5, 0.3, 0.2], abs=0.02)
    assert shares(top_k=2) == pytest.approx([0.625, 0.375, 0], abs=0.02)
    assert shares(top_p=0.6) == pytest.approx([0.625, 0.375, 0], abs=0.02)
    assert shares(top_p=0.4) == [1, 0, 0]
    assert shares(temperature=0.5) == pytest.approx([0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38], abs=0.02)


def test_an_answer_ends_with_the_end_token(tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_text_of(str(words))[0]
    (end,) = tokenizer.eos_ids
    (word,) = tokenizer.encode(" be", add_special=False)
    rows = iter([[word, end], [word], [end]])
    monkeypatch.setattr(samples.RunSamples, "_choose", lambda self, logits, random: next(rows))
    section = {"prompts": PROMPTS, "interval": "5ba", "max_new_tokens": 9}
    assert samples_of(train(parse_config(settings(tmp_path, words, "run", generate_callback=section))).folder) == {
        5: [" be be", ""]
    }


def test_folders_are_what_export_writes(tmp_path: Path, words: Path) -> None:
    section = {"save_folder": str(tmp_path / "{run_name}"), "save_interval": "1dur", "precision": "bfloat16"}
    section |= {"huggingface_folder_name": "{run_name}-{batch}"}
    done = train(parse_config(settings(tmp_path, words, "run", hf_checkpointer=section) | {"run_name": "mine"}))
    export(str(done.folder), tmp_path / "exported", "BF16")
    folder = tmp_path / "mine" / "huggingface" / "mine-5"
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "exported").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert [path.name for path in folder.parent.iterdir()] == ["mine-5"], "nothing else stays"


def test_folders_that_are_there_are_replaced_or_refused(tmp_path: Path, words: Path) -> None:
    section = {"save_folder": str(tmp_path / "hf"), "save_interval": "5ba"}
    other = tmp_path / "hf" / "huggingface" / "ba5"
    other.mkdir(parents=True)
    (other / "old.txt").write_text("old")
    with pytest.raises(ConfigError, match=r"huggingface/ba5 would be overwritten: .* overwrite: true"):
        train(parse_config(settings(tmp_path, words, "run", hf_checkpointer=section | {"overwrite": False})))
    assert not (tmp_path / "run" / "log.jsonl").exists(), "before the first step"
    latest = section | {"overwrite": False, "save_interval": "2ba", "huggingface_folder_name": "latest"}
    with pytest.raises(ConfigError, match="huggingface/latest would be overwritten"):
        train(parse_config(settings(tmp_path, words, "run", hf_checkpointer=latest)))
    train(parse_config(settings(tmp_path, words, "run", hf_checkpointer=section)))
    assert (other / "config.json").exists()
    assert not (other / "old.txt").exists()


def test_a_model_that_has_no_folder_is_refused_before_the_first_step(tmp_path: Path) -> None:
    section = SimpleNamespace(
        save_interval="5ba", precision="float32", save_folder=str(tmp_path), huggingface_folder_name="ba{batch}"
    )
    run: Any = SimpleNamespace(
        units=DurationUnits(samples=4, tokens=16, epoch=10, total=5),
        config=SimpleNamespace(run_name=None, tokenizer=None),
        world=World(),
        shape={"family": "gemma3", "tied": True},
    )
    with pytest.raises(ConfigError, match=r"a gemma3 model has no config\.json that others read"):
        hf_folders.HfFolders(run, section)  # type: ignore[arg-type]


class Bucket:
    """A store that is no folder; its objects lie in one all the same. puts: their names, in order."""

    def __init__(self, folder: Path) -> None:
        self.inner, self.url, self.puts = LocalStore(folder), "s3://bucket/huggingface", list[str]()
        self.list, self.delete_prefix = self.inner.list, self.inner.delete_prefix

    def put(self, name: str, data: bytes) -> None:
        self.puts.append(name)
        self.inner.put(name, data)


def test_folders_go_to_object_stores(tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(tmp_path / "bucket")
    bucket.inner.put("ba5/old.txt", b"old")
    monkeypatch.setattr(hf_folders, "open_store", lambda url: bucket)
    section = {"save_folder": "s3://bucket", "save_interval": "1dur", "precision": "float16"}
    with pytest.raises(ConfigError, match="s3://bucket/huggingface/ba5 would be overwritten"):
        train(parse_config(settings(tmp_path, words, "run", hf_checkpointer=section | {"overwrite": False})))
    done = train(parse_config(settings(tmp_path, words, "run", hf_checkpointer=section)))
    export(str(done.folder), tmp_path / "exported", "F16")
    files = {path.name: path.read_bytes() for path in (tmp_path / "exported").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "bucket" / "ba5").iterdir()}
    assert bucket.puts[-1] == "ba5/config.json", "who finds it finds the others"


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ({"generate_callback": {"prompts": PROMPTS}}, "callbacks.generate_callback.interval is missing"),
        ({"generate_callback": {"prompts": [], "interval": "1ba"}}, "callbacks.generate_callback.prompts = []: "),
        ({"generate_callback": {"prompts": "a", "interval": "1ba"}}, "callbacks.generate_callback.prompts = a: "),
        ({"generate": {"prompts": ["a"], "interval": "1ba", "top_p": 0.5}}, "top_p: read with do_sample: true alone"),
        ({"generate": {"prompts": ["a"], "interval": "1ba", "num_beams": 2}}, "callbacks.generate.num_beams"),
        ({"generate": {"prompts": ["a"], "interval": "1ba", "use_cache": True}}, "computed without a cache"),
        ({name: {"prompts": ["a"], "interval": "1ba"} for name in ("generate", "generate_callback")}, "are one"),
        ({"hf_checkpointer": {"save_folder": "a"}}, "callbacks.hf_checkpointer.save_interval is missing"),
        ({"hf_checkpointer": {"save_folder": "a", "save_interval": "1ba", "precision": "int8"}}, "precision = int8"),
        (
            {"hf_checkpointer": {"save_folder": "a", "save_interval": "1ba", "huggingface_folder_name": "{epoch}"}},
            "{batch} and {run_name} are filled in",
        ),
        (
            {"hf_checkpointer": {"save_folder": "a", "save_interval": "1ba", "mlflow_registered_model_name": "m"}},
            "registered with MLflow from the exported folders",
        ),
    ],
)
def test_keys_that_cannot_be_honoured_are_refused(callbacks: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(mapping(Path("data"), Path("run"), callbacks=callbacks, tokenizer={"name": "words"}))
    assert message in str(caught.value)


def test_prompts_need_a_tokenizer_and_room(tmp_path: Path, words: Path) -> None:
    section = {"prompts": PROMPTS, "interval": "1ba", "max_new_tokens": 14}
    with pytest.raises(ConfigError, match=r"tokenizer\.name is missing"):
        config(tmp_path, tmp_path / "run", callbacks={"generate": section})
    with pytest.raises(ConfigError, match=r"'to be' has 3 tokens; there is room for 1 to 2, "):
        train(parse_config(settings(tmp_path, words, "run", generate=section)))
