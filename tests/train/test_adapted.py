"""Adapters in training beside peft's: losses, gradients and steps; frozen matrices in all formats."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import ConfigError, UnsupportedError  # noqa: E402
from roofline.models import presets  # noqa: E402
from roofline.ops import formats  # noqa: E402
from roofline.train.checkpoint.adapter_export import write_run_adapter  # noqa: E402
from roofline.train.config.adapter import AdapterSection  # noqa: E402
from roofline.train.config.read import parse_config  # noqa: E402
from roofline.train.model import adapted, build, widen  # noqa: E402
from roofline.train.model.adaptation import forms as plan  # noqa: E402
from roofline.train.model.form import ParameterForm  # noqa: E402
from roofline.train.model.modules import Model  # noqa: E402
from roofline.train.model.shapes import model_config  # noqa: E402
from roofline.train.model.widen import widened  # noqa: E402
from roofline.weights.adapter_files import AdapterDescription  # noqa: E402
from roofline.weights.adapter_matrices import with_value_heads  # noqa: E402
from roofline.weights.adapters import read_adapter  # noqa: E402
from roofline.weights.checkpoint import read_config  # noqa: E402

VOCAB, LENGTH = 96, 16


def folder_of(kind: str, path: Path, seed: int = 3, **changes: object) -> Path:
    """A small random model of transformers in a folder. changes: of its configuration."""
    transformers = pytest.importorskip("transformers", reason="the models are written by transformers")
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True))
    elif kind in ("qwen3_5", "qwen3_next"):
        linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 16}
        layers = ["linear_attention", "full_attention"]
        sizes |= {**linear, "layer_types": layers, "head_dim": 16, "rms_norm_eps": 1e-3, **changes}
        if kind == "qwen3_5":
            model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**sizes))
        else:
            model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**sizes, num_experts=0))
    elif kind != "mixtral" and kind != "lfm2":
        model = model_of_case(kind)
    elif kind == "lfm2":
        model = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**sizes, layer_types=["conv", "full_attention"]))
    else:
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **experts))
    model.save_pretrained(path)
    return path


def model_of_case(kind: str) -> Any:
    """The model of a case, whose norms and biases are random too."""
    from tests.models.parity_cases import CASES, theirs

    return theirs(CASES[kind].config | {"vocab": VOCAB})


def config_of(folder: Path, **adapter: Any) -> Any:
    return parse_config(
        {
            "max_seq_len": LENGTH,
            "model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": str(folder)},
            "adapter": adapter,
            "train_loader": {"name": "synthetic"},
            "optimizer": {"name": "adamw", "lr": 1e-2},
            "max_duration": "5ba",
            "global_train_batch_size": 2,
            "precision": "fp32",
        }
    )


def model_of(folder: Path, **adapter: Any) -> Model:
    config = config_of(folder, **adapter)
    shape = model_config(config.model, LENGTH)
    model = Model(shape, "cpu", forms=plan(config, shape))
    build.start(model, config)
    return model


def disturb(model: Model) -> None:
    """Give B other values than its zeros, so that everything has a gradient."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, _, tensor in model.canonical():
            if "lora_B" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=random) * 0.05)


def batch(seed: int = 0) -> tuple[Any, Any]:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (2, LENGTH), generator=random)
    goals = ids.roll(-1, 1)
    goals[:, -1] = -100
    return ids, goals


