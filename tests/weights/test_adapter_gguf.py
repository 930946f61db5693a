"""GGUF files of adapters: what is written reads back, by the gguf package too, and what is refused by name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roofline.common.errors import CapacityError, ConfigError, RooflineError, UnsupportedError
from roofline.ops.adapters import AdapterMatrix
from roofline.weights.adapter_files import write_adapter
from roofline.weights.adapter_gguf import PAIRED, write_gguf_adapter
from roofline.weights.adapter_merge import merged
from roofline.weights.adapters import is_adapter, read_adapter
from roofline.weights.checkpoint import open_checkpoint
from roofline.weights.config.to_gguf import form_of
from roofline.weights.files.gguf_parts import GGUFModel
from roofline.weights.files.gguf_writer import header, write_tensors
from roofline.weights.files.mapped import TensorInfo
from roofline.weights.random_weights import random_checkpoint
from tests.adapter_files import for_checkpoint

LLAMA: dict[str, Any] = {
    **{"family": "llama", "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 96},
    **{"norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": None, "max_position": 1024, "tied": True},
    **{"attention_bias": False, "qk_norm": False, "sliding_window": None, "rope_style": "half"},
}
MIXTURE = LLAMA | {"family": "mixtral", "experts": 4, "experts_per_token": 2, "tied": False}
METADATA = {
    "general.architecture": "llama",
    "general.type": "adapter",
    "adapter.type": "lora",
    "adapter.lora.alpha": 6.0,
}
A, B = "blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"


def values() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    made = {A: generator.standard_normal((4, 64)), B: generator.standard_normal((64, 4))}
    return {name: each.astype(np.float32) for name, each in made.items()}


def write(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, object]) -> Path:
    infos = [TensorInfo(name, "F32", each.shape, each.nbytes) for name, each in tensors.items()]
    with path.open("wb") as stream:
        stream.write(header(metadata, infos))
        write_tensors(stream, infos, lambda info: [tensors[info.name].reshape(-1).view(np.uint8)])
    return path


@pytest.mark.parametrize("config", [LLAMA, MIXTURE], ids=["llama", "mixtral"])
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_what_is_written_changes_the_same(config: dict[str, Any], style: str, tmp_path: Path) -> None:
    """Whatever order the rows of q and k have in the model that it is merged into."""
    model = random_checkpoint(config | {"rope_style": style}, seed=1)
    first = random_checkpoint(config, seed=1)
    adapter = for_checkpoint(first.tensors, experts=config.get("experts", 1))
    write_gguf_adapter(tmp_path / "a.gguf", config, adapter)
    read = read_adapter(tmp_path / "a.gguf")
    assert {each.tensor for each in read.matrices} == {each.tensor for each in adapter}
    assert read.nbytes == sum(each.a.nbytes + each.b.nbytes for each in adapter)
    assert read.rank == 3
    ours, again = merged(model, adapter), merged(model, read.matrices)
    for name in ours.parts:
        np.testing.assert_allclose(ours.values(name), again.values(name), atol=1e-6)
    moved = any((merged(model, [replace(each, paired=True)]).values(each.tensor) != ours.values(each.tensor)).any()
                for each in adapter if each.tensor == "layers.0.attn.q.weight")  # fmt: skip
    assert moved, "the order of the rows is part of it"


def test_rows_of_several_matrices_in_one(tmp_path: Path) -> None:
    """Qwen3-Next's b and a have one A and one B, of both their ranks; its q, k, v and its z have their own."""
    config = MIXTURE | {"family": "qwen3_next", "recurrent": [True, False], "qk_norm": True, "shared_ffn": 32}
    config |= {"key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 16, "taps": 4, "rotary_dim": 4}
    model = random_checkpoint(config, seed=1)
    adapter = for_checkpoint(model.tensors, experts=4)
    write_gguf_adapter(tmp_path / "a.gguf", config, adapter)
    shapes = {name: info.shape for name, info in GGUFModel(tmp_path / "a.gguf").tensors.items() if "ssm_" in name}
    assert {name: shape for name, shape in shapes.items() if "ssm_ba" in name} == {
        "blk.0.ssm_ba.weight.lora_a": (6, 64),
        "blk.0.ssm_ba.weight.lora_b": (8, 6),
    }
    ours, again = merged(model, adapter), merged(model, read_adapter(tmp_path / "a.gguf").matrices)
    for name in ours.parts:
        np.testing.assert_allclose(ours.values(name), again.values(name), atol=1e-6)


def test_one_alpha_for_several_scales(tmp_path: Path) -> None:
    """Most matrices keep B as it is; in the others it carries what the one alpha does not say."""
    matrices = for_checkpoint(random_checkpoint(LLAMA, seed=1).tensors)
    matrices[3] = replace(matrices[3], scale=0.1)
    write_gguf_adapter(tmp_path / "a.gguf", LLAMA, matrices)
    read = {each.tensor: each for each in read_adapter(tmp_path / "a.gguf").matrices}
    for number, before in enumerate(matrices):
        after = read[before.tensor]
        assert after.scale == 0.75
        if ".attn.q." not in before.tensor and ".attn.k." not in before.tensor:
            np.testing.assert_allclose(after.b * after.scale, before.b * before.scale, rtol=1e-6)
            assert (after.b == before.b).all() == (number != 3)


def test_the_gguf_package_reads_it(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    matrices = for_checkpoint(random_checkpoint(LLAMA, seed=1).tensors)
    write_gguf_adapter(tmp_path / "a.gguf", LLAMA, matrices)
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    wanted = {**METADATA, "adapter.lora.alpha": 2.25}
    assert {key: reader.fields[key].contents() for key in wanted} == wanted
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == 2 * len(matrices)
    down = next(each for each in matrices if each.tensor == "layers.1.mlp.down.weight")
    assert (tensors["blk.1.ffn_down.weight.lora_a"].data == down.a).all()
    assert (tensors["blk.1.ffn_down.weight.lora_b"].data == down.b.T).all()


def test_a_scale_of_alpha_0_is_1(tmp_path: Path) -> None:
    for alpha, scale in ((6.0, 1.5), (0.0, 1.0)):
        path = write(tmp_path / f"{alpha}.gguf", values(), METADATA | {"adapter.lora.alpha": alpha})
        assert is_adapter(path)
        (matrix,) = read_adapter(path).matrices
        assert (matrix.scale, matrix.rank, matrix.paired) == (scale, 4, True)


LATENT = ("deepseek2", "mistral4")  # of compressed rows


def test_rows_are_permuted_where_converters_do() -> None:
    """As the families say of the files of their models; some turn neighbours in Hugging Face's too."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.models.parity_cases import CASES
    from tests.weights.gguf_families import GGUF_CASES

    configs = {name: case.config for name, case in GGUF_CASES.items()}
    configs |= {name: CASES[name].config for name in ("llama", "qwen2", "qwen3")} | {"mixtral": MIXTURE}
    for config in configs.values():
        form = form_of(config)
        assert (form.rope_style == "interleaved") == (
            form.architecture in (*PAIRED, "glm4", "chatglm", "ernie4_5", "ernie4_5-moe", *LATENT)
        ), form.architecture


Change = Callable[[dict[str, np.ndarray], dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t, m: m.update({"general.type": "model"}), "this is no adapter"),
        (lambda t, m: m.pop("general.type"), "general.type"),
        (lambda t, m: m.update({"adapter.type": "dora"}), "adapter.type the string 'dora'"),
        (lambda t, m: m.update({"general.architecture": "new"}), "architecture 'new'"),
        (lambda t, m: m.update({"adapter.lora.alpha": "6"}), "adapter.lora.alpha"),
        (lambda t, m: m.update({"adapter.lora.alpha": float("inf")}), "adapter.lora.alpha"),
        (lambda t, m: m.update({"adapter.alora.invocation_tokens": [1, 2]}), "adapter.alora.invocation_tokens"),
        (lambda t, m: t.clear(), "there are none"),
        (lambda t, m: t.pop(A), "lora_a is missing"),
        (lambda t, m: t.update({"blk.0.attn_norm.weight": np.ones(64, np.float32)}), "attn_norm"),
        (lambda t, m: t.update({"token_embd.weight.lora_a": t[A]}), "token_embd"),
        (lambda t, m: t.update({B: t[B][:, :3]}), r"lora_a is \[4, 64\] and lora_b \[64, 3\]"),
        (lambda t, m: t.update({A: np.ones((600, 64), np.float32), B: np.ones((64, 600), np.float32)}), "up to 512"),
        (lambda t, m: t.update({A: t[A][None]}), r"lora_a is \[1, 4, 64\]"),
        (lambda t, m: t[A].__setitem__((0, 0), np.nan), "NaN or infinity"),
    ],
)
def test_what_is_no_adapter_of_ours(change: Change, problem: str, tmp_path: Path) -> None:
    tensors, metadata = values(), dict(METADATA)
    change(tensors, metadata)
    tensors = {name: np.ascontiguousarray(each) for name, each in tensors.items()}
    with pytest.raises(RooflineError, match=problem):
        read_adapter(write(tmp_path / "a.gguf", tensors, metadata))


def test_what_is_not_written(tmp_path: Path) -> None:
    model = random_checkpoint(MIXTURE, seed=1)
    matrices = for_checkpoint(model.tensors, experts=4)
    dora = replace(matrices[0], magnitude=np.ones(64, np.float32))
    with pytest.raises(UnsupportedError, match=r"DoRA.*roofline merge"):
        write_gguf_adapter(tmp_path / "a.gguf", MIXTURE, [dora])
    with pytest.raises(ConfigError, match="all experts of a layer in one tensor"):
        write_gguf_adapter(tmp_path / "a.gguf", MIXTURE, [each for each in matrices if ".experts.1." in each.tensor])
    with pytest.raises(ConfigError, match="no matrix of this model"):
        merged(random_checkpoint(LLAMA, seed=1), matrices)
    small = AdapterMatrix("layers.0.attn.q.weight", np.ones((2, 32), np.float32), np.ones((2, 64), np.float32), 1.0)
    with pytest.raises(ConfigError, match="32 inputs and 64 outputs, the model's have 64 and 64"):
        merged(model, [small])
    assert not list(tmp_path.iterdir())


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    gguf = write(tmp_path / "a.gguf", values(), METADATA)
    folder = write_adapter(tmp_path / "folder", LLAMA, read_adapter(gguf).matrices)
    assert is_adapter(folder)
    for path in (gguf, folder):
        with pytest.raises(ConfigError, match="this is a LoRA adapter"):
            open_checkpoint(path)


def test_size_is_bounded_before_values_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", values(), METADATA)
    with pytest.raises(CapacityError, match="adapter_bytes"):
        read_adapter(path, max_bytes=2047)
    assert read_adapter(path, max_bytes=2048).nbytes == 2048
