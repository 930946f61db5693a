"""Calibration and reports over families: what GGUF files have in another order, or joined, is calibrated as it is
there.

The judge is the source: a model whose columns are scaled computes what it computed, and the error of what a matrix
gives, measured on the source's own rows in the source's own order, is smaller with calibration than without.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bundle"))  # bundle_models

pytest.importorskip("transformers")

from converted_models import CONVERTED, VOCAB, save

from roofline.bench.quality import calibrate as measuring
from roofline.bench.quality.calibrate import CONTEXT, calibrate
from roofline.bench.quality.report import worst_tensors
from roofline.bundle.rewrite import RewriteWork, Rewritten, write_gguf
from roofline.bundle.text_side import load_text
from roofline.common.errors import CapacityError, ConfigError
from roofline.weights.checkpoint import Checkpoint, open_checkpoint
from roofline.weights.gguf_form import gguf_form, joined_spans, with_heads
from roofline.weights.quantise.calibration import ParameterScale, WeightCalibration
from roofline.weights.quantise.scaling import fit_scales
from tests.command_line import call_roofline
from tests.models.parity_cases import CASES, Eager, theirs

TEXT = "".join(chr(int(code)) for code in np.random.default_rng(3).integers(32, 126, 900))
IDS = np.random.default_rng(1).integers(0, 256, 60).tolist()
GROUPED = {"key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 16}  # heads that files of Qwen3.5 move
FURTHER = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "mistral4", "nemotron_h", "granitemoehybrid")
FURTHER += ("falcon_h1", "falcon_h1_multipliers", "mimo_v2_flash")
UNWRITTEN = ("phi3", "phi3_long")  # whose files would split texts otherwise with this tokenizer; phi4_mini is the same
MODELS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    **{name: (CASES[name].config, {}) for name in FURTHER},
    "qwen3_5_groups": (CASES["qwen3_5"].config | GROUPED, {}),
    "qwen3_next_groups": (CASES["qwen3_next"].config | GROUPED, {}),
    **{name: (row.config, row.published) for name, row in CONVERTED.items() if name not in UNWRITTEN},
}
# In the default run: joined rows, latent matrices, experts, moved heads, multipliers.
QUICK = ("llama", "mamba2", "deepseek_v3", "glm4_moe", "qwen3_5_groups", "falcon_h1_multipliers")
ROWS = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in MODELS]


@dataclass(frozen=True)
class MeasuredModel:
    """A source on disk, and what the text said of it."""

    source: Checkpoint
    scales: WeightCalibration


def write(name: str, folder: Path, uneven: bool = False) -> Checkpoint:
    """The model on disk. uneven: with columns behind its norms that differ much, as those of trained models do."""
    import torch

    config, published = MODELS[name]
    fields = dict(config) | {"vocab": VOCAB}
    if fields.get("layer_vocab"):
        fields["layer_vocab"] = VOCAB
    model = theirs(fields)
    for name, parameter in model.named_parameters() if uneven else ():
        if "norm" in name and parameter.ndim == 1:
            parameter.data *= torch.exp(torch.randn_like(parameter))
        if name.endswith("in_proj_z.weight"):  # gates of value heads, whose norm they share
            parameter.data.unflatten(0, (fields["value_heads"], -1))[1] *= 20
    return open_checkpoint(save(folder, model, published))


def in_blocks(checkpoint: Checkpoint, form: str) -> dict[str, str]:
    """A format for each tensor of the file: that one where a row is whole blocks of 32."""
    tensors = gguf_form(checkpoint).tensors
    return {name: form if len(i.shape) == 2 and i.shape[1] % 32 == 0 else "F32" for name, i in tensors.items()}


def written(checkpoint: Checkpoint, path: Path, form: str, calibration: WeightCalibration) -> Rewritten:
    kinds = in_blocks(checkpoint, form)
    return write_gguf(checkpoint, path, form, RewriteWork(threads=1, calibration=calibration), kinds)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """The median over positions of the largest difference of a logit, as a part of the logits' standard deviation."""
    return float(np.median(np.abs(one - other).max(axis=1)) / other.std())


@pytest.fixture(scope="module", params=ROWS)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MeasuredModel:
    source = write(request.param, tmp_path_factory.mktemp("families") / request.param)
    calibration = calibrate(source, TEXT, "awq", 1)
    return MeasuredModel(source, fit_scales(source, in_blocks(source, "Q4_0"), calibration))


