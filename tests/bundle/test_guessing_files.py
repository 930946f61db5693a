"""A layer that guesses further tokens in files: read, written in the other format and in fewer bits, not there."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the model comes from transformers")
pytest.importorskip("transformers", reason="it makes the model")
pytest.importorskip("gguf", reason="it reads what was written")

import gguf

from roofline.backends.options import LoadOptions
from roofline.bundle import load
from roofline.bundle.rewrite import RewriteWork, write_gguf, write_safetensors
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.json_files import read_json_file
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.models.mtp import guessing_layer
from roofline.models.registry import configure
from roofline.weights.checkpoint import Checkpoint, open_checkpoint
from roofline.weights.config.unread_keys import unread_keys
from roofline.weights.files.safetensors import SafetensorsFile
from roofline.weights.latent_form import latent_form
from roofline.weights.random_weights import random_checkpoint
from tests.bundle.test_guessing import GREEDY, MIXED, MTP, answers
from tests.models.guessing_models import GuessingModel, guessing_model
from tests.models.parity_cases import CASES, SHARED_EXPERT, theirs

pytestmark = pytest.mark.usefixtures("without_text")
WORK = RewriteWork(threads=1)
MIXTURE = MIXED | SHARED_EXPERT | {"ffn": 32, "shared_ffn": 32}


@pytest.fixture(scope="module")
def judge() -> GuessingModel:
    return guessing_model(MIXED)


@pytest.fixture(scope="module")
def folder(judge: GuessingModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judge.save(tmp_path_factory.mktemp("files") / "model")


def same(one: Checkpoint, other: Checkpoint) -> None:
    """Assert that two checkpoints have the same numbers in their layers that guess."""
    one, other = latent_form(one, latent=True), latent_form(other, latent=True)
    assert one.guessing
    assert other.guessing
    pair = guessing_layer(*configure(one.config))
    assert pair is not None
    for param in pair[0].own_params(pair[1]):
        assert np.array_equal(one.parameter(param), other.parameter(param)), param.name


@pytest.mark.parametrize(
    "config",
    [MIXED, MIXTURE, MIXTURE | {"family": "qwen3_next"}, *(CASES[name].config for name in ("glm4_moe", "deepseek_v3"))],
)
def test_there_and_back_a_layer_has_its_numbers(config: dict[str, Any], tmp_path: Path) -> None:
    judge = guessing_model(config)
    folder, file, back = judge.save(tmp_path / "model"), tmp_path / "model.gguf", tmp_path / "back"
    source = open_checkpoint(folder)
    assert source.unused == []
    write_gguf(source, file, "", WORK)
    same(open_checkpoint(file), source)
    write_safetensors(open_checkpoint(file), back, "", WORK)
    same(open_checkpoint(back), source)
    before, after = (set(SafetensorsFile(f / "model.safetensors").tensors) for f in (folder, back))
    assert {name for name in after if "mtp." in name and "experts." not in name} == {
        name for name in before if "mtp." in name and "experts." not in name
    }
    if config["family"] == "qwen3_5":
        assert "mtp_num_hidden_layers" not in unread_keys(back / "config.json", read_json_file(back / "config.json"))
        assert json.loads((back / "config.json").read_text())["mtp_num_hidden_layers"] == 1


def test_a_gguf_file_has_it_as_llama_cpp_does(folder: Path, tmp_path: Path) -> None:
    """Counted among the blocks, with the tensors that its loader creates for such a block; so has one in fewer bits."""
    irregular = guessing_model(MIXED | {"layers": 4, "recurrent": [True, False, False, True]})
    for number, source in enumerate((folder, irregular.save(tmp_path / "irregular"))):
        file = tmp_path / f"{number}.gguf"
        write_gguf(open_checkpoint(source), file, "Q8_0" if number else "", WORK)
        reader = gguf.GGUFReader(file)
        values = {name: field.contents() for name, field in reader.fields.items()}
        layers = 4 if number else 2
        assert (values["qwen35.block_count"], values["qwen35.nextn_predict_layers"]) == (layers + 1, 1)
        names = {tensor.name.removeprefix(f"blk.{layers}.") for tensor in reader.tensors}
        parts = [f"nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm")]
        parts += [f"attn_{name}.weight" for name in ("norm", "q", "k", "v", "output", "q_norm", "k_norm")]
        parts += [f"{name}.weight" for name in ("post_attention_norm", "ffn_gate", "ffn_up", "ffn_down")]
        assert names >= set(parts)
        if number:
            assert values["qwen35.attention.recurrent_layers"] == [True, False, False, True, False]


def test_a_file_in_fewer_bits_guesses(folder: Path, tmp_path: Path) -> None:
    """The second writing begins with a GGUF file, whose metadata says how many layers it has."""
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    write_gguf(open_checkpoint(folder), first, "", WORK)
    write_gguf(open_checkpoint(first), second, "Q4_0", WORK)
    assert open_checkpoint(second).guessing["layers.2.mtp.fc.weight"].format == "Q4_0"
    engines = []
    for settings in (EngineConfig(), EngineConfig(**MTP)):
        options = settings.prepare_load(LoadOptions(cache_tokens=256, max_model_len=128, threads=1))
        engines.append(LocalEngine(load(str(second), options, text=False).executable, settings))
    plain, guessing = engines
    assert answers(guessing, [[1, 2, 3]], GREEDY) == answers(plain, [[1, 2, 3]], GREEDY)
    assert guessing.stats().drafts > 0


def test_a_layer_of_which_a_tensor_is_missing_is_none(folder: Path, tmp_path: Path) -> None:
    """What is left of it is named as unused, and a file that is made of the model does not say that it has one."""
    whole, part, file = tmp_path / "whole.gguf", tmp_path / "part.gguf", tmp_path / "new.gguf"
    write_gguf(open_checkpoint(folder), whole, "", WORK)
    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(part, "qwen35")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        if tensor.name != "blk.2.nextn.hnorm.weight":
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = open_checkpoint(part)
    assert not source.guessing
    assert "blk.2.nextn.eh_proj.weight" in source.unused
    write_gguf(source, file, "", WORK)
    values = {name: value.contents() for name, value in gguf.GGUFReader(file).fields.items()}
    assert (values["qwen35.block_count"], values["qwen35.nextn_predict_layers"]) == (2, 0)


def test_a_merged_model_keeps_it_in_plain_numbers(folder: Path, tmp_path: Path) -> None:
    """Where the formats of the model's tensors are named and its own are not, as `merge` does."""
    small, back, again = tmp_path / "small.gguf", tmp_path / "back", tmp_path / "again.gguf"
    write_gguf(open_checkpoint(folder), small, "Q4_0", WORK)
    source = open_checkpoint(small)
    write_safetensors(source, back, "", WORK, dict.fromkeys(source.tensors, "F32"))
    same(open_checkpoint(back), source)
    write_gguf(source, again, "", WORK, {name: info.format for name, info in source.tensors.items()})
    same(open_checkpoint(again), source)