@pytest.mark.parametrize(("kind", "dora"), [("llama", False), ("llama", True), ("qwen3_5", False), ("lfm2", False)])
def test_losses_gradients_and_steps_are_pefts(tmp_path: Path, kind: str, dora: bool) -> None:
    peft = pytest.importorskip("peft", reason="the oracle is peft")
    transformers = pytest.importorskip("transformers", reason="the models are written by transformers")
    folder = folder_of(kind, tmp_path / "model")
    ours = model_of(folder, method="dora" if dora else "lora", rank=4, alpha=8, base="f32")
    disturb(ours)
    theirs = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", use_dora=dora),
    )
    named = dict(theirs.named_parameters())
    pairs = []
    for name, _, tensor in ours.canonical():
        stem, _, kind = name.removesuffix(".weight").rpartition(".")
        pairs.append((tensor, named[f"base_model.model.{stem}.{kind}.default.weight"]))
    assert len(pairs) == len([p for p in theirs.parameters() if p.requires_grad])
    with torch.no_grad():
        for mine, other in pairs:
            other.copy_(mine)
    optimizers = [torch.optim.AdamW([pair[i] for pair in pairs], lr=1e-2) for i in (0, 1)]
    for step in range(5):
        ids, goals = batch(step)
        loss = ours(ids, goals) / (2 * (LENGTH - 1))
        loss.backward()
        other = theirs(input_ids=ids, labels=ids).loss
        other.backward()
        assert float(loss.detach()) == pytest.approx(float(other.detach()), rel=1e-5)
        for mine, reference in pairs:
            torch.testing.assert_close(mine.grad, reference.grad, rtol=2e-3, atol=2e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "dora"),
    [
        ("mixtral", False),
        ("mamba", False),
        ("mamba2", True),
        ("nemotron_h", False),
        ("lfm2_moe", False),
        ("granitemoehybrid_experts", False),
    ],
)
def test_losses_and_gradients_of_what_lies_in_one_tensor_are_pefts(tmp_path: Path, kind: str, dora: bool) -> None:
    """Each expert has an A and a B of its own; gate and up share their A, as they are one matrix in transformers, and
    so do all matrices whose rows lie in one tensor of its files."""
    peft = pytest.importorskip("peft", reason="the oracle is peft")
    transformers = pytest.importorskip("transformers", reason="the models are written by transformers")
    folder = folder_of(kind, tmp_path / "model")
    ours = model_of(folder, method="dora" if dora else "lora", rank=4, alpha=8, base="f32")
    disturb(ours)
    adapter = written(ours, tmp_path / "adapter", folder)
    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), adapter, is_trainable=True
    )
    mine = {name: tensor for name, _, tensor in ours.canonical()}
    named = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    assert sum(p.numel() for p in mine.values()) == sum(p.numel() for p in named.values())
    optimizers = [torch.optim.SGD(list(each.values()), lr=0.5) for each in (mine, named)]
    for step in range(5):
        ids, goals = batch(step)
        loss = ours(ids, goals) / (2 * (LENGTH - 1))
        other = theirs(input_ids=ids, labels=ids).loss
        (loss.backward(), other.backward())
        assert float(loss.detach()) == pytest.approx(float(other.detach()), rel=2e-5)
        norms = [sum(float(p.grad.square().sum()) for p in each.values()) for each in (mine, named)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_matrices_that_files_have_with_others_row_by_row_share_an_adapter(tmp_path: Path) -> None:
    folder = folder_of("qwen3_next", tmp_path / "model")
    shape = model_config(config_of(folder, rank=4).model, LENGTH)

    def parts(**adapter: object) -> dict[str, bool]:
        """The adapted parts of layers -> whether their A is another's."""
        planned = plan(config_of(folder, method="lora", rank=4, alpha=8, base="f32", **adapter), shape)
        return {
            name.split(".", 2)[2].removesuffix(".weight"): form.shared for name, form in planned.items() if form.rank
        }

    assert parts(targets=["in_proj_qkvz"]) == {"linear.qkv": False, "linear.z": True}
    others = {"linear.o", *(f"attn.{part}" for part in "qkvo"), *(f"mlp.{part}" for part in ("gate", "up", "down"))}
    assert parts() == dict.fromkeys(others, False) | {
        **{"linear.qkv": False, "linear.z": True, "linear.b": False, "linear.a": True}
    }
    with pytest.raises(ConfigError, match=r"no matrix 'in_proj_qkv'; it has .*in_proj_qkvz"):
        parts(targets=["in_proj_qkv"])


@pytest.mark.parametrize(("kind", "target"), [("nemotron_h_moe", "up_proj"), ("gemma4_moe", "experts.down_proj")])
def test_experts_that_lie_otherwise_have_no_adapter(tmp_path: Path, kind: str, target: str) -> None:
    """Without gates, or in one tensor with each other: PEFT's files have a form for gate and up together."""
    folder = folder_of(kind, tmp_path / "model")
    shape = model_config(config_of(folder, rank=4).model, LENGTH)
    planned = plan(config_of(folder, rank=4, base="f32"), shape)
    assert [name for name, form in planned.items() if form.rank]
    assert not [name for name, form in planned.items() if form.rank and form.experts]
    with pytest.raises(UnsupportedError, match=r"an adapter of .*experts\.\w+_proj of a \w+ model.*no form"):
        plan(config_of(folder, rank=4, base="f32", targets=[target]), shape)


def test_adapters_of_moved_value_heads_are_written_as_hugging_face_has_them(tmp_path: Path) -> None:
    """Those of a base whose value heads a converter to GGUF has tiled."""
    folder = folder_of("qwen3_5", tmp_path / "model")
    ours = model_of(folder, method="dora", rank=4, alpha=8, base="f32")
    disturb(ours)
    config = dict(read_config(folder))
    plain = read_adapter(written(ours, tmp_path / "plain", folder)).matrices
    moved = read_adapter(written(ours, tmp_path / "moved", folder, tiled=True)).matrices
    names = {matrix.tensor for matrix in plain if ".linear." in matrix.tensor}
    assert len(names) == 5
    for before, after in zip(plain, moved, strict=True):
        expected = with_value_heads(replace(before, tiled=True), config, tiled=False)
        for part in ("a", "b", "magnitude"):
            np.testing.assert_array_equal(getattr(after, part), getattr(expected, part))
        assert (after.tensor in names) == any(
            (getattr(after, part) != getattr(before, part)).any() for part in ("a", "b", "magnitude")
        )


def test_scans_have_adapters_of_the_matrices_that_peft_adapts(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the model is written by transformers")
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 1, "time_step_rank": 4}
    transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).save_pretrained(tmp_path / "model")
    model = model_of(tmp_path / "model", method="lora", rank=4, alpha=8, base="f32")
    parts = {name.split(".", 2)[2] for name, form in model.forms.items() if form.rank}
    assert parts == {f"ssm.{part}.weight" for part in ("x", "z", "rank", "bc")}
    folder = written(model, tmp_path / "adapter", tmp_path / "model")
    described = json.loads((folder / "adapter_config.json").read_text())
    assert {name.rpartition(".")[2] for name in described["target_modules"]} == {"in_proj", "x_proj"}


