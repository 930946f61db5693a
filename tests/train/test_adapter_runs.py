"""Runs that train an adapter: on one process and on two, in parts, beside bases of all kinds, and what they refuse."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training is torch")
pytest.importorskip("transformers", reason="the models are written by transformers")

from roofline.common.errors import ConfigError, UnsupportedError  # noqa: E402
from roofline.text.tokenizers.vocabulary import byte_alphabet  # noqa: E402
from roofline.train.checkpoint.export import export  # noqa: E402
from roofline.train.config.read import parse_config  # noqa: E402
from roofline.train.data.loader import Source  # noqa: E402
from roofline.train.data.mds import ShardWriter  # noqa: E402
from roofline.train.parallel.processes import World  # noqa: E402
from roofline.train.run.loop import Run, train  # noqa: E402
from roofline.weights.adapters import read_adapter  # noqa: E402
from roofline.weights.checkpoint import open_checkpoint  # noqa: E402
from tests.train import small  # noqa: E402
from tests.train.forks import run_forked  # noqa: E402
from tests.train.test_adapted import folder_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = folder_of("llama", tmp_path_factory.mktemp("model") / "llama")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(small.VOCAB)))
    return folder


def tokenizer_json(vocab: int) -> dict[str, Any]:
    """A tokenizer of the first bytes."""
    letters = [letter for letter, _ in sorted(byte_alphabet().items(), key=lambda pair: pair[1])][:vocab]
    form: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {letter: number for number, letter in enumerate(letters)}, "merges": []}
    return {"added_tokens": [], "model": model, "pre_tokenizer": form, "decoder": form}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write_rows(tmp_path_factory.mktemp("rows"), 40)


def mapping(model: Path, rows: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    given = small.mapping(rows, folder, **changes)
    given["model"] = {"name": "hf_causal_lm", "pretrained_model_name_or_path": str(model)}
    return {"adapter": {"rank": 4, "base": "f32"}, **given}


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in small.log_of(folder) if "loss" in line]


@pytest.mark.slow
def test_two_processes_lose_what_one_does(model: Path, rows: Path, tmp_path: Path) -> None:
    runs = []
    for processes in (1, 2):
        for kind, changes in (("f32", {}), ("nf4", {"elastic__virtual_shards": 2, "precision": "amp_bf16"})):
            folder = tmp_path / f"{kind}-{processes}"
            given = mapping(model, rows, folder, fsdp_config={}, max_duration="3ba", save_interval="3ba", **changes)
            given["adapter"]["base"] = kind
            runs.append((processes, [given]))
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(runs))
    run_forked(["-m", "tests.train.together", path]).check_returncode()
    assert losses(tmp_path / "f32-1") == pytest.approx(losses(tmp_path / "f32-2"), rel=1e-5)
    assert losses(tmp_path / "nf4-1") == losses(tmp_path / "nf4-2")
    first, second = (small.stored(tmp_path / f"nf4-{count}/checkpoints") for count in (1, 2))
    assert small.digest(first, "model.") == small.digest(second, "model."), "an elastic run has the same bits"
    assert all(".lora_" in name for name in first if name.startswith("model.")), "what is frozen is not stored"
    digests = {read_adapter(tmp_path / f"nf4-{count}/adapter").digest for count in (1, 2)}
    assert len(digests) == 1


def test_a_run_in_parts_ends_like_one_at_once(model: Path, rows: Path, tmp_path: Path) -> None:
    whole, parts = (
        mapping(model, rows, tmp_path / name, max_duration="4ba", save_interval="2ba") for name in ("whole", "parts")
    )
    train(parse_config(whole))
    train(parse_config({**parts, "stop_after": "2ba"}))
    before = read_adapter(tmp_path / "parts/adapter").digest
    train(parse_config({**parts, "autoresume": True}))
    ours, theirs = (read_adapter(tmp_path / name / "adapter") for name in ("whole", "parts"))
    assert ours.digest == theirs.digest != before
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    assert export(str(tmp_path / "parts/checkpoints/step-00000002"), tmp_path / "earlier", "F32") == 2
    assert read_adapter(tmp_path / "earlier").digest == before


def test_a_longer_tokenizer_trains_a_model_with_weights(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As [PAD] of 32000 rows: what counts is the ids of the rows."""
    monkeypatch.setattr(Source, "vocab", property(lambda _: small.VOCAB + 1))
    words = tokenizer_json(small.VOCAB)
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    words["added_tokens"] = [{"id": small.VOCAB, "content": "[PAD]", **flags}]
    (tmp_path / "longer").mkdir()
    (tmp_path / "longer" / "tokenizer.json").write_text(json.dumps(words))
    given = mapping(model, rows, tmp_path / "run", max_duration="1ba", tokenizer={"name": str(tmp_path / "longer")})
    assert train(parse_config(given)).steps == 1
    far = tmp_path / "far"
    with ShardWriter(far, {"tokens": f"ndarray:uint16:{small.LENGTH}"}) as writer:
        writer.write({"tokens": np.array([5] * (small.LENGTH - 1) + [small.VOCAB], np.uint16)})
    given = mapping(model, far, tmp_path / "other", max_duration="1ba", tokenizer={"name": str(tmp_path / "longer")})
    with pytest.raises(ConfigError, match=f"a row has the id {small.VOCAB}, the model's vocabulary is {small.VOCAB}"):
        train(parse_config({**given, "global_train_batch_size": 1}))


