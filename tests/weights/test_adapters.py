"""PEFT's files: what is read, and what is refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roofline.common.errors import CapacityError, ConfigError, RooflineError, UnsupportedError
from roofline.weights.adapter_patterns import ModulePatterns
from roofline.weights.adapters import read_adapter
from tests.adapter_files import matrices, write_adapter

A, B = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight" for part in "AB")


@pytest.fixture
def tensors(tiny_llama):
    return matrices(tiny_llama, 1)


def test_matrices_scale_and_identity(tmp_path, tiny_llama, tensors):
    plain = read_adapter(write_adapter(tmp_path / "plain", tensors))
    query = next(each for each in plain.matrices if each.tensor == "layers.0.attn.q.weight")
    assert (query.a == tensors[A]).all()
    assert (query.b == tensors[B].T).all()
    assert len(plain.matrices) == 14
    assert query.scale == 1.5
    assert plain.nbytes == sum(values.nbytes for values in tensors.values())
    stable = read_adapter(write_adapter(tmp_path / "rs", tensors, use_rslora=True))
    assert stable.matrices[0].scale == 3.0
    # Equal results, equal digests: the dropout of the training changes nothing, scale and numbers do.
    assert read_adapter(write_adapter(tmp_path / "same", tensors, lora_dropout=0.1)).digest == plain.digest
    other = read_adapter(write_adapter(tmp_path / "other", matrices(tiny_llama, 2)))
    assert len({plain.digest, stable.digest, other.digest}) == 3


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"use_dora": True}, "lora_magnitude_vector is missing"),
        ({"use_dora": 1}, "use_dora: is the number 1"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, r"shape \[4, 64\], not \[r, inputs\] with r = 8"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern 'q_proj': is the number 0"),
        ({"rank_pattern": {r"model\.layers\.(0|1)\..*": 4}}, "rank_pattern .* is a regular expression"),
        ({"rank_pattern": [4]}, "rank_pattern: is a list"),
        (
            {"alpha_pattern": {"proj": 99}},
            "alpha_pattern: 'proj' fits none of the modules that are adapted, such as model",
        ),
        ({"rank_pattern": {r"self_attn\.q\.proj": 4}}, "rank_pattern: .* fits none of the modules"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern 'q_proj': is the string '8'"),
        ({"target_parameters": "mlp.experts"}, "target_parameters: is the string"),
        ({"lora_bias": True}, "lora_bias"),
        ({"something_new": 3}, "something_new"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"task_type": "SEQ_CLS"}, "task_type"),
        ({"r": 0}, "r: is the number 0"),
        ({"r": True}, "r: is true"),
        ({"r": 8}, r"shape \[4, 64\], not \[r, inputs\] with r = 8"),
        ({"lora_alpha": "16"}, "lora_alpha"),
        ({"use_rslora": 1}, "use_rslora"),
    ],
)
def test_configurations_that_are_not_honoured(tmp_path, tensors, changes, problem):
    with pytest.raises((UnsupportedError, ConfigError), match=problem):
        read_adapter(write_adapter(tmp_path, tensors, **changes))


def test_patterns_give_matrices_ranks_and_scales_of_their_own(tmp_path, tensors):
    """The first that names a module, or the end of its name, counts, as in PEFT."""
    ranks = {"model.layers.1.self_attn.q_proj": 2, "q_proj": 4, "layers.1.mlp.up_proj": 1}
    alphas = {"^model.layers.1.self_attn.q_proj": 5, r"layers\.0\.self_attn\.q_proj": 2.5, "self_attn.k.proj": 9}
    for module, rank in (("self_attn.q_proj", 2), ("mlp.up_proj", 1)):
        for part in "AB":
            name = f"base_model.model.model.layers.1.{module}.lora_{part}.weight"
            tensors[name] = np.ascontiguousarray(tensors[name][:rank] if part == "A" else tensors[name][:, :rank])
    folder = write_adapter(tmp_path, tensors, rank_pattern=ranks, alpha_pattern=alphas)
    scales = {matrix.tensor: (matrix.rank, matrix.scale) for matrix in read_adapter(folder).matrices}
    assert scales["layers.1.attn.q.weight"] == (2, 2.5)
    assert scales["layers.0.attn.q.weight"] == (4, 0.625)
    assert scales["layers.1.mlp.up.weight"] == (1, 6.0)
    assert scales["layers.1.attn.k.weight"] == (4, 2.25)
    assert scales["layers.1.attn.v.weight"] == (4, 1.5)


def test_keys_fit_what_they_fit_as_expressions():
    """PEFT's rule, and the first key that fits."""
    get_pattern_key = pytest.importorskip("peft.utils.other", reason="it is what is compared with").get_pattern_key
    modules = [
        f"model.layers.{layer}.{part}"
        for layer in (0, 1, 10, 11)
        for part in ("self_attn.q_proj", "mlp.up_proj", "mlp.experts.gate_up_proj", "q_proj")
    ]
    names = ("q_proj", "q.proj", r"q\.proj", "layers.1.mlp.up_proj", r"layers\.1.mlp.up.proj", "1.self_attn.q_proj")
    names = (*names, "proj", *modules[:3], r"model\.layers\.0\.self_attn.q_proj", "layers.1.q_proj", "0.q_proj")
    keys = [start + name for name in names for start in ("", "^", r".*\.")]
    both = ModulePatterns({key: number for number, key in enumerate(keys)})
    for module in modules:
        expected = [key for key in keys if re.match(rf"(.*\.)?({key})$", module)]
        assert both.keys_of(module) == expected
        assert both.value_of(module, -1) == both.values.get(get_pattern_key(keys, module), -1)
    assert both.without_module(modules[:1]) == [key for key in keys if not re.match(rf"(.*\.)?({key})$", modules[0])]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.pop(A), "lora_A is missing"),
        (lambda t: t.clear(), "there are none"),
        (lambda t: t[B].__setitem__((0, 0), np.nan), "NaN or infinity"),
        (lambda t: t.__setitem__("base_model.model.lm_head.lora_A.weight", t[A]), "lm_head"),
        (lambda t: t.__setitem__("base_model.model.model.embed_tokens.lora_embedding_A", t[A]), "embed_tokens"),
        (lambda t: t.__setitem__(A.replace("lora_A.weight", "lora_magnitude_vector"), t[A]), "magnitude"),
        (lambda t: t.__setitem__(A.replace("layers.0", "layers.007"), t[A]), "layers.007"),
    ],
)
def test_tensors_that_are_not_adapted(tmp_path, tensors, change, problem):
    change(tensors)
    with pytest.raises((UnsupportedError, ConfigError), match=problem):
        read_adapter(write_adapter(tmp_path, tensors))


