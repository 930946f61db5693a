"""Shapes of models that lie in Hugging Face's form, without such a model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roofline.common.errors import ConfigError
from roofline.models import presets
from roofline.train.config.schema import ModelSection
from roofline.train.model import shapes


@pytest.mark.parametrize(
    ("pretrained", "overrides", "is_refused"),
    [(True, {"layers": 3}, True), (True, {}, False), (False, {"layers": 3}, False), (False, {}, False)],
)
def test_weights_that_are_there_keep_their_shape(
    monkeypatch: pytest.MonkeyPatch, pretrained: bool, overrides: dict[str, Any], is_refused: bool
) -> None:
    monkeypatch.setattr(shapes, "files", lambda section: Path("there"))
    config = presets.preset("smollm2-135m")
    monkeypatch.setattr(shapes, "read_config", lambda path: config)
    monkeypatch.setattr(shapes, "open_checkpoint", lambda path: SimpleNamespace(config=config))
    section = ModelSection(name="hf_causal_lm", pretrained=pretrained, config_overrides=overrides)
    if is_refused:
        with pytest.raises(ConfigError, match="set pretrained=false"):
            shapes.model_config(section, 8)
    else:
        assert shapes.model_config(section, 8)["layers"] == overrides.get("layers", 30)


def test_a_head_that_differs_from_a_tied_embedding_is_trained_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="it writes the model")
    from tests.models.parity_cases import CASES, theirs

    theirs({**CASES["llama"].config, "tied": False}).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    section = ModelSection(name="hf_causal_lm", pretrained=True, pretrained_model_name_or_path=str(tmp_path))
    assert shapes.model_config(section, 8)["tied"] is False
    assert shapes.model_config(section.model_copy(update={"pretrained": False}), 8)["tied"] is True


def test_a_model_without_a_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "resolve", lambda name: Path(name))
    section: Any = SimpleNamespace(pretrained_model_name_or_path=None)
    with pytest.raises(ConfigError, match="pretrained_model_name_or_path is missing"):
        shapes.files(section)
    section.pretrained_model_name_or_path = "there"
    assert shapes.files(section) == Path("there")
