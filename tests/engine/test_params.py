"""SamplingParams and EngineConfig: refused values name their field; good ones are normalised and travel."""

import math

import msgspec
import numpy as np
import pytest
from engine_fakes import FakeExecutable

from roofline.backends.options import LoadOptions
from roofline.common.errors import CapacityError, ConfigError, RequestError
from roofline.common.options import declared
from roofline.engine import params as module
from roofline.engine.config import EngineConfig, resolve
from roofline.engine.constraint import Constraint
from roofline.engine.keywords import CONSTRAINT_NAMES
from roofline.engine.params import SamplingParams, fresh_seed
from roofline.engine.pooling import Pooling

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
    *(("logit_bias", {True: 1.0}), ("logit_bias", {5: True}), ("logit_bias", {5: "1"}), ("logit_bias", {5: 100.5})),
    *(("n", True), ("top_k", None), ("stop_token_ids", [True]), ("stop_token_ids", [1.0]), ("stop_token_ids", 3)),
    *(("stop", ["a", ""]), ("logit_bias", [(1, 2, 3)]), ("repetition_penalty", math.inf)),
    *(("repetition_penalty", 1e-38), ("repetition_penalty", 9e-10), ("repetition_penalty", 1.1e9)),
    *(("top_k", 2**31), ("max_tokens", 2**31), ("min_tokens", 2**31)),
    *(("prompt_logprobs", -1), ("prompt_logprobs", 21), ("prompt_logprobs", 1.0), ("pooling", "mean")),
    *(("prompt_progress", 1), ("digests", 1), ("ignore_eos", None)),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("logit_bias", {5: -100.5}),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("seed", 0.5),
    ("logprobs", 21),
    ("logprobs", -1),
    ("n", 0),
    ("n", 129),
    ("max_tokens", -1),
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


# The ends of what is allowed; the values just beyond them are in BAD.
GOOD = [
    *(("temperature", 0.0), ("temperature", 2.5), ("top_p", 1e-9), ("top_p", 1.0), ("min_p", 0.0), ("min_p", 1.0)),
    *(
        ("top_k", 0),
        ("top_k", -1),
        ("repetition_penalty", 1e-9),
        ("repetition_penalty", 1e9),
        ("presence_penalty", 2.0),
        ("presence_penalty", -2.0),
    ),
    *(("repetition_penalty", 1e-9), ("repetition_penalty", 1e9)),
    *(("frequency_penalty", 2.0), ("frequency_penalty", -2.0), ("logit_bias", {5: 100.0}), ("logit_bias", {0: -100.0})),
    *(
        ("seed", -(2**63)),
        ("seed", 2**64 - 1),
        ("logprobs", 0),
        ("logprobs", 20),
        ("n", 1),
        ("n", 128),
        ("max_tokens", 0),
    ),
    *(("min_tokens", 0), ("stop_token_ids", [0]), ("prompt_logprobs", 0), ("prompt_logprobs", 20)),
    *(("top_k", 2**31 - 1), ("max_tokens", 2**31 - 1), ("min_tokens", 2**31 - 1)),  # int32 on the way to a kernel
]


@pytest.mark.parametrize(("field", "value"), GOOD)
def test_the_last_value_of_a_range_is_taken(field, value):
    assert getattr(SamplingParams(**{field: value}), field) is not None


def test_bounds_that_documents_and_flags_show_are_those_that_hold():
    """top_p is more than its least; -1 is another way to say that top_k is 0."""
    bounded = {name: option for name, option in declared(SamplingParams).items() if option.minimum is not None}
    assert len(bounded) == 9
    for name, option in bounded.items():
        taken = [option.maximum] if option.maximum is not None else []
        refused = [] if option.maximum is None else [option.maximum + 1]
        if name == "top_p":
            refused.append(option.minimum)
        else:
            taken.append(option.minimum)
            refused.append(option.minimum - (2 if name == "top_k" else 1))
        for value in taken:
            SamplingParams(**{name: value})
        for value in refused:
            with pytest.raises(RequestError, match=name):
                SamplingParams(**{name: value})


