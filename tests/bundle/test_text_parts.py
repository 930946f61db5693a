"""The text part of models that read pictures: loaded with and without a bundle, told once, written anew, trained."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="it runs the models")
pytest.importorskip("transformers", reason="it has the models")
pytest.importorskip("roofline._native", reason="the C++ core is not built")

from bundle_models import tokenizer_json  # noqa: E402

from roofline import LLM  # noqa: E402
from roofline.bundle import load  # noqa: E402
from roofline.bundle.rewrite import RewriteWork, write_gguf, write_safetensors  # noqa: E402
from roofline.bundle.text_side import text_of_folder  # noqa: E402
from roofline.common.errors import ConfigError, RequestError  # noqa: E402
from roofline.engine.params import SamplingParams  # noqa: E402
from roofline.weights.adapter_files import AdapterDescription, write_adapter  # noqa: E402
from roofline.weights.adapter_merge import merged  # noqa: E402
from roofline.weights.adapters import read_adapter  # noqa: E402
from roofline.weights.checkpoint import open_checkpoint  # noqa: E402
from roofline.weights.config.wrapped import modules_within  # noqa: E402
from tests.adapter_files import for_checkpoint  # noqa: E402
from tests.command_line import call_roofline  # noqa: E402
from tests.models.parity_cases import Eager  # noqa: E402
from tests.models.wrapped_models import CONFIGS, logits_of, wrapped  # noqa: E402

IMAGE, IMAGE_ID = "<image>", 258
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def write(folder: Path, kind: str) -> Any:
    """A folder as transformers saves the model, with a tokenizer that has a mark for pictures; the model."""
    key = next(key for key in CONFIGS[kind] if key.startswith("image_token"))
    others = {name: 280 for name in CONFIGS[kind] if "_token_i" in name and name != key}
    model = wrapped(kind, {key: IMAGE_ID, **others, "eos_token_id": 257}, text={"vocab_size": 300})
    model.save_pretrained(folder)
    words = tokenizer_json()
    words["added_tokens"].append(words["added_tokens"][-1] | {"id": IMAGE_ID, "content": IMAGE})
    (folder / "tokenizer.json").write_text(json.dumps(words))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return model


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl_moe"])
def test_a_model_is_loaded_told_of_once_and_keeps_pictures_out(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write(tmp_path / "model", kind)
    key = next(key for key in CONFIGS[kind] if key.startswith("image_token"))
    for bundled in (False, True):  # compiled the first time, from the cache of bundles the second
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            loaded = load(str(tmp_path / "model"), threads=1, cache_tokens=1024, max_model_len=128)
        lines = [record.getMessage() for record in caplog.records]
        assert sum(f"the text part of a {kind} model" in line for line in lines) == 1, (bundled, lines)
        assert loaded.media_ids[IMAGE_ID] == key
        llm = LLM(loaded)
        assert llm.tokenizer.eos_ids == (257,)
        ids = list(b"what is in it")
        (output,) = llm.generate([ids], GREEDY)
        logits = logits_of(model, ids + output.ids)[len(ids) - 1 : -1]
        assert (logits.max(-1) - logits[np.arange(4), output.ids]).max() < 0.02
        for prompt, special in (([1, IMAGE_ID, 2], False), (f"a {IMAGE}", True)):
            with pytest.raises(RequestError, match=f"prompt: id {IMAGE_ID} is the model's {key}"):
                llm.generate([prompt], GREEDY, parse_special=special)
        (plain,) = llm.generate([f"a {IMAGE}"], GREEDY)  # what a user writes is no mark
        assert IMAGE_ID not in plain.prompt_ids
        with pytest.raises(RequestError, match="content"):
            llm.chat([{"role": "user", "content": [{"type": "image", "url": "x"}, {"type": "text", "text": "a"}]}])
        llm.close()


def test_info_tells_what_is_not_used(tmp_path: Path) -> None:
    write(tmp_path / "model", "gemma3")
    told = call_roofline(["info", tmp_path / "model"]).stdout
    assert "the text part of a gemma3 model, which reads text alone here; not used" in " ".join(told.split())
    assert "vision_tower (34 tensors, 132.9 KiB)" in " ".join(told.split())
    facts = json.loads(call_roofline(["info", tmp_path / "model", "--json"]).stdout)
    assert facts["notes"][0].startswith("the text part of a gemma3 model")
    (tmp_path / "model/model.safetensors").unlink()
    alone = json.loads(call_roofline(["info", tmp_path / "model", "--json"]).stdout)
    assert alone["notes"][0] == "the text part of a gemma3 model, which reads text alone here"


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_text_part_is_written_as_a_model_of_its_own(kind: str, tmp_path: Path) -> None:
    """As GGUF and as safetensors, both of which give the same logits; what is left out is said."""
    from transformers import AutoModelForCausalLM

    model = write(tmp_path / "model", kind)
    ids = list(b"what is in it")
    expected = logits_of(model, ids)
    source = open_checkpoint(tmp_path / "model")
    work = RewriteWork(threads=1)
    if kind != "gemma3":  # whose scalar of queries a GGUF file of this size cannot say
        written = write_gguf(source, tmp_path / "model.gguf", "", work)
        assert written.notes[0].startswith(f"it is the text part of a {kind} model")
        assert np.abs(Eager(open_checkpoint(tmp_path / "model.gguf")).step(ids) - expected).max() < 1e-5
    written = write_safetensors(source, tmp_path / "folder", "F32", work)
    assert written.notes[0].startswith(f"it is the text part of a {kind} model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    assert type(theirs).__name__.endswith("ForCausalLM")
    assert np.abs(logits_of(theirs, ids) - expected).max() < 1e-5
    assert not open_checkpoint(tmp_path / "folder").other_parts


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_an_adapter_of_the_text_part_is_one_of_the_whole_model_for_peft(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="it loads the adapter")
    model = write(tmp_path / "model", kind)
    source = open_checkpoint(tmp_path / "model")
    how = AdapterDescription(base=str(tmp_path / "model"), within=modules_within(tmp_path / "model"))
    folder = write_adapter(tmp_path / "adapter", source.config, for_checkpoint(source.tensors), how)
    adapter = read_adapter(folder)
    ids = list(b"what is in it")
    before, ours = logits_of(model, ids), Eager(merged(source, adapter.matrices).checkpoint).step(ids)
    after = logits_of(peft.PeftModel.from_pretrained(model, str(folder)), ids)
    assert np.abs(after - before).max() > 0.1
    assert np.abs(after - ours).max() < 1e-4
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert all(name.startswith("model.language_model.layers.") for name in settings["target_modules"])


def test_what_an_adapter_has_of_the_vision_tower_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """PEFT puts matrices on every module of a name, in the vision tower too, through which no text passes."""
    peft = pytest.importorskip("peft", reason="it writes the adapter")
    model = write(tmp_path / "model", "gemma3")
    source, ids = open_checkpoint(tmp_path / "model"), list(b"what is in it")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    with caplog.at_level(logging.WARNING):
        adapter = read_adapter(tmp_path / "adapter")
    assert sum("matrices of vision_tower are not used" in record.getMessage() for record in caplog.records) == 1
    assert len(adapter.matrices) == 4
    ours = Eager(merged(source, adapter.matrices).checkpoint).step(ids)
    assert np.abs(logits_of(adapted, ids) - ours).max() < 1e-4


def test_names_of_adapters_of_before_are_read() -> None:
    from roofline.weights.names import matrix_from_hf

    for name in ("model.language_model.layers.3.self_attn.q_proj", "language_model.model.layers.3.self_attn.q_proj"):
        assert matrix_from_hf(f"{name}.weight") == "layers.3.attn.q.weight"
    assert matrix_from_hf("model.vision_tower.encoder.layers.3.self_attn.q_proj.weight") is None


def test_the_text_part_is_tuned_and_its_adapter_named_for_the_whole_model(tmp_path: Path) -> None:
    from tests.train import sft

    sft.write_tokenizer(tmp_path / "model")
    wrapped("qwen3_vl", {"eos_token_id": None}, text={"vocab_size": sft.VOCAB}).save_pretrained(tmp_path / "model")
    data = sft.write_lines(tmp_path / "d.jsonl", [sft.question(n) for n in range(12)])
    words = ("--max-seq-len", "32", "--batch", "2", "--precision", "fp32", "--steps", "2", "--ask", "0")
    done = call_roofline(["finetune", tmp_path / "model", data, "--out", tmp_path / "run", *words])
    assert done.exit_code == 0, done.stderr
    assert "trained is the text part of a qwen3_vl model" in done.stderr
    settings = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())
    assert settings["target_modules"][0] == "model.language_model.layers.0.mlp.down_proj"


def test_the_template_of_a_processor_of_before_is_read(tmp_path: Path) -> None:
    """chat_template.json, which stands behind the tokenizer's own and chat_template.jinja."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert text_of_folder(tmp_path)[1].source == "of the processor"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "of the tokenizer"}))
    assert text_of_folder(tmp_path)[1].source == "of the tokenizer"
    (tmp_path / "chat_template.jinja").write_text("of both")
    assert text_of_folder(tmp_path)[1].source == "of both"
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(ConfigError, match=r"chat_template\.json: chat_template: is the number 3"):
        text_of_folder(tmp_path)
