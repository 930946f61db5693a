"""pytorch_model.bin: read where it holds tensors alone, refused where it would run code, is damaged, or lacks torch."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.weights.checkpoint import open_checkpoint
from tests.weights import quantised_models as models

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors.torch", reason="it writes the files")


def folder(path: Path, tensors: Any, quantization: Any = None, **options: Any) -> Path:
    torch.save(tensors, path / "pytorch_model.bin", **options)
    config = models.CONFIG if quantization is None else {**models.CONFIG, "quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))
    return path


def plain() -> dict[str, Any]:
    stored = models.plain_tensors(np.random.default_rng(0))
    generator = torch.Generator().manual_seed(0)
    for part, shape in models.SHAPES.items():
        stored[f"model.layers.0.{part}.weight"] = torch.randn(shape, generator=generator).half()
    return stored


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_are_those_of_safetensors(zipped: bool, tmp_path: Path) -> None:
    tensors = plain()
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].T.contiguous().T
    ours = open_checkpoint(folder(tmp_path, tensors, _use_new_zipfile_serialization=zipped))
    (tmp_path / "other").mkdir()
    theirs = open_checkpoint(models.write(tmp_path / "other", {n: t.contiguous() for n, t in tensors.items()}, None))
    assert ours.kind == "torch"
    assert ours.tensors == theirs.tensors
    for name in ours.tensors:
        assert np.array_equal(ours.read(name), theirs.read(name)), name


def test_safetensors_are_read_where_both_are_there(tmp_path: Path) -> None:
    models.write(folder(tmp_path, {"a": torch.ones(1)}), plain(), None)
    assert open_checkpoint(tmp_path).kind == "safetensors"


def test_files_of_an_index_and_quantised_ones(tmp_path: Path) -> None:
    stored, values = models.tensors_of("gptq 32")
    folder(tmp_path, stored, models.KINDS["gptq 32"][0])
    names = list(stored)
    placed = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: stored[name] for name in part}, tmp_path / file)
        placed |= dict.fromkeys(part, file)
    (tmp_path / "pytorch_model.bin").unlink()
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": placed}))
    checkpoint = open_checkpoint(tmp_path)
    assert np.array_equal(checkpoint.dequantize("layers.0.attn.q.weight"), values[f"{models.Q}.weight"])
    index.write_text(json.dumps({"weight_map": {"a": "../pytorch_model.bin"}}))
    with pytest.raises(ConfigError, match=r"not the name of a \.bin file"):
        open_checkpoint(tmp_path)


class Harm:
    """What a pickle that runs code holds."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def test_a_pickle_that_would_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    harmed = tmp_path / "harmed"
    folder(tmp_path, {**plain(), "x": Harm(harmed)})
    with pytest.raises(UnsupportedError, match=r"pytorch_model\.bin: a pickle.*would run code.*safetensors or GGUF"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Harm(harmed)))
    with pytest.raises((UnsupportedError, ConfigError), match=r"pytorch_model\.bin"):
        open_checkpoint(tmp_path)
    assert not harmed.exists()


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([torch.ones(2)], "does not hold a mapping"),
        ({"a": 1}, "tensor 'a': is no plain tensor"),
        ({1: torch.ones(2)}, "does not hold a mapping"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "complex64"),
        ({"a": torch.ones(2).to_sparse()}, "no plain tensor"),
        ({"a": torch.ones(1).expand(1 << 40)}, "more than the file holds of it"),
    ],
)
def test_what_is_no_model_is_refused(tensors: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        open_checkpoint(folder(tmp_path, tensors))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    file = folder(tmp_path, plain()) / "pytorch_model.bin"
    whole = file.read_bytes()
    for content in (b"", b"x", whole[: len(whole) // 2], b"\x80\x02}q" + whole[100:300]):
        file.write_bytes(content)
        with pytest.raises((ConfigError, UnsupportedError), match=r"pytorch_model\.bin"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("count", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_changed_bytes_are_read_or_refused(
    count: int, zipped: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Bits flipped, words replaced, stretches moved and ends cut off, mostly where the pickle says what follows."""
    file = folder(tmp_path, plain(), _use_new_zipfile_serialization=zipped) / "pytorch_model.bin"
    good, rng, refused = file.read_bytes(), np.random.default_rng(3), list[str]()
    for _ in range(count):
        data = bytearray(good)
        at = int(rng.integers(len(data) if rng.random() < 0.3 else 3000))
        match rng.integers(4):
            case 0:
                data[at] ^= 1 << int(rng.integers(8))
            case 1:
                data[at : at + 8] = [b"\xff" * 8, b"\0" * 8, (1 << 40).to_bytes(8, "little")][rng.integers(3)]
            case 2:
                start, size = int(rng.integers(len(data))), int(rng.integers(1, 60))
                data[at : at + size] = data[start : start + size]
            case _:
                del data[at:]
        file.write_bytes(data)
        try:
            checkpoint = open_checkpoint(tmp_path)
            for name in checkpoint.tensors:
                checkpoint.read(name)
        except (ConfigError, UnsupportedError) as error:
            refused.append(str(error))
    assert count / 4 < len(refused) < count
    assert all(str(tmp_path) in message for message in refused)
    assert not recwarn.list


def test_without_torch_the_package_is_named(tmp_path: Path) -> None:
    script = """
import sys
sys.modules["torch"] = None
from roofline.common.errors import UnsupportedError
from roofline.weights.checkpoint import open_checkpoint
try:
    open_checkpoint(sys.argv[1])
except UnsupportedError as error:
    assert "without torch" in str(error), error
    print("refused")
"""
    command = [sys.executable, "-c", script, str(folder(tmp_path, plain()))]
    assert subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout == "refused\n"
