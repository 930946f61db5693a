"""Adapters between PEFT and us: its files in ours, ours in it, and what both compute."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PEFT computes in torch")
transformers = pytest.importorskip("transformers", reason="PEFT adapts its models")
if find_spec("peft") is None:
    pytest.skip("what is compared with: pip install --no-deps peft accelerate", allow_module_level=True)

from moe_models import transformers_model  # noqa: E402

from roofline.bundle import load  # noqa: E402
from roofline.bundle.rewrite import RewriteWork, write_gguf  # noqa: E402
from roofline.common.errors import ConfigError, UnsupportedError  # noqa: E402
from roofline.ops.adapters import AdapterMatrix  # noqa: E402
from roofline.ops.batch import Segment  # noqa: E402
from roofline.weights.adapter_files import AdapterDescription, write_adapter  # noqa: E402
from roofline.weights.adapter_gguf import write_gguf_adapter  # noqa: E402
from roofline.weights.adapter_matrices import each_alone, joined  # noqa: E402
from roofline.weights.adapter_merge import merged  # noqa: E402
from roofline.weights.adapters import read_adapter  # noqa: E402
from roofline.weights.checkpoint import Checkpoint, open_checkpoint  # noqa: E402
from tests.adapter_files import for_checkpoint  # noqa: E402
from tests.bundle.recurrent_models import write_words  # noqa: E402
from tests.models.parity_cases import CASES, theirs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT and torch
IDS = [1, 5, 9, 60, 31, 7]
LAYER = "model.layers.1."
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {
        "rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 5},
        "alpha_pattern": {f"^{LAYER}mlp.up_proj": 7, "v_proj": 2.5, "self_attn.k.proj": 9},
    },
    "dora_patterns": {"use_dora": True, "rank_pattern": {"o_proj": 2}, "use_rslora": True},
    "one_layer": {"layers_to_transform": [1], "target_modules": ["q_proj", "up_proj"]},
}


def adapted(model: Any, folder: Path, **config: Any) -> np.ndarray:
    """float32 [IDS, vocab]: of the model with a random adapter of PEFT's, which is stored in the folder."""
    import peft  # here: a second, which each test process would take to collect this file

    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
            elif "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return of_theirs(model)


def of_theirs(model: Any) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0].float().numpy()
    return np.array(logits)


def loaded_again(folder: Path, adapter: Path) -> np.ndarray:
    """The logits that PEFT has of an adapter's folder."""
    fields = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **fields)
    from peft import PeftModel

    return of_theirs(PeftModel.from_pretrained(model, adapter).eval())


def of_ours(checkpoint: Checkpoint, adapter: Any = None) -> np.ndarray:
    """float32 [IDS, vocab] of a checkpoint, where `adapter` is served beside it or is None."""
    options = {"backend": "reference", "arithmetic": "plain", "cache_tokens": 64, "max_model_len": 64, "text": False}
    executable = load(checkpoint, **options, max_adapters=int(adapter is not None)).executable
    if adapter is not None:
        executable.adapters.set(1, adapter)
    executable.batch.fill([Segment(IDS, 0, range(1), int(adapter is not None))], range(len(IDS)))
    executable.forward()
    return np.array(executable.logits())


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_peft_is_served_merged_and_given_back(kind: str, tmp_path: Path) -> None:
    model = theirs(CASES["llama"].config)
    model.save_pretrained(tmp_path / "base")
    expected = adapted(model, tmp_path / "theirs", **{"target_modules": "all-linear"} | KINDS[kind])
    base, adapter = open_checkpoint(tmp_path / "base"), read_adapter(tmp_path / "theirs")
    assert np.abs(of_ours(base) - expected).max() > 0.1, "it changes something"
    assert np.abs(of_ours(merged(base, adapter.matrices).checkpoint) - expected).max() < 2e-5
    assert np.abs(of_ours(base, adapter.matrices) - expected).max() < 2e-5
    written = AdapterDescription(base="base", rslora="rslora" in kind)
    write_adapter(tmp_path / "ours", base.config, adapter.matrices, written)
    assert read_adapter(tmp_path / "ours").digest == adapter.digest
    assert np.array_equal(loaded_again(tmp_path / "base", tmp_path / "ours"), expected)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("name", ["gpt2", "phi3", "gemma2", "qwen2", "qwen3_5_groups"])
