"""Folders of every family with experts, by each of our writers: transformers reads all of them, and nothing else.

A tensor under a name that transformers does not have is passed by with a line in its report, and the module that it
was meant for stays random.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="it runs the models")
pytest.importorskip("transformers", reason="it has the models")

from roofline.bundle.rewrite import RewriteWork, write_gguf, write_safetensors  # noqa: E402
from roofline.common.errors import UnsupportedError  # noqa: E402
from roofline.models.registry import configure  # noqa: E402
from roofline.models.spec import expand  # noqa: E402
from roofline.weights.checkpoint import Checkpoint, open_checkpoint  # noqa: E402
from roofline.weights.latent_form import latent_form  # noqa: E402
from roofline.weights.to_hf import hf_config, write_folder  # noqa: E402
from tests.models.parity_cases import CASES, WRAPPED, class_of, theirs  # noqa: E402

MIXTURES = {name: case for name, case in (CASES | WRAPPED).items() if case.config.get("experts")}
# Of each class of transformers the first case: the others differ in what no name of a tensor depends on.
FIRST = {str(hf_config(dict(case.config))["architectures"]): name for name, case in reversed(MIXTURES.items())}.values()
# Cases with something that llama.cpp does not have in their architecture.
WITHOUT_GGUF = {"gpt_oss", "deepseek_v2_lite", "deepseek_v2_groups", "deepseek_v3_half", "glm4_moe_lite"}
WITHOUT_GGUF |= {"dots1_windows", "olmoe_biases", "ernie4_5_moe_between", "exaone_moe_between", "hy_v3_biases"}
WITHOUT_GGUF |= {
    "lfm2_moe_scaled",
    "hunyuan_moe_biases",
    "sarvam_moe_groups",
    "nemotron_h_moe",
    "mimo_v2_flash_biases",
    "flex_olmo",
}
IDS = tuple(range(3, 33))
WORK = RewriteWork(threads=1)


def as_trained(source: Checkpoint, folder: Path) -> None:
    """Write a checkpoint as a run that trains all parameters does."""
    source = latent_form(source, latent=False)
    family, cfg = configure(source.config)
    table = [param for param in expand(family.spec(cfg), cfg.layers) if param.tied_to is None]
    rows = ((param.name, param.shape, source.parameter(param).view(np.uint8).reshape(-1)) for param in table)
    write_folder(folder, source.config, rows, "F32")


def check_read(folder: Path, original: Any, config: Mapping[str, Any]) -> None:
    """Check that transformers has a name for each tensor of a folder, and a tensor for each name, and computes what it
    does of its own folder; the numbers are not the same to the bit where a family's rates are logarithms in files."""
    loader = class_of(hf_config(dict(config))).from_pretrained
    read, report = loader(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert {kind: list(names) for kind, names in report.items() if names} == {}
    ids = torch.tensor([IDS])
    with torch.no_grad():
        assert float((read.eval()(ids).logits - original(ids).logits).abs().max()) < 2e-5


@pytest.mark.usefixtures("without_text")
@pytest.mark.parametrize("name", sorted(FIRST))
def test_transformers_reads_all_of_a_written_mixture(name: str, tmp_path: Path) -> None:
    check_folders(name, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("without_text")
@pytest.mark.parametrize("name", MIXTURES)
def test_transformers_reads_all_of_a_mixture_that_was_a_gguf_file(name: str, tmp_path: Path) -> None:
    original, source = check_folders(name, tmp_path)
    try:
        write_gguf(source, tmp_path / "model.gguf", "", WORK)
    except UnsupportedError:
        assert name in WITHOUT_GGUF
        return
    assert name not in WITHOUT_GGUF
    write_safetensors(open_checkpoint(tmp_path / "model.gguf"), tmp_path / "back", "", WORK)
    check_read(tmp_path / "back", original, MIXTURES[name].config)


def check_folders(name: str, tmp_path: Path) -> tuple[Any, Checkpoint]:
    """Check the folders that `convert` and a training run write of a case; its model and checkpoint."""
    original = theirs(MIXTURES[name].config)
    original.save_pretrained(tmp_path / "theirs")
    source = open_checkpoint(tmp_path / "theirs")
    write_safetensors(source, tmp_path / "converted", "", WORK)
    check_read(tmp_path / "converted", original, MIXTURES[name].config)
    as_trained(source, tmp_path / "trained")
    check_read(tmp_path / "trained", original, MIXTURES[name].config)
    return original, source