def test_a_tensor_of_another_shape_is_named(judge: GuessingModel, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = judge.save(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][:, :64].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"tensor 'mtp\.fc\.weight'.* has shape \(64, 64\), not \(64, 128\)"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("kind", "name"), [("exaone_moe", "mtp.fc.weight"), ("hy_v3", "model.layers.2.eh_proj.weight")]
)
def test_a_family_whose_layer_is_not_read_is_named_with_those_whose_is(kind: str, name: str, tmp_path: Path) -> None:
    """Its files hold such a layer, so that other files would not help."""
    import torch
    from safetensors.torch import load_file, save_file

    theirs(CASES[kind].config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {name: torch.zeros(64, 128)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    options = EngineConfig(speculate="mtp").prepare_load(LoadOptions(backend="reference"))
    read = rf"is read of {kind} models, .* but of deepseek, glm4_moe, qwen3_5, qwen3_next\..*speculate='ngram'"
    with pytest.raises(UnsupportedError, match=read):
        load(str(tmp_path), options, text=False)


def test_where_there_is_no_layer_or_no_place_for_it_a_load_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    config = EngineConfig(speculate="mtp")
    without = replace(random_checkpoint(CASES["qwen3_next"].config, 1), guessing={})
    with pytest.raises(ConfigError, match=r"no layer that guesses, for speculate='mtp': load files that have it"):
        load(without, config.prepare_load(LoadOptions()), text=False)
    with pytest.raises(UnsupportedError, match=r"speculate='mtp' on backend 'gpu' is not .*speculate='ngram'"):
        config.prepare_load(LoadOptions(backend="gpu"))
    with pytest.raises(UnsupportedError, match=r"speculate='mtp' on several stages is not .*tensor_parallel"):
        config.prepare_load(LoadOptions(backend="reference", pipeline_parallel=2))
    with pytest.raises(UnsupportedError, match=r"cache_file with speculate='mtp'"):
        EngineConfig(speculate="mtp", cache_file=str(tmp_path / "pages"))
    with pytest.raises(UnsupportedError, match=r"loaded without its layer"):
        LocalEngine(load(str(folder), text=False, cache_tokens=256, max_model_len=128).executable, config)


def test_a_bundle_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    from roofline.bundle import compile_model

    compile_model(str(folder), tmp_path / "bundle")
    with pytest.raises(ConfigError, match=r"a bundle, of a model without its layer that guesses: name the model's"):
        load(str(tmp_path / "bundle"), guesses=True, text=False)


def test_what_a_model_takes_is_told_with_its_layer(folder: Path) -> None:
    from roofline.bundle.shape import open_shape

    shape = open_shape(str(folder))
    count = sum(int(np.prod(info.shape)) for info in open_checkpoint(folder).guessing.values())
    (note,) = [note for note in shape.notes if "guesses" in note]
    assert note.startswith(f"behind the layers one that guesses further tokens, {count:,} parameters: ")
    assert note.endswith("and 80 B of cache a token in bf16")
    assert not any("guess" in name for name in shape.tensors)


def test_the_layers_cache_is_counted(folder: Path) -> None:
    """A quarter of the free memory, or the tokens asked for, are of both caches and of the rows kept of each page."""
    from roofline.backends.capacity import host_capacity

    config = open_checkpoint(folder).config
    sizes = []
    for guesses in (False, True):
        options = LoadOptions(cache_tokens=1 << 40, guesses=guesses)
        with pytest.raises(Exception, match="a token takes") as error:
            host_capacity(options, config, "bf16")
        sizes.append(str(error.value))
    assert "a token takes 64 B" in sizes[0]
    assert "a token takes 144 B" in sizes[1]
