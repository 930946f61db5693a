"""Models written anew: safetensors and GGUF both ways, quantised, and what cannot be written."""

import json
import os
import resource
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bundle_models import write_model, write_mpt
from moe_models import transformers_model
from moe_models import write_gguf as write_experts

from roofline.bundle import load
from roofline.bundle.rewrite import RewriteWork, write_gguf, write_safetensors
from roofline.bundle.text_side import load_text
from roofline.common.errors import CapacityError, ConfigError, UnsupportedError
from roofline.models.registry import configure
from roofline.weights.checkpoint import open_checkpoint
from roofline.weights.config.hf import from_hf
from roofline.weights.config.to_gguf import read_otherwise
from roofline.weights.files.safetensors import SafetensorsFile
from roofline.weights.random_weights import random_checkpoint
from tests.command_line import call_roofline

TEXT = "The quick brown fox, 12 + 34 = 46; naïve café\n"


@pytest.fixture
def gguf(model: Path, tmp_path: Path) -> Path:
    write_gguf(open_checkpoint(model), tmp_path / "new.gguf", "", RewriteWork(threads=2))
    return tmp_path / "new.gguf"


def _logits(path: Path) -> np.ndarray:
    loaded = load(str(path), backend="reference", arithmetic="plain", cache_tokens=64, max_model_len=64)
    from roofline.ops.batch import Segment

    loaded.executable.batch.fill([Segment([1, 5, 9, 200, 31], 0, range(1))], [4])
    loaded.executable.forward()
    return loaded.executable.logits().copy()


def test_there_and_back_every_tensor_has_its_bytes(model, gguf, tmp_path):
    write_safetensors(open_checkpoint(gguf), tmp_path / "back", "", RewriteWork(threads=2))
    before, after = (SafetensorsFile(folder / "model.safetensors") for folder in (model, tmp_path / "back"))
    assert before.tensors == after.tensors
    for name in before.tensors:
        assert np.array_equal(before.read(name), after.read(name)), name
    first, second = (load_text(open_checkpoint(folder))[0] for folder in (model, tmp_path / "back"))
    assert first.encode(TEXT, add_special=True) == second.encode(TEXT, add_special=True)
    assert first.eos_ids == second.eos_ids
    assert list(tmp_path.glob(".*")) == []


def test_a_gguf_file_computes_what_its_source_does(model, gguf):
    """Rows of q and k lie in another order in the file, and rope turns other pairs: together nothing changes."""
    assert open_checkpoint(gguf).config["rope_style"] == "interleaved"
    assert np.allclose(_logits(model), _logits(gguf), atol=1e-5)


def test_transformers_reads_the_folder(gguf, tmp_path):
    transformers = pytest.importorskip("transformers")
    write_safetensors(open_checkpoint(gguf), tmp_path / "back", "", RewriteWork(threads=2))
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="float32")
    import torch

    with torch.no_grad():
        logits = read(torch.tensor([[1, 5, 9, 200, 31]])).logits[0, -1].numpy()
    assert np.allclose(logits, _logits(gguf)[0], atol=1e-3)


@pytest.mark.parametrize(
    "name",
    [
        *("gemma2", "gpt_neox", "gpt2", "glm4", "smollm3", "granite", "ernie4_5", "ministral3", "qwen3_5"),
        *("qwen3_5_alike", "gemma4", "gemma4_moe", "gemma3n"),
        *("qwen3_5_alike", "falcon_mamba", "mamba2"),
    ],
)
@pytest.mark.usefixtures("without_text")
def test_values_that_lie_otherwise_in_folders_are_written_as_these_have_them(name, tmp_path):
    pytest.importorskip("gguf", reason="it writes the file")
    transformers = pytest.importorskip("transformers")
    import torch

    from tests.models.parity_cases import theirs
    from tests.weights.gguf_families import GGUF_CASES, write

    case = GGUF_CASES[name]
    original = theirs(case.config)
    source = write(tmp_path / "model.gguf", original, case)
    write_safetensors(open_checkpoint(source), tmp_path / "back", "", RewriteWork(threads=2))
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="float32").eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert (read(ids).logits - original(ids).logits).abs().max() < 2e-5


