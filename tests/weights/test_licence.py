"""The licence that a model's files name."""

from pathlib import Path

import pytest

from roofline.weights.checkpoint import Checkpoint
from roofline.weights.licence import licence_of


def checkpoint(path: Path, kind: str, metadata: dict[str, object]) -> Checkpoint:
    return Checkpoint(path, kind, {}, metadata, {}, lambda name: pytest.fail(name))


@pytest.mark.parametrize(
    ("metadata", "licence"),
    [
        ({"general.license": "apache-2.0"}, "apache-2.0"),
        ({"general.license": "other", "general.license.name": "gemma terms"}, "gemma terms"),
        ({"general.license": ["mit", "apache-2.0"]}, "mit, apache-2.0"),
        ({"general.license": 7}, ""),
        ({}, ""),
    ],
)
def test_of_a_gguf_file(tmp_path: Path, metadata: dict[str, object], licence: str) -> None:
    (tmp_path / "LICENSE").write_text("Of the folder that the file happens to lie in")
    assert licence_of(checkpoint(tmp_path / "model.gguf", "gguf", metadata)) == licence


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: apache-2.0\nlanguage: [en]\n---\n# A model\n", "apache-2.0"),
        ("---\r\nlicense:\r\n- mit\r\n- apache-2.0\r\n---\r\n", "mit, apache-2.0"),
        ("---\nlicense: other\nlicense_name: qwen-research\n---\n", "qwen-research"),
        ("---\nlicense: other\n---\n", "other"),
        ("---\ntags: [a]\nlicense: mit\ntags: [b]\n---\n", "mit"),
        ("---\nlicense: mit\nlicense: apache-2.0\n---\n", "bsd"),  # which of the two?
        ("---\nlicense: [unclosed\n---\n", "bsd"),  # config.json names one
        ("---\n- a list\n---\n", "bsd"),
        ("# A model\n---\nlicense: mit\n---\n", "bsd"),  # no front matter
    ],
)
def test_of_a_folder_with_a_card(tmp_path: Path, card: str, licence: str) -> None:
    (tmp_path / "README.md").write_bytes(card.encode())
    (tmp_path / "LICENSE").write_text("MIT License")
    assert licence_of(checkpoint(tmp_path, "safetensors", {"license": "bsd"})) == licence
    assert licence_of(checkpoint(tmp_path / "model.safetensors", "safetensors", {"license": "bsd"})) == licence


def test_of_a_folder_with_its_text_alone(tmp_path: Path) -> None:
    assert licence_of(checkpoint(tmp_path, "safetensors", {})) == ""
    (tmp_path / "README.md").mkdir()
    (tmp_path / "LICENSE.txt").write_text("\n\n      LLAMA 3 COMMUNITY   LICENSE AGREEMENT\nof a day\n")
    assert licence_of(checkpoint(tmp_path, "safetensors", {})) == "LLAMA 3 COMMUNITY LICENSE AGREEMENT"
