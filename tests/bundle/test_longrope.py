"""Phi-3's two sets of factors: which of them a served context has, and what of them is refused."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="what the logits are compared with runs in torch")
pytest.importorskip("transformers", reason="it is what the logits are compared with")
pytest.importorskip("roofline._native", reason="the C++ core is not built")

from roofline.bundle import compile_model, load  # noqa: E402
from roofline.common.errors import ConfigError, UnsupportedError  # noqa: E402
from roofline.models.registry import config_of  # noqa: E402
from roofline.ops.batch import Segment  # noqa: E402
from roofline.ops.rope_tables import frequencies  # noqa: E402
from roofline.weights.config.hf import from_hf  # noqa: E402
from tests.models.parity_cases import BASE, CASES, LONGROPE, theirs  # noqa: E402

IDS = np.random.default_rng(1).integers(0, 96, 40).tolist()
LONG = CASES["phi3_long"].config
FIELDS: dict[str, Any] = {
    **{"model_type": "phi3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96},
    **{"intermediate_size": 128, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096},
}
SCALING = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def _logits(source: str, **options: Any) -> np.ndarray:
    loaded = load(source, text=False, cache_tokens=1024, **options)
    loaded.executable.batch.fill([Segment(IDS, 0, range(3))], range(len(IDS)))
    loaded.executable.forward()
    return np.array(loaded.executable.logits())


def _expected(model: Any) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([IDS])).logits[0].numpy()
    return logits


def test_the_context_that_is_served_chooses_the_factors(tmp_path: Path) -> None:
    model = theirs(LONG)
    model.save_pretrained(tmp_path / "model")
    source, short = str(tmp_path / "model"), _expected(model)  # a text below the original context
    long = _expected(theirs(LONG | {"rope_scaling": LONGROPE | {"short_factor": LONGROPE["long_factor"]}}))
    assert np.abs(short - long).max() > 0.2
    for options, expected in (({"max_model_len": 64}, short), ({"max_model_len": 65}, long), ({}, long)):
        assert np.abs(_logits(source, **options) - expected).max() < 0.05, options
    bundle = tmp_path / "model.roofline"
    compile_model(source, bundle)
    assert np.abs(_logits(str(bundle)) - long).max() < 0.05
    with pytest.raises(ConfigError, match="has the rope factors of contexts above 64 tokens"):
        load(str(bundle), text=False, cache_tokens=1024, max_model_len=64)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_old_and_new_names_are_read_alike(kind: str) -> None:
    read = from_hf(Path("config.json"), {**FIELDS, "rope_scaling": {**SCALING, "type": kind}})
    assert read["rope_scaling"]["attention_factor"] == math.sqrt(1 + math.log(32) / math.log(4096))
    table = config_of(read).rope
    assert frequencies(table)[0][0] == 0.5
    assert frequencies(config_of(read | {"max_position": 4096}).rope)[0][0] == 1.0


@pytest.mark.parametrize(
    ("scaling", "error", "message"),
    [
        ({"short_factor": [1.0] * 7}, ConfigError, "short_factor: is not 8 numbers above 0"),
        ({"long_factor": [1.0] * 7 + [0.0]}, ConfigError, "long_factor: is not 8 numbers above 0"),
        ({"long_factor": None}, ConfigError, "long_factor: is not 8 numbers above 0"),
        ({"short_mscale": 1.1}, UnsupportedError, "short_mscale"),
        ({"attention_factor": -1.0}, ConfigError, "attention_factor"),
    ],
)
def test_what_is_wrong_is_named(scaling: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        from_hf(Path("config.json"), {**FIELDS, "rope_scaling": SCALING | scaling})


def test_other_families_refuse_it() -> None:
    with pytest.raises(UnsupportedError, match="longrope"):
        from_hf(Path("config.json"), {**FIELDS, "model_type": "llama", "rope_scaling": {"type": "longrope"}})
    with pytest.raises(ConfigError, match="needs 8 factors, got 7"):
        config_of({**BASE, "rope_scaling": LONGROPE | {"long_factor": [1.0] * 7}})