def test_families_whose_matrices_lie_otherwise(name: str, kind: str, tmp_path: Path) -> None:
    """GPT-2's by columns, Phi-3's q, k and v in one; biases are not scaled by DoRA."""
    model = theirs(CASES[name].config)
    model.save_pretrained(tmp_path / "base")
    expected = adapted(model, tmp_path / "theirs", target_modules="all-linear", **KINDS[kind])
    base, adapter = open_checkpoint(tmp_path / "base"), read_adapter(tmp_path / "theirs")
    assert np.abs(of_ours(merged(base, adapter.matrices).checkpoint) - expected).max() < 5e-5
    assert np.abs(of_ours(base, adapter.matrices) - expected).max() < 5e-5
    write_adapter(tmp_path / "ours", base.config, adapter.matrices)
    assert np.array_equal(loaded_again(tmp_path / "base", tmp_path / "ours"), expected)


GATED = ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"]
JOINED: dict[str, list[str]] = {
    "qwen3_next": GATED,  # q, k, v and z of one key head after the other, and b and a
    "mamba": ["in_proj", "x_proj"],  # of which the second makes what the matrix behind it reads
    "mamba2": ["in_proj"],
    "nemotron_h": ["in_proj", "q_proj", "o_proj", "down_proj"],  # whose modules have other names than its tensors
    "falcon_h1": ["in_proj", "q_proj", "gate_proj"],
    "granitemoehybrid": ["in_proj", "out_proj", "o_proj", "input_linear"],
    "gemma3n": ["modality_router", "linear_left", "linear_right", "q_proj"],  # a layer multiplies with the first twice
}


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("name", JOINED)
def test_rows_of_several_matrices_in_one(name: str, kind: str, tmp_path: Path) -> None:
    model = theirs(CASES[name].config)
    model.save_pretrained(tmp_path / "base")
    expected = adapted(model, tmp_path / "theirs", target_modules=JOINED[name], **KINDS[kind])
    base, adapter = open_checkpoint(tmp_path / "base"), read_adapter(tmp_path / "theirs")
    assert np.abs(of_ours(base) - expected).max() > 0.05, "it changes something"
    assert np.abs(of_ours(merged(base, adapter.matrices).checkpoint) - expected).max() < 5e-5
    assert np.abs(of_ours(base, adapter.matrices) - expected).max() < 5e-5
    write_adapter(tmp_path / "ours", base.config, list(each_alone(adapter.matrices, base.config)))
    assert read_adapter(tmp_path / "ours").digest == adapter.digest
    assert np.abs(loaded_again(tmp_path / "base", tmp_path / "ours") - expected).max() < 5e-5


def test_parts_of_rows_that_lie_with_others(tmp_path: Path) -> None:
    """Qwen3-Next's q, k, v and z, of which one may be missing, or have an A of its own."""
    model = theirs(CASES["qwen3_next"].config)
    model.save_pretrained(tmp_path / "base")
    adapted(model, tmp_path / "lengths", target_modules=GATED, use_dora=True)
    base, adapter = open_checkpoint(tmp_path / "base"), read_adapter(tmp_path / "lengths")
    parts = [each for each in each_alone(adapter.matrices, base.config) if not each.tensor.endswith(".z.weight")]
    with pytest.raises(UnsupportedError, match=r"linear\.\w+\.weight: DoRA of a part"):
        write_adapter(tmp_path / "ours", base.config, parts)
    model = theirs(CASES["qwen3_next"].config)
    adapted(model, tmp_path / "theirs", target_modules=GATED)
    adapter = read_adapter(tmp_path / "theirs")
    # Parts with an A each: PEFT has one of all their ranks; and one part may be missing.
    apart = [
        replace(each, a=each.a + 0.1 * each.tensor.endswith(("z.weight", "a.weight")))
        for each in each_alone(adapter.matrices, base.config)
        if not each.tensor.endswith("linear.b.weight")
    ]
    write_adapter(tmp_path / "apart", base.config, apart)
    again = of_ours(merged(base, apart).checkpoint)
    assert np.abs(loaded_again(tmp_path / "base", tmp_path / "apart") - again).max() < 5e-5
    scaled = [replace(each, scale=9.0) if each.tensor.endswith("z.weight") else each for each in apart]
    with pytest.raises(ConfigError, match=r"linear\.qkvz\.weight: its parts need matrices of one scale"):
        write_adapter(tmp_path / "no", base.config, scaled)