@pytest.mark.usefixtures("without_text")
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "gemma"])
def test_norms_that_gguf_files_hold_with_one_added_come_back_with_their_bytes(name, tmp_path):
    """All of a BF16 model does but logarithms of rates, of which such files hold the exponentials, as float32."""
    pytest.importorskip("transformers")
    import torch

    from tests.models.parity_cases import CASES, theirs

    theirs(CASES[name].config).to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    write_gguf(open_checkpoint(tmp_path / "theirs"), tmp_path / "model.gguf", "", RewriteWork(threads=1))
    write_safetensors(open_checkpoint(tmp_path / "model.gguf"), tmp_path / "back", "", RewriteWork(threads=1))
    before, after = (SafetensorsFile(tmp_path / folder / "model.safetensors") for folder in ("theirs", "back"))
    assert before.tensors.keys() == after.tensors.keys()
    rates = {tensor for tensor in before.tensors if tensor.endswith(".A_log")}
    assert {after.tensors[tensor].format for tensor in rates} <= {"F32"}
    for tensor in before.tensors.keys() - rates:
        assert before.tensors[tensor] == after.tensors[tensor]
        assert np.array_equal(before.read(tensor), after.read(tensor)), tensor


FAMILIES = ("gemma2", "gemma3", "phi3", "phi4_mini", "smollm3", "granite", "glm4", "olmo2", "seed_oss", "ernie4_5")
FAMILIES += ("ministral3", "arcee", "gpt_neox", "gpt_neox_serial", "gpt2")
FAMILIES += ("olmo3", "exaone4_windows", "hunyuan")
FAMILIES += ("qwen3_5", "qwen3_5_alike", "qwen3_5_moe", "qwen3_next")
FAMILIES += ("deepseek_v2", "deepseek_v3", "mistral4", "youtu", "minicpm3")
FAMILIES += ("glm4_moe", "glm4_moe_groups", "dots1", "olmoe", "minimax_m2", "ernie4_5_moe", "exaone_moe")
FAMILIES += ("mamba", "falcon_mamba", "mamba2")
FAMILIES += ("lfm2", "lfm2_moe", "granitemoe", "granitemoeshared")
FAMILIES += ("hunyuan_moe", "sarvam_moe", "mimo_v2_flash")
FAMILIES += ("gemma4", "gemma4_dense", "gemma4_moe", "gemma3n")
FAMILIES += ("jamba", "jamba_dense", "bamba", "exaone", "glm")
FAMILIES += ("granitemoehybrid", "granitemoehybrid_experts", "nemotron_h", "nemotron_h_moe", "falcon_h1")


