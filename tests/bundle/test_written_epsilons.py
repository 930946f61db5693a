"""Epsilons of GGUF files, which are float32, written into config.json as people write them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="it writes the files")
pytest.importorskip("transformers", reason="it has the models")

from roofline.bundle.rewrite import RewriteWork, write_safetensors
from roofline.weights.checkpoint import open_checkpoint
from roofline.weights.config.hf import from_hf
from tests.models.parity_cases import theirs
from tests.weights.gguf_families import GGUF_CASES, RMS, write

EPSILON = 1e-6  # of many published models; no float32 number is the same


@pytest.mark.usefixtures("without_text")
@pytest.mark.parametrize(
    "name", [name if name == "jamba" else pytest.param(name, marks=pytest.mark.slow) for name in GGUF_CASES]
)
def test_an_epsilon_is_written_as_the_shortest_decimal_of_its_float32(name: str, tmp_path: Path) -> None:
    case = GGUF_CASES[name]
    keys = {key: EPSILON for key in case.keys if key.endswith("epsilon")} or {RMS: EPSILON}
    source = write(tmp_path / "model.gguf", theirs(case.config), replace(case, keys={**case.keys, **keys}))
    read = open_checkpoint(source)
    assert read.config["norm_eps"] != EPSILON
    write_safetensors(read, tmp_path / "back", "", RewriteWork(threads=1))
    back = from_hf(tmp_path, json.loads((tmp_path / "back/config.json").read_text()))
    assert {back[key] for key in ("norm_eps", "scan_eps") if key in back} == {EPSILON}