def test_an_adapter_of_what_makes_keys_and_values_of_compressed_rows_is_merged(tmp_path: Path) -> None:
    model = theirs(CASES["youtu"].config)
    model.save_pretrained(tmp_path / "base")
    expected = adapted(model, tmp_path / "theirs", target_modules=["kv_b_proj", "o_proj"])
    base, adapter = open_checkpoint(tmp_path / "base"), read_adapter(tmp_path / "theirs")
    assert np.abs(of_ours(merged(base, adapter.matrices).checkpoint) - expected).max() < 5e-5
    served = load(str(tmp_path / "base"), max_adapters=1, cache_tokens=64, max_model_len=64, threads=1, text=False)
    reason = (
        r"serving an adapter of keys and values of compressed rows \(layers\.0\.attn\.kv_up\.weight\).*roofline merge"
    )
    with pytest.raises(UnsupportedError, match=reason):
        served.executable.adapters.set(1, adapter.matrices)
    others = [matrix for matrix in adapter.matrices if not matrix.tensor.endswith(".kv_up.weight")]
    served.executable.adapters.set(1, others)


def test_all_linear_layers_of_a_mixture(tmp_path: Path) -> None:
    """PEFT turns the experts and the router of transformers 5, which are no layers there, into parameters, and says the
    rank of gate and up by a pattern behind anything."""
    model = theirs(CASES["qwen3_next"].config)
    model.save_pretrained(tmp_path / "base")
    expected = adapted(model, tmp_path / "theirs", target_modules="all-linear")
    base, adapter = open_checkpoint(tmp_path / "base"), read_adapter(tmp_path / "theirs")
    assert {"router", "experts", "shared"} <= {matrix.tensor.split(".")[3] for matrix in adapter.matrices}
    assert np.abs(of_ours(merged(base, adapter.matrices).checkpoint) - expected).max() < 2e-5


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_value_heads_that_a_converter_has_moved(kind: str, tmp_path: Path) -> None:
    """GGUF files of Qwen3.5 have them tiled: rows of B, columns of A and magnitudes follow, both ways."""
    model = theirs(CASES["qwen3_5"].config | {"value_heads": 6, "vocab": 300})
    model.save_pretrained(tmp_path / "base")
    write_words(tmp_path / "base")
    expected = adapted(model, tmp_path / "theirs", target_modules="all-linear", **KINDS[kind])
    base, adapter = open_checkpoint(tmp_path / "base"), read_adapter(tmp_path / "theirs")
    write_gguf(base, tmp_path / "base.gguf", "F32", RewriteWork(threads=1))
    moved = open_checkpoint(tmp_path / "base.gguf")
    assert moved.config["tiled"]
    assert np.abs(of_ours(moved, adapter.matrices) - expected).max() < 5e-5
    assert np.abs(of_ours(merged(moved, adapter.matrices).checkpoint) - expected).max() < 5e-5
    if kind == "lora":
        write_gguf_adapter(tmp_path / "ours.gguf", base.config, adapter.matrices)
        written = read_adapter(tmp_path / "ours.gguf")
        assert written.digest != adapter.digest
        for source in (base, moved):
            assert np.abs(of_ours(source, written.matrices) - expected).max() < 5e-5
        write_adapter(tmp_path / "again", moved.config, written.matrices)
        assert np.abs(loaded_again(tmp_path / "base", tmp_path / "again") - expected).max() < 2e-5