def test_a_bound_is_said_as_it_is():
    for field, value, message in (
        ("temperature", -1.0, "temperature: -1.0 must be at least 0"),
        ("top_p", 0, "top_p: 0 must be more than 0 and at most 1"),
        ("repetition_penalty", 1e-38, "repetition_penalty: 1e-38 must be at least 1e-09 and at most 1e+09"),
        ("min_p", 2.0, "min_p: 2.0 must be at least 0 and at most 1"),
        ("n", 129, "n: 129 must be from 1 to 128"),
    ):
        with pytest.raises(RequestError) as refused:
            SamplingParams(**{field: value})
        assert str(refused.value) == message


def test_what_nobody_sets_changes_no_distribution_and_ends_nothing():
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": (), "seed": None, "logprobs": None}
    neutral |= {"prompt_logprobs": None}
    neutral |= {"n": 1, "max_tokens": None, "min_tokens": 0, "stop": (), "stop_token_ids": (), "ignore_eos": False}
    neutral |= dict.fromkeys(("constraint", "pooling", *CONSTRAINT_NAMES))
    neutral |= {"prompt_progress": False, "digests": False}
    assert vars(SamplingParams()) == neutral


def test_history_is_kept_for_any_penalty_and_for_none_else():
    assert not SamplingParams(temperature=0.5, top_k=3, seed=1).uses_history
    for field in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{field: 0.5}).uses_history


def test_as_many_tokens_at_least_as_at_most():
    params = SamplingParams(max_tokens=3, min_tokens=3)
    assert (params.max_tokens, params.min_tokens) == (3, 3)


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(RequestError) as caught:
        SamplingParams(max_tokens=3, min_tokens=4)
    assert caught.value.param == "min_tokens"


def test_values_are_normalised_and_survive_messagepack():
    params = SamplingParams(logit_bias={7: 1, 3: -2.5}, stop="end", stop_token_ids=[4, 5], seed=2**64 - 1)
    assert params.logit_bias == ((3, -2.5), (7, 1.0))
    assert (params.stop, params.stop_token_ids) == (("end",), (4, 5))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_scalars_of_numpy_are_plain_numbers():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(-1), n=np.array(3), ignore_eos=np.bool_(True))
    assert (params.temperature, params.top_k, params.n, params.ignore_eos) == (0.5, 0, 3, True)
    assert [type(getattr(params, name)) for name in ("temperature", "top_k", "n", "ignore_eos")] == [
        *(float, int, int, bool),
    ]
    with pytest.raises(RequestError, match="stop_token_ids: "):
        SamplingParams(stop_token_ids=np.array([4, 5]))

    class Scalar:  # torch's have no ndim but as a property, others none at all
        def item(self):
            return 0.25

    assert SamplingParams(temperature=Scalar()).temperature == 0.25
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams(temperature=np.array([0.5]))


def test_any_name_of_the_form_sets_it_alone():
    regex = Constraint.of_regex("a+")
    for params in (SamplingParams(guided_regex="a+"), SamplingParams(constraint=regex)):
        assert params.constraint == regex
        assert [getattr(params, name) for name in CONSTRAINT_NAMES] == [None] * len(CONSTRAINT_NAMES)


ABOUT_ANSWERS = {
    "n": (1, 2),
    "constraint": (None, Constraint.of_regex("a")),
    "logprobs": (None, 0),
    "prompt_logprobs": (None, 0),
    "digests": (False, True),
    "stop": ((), ("a",)),
    "stop_token_ids": ((), (1,)),
    "logit_bias": ((), {1: 1.0}),
}


@pytest.mark.parametrize("field", ABOUT_ANSWERS)
def test_with_a_pooling_goes_nothing_that_is_about_an_answer(field):
    neutral, asks = ABOUT_ANSWERS[field]
    assert SamplingParams(pooling=Pooling("mean"), **{field: neutral}).pooling == Pooling("mean")
    with pytest.raises(RequestError, match=f"{field}: is about an answer") as refused:
        SamplingParams(pooling=Pooling("mean"), **{field: asks})
    assert (refused.value.status, refused.value.param) == (400, field)


