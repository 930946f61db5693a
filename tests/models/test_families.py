"""Every family beside transformers, from its config.json to 64 tokens through the cache; and as a model to train."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity runs both models in torch")
pytest.importorskip("transformers", reason="parity needs transformers' models")
pytest.importorskip("roofline._native", reason="the C++ core is not built")

from roofline.models.registry import configure  # noqa: E402
from roofline.models.spec import expand  # noqa: E402
from roofline.torch.checkpoint import checkpoint_of  # noqa: E402
from roofline.train.model.build import load  # noqa: E402
from roofline.train.model.modules import Model  # noqa: E402
from roofline.weights.checkpoint import open_checkpoint  # noqa: E402
from roofline.weights.config.hf import from_hf  # noqa: E402
from roofline.weights.to_hf import hf_config, write_folder  # noqa: E402
from tests.models.parity_cases import CASES, ENCODERS, GREEDY, WRAPPED, Eager, measure, theirs  # noqa: E402
from tools.models_table import PAGE, rows  # noqa: E402

QUICK = (
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_alone",
    "gemma4_moe",
    "gemma3n",
    "gemma3n_alone",
    "phi4_mini",
    "smollm3",
    "granite",
    "glm4",
    "olmo2",
    "ministral3",
    "arcee",
    "seed_oss",
    "ernie4_5_biases",
    "olmo3",
    "exaone4_windows",
    "hunyuan_biases",
    "gpt_neox",
    "gpt2",
    "llama_heads_of_20",
    "opt_350m",
    "gpt_oss",
    "deepseek_v2_lite",
    "glm4_moe",
    "hy_v3",
    "qwen3_5_groups",
    "qwen3_next",
    "falcon_mamba",
    "mamba2_groups",
    "lfm2_biases",
    "lfm2_moe",
    "granitemoeshared",
    "granitemoehybrid_experts",
    "nemotron_h_moe",
    "falcon_h1_multipliers",
    "jamba",
    "bamba",
)  # the rest: -m slow
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products are faster on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "qwen3_vl" else pytest.mark.slow) for name in WRAPPED]
)
def test_text_parts_of_models_that_read_pictures_are_those_of_transformers(name: str) -> None:
    case = WRAPPED[name]
    parity = measure(case.config, case.kind)
    assert max(parity.eager, parity.eager_later) < 1e-5
    assert parity.eager_tokens == GREEDY
    if parity.cpu is None:
        return
    assert parity.cpu < 0.05
    assert parity.cpu_tokens == GREEDY or parity.tie < 0.02


@cache
def original(name: str) -> Any:
    """transformers' model of a case, which several tests read and none changes."""
    return theirs(CASES[name].config)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str) -> None:
    found = measure(CASES[name].config, model=original(name))
    assert max(found.eager, found.eager_later) < 1e-5
    assert found.eager_tokens == GREEDY
    if found.cpu is None:
        return
    assert found.cpu < 0.05  # q, k, v and weights are rounded to 16 bits for attention
    assert found.cpu_tokens == GREEDY or found.tie < 0.02


@pytest.mark.parametrize("name", CASES)
def test_a_configuration_is_read_back_as_it_was(name: str) -> None:
    config = dict(CASES[name].config)
    read = from_hf(Path("config.json"), hf_config(config))
    assert configure(read)[1] == configure(config)[1]


@pytest.mark.parametrize("name", CASES)
def test_the_first_layers_of_a_model_are_as_in_the_whole(name: str) -> None:
    family, cfg = configure(CASES[name].config)
    whole = {param.name: param.shape for param in expand(family.spec(cfg), cfg.layers)}
    attending = [n for n in range(cfg.layers) if cfg.attends(n)]  # without them hybrids are no models of their family
    for layers in range(min(attending, default=0) + 1, cfg.layers):
        first = cfg.first(layers)
        stores = [(first.window(n), first.keeps_state(n), first.rope_of(n)) for n in range(layers)]
        assert stores == [(cfg.window(n), cfg.keeps_state(n), cfg.rope_of(n)) for n in range(layers)]
        shapes = {param.name: param.shape for param in expand(family.spec(first), layers)}
        kept = {n: s for n, s in whole.items() if not n.startswith("layers.") or int(n.split(".")[1]) < layers}
        of_all_layers = ("layer_embed.", "layer_projection.")  # side by side in one table
        assert {n: s for n, s in shapes.items() if not n.startswith(of_all_layers)} == {
            n: s for n, s in kept.items() if not n.startswith(of_all_layers)
        }


def test_every_case_stands_in_the_table_of_models() -> None:
    page = PAGE.read_text("utf-8")
    for case in (*CASES.values(), *ENCODERS.values()):
        assert f"| `{case.kind}` | {case.switches} |" in page, "write it: python -m tools.models_table"
    assert len(rows(page)) == len(CASES) + len(WRAPPED) + len(ENCODERS)


@pytest.mark.parametrize("name", NAMES)
def test_a_family_trains(name: str) -> None:
    """The torch module has the logits of transformers, and a gradient for every parameter."""
    config = CASES[name].config
    source = checkpoint_of(original(name))
    model = Model(source.config, "cpu")
    load(model, source)
    beyond = name in ("phi3_long", "minicpm3_long") or name.startswith(
        "ministral3"
    )  # below the original context factors are others
    length = 80 if beyond else 24
    ids = torch.randint(0, config["vocab"], (2, length), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert (model(ids) - original(name)(ids).logits).abs().max() < 2e-5
    model(ids, ids.roll(-1, 1)).backward()
    for parameter, value in model.named_parameters():
        if not value.requires_grad:  # what chooses experts, and says nothing of their weights
            assert parameter.endswith(("e_score_correction_bias", "expert_bias"))
            continue
        assert value.grad is not None, parameter
        assert value.grad.abs().max() > 0, parameter


@pytest.mark.parametrize(
    "name",
    [
        *("gemma3", "phi3", "olmo2", "gpt_neox", "gpt2", "opt_350m", "gpt_oss", "deepseek_v2_lite"),
        *("qwen3_5_moe", "qwen3_next", "ministral3", "arcee_bias", "lfm2_moe", "granitemoeshared"),
        *("minimax_m2", "ernie4_5_moe_between", "exaone_moe", "hy_v3", "glm4_moe", "sarvam_moe"),
        *("gemma4", "gemma4_moe", "gemma3n"),
        *("falcon_mamba", "mamba2", "granitemoehybrid", "jamba", "bamba"),
    ],
)
def test_what_training_exports_has_the_values_of_transformers(name: str, tmp_path: Path) -> None:
    """Parameters that Hugging Face stores as other numbers go there and back."""
    transformers = pytest.importorskip("transformers")
    source = checkpoint_of(original(name))
    family, cfg = configure(source.config)
    table = [param for param in expand(family.spec(cfg), cfg.layers) if param.tied_to is None]
    floats = {param.name: source.parameter(param) for param in table}
    rows = [(tensor, values.shape, values.tobytes()) for tensor, values in floats.items()]
    write_folder(tmp_path / "out", source.config, rows, "F32")
    again = open_checkpoint(tmp_path / "out")
    for param in table:
        np.testing.assert_allclose(again.parameter(param), floats[param.name], atol=2e-7)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = list(range(20))
    with torch.no_grad():
        expected = exported(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(Eager(again).step(ids), expected, atol=1e-4)