@pytest.mark.usefixtures("without_text")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_written_as_its_converter_does(name, tmp_path):
    pytest.importorskip("gguf", reason="it writes the file that ours is compared with")
    pytest.importorskip("transformers")
    from tests.models.parity_cases import theirs
    from tests.weights.gguf_families import GGUF_CASES, write

    case = GGUF_CASES[name]
    original = theirs(case.config)
    original.save_pretrained(tmp_path / "folder")
    wanted = open_checkpoint(write(tmp_path / "theirs.gguf", original, case))
    write_gguf(open_checkpoint(tmp_path / "folder"), tmp_path / "ours.gguf", "", RewriteWork(threads=1))
    ours = open_checkpoint(tmp_path / "ours.gguf")
    assert ours.tensors == wanted.tensors
    for tensor in wanted.tensors:
        assert np.array_equal(ours.dequantize(tensor), wanted.dequantize(tensor)), tensor
    (_, before), (_, after) = configure(wanted.config), configure(ours.config)
    for key, value in vars(before).items():
        assert vars(after)[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key


@pytest.mark.usefixtures("without_text")
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"])
def test_the_experts_of_a_layer_are_written_as_one_tensor(kind, tmp_path):
    pytest.importorskip("gguf", reason="it writes the file that ours is compared with")
    pytest.importorskip("transformers")
    original = transformers_model(kind)
    original.save_pretrained(tmp_path / "folder")
    wanted = open_checkpoint(write_experts(tmp_path / "theirs.gguf", original, kind))
    write_gguf(open_checkpoint(tmp_path / "folder"), tmp_path / "ours.gguf", "", RewriteWork(threads=1))
    for ours in (open_checkpoint(tmp_path / "ours.gguf"), open_checkpoint(_again(tmp_path))):
        assert {n: t.shape for n, t in ours.tensors.items()} == {n: t.shape for n, t in wanted.tensors.items()}
        for tensor in wanted.tensors:
            assert np.array_equal(ours.dequantize(tensor), wanted.dequantize(tensor)), tensor
        (_, before), (_, after) = configure(wanted.config), configure(ours.config)
        for key in ("experts", "experts_per_token", "ffn", "shared_ffn", "renormalise"):
            assert getattr(after, key, None) == getattr(before, key, None), key


def _again(folder):
    """The file of a folder, written once more from the file."""
    write_gguf(open_checkpoint(folder / "ours.gguf"), folder / "again.gguf", "F32", RewriteWork(threads=1))
    return folder / "again.gguf"


@pytest.mark.usefixtures("without_text")
def test_factors_of_longrope_are_tensors_of_a_file_and_of_what_is_written_from_it(tmp_path):
    pytest.importorskip("transformers")
    from tests.models.parity_cases import CASES, theirs

    theirs(CASES["phi3_long"].config).save_pretrained(tmp_path / "folder")
    folder = open_checkpoint(tmp_path / "folder")
    write_gguf(folder, tmp_path / "new.gguf", "", RewriteWork(threads=1))
    write_gguf(open_checkpoint(tmp_path / "new.gguf"), tmp_path / "again.gguf", "Q8_0", RewriteWork(threads=1))
    scaling = folder.config["rope_scaling"]
    for name in ("new.gguf", "again.gguf"):
        read = open_checkpoint(tmp_path / name).config["rope_scaling"]
        assert read.keys() == scaling.keys()
        for key in ("short_factor", "long_factor", "attention_factor", "original_max_position_embeddings"):
            assert np.allclose(read[key], scaling[key], rtol=1e-6, atol=0), key


def test_a_quantised_file_is_near_its_source(model, tmp_path):
    written = write_gguf(open_checkpoint(model), tmp_path / "q8.gguf", "Q8_0", RewriteWork(threads=2))
    assert written.tensors == {"Q8_0": 15, "F32": 5}
    assert written.path.stat().st_size == written.nbytes
    before, after = _logits(model), _logits(tmp_path / "q8.gguf")
    assert 0 < np.abs(before - after).max() < 0.05 * np.abs(before).max()


def test_llama3_scaling_comes_back(tmp_path):
    folder = write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config["rope_scaling"] = {**scaling, "original_max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config))
    write_gguf(open_checkpoint(folder), tmp_path / "new.gguf", "", RewriteWork(threads=1))
    assert np.allclose(_logits(folder), _logits(tmp_path / "new.gguf"), atol=1e-5)
    write_gguf(open_checkpoint(tmp_path / "new.gguf"), tmp_path / "again.gguf", "Q8_0", RewriteWork(threads=1))
    assert open_checkpoint(tmp_path / "again.gguf").config == open_checkpoint(tmp_path / "new.gguf").config


def test_what_a_gguf_file_cannot_hold_is_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedError, match="GGUF file of a mpt model"):
        write_gguf(open_checkpoint(write_mpt(tmp_path / "mpt", "rope")), tmp_path / "new.gguf", "", RewriteWork())
    folder = write_model(tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "[aeiou]"}, "behavior": "Isolated", "invert": False}
    byte_level = {**tokenizer["pre_tokenizer"], "use_regex": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UnsupportedError, match="splitting rule"):
        write_gguf(open_checkpoint(folder), tmp_path / "new.gguf", "", RewriteWork())
    assert not (tmp_path / "new.gguf").exists()


@pytest.mark.usefixtures("without_text")
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"])
def test_experts_of_a_gguf_file_are_written_as_transformers_reads_them(kind, tmp_path):
    pytest.importorskip("gguf", reason="it writes the file")
    transformers = pytest.importorskip("transformers")
    original = transformers_model(kind)
    source = open_checkpoint(write_experts(tmp_path / "model.gguf", original, kind))
    write_safetensors(source, tmp_path / "back", "", RewriteWork(threads=2))
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="float32")
    values = read.state_dict()
    assert values.keys() == original.state_dict().keys()
    for name, tensor in original.state_dict().items():
        assert np.array_equal(values[name].numpy(), tensor.numpy()), name
    write_gguf(open_checkpoint(tmp_path / "back"), tmp_path / "again.gguf", "", RewriteWork(threads=1))
    again = open_checkpoint(tmp_path / "again.gguf")
    assert again.tensors == source.tensors
    assert all(np.array_equal(again.read(name), source.read(name)) for name in source.tensors)