def test_scaled_columns_compute_what_the_source_computes(measured: MeasuredModel, tmp_path: Path) -> None:
    write_gguf(measured.source, tmp_path / "plain.gguf", "F32", RewriteWork(threads=1))
    work = RewriteWork(threads=1, calibration=measured.scales)
    write_gguf(measured.source, tmp_path / "scaled.gguf", "F32", work)
    plain, scaled = (Eager(open_checkpoint(tmp_path / f"{name}.gguf")).step(IDS) for name in ("plain", "scaled"))
    assert distance(scaled, plain) < 2e-4


def test_rounding_scaled_columns_is_no_worse(measured: MeasuredModel, tmp_path: Path) -> None:
    """To Q8_0, whose errors are small: a scale that is left out anywhere is many times as much."""
    source = Eager(measured.source).step(IDS)
    far = {}
    for name, calibration in (("plain", WeightCalibration()), ("awq", measured.scales)):
        written(measured.source, tmp_path / f"{name}.gguf", "Q8_0", calibration)
        rounded = open_checkpoint(tmp_path / f"{name}.gguf")
        far[name] = distance(Eager(rounded).step(IDS), source)
        worst = worst_tensors(measured.source, rounded, calibration)
        assert worst
        assert 0 < worst[0].error < 0.02, worst
    assert far["awq"] < 2.5 * far["plain"], far  # of mixtures, where a token may be sent to another expert


@dataclass(frozen=True)
class HookedMatrix:
    """A matrix of ours and transformers' module whose input it is multiplied with."""

    model: str
    name: str
    module: str


LESS = 0.92  # of the error without calibration, or with that of other columns
MATRICES = [
    HookedMatrix("qwen3_5_groups", "layers.1.linear.o.weight", "model.layers.1.linear_attn.out_proj"),  # columns moved
    HookedMatrix("mamba2", "layers.1.ssm.in.weight", "backbone.layers.1.mixer.in_proj"),  # rows joined
    HookedMatrix("sarvam_moe", "layers.1.attn.qkv.weight", "model.layers.1.self_attn.q_proj"),
]


def rows_of(folder: Path, ids: list[int], module: str) -> np.ndarray:
    """float32 [tokens, cols]: what comes into a module of transformers' model."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    rows: list[np.ndarray] = []
    model.get_submodule(module).register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0][0].numpy()))
    with torch.no_grad():
        for start in range(0, len(ids), CONTEXT):
            model(torch.tensor([ids[start : start + CONTEXT]]))
    return np.concatenate(rows)


def in_source_order(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """A matrix as the source has it, its rows joined."""
    ordered = with_heads(checkpoint, tiled=False)
    spans = joined_spans(ordered).get(
        name, [(name, range(ordered.tensors[name].shape[0]) if name in ordered.tensors else range(0))]
    )
    return np.concatenate([ordered.dequantize(part)[rows.start : rows.stop] for part, rows in spans])


def turned(calibration: WeightCalibration) -> WeightCalibration:
    """What was measured, of the columns in reverse."""
    importance = {name: values[..., ::-1].copy() for name, values in calibration.importance.items()}
    products = {name: values[..., ::-1, ::-1].copy() for name, values in calibration.products.items()}
    return WeightCalibration(importance, products)


@pytest.mark.parametrize("method", ["importance", "gptq"])
@pytest.mark.parametrize("matrix", MATRICES, ids=lambda matrix: matrix.model)
def test_rows_that_transformers_multiplies_lose_less_with_calibration(
    matrix: HookedMatrix, method: str, tmp_path: Path
) -> None:
    """The error of what a matrix gives, on the rows that transformers has there: with calibration it is smaller than
    without, and than with what was measured of the columns in another order."""
    source = write(matrix.model, tmp_path / "model", uneven=True)
    ids = load_text(source)[0].encode(TEXT, add_special=True)
    rows = rows_of(source.path, ids, matrix.module)
    calibration = calibrate(source, TEXT, method, 1)
    values, errors = in_source_order(source, matrix.name), {}
    for label, used in (("plain", WeightCalibration()), ("right", calibration), ("turned", turned(calibration))):
        written(source, tmp_path / f"{label}.gguf", "Q4_0", used)
        lost = in_source_order(open_checkpoint(tmp_path / f"{label}.gguf"), matrix.name) - values
        errors[label] = float(np.linalg.norm(rows @ lost.T) / np.linalg.norm(rows @ values.T))
    assert errors["right"] < LESS * min(errors["plain"], errors["turned"]), errors


def experts_of(checkpoint: Checkpoint, part: str, experts: int) -> np.ndarray:
    """float32 [experts, rows, cols]: the matrices of a layer's experts."""
    whole = f"layers.1.mlp.experts.{part}.weight"
    if whole in checkpoint.tensors:
        values = checkpoint.dequantize(whole)
        return values.reshape(experts, -1, values.shape[1])
    return np.stack([checkpoint.dequantize(f"layers.1.mlp.experts.{n}.{part}.weight") for n in range(experts)])


