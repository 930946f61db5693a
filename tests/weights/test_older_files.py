"""Files of GPT-NeoX, GPT-2 and OPT as they were published: without the first part of names, with buffers, pickled."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="it writes the files")
pytest.importorskip("transformers", reason="it has the models")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="it writes the files")

from roofline.common.errors import ConfigError, UnsupportedError  # noqa: E402
from roofline.torch.checkpoint import checkpoint_of  # noqa: E402
from roofline.weights.adapters import read_adapter  # noqa: E402
from roofline.weights.checkpoint import Checkpoint, open_checkpoint  # noqa: E402
from roofline.weights.stored_names import stored_names  # noqa: E402
from tests.models.parity_cases import CASES, theirs  # noqa: E402


def _written(folder: Path, model: Any, state: dict[str, Any], pickled: bool = False) -> Path:
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    state = {name: value.contiguous().clone() for name, value in state.items()}
    if pickled:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        safetensors_torch.save_file(state, folder / "model.safetensors")
    return folder


def _same(a: Checkpoint, b: Checkpoint) -> None:
    assert set(a.tensors) == set(b.tensors)
    for name in a.tensors:
        np.testing.assert_array_equal(a.dequantize(name), b.dequantize(name), err_msg=name)


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pytorch_model.bin"])
def test_pythia(pickled: bool, tmp_path: Path) -> None:
    model = theirs(CASES["gpt_neox"].config)
    state = {name.replace("lm_head", "embed_out"): value for name, value in model.state_dict().items()}
    for layer in range(2):
        within = f"gpt_neox.layers.{layer}.attention."
        state[f"{within}bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
        state[f"{within}masked_bias"] = torch.tensor(-1e9)
        state[f"{within}rotary_emb.inv_freq"] = torch.ones(2)
    _same(open_checkpoint(_written(tmp_path, model, state, pickled)), checkpoint_of(model))


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pytorch_model.bin"])
def test_gpt2(pickled: bool, tmp_path: Path) -> None:
    model = theirs(CASES["gpt2"].config)
    state = {name.removeprefix("transformer."): value for name, value in model.state_dict().items()}
    del state["lm_head.weight"]
    state |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(2)}
    _same(open_checkpoint(_written(tmp_path, model, state, pickled)), checkpoint_of(model))


@pytest.mark.parametrize("name", ["opt", "opt_350m"])
def test_opt(name: str, tmp_path: Path) -> None:
    model = theirs(CASES[name].config)
    state = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    _same(open_checkpoint(_written(tmp_path, model, state, pickled=True)), checkpoint_of(model))


def test_a_matrix_of_the_other_orientation_is_refused(tmp_path: Path) -> None:
    model = theirs(CASES["gpt2"].config)
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    state["transformer.h.0.attn.c_attn.weight"] = state["transformer.h.0.attn.c_attn.weight"].T
    with pytest.raises(ConfigError, match=r"attn\.qkv\.weight.*has shape \(64, 192\), not \(192, 64\)"):
        open_checkpoint(_written(tmp_path, model, state))


@pytest.mark.parametrize(("module", "outputs"), [("attention.query_key_value", 192), ("attention.dense", 64)])
def test_an_adapter_whose_rows_lie_head_by_head_is_refused(module: str, outputs: int, tmp_path: Path) -> None:
    name = f"base_model.model.gpt_neox.layers.0.{module}.lora"
    state = {f"{name}_A.weight": torch.ones(2, 64), f"{name}_B.weight": torch.ones(outputs, 2)}
    safetensors_torch.save_file(state, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    if outputs == 64:
        assert [each.tensor for each in read_adapter(tmp_path).matrices] == ["layers.0.attn.o.weight"]
        return
    with pytest.raises(UnsupportedError, match="query_key_value"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_joined_as_transformers_has_them_in_memory(kind: str, tmp_path: Path) -> None:
    """With save_original_format=False transformers writes gates and ups of all experts in one tensor."""
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 48, "num_experts_per_tok": 2}
    if kind == "mixtral":
        sizes |= {"num_local_experts": 4}
    else:
        sizes |= {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes))
    model.save_pretrained(tmp_path / "apart")
    model.save_pretrained(tmp_path / "joined", save_original_format=False)
    names = set(safetensors_torch.load_file(tmp_path / "joined/model.safetensors"))
    assert "model.layers.0.mlp.experts.gate_up_proj" in names, "the case that this test is about"
    _same(open_checkpoint(tmp_path / "apart"), open_checkpoint(tmp_path / "joined"))


def test_layers_that_guess_further_tokens_are_no_parameters_of_the_model() -> None:
    """Tensors named mtp, which files of Qwen3-Next and Qwen3.5 have beside the model, and transformers leaves."""
    config = {"family": "qwen3_next", "layers": 2}
    further = ["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "model.mtp.norm.weight"]
    dtypes = dict.fromkeys(["model.layers.0.linear_attn.A_log", "model.layers.0.linear_attn.dt_bias", *further], "BF16")
    names = stored_names(Path("model"), dtypes, config)
    assert names.unused == []
    assert names.guessing == {
        "layers.2.mtp.fc.weight": "mtp.fc.weight",
        "layers.2.attn.q.weight": "mtp.layers.0.self_attn.q_proj.weight",
        "layers.2.mtp.final_norm.weight": "model.mtp.norm.weight",
    }
    assert list(names.parameters) == ["layers.0.linear.a_log.weight", "layers.0.linear.dt_bias.weight"]
