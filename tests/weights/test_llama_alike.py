"""Types whose models are Llama's, GPT-2's or DeepSeek's with other defaults, are read as transformers computes them."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="what the logits are compared with runs in torch")
transformers = pytest.importorskip("transformers", reason="it is what the logits are compared with")

from roofline.common.errors import ConfigError, RooflineError, UnsupportedError  # noqa: E402
from roofline.models.registry import configure  # noqa: E402
from roofline.torch.checkpoint import checkpoint_of  # noqa: E402
from roofline.weights.checkpoint import open_checkpoint  # noqa: E402
from roofline.weights.config.hf import from_hf  # noqa: E402
from roofline.weights.to_hf import hf_config  # noqa: E402
from tests.models.parity_cases import Eager  # noqa: E402

PATH = Path("config.json")
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "vocab_size": 80}
SIZES |= {"num_attention_heads": 4, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "internlm3": ("internlm3", {}),
    "internlm3 with biases": ("internlm3", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "iquestcoder": ("iquestcoder", {"num_key_value_heads": 2}),
    "cwm": ("cwm", {"num_key_value_heads": 2, "sliding_window": 7}),
    "cwm with biases": ("cwm", {"num_key_value_heads": 1, "sliding_window": 7, "layer_types": MIXED, "mlp_bias": True}),
    "ministral": ("ministral", {"head_dim": 16, "num_key_value_heads": 4, "sliding_window": 7}),
    "ministral of two kinds": (
        "ministral",
        {"head_dim": 16, "num_key_value_heads": 2, "sliding_window": 7, "layer_types": MIXED},
    ),
    "exaone": ("exaone", {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "sarvam_mla": (
        "sarvam_mla",
        {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 6}
        | {"num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1},
    ),
    "gpt-sw3": ("gpt-sw3", {"n_positions": 64}),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    kind, fields = CASES[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[kind](**SIZES, **fields)).eval()
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            ones = "norm" in part or ".ln_" in part
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (ones and "bias" not in part))
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text()) | {"model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(written))
    ids = list(range(40))
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    for source in (open_checkpoint(tmp_path), checkpoint_of(model)):
        torch.testing.assert_close(torch.from_numpy(Eager(source).step(ids)), expected, rtol=0, atol=1e-5)
    config = from_hf(PATH, written)
    if name != "cwm with biases":  # biases beside windows by layer are what no type has that we write
        assert configure(from_hf(PATH, hf_config(config)))[1] == configure(config)[1]


PUBLISHED = {
    "num_layers": 4,
    "num_key_value_heads": 2,
    "layer_norm_epsilon": 3e-5,
    "activation_function": "silu",
    "auto_map": {"AutoModel": "x"},
}


def test_published_keys_of_exaone_are_read() -> None:
    fields = {key: value for key, value in SIZES.items() if key != "num_hidden_layers"} | PUBLISHED
    read = from_hf(PATH, fields | {"model_type": "exaone"})
    assert (read["layers"], read["norm_eps"], read["rope_theta"]) == (4, 3e-5, 5e5)


def test_published_keys_of_sarvam_are_read_as_transformers_reads_them() -> None:
    yarn = {"type": "deepseek_yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0}
    fields = {"num_experts": 8, "num_shared_experts": 1, "head_dim": 576, "q_head_dim": 192, "rope_scaling": yarn}
    fields |= {"max_position_embeddings": 131_072}
    theirs = transformers.SarvamMLAConfig(**SIZES, **fields).to_dict()
    assert from_hf(PATH, SIZES | fields | {"model_type": "sarvam_mla"}) == from_hf(PATH, theirs)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"model_type": "internlm3", "qkv_bias": True, "bias": False}, ConfigError, "attention_bias: is not mlp_bias"),
        (
            {"model_type": "internlm3", "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}},
            UnsupportedError,
            "dynamic",
        ),
        ({"model_type": "iquestcoder", "use_sliding_window": True}, UnsupportedError, "use_sliding_window"),
        ({"model_type": "iquestcoder", "clip_qkv": 8.0}, UnsupportedError, "clip_qkv"),
        ({"model_type": "exaone", "activation_function": "gelu"}, UnsupportedError, "hidden_act"),
        ({"model_type": "ministral", "sliding_window": None, "layer_types": MIXED}, ConfigError, "sliding_window"),
        ({"model_type": "cwm", "attention_bias": True}, UnsupportedError, "attention_bias"),
    ],
)
def test_what_they_do_not_have_is_refused(fields: dict[str, Any], error: type[RooflineError], message: str) -> None:
    with pytest.raises(error, match=message):
        from_hf(PATH, SIZES | {"max_position_embeddings": 256} | fields)