def test_a_fresh_seed_has_53_random_bits(monkeypatch):
    read = []
    monkeypatch.setattr(module.os, "urandom", lambda count: read.append(count) or b"\xff" * count)
    assert (fresh_seed(), read) == (2**53 - 1, [8])
    monkeypatch.setattr(module.os, "urandom", lambda count: bytes([0, 0x08, *[0] * (count - 2)]))
    assert fresh_seed() == 1, "the lowest eleven bits are left out"


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_batch_tokens", 0), ("max_running", 1.5), ("max_model_len", 0), ("scheduler", "x"), ("cache", "x")],
)
def test_a_bad_setting_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [
        ("record_megabytes", 1, 8192),
        ("speculate_tokens", 1, 15),
        ("max_adapters", 0, None),
        ("max_batch_tokens", 1, None),
    ],
)
def test_a_setting_is_taken_up_to_its_documented_bounds(field, least, most):
    for value in (least, most or least):
        assert getattr(EngineConfig(**{field: value}), field) == value
    for value in (least - 1, *([most + 1] if most else [])):
        with pytest.raises(ConfigError, match=field):
            EngineConfig(**{field: value})


def test_what_nobody_sets_of_an_engine():
    assert vars(EngineConfig()) == {
        **dict.fromkeys(("max_batch_tokens", "max_running", "max_model_len", "long_prompt_tokens")),
        **dict.fromkeys(("prefix_cache", "overlap", "measure"), True),
        **{"scheduler": "continuous", "cache": "paged"},
        **{"speculate": "off", "speculate_tokens": 4, "speculate_always": False},
        "cache_file": None,
        **{"record": None, "record_ids": False, "record_megabytes": 256},
        **{"max_adapters": None, "adapter_bytes": 4 << 30},
    }
    assert [EngineConfig(speculate_tokens=tokens).speculate_tokens for tokens in (1, 15)] == [1, 15]


def test_a_model_is_loaded_with_room_for_the_drafts_of_its_engine():
    load = LoadOptions(threads=2)
    assert EngineConfig(speculate_tokens=3).prepare_load(load) is load
    config = EngineConfig(speculate="ngram", speculate_tokens=3)
    assert config.prepare_load(load) == LoadOptions(threads=2, draft_tokens=3)
    assert config.prepare_load(LoadOptions(draft_tokens=5)).draft_tokens == 5


def test_settings_are_fitted_to_the_executable():
    executable = FakeExecutable(num_pages=10, max_context=512, tokens=64, segments=16)
    limits = resolve(EngineConfig(), executable)
    assert (limits.tokens, limits.sequences, limits.max_model_len) == (64, 16, 160)
    assert resolve(EngineConfig(max_batch_tokens=8), executable).sequences == 8
    assert resolve(EngineConfig(max_batch_tokens=8, scheduler="naive"), executable).tokens == 64
    assert resolve(EngineConfig(max_model_len=160), executable).max_model_len == 160
    assert resolve(EngineConfig(max_model_len=159), executable).max_model_len == 159
    short = FakeExecutable(num_pages=10, max_context=100, tokens=64, segments=16, rows=7, table_pages=6)
    limits = resolve(EngineConfig(max_model_len=96), short)
    assert (limits.sequences, limits.rows, limits.table_pages, limits.max_model_len) == (7, 7, 6, 96)
    assert resolve(EngineConfig(max_model_len=100), FakeExecutable(num_pages=10, max_context=100)).max_model_len == 100
    assert resolve(EngineConfig(max_running=5, max_batch_tokens=65), executable).sequences == 5
    larger = resolve(EngineConfig(), FakeExecutable(num_pages=10, max_context=512, tokens=2048, segments=256))
    assert (larger.tokens, larger.sequences) == (2048, 256), "whatever the executable was loaded for"
    with pytest.raises(ConfigError, match="512 positions"):
        resolve(EngineConfig(max_model_len=513), executable)
    with pytest.raises(CapacityError, match="needs 161 tokens of cache, 160 are available"):
        resolve(EngineConfig(max_model_len=161), executable)


def test_other_names_of_the_form_are_not_shown():
    """They are None once the constraint is set."""
    for params in (SamplingParams(), SamplingParams(guided_regex="a")):
        assert not [name for name in CONSTRAINT_NAMES if name in repr(params)]
        assert "constraint=" in repr(params)