def test_dora_needs_the_models_files(model: Path, bundle: Path, home: Path, tmp_path: Path) -> None:
    """A bundle's matrices are packed for a chip. One that was made of the files when they were loaded has these too."""
    base = open_checkpoint(model)
    matrices = for_checkpoint(base.tensors)
    generator = np.random.default_rng(1)
    sizes = [generator.uniform(0.5, 1.5, each.b.shape[1]).astype(np.float32) for each in matrices]
    dora = [replace(each, magnitude=size) for each, size in zip(matrices, sizes, strict=True)]
    folder = write_adapter(tmp_path / "dora", base.config, dora)
    options: dict[str, Any] = {"cache_tokens": 64, "max_model_len": 64, "text": False, "max_adapters": 1}
    adapter = read_adapter(folder).matrices
    logits = []
    paired = tmp_path / "paired.gguf"  # where rows of q and k, and with them magnitudes, lie in another order
    write_gguf(base, paired, "F32", RewriteWork(threads=1))
    for source, threads in ((model, 1), (model, 2), (paired, 1)):
        executable = load(str(source), **options, threads=threads).executable
        executable.adapters.set(1, adapter)
        executable.batch.fill([Segment(IDS, 0, range(1), 1)], range(len(IDS)))
        executable.forward()
        logits.append(np.array(executable.logits()))
    assert (logits[0] == logits[1]).all()
    expected = of_ours(merged(base, adapter).checkpoint)
    for each in logits:
        assert np.abs(each - expected).max() < 0.02 * expected.std()
    with pytest.raises(UnsupportedError, match=r"beside a bundle.*the model's files.*roofline merge"):
        load(str(bundle), **options).executable.adapters.set(1, adapter)


PARAMETERS = [["gate_up_proj", "down_proj"], ["down_proj"], ["gate_up_proj"]]


@pytest.mark.parametrize(
    "parameters",
    [PARAMETERS[0], *(pytest.param(names, marks=pytest.mark.slow) for names in PARAMETERS[1:])],
    ids=["both", "down", "gate_up"],
)
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_experts(kind: str, parameters: list[str], tmp_path: Path) -> None:
    """What PEFT has of all experts of a layer in one matrix; gpt-oss' gates and ups take turns."""
    transformers_model(kind).save_pretrained(tmp_path / "base")
    targets = {"target_modules": ["q_proj"], "target_parameters": [f"mlp.experts.{each}" for each in parameters]}
    expected = adapted(transformers_model(kind), tmp_path / "theirs", **targets)
    base, adapter = open_checkpoint(tmp_path / "base"), read_adapter(tmp_path / "theirs")
    assert np.abs(of_ours(merged(base, adapter.matrices).checkpoint) - expected).max() < 2e-5
    write_adapter(tmp_path / "ours", base.config, adapter.matrices)
    assert np.array_equal(loaded_again(tmp_path / "base", tmp_path / "ours"), expected)
    with pytest.raises(UnsupportedError, match=r"experts.*roofline merge"):
        of_ours(base, [each for each in adapter.matrices if ".experts." in each.tensor])
    # Gate and up with an A each: PEFT has one of twice the ranks for both.
    apart = list(each_alone(adapter.matrices, base.config))
    assert {each.tensor: each.b.tobytes() for each in joined(apart, base.config)} == {
        each.tensor: each.b.tobytes() for each in adapter.matrices
    }
    apart = [AdapterMatrix(m.tensor, m.a + 0.1 * m.tensor.endswith("up.weight"), m.b, m.scale) for m in apart]
    write_adapter(tmp_path / "two", base.config, apart)
    of_two = of_ours(merged(base, apart).checkpoint)
    assert np.abs(loaded_again(tmp_path / "base", tmp_path / "two") - of_two).max() < 2e-5


def test_what_peft_has_no_form_for(tmp_path: Path) -> None:
    config = {**CASES["llama"].config, "family": "mixtral", "experts": 2}
    a, b = np.ones((2, 8), np.float32), np.ones((2, 4), np.float32)

    def expert(number: int, part: str, scale: float = 1.0) -> AdapterMatrix:
        return AdapterMatrix(f"layers.0.mlp.experts.{number}.{part}.weight", a, b, scale)

    for matrices, problem in (
        ([expert(0, "gate")], "gate and up need matrices of one scale"),
        ([expert(0, "gate"), expert(0, "up", 2.0)], "gate and up need matrices of one scale"),
        ([expert(1, "down")], "from the first one on"),
        ([expert(0, "down"), expert(1, "down", 2.0)], "several ranks or scales"),
    ):
        with pytest.raises(ConfigError, match=problem):
            write_adapter(tmp_path / "no", config, matrices)
    neox = AdapterMatrix("layers.0.attn.qkv.weight", a, b, 1.0)
    with pytest.raises(UnsupportedError, match="rows in another order"):
        write_adapter(tmp_path / "no", CASES["gpt_neox"].config, [neox])
    assert not list(tmp_path.iterdir())