def test_sizes_and_files(tmp_path, tensors):
    folder = write_adapter(tmp_path / "a", tensors)
    with pytest.raises(CapacityError, match="adapter_bytes"):
        read_adapter(folder, max_bytes=1000)
    with pytest.raises(ConfigError, match="no such folder or file"):
        read_adapter(tmp_path / "b")
    write_adapter(tmp_path / "run" / "adapter", tensors)
    with pytest.raises(ConfigError, match=r"run is the folder of a run; its adapter is .*run/adapter$"):
        read_adapter(tmp_path / "run")
    for name, content in (("adapter_config.json", json.dumps([])), ("adapter_model.safetensors", "x")):
        broken = write_adapter(tmp_path / name, tensors)
        (tmp_path / name / name).write_text(content)
        with pytest.raises(RooflineError, match=name):
            read_adapter(broken)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, ""),
        ({"target_modules": ["q_proj"]}, "target_modules"),
        ({"target_modules": ["q_proj", "model.layers.1.self_attn.v_proj"]}, "target_modules"),
        ({"target_modules": ["self_attn.q_proj", "v_proj", "proj"]}, ""),
        ({"target_modules": ".*proj"}, ""),
        ({"exclude_modules": ["v_proj"]}, "exclude_modules"),
        ({"exclude_modules": []}, ""),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"layers_to_transform": 1}, "layers_to_transform"),
        ({"layers_to_transform": [1, 0]}, ""),
        ({"layers_to_transform": []}, ""),
    ],
)
def test_what_peft_would_leave_out_is_refused(changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    """Tensors of modules that the settings do not name: PEFT loads the others and says nothing of these."""
    peft = pytest.importorskip("peft", reason="it is what is compared with")
    pytest.importorskip("transformers", reason="PEFT adapts its models")
    from tests.models.parity_cases import CASES, theirs

    model = theirs(CASES["llama"].config)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    adapted.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    again = peft.PeftModel.from_pretrained(theirs(CASES["llama"].config), tmp_path)
    loaded = {name for name, _ in again.named_parameters() if "lora_A" in name}
    saved = {name for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert (loaded >= saved) == (key == "")
    if key:
        with pytest.raises(
            ConfigError, match=rf"tensors of 'model\.layers.*{key} of adapter_config\.json leaves it out"
        ):
            read_adapter(tmp_path)
    else:
        assert len(read_adapter(tmp_path).matrices) == 4
