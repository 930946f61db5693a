"""SamplingParams and EngineConfig: refused values name their field; good ones are normalised and travel."""

import math

import msgspec
import pytest
from engine_fakes import FakeExecutable

from roofline.common.errors import CapacityError, ConfigError, RequestError
from roofline.engine.config import EngineConfig, resolve
from roofline.engine.params import SamplingParams

BAD = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "1"),
    ("temperature", True),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("repetition_penalty", 0.0),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("logit_bias", {5: 101.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"5": 1.0}),
    ("logit_bias", 3),
    ("logit_bias", [(1, 1.0), (1, 2.0)]),
    ("seed", 2**64),
    ("seed", 0.5),
    ("logprobs", 21),
    ("logprobs", -1),
    ("n", 0),
    ("n", 129),
    ("max_tokens", 0),
    ("min_tokens", -1),
    ("stop", [""]),
    ("stop", [3]),
    ("stop", 3),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", "12"),
    ("ignore_eos", 1),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert (caught.value.status, caught.value.param) == (400, field)


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(RequestError) as caught:
        SamplingParams(max_tokens=3, min_tokens=4)
    assert caught.value.param == "min_tokens"


def test_values_are_normalised_and_survive_messagepack():
    params = SamplingParams(logit_bias={7: 1, 3: -2.5}, stop="end", stop_token_ids=[4, 5], seed=2**64 - 1)
    assert params.logit_bias == ((3, -2.5), (7, 1.0))
    assert (params.stop, params.stop_token_ids) == (("end",), (4, 5))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_batch_tokens", 0), ("max_running", 1.5), ("max_model_len", 0), ("scheduler", "x"), ("cache", "x")],
)
def test_a_bad_setting_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{field: value})


def test_settings_are_fitted_to_the_executable():
    executable = FakeExecutable(num_pages=10, max_context=512, tokens=64, segments=16)
    limits = resolve(EngineConfig(), executable)
    assert (limits.tokens, limits.sequences, limits.max_model_len) == (64, 16, 160)
    assert resolve(EngineConfig(max_batch_tokens=8), executable).sequences == 8
    assert resolve(EngineConfig(max_running=5, max_batch_tokens=65), executable).sequences == 5
    larger = resolve(EngineConfig(), FakeExecutable(num_pages=10, max_context=512, tokens=2048, segments=256))
    assert (larger.tokens, larger.sequences) == (2048, 256), "whatever the executable was loaded for"
    with pytest.raises(ConfigError, match="512 positions"):
        resolve(EngineConfig(max_model_len=513), executable)
    with pytest.raises(CapacityError, match="needs 161 tokens of cache, 160 are available"):
        resolve(EngineConfig(max_model_len=161), executable)