@pytest.mark.usefixtures("without_text")
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_are_written_one_after_the_other(name, tmp_path):
    """In memory is an expert, not all of a layer."""
    pytest.importorskip("transformers")
    from tests.models.parity_cases import BASE, CASES

    experts = {"experts": 32, "experts_per_token": 2, "ffn": 256, "width": 256, "tied": False}
    config = BASE | experts | ({"family": name} if name == "mixtral" else CASES[name].config | experts)
    config |= {"layers": 1, "rope_style": "half"} | (
        {"layer_windows": (), "sliding_window": 9} if name != "mixtral" else {}
    )
    made = random_checkpoint(config, 0)
    kept = {name: made.read(name) for name in made.tensors}
    source = replace(made, bytes_of=kept.__getitem__)
    tracemalloc.start()
    try:
        write_safetensors(source, tmp_path / "new", "", RewriteWork(threads=1))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    of_layer = sum(info.nbytes for name, info in made.tensors.items() if ".experts." in name)
    assert most < of_layer / 4, (most, of_layer)
    written = open_checkpoint(tmp_path / "new")
    for tensor, info in made.tensors.items():
        both = dequantised(written, tensor, config["experts"]), made.dequantize(tensor)
        assert np.array_equal(both[0], both[1]), tensor
        assert info.format == "BF16"
    assert {info.format for info in written.tensors.values()} == {"BF16"}


@pytest.mark.usefixtures("without_text")
@pytest.mark.parametrize("exact", [True, False])
def test_what_a_gguf_file_widened_is_in_16_bits_again_where_these_hold_it(exact, tmp_path):
    """Biases of gates and ups lie in one tensor: in BF16 where both are."""
    pytest.importorskip("transformers")
    from tests.models.parity_cases import CASES

    config = CASES["gpt_oss"].config
    made = random_checkpoint(config, 0)
    wide = {name for name, info in made.tensors.items() if len(info.shape) < 2 or name.endswith("router.weight")}
    values = {name: made.dequantize(name) for name in wide}
    if not exact:
        values["layers.0.mlp.experts.up.bias"][3] = 1 / 3
    tensors = {
        name: replace(info, format="F32", nbytes=info.nbytes * 2) if name in wide else info
        for name, info in made.tensors.items()
    }
    read = {name: values[name].view(np.uint8).reshape(-1) if name in wide else made.read(name) for name in tensors}
    write_safetensors(
        replace(made, tensors=tensors, bytes_of=read.__getitem__), tmp_path / "new", "", RewriteWork(threads=1)
    )
    stored = SafetensorsFile(tmp_path / "new" / "model.safetensors").tensors
    widened = [] if exact else ["model.layers.0.mlp.experts.gate_up_proj_bias"]
    assert [name for name, info in stored.items() if info.format == "F32"] == widened
    written = open_checkpoint(tmp_path / "new")
    assert all(np.array_equal(written.dequantize(name), values[name]) for name in wide)


def dequantised(checkpoint, name, experts):
    """A parameter, of experts one below the other."""
    if name in checkpoint.tensors:
        return checkpoint.dequantize(name)
    before, _, after = name.rpartition(".experts.")
    return np.concatenate([checkpoint.dequantize(f"{before}.experts.{number}.{after}") for number in range(experts)])