@pytest.mark.parametrize("method", ["importance", "gptq"])
def test_each_expert_is_calibrated_with_its_own_rows(method: str, tmp_path: Path) -> None:
    """On the rows that transformers sends to each of Mixtral's experts."""
    source = write("mixtral", tmp_path / "model", uneven=True)
    ids = load_text(source)[0].encode(TEXT, add_special=True)
    rows = rows_of(source.path, ids, "model.layers.1.mlp.gate").reshape(-1, source.config["width"])
    chosen = np.argsort(rows @ source.dequantize("layers.1.mlp.router.weight").T, axis=1)[:, -2:]
    calibration = calibrate(source, TEXT, method, 1)
    values, errors = experts_of(source, "up", source.config["experts"]), {}
    for label, used in (("plain", WeightCalibration()), ("right", calibration), ("turned", turned(calibration))):
        written(source, tmp_path / f"{label}.gguf", "Q4_0", used)
        lost = experts_of(open_checkpoint(tmp_path / f"{label}.gguf"), "up", len(values)) - values
        squares = [np.square(rows[(chosen == n).any(axis=1)] @ each.T).sum() for n, each in enumerate(lost)]
        errors[label] = float(np.sum(squares))
    assert errors["right"] < LESS * min(errors["plain"], errors["turned"]), errors


def test_what_is_outside_the_layers_is_not_scaled(tmp_path: Path) -> None:
    """Vectors of texts are rows of the last norm, and a layer that guesses shares the head: neither knows of scales."""
    source = write("qwen3_moe", tmp_path / "model", uneven=True)
    assert not source.config["tied"]
    measured = calibrate(source, TEXT, "awq", 1)
    scales = fit_scales(source, in_blocks(source, "Q4_0"), measured).scales
    assert scales
    assert all(name.startswith("layers.") for name in scales)


def test_a_calibration_of_other_tensors_is_refused(tmp_path: Path) -> None:
    source = write("llama", tmp_path / "model")
    scales = {"layers.0.attn.qkv.weight": ParameterScale(columns=np.full(source.config["width"], 2, np.float32))}
    work = RewriteWork(threads=1, calibration=WeightCalibration(scales=scales))
    with pytest.raises(ConfigError, match="and the model has none"):
        write_gguf(source, tmp_path / "new.gguf", "F32", work)
    assert not (tmp_path / "new.gguf").exists()


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "falcon_h1_multipliers"])
def test_the_command_compares_and_says_what_was_not_calibrated(name: str, tmp_path: Path) -> None:
    source = write(name, tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["quantize", source.path, "--to", "Q4_0", "--calibrate", tmp_path / "text.txt", "--threads", "1"]
    result = call_roofline([*words, "--report", tmp_path / "text.txt", "-o", tmp_path / "new.gguf"])
    assert result.exit_code == 0, result.output
    errors = [float(error) for error in re.findall(r"\(Q\w+\) ([0-9.]+)", result.stdout.partition("largest")[2])]
    assert errors
    assert 0 < max(errors) < 0.2
    line = re.search(r"(\d) of \d{2,} matrices \([0-9.]+ % of the weights\) were rounded without (.*)", result.stdout)
    assert line is not None
    assert int(line[1]) == 2, "the embedding, and the head, whose rows are too short for Q6_K"
    assert "Q8_0 has no scales to search for" in line[2]
    assert "rows of embeddings" in line[2]


def test_experts_are_rounded_by_importance_where_their_products_have_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write("mixtral", tmp_path / "model")
    weights = sum(int(np.prod(info.shape)) for info in source.tensors.values())
    inner = [info for name, info in source.tensors.items() if ".experts." not in name and len(info.shape) > 1]
    attention = [info.shape[1] ** 2 for info in inner]
    for free, several in ((4 * (weights + sum(attention)), False), (1 << 40, True)):
        monkeypatch.setattr(measuring, "detect", lambda free=free: SimpleNamespace(memory_available=free))
        measured = calibrate(source, TEXT, "gptq", 1)
        experts = {name for name in measured.importance if ".experts." in name}
        assert (experts <= measured.products.keys()) is several
        assert (experts <= measured.reasons.keys()) is not several
        assert "layers.0.attn.q.weight" in measured.products
    written(source, tmp_path / "new.gguf", "Q4_0", measured)
    monkeypatch.setattr(measuring, "detect", lambda: SimpleNamespace(memory_available=4 * weights))
    with pytest.raises(CapacityError, match="--method importance"):
        calibrate(source, TEXT, "gptq", 1)
