"""The sampling that a model's files recommend."""

import json
import re
from types import SimpleNamespace

import pytest

from roofline.bundle.recommended import _UNUSED, recommended_sampling, warn_of_unused
from roofline.common.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20.0, "do_sample": True}, (0.6, 0.95, 20)),
        ({"temperature": None, "top_k": None, "eos_token_id": 2}, ()),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": 0}, (1.0, 1.0, 0)),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_p": 0, "top_k": 5}, {"temperature": 0.0}),
        ({"do_sample": False, "top_k": 5, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
    ],
)
def test_of_a_folder(tmp_path, config, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    if isinstance(expected, tuple):
        expected = dict(zip(("temperature", "top_p", "top_k"), expected, strict=False))
    assert recommended_sampling(SimpleNamespace(kind="safetensors", path=tmp_path)) == expected


def test_what_changes_transformers_answers_and_is_not_used_is_told(tmp_path, caplog):
    model = SimpleNamespace(kind="safetensors", path=tmp_path)
    path = tmp_path / "generation_config.json"
    neutral = {"no_repeat_ngram_size": 0, "suppress_tokens": [], "typical_p": 1.0, "num_beams": 1, "stop_strings": None}
    path.write_text(json.dumps(neutral | {"temperature": 0.5, "max_length": 20, "pad_token_id": 0}))
    warn_of_unused(model)
    assert not caplog.messages
    path.write_text(json.dumps({"no_repeat_ngram_size": 3, "forced_eos_token_id": 0, "suppress_tokens": [7]}))
    warn_of_unused(model)
    keys = "suppress_tokens, forced_eos_token_id, no_repeat_ngram_size"
    assert caplog.messages == [f"{path}: not used, though it changes transformers' answers: {keys}"]
    warn_of_unused(SimpleNamespace(kind="gguf", path="model.gguf"))


def test_the_keys_that_are_told_are_those_of_transformers():
    transformers = pytest.importorskip("transformers", reason="whose generation_config.json it is")
    known = transformers.GenerationConfig()
    for key, neutral in _UNUSED.items():
        assert getattr(known, key) in (None, neutral), key


def test_of_a_folder_without_the_file(tmp_path):
    assert recommended_sampling(SimpleNamespace(kind="safetensors", path=tmp_path)) == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "file: does not hold a JSON object"),
        ("{", "file: is not JSON"),
        ('{"temperature": NaN}', "temperature: is the number nan, not a finite number"),
        ('{"temperature": "hot"}', "temperature: is the string 'hot', not a number"),
        ('{"temperature": -1}', "temperature: is the number -1, not a number of at least 0"),
        ('{"top_p": 3}', "top_p: is the number 3, not a number from 0 to 1"),
        ('{"top_k": -5}', "top_k: is the number -5, not a whole number from 0"),
        ('{"top_k": 2.5}', "top_k: is the number 2.5, not a whole number from 0"),
        ('{"do_sample": "yes"}', "do_sample: is the string 'yes', not true or false"),
        ('{"do_sample": false, "min_p": true}', "min_p: is true, not a number"),
        ('{"repetition_penalty": 0}', "repetition_penalty: is the number 0, not a number above 0"),
    ],
)
def test_what_sampling_cannot_have_is_refused_with_file_and_key(tmp_path, text, problem):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/generation_config.json: {problem}")):
        recommended_sampling(SimpleNamespace(kind="safetensors", path=tmp_path))


def test_of_a_gguf_file_that_says_what_cannot_be():
    model = SimpleNamespace(kind="gguf", path="model.gguf", metadata={"general.sampling.top_p": 3.0})
    with pytest.raises(ConfigError, match=r"model\.gguf: general\.sampling\.top_p: is the number 3\.0, not a number"):
        recommended_sampling(model)


def test_of_a_gguf_file():
    metadata = {"general.sampling.temp": 0.2, "general.sampling.penalty_repeat": 1.05, "temperature": 3}
    expected = {"temperature": 0.2, "repetition_penalty": 1.05}
    assert recommended_sampling(SimpleNamespace(kind="gguf", path="model.gguf", metadata=metadata)) == expected
