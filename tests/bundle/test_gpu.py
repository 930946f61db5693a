"""load(backend="gpu"): what is decided before a GPU is asked, and what is said where there is none."""

import subprocess
import sys

import pytest

from roofline.backends.gpu.program import compile_for_gpu
from roofline.backends.options import LoadOptions
from roofline.bundle import load
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models.config import ModelConfig
from roofline.models.presets import preset
from roofline.weights.random_weights import random_checkpoint

torch = pytest.importorskip("torch")
SMALL = {**preset("smollm2-135m"), "layers": 1, "width": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 96}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a config.json and nothing else."""
    import json

    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96, "vocab_size": 100, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "rope_theta": 1e4, "tie_word_embeddings": True,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_error_says_what_to_do(model):
    with pytest.raises(UnsupportedError, match="roofline doctor"):
        load(model, backend="gpu", weights="random:1", text=False)


@pytest.mark.parametrize("package", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_without_torch_or_triton_the_error_names_the_extra(model, package):
    """In a process that cannot import it, as after a plain installation."""
    program = f"""
import sys
sys.modules[{package!r}] = None
from roofline.backends.gpu.program import compile_for_gpu
from roofline.backends.options import LoadOptions
from roofline.bundle import load
from roofline.common.errors import UnsupportedError
try:
    load({model!r}, backend="gpu", weights="random:1", text=False)
except UnsupportedError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert f"{package} is not installed: pip install 'roofline[gpu]'" in ran.stdout


def test_a_device_or_an_instruction_set_of_another_backend_is_refused(model):
    with pytest.raises(UnsupportedError, match="backend=gpu"):
        load(model, device="amd:0", weights="random:1", text=False)
    with pytest.raises(UnsupportedError, match="isa='avx2' with backend 'gpu'"):
        load(model, backend="gpu", isa="avx2", weights="random:1", text=False)
    with pytest.raises(UnsupportedError, match="offload='auto' with backend 'cpu'"):
        load(model, offload="auto", weights="random:1", text=False)
    with pytest.raises(UnsupportedError, match="offload on several ranks"):
        load(model, backend="gpu", offload=1, tensor_parallel=2, weights="random:1", text=False)
    with pytest.raises(
        ConfigError, match="offload='all' cannot be used: give a whole number of layers, at least 0, or 'auto'"
    ):
        load(model, backend="gpu", offload="all", weights="random:1", text=False)
    with pytest.raises(UnsupportedError, match="threads=2"):
        load(model, backend="gpu", threads=2, weights="random:1", text=False)


@pytest.mark.parametrize(("form", "rows"), [("F16", "f16"), ("BF16", "bf16"), ("Q8_0", "bf16")])
def test_rows_are_in_the_16_bits_of_the_file(form, rows):
    source = random_checkpoint(SMALL, seed=1, form=form)
    config = ModelConfig.of(source.config)
    program = compile_for_gpu(source, config, LoadOptions(backend="gpu"))
    assert {group.format for group in program.kv_groups.values()} == {rows}
    assert program.types()[program.logits].dtype == "f32"
    with pytest.raises(ConfigError, match="leave kv_cache_dtype out"):
        compile_for_gpu(source, config, LoadOptions(backend="gpu", kv_cache_dtype="int8"))
