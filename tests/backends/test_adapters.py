"""Adapters in a step: the C++ core against the reference and merged weights, to the bit or to rounding."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from roofline.backends.adapters import AdapterSlots
from roofline.backends.options import LoadOptions
from roofline.bundle import load
from roofline.common.errors import CapacityError, ConfigError, UnsupportedError
from roofline.models.registry import configure
from roofline.ops.adapters import AdapterMatrix
from roofline.ops.batch import Segment
from roofline.program.compile import compile_program
from roofline.program.passes.adapt import adapt
from roofline.program.target import CPU
from roofline.weights.adapters import read_adapter
from roofline.weights.random_weights import random_checkpoint
from tests.adapter_files import CONFIG, matrices, shapes, write_adapter, write_safetensors

pytest.importorskip("torch", reason="the reference computes in torch")
LLAMA = {
    **{"family": "llama", "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 96},
    **{"norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": None, "max_position": 1024, "tied": False},
    **{"attention_bias": False, "qk_norm": False, "sliding_window": None},
}
GLM4 = {"family": "glm4", "rotary_dim": 8, "attention_bias": True}
SIZES = {"cache_tokens": 256, "max_batch_tokens": 32, "max_running": 4, "text": False}
PROMPTS = [[5, 9, 80, 3, 17, 41, 2], [7, 7, 30, 1, 64], [11, 12, 13]]


def logits(executable, slots, chunk=99):
    """float32 [prompts, vocab]: of each prompt's last token, its adapter in `slots` (None: the prompt is left out),
    computed in chunks of so many tokens."""
    out, at = {}, 0
    while at < max(map(len, PROMPTS)):
        parts = [(i, PROMPTS[i][at : at + chunk]) for i, slot in enumerate(slots) if slot is not None]
        parts = [(i, ids) for i, ids in parts if ids]
        ends = np.cumsum([len(ids) for _, ids in parts]) - 1
        executable.batch.fill([Segment(ids, at, [i + 1], slots[i]) for i, ids in parts], ends.tolist())
        executable.forward()
        out |= {i: np.array(row) for (i, _), row in zip(parts, executable.logits(), strict=True)}
        at += chunk
    return out


def place(executable, seeds=(1, 2)):
    """Random adapters in slots 1, 2, ..., those of an MLP with DoRA's magnitudes; that of slot 2 has fewer ranks and
    not all matrices."""
    for slot, seed in enumerate(seeds, 1):
        generator, chosen = np.random.default_rng(seed), []
        for tensor, site in executable.adapters.sites.items():
            a, b = (0.3 * generator.standard_normal((5 - slot, n)) for n in (site.inputs, site.outputs))
            lengths = generator.uniform(0.5, 2, site.outputs).astype(np.float32) if "mlp" in tensor else None
            chosen.append(AdapterMatrix(tensor, a.astype(np.float32), b.astype(np.float32), 0.37, lengths))
        executable.adapters.set(slot, chosen if slot == 1 else chosen[3:])


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llama):
    place = tmp_path_factory.mktemp("tiny")
    (place / "config.json").write_text(json.dumps(tiny_llama))
    return str(place)


@pytest.mark.parametrize(("form", "isa"), [("F32", "portable"), ("Q8_0", None)])
def test_rows_with_and_without_adapters(folder, form, isa):
    def executable(**options):
        return load(folder, weights=f"random:1:{form}", **SIZES, **options).executable

    plain, core = executable(isa=isa, threads=1), executable(isa=isa, threads=2, max_adapters=2, max_adapter_rank=6)
    reference = executable(backend="reference", max_adapters=2, max_adapter_rank=6)
    assert core.fingerprint == plain.fingerprint  # the bits of rows without an adapter, below
    alone = logits(plain, (0, 0, 0))
    place(core)
    place(reference)
    mixed, slow = logits(core, (1, 0, 2)), logits(reference, (1, 0, 2))
    for i in range(3):
        assert (mixed[i] == slow[i]).all()
        assert (mixed[i] == logits(core, [s if i == j else None for j, s in enumerate((1, 0, 2))])[i]).all()
        assert (mixed[i] == logits(core, (1, 0, 2), chunk=3)[i]).all()
    assert (mixed[1] == alone[1]).all()
    assert all(np.abs(mixed[i] - alone[i]).max() > 0.01 for i in (0, 2))
    assert all((logits(core, (0, 0, 0))[i] == alone[i]).all() for i in range(3))
    core.adapters.free(1)
    with pytest.raises(ValueError, match="names an adapter that is not loaded"):
        logits(core, (1, 0, 2))


def test_equals_merged_weights(tmp_path, tiny_llama):
    generator, added = np.random.default_rng(5), matrices(tiny_llama, 3)
    weights = {f"{module}.weight": generator.standard_normal(s) / 8 for module, s in shapes(tiny_llama).items()}
    norms = [f"model.layers.{i}.{n}_layernorm.weight" for i in range(2) for n in ("input", "post_attention")]
    weights |= {name: np.ones(64) for name in (*norms, "model.norm.weight")}
    weights["model.embed_tokens.weight"] = generator.standard_normal((96, 64))
    merged = dict(weights)
    for module in shapes(tiny_llama):
        a, b = (added[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
        merged[f"{module}.weight"] = weights[f"{module}.weight"] + CONFIG["lora_alpha"] / CONFIG["r"] * (b @ a)
    results = []
    for name, tensors in (("base", weights), ("merged", merged)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(tiny_llama))
        tensors = {key: values.astype(np.float32) for key, values in tensors.items()}
        write_safetensors(tmp_path / name / "model.safetensors", tensors)
        options = {"backend": "reference", "arithmetic": "plain", "max_adapters": int(name == "base")}
        executable = load(str(tmp_path / name), **SIZES, **options).executable
        if name == "base":
            executable.adapters.set(1, read_adapter(write_adapter(tmp_path / "adapter", added)).matrices)
        results.append(logits(executable, (int(name == "base"),) * 3))
    for i in range(3):
        np.testing.assert_allclose(results[0][i], results[1][i], rtol=1e-4, atol=1e-4)


def test_a_permuted_model_takes_the_same_adapter():
    """Converters to GGUF put the two numbers that rope turns together side by side."""
    from roofline.backends.adapters import _neighbours

    assert _neighbours(np.arange(16.0)[None], 8).tolist() == [[0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]]


@pytest.mark.parametrize(("changes", "permuted"), [({"family": "llama"}, True), (GLM4, False)])
def test_only_models_that_a_converter_has_permuted_take_permuted_rows(changes, permuted):
    source = random_checkpoint({**LLAMA, "rope_style": "interleaved", **changes}, seed=3)
    family, config = configure(source.config)
    program = adapt(compile_program(family, config, source.tensors, CPU), 4)
    adapters = AdapterSlots(program)
    b = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    for part, paired in (("q", False), ("o", False), ("q", True)):
        matrix = AdapterMatrix(f"layers.0.attn.{part}.weight", np.ones((4, 64), np.float32), b, 1.0, paired=paired)
        adapters.set(1, [matrix])
        assert (adapters.placed[1][0].matrix.b == b).all() == (part == "o" or permuted == paired)
        adapters.free(1)


def test_what_does_not_fit_is_refused(folder):
    slots = load(folder, weights="random:1", max_adapters=1, max_adapter_rank=4, **SIZES).executable.adapters
    ones = SimpleNamespace(tall=np.ones((4, 64), np.float32), odd=np.ones((4, 63), np.float32))
    for tensor, a, b, problem in (
        ("layers.2.attn.q.weight", ones.tall, ones.tall, "no matrix of this model"),
        ("layers.0.attn.q.weight", ones.odd, ones.tall, "63 inputs and 64 outputs, the model's have 64 and 64"),
        ("layers.0.attn.q.weight", np.ones((5, 64), np.float32), np.ones((5, 64), np.float32), "max_adapter_rank"),
    ):
        with pytest.raises((ConfigError, CapacityError), match=problem):
            slots.set(1, [AdapterMatrix(tensor, a, b, 1.0)])
    with pytest.raises(UnsupportedError, match="several ranks"):
        LoadOptions(max_adapters=1, tensor_parallel=2)
    assert LoadOptions(backend="gpu", max_adapters=1).max_adapters == 1


def test_the_core_checks_where_gains_lie(folder):
    core = load(folder, weights="random:1", max_adapters=1, max_adapter_rank=4, **SIZES).executable._core
    data, scales = np.zeros(4 * 64 + 4 * 64 + 2 * 64, np.float32), np.ones(1, np.float32)
    parts = np.array([0, 0, 0, 64, 4, 0, 256], np.int64)
    core.set_adapter(1, data, parts, scales, np.array([512], np.int64))
    for gains, problem in (
        ([513], "outside its memory"),
        ([1 << 40], "outside its memory"),
        ([0, 0], "a place of gains"),
    ):
        with pytest.raises(ValueError, match=problem):
            core.set_adapter(1, data, parts, scales, np.array(gains, np.int64))