@pytest.mark.usefixtures("without_text")
def test_fewer_bits_that_both_kinds_of_files_have_are_kept(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("safetensors.torch", reason="it writes the files")
    from tests.weights import quantised_models, test_gpt_oss

    for folder in ("mxfp4", "q4", "int4"):
        (tmp_path / folder).mkdir()
    test_gpt_oss.written(tmp_path / "mxfp4")
    quantised_models.written(tmp_path / "q4", "gptq sym 32")
    quantised_models.written(tmp_path / "int4", "gptq 32")
    for folder, form, note in (("mxfp4", "MXFP4", "YaRN's ramp"), ("q4", "Q4_0", "")):
        written = call_roofline(["convert", tmp_path / folder, "-o", tmp_path / f"{folder}.gguf"])
        assert written.exit_code == 0, written.output
        assert note in written.stdout
        before, after = open_checkpoint(tmp_path / folder), open_checkpoint(tmp_path / f"{folder}.gguf")
        assert form in {info.format for info in after.tensors.values()}
        for name, info in after.tensors.items():
            values = after.dequantize(name), dequantised(before, name, before.config.get("experts", 0))
            if name.split(".")[-2] in ("q", "k"):  # their rows lie in another order
                values = tuple(each[np.lexsort(each.T)] if each.ndim == 2 else np.sort(each) for each in values)
            assert np.array_equal(*values), name
            assert info.format == form or name not in before.tensors or before.tensors[name].format != form
    refused = call_roofline(["convert", tmp_path / "int4", "-o", tmp_path / "int4.gguf"])
    assert "in INT4, which GGUF cannot hold as they are: --dequantize widens them" in refused.stderr


def test_what_llama_cpp_computes_otherwise_is_said(tmp_path):
    folder = write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for window, said in ((None, False), (128, True)):
        kind = {"model_type": "mistral", "sliding_window": window}
        (folder / "config.json").write_text(json.dumps(config | kind))
        out = tmp_path / f"{said}.gguf"
        result = call_roofline(["convert", folder, "-o", out])
        assert result.exit_code == 0, result.output
        assert ("llama without the window of 128 tokens" in result.stdout) == said
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 256}
    for kind, said in (("llama", False), ("qwen2", True)):
        read = from_hf(Path("config.json"), config | {"model_type": kind, "rope_scaling": llama3})
        assert any("does not load" in note for note in read_otherwise(read)) == said
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    for name, ramp in (("usual", {"beta_fast": 32, "beta_slow": 1}), ("others", {"beta_slow": 2})):
        (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": yarn | ramp}))
        result = call_roofline(["convert", folder, "-o", tmp_path / f"{name}.gguf"])
        assert result.exit_code == 0, result.output
        assert ("YaRN of the architecture llama with the usual ends" in result.stdout) == (name == "others")


def test_numbers_that_are_none_are_not_rounded(tmp_path):
    folder = write_model(tmp_path / "model")
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-2:] = b"\xc0\x7f"  # NaN in bfloat16
    (folder / "model.safetensors").write_bytes(data)
    checkpoint = open_checkpoint(folder)
    last = [name for name in checkpoint.tensors if np.isnan(checkpoint.dequantize(name)).any()]
    if len(checkpoint.tensors[last[0]].shape) < 2:
        pytest.skip("the last tensor of the file is a vector, which is not rounded")
    with pytest.raises(ConfigError, match="NaN or infinity"):
        write_gguf(checkpoint, tmp_path / "new.gguf", "Q8_0", RewriteWork())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_numbers_that_a_formats_scales_do_not_hold_are_refused(tmp_path: Path) -> None:
    """A float16 scale of such a block would be infinite, and with it all of its weights."""
    folder = write_model(tmp_path / "model")
    data = bytearray((folder / "model.safetensors").read_bytes())
    size = int.from_bytes(data[:8], "little")
    place, *_ = (t for n, t in json.loads(data[8 : 8 + size]).items() if "down_proj" in n)
    assert place["dtype"] == "BF16"
    start = 8 + size + place["data_offsets"][0]
    data[start : start + 2] = b"\xbe\x4c"  # about 1e8
    (folder / "model.safetensors").write_bytes(data)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(ConfigError, match=r"mlp\.down\.weight' holds values beyond the range of Q4_0"):
        write_gguf(checkpoint, tmp_path / "new.gguf", "Q4_0", RewriteWork())
    write_gguf(checkpoint, tmp_path / "new.gguf", "BF16", RewriteWork())