def test_another_base_or_adapter_does_not_continue(model: Path, rows: Path, tmp_path: Path) -> None:
    given = mapping(model, rows, tmp_path / "run", max_duration="2ba", save_interval="1ba", stop_after="1ba")
    train(parse_config(given))
    again = {**given, "autoresume": True, "stop_after": "2ba"}
    with pytest.raises(ConfigError, match=r"adapter\.alpha was 32\.0"):
        train(parse_config({**again, "adapter": {**given["adapter"], "alpha": 8}}))
    other = folder_of("llama", tmp_path / "other", seed=4)
    with pytest.raises(ConfigError, match="is not the model that the checkpoint's adapter belongs to"):
        train(parse_config({**again, "model": {**given["model"], "pretrained_model_name_or_path": str(other)}}))


@pytest.mark.parametrize("kind", ["llama", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_ways_to_compute_a_run_change_nothing(kind: str, model: Path, rows: Path, tmp_path: Path) -> None:
    base = model if kind == "llama" else folder_of(kind, tmp_path / "model")
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "rows": {"device_train_microbatch_size": 5},
        "recomputed": {"fsdp_config": {"activation_checkpointing": True}},
        "selective": {"fsdp_config": {"activation_checkpointing": "selective"}},
        "gathered": {"fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}},
    }
    for name, changes in ways.items():
        given = mapping(base, rows, tmp_path / name, max_duration="2ba", **changes)
        given["adapter"]["method"] = "dora" if kind == "llama" else "lora"
        train(parse_config(given))
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
        card = json.loads((tmp_path / name / "card.json").read_text())
        assert card["memory"]["predicted"] is not None
        assert set(card["flops"]) == set(card["conventions"]) == {"lora", "matmul"}


def test_muon_steps_an_adapters_matrices(model: Path, rows: Path, tmp_path: Path) -> None:
    """It has nothing to step by AdamW."""
    given = mapping(model, rows, tmp_path / "run", max_duration="3ba", optimizer={"name": "muon", "lr": 1e-3})
    train(parse_config(given))
    first, *_, last = losses(tmp_path / "run")
    assert last < first


def test_all_parameters_are_written_as_a_model(model: Path, rows: Path, tmp_path: Path) -> None:
    given = mapping(model, rows, tmp_path / "run", max_duration="2ba")
    given["adapter"] = {"method": "full"}
    train(parse_config(given))
    transformers = pytest.importorskip("transformers")
    written = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/model", dtype=torch.float32)
    before = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(written.state_dict()[name], before.state_dict()[name].bfloat16().float())


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_a_model_of_a_gguf_file_is_written_as_hugging_face_has_it(
    kind: str, model: Path, rows: Path, tmp_path: Path
) -> None:
    """Whose rows of q and k, or value heads of gated DeltaNet, a converter has put into another order."""
    from roofline.bundle.rewrite import RewriteWork, write_gguf

    folder = model if kind == "llama" else folder_of(kind, tmp_path / "model", linear_key_head_dim=16)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(small.VOCAB)))
    write_gguf(open_checkpoint(folder), tmp_path / "model.gguf", "F32", RewriteWork(threads=1))
    given = mapping(tmp_path / "model.gguf", rows, tmp_path / "run", max_duration="1ba")
    given["adapter"], given["optimizer"] = {"method": "full"}, {"name": "adamw", "lr": 1e-9}
    train(parse_config(given))
    before, after = open_checkpoint(folder), open_checkpoint(tmp_path / "run/model")
    assert before.tensors.keys() == after.tensors.keys()
    for name in before.tensors:
        np.testing.assert_allclose(after.dequantize(name), before.dequantize(name), rtol=5e-3, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"adapter": {"targets": ["q_proj", "w_pack"]}},
            "the model has no matrix 'w_pack'; it has down_proj, gate_proj",
        ),
        ({"adapter": {"method": "full", "rank": 4}}, "rank=4 belongs to lora and dora"),
        ({"adapter": {"base": "int3"}}, "base"),
        ({"tensor_parallel": 2}, "divides no matrix: tensor_parallel must be 1"),
        ({"model": {"name": "llama-3.2-1b"}}, "there must be a model to adapt"),
    ],
)
def test_what_cannot_be_is_refused(
    changes: dict[str, Any], message: str, model: Path, rows: Path, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        train(parse_config({**mapping(model, rows, tmp_path / "run"), **changes}))


def test_an_adapter_of_a_gguf_file_is_that_of_the_same_model_in_safetensors(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    """Converters permute the rows of q and k; adapters are written with rows in Hugging Face's order."""
    from roofline.bundle.rewrite import RewriteWork, write_gguf

    write_gguf(open_checkpoint(model), tmp_path / "model.gguf", "", RewriteWork(threads=1))
    adapters = []
    for number, base in enumerate((model, tmp_path / "model.gguf")):
        given = mapping(base, rows, tmp_path / f"run-{number}", max_duration="3ba")
        given["adapter"] |= {"method": "dora", "rslora": True, "base": "stored"}
        train(parse_config(given))
        adapters.append(read_adapter(tmp_path / f"run-{number}/adapter"))
    for ours, theirs in zip(*(each.matrices for each in adapters), strict=True):
        assert ours.tensor == theirs.tensor
        assert ours.scale == pytest.approx(32 / 2)
        np.testing.assert_allclose(ours.b, theirs.b, atol=2e-5)
        np.testing.assert_allclose(ours.magnitude, theirs.magnitude, atol=2e-5)


def test_a_base_is_adapted_in_the_format_of_its_file(model: Path, rows: Path, tmp_path: Path) -> None:
    """Of a quantised file the very bytes are kept, and the run's card says what of its memory they are."""
    from roofline.bundle.rewrite import RewriteWork, write_gguf

    write_gguf(open_checkpoint(model), tmp_path / "model.gguf", "Q4_1", RewriteWork(threads=1))
    given = mapping(tmp_path / "model.gguf", rows, tmp_path / "run", max_duration="1ba")
    given["adapter"]["base"] = "stored"
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    with closing(Run(parse_config(given), World())) as run:
        kinds = set()
        for param, form, tensor in run.model.frozen():
            kinds.add(form.format)
            raw = np.asarray(checkpoint.read(param.name)).reshape(-1)
            if form.opaque:
                np.testing.assert_array_equal(tensor.detach().view(torch.uint8).numpy().reshape(-1), raw)
        assert "Q4_1" in kinds
        assert run.report.memory.predicted is not None
        frozen = sum(t.nbytes for _, _, t in run.model.frozen())
        trained = sum(t.nbytes for _, _, t in run.model.canonical())
        parts = run.report.memory.predicted.parts
        assert (parts["parameters"], parts["optimizer"]) == (frozen + trained, 2 * trained)