def written(model: Model, folder: Path, base: Path, **fields: object) -> Path:
    """The adapter of a model in PEFT's format. fields: of the configuration, other than those of the base."""
    weights = {param.name: tensor.detach().clone() for _, param, tensor in model.canonical()}
    config = {**read_config(base), **fields}
    write_run_adapter(folder, config, model.forms, weights, AdapterDescription(str(base)))
    return folder


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "NF4", "BF16", "F16", "F32"])
def test_frozen_matrices_have_the_values_of_their_format(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, widened at once and in slices, beside the values that `ops.formats` gives."""
    random = np.random.default_rng(0)
    values = random.standard_normal((64, 512)).astype(np.float32)
    form = formats.get(name)
    raw = form.quantize(values)
    values = form.dequantize(raw, values.shape)
    frozen = ParameterForm(values.shape, name, True)
    stored = torch.from_numpy(raw).view(widen.PLAIN.get(name, torch.uint8)).view(frozen.stored)
    np.testing.assert_array_equal(widened(stored, name, 512, torch.float32).numpy(), values)
    x = torch.from_numpy(random.standard_normal((5, 512)).astype(np.float32)).requires_grad_()
    grad = torch.from_numpy(random.standard_normal((5, 64)).astype(np.float32))
    for limit in (1 << 26, 512 * 24):
        monkeypatch.setattr(adapted, "LIMIT", limit)
        monkeypatch.setattr(widen, "ELEMENTS", limit // 2)
        x.grad = None
        out = adapted.weight_of(frozen, [stored], adapted.Casts()).linear(x, None)
        out.backward(grad)
        np.testing.assert_allclose(out.detach().numpy(), x.detach().numpy() @ values.T, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(x.grad.numpy(), grad.numpy() @ values, rtol=1e-4, atol=1e-4)
    ids = torch.tensor([3, 0, 63])
    np.testing.assert_array_equal(
        adapted.weight_of(frozen, [stored], adapted.Casts()).rows(ids).numpy(), values[[3, 0, 63]]
    )


@pytest.mark.parametrize("base", ["nf4", "q4_1"])
def test_a_quantised_base_takes_less_than_half_of_bf16(base: str) -> None:
    """At SmolLM2's shape, whose embedding is a fifth of it."""
    shape = presets.preset("smollm2-135m")
    sizes = {}
    for kind in ("bf16", base):
        config: Any = SimpleNamespace(adapter=AdapterSection(base=kind))
        sizes[kind] = sum(formats.get(form.format).nbytes(form.shape) for form in plan(config, shape).values())
    assert sizes[base] <= 0.45 * sizes["bf16"]


def test_a_frozen_product_keeps_the_input_for_an_adapter_alone() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    raw = torch.randn(32, 64)
    kept = {}
    for rank in (0, 4):
        frozen = ParameterForm((32, 64), "F32", True, rank=rank)
        trained = [torch.randn(size, requires_grad=True) for size in frozen.trained.values()]
        out = adapted.weight_of(frozen, [raw, *trained], adapted.Casts()).linear(x, None)
        kept[rank] = any(saved.data_ptr() == x.data_ptr() for saved in out.grad_fn.saved_tensors)
    assert kept == {0: False, 4: True}


def test_targets_that_do_not_count_need_no_logits(tmp_path: Path) -> None:
    model = model_of(folder_of("llama", tmp_path / "model"), rank=4, base="f32")
    disturb(model)
    ids, goals = batch()
    goals[:, 3:12] = -100
    rows: list[int] = []
    original = model.head_loss

    def head_loss(targets: Any, x: Any, *weights: Any) -> Any:
        rows.append(len(x))
        return original(targets, x, *weights)

    model.head_loss = head_loss
    gradients = []
    for skips, chunks in ((False, True), (True, True), (True, False)):
        model.skips, model.chunk_logits = skips, chunks
        model(ids, goals).backward()
        assert sum(rows) == (int((goals != -100).sum()) if skips else ids.numel())
        gradients.append([tensor.grad.clone() for _, _, tensor in model.canonical()])
        model.zero_grad()
        rows.clear()
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-4, atol=1e-6)