@pytest.mark.parametrize(("form", "exponent"), [("Q4_0", -22), ("Q8_0", -18), ("F16", -24)])
def test_weights_below_what_a_formats_scales_hold_are_refused(form: str, exponent: int, tmp_path: Path) -> None:
    """Zeros would be left of a matrix. A few such rows beside larger weights stay what they become."""
    folder = write_model(tmp_path / "model")
    data = bytearray((folder / "model.safetensors").read_bytes())
    size = int.from_bytes(data[:8], "little")
    place, *_ = (t for n, t in json.loads(data[8 : 8 + size]).items() if "down_proj" in n)
    start, end = (8 + size + offset for offset in place["data_offsets"])
    weights = np.frombuffer(data, "<u2", (end - start) // 2, start)
    exponents = (weights >> 7) & 255
    weights[:] = np.where(exponents > 40, weights + np.uint16((exponent << 7) % 65536), 0)
    (folder / "model.safetensors").write_bytes(data)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(
        ConfigError, match=rf"mlp\.down\.weight' holds weights of at most .*e-\d+, too small for {form}"
    ):
        write_gguf(checkpoint, tmp_path / "new.gguf", form, RewriteWork())
    assert not (tmp_path / "new.gguf").exists()
    write_gguf(checkpoint, tmp_path / "wide.gguf", "BF16", RewriteWork())
    weights[:256] = 0x3C00  # a row of larger ones
    (folder / "model.safetensors").write_bytes(data)
    write_gguf(open_checkpoint(folder), tmp_path / "beside.gguf", form, RewriteWork())


@pytest.mark.parametrize("to", ["", "F16", "F32", "BF16"])
@pytest.mark.parametrize("bits", [b"\xc0\x7f", b"\x80\xff"], ids=["NaN", "-infinity"])
def test_numbers_that_are_none_are_not_copied_either(bits: bytes, to: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-2:] = bits
    (folder / "model.safetensors").write_bytes(data)
    checkpoint = open_checkpoint(folder)
    (last,) = (name for name in checkpoint.tensors if not np.isfinite(checkpoint.dequantize(name)).all())
    said = f"{folder}: tensor '{last}' holds NaN or infinity: .* take another copy"
    with pytest.raises(ConfigError, match=said):
        write_gguf(checkpoint, tmp_path / "new.gguf", to, RewriteWork())
    with pytest.raises(ConfigError, match=said):
        write_safetensors(checkpoint, tmp_path / "new", "", RewriteWork())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.fixture
def said(model: Path):
    """Calls the command line, which must fail with one line; what it said."""

    def call(*words: object) -> str:
        result = call_roofline(words)
        assert result.exit_code in (1, 2), result.output
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1, result.stderr
        return result.stderr

    return call


def test_calls_that_make_no_sense(said, model, gguf, tmp_path):
    q8 = tmp_path / "q8.gguf"
    assert call_roofline(["quantize", model, "--to", "q8", "-o", q8]).exit_code == 0
    new = tmp_path / "other.gguf"
    assert "did you mean 'Q4_K_" in said("quantize", model, "--to", "gguf:Q4_KM", "-o", new)
    assert "does not end in .gguf" in said("quantize", model, "--to", "q4", "-o", tmp_path / "folder")
    assert "is quantised already" in said("quantize", q8, "--to", "q4", "-o", new)
    assert "is the model itself" in said("quantize", q8, "--to", "q4", "-o", q8)
    assert "is there already" in said("quantize", model, "--to", "q8", "-o", q8)
    assert "is a GGUF file already" in said("convert", gguf, "-o", new)
    assert "a folder of safetensors already" in said("convert", model, "-o", tmp_path / "folder")
    assert "--dequantize widens them" in said("convert", q8, "-o", tmp_path / "folder")
    assert "there is no folder" in said("convert", model, "-o", tmp_path / "no" / "new.gguf")
    assert not new.exists()
    assert not (tmp_path / "folder").exists()
    again = call_roofline(["quantize", q8, "--to", "q4_0", "-o", new, "--requantize", "--json"])
    assert again.exit_code == 0
    assert "rounded a second time" in json.loads(again.stdout)["notes"][0]
    widened = call_roofline(["convert", q8, "-o", tmp_path / "folder", "--dequantize"])
    assert widened.exit_code == 0
    assert "stays lost" in widened.stdout


def test_a_disk_without_room_and_a_folder_without_permission(model, tmp_path, monkeypatch):
    from shutil import disk_usage

    usage = disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: usage._replace(free=100))
        with pytest.raises(CapacityError, match=r"bytes of disk.*Free"):
            write_gguf(open_checkpoint(model), tmp_path / "new.gguf", "", RewriteWork())
        patch.setattr(os, "access", lambda *args: False)
        with pytest.raises(ConfigError, match="permission is missing"):
            write_gguf(open_checkpoint(model), tmp_path / "new.gguf", "", RewriteWork())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_disk_that_fills_up_leaves_nothing(model, gguf, tmp_path):
    before = sorted(tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(ConfigError, match="cannot be written: the limit on the size of files is reached"):
            write_gguf(open_checkpoint(model), tmp_path / "full.gguf", "", RewriteWork())
        with pytest.raises(ConfigError, match="cannot be written: the limit on the size of files is reached"):
            write_safetensors(open_checkpoint(gguf), tmp_path / "full", "", RewriteWork())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(tmp_path.iterdir()) == before
