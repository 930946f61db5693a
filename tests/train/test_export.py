"""A checkpoint as files that others load."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import ConfigError  # noqa: E402
from roofline.models import presets  # noqa: E402
from roofline.train.checkpoint.export import export  # noqa: E402
from roofline.train.checkpoint.manifest import MANIFEST  # noqa: E402
from roofline.train.checkpoint.state import WEIGHTS  # noqa: E402
from roofline.train.config.schema import InitSection  # noqa: E402
from roofline.train.model.init import initialize  # noqa: E402
from roofline.train.model.modules import Model  # noqa: E402
from roofline.train.storage.open import open_store  # noqa: E402
from tests.train import small  # noqa: E402

SHAPE = {"width": 64, "layers": 2, "heads": 4, "head_dim": 16, "vocab": 96, "max_position": 64}
LLAMA = presets.preset("smollm2-135m") | SHAPE | {"kv_heads": 2, "ffn": 128}
MPT = presets.preset("mpt-7b-alibi") | SHAPE | {"kv_heads": 4, "ffn": 256}


def saved(folder: Path, config: dict[str, Any]) -> Model:
    model = Model(config, "cpu")
    initialize(model, 3, InitSection(name="baseline_", init_std=0.1))
    weights = {f"{WEIGHTS}{name}": parameter.detach() for name, _, parameter in model.canonical()}
    said = {"model": config, "config": {"tokenizer": None}}
    small.save(open_store(folder), 7, weights, said)
    return model


@pytest.mark.parametrize("config", [LLAMA, MPT], ids=["llama", "mpt"])
def test_transformers_loads_it_and_agrees(config: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="it is to load the export")
    model = saved(tmp_path / "run" / "checkpoints", config)
    assert export(str(tmp_path / "run"), tmp_path / "out", "F32") == 7
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids), rtol=1e-4, atol=1e-5)


def test_weights_in_sixteen_bits_are_rounded_once(tmp_path: Path) -> None:
    from roofline.weights.checkpoint import open_checkpoint

    model = saved(tmp_path / "checkpoints", LLAMA)
    export(str(tmp_path / "checkpoints" / "step-00000007"), tmp_path / "out", "BF16")
    held = open_checkpoint(tmp_path / "out")
    for _, param, parameter in model.canonical():
        assert torch.equal(torch.from_numpy(held.dequantize(param.name)), parameter.detach().bfloat16().float())


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        export(str(tmp_path), tmp_path / "out")
    saved(tmp_path / "checkpoints", LLAMA)
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        export(str(tmp_path), tmp_path / "out", tokenizer=str(tmp_path))
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_names_the_one_before_it(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoints", LLAMA)
    good = tmp_path / "checkpoints" / "step-00000007"
    bad = shutil.copytree(good, good.with_name("step-00000009"))
    (bad / MANIFEST).write_text((bad / MANIFEST).read_text()[:-7])
    with pytest.raises(ConfigError, match=rf"is damaged.* whole is {re.escape(str(good))}: export that one"):
        export(str(tmp_path), tmp_path / "out")
    assert export(str(good), tmp_path / "out") == 7
