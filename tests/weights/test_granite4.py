"""Models of Granite 4 whose layers all attend are read as Granite's, dense or with experts."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="what the logits are compared with runs in torch")
transformers = pytest.importorskip("transformers", reason="it is what the logits are compared with")

from roofline.common.errors import ConfigError, UnsupportedError  # noqa: E402
from roofline.torch.checkpoint import checkpoint_of  # noqa: E402
from roofline.weights.checkpoint import open_checkpoint  # noqa: E402
from roofline.weights.config.hf import from_hf  # noqa: E402
from tests.models.parity_cases import Eager  # noqa: E402

SIZES: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "shared_intermediate_size": 48, "position_embedding_type": "rope"},
    **{"layer_types": ["full_attention"] * 2, "residual_multiplier": 0.3, "logits_scaling": 2.0, "mamba_n_heads": 8},
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}


@pytest.mark.parametrize(("experts", "family"), [(0, "granite"), (4, "granite_moe")])
def test_models_without_scans_are_granites(experts: int, family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GraniteMoeHybridConfig(**SIZES, num_local_experts=experts)
    model = transformers.GraniteMoeHybridForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    ids = list(range(40))
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    for source in (open_checkpoint(tmp_path), checkpoint_of(model)):
        assert source.config["family"] == family
        torch.testing.assert_close(torch.from_numpy(Eager(source).step(ids)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layer_types": ["mamba", "full_attention"], "mamba_n_heads": 7}, ConfigError, "mamba_n_heads"),
        ({"layer_types": ["mamba", "attention"], "mamba_d_head": 5}, ConfigError, "mamba_d_head"),
        ({"layer_types": ["mamba", "attention"], "mamba_proj_bias": True}, UnsupportedError, "mamba_proj_bias"),
        ({"layer_types": ["mamba", "attention"], "time_step_limit": [0.5, 0.1]}, ConfigError, "time_step_limit"),
        ({"layer_types": ["mamba", "odd"]}, UnsupportedError, "'odd'"),
    ],
)
def test_scans_that_fields_do_not_make_are_refused_by_name(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    fields = SIZES | {"model_type": "granitemoehybrid", "num_local_experts": 0} | changes
    with pytest.raises(error, match=message):
        from_hf(Path("config.json"), fields)


def test_kinds_of_layers_have_their_names_of_before(tmp_path: Path) -> None:
    fields = SIZES | {"model_type": "granitemoehybrid", "num_local_experts": 0, "layer_types": None}
    read = from_hf(Path("config.json"), fields | {"layers_block_type": ["attention", "mamba"]})
    assert read["recurrent"] == [False, True]
