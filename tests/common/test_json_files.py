"""Configurations of models as transformers writes them."""

import json
import math
from pathlib import Path

import pytest

from roofline.common.json_files import read_config_json


def test_numbers_that_json_has_no_word_for_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="it writes the file")
    limits = [0.0, math.inf]
    transformers.Mamba2Config(time_step_limit=limits).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    assert "__float__" in file.read_text()
    assert read_config_json(file)["time_step_limit"] == limits
    file.write_text(json.dumps({"inner": {"low": {"__float__": "-Infinity"}}, "other": {"__float__": "1"}}))
    assert read_config_json(file) == {"inner": {"low": -math.inf}, "other": {"__float__": "1"}}
