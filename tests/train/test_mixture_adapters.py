"""Adapters of every family with experts as `finetune` makes them by default: PEFT loads the folder and computes the
same.

In classes whose experts transformers 4 had as modules PEFT takes any module with the name of an expert's matrix for the
experts, those of shared experts and of dense layers among them; our files name these by their weights.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training is torch")
peft = pytest.importorskip("peft", reason="it is what reads the adapters")
pytest.importorskip("transformers", reason="it has the models")

from roofline.common.errors import UnsupportedError  # noqa: E402
from roofline.train.model.adaptation import forms as plan  # noqa: E402
from roofline.train.model.shapes import model_config  # noqa: E402
from roofline.weights.adapter_files import AdapterDescription, write_adapter  # noqa: E402
from roofline.weights.adapter_merge import merged  # noqa: E402
from roofline.weights.adapters import Adapter, read_adapter  # noqa: E402
from roofline.weights.checkpoint import open_checkpoint  # noqa: E402
from roofline.weights.latent_form import latent_form  # noqa: E402
from roofline.weights.to_hf import hf_config  # noqa: E402
from tests.models.parity_cases import CASES, Eager, class_of  # noqa: E402
from tests.train.test_adapted import LENGTH, batch, config_of, disturb, folder_of, model_of, written  # noqa: E402

MIXTURES = {name: case for name, case in CASES.items() if case.config.get("experts")}
# Of each class of transformers the first case.
FIRST = {str(hf_config(dict(case.config))["architectures"]): name for name, case in reversed(MIXTURES.items())}
LORA: Mapping[str, Any] = {"method": "lora", "rank": 4, "alpha": 8, "base": "f32"}
IDS = list(range(3, 33))


def with_peft(folder: Path, name: str, adapter: Path) -> Any:
    """transformers' model of a case with an adapter on it. What PEFT warns of is an error: it passes tensors by."""
    base = class_of(hf_config(dict(CASES[name].config))).from_pretrained(folder, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=RuntimeWarning)
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        # It compares the keys with modules alone, and applies them to parameters all the same.
        warnings.filterwarnings("ignore", message=r"The following \w+_pattern keys did not match.*\.weight'\]")
        return peft.PeftModel.from_pretrained(base, adapter).eval()


def logits_of(folder: Path, adapter: Adapter) -> np.ndarray:
    """float32 [len(IDS), vocab] as we compute them with an adapter merged."""
    base = latent_form(open_checkpoint(folder), latent=False)
    return Eager(merged(base, adapter.matrices).checkpoint).step(IDS)


@pytest.mark.parametrize("name", sorted(FIRST.values()))
def test_peft_computes_what_the_default_adapter_of_a_mixture_was_trained_as(name: str, tmp_path: Path) -> None:
    check_default_adapter(name, tmp_path)


@pytest.mark.parametrize("name", ["ernie4_5", "helium", "glm_whole", "glm4"])
def test_rows_that_turn_beside_each_other_in_every_file_stay(name: str, tmp_path: Path) -> None:
    """As in files of ERNIE 4.5 with experts: no converter has moved them, so none are moved back for PEFT."""
    check_default_adapter(name, tmp_path)


def check_default_adapter(name: str, tmp_path: Path) -> None:
    """Check the adapter of all linear layers of a case: its loss in training, and its logits merged, are PEFT's."""
    folder = folder_of(name, tmp_path / "model")
    ours = model_of(folder, **LORA)
    disturb(ours)
    adapter = written(ours, tmp_path / "adapter", folder)
    model = with_peft(folder, name, adapter)
    ids, goals = batch()
    with torch.no_grad():
        loss = float(ours(ids, goals)) / (2 * (LENGTH - 1))
        assert loss == pytest.approx(float(model(input_ids=ids, labels=ids).loss), rel=2e-5)
        reference = model(torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(logits_of(folder, read_adapter(adapter)) - reference).max() < 2e-5


def test_an_adapter_of_shared_experts_alone_and_of_several_ranks_is_pefts(tmp_path: Path) -> None:
    """Patterns of ranks name the weights too, in PEFT's reading and in ours."""
    name = "deepseek_v3"
    folder = folder_of(name, tmp_path / "model")
    ours = model_of(folder, **LORA, targets=["shared_experts.down_proj", "o_proj"])
    disturb(ours)
    first = read_adapter(written(ours, tmp_path / "first", folder))
    random = np.random.default_rng(1)
    matrices = [
        replace(matrix, a=random.standard_normal((8, matrix.a.shape[1]), np.float32), b=np.repeat(matrix.b, 2, axis=0))
        if ".shared." in matrix.tensor and "layers.1." in matrix.tensor
        else matrix
        for matrix in first.matrices
    ]
    config = open_checkpoint(folder).config
    adapter = read_adapter(write_adapter(tmp_path / "second", config, matrices, AdapterDescription(str(folder))))
    assert {matrix.rank for matrix in adapter.matrices} == {4, 8}
    model = with_peft(folder, name, adapter.path)
    with torch.no_grad():
        reference = model(torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(logits_of(folder, adapter) - reference).max() < 2e-5


def test_dora_of_what_peft_takes_for_experts_is_refused_before_the_run(tmp_path: Path) -> None:
    folder = folder_of("glm4_moe", tmp_path / "model")
    config = config_of(folder, method="dora", rank=4, targets=["shared_experts.down_proj"])
    with pytest.raises(UnsupportedError, match=r"dora of .*shared_experts\.down_proj.*PEFT takes.*method=lora"):
        plan(config, model_config(config.model, LENGTH))
    config = config_of(folder, method="dora", rank=4, targets=["o_proj"])
    assert [form for form in plan(config, model_config(config.model, LENGTH)).values() if form.dora]
